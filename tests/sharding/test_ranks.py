"""Collectives between real processes: right values, one order, and a name for whoever does not come."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from infinity.errors import ClosedError, ConfigError, InfinityError, MoverError, RankError, TraceError
from infinity.kinds import Lane
from infinity.optim.promise import Promise
from infinity.sharding import groups
from infinity.sharding.groups import _HOLDS_INTERPRETER, COLLECTIVE, leave_world
from infinity.sharding.issuer import BETWEEN, Collective, Issuer
from infinity.sharding.ranks import Gather, Ranks, _digest, join_ranks
from infinity.storage.work import COMPLETED
from infinity.timeline import Timeline
from tests.ranks import TIMEOUT_S, job, run_ranks


def ranks_of(timeout_s=30.0, timeline=None):
    return join_ranks("cpu", timeout_s=timeout_s, timeline=timeline or Timeline())


def test_alone_nothing_moves():
    ranks = Ranks(timeout_s=1.0, timeline=Timeline())
    full = torch.arange(6.0)
    assert (ranks.rank, ranks.world_size, len(ranks.shard(6))) == (0, 1, 6)
    reduced = []
    assert ranks.gather(full, "u") is COMPLETED
    assert ranks.reduce(full, frozenset({1, 3}), 5, "u", lambda own, present: reduced.append((own.tolist(), present))) is COMPLETED
    assert reduced == [(list(range(6)), {1, 3})]
    assert ranks.broadcast(full, "u") is COMPLETED
    assert ranks.total(2.5, "norm", is_sharded=True) == 2.5 and ranks.everybodys("a", "x") == ["a"]
    ranks.check_same("a", "x", "")
    ranks.close()


DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool)


def everything(rank, world_size):
    timeline = Timeline()
    ranks = ranks_of(timeline=timeline)
    part = 5
    values = torch.arange(world_size * part).float()
    full = torch.full_like(values, -1)
    own = ranks.shard(full.numel())
    full[own.start : own.stop] = values[own.start : own.stop]
    elsewhere = torch.full_like(values, -1)
    works = [ranks.gather(full, "u"), *ranks.gather_each([Gather(elsewhere, "v", own=values[own.start : own.stop].clone())])]
    grads = {dtype: (values * (rank + 1)).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    reduced = {}
    for dtype, grad in grads.items():
        works.append(ranks.reduce(grad, frozenset({rank, 7}), 9, "u", lambda own, present, dtype=dtype: reduced.update({str(dtype): (own, present)})))
    told = {dtype: (torch.arange(7) % 2).to(dtype) if rank == 0 else torch.ones(7, dtype=dtype) for dtype in DTYPES}
    works += [ranks.broadcast(tensor, str(dtype)) for dtype, tensor in told.items()]
    for work in works:
        work.wait(30)
    found = {
        "told": {str(dtype): tensor.float().tolist() for dtype, tensor in told.items()},
        "gathered": torch.equal(full, values) and torch.equal(elsewhere, values),
        "reduced": {dtype: own.tolist() for dtype, (own, _) in reduced.items()},
        "present": [present for _, present in reduced.values()],
        "total": ranks.total(0.1 * (rank + 1), "norm", is_sharded=True),
        "of rank 0": ranks.total(0.1 * (rank + 1), "norm", is_sharded=False),
        "everybody": ranks.everybodys({rank: "x" * rank**5}, "x"),  # of every size
        "lanes": {span.lane for span in timeline.spans()},
    }
    ranks.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_of_real_processes(world_size):
    found = run_ranks(everything, world_size)
    factor = sum(range(1, world_size + 1)) / world_size
    for rank, values in enumerate(found):
        assert values["gathered"] and values["lanes"] == {Lane.COMM}
        wanted = [factor * (5 * rank + n) for n in range(5)]
        for dtype, reduced in values["reduced"].items():
            assert reduced == pytest.approx(wanted, rel=1e-6 if "32" in dtype else 2e-2), dtype
        assert values["told"] == {str(dtype): [0, 1, 0, 1, 0, 1, 0] for dtype in DTYPES}
        assert values["present"] == 3 * [{*range(world_size), 7}]
        assert values["everybody"] == [{other: "x" * other**5} for other in range(world_size)]
    assert {values["of rank 0"] for values in found} == {0.1}
    assert len({values["total"] for values in found}) == 1 and found[0]["total"] == pytest.approx(0.1 * sum(range(1, world_size + 1)))


def count_what_hosts_say(rank, world_size):
    """(what each call was of, the values) of a turn of three gathers, a reduce that all ranks have the same part in, and one that they have not."""
    said = []
    compare, union = Issuer._compare, Ranks._union
    Issuer._compare = lambda self, names, *rest: (said.append(list(names)), compare(self, names, *rest))[1]
    Ranks._union = lambda self, members, count: (said.append(sorted(members)), union(self, members, count))[1]
    ranks = ranks_of()
    fulls = [torch.full((2 * world_size,), float(rank + 10 * n)) for n in range(3)]
    for work in ranks.gather_each([Gather(full, f"u{n}") for n, full in enumerate(fulls)]):
        work.wait(30)
    present = []
    for name, members in (("same", {0, 3}), ("other", {rank})):
        ranks.reduce(torch.ones(world_size), frozenset(members), 4, name, lambda own, united: present.append(united)).wait(30)
    ranks.close()
    return said, [full.tolist() for full in fulls], present


def test_hosts_compare_a_turn_of_collectives_once_and_unite_only_what_differs():
    for rank, (said, fulls, present) in enumerate(run_ranks(count_what_hosts_say, 2)):
        assert said == [["gather of u0", "gather of u1", "gather of u2"], ["reduce of same"], ["reduce of other"], [rank]]
        assert fulls == [[10 * n, 10 * n, 10 * n + 1, 10 * n + 1] for n in range(3)]
        assert present == [{0, 3}, {0, 1}]


def gather_in_turns(rank, world_size, turns):
    """What every work of a turn ends with."""
    ranks, told = ranks_of(), []
    ranks.gather(torch.zeros(world_size), "first").wait(30)
    for work in ranks.gather_each([Gather(torch.zeros(world_size), name) for name in turns[rank]]):
        with pytest.raises(TraceError) as raised:
            work.wait(30)
        told.append(str(raised.value))
    return told


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (("abc", "axc"), "3 is 'gather of b' on rank 0; 'gather of x' on rank 1. "),
        (("ab", "a"), "3 is 'gather of b' on rank 0; nothing more at once on rank 1. "),
        (("xab", "yac"), "2 is 'gather of x' on rank 0; 'gather of y' on rank 1. "),
    ],
)
def test_the_first_collective_of_a_turn_that_differs_is_named_on_all_ranks(turns, told):
    found = run_ranks(gather_in_turns, 2, turns)
    assert [len(errors) for errors in found] == [len(names) for names in turns]
    (error,) = {error for errors in found for error in errors}
    assert error.startswith("the ranks took different ways") and f"Collective number {told}" in error


def fail_in_a_turn(rank, world_size):
    """What the works of a turn end with in whose second collective rank 1 fails."""
    ranks, told = ranks_of(), []
    broken = Promise("a read", 30.0)
    if rank == 1:
        broken.fail(MoverError("the disk is gone"))
    else:
        broken.keep()
    works = ranks.gather_each([Gather(torch.zeros(world_size), name, [broken] if name == "b" else ()) for name in "abc"])
    for work in works:
        try:
            work.wait(30)
            told.append("")
        except InfinityError as error:
            told.append(str(error))
    ranks.close()
    return told


def test_what_is_left_of_a_turn_ends_with_the_rank_that_fails_in_it():
    for told in run_ranks(fail_in_a_turn, 2):
        assert told[0] == "" and all("the disk is gone" in error for error in told[1:]) and len(told) == 3


def test_the_same_sets_have_the_same_digest_and_others_another():
    assert hash(frozenset({133, 1377})) == hash(frozenset({230, 1346})), "of Python's own"
    sets = [frozenset(range(n)) for n in range(40)] + [frozenset({133, 1377}), frozenset({230, 1346}), frozenset({12, 3}), frozenset({1, 23})]
    assert len({_digest(members) for members in sets}) == len(sets)
    assert _digest(frozenset([5, 1, 3])) == _digest(frozenset([3, 5, 1]))


def replicate(rank, world_size):
    """Two groups of two: shards inside, replicas across."""
    ranks = join_ranks("cpu", timeout_s=30.0, timeline=Timeline(), shard_group=2)
    full, own = torch.full((4,), -1.0), ranks.shard(4)
    full[own.start : own.stop] = float(rank)
    ranks.gather(full, "u").wait(30)
    grad, reduced = torch.arange(4.0) * (rank + 1), []
    ranks.reduce(grad, frozenset({rank}), 4, "u", lambda own, present: reduced.extend([own.tolist(), present])).wait(30)
    found = (ranks.shard_rank, ranks.shard_size), full.tolist(), reduced, ranks.total(10.0**rank, "norm", is_sharded=True)
    ranks.close()
    return found


def test_shards_inside_a_group_and_replicas_across():
    for rank, found in enumerate(run_ranks(replicate, 4)):
        first = rank // 2 * 2
        mean = [2.5 * n for n in range(4)][rank % 2 * 2 :][:2]
        assert found == ((rank % 2, 2), [first, first, first + 1, first + 1], [mean, {0, 1, 2, 3}], 11.0)


def divide(rank, world_size):
    join_ranks("cpu", timeout_s=30.0, timeline=Timeline(), shard_group=2)


def test_a_group_that_does_not_divide_the_ranks_is_refused():
    with job(divide, 3) as running:
        told = {running.outcome(rank).error for rank in range(3)}
    assert told == {"ConfigError: zero.shard_group = 2 does not divide the 3 ranks. Start a multiple of 2, or choose a divisor"}


def divide_differently(rank, world_size):
    """The error, and how many process groups are left beside the program's own."""
    with pytest.raises(ConfigError) as refused:
        join_ranks("cpu", timeout_s=30.0, timeline=Timeline(), shard_group=1 + rank)
    return str(refused.value), len(dist.distributed_c10d._world.pg_map) - 1


def test_groups_that_differ_are_named_on_all_ranks_and_none_is_left():
    told = "zero.shard_group differs between ranks: 1 on rank 0, 2 on rank 1. Give every rank the same"
    assert run_ranks(divide_differently, 2) == [(told, 0)] * 2


def come_late(rank, world_size):
    groups._START_S = 0.0
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
    ranks_of(timeout_s=TIMEOUT_S / 3)


def test_a_rank_that_does_not_join_is_waited_for_so_long_and_no_longer():
    with job(come_late, 2) as running:
        told = [running.outcome(rank).error for rank in range(2)]
    for error in told:
        assert error.startswith("ConfigError: the ranks have not joined: one has ended, or has not come within 2 s. Look at the logs of all.")


def compare(rank, world_size):
    ranks = ranks_of()
    ranks.check_same("adamw", "optimizer", "")
    try:
        ranks.check_same("bf16" if rank == 2 else "fp32", "precision.dtype", "Give every rank the same configuration")
    except ConfigError as error:
        return str(error)
    finally:
        ranks.close()


def begin(rank, world_size):
    ranks = ranks_of()
    with ranks.all_or_none("the beginning"):
        pass
    with ranks.all_or_none("opening the paths"):
        if rank == 1:
            raise ConfigError("nvme.paths: /mnt/x is missing")


def test_what_one_rank_cannot_do_is_an_error_on_all():
    with job(begin, 3) as running:
        told = [running.outcome(rank).error for rank in range(3)]
    assert told[1] == "ConfigError: nvme.paths: /mnt/x is missing"
    assert told[0] == told[2] == "RankError: opening the paths failed on rank 1, of 1 that failed: ConfigError: nvme.paths: /mnt/x is missing"


def break_off(rank, world_size):
    ranks = ranks_of()
    with ranks.as_one("the beginning"):
        ranks.broadcast(torch.zeros(3), "piece 0").wait()
    with ranks.as_one("the first values"):
        for piece in range(1, 5):
            if (rank, piece) == (1, 3):
                raise OSError("the disk is full")
            ranks.broadcast(torch.zeros(3), f"piece {piece}").wait()


def test_what_fails_on_one_rank_between_collectives_is_an_error_on_all_at_once():
    with job(break_off, 3) as running:
        told = [running.outcome(rank).error for rank in range(3)]
    assert told[1] == "OSError: the disk is full"
    assert told[0] == told[2] == "RankError: the first values failed on rank 1: OSError: the disk is full"


def prepare_at_leisure(rank, world_size):
    ranks = ranks_of(timeout_s=TIMEOUT_S / 6)
    with ranks.all_or_none("preparing"):
        time.sleep(TIMEOUT_S if rank == 0 else 0)  # three times as long as a collective is waited for
    ranks.close()


def test_what_all_or_none_does_may_take_one_rank_as_long_as_it_needs():
    run_ranks(prepare_at_leisure, 2)


def leave_alone(rank, world_size):
    ranks = ranks_of(timeout_s=TIMEOUT_S / 3)
    if rank == 0:
        return ranks.close()
    with ranks.all_or_none("preparing"):
        pass


def test_a_rank_that_ends_is_not_waited_for_where_others_are_at_leisure():
    with job(leave_alone, 2) as running:
        assert running.outcome(1).error.startswith("RankError: rank 0 has ended, after 0 collectives, and this one waits for it in number 1")


def test_a_difference_is_an_error_on_all_ranks_that_names_who_has_what():
    told = run_ranks(compare, 3)
    assert len(set(told)) == 1
    assert "precision.dtype differs between ranks: 'fp32' on ranks 0, 1; 'bf16' on rank 2. Give every rank the same" in told[0]


def wait_until(holds, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gather_until_lost(rank, world_size, lost, folder):
    ranks = ranks_of(timeout_s=TIMEOUT_S)
    full = torch.zeros(4 * world_size)
    for count in range(10_000):
        if count == 5:
            time.sleep(TIMEOUT_S / 2)  # beats tell of it
            (folder / str(rank)).touch()
        if rank == lost and count == 5:
            time.sleep(3600)  # until the test ends it
        ranks.gather(full, f"unit {count}").wait()


@pytest.mark.parametrize(
    ("how", "world_size", "lost"),
    [
        (signal.SIGKILL, 4, 2),
        (signal.SIGSTOP, 2, 0),
        *(pytest.param(how, n, lost, marks=pytest.mark.slow) for how in (signal.SIGKILL, signal.SIGSTOP) for n, lost in ((2, 1), (3, 0), (4, 3))),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_by_the_others(tmp_path, world_size, lost, how):
    with job(gather_until_lost, world_size, lost, tmp_path, timeout_s=5 * TIMEOUT_S) as running:
        wait_until(lambda: len(list(tmp_path.iterdir())) == world_size)
        os.kill(running.processes[lost].pid, how)
        others = [running.outcome(rank) for rank in range(world_size) if rank != lost]
    for outcome in others:
        assert outcome.error.startswith(f"RankError: rank {lost} has not been heard of for") and BETWEEN in outcome.error


def threads_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("infinity")]


def stop(_):
    os.kill(os.getpid(), signal.SIGSTOP)


class Local:
    """What the function has that called into the engine: an error holds on to it."""


def outlive(rank, world_size, place, shard_group):
    """What is left when a rank was stopped and the others have closed theirs: of the engine's threads, and of what it was given beside what gloo has.
    And whether that was before a collective had to be over."""
    ranks = join_ranks("cpu", timeout_s=TIMEOUT_S, timeline=Timeline(), shard_group=shard_group)
    ranks.gather(torch.zeros(world_size), "first").wait()
    began = time.monotonic()
    if rank == 1 and place == "before they meet":
        stop(None)
    if rank == 1 and place == "in a gather":
        ranks._gathering = lambda gather: Collective(f"gather of {gather.name}", gather.full, stop)
    if rank == 1:
        ranks._average = stop
    given = lose_one(ranks, world_size, place)
    ranks.close()
    seconds = time.monotonic() - began
    del ranks
    gc.collect()
    return threads_left(), [name for name, reference in given.items() if reference() is not None], seconds < COLLECTIVE * TIMEOUT_S


def lose_one(ranks, world_size, place):
    local, then, later = Local(), partial(print), torch.zeros(world_size)
    given = {name: weakref.ref(value) for name, value in (("a local", local), ("then", then), ("what comes later", later), ("ranks", ranks))}
    with pytest.raises(RankError, match="rank 1 has not been heard of"):
        if place == "in a reduce":
            ranks.reduce(torch.zeros(world_size), frozenset(), 1, "second", then).wait()
        else:
            ranks.gather_each([Gather(torch.zeros(world_size), "second"), Gather(later, "third")])[0].wait()
    return given


@pytest.mark.parametrize(
    ("place", "world_size", "shard_group"), [("before they meet", 3, None), ("in a gather", 3, None), ("in a reduce", 3, None), ("in a reduce", 4, 2)]
)
def test_ranks_that_have_lost_one_do_not_wait_for_gloo_and_keep_no_more_than_it_has(place, world_size, shard_group):
    """A thread that did would come back when Python has ended, which aborts the process."""
    with job(outlive, world_size, place, shard_group) as running:
        for rank in sorted({*range(world_size)} - {1}):
            outcome = running.outcome(rank)
            assert (outcome.value, outcome.error) == (([], [], True), "")


def give_up(rank, world_size):
    """The same where a rank lives, and comes later than the other waits for it in its close."""
    ranks = ranks_of()
    ranks.gather(torch.zeros(world_size), "first").wait()
    if rank == 1:
        dist.barrier()
        return None
    work = ranks.gather(torch.zeros(world_size), "second")
    ranks.close(0.5)
    with pytest.raises(ClosedError):
        work.wait()
    left = threads_left()
    dist.barrier()
    return left


def test_a_close_that_does_not_wait_any_longer_leaves_no_thread_to_come_back():
    assert run_ranks(give_up, 2)[0] == []


def stall(rank, world_size):
    ranks = ranks_of(timeout_s=TIMEOUT_S / 2)
    full = torch.zeros(2 * world_size)
    ranks.gather(full, "first").wait()
    if rank == 1:
        time.sleep(3 * TIMEOUT_S)  # alive, and elsewhere in the program
    ranks.gather(full, "second").wait()


def test_a_rank_that_lives_and_does_not_come_is_found_by_its_count():
    with job(stall, 3, timeout_s=TIMEOUT_S / 2) as running:
        told = [running.outcome(rank) for rank in (0, 2)]
    for outcome in told:
        assert outcome.error.startswith("RankError: gather of second, collective number 2, failed on rank")
        assert f"rank 1 is behind, at: {BETWEEN}. {TIMEOUT_S:g} s have passed, 2 times zero.timeout_s: raise that" in outcome.error


def count_threads(rank, world_size):
    """Of this process, Python's and native ones: before, between, and after ranks that were closed and are still held."""
    dist.barrier()  # the program's own group has its threads from here on
    counts = [len(os.listdir("/proc/self/task"))]
    ranks = ranks_of()
    ranks.gather(torch.zeros(world_size), "u").wait(30)
    counts.append(len(os.listdir("/proc/self/task")))
    ranks.close()
    wait_until(lambda: _HOLDS_INTERPRETER or len(os.listdir("/proc/self/task")) <= counts[0], within_s=5.0)  # the kernel takes its time
    counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_no_thread_of_the_ranks_is_left_after_close():
    for before, between, after in run_ranks(count_threads, 2):
        assert before < between
        assert before == after or _HOLDS_INTERPRETER and after < between


def go_on_after_the_program(rank, world_size):
    """(names of groups that torch knows before the program destroys its own, which of them that shuts down, what ranks do afterwards)"""
    ranks = join_ranks("cpu", timeout_s=30.0, timeline=Timeline(), shard_group=2)
    world = dist.distributed_c10d._world
    known = [told["pg_name"] for told in world.pg_config_info]
    shut_down = [name for group, name in world.pg_names.items() if isinstance(group, dist.ProcessGroup)]
    dist.destroy_process_group()
    mean, full = torch.full((2,), rank + 1.0), torch.full((2,), float(rank))
    ranks.average(mean, "u").wait(30)
    ranks.gather(full, "u").wait(30)
    told = mean[ranks.shard_rank].item(), full.tolist(), ranks.everybodys(rank, "u")
    with pytest.raises(TraceError, match="'mean of 0' on rank 0; 'mean of 1' on rank 1"):
        ranks.average(mean, f"{rank}").wait(30)
    ranks.close()
    return known, shut_down, told


def test_ranks_go_on_and_close_when_the_program_has_destroyed_all_groups():
    for rank, (known, shut_down, told) in enumerate(run_ranks(go_on_after_the_program, 4)):
        assert len(set(known)) == 4, "the program's, everyone's, the shards' and the replicas'"
        assert shut_down == known[:1]
        assert told == (2.5, [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3])


def leave_early(rank, world_size):
    ranks = ranks_of(timeout_s=TIMEOUT_S / 3)
    ranks.gather(torch.zeros(world_size), "only").wait()
    if rank == 0:
        time.sleep(TIMEOUT_S)  # longer than anybody would be missed
    ranks.close()
    with pytest.raises(Exception, match="closed"):
        ranks.gather(torch.zeros(world_size), "after")
    return ranks.rank


def test_a_rank_that_ends_in_order_is_not_missed():
    assert run_ranks(leave_early, 2) == [0, 1]


def leave(rank, world_size):
    """Whether the group is there after it is left: as another than was made, beside another group, and alone."""
    world, kept = dist.group.WORLD, []
    leave_world(object())
    kept.append(dist.is_initialized())
    other = dist.new_group(backend="gloo")
    leave_world(world)
    kept.append(dist.is_initialized())
    dist.destroy_process_group(other)
    leave_world(world)
    return [*kept, dist.is_initialized()]


def test_a_process_group_is_destroyed_only_where_nobody_else_has_to_do_with_it():
    assert run_ranks(leave, 2) == [[True, True, False]] * 2
