"""Disks of a known speed: ext4 on loop devices that a blkio cgroup (version 1) throttles, for the processes that enter it. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")
_LIMITS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


class NotPermittedError(Exception):
    """No such disk can be made here; the text says why."""


@contextmanager
def loop_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A new file system of `nbytes` mounted at `folder`/disk."""
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(nbytes)
    make = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
    if make is None or subprocess.run([make, "-q", "-E", "lazy_itable_init=0", str(image)], capture_output=True).returncode:
        raise NotPermittedError("no mkfs.ext4 here")
    if subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True).returncode:
        raise NotPermittedError("no loop device can be mounted here")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
        image.unlink()


@contextmanager
def throttled_disks(folder: Path, rates: Mapping[str, int], nbytes: int) -> Iterator[tuple[list[Path], Path]]:
    """(mount points, the cgroup's list of processes): disks by name, each way as many bytes per second as `rates` says for whoever is in the list.

    Whoever has entered is moved back to the root group at the end. Raises NotPermittedError.
    """
    with ExitStack() as stack:
        points = [stack.enter_context(loop_disk(folder / name, nbytes)) for name in rates]
        group = BLKIO / f"infinity-{os.getpid()}"
        try:
            group.mkdir()
            stack.callback(group.rmdir)
            for point, rate in zip(points, rates.values(), strict=True):
                device = os.stat(point).st_dev
                for limit in _LIMITS:
                    (group / limit).write_text(f"{os.major(device)}:{os.minor(device)} {rate}")
        except OSError as error:
            raise NotPermittedError(f"no blkio cgroup can be made here: {error}") from error
        stack.callback(_leave, group)
        yield points, group / "cgroup.procs"


def _leave(group: Path) -> None:
    for process in (group / "cgroup.procs").read_text().split():
        (BLKIO / "cgroup.procs").write_text(process)
