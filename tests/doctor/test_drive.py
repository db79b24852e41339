"""Which drive is below a path, from trees as sysfs has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.doctor.drive import _source_device, find_drive
from infinity.doctor.system import System


def block(system: System, device: str, folder: str, **files: object) -> Path:
    """A block device at /sys/devices/FOLDER, known as `device`; __ in names of files is a slash."""
    place = system.sys / "devices" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        file = place / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    link = system.sys / "dev" / "block" / device
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(place)
    return place


KINDS = {
    "nvme0n1": ("pci0000:00/0000:3b:00.0/nvme/nvme0/nvme0n1", {"device__transport": "pcie", "device__model": "Fast 990"}, "NVMe"),
    "nvme1n1": ("virtual/nvme-fabrics/ctl/nvme1/nvme1n1", {"device__transport": "tcp"}, "NVMe over tcp"),
    "vda": ("pci0000:00/virtio1/block/vda", {"queue__rotational": 1}, "virtual disk"),
    "sda": ("pci0000:00/ata1/block/sda", {"queue__rotational": 1}, "rotating disk"),
    "sdb": ("pci0000:00/ata2/block/sdb", {"queue__rotational": 0}, "SSD"),
    "sdc": ("pci0000:00/usb2/2-1/block/sdc", {"queue__rotational": 0}, "USB disk"),
    "sdd": ("pci0000:00/virtio3/host0/block/sdd", {"queue__rotational": 1}, "virtual disk"),
    "mmcblk0": ("platform/mmc0/block/mmcblk0", {}, "flash card"),
    "zram0": ("virtual/block/zram0", {}, "memory"),
    "loop3": ("virtual/block/loop3", {"loop__backing_file": "/images/disk.img"}, "loop device"),
    "nbd0": ("virtual/block/nbd0", {}, "network block device"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_drives(machine, tmp_path, name):
    folder, files, kind = KINDS[name]
    system = machine({})
    block(system, "8:1", folder, **files)
    drive = find_drive(tmp_path, "8:1", system)
    assert drive is not None and (drive.name, drive.kind) == (name, kind)
    assert drive.leaves == (drive,)


def test_a_partition_is_its_disk_which_knows_its_node(machine, tmp_path):
    system = machine({"sys/devices/pci0000:3a/0000:3b:00.0/numa_node": 1})
    disk = "pci0000:3a/0000:3b:00.0/nvme/nvme0/nvme0n1"
    block(system, "259:0", disk, device__model="Fast 990")
    block(system, "259:1", f"{disk}/nvme0n1p1", partition=1)
    drive = find_drive(tmp_path, "259:1", system)
    assert drive == find_drive(tmp_path, "259:0", system)
    assert drive is not None and drive.numa_node == 1 and drive.describe() == "nvme0n1, NVMe Fast 990"


def test_a_node_of_minus_one_is_none(machine, tmp_path):
    system = machine({"sys/devices/pci0/numa_node": -1})
    block(system, "8:0", "pci0/ata1/block/sda")
    drive = find_drive(tmp_path, "8:0", system)
    assert drive is not None and drive.numa_node is None


def test_a_mapper_over_a_raid_ends_on_the_disks(machine, tmp_path):
    system = machine({})
    disks = [block(system, f"259:{n}", f"pci0/nvme/nvme{n}/nvme{n}n1") for n in range(2)]
    raid = block(system, "9:0", "virtual/block/md0")
    mapper = block(system, "252:0", "virtual/block/dm-0", dm__name="vault")
    for upper, lowers in ((raid, disks), (mapper, [raid])):
        (upper / "slaves").mkdir()
        for lower in lowers:
            (upper / "slaves" / lower.name).symlink_to(lower)
    drive = find_drive(tmp_path, "252:0", system)
    assert drive is not None and [leaf.name for leaf in drive.leaves] == ["nvme0n1", "nvme1n1"]
    assert drive.describe() == "dm-0, device mapper vault over nvme0n1, nvme1n1"


def test_no_block_device_below_is_none(machine, tmp_path):
    assert find_drive(tmp_path, "0:27", machine({"proc/self/mountinfo": "25 24 0:27 / / rw - tmpfs tmpfs rw"})) is None
    assert find_drive(tmp_path, "8:1", machine({})) is None


def test_a_file_system_with_a_device_of_its_own_is_looked_up_in_the_mounts(machine, tmp_path, monkeypatch):
    """The innermost mount above the path counts, and blanks in its name are octal."""
    path = tmp_path / "my disk" / "deep"
    path.mkdir(parents=True)
    system = machine({})
    block(system, "8:16", "pci0/ata2/block/sdb")
    escaped = str(path.parent).replace(" ", "\\040")
    lines = ["20 1 8:1 / / rw - ext4 /dev/sda1 rw", f"21 20 0:30 / {escaped} rw shared:1 - btrfs /dev/sdb rw", "22 20 0:31 / /e rw - tmpfs none rw"]
    (system.proc / "self").mkdir(parents=True)
    (system.proc / "self" / "mountinfo").write_text("\n".join(lines))
    asked = []
    monkeypatch.setattr(os, "stat", lambda name, **_: asked.append(name) or type("Stat", (), {"st_rdev": os.makedev(8, 16)})())
    found = _source_device(path, system)
    monkeypatch.undo()
    assert "/dev/sdb" in asked and found == "8:16"
    drive = find_drive(path, found, system)
    assert drive is not None and drive.name == "sdb"


def test_the_drive_of_this_path_is_one_that_the_kernel_lists(tmp_path):
    device = os.stat(tmp_path).st_dev
    drive = find_drive(tmp_path, f"{os.major(device)}:{os.minor(device)}", System())
    if drive is None:
        pytest.skip("the temporary directory is on no block device")
    assert (Path("/sys/block") / drive.name).exists()
