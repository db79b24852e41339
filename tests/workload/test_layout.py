"""Files: laid out once, never at the cost of anybody's data, settled at the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.errors import ConfigError, StorageError
from infinity.workload import layout as laying
from infinity.workload import run as running
from infinity.workload.marks import Mark

MIB = 1 << 20


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def needs_attributes(folder: Path) -> None:
    try:
        probe = folder / "probe"
        probe.touch()
        os.setxattr(probe, "user.infinity.test", b"")
        probe.unlink()
    except OSError:
        probe.unlink()
        pytest.skip("this file system has no extended attributes")


def test_a_file_is_laid_out_once_and_stays(run, disk):
    needs_attributes(disk)
    said: list[str] = []
    run("--rw=read", "--bs=64k", "--size=3000000", said=said)
    content = (disk / "a.0.0").read_bytes()
    assert len(content) == 3000000 and content.count(0) < len(content) // 100  # all of it was written
    assert said == [f"laying out {disk / 'a.0.0'} (2.86 MiB)"]
    run("--rw=randrw", "--bs=64k", "--size=3000000", said=said)
    assert len(said) == 1 and names(disk) == ["a.0.0"]


def test_what_only_part_of_was_written_is_laid_out_before_it_is_read(run, disk):
    needs_attributes(disk)
    said: list[str] = []
    run("--rw=write", "--size=1g", "--runtime=20ms")
    mark = Mark.of(disk / "a.0.0")
    assert mark is not None and not mark.is_full
    run("--rw=write", "--size=64k")
    run("--rw=read", "--size=64k", said=said)
    assert len(said) == 1  # the file is still the one of 1 GiB, of which 64 KiB were written


def test_a_file_written_from_end_to_end_needs_no_layout(run, disk):
    needs_attributes(disk)
    said: list[str] = []
    run("--rw=randwrite", "--size=256k")
    run("--rw=read", "--size=256k", said=said)
    assert not said


def test_unlink_removes_what_was_laid_out(run, disk):
    run("--rw=write", "--size=64k", "--unlink=1", "--numjobs=2")
    assert names(disk) == []


# ---- data ----


@pytest.mark.parametrize("words", [["--rw=write"], ["--rw=randrw"], ["--rw=read", "--size=1m"], ["--rw=read", "--unlink=1"]])
def test_a_file_of_somebody_else_is_not_changed_unless_told(run, disk, words):
    (disk / "mine").write_bytes(b"precious" * 8192)
    with pytest.raises(ConfigError, match=r"mine has 65536 bytes that .* did not lay out.* --destroy-data"):
        run("--filename=other:mine" if "--size=1m" in words else "--filename=mine", *words)
    assert (disk / "mine").read_bytes() == b"precious" * 8192 and names(disk) == ["mine"]
    run("--filename=mine", *words, destroy_data=True)
    assert not (disk / "mine").exists() or (disk / "mine").read_bytes() != b"precious" * 8192 or "--rw=read" in words


def test_a_file_of_somebody_else_may_be_read(run, disk):
    (disk / "mine").write_bytes(b"precious" * 8192)
    run("--filename=mine", "--rw=randread")
    assert (disk / "mine").read_bytes() == b"precious" * 8192


@pytest.mark.parametrize("change", ["grow", "rewrite", "replace"])
def test_a_file_that_was_changed_since_is_somebody_elses(run, disk, change):
    run("--rw=write", "--size=64k")
    path = disk / "a.0.0"
    if change == "grow":
        with path.open("ab") as file:
            file.write(b"more")
    elif change == "rewrite":
        path.write_bytes(b"precious" * 8192)  # the same size
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))  # file systems count time in ticks
    else:
        path.unlink()
        path.write_bytes(b"precious" * 8192)
    with pytest.raises(ConfigError, match="--destroy-data"):
        run("--rw=write", "--size=64k")


def test_the_state_of_a_training_run_is_named_as_such(run, disk):
    folder = disk / "infinity" / "default"
    folder.mkdir(parents=True)
    shard = folder / "u00000-param-r0-g1.safetensors"
    shard.write_bytes(bytes(MIB))
    with pytest.raises(ConfigError, match="holds the state of a training run"):
        run("--rw=write", f"--filename=infinity/default/{shard.name}")
    link = disk / "link"
    link.symlink_to(shard)
    with pytest.raises(ConfigError, match="holds the state of a training run"):
        run("--rw=write", "--filename=link")


def loop_device(folder: Path) -> str:
    losetup = shutil.which("losetup")
    if losetup is None or os.geteuid():
        pytest.skip("a loop device needs root and losetup")
    (folder / "image").write_bytes(bytes(4 * MIB))
    done = subprocess.run([losetup, "--find", "--show", str(folder / "image")], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    return done.stdout.strip()


def test_a_block_device_is_written_only_when_told(run, tmp_path):
    device = loop_device(tmp_path)
    try:
        words = [f"--filename={device}", "--directory=/", "--bs=64k"]
        with pytest.raises(ConfigError, match=rf"{device} is a block device.* --destroy-data"):
            run("--rw=write", *words)
        with pytest.raises(ConfigError, match="more than the 4194304 bytes"):
            run("--rw=read", "--size=1g", *words)
        (read,) = run("--rw=read", *words)
        assert read.stats.ios == 64
        (wrote,) = run("--rw=write", *words, destroy_data=True)
        assert wrote.stats.ios == 64
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


# ---- what cannot work ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size=64k", "--directory=absent"], "directory absent does not exist"),
        (["--size=64k", "--directory=/etc/hostname"], "/etc/hostname is no directory"),
        (["--size=64k", "--filename=absent/x"], "does not exist"),
        (["--filename=absent"], "size must say how much"),
        (["--filename=/dev/null", "--directory=/", "--size=64k"], "neither a file nor a block device"),
        (["--filename=.", "--size=64k"], "neither a file nor a block device"),
        (["--size=100t"], "No space left"),
        (["--size=64k", f"--name={'x' * 300}"], "File name too long"),
    ],
)
def test_bad_places_are_named_and_nothing_is_left(run, disk, words, said):
    with pytest.raises((ConfigError, StorageError)) as caught:
        run("--rw=write", *words)
    assert said in str(caught.value)
    assert names(disk) == []


def test_a_block_that_does_not_fit_direct_io_is_refused_before_anything_is_made(run, disk, monkeypatch):
    monkeypatch.setattr(laying, "direct_io_align", lambda path: (512, 512))
    with pytest.raises(ConfigError, match=r"a block of 1000 bytes .* multiples of 512: change bs, or give direct=0"):
        run("--rw=write", "--bs=1000", "--size=64k")
    assert names(disk) == []
    run("--rw=write", "--bs=1000", "--size=64k", "--direct=0")
    assert names(disk) == ["a.0.0"]


def test_a_full_disk_is_known_before_and_leaves_nothing(run, small_disk):
    with pytest.raises(StorageError, match=r"64\.00 MiB are to be laid out, 16\.00 MiB are free"):
        run("--rw=write", "--size=32m", "--numjobs=2", f"--directory={small_disk}")
    assert names(small_disk) == []


def test_a_disk_that_fills_meanwhile_is_an_error_and_leaves_nothing(run, small_disk, monkeypatch):
    monkeypatch.setattr(laying.Layout, "_check_space", lambda self: None)
    for words in (["--rw=write"], ["--rw=read"]):
        with pytest.raises(StorageError, match="No space left"):
            run(*words, "--bs=1m", "--size=12m", "--numjobs=2", f"--directory={small_disk}")
        assert names(small_disk) == []
    monkeypatch.setattr(laying, "fallocate", lambda fd, nbytes: 95)  # EOPNOTSUPP: then it shows at the write
    with pytest.raises(StorageError, match="the disk is full"):
        run("--rw=write", "--bs=1m", "--size=12m", "--numjobs=2", f"--directory={small_disk}")
    assert names(small_disk) == []


def test_a_read_only_mount_can_be_read_and_says_why_it_cannot_be_written(run, small_disk):
    (small_disk / "there").write_bytes(bytes(65536))
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody remount")
    run("--rw=read", f"--directory={small_disk}", "--filename=there")
    with pytest.raises(StorageError, match="mounted read-only"):
        run("--rw=write", f"--directory={small_disk}", "--size=64k")
    assert names(small_disk) == ["there"]


def test_an_end_while_files_are_laid_out_leaves_nothing(disk):
    groups = running_words(disk, "--size=64m", "--bs=1m")
    with pytest.raises(KeyboardInterrupt):
        running.run_jobs(groups, is_wanted=lambda: False)
    assert names(disk) == []


def running_words(disk: Path, *words: str):
    from infinity.workload.jobfile import read_words

    return read_words([f"--directory={disk}", "--name=a", *words])


def test_a_failed_run_leaves_files_as_they_were_before(run, disk, monkeypatch):
    needs_attributes(disk)
    run("--rw=write", "--size=64k")
    (disk / "empty").touch()
    ours = (disk / "a.0.0").read_bytes()
    monkeypatch.setattr(running, "_run_group", _fail)
    with pytest.raises(StorageError):
        run("--rw=read", "--size=300k", "--filename=a.0.0:empty:new")
    assert names(disk) == ["a.0.0", "empty"]
    assert ((disk / "a.0.0").stat().st_size, (disk / "empty").stat().st_size) == (len(ours), 0)
    mark = Mark.of(disk / "a.0.0")
    assert mark is not None and mark.mtime_ns is not None  # what changes it from now on shows


def _fail(*_: object) -> None:
    raise StorageError(5, "drive")


# ---- killed runs ----


def test_a_killed_run_is_told_at_the_next_start_and_its_file_is_ours(run, disk):
    needs_attributes(disk)
    command = [sys.executable, "-m", "infinity", "io", "--name=a", f"--directory={disk}", "--rw=write", "--size=1m", "--time_based", "--runtime=1h"]
    said: list[str] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while process.poll() is None and Mark.of(disk / "a.0.0") is None:
            time.sleep(0.05)
        journals = [path for path in disk.iterdir() if path.name.startswith(".infinity-io-")]
        assert [json.loads(path.read_text())["files"] for path in journals] == [["a.0.0"]]
        run("--rw=read", "--filename=b", "--size=64k", said=said)
        assert not [line for line in said if "was killed" in line]  # it lives
    finally:
        process.kill()
        process.communicate()
    run("--rw=write", "--size=1m", said=said)
    assert [line for line in said if "was killed" in line] == [line for line in said if f"left {disk / 'a.0.0'} (1048576 bytes)" in line] != []
    said.clear()
    run("--rw=write", "--size=1m", said=said)
    assert said == [] and names(disk) == ["a.0.0", "b"]
