"""One model over several real processes: the same training as DistributedDataParallel's, wherever the states rest."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from models import batches, tiny_gpt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import infinity
from infinity.errors import CapacityError, RankError, TraceError
from infinity.kinds import Lane, Tier
from infinity.optim.exchange import BUFFERS
from infinity.planner import plan as plan_module
from infinity.runtime import scheduler
from infinity.runtime.ascent import Ascent
from infinity.runtime.fetches import Fetch
from infinity.runtime.scheduler import Scheduler
from infinity.sharding.issuer import Issuer, RankWork
from infinity.sharding.stages import STAGES, state_bytes
from tests.ranks import TIMEOUT_S, job, run_ranks, torchrun, unwatched

PLACEMENTS = {
    "cpu": {"param": "cpu", "grad": "cpu", "optimizer": "cpu"},
    "nvme": {"param": "nvme", "grad": "nvme", "optimizer": "nvme"},
    "states on nvme": {"param": "cpu", "grad": "cpu", "optimizer": "nvme"},
    "mixed": {},
}
STEPS, ACCUMULATION, MAX_NORM = 6, 2, 0.5


def settings(folder, placement="cpu", **sections):
    config = {
        "device": "cpu",
        "budgets": {"cpu": 1_400_000 if placement == "mixed" else "64MiB"},
        "nvme": {"paths": [str(folder)], "deadline_s": 30.0},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "chunk_size": "8KiB", "max_grad_norm": MAX_NORM},
        "store": {"resume": "never"},
        "train": {"accumulation": ACCUMULATION},
        "placement": PLACEMENTS[placement],
        "zero": {"timeout_s": 60.0},
    }
    for name, keys in sections.items():
        config[name] = {**config.get(name, {}), **keys}
    return config


class Primes(nn.Module):
    """Sizes that no number of ranks divides, a parameter that is frozen, and one that the ranks use in turns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.frozen, self.sometimes = nn.Parameter(torch.randn(7), requires_grad=False), nn.Parameter(torch.randn(11))
        self.head = nn.Linear(13, 1)

    def forward(self, x, is_used):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        extra = self.sometimes.square().sum() if is_used else 0.0
        return self.head(x).square().mean() + 1e-2 * self.frozen.sum() + extra


def lora():
    """Adapters are trained, everything else is frozen."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_gpt(), peft.LoraConfig(r=4, target_modules=["qkv", "down"]))


def share(data, rank, world_size):
    """A rank's micro-batches."""
    return data[rank::world_size]


def train(module, optimizer, step, calls):
    """`calls`: per micro-step the arguments of the model."""
    losses = []
    for index, arguments in enumerate(calls):
        loss = module(*arguments) / ACCUMULATION
        loss.backward()
        losses.append(loss.item())
        if index % ACCUMULATION == ACCUMULATION - 1:
            step()
            optimizer.zero_grad()
    return losses


def plain(model, calls, **variant):
    """DistributedDataParallel and torch's AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    module = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1, **variant)

    def step():
        torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()

    return train(module, optimizer, step, calls), {name: p.detach().clone() for name, p in model.named_parameters()}


def ours(model, calls, config):
    with infinity.initialize(model, config) as engine:
        losses = train(engine.model, engine.optimizer, engine.optimizer.step, calls)
        with engine.gathered():
            return losses, {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def distance(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def calls_of(kind, rank, world_size):
    count = STEPS * ACCUMULATION * world_size
    if kind is not Primes:
        return [(ids,) for ids in share(batches(count), rank, world_size)]
    generator = torch.Generator().manual_seed(5)
    return [(x, (index // 3) % 2 == rank % 2) for index, x in enumerate(share(torch.randn(count, 4, 13, generator=generator), rank, world_size))]


def build(kind):
    return tiny_gpt(recompute=True) if kind is tiny_gpt else kind()


WAYS = [
    *((3, placement, "auto") for placement in PLACEMENTS),
    *((stage, placement, "auto") for stage, placement in [(2, "mixed"), (2, "nvme"), (1, "cpu"), (1, "nvme"), (0, "mixed")]),
    (3, "cpu", 1),
]
"""(stage, placement, shard group): every stage where all rests in memory, and where the exchange around the update needs buffers."""

EVERY_WAY = [(stage, placement, "auto") for stage in (3, 2, 1, 0) for placement in PLACEMENTS]
GROUPED = [(3, "cpu", 2), (3, "nvme", 2), (2, "mixed", 2), (1, "nvme", 2), (0, "cpu", 2)]


def adds_first(way):
    """Whether micro-steps are added up before the ranks' sum, or after: the order of a sum shows in its last bits."""
    stage, _, shard_group = way
    return stage < 2 or shard_group == 1


def compare(rank, world_size, kind, folder, ways):
    """Per way: (losses, distance to torch's fused AdamW, values), and the distance between torch's own variants."""
    calls = calls_of(kind, rank, world_size)
    losses, fused = plain(build(kind), calls, fused=True)
    _, loop = plain(build(kind), calls, foreach=False)
    found = {}
    for stage, placement, shard_group in ways:
        place = folder / f"{stage} {placement} {shard_group}"
        place.mkdir(exist_ok=True)
        mine, values = ours(build(kind), calls, settings(place, placement, zero={"stage": stage, "shard_group": shard_group}))
        found[stage, placement, shard_group] = mine, distance(values, fused), {name: value.numpy() for name, value in values.items()}
    return losses, distance(fused, loop), found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "world_size", "ways"),
    [
        (tiny_gpt, 2, WAYS),
        (Primes, 3, WAYS),
        *(pytest.param(kind, n, EVERY_WAY, marks=SLOW) for kind in (tiny_gpt, Primes, lora) for n in (2, 3, 4)),
        pytest.param(tiny_gpt, 4, GROUPED, marks=SLOW),
        pytest.param(Primes, 4, GROUPED, marks=SLOW),
    ],
)
def test_training_is_as_close_to_torch_as_torchs_own_variants_and_placements_are_bit_equal(tmp_path, kind, world_size, ways):
    results = run_ranks(compare, world_size, kind, tmp_path, ways, within_s=500.0)
    for losses, apart, found in results:
        for way, (mine, far, values) in found.items():
            assert far <= 3 * apart + 1e-7, way
            assert mine == pytest.approx(losses, rel=1e-5), way
            first = next(other[2] for other_way, other in results[0][2].items() if adds_first(other_way) == adds_first(way))
            assert all((values[name] == first[name]).all() for name in first), way


def gathers(rank, world_size, folder):
    """How often each flat buffer is gathered from one step to the next, by units fetched ahead."""
    calls = calls_of(tiny_gpt, rank, world_size)
    return [gathered_in(calls[:3], units, folder) - gathered_in(calls[:2], units, folder) for units in (0, 2, 32)]


def gathered_in(calls, units, folder):
    """Ends without the last update, which would fetch ahead: so all that is begun is used, and is over once the engine is closed."""
    run = {"store": {"run": f"{units}-{len(calls)}"}, "prefetch": {"units": units}, "train": {"accumulation": 1}}
    with infinity.initialize(tiny_gpt(layers=4), settings(folder, **run)) as engine:
        for step, call in enumerate(calls):
            if step:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            engine.model(*call).backward()
    spans = engine.timeline.spans()
    assert not any(span.lane is Lane.UPLOAD for span in spans), "it is gathered from where it rests"
    return Counter(span.name for span in spans if span.lane is Lane.COMM and span.name.startswith("gather of "))


def test_a_unit_within_reach_is_gathered_once_for_forward_and_backward(tmp_path):
    for none, some, all_of_them in run_ranks(gathers, 2, tmp_path):
        assert all(count >= 2 for count in none.values())
        assert sum(all_of_them.values()) < sum(some.values()) < sum(none.values())
        assert set(all_of_them.values()) == {1} and all_of_them.keys() == none.keys()


def give_up_gathers(rank, world_size, folder):
    """How many collectives are remembered after three forwards; how many gathers from where a shard rests an interrupt leaves, and how many of
    them are under way once that may be written. Waiting for some that a rank does not come to raises nothing."""
    with infinity.initialize(tiny_gpt(layers=4), settings(folder, prefetch={"units": 32}, zero={"timeout_s": TIMEOUT_S})) as engine:
        scheduler, waiting = engine._parts.scheduler, engine._parts.ranks._issuer._waiting
        with torch.no_grad():
            for _ in range(3):
                engine.model(*calls_of(tiny_gpt, rank, world_size)[0])
        noted = [len(waiting)]
        scheduler.invalidate()
        time.sleep(rank)
        scheduler.warm()
        left = [work for fetch in scheduler._fetches.values() for work in fetch._works]
        with scheduler._changed.lock:
            for fetch in list(scheduler._fetches.values()):
                scheduler._drop(fetch)
        scheduler.invalidate()
        noted += [len(left), sum(not work.is_completed() for work in left)]
        if rank:
            engine._parts.ranks.give_up(RankError("rank 1 is tired"))
        else:
            scheduler.warm()
            scheduler.invalidate()
        with pytest.raises(RankError, match="rank 1 is tired"):
            engine.model(*calls_of(tiny_gpt, rank, world_size)[0])
        return noted


def test_an_update_waits_for_gathers_of_what_it_writes_also_where_nobody_wants_them_any_more(tmp_path):
    for noted in run_ranks(give_up_gathers, 2, tmp_path):
        assert noted[0] <= 5, "one forward's"
        assert noted[1:] == [5, 0]


def meet(rank, world_size, folder, placement, read_by_rank_1):
    """Which gathers the hosts compare at once for the second forward, where rank 1 alone has to read some of the units: as the update ends, and
    once more, when the forward begins with nothing there.
    """
    said, compare, resting_unit = [], Issuer._compare, scheduler.resting_unit

    def listen(self, names, *rest):
        if names[0].startswith("gather of "):
            said.append([name.removeprefix("gather of ") for name in names])
        return compare(self, names, *rest)

    def resting(unit, *rest):
        found = resting_unit(unit, *rest)
        return replace(found, is_in_memory=found.is_in_memory and (rank == 0 or found.name not in read_by_rank_1))

    Issuer._compare, scheduler.resting_unit = listen, resting
    with infinity.initialize(tiny_gpt(layers=4), settings(folder, placement, prefetch={"units": 32})) as engine:
        engine.model(*calls_of(tiny_gpt, rank, world_size)[0]).backward()
        before = len(said)
        engine.optimizer.step()
        engine._parts.scheduler.invalidate()
        after = len(said)
        engine.model(*calls_of(tiny_gpt, rank, world_size)[0])
    return said[before:after], said[after:]


ONE_BY_ONE = [["root"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3"]]


@pytest.mark.parametrize(
    ("placement", "read_by_rank_1", "as_the_update_ends", "as_the_forward_begins"),
    [
        ("cpu", (), [["root"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]], [["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]]),
        (
            "cpu",
            ("blocks.1",),
            [["root"], ["blocks.0"], ["blocks.1"], ["blocks.2", "blocks.3"]],
            [["root", "blocks.0"], ["blocks.1"], ["blocks.2", "blocks.3"]],
        ),
        ("nvme", (), ONE_BY_ONE, ONE_BY_ONE),
    ],
)
def test_hosts_meet_once_for_what_is_gathered_from_memory_and_for_each_unit_that_a_rank_reads(
    tmp_path, placement, read_by_rank_1, as_the_update_ends, as_the_forward_begins
):
    """The first unit, as the update ends, does not wait for the others."""
    assert run_ranks(meet, 2, tmp_path, placement, read_by_rank_1) == [(as_the_update_ends, as_the_forward_begins)] * 2


def interrupt(rank, world_size, folder, place):
    """Whether both ranks were struck as they ask for gathers, and the loss before and after that, each as soon as a forward takes."""
    calls, left, begun, gather = calls_of(tiny_gpt, rank, world_size), [-1], Scheduler._gather_begun, Fetch.started

    def strike():
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    def strike_before(self):
        if any(fetch.is_to_gather for fetch in self._fetches.values()):
            strike()
        return begun(self)

    def strike_after(self, work=None):
        gather(self, work)
        if isinstance(work, RankWork):
            strike()

    if place == "before it is asked":
        Scheduler._gather_begun = strike_before
    else:
        Fetch.started = strike_after
    config = settings(folder, prefetch={"units": 2}, nvme={"deadline_s": 5.0})
    losses, struck = [], False
    with infinity.initialize(tiny_gpt(layers=4), config) as engine:
        engine.model(*calls[0]).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine._parts.scheduler.invalidate()
        losses.append(engine.model(*calls[0]).item())
        engine._parts.scheduler.invalidate()
        left[0] = 2 if place == "in the middle" else 1
        try:
            engine.model(*calls[0]).backward()
        except KeyboardInterrupt:
            struck = True
        left[0] = -1
        engine.optimizer.zero_grad()
        start = time.monotonic()
        if place == "before it is asked":
            engine._parts.scheduler.invalidate()
        losses.append(engine.model(*calls[0]).item())
        engine.model(*calls[0]).backward()
        engine.optimizer.step()
        waited = time.monotonic() - start
    return struck, losses, waited < 5.0


@pytest.mark.parametrize("place", ["before it is asked", "in the middle", "after the first"])
def test_an_interrupt_of_all_ranks_as_they_ask_for_gathers_leaves_nothing_to_wait_for(tmp_path, place):
    for struck, (before, after), was_prompt in run_ranks(interrupt, 2, tmp_path, place):
        assert struck and was_prompt and before == after


def fail_to_begin(rank, world_size, folder):
    begin, is_full = Ascent.begin, threading.Event()

    def fails(self, fetch, resting):
        if is_full.is_set() and rank == 1 and fetch.name == "blocks.1":
            raise MemoryError("no memory for a buffer")
        return begin(self, fetch, resting)

    Ascent.begin = fails
    with infinity.initialize(tiny_gpt(layers=4), settings(folder, prefetch={"units": 2}, zero={"timeout_s": TIMEOUT_S})) as engine:
        call = calls_of(tiny_gpt, rank, world_size)[0]
        for step in range(2):
            engine.model(*call).backward()
            if step:
                is_full.set()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.model(*call)


def test_a_unit_that_one_rank_cannot_fetch_ahead_is_not_taken_for_another_way_through_the_model(tmp_path):
    with job(fail_to_begin, 2, tmp_path, timeout_s=TIMEOUT_S) as running:
        other, failed = (running.outcome(rank).error for rank in range(2))
    assert failed.startswith("MoverError: unit 'blocks.1' could not be fetched: MemoryError")
    assert other.startswith("RankError: rank 1 has ended")


def part_ways(rank, world_size, folder, stage):
    """What is told where rank 1 steps with other numbers, and the values after all has been put right; and without any of that."""
    told, calls = [], calls_of(tiny_gpt, rank, world_size)[:4]

    def refused(engine):
        with pytest.raises(TraceError) as caught:
            engine.optimizer.step()
        told.append(str(caught.value))

    def disturb(engine, step):
        group = engine.optimizer.param_groups[0]
        right = dict(group)
        if step == 0:
            group["lr"] *= 1 + rank
        elif step == 1:
            group["weight_decay"] *= 1 + rank
        elif step == 2:
            group["params"] = group["params"][rank:]
        else:
            engine.clip_grad_norm_(1e-3 * (1 + rank))
        refused(engine)
        group.update(right)
        engine.clip_grad_norm_(1e9)

    found = []
    for run in ("disturbed", "plain"):
        config = settings(folder, zero={"stage": stage}, train={"accumulation": 1}, store={"run": run})
        with infinity.initialize(tiny_gpt(), config) as engine:
            for step, call in enumerate(calls):
                engine.model(*call).backward()
                if run == "disturbed":
                    disturb(engine, step)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            with engine.gathered():
                found.append({name: p.detach().clone().numpy() for name, p in engine.model.named_parameters()})
            engine.model(*calls[0]).backward()
            engine.optimizer.param_groups[0]["lr"] = float("nan")
            engine.optimizer.step()  # wrong, and no more so than elsewhere
    return told, *found


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_would_update_with_different_numbers_are_told_and_nothing_is_lost(tmp_path, stage):
    for told, disturbed, plain in run_ranks(part_ways, 2, tmp_path, stage):
        lr, decay, left_out, clip = told
        assert "lr 0.001," in lr and "lr 0.002," in lr and "on rank 1" in lr and "weight" in lr
        assert "weight_decay 0.1," in decay and "weight_decay 0.2," in decay
        assert "token.weight would be updated with" in left_out and "left alone on rank 1" in left_out
        assert "the gradients would be scaled by 1 and clipped to [0.001] on rank 0" in clip and "[0.002] on rank 1" in clip
        assert all((disturbed[name] == value).all() for name, value in plain.items())


def arrive_late(rank, world_size, folder, stage):
    """What is told where gradients arrive once the ranks have averaged theirs, and the values after the step is begun again; and without."""
    calls, found = calls_of(tiny_gpt, rank, world_size)[:2], []
    for run in ("late", "plain"):
        config = settings(folder, zero={"stage": stage}, train={"accumulation": 1}, store={"run": run})
        with infinity.initialize(tiny_gpt(), config) as engine:
            if run == "late":
                engine.model(*calls[1]).backward()
                engine.clip_grad_norm_(1.0)
                engine.model(*calls[0]).backward()
                with pytest.raises(TraceError, match=r"arrived after the ranks had averaged theirs.*call zero_grad\(\)"):
                    engine.clip_grad_norm_(1.0)
                engine.optimizer.zero_grad()
            for call in calls:
                engine.model(*call).backward()
            engine.optimizer.step()
            with engine.gathered():
                found.append({name: p.detach().clone().numpy() for name, p in engine.model.named_parameters()})
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_arrive_after_the_mean_of_the_ranks_are_refused(tmp_path, stage):
    for late, plain in run_ranks(arrive_late, 2, tmp_path, stage):
        assert all((late[name] == value).all() for name, value in plain.items())


def cut_differently(rank, world_size, folder):
    """Norms and values where each rank's chunks are as large as suits its machine, which it may choose where it keeps everything."""
    plan_module._settle_whole, plan_module._chunk_numel = (lambda job, limits: None), (lambda job, limits: 8192 if rank else 2048)
    norms = []
    with infinity.initialize(tiny_gpt(), settings(folder, zero={"stage": 0}, train={"accumulation": 1})) as engine:
        for call in calls_of(tiny_gpt, rank, world_size):
            engine.model(*call).backward()
            engine.clip_grad_norm_(1e-2)
            norms.append(engine.optimizer._norm())  # in fp64
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        chunks = engine.plan.chunk_numel
        with engine.gathered():
            return chunks, norms, {name: p.detach().clone().numpy() for name, p in engine.model.named_parameters()}


def test_ranks_clip_alike_however_each_cuts_its_chunks(tmp_path):
    (small, norms, values), (large, others, theirs) = run_ranks(cut_differently, 2, tmp_path)
    assert (small, large) == (2048, 8192) and norms == others
    assert all((theirs[name] == value).all() for name, value in values.items())


def weigh(rank, world_size, folder):
    """(elements, by stage: bytes at rest by the plan, bytes in this rank's files, elements that pass in a step, the values)"""
    elements, found = sum(p.numel() for p in tiny_gpt(dim=128, layers=4).parameters()), {}
    for stage in STAGES:
        passed = []
        for steps in (1, 2):
            run = {"store": {"resume": "never", "run": f"{stage.number}-{steps}"}, "zero": {"stage": stage.number}, "train": {"accumulation": 1}}
            run["prefetch"] = {"units": 0}  # and none stays for backward
            config = settings(folder, "nvme", precision={"dtype": "bf16"}, optimizer={"chunk_size": "64KiB"}, **run)
            with infinity.initialize(tiny_gpt(dim=128, layers=4), config) as engine:
                for call in calls_of(tiny_gpt, rank, world_size)[:steps]:
                    engine.model(*call).backward()
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                with engine.gathered():
                    values = torch.cat([p.detach().flatten() for p in engine.model.parameters()])
                files = sum(path.stat().st_size for path in folder.rglob(f"{run['store']['run']}/*-r{rank}-*.safetensors"))
            passed.append(engine.timeline.moved_bytes()[Lane.COMM])  # closed: what is fetched ahead at the end is the same for both
        found[stage.number] = engine.plan.resting(Tier.NVME), files, (passed[1] - passed[0]) / 2, values.float().numpy()
    return elements, found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=SLOW)])
def test_states_and_traffic_are_what_the_table_of_stages_says_and_one_micro_step_gives_equal_bits(tmp_path, world_size):
    results = run_ranks(weigh, world_size, tmp_path)
    for elements, found in results:
        for stage in STAGES:
            resting, files, passed, values = found[stage.number]
            share = state_bytes(elements, stage, world_size)
            assert share <= resting < 1.05 * share, "padding apart"
            assert resting <= files, "and headers; a file takes half a MiB at least"
            assert stage.passes * elements <= passed < 1.05 * stage.passes * elements
            assert (values == results[0][1][0][3]).all(), "one sum over ranks, in one order, whatever is sharded"


def split(rank, world_size, folder):
    """Values after a few steps and a checkpoint: with what ranks exchange in both tiers, and all on NVMe."""
    found = []
    for stage, group in ((2, "param"), (1, "grad"), (0, "grad")):
        config = settings(folder, zero={"stage": stage}, units={"threshold": 10}, prefetch={"units": 0})
        config["placement"] = {**PLACEMENTS["nvme"], group: "auto"}
        for cpu_bytes in range(200_000, 1_000_000, 10_000):
            config["budgets"] = {"cpu": cpu_bytes}
            with suppress(CapacityError):
                if is_split(infinity.plan(layers(), config), group):
                    break
        else:
            raise AssertionError(f"no budget splits {group}")
        for way in (config, {**config, "placement": PLACEMENTS["nvme"]}):
            with infinity.initialize(layers(), way) as engine:
                for step in range(2 * ACCUMULATION):
                    engine.model(torch.full((2, 64), 1.0 + rank + step)).square().mean().backward()
                    if step % ACCUMULATION:
                        engine.optimizer.step()
                        engine.optimizer.zero_grad()
                if way is config:
                    engine.save(folder / f"{stage}")
                    engine.load(folder / f"{stage}")
                values = []
                for layer in engine.model:  # more than a few do not fit
                    with engine.gathered(layer):
                        values.append(layer.weight.detach().clone())
                found.append(torch.cat(values).numpy())
    return found


def is_split(plan, group):
    """Some flat buffers rest in CPU memory whole, and behind them more on NVMe than there are buffers for."""
    tiers = {}
    for spec in plan.specs:
        if spec.key.group == group:
            tiers.setdefault(spec.key.unit, set()).add(spec.tier)
    return {Tier.CPU} in tiers.values() and list(tiers.values()).count({Tier.NVME}) > BUFFERS


def layers():
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))


def test_what_ranks_exchange_may_rest_in_both_tiers(tmp_path):
    results = run_ranks(split, 2, tmp_path)
    for found in results:
        for mixed, apart in zip(found[::2], found[1::2], strict=True):
            assert (mixed == apart).all() and (found[0] == results[0][0]).all()


def differ(rank, world_size, folder, what):
    if what == "path":
        folder = folder if rank == 0 else folder / "missing"
    config = settings(folder, optimizer={"lr": 1e-3 * (1 + rank) if what == "config" else 1e-3})
    infinity.initialize(tiny_gpt(layers=4 + (rank if what == "model" else 0)), config)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("config", ["ConfigError: the configuration differs between ranks: optimizer.lr is 0.001 on rank 0 and 0.002 on rank 1"] * 2),
        ("model", ["ConfigError: the model differs between ranks: blocks.4.norm1.weight is nothing on rank 0 and torch.float32"] * 2),
        ("path", ["RankError: preparing the run failed on rank 1, of 1 that failed: ConfigError: nvme.paths: ", "ConfigError: nvme.paths: "]),
    ],
)
def test_what_differs_between_ranks_is_named_on_all_of_them_before_anything_is_written(tmp_path, what, told):
    with job(differ, 2, tmp_path, what) as running:
        found = [running.outcome(rank).error for rank in range(2)]
    assert all(error.startswith(start) for error, start in zip(found, told, strict=True)), found
    assert not list(tmp_path.rglob("*.safetensors"))


class EitherWay(nn.Module):
    """Two units of one size, used in an order that follows the data."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, is_left_first):
        for layer in (self.left, self.right) if is_left_first else (self.right, self.left):
            x = layer(x)
        return x.square().mean()


def take_other_ways(rank, world_size, folder):
    with infinity.initialize(EitherWay(), settings(folder, units={"threshold": 1000})) as engine:
        try:
            for step in range(3):
                engine.model(torch.ones(2, 64), rank == 0 or step < 2).backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
        finally:
            assert engine.global_step == 2


def test_ranks_that_take_different_ways_update_nothing(tmp_path):
    with job(take_other_ways, 2, tmp_path) as running:
        told = [running.outcome(rank).error for rank in range(2)]
    assert len(set(told)) == 1 and told[0].startswith("TraceError: the ranks took different ways through the model, and nothing more is updated")
    assert "on rank 0; '" in told[0] and "on rank 1. Let every rank" in told[0]


class Stops(nn.Module):
    """A model that waits where it is told to, on one rank, until somebody kills the process. The others have much of their backward to go then."""

    def __init__(self, place, folder, is_the_one):
        super().__init__()
        self.first, self.second = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))), nn.Linear(64, 64)
        self.place, self.folder, self.is_the_one, self.steps = place, folder, is_the_one, 0

    def wait_at(self, place):
        if self.steps == 2 and self.place == place:
            time.sleep(TIMEOUT_S / 2)  # beats tell of it
            (self.folder / f"{os.getpid()}.there").touch()
            if self.is_the_one:
                time.sleep(3600)

    def forward(self, x):
        hidden = self.first(x)
        self.wait_at("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.wait_at("backward"))
        return self.second(hidden).square().mean()


def train_until_lost(rank, world_size, lost, place, folder, stage):
    model = Stops(place, folder, rank == lost)
    small = {"units": {"threshold": 1000}, "optimizer": {"chunk_size": "8KiB"}, "prefetch": {"units": 1}}
    config = settings(folder, "nvme", zero={"timeout_s": TIMEOUT_S, "stage": stage}, **small)
    with infinity.initialize(model, config) as engine:
        for step in range(1000):
            model.steps = step
            for _ in range(ACCUMULATION):
                engine.model(torch.ones(4, 64)).backward()
            model.wait_at("step")
            engine.optimizer.step()
            engine.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("place", "world_size", "stage"),
    [
        ("backward", 2, 3),
        *(pytest.param(place, n, 3, marks=SLOW) for place in ("forward", "step") for n in (2, 4)),
        *(pytest.param("step", 2, stage, marks=SLOW) for stage in (0, 1, 2)),
    ],
)
def test_when_a_rank_is_killed_the_others_name_it(tmp_path, world_size, place, stage):
    check_loss(tmp_path, world_size, place, signal.SIGKILL, stage)


def test_when_a_rank_is_stopped_the_others_name_it(tmp_path):
    check_loss(tmp_path, 3, "backward", signal.SIGSTOP, stage=3)


def check_loss(folder, world_size, place, how, stage):
    lost = world_size - 1
    with job(train_until_lost, world_size, lost, place, folder, stage, timeout_s=2 * TIMEOUT_S) as running:
        deadline = time.monotonic() + 60
        while not (folder / f"{running.processes[lost].pid}.there").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(running.processes[lost].pid, how)
        killed = time.monotonic()
        told = [running.outcome(rank).error for rank in range(world_size) if rank != lost]
        assert time.monotonic() - killed < 4 * TIMEOUT_S
    assert all(error.startswith(f"{RankError.__name__}: rank {lost} has not been heard of for") for error in told), told


class Fails(nn.Module):
    """Raises on one rank in its second step: where the second layer has run, or where its gradient has gone down."""

    def __init__(self, place):
        super().__init__()
        self.layers, self.place = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), place

    def fail(self, step):
        if step == 1:
            raise ValueError("a bad batch")

    def forward(self, x, step):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.place == "forward":
                self.fail(step)
            if index == 1 and self.place == "backward":
                x.register_hook(lambda grad: self.fail(step))
        return x.square().mean()


def train_until_one_fails(rank, world_size, folder, place):
    with infinity.initialize(Fails(place if rank == 1 else ""), settings(folder, units={"threshold": 10})) as engine:
        for step in range(3):
            engine.model(torch.ones(2, 8), step).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_in_one_ranks_program_ends_the_others_long_before_the_timeout(tmp_path, place):
    with job(train_until_one_fails, 2, tmp_path, place) as running:
        found = [running.outcome(rank, within_s=30.0) for rank in range(2)]
    assert found[1].error == "ValueError: a bad batch"
    assert found[0].error.startswith("RankError: rank 1 has ended, after"), found


def go_on(rank, world_size, folder, steps):
    """Losses of some steps of the run in `folder`, which is published at the end."""
    paths = [{"path": str(folder / str(other)), "ranks": [other]} for other in range(world_size)]
    config = settings(folder, "nvme", store={"resume": "auto", "run": "long"}, nvme={"paths": paths})
    with infinity.initialize(tiny_gpt(), config) as engine:
        begun = engine.global_step
        calls = calls_of(tiny_gpt, rank, world_size)[begun * ACCUMULATION : (begun + steps) * ACCUMULATION]
        losses = train(engine.model, engine.optimizer, engine.optimizer.step, calls)
        assert engine.global_step == begun + steps and (engine.rank, engine.world_size) == (rank, world_size)
    dist.barrier()
    return losses


def test_a_run_that_was_closed_goes_on_to_the_digit_each_rank_on_its_own_path(tmp_path):
    for name in ("whole/0", "whole/1", "parts/0", "parts/1"):
        (tmp_path / name).mkdir(parents=True)
    whole = run_ranks(go_on, 2, tmp_path / "whole", 4)
    parts = [run_ranks(go_on, 2, tmp_path / "parts", 2) for _ in range(2)]
    assert whole == [first + second for first, second in zip(*parts, strict=True)]
    for rank in (0, 1):
        files = [path.name for path in (tmp_path / "whole" / str(rank)).rglob("*.safetensors")]
        assert files and all(f"-r{rank}-" in name for name in files)


class Routed(nn.Module):
    """A mixture of experts, of two dtypes. Each batch goes to one expert; whether the fp32 scale is used is a matter of the data too."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x, expert, is_scaled):
        hidden = self.experts[expert](x) * self.router(x).softmax(-1)[:, expert : expert + 1]
        return hidden * self.scale.to(hidden.dtype) if is_scaled else hidden


class RoutedBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x, expert, is_scaled):
        for block in self.blocks:
            x = x + block(x, expert, is_scaled)
        return x.float().square().mean()


def train_beside(rank, world_size, folder):
    """At each stage two engines in turns, and collectives of the program's own whenever it likes. Returns the last values by stage."""
    found = []
    for stage in range(4):
        run = {"zero": {"stage": stage}, "train": {"accumulation": 1}}
        config = settings(folder, precision={"dtype": "bf16", "keep_fp32": ["*scale"]}, optimizer={"lr": 0.01}, **run)
        other = {**config, "store": {"run": "b", "resume": "never"}}
        with infinity.initialize(RoutedBlocks(), config) as one, infinity.initialize(RoutedBlocks(), other) as two:
            for step in range(4):
                for engine in (one, two):
                    x = torch.full((2, 16), 1.0 + rank + step, dtype=torch.bfloat16)
                    engine.model(x, (rank + step) % 3, rank == step % 2).backward()
                    engine.optimizer.step()
                    mine = torch.tensor(float(rank))
                    dist.all_reduce(mine)
                    engine.optimizer.zero_grad()
                    assert mine.item() == sum(range(world_size))
            for engine in (one, two):
                with engine.gathered():
                    found.append(torch.cat([p.detach().float().flatten() for p in engine.model.parameters()]).numpy())
    return found


def test_ranks_that_route_differently_two_engines_and_the_programs_own_collectives(tmp_path):
    first, *others = (values for found in run_ranks(train_beside, 2, tmp_path) for values in found)
    assert all((values == first).all() for values in others), "at every stage, in both engines, on both ranks"
    with torch.no_grad():
        assert (torch.cat([p.flatten() for p in RoutedBlocks().parameters()]).numpy() != first).mean() > 0.9


def change_and_hold_back(rank, world_size, folder):
    told = []
    with infinity.initialize(Primes(), settings(folder, zero={"stage": 1}, optimizer={"max_grad_norm": None})) as engine:
        for (x, is_used), norm in zip(calls_of(Primes, rank, world_size)[:4], (1e-3, 1e9, 1e-3, 1e9), strict=True):
            engine.model(x, is_used).backward()
            engine.clip_grad_norm_(norm)
            if norm < 1:
                engine.model.zero_grad()  # that one is left out: neither it nor its clipping is seen again
            else:
                engine.optimizer.step()
        with engine.gathered():
            told.append(engine.model.head.weight.detach().numpy().copy())
    with infinity.initialize(Primes(), settings(folder, zero={"stage": 1})) as engine:
        for x, is_used in calls_of(Primes, rank, world_size)[:2]:
            with engine.no_sync():
                engine.model(x, is_used).backward()
        engine.optimizer.step()
        assert engine.global_step == 1
    with infinity.initialize(Primes(), settings(folder, store={"run": "b"})) as engine:
        for misuse in (engine.no_sync, lambda: change_on_one_rank(engine, rank)):
            try:
                misuse()
            except ValueError as error:
                told.append(str(error))
            except infinity.errors.TraceError as error:
                told.append(str(error))
        return told


def change_on_one_rank(engine, rank):
    with engine.gathered(engine.model.head):
        engine.model.head.weight.data.add_(rank)


def test_what_ranks_must_do_alike_is_refused_in_words(tmp_path):
    results = run_ranks(change_and_hold_back, 2, tmp_path)
    assert (results[0].pop(0) == results[1].pop(0)).all()
    for told in results:
        assert told[0].startswith("no_sync() keeps whole gradients on each rank, and zero.stage = 3 makes room for one part in 2 of them. Set")
        assert told[1].startswith("the parameters of unit") and "were changed on rank 0 in another way than on rank 1" in told[1]


def break_a_file(rank, world_size, folder):
    with infinity.initialize(tiny_gpt(), settings(folder, "nvme")) as engine:
        for step, call in enumerate(calls_of(tiny_gpt, rank, world_size)):
            if step == 2 and rank == 1:
                for path in folder.rglob("*-param-r1-*.safetensors"):
                    os.truncate(path, 4096)
            engine.model(*call).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()


def test_what_one_rank_cannot_read_is_told_to_all_at_once(tmp_path):
    with job(break_a_file, 2, tmp_path) as running:
        found = [running.outcome(rank, within_s=40.0) for rank in range(2)]
    assert found[1].error.startswith("StorageError"), found
    assert found[0].error.startswith("RankError: rank 1 ended, after") and "StorageError" not in found[0].error[:40], found
    assert "Input/output error" in found[0].error or "bytes wanted" in found[0].error


def end_early(rank, world_size, folder):
    """What this rank has lost, where rank 0 closes while rank 1 is still in its last step: the gathers of the next forward are asked for already."""
    lost, lose = [], Issuer.lose
    Issuer.lose = lambda self, error: (lost.append(repr(error)), lose(self, error))
    with infinity.initialize(tiny_gpt(), settings(folder, prefetch={"units": 4})) as engine:
        for step, call in enumerate(calls_of(tiny_gpt, rank, world_size)[:2]):
            engine.model(*call).backward()
            if step and rank == 1:
                finish = engine._parts.pipeline.finish
                engine._parts.pipeline.finish = lambda finish=finish: (finish(), time.sleep(1.0))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return lost


def test_a_rank_that_ends_earlier_than_the_others_is_not_lost(tmp_path):
    assert run_ranks(end_early, 2, tmp_path) == [[], []]


NEVER_CLOSED = """
import atexit
import sys

import torch
from models import tiny_gpt

import infinity

if sys.argv[2] == "at exit":
    atexit.register(lambda: engine.close())
engine = infinity.initialize(tiny_gpt(), {"device": sys.argv[1], "budgets": {"cpu": "64MiB"}, "store": {"resume": "never"}})
for _ in range(2):
    engine.model(torch.zeros(2, 8, dtype=torch.long, device=engine.device)).backward()
    engine.optimizer.step()
"""


@pytest.mark.parametrize(("closes", "reminders"), [("never", 2), ("at exit", 0)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_program_that_does_not_close_is_told_so_and_ends_well(tmp_path, device, closes, reminders):
    """With its groups' threads in the way, Python's end would abort the process; and they are there as long as the program's own last words."""
    (tmp_path / "program.py").write_text(NEVER_CLOSED)
    with torchrun(tmp_path, "program.py", device, closes) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors.count("was never closed. Use it under `with`, or call close()") == reminders


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_goes_on_when_the_program_has_destroyed_all_groups(tmp_path, device):
    """Gathers of the next forward are under way then."""
    init, destroy, close = "torch.distributed.init_process_group()", "torch.distributed.destroy_process_group()", "engine.close()"
    steps = NEVER_CLOSED[NEVER_CLOSED.index("for _ in") :]
    (tmp_path / "program.py").write_text("\n".join([NEVER_CLOSED.replace("engine = ", f"{init}\nengine = "), destroy, steps, close]))
    with torchrun(tmp_path, "program.py", device, "never") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "never closed" not in errors, errors


STOPS = """
import builtins
import os
import signal
import sys
import time

import torch
from models import tiny_gpt

import infinity
from infinity.sharding import groups
from infinity.sharding.ranks import Ranks

torch.distributed.init_process_group()  # waits for all, however late
groups._START_S = 0.0  # gloo gives up before Python has ended


class Last:
    def __del__(self):
        time.sleep(3 * timeout_s)


builtins.last = Last()
device, how, place, timeout_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
engine = infinity.initialize(tiny_gpt(), {"device": device, "budgets": {"cpu": "64MiB"}, "zero": {"timeout_s": timeout_s}})
for step in range(1000):
    engine.model(torch.zeros(2, 8, dtype=torch.long, device=engine.device)).backward()
    engine.optimizer.step()
    if step == 2 and engine.rank == 1 and place == "after a step":
        os.kill(os.getpid(), how)
    if step == 2 and engine.rank == 1:  # the others have begun it then
        Ranks._average = lambda self, full: os.kill(os.getpid(), how)
"""


@pytest.mark.parametrize(
    ("device", "how", "place", "timeout_s"),
    [
        ("cpu", signal.SIGSTOP, "after a step", 2.0),
        ("cpu", signal.SIGSTOP, "in a reduce", 2.0),
        pytest.param("cuda", signal.SIGSTOP, "after a step", TIMEOUT_S, marks=pytest.mark.gpu),
        pytest.param("cuda", signal.SIGKILL, "after a step", TIMEOUT_S, marks=pytest.mark.gpu),
        pytest.param("cuda", signal.SIGSTOP, "in a reduce", TIMEOUT_S, marks=pytest.mark.gpu),
    ],
)
def test_a_program_that_has_lost_a_rank_ends_with_its_error_and_not_by_a_signal(tmp_path, device, how, place, timeout_s):
    """Python takes longer to end than gloo waits, or than what aborts NCCL takes."""
    (tmp_path / "program.py").write_text(STOPS)
    with unwatched(tmp_path, "program.py", device, str(int(how)), place, str(timeout_s)) as (first, _):
        _, errors = first.communicate(timeout=120)
    assert first.returncode == 1 and "RankError: rank 1 has not been heard of" in errors, errors


STARTS_LATE = """
import os
import sys
import time

import torch.distributed as dist
from models import tiny_gpt

import infinity

if sys.argv[1] == "after it has joined":
    dist.init_process_group("gloo")
time.sleep(5.0 * int(os.environ["RANK"]))
with infinity.initialize(tiny_gpt(), {"device": "cpu", "budgets": {"cpu": "64MiB"}, "zero": {"timeout_s": 2.0}}):
    pass
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("when", ["from the beginning", "after it has joined"])
def test_a_rank_that_starts_later_than_ranks_wait_for_each_other_is_waited_for(tmp_path, when):
    (tmp_path / "program.py").write_text(STARTS_LATE)
    with unwatched(tmp_path, "program.py", when) as processes:
        ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert ends == [("", 0)] * 2
