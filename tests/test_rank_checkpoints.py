"""Checkpoints of several real processes: one directory, for any number of ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import tiny_gpt
from torch import nn

import infinity
from infinity.checkpoint import export_weights
from infinity.errors import CheckpointError, InfinityError
from tests.ranks import run_ranks
from tests.test_ranks import ACCUMULATION, calls_of, settings

SLOW = pytest.mark.slow


class Loader:
    """Of a rank's own: where it is."""

    def __init__(self, rank):
        self.rank, self.seen, self.can_be_kept = rank, 0, True

    def state_dict(self):
        return {"rank": self.rank, "seen": self.seen, "order": torch.arange(self.seen) if self.can_be_kept else object()}

    def load_state_dict(self, state):
        self.rank, self.seen = state["rank"], state["seen"]
        assert state["order"].tolist() == list(range(self.seen))


class Model(nn.Module):
    """A GPT, a frozen complex parameter whose size no number of ranks divides, and a buffer that follows what a rank has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.gpt, self.frozen = tiny_gpt(), nn.Parameter(torch.randn(13, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        self.seen += ids.sum()
        return nn.functional.dropout(self.gpt(ids), 0.1) + self.frozen.abs().sum()


def go_on(engine, loader, rank, world_size, steps):
    """The losses of some steps, with what a rank draws itself."""
    losses, calls = [], calls_of(tiny_gpt, rank, world_size)
    for call in calls[loader.seen : loader.seen + steps * ACCUMULATION]:
        loss = engine.model(*call) / ACCUMULATION * (1 + random.random() + np.random.random())
        loss.backward()
        losses.append(loss.item())
        loader.seen += 1
        if loader.seen % ACCUMULATION == 0:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return losses


def values_of(engine):
    """(state, parameter, first element) -> values, for each run of elements that rests on this rank; and the buffer."""
    states = engine._parts.states
    found = {("buffer", "seen", 0): engine.model.seen.reshape(1).numpy().copy()}
    for tensor in states.tensors():
        for run in states.held(tensor.name):
            found[tensor.state, tensor.name, run.start] = states.read(tensor.name, tensor.state, run.start, run.stop).numpy()
    return found


def same(a, b):
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


def whole(everybodys):
    """(state, parameter) -> values, from the ranks' runs."""
    runs = sorted(((key, values) for found in everybodys for key, values in found.items() if key[0] != "buffer"), key=lambda run: run[0])
    names = dict.fromkeys(key[:2] for key, _ in runs)
    return {name: np.concatenate([values for key, values in runs if key[:2] == name]) for name in names}


def generators():
    """Where each of them is."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def seed(rank):
    for kind in (torch.manual_seed, np.random.seed, random.seed):
        kind(100 + rank)


@dataclass(frozen=True)
class Found:
    """What a rank sees of a run."""

    begun: tuple[int, int, int]
    """The loader's rank and what it has seen, and steps taken, when it begins."""
    states: tuple[dict[Any, Any], dict[Any, Any]]
    """When it begins, and when it is saved."""
    generators: tuple[Any, Any]
    losses: list[float]


def run_from(rank, world_size, folder, checkpoint, steps, placement="states on nvme"):
    """So many steps from a checkpoint on, or from the beginning, and the checkpoint `end`."""
    folder.mkdir(exist_ok=True)
    loader = Loader(rank if checkpoint is None else -1)
    seed(rank)
    with infinity.initialize(Model(), settings(folder, placement), checkpoint=checkpoint) as engine:
        engine.register(loader=loader)
        begun, states, drawn = (loader.rank, loader.seen, engine.global_step), values_of(engine), generators()
        losses = go_on(engine, loader, rank, world_size, steps)
        engine.save(folder / "end").wait()
        return Found(begun, (states, values_of(engine)), (drawn, generators()), losses)


def interrupt(rank, world_size, folder, checkpoint, placement):
    """The same steps in one run and in two."""
    at_once = run_from(rank, world_size, folder / "at once", checkpoint, 4, placement)
    first = run_from(rank, world_size, folder / "first", checkpoint, 2, placement)
    return at_once, first, run_from(rank, world_size, folder / "second", folder / "first" / "end", 2)


def states_in(checkpoint):
    return {path.name: path.read_bytes() for path in checkpoint.glob("states-*")}


@pytest.mark.parametrize(
    ("world_size", "other", "placement"),
    [(2, 1, "mixed"), pytest.param(3, 2, "nvme", marks=SLOW), pytest.param(4, 1, "cpu", marks=SLOW), pytest.param(2, 4, "nvme", marks=SLOW)],
)
def test_a_run_goes_on_to_the_digit_and_another_number_of_ranks_has_the_same_states(tmp_path, world_size, other, placement):
    before = run_ranks(run_from, other, tmp_path / "before", None, 1)
    found = run_ranks(interrupt, world_size, tmp_path, tmp_path / "before" / "end", placement)
    after = run_ranks(run_from, other, tmp_path / "after", tmp_path / "second" / "end", 0)

    for at_once, first, second in found:
        assert at_once.losses == first.losses + second.losses and at_once.generators[1] == second.generators[1]
        assert same(at_once.states[1], second.states[1]) and same(first.states[1], second.states[0])
    at_once, first, second = (tmp_path / name / "end" for name in ("at once", "first", "second"))
    assert states_in(at_once) == states_in(second) != states_in(first)

    check_handed_over(before, [first for _, first, _ in found], seen=ACCUMULATION)
    check_handed_over([second for _, _, second in found], after, seen=5 * ACCUMULATION)
    assert states_in(second) == states_in(tmp_path / "after" / "end"), "byte for byte what another number of ranks writes"
    exported = [export_weights(tmp_path / name / "end", tmp_path / f"{name}.safetensors").read_bytes() for name in ("second", "after")]
    assert exported[0] == exported[1]


def check_handed_over(one, two, *, seen):
    """From some ranks to others: all states; and to each rank what it left, or rank 0, but never another's generators."""
    assert same(whole([found.states[1] for found in one]), whole([found.states[0] for found in two]))
    for rank, found in enumerate(two):
        source = rank if rank < len(one) else 0
        assert found.begun == (source, seen, seen // ACCUMULATION)
        assert found.states[0]["buffer", "seen", 0] == one[source].states[1]["buffer", "seen", 0]
        assert (found.generators[0] == one[source].generators[1]) == (rank == source)


def damage(path, *, is_cut=False):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data[: len(data) - is_cut])


def refuse(rank, world_size, folder):
    """What each misuse tells, in turn; then the run goes on as if there had been none."""
    loader, told = Loader(rank), {}

    def collect(what, call, directory):
        try:
            call(directory)
        except InfinityError as error:
            told[what] = f"{type(error).__name__}: {error}"

    with infinity.initialize(Model(), settings(folder)) as engine:
        engine.register(loader=loader)
        go_on(engine, loader, rank, world_size, 1)
        for name in ("good", "cut", "flipped", "extra"):
            engine.save(folder / name)
        losses = go_on(engine, loader, rank, world_size, 1)
        engine.save(folder / "later")
        before = values_of(engine), loader.seen, engine.global_step, generators()
        collect("taken", engine.save, folder / "good")
        collect("two places", engine.save, folder / f"of rank {rank}")
        loader.can_be_kept = rank == 0
        collect("object", engine.save, folder / "never")
        loader.can_be_kept = True
        if rank == 0:
            damage(folder / "cut" / "states-00001-of-00001.safetensors", is_cut=True)
            damage(folder / "flipped" / "states-00001-of-00001.safetensors")
            damage(folder / "extra" / "extra-00001.safetensors")
        dist.barrier()
        for name in ("cut", "flipped", "extra"):
            collect(name, engine.load, folder / name)
        collect("two checkpoints", engine.load, folder / ("good" if rank == 0 else "later"))
        assert same(before[0], values_of(engine)) and before[1:] == (loader.seen, engine.global_step, generators())
        engine.load(folder / "good")
        assert go_on(engine, loader, rank, world_size, 1) == losses and same(values_of(engine), before[0])
    return told


def test_what_cannot_be_is_refused_on_all_ranks_and_changes_nothing_on_any(tmp_path):
    one, two = run_ranks(refuse, 2, tmp_path)
    for what, told in (
        ("taken", f"CheckpointError: {tmp_path}/good exists, and nothing is ever overwritten: choose another name, or remove it first"),
        ("cut", f"CheckpointError: {tmp_path}/cut/states-00001-of-00001.safetensors has "),
        ("flipped", f"CheckpointError: {tmp_path}/flipped/states-00001-of-00001.safetensors: the checksum of "),
        ("two checkpoints", "ConfigError: the checkpoint, by its step and checksum, differs between ranks: (1, "),
    ):
        assert one[what].startswith(told) and two[what].startswith(told), what
    for what, doing, told in (
        ("two places", "reaching the directory", f"CheckpointError: rank 1 does not reach {tmp_path}/of rank 1.tmp, which"),
        ("object", "keeping what belongs to the run", "CheckpointError: run.registered.loader.order is a builtins.object"),
        ("extra", "opening a checkpoint", f"CheckpointError: {tmp_path}/extra/extra-00001.safetensors: the checksum of "),
    ):
        assert two[what].startswith(told), what
        assert one[what].startswith(f"RankError: {doing} failed on rank 1, of 1 that failed: {told}"), what
    assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "never").exists()


def begin_anew(rank, world_size, folder):
    """A run with a past, started from a checkpoint that is damaged, then as it was, then from a good one."""
    config, told = settings(folder, "nvme", store={"resume": "auto", "run": "long"}), []
    for checkpoint in (None, folder / "damaged", None, folder / "good", None):
        dist.barrier()
        try:
            with infinity.initialize(Model(), config, checkpoint=checkpoint) as engine:
                told.append(engine.global_step)
                if len(told) == 1:
                    engine.save(folder / "good")
                    engine.save(folder / "damaged")
                go_on(engine, Loader(rank), rank, world_size, 3 - told[-1])
        except CheckpointError as error:
            told.append(str(error))
        if rank == 0 and len(told) == 1:
            damage(folder / "damaged" / "states-00001-of-00001.safetensors")
    return told


def test_a_run_makes_way_on_all_ranks_for_a_checkpoint_that_is_whole(tmp_path):
    one, two = run_ranks(begin_anew, 2, tmp_path)
    assert one == two and "the checksum of" in one.pop(1)
    assert one == [0, 3, 0, 3], "taken steps when it begins: the checkpoint was made before the first one"


def change_stages(rank, world_size, folder, ways):
    """From each (stage, shard group) to the next: the parameters as modules see them, before and after."""
    found, checkpoint = [], None
    for number, (stage, shard_group) in enumerate(ways):
        config = settings(folder, "states on nvme", zero={"stage": stage, "shard_group": shard_group})
        with infinity.initialize(Model(), config, checkpoint=checkpoint) as engine:
            found.append(parameters_of(engine))
            go_on(engine, Loader(rank), rank, world_size, 1)
            found.append(parameters_of(engine))
            checkpoint = folder / f"{number}"
            engine.save(checkpoint)
    return found


def parameters_of(engine):
    with engine.gathered():
        return {name: p.detach().numpy().copy() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [(2, [(1, "auto"), (0, "auto"), (3, "auto"), (2, "auto"), (3, 1)]), pytest.param(4, [(3, 2), (1, "auto"), (2, 2), (0, 2)], marks=SLOW)],
)
def test_a_checkpoint_of_one_stage_is_loaded_at_another(tmp_path, world_size, ways):
    results = run_ranks(change_stages, world_size, tmp_path, ways)
    for found in results:
        for after, before in zip(found[1::2], found[2::2], strict=False):
            assert all((before[name] == after[name]).all() for name in before)
        assert all((found[-1][name] == results[0][-1][name]).all() for name in found[-1])
