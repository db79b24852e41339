"""Ctrl-C: once is a request, twice is the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from infinity.cli.interrupt import INTERRUPTED, Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
    assert signal.getsignal(number) is before


def test_the_second_signal_ends_the_process_at_once():
    program = (
        "import os, signal\n"
        "from infinity.cli.interrupt import Interrupt\n"
        "with Interrupt():\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == INTERRUPTED
    assert "still here" not in done.stdout
    assert "stopping after this step" in done.stderr and "aborted" in done.stderr
