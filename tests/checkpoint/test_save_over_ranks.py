"""Several processes write one checkpoint, whichever elements each of them has; one that fails or is killed leaves none."""

from __future__ import annotations

import os
import signal
import time

from checkpoint.arrays import Arrays, same_bits
from checkpoint.test_save_load import FROZEN, TRAINED

from infinity.checkpoint import load, save
from infinity.errors import InfinityError, StorageError
from infinity.sharding.layout import Interval
from infinity.sharding.ranks import join_ranks
from infinity.timeline import Timeline
from tests.ranks import TIMEOUT_S, job, run_ranks

RUN = 61
PIECE_BYTES, FILE_BYTES = 100, 20_000


class Dealt(Arrays):
    """Every parameter in runs of RUN elements, dealt to the ranks in turn; what is other ranks' is held as well, or is not known."""

    def __init__(self, ranks, *, holds_all=False):
        super().__init__(TRAINED, FROZEN)
        self.ranks, self.holds_all = ranks, holds_all

    def share(self, name):
        (everything,) = super().share(name)
        starts = range(RUN * self.ranks.rank, len(everything), RUN * self.ranks.world_size)
        return [Interval(start, min(start + RUN, len(everything))) for start in starts]

    def held(self, name):
        return super().share(name) if self.holds_all else self.share(name)

    def read(self, name, state, start, stop):
        assert any(run.start <= start and stop <= run.stop for run in self.share(name))
        return super().read(name, state, start, stop)

    def is_as(self, other):
        return all(
            same_bits(values.view(-1)[run.start : run.stop], other.values[name, state].view(-1)[run.start : run.stop])
            for (name, state), values in self.values.items()
            for run in self.held(name)
        )


class Failing(Dealt):
    def read(self, name, state, start, stop):
        if self.ranks.rank == 1 and name == "large":
            raise StorageError(5, "/mnt/nvme0/x", 4096, 512)
        return super().read(name, state, start, stop)


def save_and_load(rank, world_size, folder):
    """What a failing save told, and whether all values came back."""
    ranks = join_ranks("cpu", timeout_s=60.0, timeline=Timeline())
    source = Dealt(ranks).fill()
    try:
        save(folder / "failing", Failing(ranks), {}, 0, ranks=ranks)
    except InfinityError as error:
        told = f"{type(error).__name__}: {error}"
    save(folder / "c", source, {"rank": rank}, 12, piece_bytes=PIECE_BYTES, file_bytes=FILE_BYTES, ranks=ranks)
    sinks = Dealt(ranks), Dealt(ranks, holds_all=True)
    extras = [load(folder / "c", sink, piece_bytes=PIECE_BYTES, ranks=ranks) for sink in sinks]
    ranks.close()
    assert source.largest_piece <= PIECE_BYTES
    return told, all(sink.is_as(source) for sink in sinks) and extras == [{"rank": rank}] * 2


def test_the_files_are_those_that_one_process_writes_whoever_has_which_elements(tmp_path):
    save(tmp_path / "alone", Arrays(TRAINED, FROZEN).fill(), {}, 12, piece_bytes=PIECE_BYTES, file_bytes=FILE_BYTES)
    found = run_ranks(save_and_load, 3, tmp_path)
    assert all(is_back for _, is_back in found)
    states = {path.name: path.read_bytes() for path in (tmp_path / "alone").glob("states-*")}
    assert len(states) > 1 and states == {path.name: path.read_bytes() for path in (tmp_path / "c").glob("states-*")}
    told = "StorageError: [Errno 5] Input/output error at byte 4096, 512 bytes wanted: '/mnt/nvme0/x'"
    elsewhere = f"RankError: writing a checkpoint failed on rank 1, of 1 that failed: {told}"
    assert [error for error, _ in found] == [elsewhere, told, elsewhere]
    assert sorted(os.listdir(tmp_path)) == ["alone", "c"]


class Stops(Dealt):
    """Waits in the middle of a save, on one rank, until somebody kills the process."""

    def __init__(self, ranks, lost, mark):
        super().__init__(ranks)
        self.lost, self.mark = lost, mark

    def read(self, name, state, start, stop):
        if name == "large" and self.ranks.rank == self.lost:
            self.mark.touch()
            time.sleep(3600)
        return super().read(name, state, start, stop)


def save_until_lost(rank, world_size, lost, target, mark):
    ranks = join_ranks("cpu", timeout_s=TIMEOUT_S, timeline=Timeline())
    save(target, Stops(ranks, lost, mark), {}, 0, ranks=ranks)


def test_when_a_rank_is_killed_in_a_save_no_checkpoint_appears_and_the_other_names_it(tmp_path):
    targets = [tmp_path / f"without {lost}" / "c" for lost in range(2)]
    marks = [tmp_path / f"{lost}.there" for lost in range(2)]
    with (
        job(save_until_lost, 2, 0, targets[0], marks[0], timeout_s=2 * TIMEOUT_S) as without_first,
        job(save_until_lost, 2, 1, targets[1], marks[1], timeout_s=2 * TIMEOUT_S) as without_second,
    ):
        deadline = time.monotonic() + 60
        while not all(mark.exists() for mark in marks):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(without_first.processes[0].pid, signal.SIGKILL)
        os.kill(without_second.processes[1].pid, signal.SIGKILL)
        assert without_first.outcome(1).error.startswith("RankError: rank 0 has not been heard of for")
        assert without_second.outcome(0).error.startswith("RankError: rank 1 has not been heard of for")
    assert os.listdir(targets[1].parent) == [], "rank 0 clears up"
    assert os.listdir(targets[0].parent) == ["c.tmp"], "which the next save clears up"
    save(targets[0], Arrays(TRAINED, FROZEN).fill(), {}, 12)
    assert os.listdir(targets[0].parent) == ["c"]
