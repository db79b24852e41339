"""Asynchronous I/O and huge pages: the limits are arithmetic, and what the engine would open is opened."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity import native
from infinity.config import load_config
from infinity.doctor import kernel
from infinity.doctor.finding import Status
from infinity.doctor.system import System
from infinity.errors import StorageError

AIO = {"paths": ["/a", "/b"], "readers": 2, "writers": 1, "queue_depth": 50}
ASKED = 2 * (2 + 1) * 50


@pytest.mark.parametrize(
    ("free", "status"),
    [(ASKED - 1, "failure"), (ASKED, "warning"), (10 * ASKED - 1, "warning"), (10 * ASKED, "ok")],
)
def test_entries_below_one_run_fail_and_below_ten_warn(machine, free, status):
    system = machine({"proc/sys/fs/aio-max-nr": 65536, "proc/sys/fs/aio-nr": 65536 - free})
    found = kernel.check_aio_limit(system, load_config({"nvme": AIO}))
    assert found.status == status
    assert f"{free} free; one run asks for {ASKED}" in found.found
    if status != "ok":
        assert "sysctl -w fs.aio-max-nr=1048576" in found.way_out and "nvme.queue_depth" in found.way_out


def test_the_way_out_is_a_limit_that_is_large_enough(machine):
    used = (1 << 20) - 5
    system = machine({"proc/sys/fs/aio-max-nr": 1 << 20, "proc/sys/fs/aio-nr": used})
    assert f"fs.aio-max-nr={used + 10 * ASKED}," in kernel.check_aio_limit(system, load_config({"nvme": AIO})).way_out


def entries(name: str) -> int:
    return int(Path("/proc/sys/fs", name).read_text())


@pytest.mark.skipif(not os.access("/proc/sys/fs/aio-nr", os.R_OK), reason="this kernel does not count its AIO contexts")
def test_what_a_run_asks_for_is_what_its_engines_take():
    """The kernel's own count goes up by just the entries that the doctor has computed."""
    if entries("aio-nr") + ASKED > entries("aio-max-nr"):
        pytest.skip("the machine has no contexts left")
    config = load_config({"nvme": AIO})
    taken = set()
    for _ in range(20):  # others on this machine open and close contexts too, and closed ones go a little later
        before = entries("aio-nr")
        engines = [native.Aio(block_bytes=4096, queue_depth=50, readers=2, writers=1) for _ in config.nvme.paths]
        taken.add(entries("aio-nr") - before)
        for engine in engines:
            engine.close()
    assert kernel.asked_entries(config) in taken


def test_without_a_path_nothing_is_asked_for(machine):
    system = machine({"proc/sys/fs/aio-max-nr": 1, "proc/sys/fs/aio-nr": 1})
    assert kernel.check_aio_limit(system, load_config({})).status is Status.OK


def test_a_kernel_that_does_not_count_is_a_warning(machine):
    found = kernel.check_aio_limit(machine({}), load_config({"nvme": AIO}))
    assert found.status is Status.WARNING and "CONFIG_AIO" in found.way_out


def test_the_binding_is_one_that_opens_here():
    found = kernel.check_aio(load_config({"nvme": {"paths": ["/a"]}}))
    assert found.status is Status.OK
    assert ("through libaio" == found.found) == ("libaio" in native.available_backends())


@pytest.mark.parametrize(("code", "way_out"), [(errno.ENOSYS, "seccomp"), (errno.EPERM, "seccomp"), (errno.EAGAIN, "fs.aio-max-nr")])
def test_a_refused_context_is_a_warning_that_names_the_call(monkeypatch, code, way_out):
    def refuse(**_: object) -> None:
        raise StorageError(code, "kernel AIO")

    monkeypatch.setattr(native, "Aio", refuse)
    found = kernel.check_aio(load_config({}))
    assert found.status is Status.WARNING
    assert f"io_setup(2) is refused ({errno.errorcode[code]})" in found.found and way_out in found.way_out


THP = "sys/kernel/mm/transparent_hugepage"
ROLLUP = {"proc/self/smaps_rollup": "AnonHugePages:      0 kB"}


@pytest.mark.parametrize(
    ("files", "status", "told"),
    [
        ({}, "warning", "CONFIG_TRANSPARENT_HUGEPAGE"),
        ({f"{THP}/enabled": "always madvise [never]"}, "warning", "echo madvise | sudo tee"),
        ({f"{THP}/enabled": "[always] madvise never", f"{THP}/hugepages-2048kB/enabled": "always inherit madvise [never]"}, "warning", "tee"),
        ({f"{THP}/enabled": "always [madvise] never", "proc/self/status": "Name:\tpython\nTHP_enabled:\t0"}, "warning", "PR_SET_THP_DISABLE"),
        ({f"{THP}/enabled": "always [madvise] never"}, "ok", "does not tell"),
        ({f"{THP}/enabled": "always madvise [never]", f"{THP}/hugepages-2048kB/enabled": "[always] inherit madvise never"}, "ok", "always;"),
        ({f"{THP}/enabled": "[always] madvise never", **ROLLUP}, "warning", "compact_memory"),
    ],
)
def test_the_mode_of_huge_pages_and_what_a_mapping_got(machine, files, status, told):
    found = kernel.check_huge_pages(machine(files))
    assert found.status == status
    assert told in f"{found.found} {found.way_out}"


def test_a_mapping_of_this_machine_is_seen_on_its_huge_pages():
    mode = kernel._mode(System().sys / "kernel" / "mm" / "transparent_hugepage" / "enabled")
    if mode not in ("always", "madvise") or not os.access("/proc/self/smaps_rollup", os.R_OK):
        pytest.skip(f"huge pages are {mode or 'not there'}, or nobody tells of them")
    found = kernel.check_huge_pages(System())
    assert found.found.startswith(f"{mode}; ") and "of 8.00 MiB came on 2 MiB pages" in found.found


# ---- real conditions, each in a child of its own ----


def told_in_child(before_exec: Callable[[], None], program: str) -> str:
    setup = "from infinity.config import load_config; from infinity.doctor import kernel; from infinity.doctor.system import System;"
    command = [sys.executable, "-c", setup + program]
    return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=before_exec).stdout


PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 22, 38, 41  # prctl(2)
SYS_IO_SETUP = 206  # x86_64
LIBC = ctypes.CDLL(None, use_errno=True)


def refuse_io_setup() -> None:
    """A seccomp filter as sandboxes have: load the call's number, EPERM for io_setup, allow the rest (seccomp(2))."""
    words = [(0x20, 0, 0, 0), (0x15, 0, 1, SYS_IO_SETUP), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *word) for word in words))
    program = struct.pack("=H6xQ", len(words), ctypes.addressof(code))
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86_64")
def test_a_sandbox_that_forbids_io_setup_is_a_warning_and_direct_io_still_works(tmp_path):
    program = (
        "from infinity.doctor.trial import try_direct_io; from pathlib import Path;"
        f"print(kernel.check_aio(load_config({{}}))); print(try_direct_io(Path({str(tmp_path)!r})))"
    )
    try:
        aio, trial = told_in_child(refuse_io_setup, program).splitlines()
    except subprocess.SubprocessError:
        pytest.skip("no seccomp filter can be set here")
    assert "Status.WARNING" in aio and "io_setup(2) is refused (EPERM)" in aio
    assert "backend='threads', error=0" in trial


def test_a_launcher_that_switched_huge_pages_off_is_a_warning():
    if kernel._mode(System().sys / "kernel" / "mm" / "transparent_hugepage" / "enabled") not in ("always", "madvise"):
        pytest.skip("huge pages are off for everybody")

    def switch_off() -> None:
        LIBC.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

    told = told_in_child(switch_off, "print(kernel.check_huge_pages(System()))")
    assert "Status.WARNING" in told and "PR_SET_THP_DISABLE" in told
