"""target=cuda: what is read ends in HBM, what is written comes from there. Without CUDA the same stage copies between two pieces of CPU memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from infinity.errors import ConfigError
from infinity.native import READ, WRITE
from infinity.workload import clone
from infinity.workload import run as running
from infinity.workload.fio_json import render_json
from infinity.workload.hop import Hop, hop_sets
from infinity.workload.jobfile import JobText, Setting
from infinity.workload.pump import Sets, count_blocks
from infinity.workload.report import render

MIB = 1 << 20
HAS_CUDA = torch.cuda.is_available()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs CUDA, and this machine has none")]),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """What stands for HBM."""
    place = torch.device(request.param)
    for module in (clone, running):
        monkeypatch.setattr(module, "device_of", lambda job: None if job.target == "cpu" else place)
    return place


@pytest.fixture
def arrived(monkeypatch):
    """(offset, what HBM held of it) of every block that was read, in the order in which sets arrived."""
    found = []
    after = Hop.after

    def look(hop, transfers):
        work = after(hop, transfers)
        work.wait()
        for row in transfers[transfers["direction"] == READ]:
            start = int(row["buffer"]) * hop._buffers.stride
            found.append((int(row["offset"]), hop._hbm[start : start + int(row["nbytes"])].cpu().numpy().tobytes()))
        return work

    monkeypatch.setattr(Hop, "after", look)
    return found


@pytest.mark.parametrize("words", [["--rw=read", "--bs=64k"], ["--rw=randread", "--bssplit=4k/50:16k/50"], ["--rw=read", "--bs=512"]], ids=" ".join)
def test_every_block_that_is_read_is_in_hbm_with_its_bytes(run, disk, device, arrived, words):
    content = np.random.default_rng(0).bytes(2 * MIB)
    (disk / "full").write_bytes(content)
    (result,) = run("--filename=full", "--ioengine=libaio", "--iodepth=8", "--direct=0", "--target=cuda", *words)
    assert sum(len(block) for _, block in arrived) == result.stats.directions[READ].nbytes == 2 * MIB
    assert all(content[offset : offset + len(block)] == block for offset, block in arrived)
    assert result.hops[READ].nbytes == 2 * MIB and WRITE not in result.hops


@pytest.mark.parametrize("words", [["--rw=write", "--bs=64k"], ["--rw=randwrite", "--bssplit=4k/50:16k/50"]], ids=" ".join)
def test_every_block_that_is_written_comes_from_hbm(run, disk, device, monkeypatch, words):
    enter = Hop.__enter__

    def fill(hop):
        hop._hbm.fill_(7)
        hop._buffers.bytes[:] = 1
        return enter(hop)

    monkeypatch.setattr(Hop, "__enter__", fill)
    (result,) = run("--size=2m", "--ioengine=libaio", "--iodepth=8", "--target=cuda", *words)
    assert (disk / "a.0.0").read_bytes() == b"\7" * (2 * MIB)
    assert result.hops[WRITE].nbytes == 2 * MIB and READ not in result.hops


def test_a_mixed_job_copies_each_direction_once(run, device):
    (result,) = run("--rw=randrw", "--bs=4k", "--size=4m", "--ioengine=libaio", "--iodepth=16", "--target=cuda", "--numjobs=1", "--fsync=32")
    assert {direction: copies.nbytes for direction, copies in result.hops.items()} == {
        direction: stats.nbytes for direction, stats in result.stats.directions.items()
    }


def test_the_reports_say_what_the_copies_did(run, device):
    (result,) = run("--rw=rw", "--bs=64k", "--size=4m", "--target=cuda")
    text, table = render([result]), json.loads(render_json([result]))
    assert "target=cuda" in text.splitlines()[0] and "hbm: upload at" in text and "hbm: download at" in text
    (job,) = table["jobs"]
    assert job["infinity"]["target"] == "cuda"
    assert job["infinity"]["hbm"]["read"]["copied_bytes"] == job["read"]["io_bytes"]


def test_a_timed_job_counts_until_its_last_block_is_in_hbm(run, device):
    (result,) = run("--rw=read", "--bs=64k", "--size=1m", "--time_based", "--runtime=100ms", "--ramp_time=50ms", "--target=cuda")
    moved = result.stats.directions[READ]
    assert result.hops[READ].nbytes == moved.nbytes > 0
    assert 0 < result.hops[READ].busy_ns <= moved.elapsed_ns


def test_a_device_that_is_not_there_is_refused_before_anything_is_made(run, disk):
    for device in ("cuda:99", "cuda:128", "cuda:256", "cuda:99999999999999999999"):
        with pytest.raises(ConfigError, match=f"target={device}: .*Leave target at cpu"):
            run("--size=1m", f"--target={device}")
    for device in ("gpu", "CUDA", "cuda:", "cuda:-1", "cuda:\u0663"):
        with pytest.raises(ConfigError, match=f"'{device}': choose cpu, cuda, or cuda:N"):
            run("--size=1m", f"--target={device}")
    with pytest.raises(ConfigError, match="verify looks at blocks in CPU memory"):
        run("--rw=write", "--size=1m", "--verify=crc32c", "--target=cuda")
    assert list(disk.iterdir()) == []


def test_more_copies_than_a_timeline_remembers_are_added_up(run, device, monkeypatch):
    monkeypatch.setattr("infinity.timeline.Timeline.__init__.__defaults__", (10,))
    (result,) = run("--rw=randread", "--bs=512", "--size=64k", "--direct=0", "--target=cuda")  # a copy for each block
    assert result.hops[READ].nbytes == result.stats.directions[READ].nbytes == 64 << 10


@pytest.mark.parametrize("bs", ["4k", "1m", "64m", "1g"])
@pytest.mark.parametrize("iodepth", [1, 32])
def test_sets_hold_what_is_in_flight_twice_and_little_more(bs, iodepth):
    """In flight, and as much again for the start of the next request; at most 40 MiB, or three blocks, on their way beside it."""
    job = JobText("a", "", (), (Setting("bs", bs, ""), Setting("iodepth", str(iodepth), ""), Setting("ioengine", "libaio", ""))).job()
    block = job.blocks[READ].largest
    held = [sets.blocks * sets.count * block for sets in (hop_sets(job, 1, block), Sets(blocks=count_blocks(job, 1, block)))]
    assert held[0] <= 2 * iodepth * block + max(40 * MIB, 3 * block)
    assert held[1] <= 2 * max(2 * iodepth * block, 8 * MIB)
