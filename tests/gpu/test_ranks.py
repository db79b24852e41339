"""The claims about ranks where each computes on a GPU: its own, over NCCL, or one that they share, through CPU memory."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from models import tiny_gpt

import infinity
from infinity.errors import CapacityError, InfinityError, RankError
from infinity.kinds import Group, Lane, Tier
from infinity.sharding.calls import Call, all_gather, no_calls
from infinity.sharding.groups import Groups, Here
from infinity.sharding.issuer import Collective, Issuer, Meeting
from infinity.sharding.ranks import Ranks
from infinity.sharding.stages import STAGES
from infinity.storage.stream_work import stream_work
from infinity.timeline import Timeline
from tests.gpu.test_engine import distance
from tests.ranks import TIMEOUT_S, job, run_ranks
from tests.test_ranks import Primes, build, calls_of, ours, plain
from tests.test_ranks import settings as on_cpus

pytestmark = pytest.mark.gpu

PLACEMENTS = [
    *[("hbm", "hbm", "cpu"), ("hbm", "cpu", "cpu"), ("cpu", "cpu", "cpu"), ("hbm", "nvme", "nvme"), ("nvme", "nvme", "nvme")],  # the CPU updates
    *[("hbm", "hbm", "hbm"), ("cpu", "cpu", "hbm"), ("nvme", "nvme", "hbm")],  # the GPU does
]
"""Of (param, grad, optimizer)."""

WAYS = [(stage.number, placement) for stage in STAGES for placement in PLACEMENTS]


def settings(folder, placement, **sections):
    config = on_cpus(folder, **sections)
    return {
        **config,
        "device": "cuda",
        "budgets": {"cpu": "256MiB", "hbm": "1GiB"},
        "placement": dict(zip(("param", "grad", "optimizer"), placement, strict=True)),
    }


def compare(rank, world_size, kind, folder, ways, shard_group):
    """Per way: (losses, distance to torch's fused AdamW, values), and the distance between torch's own variants."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    calls = calls_of(kind, rank, world_size)
    there = [tuple(value.cuda() if isinstance(value, torch.Tensor) else value for value in call) for call in calls]
    losses, fused = plain(build(kind).cuda(), there, fused=True)
    _, loop = plain(build(kind).cuda(), there, foreach=False)
    found = {}
    for stage, placement in ways:
        place = folder / f"{stage} {' '.join(placement)}"
        place.mkdir(exist_ok=True)
        config = settings(place, placement, zero={"stage": stage, "shard_group": shard_group})
        mine, values = ours(build(kind), calls, config)
        found[stage, placement] = mine, distance(values, fused), {name: value.cpu().numpy() for name, value in values.items()}
    return losses, distance(fused, loop), found


def sums_first(stage):
    """Whether micro-steps are added up before the ranks' sum or after it, which decides over the last bits."""
    return stage < 2


@pytest.mark.parametrize(
    ("kind", "world_size", "ways", "shard_group"),
    [
        (tiny_gpt, 2, WAYS, "auto"),
        (Primes, 2, WAYS, "auto"),
        (tiny_gpt, 4, WAYS[::3], "auto"),
        (Primes, 4, WAYS[::3], 2),
    ],
)
def test_training_is_as_close_to_torch_as_torchs_own_variants_and_placements_are_bit_equal(tmp_path, kind, world_size, ways, shard_group):
    results = run_ranks(compare, world_size, kind, tmp_path, ways, shard_group, within_s=90.0)
    for losses, apart, found in results:
        for way, (mine, far, values) in found.items():
            assert far <= 3 * apart + 1e-7, way
            assert mine == pytest.approx(losses, rel=1e-5), way
            first = next(other[2] for (stage, _), other in results[0][2].items() if sums_first(stage) == sums_first(way[0]))
            assert all((values[name] == first[name]).all() for name in first), way


def split(rank, world_size, folder):
    """Values after a few steps with parameters of one flat buffer in several tiers, and with all of them in one."""
    found = []
    for param, budgets in (("auto", {"hbm": "64MiB"}), ("cpu", {"hbm": "1GiB"})):
        config = settings(folder, (param, "cpu", "nvme"), units={"threshold": 10}, prefetch={"units": 0}, train={"accumulation": 1})
        config["budgets"] = {"cpu": "256MiB", "activations": "1MiB", **budgets}
        if param == "auto":
            config["budgets"]["hbm"] = first_split(config)
        with infinity.initialize(wide(), config) as engine:
            for step in range(4):
                engine.model(torch.full((2, 256), 1.0 + rank + step)).square().mean().backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            values = []
            for layer in engine.model:  # more than a few do not fit
                with engine.gathered(layer):
                    values.append(layer.weight.detach().cpu().clone())
            found.append(torch.cat(values).numpy())
    return found


def first_split(config):
    """The first budget for HBM, in steps, that holds some chunks of a flat buffer's parameters and not all."""
    for hbm in range(1 << 20, 64 << 20, 128 << 10):
        try:
            plan = infinity.plan(wide(), {**config, "budgets": {**config["budgets"], "hbm": hbm}})
        except CapacityError:
            continue
        homes = {}
        for spec in plan.specs:
            if spec.key.group is Group.PARAM:
                homes.setdefault(spec.key.unit, set()).add(spec.tier)
        if any(Tier.HBM in tiers and len(tiers) > 1 for tiers in homes.values()):
            return hbm
    raise AssertionError("no budget divides a flat buffer")


def wide():
    torch.manual_seed(4)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))


def test_a_shard_that_rests_partly_in_hbm_trains_as_one_that_rests_in_one_place(tmp_path):
    for mixed, whole in run_ranks(split, 2, tmp_path):
        assert (mixed == whole).all()


def checkpoint(rank, world_size, folder):
    """(losses after a checkpoint, losses of the run that was loaded from it)"""
    data, losses = calls_of(tiny_gpt, rank, world_size), []
    for index, placement in enumerate([("hbm", "cpu", "cpu"), ("cpu", "cpu", "nvme")]):
        place = folder / f"{index}"
        place.mkdir(exist_ok=True)
        config = settings(place, placement, zero={"stage": 3 - index}, train={"accumulation": 1})
        with infinity.initialize(tiny_gpt(index), config, checkpoint=folder / "saved" if index else None) as engine:
            found = []
            for step in range(index * 3, 6):
                loss = engine.model(*data[step])
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                found.append(loss.item())
                if step == 2:
                    engine.save(folder / "saved").wait()
            losses.append(found[-3:])
    return losses


def test_a_checkpoint_of_gpus_goes_on_at_another_stage_and_in_other_tiers(tmp_path):
    for before, after in run_ranks(checkpoint, 2, tmp_path):
        assert before == after


def lanes(rank, world_size, folder):
    """Kinds of collectives that were recorded."""
    config = settings(folder, ("cpu", "cpu", "cpu"), train={"accumulation": 1})
    with infinity.initialize(tiny_gpt(recompute=True), config) as engine:
        for call in calls_of(tiny_gpt, rank, world_size)[:3]:
            engine.model(*call).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return {span.name.split(" of ")[0] for span in engine.timeline.spans() if span.lane is Lane.COMM}


def test_collectives_of_tensors_on_gpus_are_spans_of_the_comm_lane(tmp_path):
    for names in run_ranks(lanes, 2, tmp_path):
        assert {"gather", "reduce"} <= names


def exchange(rank, world_size, folder, stage, placement):
    """On what kind of device gradients were averaged and parameters gathered."""
    seen = set()

    def noted(call):
        return lambda self, full, name, **after: (seen.add((call.__name__, full.device.type)), call(self, full, name, **after))[1]

    Ranks.average, Ranks.gather = noted(Ranks.average), noted(Ranks.gather)
    with infinity.initialize(tiny_gpt(recompute=True), settings(folder, placement, zero={"stage": stage})) as engine:
        for call in calls_of(tiny_gpt, rank, world_size)[:2]:
            engine.model(*call).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("stage", "placement", "expected"),
    [
        (0, ("cpu", "cpu", "cpu"), {("average", "cuda"), ("gather", "cuda")}),
        (1, ("cpu", "cpu", "cpu"), {("average", "cuda"), ("gather", "cuda")}),
        (2, ("cpu", "hbm", "hbm"), {("gather", "cuda")}),
        (1, ("nvme", "cpu", "nvme"), {("average", "cuda"), ("gather", "cpu")}),
    ],
)
def test_what_rests_whole_in_cpu_memory_passes_between_ranks_in_hbm(tmp_path, stage, placement, expected):
    assert run_ranks(exchange, 2, tmp_path, stage, placement) == [expected] * 2


def alone_over_nccl(rank, world_size, folder, is_lost):
    """(what was gathered over NCCL, whether before its turn, the error that is told after that) in a group of one."""
    device = torch.device("cuda", 0)
    group = dist.new_group([0], backend="cpu:gloo,cuda:nccl")
    groups = Groups(dist.new_group([0], backend="gloo"), group, None, Here(0, 1), device, 1, uses_nccl=True)
    full = torch.zeros(1 << 20, device=device)
    own = torch.empty_like(full)
    all_gather(own, full, group=group)  # connects; what is loaded at its first use waits for the device too
    torch.add(own, 1).mean()
    issuer = Issuer(dist.HashStore(), rank=0, world_size=1, timeout_s=10.0, timeline=Timeline(), device=device, abort=groups.abort)
    assert issuer._motions.stream(Lane.COMM).priority < torch.cuda.current_stream().priority, "before compute"
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    torch.add(full, 3, out=full)

    def operation(_):
        yield Call(all_gather(own, full, group=group), group, (own, full))

    collective = Collective("gather", own, operation, [stream_work(device)], holds=(own, full))
    (gather,) = issuer.ask([collective], Meeting(group))
    gather.sync_current_stream()
    was_early = gather.is_completed()
    gathered = own.mean()  # queued behind it
    gather.wait(10.0)
    if is_lost:
        issuer.lose(RankError("rank 1 is lost"))
    else:
        assert issuer.close()
    try:
        issuer.ask([Collective("another", own, lambda _: no_calls())], Meeting(group))
        error = ""
    except InfinityError as told:
        error = str(told)
    if is_lost:
        issuer.close()
    groups.close()
    return gathered.item(), was_early, error


@pytest.mark.parametrize(("is_lost", "told"), [(True, "rank 1 is lost"), (False, "the engine is closed")])
def test_nccl_runs_behind_the_stream_and_ends_in_order_or_with_a_loss(tmp_path, is_lost, told):
    ((gathered, was_early, error),) = run_ranks(alone_over_nccl, 1, tmp_path, is_lost)
    assert (gathered, was_early) == (3.0, False) and error.startswith(told)


def lose(rank, world_size, folder, when):
    config = settings(folder, ("hbm", "cpu", "cpu"), zero={"timeout_s": TIMEOUT_S}, train={"accumulation": 1})
    with infinity.initialize(tiny_gpt(recompute=True), config) as engine:
        for step, call in enumerate(calls_of(tiny_gpt, rank, world_size)):
            loss = engine.model(*call)
            if step == 2 and rank == world_size - 1 and when == "backward":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            if step == 2 and rank == world_size - 1 and when == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            loss.item()


@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_rank_that_dies_is_named_by_the_others(tmp_path, when):
    with job(lose, 2, tmp_path, when) as running:
        assert running.outcome(1) is None
        error = running.outcome(0).error
    assert error.startswith("RankError: rank 1"), error


def test_ranks_of_different_kinds_of_device_are_refused(tmp_path):
    with job(mismatch, 2, tmp_path) as running:
        errors = [running.outcome(rank).error for rank in range(2)]
    assert all(error.startswith("ConfigError: device = ") and "cpu on rank 1" in error for error in errors), errors


def mismatch(rank, world_size, folder):
    infinity.initialize(tiny_gpt(), {**settings(folder, PLACEMENTS[0]), "device": "cuda" if rank == 0 else "cpu"})
