"""Jobs on real files: what they move, what they count, what they catch."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from infinity.errors import CapacityError, ConfigError, StorageError
from infinity.native import READ, WRITE, available_backends
from infinity.workload import clone
from infinity.workload import run as running
from infinity.workload.jobfile import read_words
from infinity.workload.run import run_jobs

MIB = 1 << 20


@pytest.mark.parametrize("rw", ["read", "write", "randread", "randwrite", "rw", "randrw"])
@pytest.mark.parametrize("engine", [["--ioengine=psync"], ["--ioengine=libaio", "--iodepth=8"]])
def test_a_job_moves_its_size_once_and_times_every_block(run, disk, rw, engine):
    (result,) = run(f"--rw={rw}", "--bs=16k", "--size=2m", *engine)
    stats = result.stats
    assert sum(moved.nbytes for moved in stats.directions.values()) == 2 * MIB
    assert stats.ios == 128 and int(stats.depths.sum()) == 128
    for direction, moved in stats.directions.items():
        wanted = {READ: "write" not in rw, WRITE: "read" not in rw}[direction]
        assert bool(moved.ios) == wanted
        assert moved.completion.count == moved.total.count == moved.ios
        assert moved.submission.count == (moved.ios if result.job.ioengine == "libaio" else 0)
        assert moved.total.mean_ns == pytest.approx(moved.submission.mean_ns + moved.completion.mean_ns)
        assert bool(moved.bandwidth) == wanted
    assert 1 <= stats.deepest <= result.job.depth and stats.mean_depth <= result.job.depth
    assert result.is_covered
    assert (disk / "a.0.0").stat().st_size == 2 * MIB


def test_the_queue_is_kept_at_its_depth(run):
    (result,) = run("--rw=randrw", "--bs=4k", "--size=8m", "--ioengine=libaio", "--iodepth=16")
    assert result.stats.deepest == 16
    assert result.stats.mean_depth > 15  # it is not drained between requests, whatever the direction


@pytest.mark.parametrize("kind", ["malloc", "mmap", "mmaphuge"])
def test_every_kind_of_memory_carries_blocks_and_tells_its_pages(run, kind):
    (result,) = run("--rw=write", "--bs=64k", "--size=1m", f"--iomem={kind}", "--verify=crc32c", "--ioengine=libaio", "--iodepth=4")
    assert result.page_bytes in (4096, 2 * MIB)
    assert result.stats.directions[READ].nbytes == MIB  # read back


def test_clones_have_files_of_their_own_over_the_directories_and_named_files_are_shared(disk):
    (disk / "x").mkdir()
    words = ["--size=64k", "--name=own", "--numjobs=3", "--name=shared", "--filename=f:g", "--numjobs=2"]
    groups = read_words([f"--directory={disk}:{disk}/x", *words])
    results = run_jobs(groups)
    assert len(results) == 5
    names = sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file())
    assert names == ["f", "g", "own.0.0", "own.2.0", "x/own.1.0"]
    assert (disk / "f").stat().st_size == 32768


def test_time_based_goes_round_and_runtime_alone_ends_early(run):
    (result,) = run("--rw=randread", "--size=64k", "--time_based", "--runtime=200ms", "--ramp_time=100ms", "--ioengine=libaio", "--iodepth=4")
    assert result.stats.directions[READ].nbytes > 64 << 10
    assert result.moved[READ] > result.stats.directions[READ].nbytes  # what the ramp moved is not counted
    (result,) = run("--rw=write", "--bs=4k", "--size=1g", "--runtime=50ms")
    assert 0 < result.stats.directions[WRITE].nbytes < 1 << 30
    assert not result.is_covered


def test_fsyncs_are_counted_apart(run):
    (result,) = run("--rw=randwrite", "--bs=4k", "--size=256k", "--fsync=10", "--ioengine=libaio", "--iodepth=4")
    assert result.stats.syncs.count == 6
    assert result.stats.directions[WRITE].ios == 64


def test_whoever_watches_sees_bytes_and_may_end_it(disk):
    groups = read_words([f"--directory={disk}", "--name=a", "--size=64k", "--time_based", "--runtime=1h"])
    seen: list[running.Progress] = []

    def watch(progress: running.Progress) -> bool:
        seen.append(progress)
        return progress.read_bytes < 1 << 20

    (result,) = run_jobs(groups, watch=watch)
    assert result.stats.directions[READ].nbytes >= seen[-1].read_bytes >= 1 << 20
    assert seen[-1].total_s == 3600
    assert (disk / "a.0.0").exists()


def test_files_of_a_group_follow_those_of_the_group_before(disk, tmp_path):
    for name, text in (("a", "[w]\nrw=write\nfilename=f\nsize=64k\n"), ("b", "[r]\nfilename=f\n")):
        (tmp_path / name).write_text(text)
    groups = read_words([f"--directory={disk}", str(tmp_path / "a"), str(tmp_path / "b")])
    assert [result.group for result in run_jobs(groups)] == [0, 1]


# ---- verify ----


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("rw", ["write", "randwrite", "randrw"])
def test_what_was_written_is_read_back_and_checked(run, rw):
    words = (f"--rw={rw}", "--bssplit=4k/50:16k/25:512/25", "--size=1m", "--verify=crc32c", "--ioengine=libaio", "--iodepth=8", "--fsync=7")
    (result,) = run(*words)
    written, read = (result.stats.directions[direction].nbytes for direction in (WRITE, READ))
    assert written > 0 and (read == written or rw == "randrw")


def test_a_request_without_writes_does_not_end_the_reading_back(run):
    (result,) = run("--rw=rw", "--rwmixread=97", "--size=2m", "--verify=crc32c")
    written, read = (result.stats.directions[direction].nbytes for direction in (WRITE, READ))
    assert 0 < written and read == (2 << 20)  # what was read in the mix, and what was written and read back


@pytest.mark.parametrize("at", [0, 9, 45, 2000, 4095])
def test_a_flipped_byte_is_found_at_its_block(run, disk, at):
    run("--rw=write", "--size=256k", "--verify=crc32c")
    run("--rw=randread", "--size=256k", "--verify=crc32c", "--ioengine=libaio", "--iodepth=4")
    flip(disk / "a.0.0", 5 * 4096 + at)
    with pytest.raises(StorageError, match="verify") as caught:
        run("--rw=randread", "--size=256k", "--verify=crc32c", "--ioengine=libaio", "--iodepth=4")
    assert caught.value.offset == 5 * 4096 and caught.value.filename == str(disk / "a.0.0")
    assert (disk / "a.0.0").exists()  # it was there before: the evidence stays


def test_a_block_at_the_wrong_place_and_a_lost_write_are_found(run, disk, monkeypatch):
    run("--rw=write", "--size=64k", "--verify=crc32c")
    path = disk / "a.0.0"
    content = path.read_bytes()
    path.write_bytes(content[4096:8192] + content[4096:])
    with pytest.raises(StorageError, match="belongs to byte 4096"):
        run("--rw=read", "--size=64k", "--verify=crc32c")
    monkeypatch.setattr(clone.Clone, "_read_back", _put_back_first(clone.Clone._read_back, path, content))
    with pytest.raises(StorageError, match="a write was lost"):
        run("--rw=write", "--size=64k", "--verify=crc32c", destroy_data=True)


def _put_back_first(read_back, path, content):
    def put_back(*args):
        path.write_bytes(content)
        read_back(*args)

    return put_back


def test_what_the_ramp_wrote_is_not_what_the_job_wrote(run, disk, monkeypatch):
    """Blocks that the ramp cut differently are gone by then, and its bytes in place of the job's are a lost write."""
    (result,) = run("--rw=randwrite", "--bssplit=4k/50:8k/50", "--size=1m", "--verify=crc32c", "--ramp_time=100ms", "--iodepth=4")
    read, written = (result.stats.directions[direction].nbytes for direction in (READ, WRITE))
    assert read == written > MIB - 8192
    path, kept = disk / "a.0.0", []
    restart, read_back = clone.Clone._restart, clone.Clone._read_back

    def keep(self):
        kept.append(path.read_bytes())
        restart(self)

    def put_back(*args):
        path.write_bytes(kept[0])
        read_back(*args)

    monkeypatch.setattr(clone.Clone, "_restart", keep)
    monkeypatch.setattr(clone.Clone, "_read_back", put_back)
    with pytest.raises(StorageError, match="a write was lost"):
        run("--rw=write", "--bs=4k", "--size=256k", "--verify=crc32c", "--ramp_time=100ms", destroy_data=True)


def test_another_block_size_and_a_file_without_headers_are_told_apart(run, disk):
    run("--rw=write", "--size=64k", "--verify=crc32c")
    with pytest.raises(StorageError, match="written with 4096 bytes"):
        run("--rw=read", "--bs=8k", "--size=64k", "--verify=crc32c")
    (disk / "plain").write_bytes(bytes(65536))
    with pytest.raises(StorageError, match="no verify header"):
        run("--rw=read", "--filename=plain", "--verify=crc32c")
    with pytest.raises(ConfigError, match="write it with verify=crc32c first"):
        run("--rw=read", "--filename=absent", "--size=64k", "--verify=crc32c")
    assert sorted(path.name for path in disk.iterdir()) == ["a.0.0", "plain"]


# ---- failures ----


def test_more_memory_than_there_is_is_refused(run, disk):
    with pytest.raises(CapacityError, match="lower iodepth or bs"):
        run("--rw=write", "--bs=1g", "--size=1g", "--ioengine=libaio", "--iodepth=8192")
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("has_library", [True, False])
def test_more_depth_than_the_kernel_gives_is_refused(run, disk, monkeypatch, has_library):
    backends = available_backends()
    if has_library and "libaio" not in backends:
        pytest.skip("libaio is not installed")
    monkeypatch.setattr(clone, "available_backends", lambda: backends if has_library else ("kernel", "threads"))
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if limit > 8 * 65536:
        pytest.skip(f"the host gives {limit} events")
    with pytest.raises(StorageError, match="Raise fs.aio-max-nr, or lower iodepth or numjobs"):
        run("--rw=write", "--bs=512", "--size=64k", "--ioengine=libaio", "--iodepth=65536", "--numjobs=8", "--direct=0")
    assert list(disk.iterdir()) == []


def test_a_failed_block_ends_all_jobs_and_names_its_place(disk, monkeypatch):
    """A file that ends too early stands in for a drive that fails."""
    (disk / "short").write_bytes(bytes(8192))
    groups = read_words([f"--directory={disk}", "--name=a", "--time_based", "--runtime=1h", "--size=64k", "--name=b", "--filename=short"])
    opened = clone.open_target

    def cut(target, job):
        fd = opened(target, job)
        if target.path.name == "short":
            os.truncate(target.path, 4096)
        return fd

    monkeypatch.setattr(clone, "open_target", cut)
    with pytest.raises(StorageError, match="job b: the read failed") as caught:
        run_jobs(groups)
    assert (caught.value.errno, caught.value.offset, caught.value.filename) == (errno.EIO, 4096, str(disk / "short"))
    assert [path.name for path in disk.iterdir()] == ["short"]  # the file of job a was new, and is gone
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("io-")]
