"""What each NVMe path is: file system, drive, direct I/O, room."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infinity.config import Config
from infinity.config.schema import NvmePath
from infinity.doctor.drive import Drive, find_drive
from infinity.doctor.finding import Finding, failure, ok, warning
from infinity.doctor.system import System, read_text
from infinity.doctor.trial import DEADLINE_S, try_direct_io
from infinity.doctor.wear import check_wear
from infinity.errors import ConfigError, StorageError
from infinity.sizes import MIN_FILE_BYTES, format_bytes
from infinity.storage.probe import PathFacts, check_path
from infinity.storage.rundir import run_files

DIRECTORY = "directory"
FILE_SYSTEM = "file system"
DRIVE = "drive"
DIRECT_IO = "direct I/O"
SPACE = "free space"
SHARED = "drives"

_ELSEWHERE = "name a directory on a local drive with ext4 or xfs in nvme.paths"

_COPYING = {"btrfs", "zfs", "bcachefs"}
"""They write changed blocks elsewhere and checksum them: overwriting in place, all that a run does, fragments its files."""

_BYTES_PER_ELEMENT = {"fp32": 20, "bf16": 16, "fp16": 16}
"""Parameter and gradient in their dtype, master and two moments in fp32: the most a run keeps on NVMe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A path that could be looked at."""

    path: Path
    facts: PathFacts
    drive: Drive | None


def look(config: Config, system: System) -> tuple[list[Place], list[Finding]]:
    """The paths that exist, and a failure for each that cannot be used (access(2), statvfs(3))."""
    places, findings = [], []
    for entry in config.nvme.paths:
        path = Path(entry.path)
        try:
            found = check_path(path)
        except (ConfigError, OSError) as error:
            findings.append(failure(DIRECTORY, str(error), _way_to(path, error), entry.path))
            continue
        places.append(Place(path=path, facts=found, drive=find_drive(path, found.device, system)))
    return places, findings


def _way_to(path: Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return f"namei -l {path} shows which directory on the way this user may not enter: sudo chmod o+x DIRECTORY; or change nvme.paths"
    if not path.exists():
        return f"mkdir -p {path}, and mount the drive there; or change nvme.paths"
    if not path.is_dir() or os.access(path, os.W_OK):
        return _ELSEWHERE
    return f"ls -ld {path}; sudo chown $USER {path}; where it is mounted read-only: sudo mount -o remount,rw {path}"


def check_place(place: Place, config: Config) -> Iterator[Finding]:
    """All about one path."""
    entry = next(entry for entry in config.nvme.paths if entry.path == str(place.path))
    yield check_file_system(place)
    yield check_drive(place)
    for leaf in place.drive.leaves if place.drive else ():
        if worn := check_wear(leaf, str(place.path)):
            yield worn
    yield check_direct_io(place)
    yield check_space(place, entry, config)


def check_file_system(place: Place) -> Finding:
    """statfs(2). Memory, networks, overlays and file systems that copy on write are warnings: what each does to a run differs."""
    path, name = str(place.path), place.facts.file_system
    if place.facts.is_memory:
        return warning(FILE_SYSTEM, f"{name}: memory, not a disk; what lives there counts against CPU memory", _ELSEWHERE, path)
    if place.facts.is_network:
        return warning(FILE_SYSTEM, f"{name}: a network or user-space file system, whose latency is in every step", _ELSEWHERE, path)
    if place.facts.is_overlay:
        way_out = f"mount a real directory there: docker run -v /mnt/nvme0:{path}"
        return warning(FILE_SYSTEM, f"{name}: a container's layers, where direct I/O is slow or refused", way_out, path)
    if name in _COPYING:
        way_out = f"chattr +C {path} before the first run" if name == "btrfs" else _ELSEWHERE
        return warning(FILE_SYSTEM, f"{name}: copies on write and checksums, so that overwriting in place gets slower with every step", way_out, path)
    return ok(FILE_SYSTEM, name, path)


def check_drive(place: Place) -> Finding:
    """sysfs, Documentation/ABI/stable/sysfs-block. What is an order of magnitude slower than an NVMe drive is a warning, and a loop device
    that goes through the page cache, losetup(8)."""
    path, drive = str(place.path), place.drive
    if drive is None:
        return ok(DRIVE, f"no block device below ({place.facts.device})", path)
    kinds = {leaf.kind for leaf in drive.leaves}
    if slow := kinds & {"rotating disk", "USB disk", "flash card", "network block device"}:
        found = f"{drive.describe()}: a {sorted(slow)[0]} holds up every step"
        return warning(DRIVE, found, "name a directory on an NVMe drive in nvme.paths (lsblk -d -o NAME,ROTA,TRAN,MODEL shows which are)", path)
    if uncached := [leaf.name for leaf in drive.leaves if read_text(leaf.folder / "loop" / "dio") == "0"]:
        found = f"{drive.describe()}: the file below is cached in memory once more"
        return warning(DRIVE, found, f"sudo losetup --direct-io=on /dev/{uncached[0]}", path)
    if "memory" in kinds:
        return warning(DRIVE, f"{drive.describe()}: memory, not a disk", "name a directory on an NVMe drive in nvme.paths", path)
    return ok(DRIVE, drive.describe(), path)


def check_direct_io(place: Place) -> Finding:
    """O_DIRECT, open(2), tried with one sector; its alignment by statx(2), STATX_DIOALIGN.

    Without it bytes pass through the page cache: a warning. A transfer that fails is a failure.
    """
    path, align = str(place.path), place.facts.direct_io_align
    try:
        trial = try_direct_io(place.path)
    except StorageError as error:
        found = f"no file can be made: {os.strerror(error.errno or 0)}"
        return failure(DIRECT_IO, found, f"look at quotas and rights: quota -s; ls -ld {path}", path)
    if trial.error in (errno.ENOSPC, errno.EDQUOT):
        return failure(DIRECT_IO, f"not tried: {os.strerror(trial.error)}", f"free some: du -xh {path} | sort -h; quota -s", path)
    if trial.error:
        name = f"no answer in {DEADLINE_S:.0f} s" if trial.error == errno.ETIMEDOUT else os.strerror(trial.error)
        return failure(DIRECT_IO, f"4096 bytes written and read back: {name}", "look for errors of the drive: sudo dmesg | tail -50", path)
    if not trial.is_direct:
        return warning(DIRECT_IO, "O_DIRECT is refused: bytes pass through the page cache, which costs memory and speed", _ELSEWHERE, path)
    if trial.backend == "threads":
        found = "O_DIRECT works, asynchronous I/O is refused: transfers go through threads, with less in flight"
        return warning(DIRECT_IO, found, f"see `kernel AIO`; where that is ok, {_ELSEWHERE}", path)
    told = f"file offsets of {align[1]} and memory of {align[0]} would do" if align else "the file system does not say what it needs"
    return ok(DIRECT_IO, f"works through {trial.backend}, aligned to 4096 ({told})", path)


def check_space(place: Place, entry: NvmePath, config: Config) -> Finding:
    """statvfs(3), for users without privilege; what the run has there already is its own.

    Less than the smallest shard file is a failure; whether a model fits is told by `plan`.
    """
    path, free = str(place.path), place.facts.free_bytes
    held = run_files([place.path], config.store.run).nbytes
    room = free + held if entry.max_bytes is None else min(free + held, entry.max_bytes)
    each = _BYTES_PER_ELEMENT[config.precision.dtype]
    found = format_bytes(free)
    found += f", beside {format_bytes(held)} of run {config.store.run!r}" if held else ""
    found += f", max_bytes allows {format_bytes(entry.max_bytes)}" if entry.max_bytes is not None else ""
    found += f": all states of {_elements(room // each)} elements at {each} bytes"
    if room < MIN_FILE_BYTES:
        way_out = f"free some (du -xh {path} | sort -h; infinity clean CONFIG removes a run), or raise max_bytes"
        return failure(SPACE, found, way_out, path)
    return ok(SPACE, found, path)


def _elements(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.1f} million"


def check_shared(places: list[Place]) -> Iterator[Finding]:
    """Paths are there to add bandwidth: two on one drive share its rate, a warning."""
    on: dict[str, list[str]] = defaultdict(list)
    for place in places:
        name = ", ".join(sorted(leaf.name for leaf in place.drive.leaves)) if place.drive else place.facts.device
        on[name].append(str(place.path))
    shared = {name: paths for name, paths in on.items() if len(paths) > 1}
    for name, paths in shared.items():
        yield warning(SHARED, f"{' and '.join(paths)} are on one drive, {name}, and share its rate", "give each drive one path in nvme.paths")
    if len(places) > 1 and not shared:
        yield ok(SHARED, f"each of {len(places)} paths has its own")
