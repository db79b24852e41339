"""The block device below a path, as sysfs has it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from infinity.doctor.system import System, read_number, read_text

_KINDS = {
    r"nvme\d": "NVMe",
    r"vd[a-z]|xvd[a-z]": "virtual disk",
    r"mmcblk\d": "flash card",
    r"loop\d": "loop device",
    r"zram\d|ram\d|pmem\d": "memory",
    r"nbd\d|rbd\d|drbd\d": "network block device",
    r"md\d": "RAID",
    r"dm-\d": "device mapper",
}
"""Beginnings of the kernel's names: Documentation/admin-guide/devices.txt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A whole disk: of a partition, the disk that it is a part of."""

    name: str
    kind: str
    model: str
    folder: Path
    """/sys/devices/.../block/NAME"""
    numa_node: int | None
    below: tuple[Drive, ...] = ()
    """What a RAID or a device mapper is made of."""

    @property
    def leaves(self) -> tuple[Drive, ...]:
        """The disks that bytes end on."""
        return tuple(leaf for drive in self.below for leaf in drive.leaves) or (self,)

    def describe(self) -> str:
        made_of = f" over {', '.join(drive.name for drive in self.leaves)}" if self.below else ""
        return f"{self.name}, {self.kind}{' ' + self.model if self.model else ''}{made_of}"


def find_drive(path: Path, device: str, system: System) -> Drive | None:
    """The drive below `path`, whose file system is on `device` (major:minor). None where no block device is.

    File systems with devices of their own (btrfs, overlayfs) have major number 0: their source in proc_pid_mountinfo(5) is asked.
    """
    if device.startswith("0:"):
        device = _source_device(path, system)
    folder = system.sys / "dev" / "block" / device
    return _drive(folder.resolve()) if device and folder.exists() else None


def _source_device(path: Path, system: System) -> str:
    """major:minor of the block device that the innermost mount point above `path` was mounted from, "" where it is none."""
    inner, source = Path(), ""
    for line in read_text(system.proc / "self" / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        if path.resolve().is_relative_to(point) and len(point.parts) >= len(inner.parts):
            inner, source = point, _unescaped(after.split()[1])
    try:
        number = os.stat(source).st_rdev if source.startswith("/dev/") else 0
    except OSError:
        return ""
    return f"{os.major(number)}:{os.minor(number)}" if number else ""


def _unescaped(word: str) -> str:
    """`a\\040b` -> `a b`: proc_pid_mountinfo(5) writes blanks in octal."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word)


def _drive(folder: Path) -> Drive:
    if (folder / "partition").exists():
        folder = folder.parent
    below = sorted((folder / "slaves").iterdir()) if (folder / "slaves").is_dir() else []
    return Drive(
        name=folder.name,
        kind=_kind(folder),
        model=read_text(folder / "device" / "model") or read_text(folder / "loop" / "backing_file") or read_text(folder / "dm" / "name"),
        folder=folder,
        numa_node=_numa_node(folder),
        below=tuple(_drive(slave.resolve()) for slave in below),
    )


def _kind(folder: Path) -> str:
    transport = read_text(folder / "device" / "transport")
    for pattern, kind in _KINDS.items():
        if re.match(pattern, folder.name):
            return f"{kind} over {transport}" if transport not in ("", "pcie") else kind
    if any(part.startswith("usb") for part in folder.parts):
        return "USB disk"
    if any(part.startswith("virtio") for part in folder.parts):
        return "virtual disk"
    return "rotating disk" if read_number(folder / "queue" / "rotational") else "SSD"


def _numa_node(folder: Path) -> int | None:
    """Of the PCI device above: the first `numa_node` on the way up, None where there is none or it is -1 (no affinity)."""
    for parent in (folder / "device", folder / "device" / "device", *folder.parents):
        node = read_number(parent / "numa_node")
        if node is not None:
            return node if node >= 0 else None
    return None
