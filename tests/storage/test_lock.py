"""One job at a time, named to the next; a dead job locks nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from infinity.errors import LockError
from infinity.storage.lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from infinity.storage.lock import RunLock
lock = RunLock(Path(sys.argv[1]), int(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path):
    """Another process that holds the lock of a rank."""
    running: list[subprocess.Popen[str]] = []

    def start(rank: int = 0) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), str(rank)], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_a_held_lock_names_pid_host_and_since_when(tmp_path, hold):
    holder = hold()
    with pytest.raises(LockError, match=rf"pid {holder.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-"):
        RunLock(tmp_path)


def test_a_lock_dies_with_its_process(tmp_path, hold):
    holder = hold()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    RunLock(tmp_path).close()


def test_a_second_store_in_one_process_is_refused_and_does_not_break_the_first(tmp_path, hold):
    first = RunLock(tmp_path)
    with pytest.raises(LockError, match=f"this process .pid {os.getpid()}"):
        RunLock(tmp_path)
    probe = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path), "0"], capture_output=True, text=True)
    assert f"pid {os.getpid()}" in probe.stderr and "LockError" in probe.stderr
    first.close()
    first.close()
    hold()


def test_ranks_of_one_job_hold_different_lines(tmp_path, hold):
    holder = hold(rank=1)
    mine = RunLock(tmp_path, rank=0)
    with pytest.raises(LockError, match=f"pid {holder.pid}"):
        RunLock(tmp_path, rank=1)
    mine.close()
