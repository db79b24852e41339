"""What the kernel grants the I/O engine: asynchronous I/O, contexts for it, and buffers on 2 MiB pages."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from infinity import native
from infinity.config import Config
from infinity.doctor.finding import Finding, failure, ok, warning
from infinity.doctor.system import System, read_field, read_number, read_text
from infinity.errors import CapacityError, StorageError
from infinity.sizes import KiB, MiB, format_bytes

AIO = "kernel AIO"
AIO_LIMIT = "fs.aio-max-nr"
HUGE_PAGES = "huge pages"

USUAL_AIO_LIMIT = 1 << 20
"""What database vendors have people set; an entry costs kernel memory only once a context has been made with it."""

AMPLE = 10
"""Other jobs, and contexts of a run that has just ended and that the kernel has not freed yet, draw on the same limit."""


def asked_entries(config: Config) -> int:
    """Entries that one engine asks of fs.aio-max-nr: one context of queue_depth entries for each reader and writer of each path."""
    nvme = config.nvme
    return len(nvme.paths) * (nvme.readers + nvme.writers) * nvme.queue_depth


def check_aio(config: Config) -> Finding:
    """Open the I/O engine of one path as a run would, by io_setup(2).

    A warning where the kernel refuses: the engine then goes on with pread(2) and pwrite(2), a thread for each transfer.
    ENOSYS means a kernel without CONFIG_AIO or a sandbox, EPERM a seccomp filter (seccomp(2)), EAGAIN that fs.aio-max-nr is used up.
    """
    nvme, binding = config.nvme, native.available_backends()[0]
    try:
        native.Aio(block_bytes=nvme.block_size, queue_depth=nvme.queue_depth, readers=nvme.readers, writers=nvme.writers, backend=binding).close()
    except StorageError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        found = f"io_setup(2) is refused ({name}): transfers go through pread and pwrite on threads, with less in flight"
        if error.errno == errno.EAGAIN:
            return warning(AIO, found, f"raise fs.aio-max-nr: sudo sysctl -w fs.aio-max-nr={USUAL_AIO_LIMIT}")
        calls = "io_setup, io_submit, io_getevents and io_destroy"
        way_out = f"allow {calls} in the container's seccomp profile (docker run --security-opt seccomp=FILE), or boot a kernel with CONFIG_AIO"
        return warning(AIO, found, way_out)
    return ok(AIO, "through libaio" if binding == "libaio" else "through its system calls; libaio is not installed and not needed")


def check_aio_limit(system: System, config: Config) -> Finding:
    """Entries that are free against those that a run takes: /proc/sys/fs/aio-nr and aio-max-nr, whole machine.

    Source: io_setup(2), EAGAIN, and Documentation/admin-guide/sysctl/fs.rst: aio-nr is the sum of the entries named in io_setup
    over all active contexts. Fewer free than one engine asks for is a failure, fewer than ten times that a warning.
    """
    folder = system.proc / "sys" / "fs"
    limit, used = read_number(folder / "aio-max-nr"), read_number(folder / "aio-nr")
    if limit is None or used is None:
        return warning(AIO_LIMIT, f"{folder}/aio-max-nr cannot be read", "boot a kernel with CONFIG_AIO, or mount proc: mount -t proc proc /proc")
    free, asked = max(0, limit - used), asked_entries(config)
    found = f"{used} of {limit} in use, {free} free; one run asks for {asked}"
    wanted = max(USUAL_AIO_LIMIT, used + AMPLE * asked)
    way_out = f"sudo sysctl -w fs.aio-max-nr={wanted}, and the same line in /etc/sysctl.d; or lower nvme.queue_depth"
    if free < asked:
        return failure(AIO_LIMIT, found, way_out)
    return warning(AIO_LIMIT, found, way_out) if free < AMPLE * asked else ok(AIO_LIMIT, found)


_TRIED_BYTES = 8 * MiB


def check_huge_pages(system: System) -> Finding:
    """Whether the engine's buffers come on 2 MiB pages: the mode, and a mapping that was made to see.

    A request over 4 KiB pages splits into more segments than drives take at once: 2 to 3 times slower reads were measured
    (bench/results). Source: Documentation/admin-guide/mm/transhuge.rst; PR_SET_THP_DISABLE, prctl(2); AnonHugePages, proc_pid_smaps(5).
    """
    folder = system.sys / "kernel" / "mm" / "transparent_hugepage"
    mode = _mode(folder / "hugepages-2048kB" / "enabled")
    if mode in ("", "inherit"):
        mode = _mode(folder / "enabled")
    slow = "buffers lie on 4 KiB pages, which makes disk requests 2 to 3 times slower"
    if not mode:
        return warning(HUGE_PAGES, f"this kernel has none: {slow}", "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE")
    if mode == "never":
        return warning(HUGE_PAGES, f"never: {slow}", f"echo madvise | sudo tee {folder}/enabled; at boot: transparent_hugepage=madvise")
    if read_field(system.proc / "self" / "status", "THP_enabled") == "0":
        way_out = "start the run without prctl(PR_SET_THP_DISABLE): look at the launcher, or MemoryTHP= of its systemd unit"
        return warning(HUGE_PAGES, f"{mode}, but switched off for this process: {slow}", way_out)
    return _tried(system, mode, slow)


def _mode(file: Path) -> str:
    """`always [madvise] never` -> madvise."""
    found = re.search(r"\[(\w+)\]", read_text(file))
    return found[1] if found else ""


def _tried(system: System, mode: str, slow: str) -> Finding:
    """Half of what was mapped has to be there: other threads of the process map and free pages too."""
    before = _huge_bytes(system)
    if before is None:
        return ok(HUGE_PAGES, f"{mode}; this kernel does not tell which buffers have them")
    try:
        mapping = native.Mapping(_TRIED_BYTES, threads=1)
    except CapacityError as error:
        return failure(HUGE_PAGES, f"{mode}, but {error}", "free memory, or raise the limit: see `memory`")
    granted = (_huge_bytes(system) or 0) - before
    del mapping
    told = f"{mode}; {format_bytes(min(_TRIED_BYTES, max(0, granted)))} of {format_bytes(_TRIED_BYTES)} came on 2 MiB pages"
    if granted < _TRIED_BYTES // 2:
        return warning(HUGE_PAGES, f"{told}: {slow}", "memory is fragmented or scarce: echo 1 | sudo tee /proc/sys/vm/compact_memory")
    return ok(HUGE_PAGES, told)


def _huge_bytes(system: System) -> int | None:
    """Anonymous memory of this process on huge pages: `AnonHugePages: 2048 kB`. None before Linux 4.14."""
    words = read_field(system.proc / "self" / "smaps_rollup", "AnonHugePages").split()
    return int(words[0]) * KiB if words else None
