"""Paths as they are: real file systems where they can be mounted, facts of others where not. Nothing is left on any of them."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.config import load_config
from infinity.doctor import paths
from infinity.doctor.drive import Drive
from infinity.doctor.finding import Finding, Status
from infinity.doctor.paths import Place
from infinity.doctor.system import System
from infinity.doctor.trial import Trial, try_direct_io
from infinity.errors import StorageError
from infinity.sizes import MIN_FILE_BYTES, MiB
from infinity.storage.probe import facts


def configured(*where: Path, **more: object):
    return load_config({"nvme": {"paths": [{"path": str(path), **more} for path in where]}})


def place(path: Path, drive: Drive | None = None, **changes: object) -> Place:
    return Place(path=path, facts=dataclasses.replace(facts(path), **changes), drive=drive)  # type: ignore[arg-type]


def drive(name: str, kind: str, folder: Path = Path("/nowhere"), below: tuple[Drive, ...] = ()) -> Drive:
    return Drive(name=name, kind=kind, model="", folder=folder, numa_node=None, below=below)


def by_subject(found: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found}


def examined(path: Path) -> dict[str, Finding]:
    config = configured(path)
    places, unusable = paths.look(config, System())
    assert not unusable
    return by_subject(paths.check_place(places[0], config))


# ---- paths that cannot be used ----


def test_missing_paths_and_files_are_failures_that_leave_the_others_alone(tmp_path):
    (tmp_path / "file").touch()
    places, unusable = paths.look(configured(tmp_path / "nowhere", tmp_path / "file", tmp_path), System())
    assert [place.path for place in places] == [tmp_path]
    assert [(finding.status, finding.path) for finding in unusable] == [
        (Status.FAILURE, str(tmp_path / "nowhere")),
        (Status.FAILURE, str(tmp_path / "file")),
    ]
    assert f"mkdir -p {tmp_path}/nowhere" in unusable[0].way_out and "nvme.paths" in unusable[1].way_out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def mounted(path: Path, *words: str) -> bool:
    path.mkdir()
    return subprocess.run(["mount", *words, str(path)], capture_output=True).returncode == 0


@pytest.fixture
def unmounted(tmp_path) -> Iterator[Path]:
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], capture_output=True)


def test_a_read_only_file_system_is_a_failure(unmounted):
    if not mounted(unmounted, "-t", "tmpfs", "-o", "ro", "infinity-test"):
        pytest.skip("a read-only file system cannot be mounted here")
    _, (found,) = paths.look(configured(unmounted), System())
    assert found.status is Status.FAILURE and "not writable" in found.found and "remount,rw" in found.way_out


def as_anybody(program: str, *words: str) -> str:
    """What a child prints that has no right to enter and write everywhere, which root has (capabilities(7), CAP_DAC_OVERRIDE)."""
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if without and (shutil.which("setpriv") is None or subprocess.run([*without, "true"], capture_output=True).returncode):
        pytest.skip("root cannot give up its rights here")
    return subprocess.run([*without, sys.executable, "-c", program, *words], capture_output=True, text=True, check=True).stdout


def test_directories_that_may_not_be_written_or_entered_are_failures(tmp_path):
    closed, read_only = tmp_path / "closed", tmp_path / "read_only"
    (closed / "inside").mkdir(parents=True)
    read_only.mkdir(mode=0o500)
    closed.chmod(0)
    program = (
        "import sys; from infinity.config import load_config; from infinity.doctor import paths; from infinity.doctor.system import System;"
        "print(*paths.look(load_config({'nvme': {'paths': sys.argv[1:]}}), System())[1], sep='\\n')"
    )
    try:
        unwritable, unreachable = as_anybody(program, str(read_only), str(closed / "inside")).splitlines()
    finally:
        closed.chmod(0o700)
    assert "Status.FAILURE" in unwritable and "not writable" in unwritable and "chown" in unwritable
    assert "Status.FAILURE" in unreachable and "Permission denied" in unreachable and f"namei -l {closed}/inside" in unreachable


# ---- real file systems ----


def test_a_tmpfs_is_a_warning_and_stays_empty(unmounted):
    if not mounted(unmounted, "-t", "tmpfs", "-o", "size=8m", "infinity-test"):
        pytest.skip("no file system can be mounted here")
    found = examined(unmounted)
    assert found["file system"].status is Status.WARNING and found["file system"].found.startswith("tmpfs: memory")
    assert "no block device" in found["drive"].found and found["free space"].found.startswith("8.00 MiB")
    assert list(unmounted.iterdir()) == []


def test_a_tmpfs_that_is_full_is_a_failure(unmounted):
    if not mounted(unmounted, "-t", "tmpfs", "-o", "size=64k", "infinity-test"):
        pytest.skip("no file system can be mounted here")
    (unmounted / "filler").write_bytes(bytes(64 << 10))
    found = examined(unmounted)
    assert found["free space"].status is Status.FAILURE and "infinity clean" in found["free space"].way_out
    assert found["direct I/O"].status is Status.FAILURE and "No space left" in found["direct I/O"].found


@pytest.fixture
def ext4_on_a_loop_device(tmp_path) -> Iterator[tuple[Path, Path]]:
    """(mount point, image)"""
    image, point = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 * MiB)
    point.mkdir()
    make = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
    if make is None or subprocess.run([make, "-q", str(image)], capture_output=True).returncode:
        pytest.skip("no mkfs.ext4 here")
    if subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    yield point, image
    subprocess.run(["umount", str(point)], check=True)


def test_a_real_ext4_on_a_loop_device_says_what_it_is(ext4_on_a_loop_device):
    point, image = ext4_on_a_loop_device
    before = sorted(path.name for path in point.iterdir())
    found = examined(point)
    assert found["file system"].found == "ext4" and found["file system"].status is Status.OK
    assert "loop device" in found["drive"].found and str(image) in found["drive"].found
    assert found["direct I/O"].status is Status.OK, found["direct I/O"]
    assert (found["drive"].status is Status.WARNING) == ("losetup --direct-io=on" in found["drive"].way_out)
    assert sorted(path.name for path in point.iterdir()) == before


# ---- file systems and drives that are not here ----


@pytest.mark.parametrize(
    ("file_system", "told"),
    [("nfs", "latency"), ("fuse", "latency"), ("overlayfs", "docker run -v"), ("btrfs", "chattr +C"), ("zfs", "ext4 or xfs"), ("ramfs", "memory")],
)
def test_file_systems_that_a_run_suffers_from_are_warnings(tmp_path, file_system, told):
    found = paths.check_file_system(place(tmp_path, file_system=file_system))
    assert found.status is Status.WARNING and told in f"{found.found} {found.way_out}"


@pytest.mark.parametrize("file_system", ["ext4", "xfs", "f2fs"])
def test_file_systems_that_are_as_they_should(tmp_path, file_system):
    assert paths.check_file_system(place(tmp_path, file_system=file_system)).status is Status.OK


@pytest.mark.parametrize(
    ("kind", "status"),
    [("NVMe", "ok"), ("SSD", "ok"), ("virtual disk", "ok"), ("rotating disk", "warning"), ("USB disk", "warning"), ("memory", "warning")],
)
def test_slow_drives_are_warnings_also_below_a_raid(tmp_path, kind, status):
    bare = drive("sda", kind)
    for below in (bare, drive("md0", "RAID", below=(drive("nvme0n1", "NVMe"), bare))):
        assert paths.check_drive(place(tmp_path, below)).status == status


@pytest.mark.parametrize(("dio", "status"), [("0", "warning"), ("1", "ok")])
def test_a_loop_device_through_the_page_cache_is_a_warning(tmp_path, dio, status):
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "dio").write_text(f"{dio}\n")
    found = paths.check_drive(place(tmp_path, drive("loop7", "loop device", tmp_path)))
    assert found.status == status
    assert status == "ok" or found.way_out == "sudo losetup --direct-io=on /dev/loop7"


# ---- direct I/O ----


def test_a_sector_goes_and_comes_and_no_name_was_ever_there(tmp_path):
    before = os.stat(tmp_path).st_mtime_ns
    trial = try_direct_io(tmp_path)
    assert trial.error == 0
    assert list(tmp_path.iterdir()) == []
    if os.stat(tmp_path).st_mtime_ns != before:
        pytest.skip("this file system has no O_TMPFILE: the file had a name for a moment")


def test_without_nameless_files_a_named_one_is_removed(tmp_path, monkeypatch):
    open_file = os.open

    def refuse(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no nameless files")
        return open_file(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    assert try_direct_io(tmp_path).error == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("trial", "status", "told"),
    [
        (Trial(is_direct=True, backend="libaio", error=0), "ok", "through libaio, aligned to 4096 (file offsets of 512 and memory of 4 would do)"),
        (Trial(is_direct=False, backend="libaio", error=0), "warning", "page cache"),
        (Trial(is_direct=True, backend="threads", error=0), "warning", "see `kernel AIO`"),
        (Trial(is_direct=True, backend="libaio", error=errno.EIO), "failure", "Input/output error"),
        (Trial(is_direct=True, backend="libaio", error=errno.ETIMEDOUT), "failure", "no answer in 10 s"),
        (Trial(is_direct=True, backend="libaio", error=errno.ENOSPC), "failure", "du -xh"),
        (Trial(is_direct=True, backend="libaio", error=errno.EDQUOT), "failure", "quota"),
    ],
)
def test_how_a_trial_is_judged(tmp_path, monkeypatch, trial, status, told):
    monkeypatch.setattr(paths, "try_direct_io", lambda directory: trial)
    found = paths.check_direct_io(place(tmp_path, direct_io_align=(4, 512)))
    assert found.status == status and told in f"{found.found} {found.way_out}"


def test_a_directory_that_takes_no_file_is_a_failure(tmp_path, monkeypatch):
    def refuse(directory: Path) -> Trial:
        raise StorageError(errno.EDQUOT, str(directory))

    monkeypatch.setattr(paths, "try_direct_io", refuse)
    found = paths.check_direct_io(place(tmp_path))
    assert found.status is Status.FAILURE and "no file can be made" in found.found


# ---- room ----


@pytest.mark.parametrize(
    ("dtype", "free", "max_bytes", "told"),
    [
        ("fp32", 40 * 10**9, None, "2.00 billion elements at 20 bytes"),
        ("bf16", 40 * 10**9, None, "2.50 billion elements at 16 bytes"),
        ("fp32", 40 * 10**9, 2 * 10**9, "100.0 million elements at 20 bytes"),
    ],
)
def test_the_room_is_told_in_elements(tmp_path, dtype, free, max_bytes, told):
    config = load_config({"precision": {"dtype": dtype}, "nvme": {"paths": [{"path": str(tmp_path), "max_bytes": max_bytes}]}})
    found = paths.check_space(place(tmp_path, free_bytes=free), config.nvme.paths[0], config)
    assert found.status is Status.OK and told in found.found


@pytest.mark.parametrize(
    ("free", "max_bytes", "status"),
    [(MIN_FILE_BYTES, None, "ok"), (MIN_FILE_BYTES - 1, None, "failure"), (1 << 40, MIN_FILE_BYTES - 1, "failure")],
)
def test_less_room_than_the_smallest_file_is_a_failure(tmp_path, free, max_bytes, status):
    config = configured(tmp_path, max_bytes=max_bytes)
    assert paths.check_space(place(tmp_path, free_bytes=free), config.nvme.paths[0], config).status == status


def test_what_the_run_has_there_is_its_own(tmp_path):
    run = tmp_path / "infinity" / "default"
    run.mkdir(parents=True)
    (run / "u00000-param-r0-g0.safetensors").write_bytes(bytes(MIN_FILE_BYTES))
    config = configured(tmp_path)
    found = paths.check_space(place(tmp_path, free_bytes=0), config.nvme.paths[0], config)
    assert found.status is Status.OK and "512.00 KiB of run 'default'" in found.found


# ---- several paths ----


def test_two_paths_on_one_drive_are_a_warning(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    one, other = drive("nvme0n1", "NVMe"), drive("nvme1n1", "NVMe")
    (found,) = paths.check_shared([place(first, one), place(second, one)])
    assert found.status is Status.WARNING and f"{first} and {second} are on one drive, nvme0n1" in found.found
    (found,) = paths.check_shared([place(first, one), place(second, other)])
    assert found.status is Status.OK
    assert list(paths.check_shared([place(first, one)])) == []


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_directories_of_one_tmpfs_share_it():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as first, tempfile.TemporaryDirectory(dir="/dev/shm") as second:
        (found,) = paths.check_shared(paths.look(configured(Path(first), Path(second)), System())[0])
    assert found.status is Status.WARNING
