"""The step reads ahead, writes behind, touches what has a gradient, and ends cleanly when a drive says no."""

from __future__ import annotations

import random
import threading
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.fakes import ClockKernel, ClockStore, FailedWork, FakeClock, MemoryStore
from optim.rig import CPU, SHAPES, everywhere, file_store, memory_store, mixed, random_grads, rig, sizes_of, slabs, units_of

from infinity.errors import MoverError, StorageError
from infinity.kinds import Group, Lane, State, Tier
from infinity.optim.chunks import Rule, trainable_chunks
from infinity.optim.grads import GradSet
from infinity.optim.pipeline import Pipeline
from infinity.optim.promise import Promise
from infinity.storage.copies import Copies
from infinity.storage.tiers import Pools
from infinity.timeline import Timeline

RULE = Rule(1e-2, 0.9, 0.999, 1e-8, 0.01, 1)


def rules_for(units, present):
    return {key: {slot: RULE for slot in slots} for key, slots in present.items()}


def run_on_a_clock(
    num_chunks: int, *, read_s: float, adam_s: float, write_s: float, buffers: int = 3, resident: int = 0
) -> tuple[FakeClock, ClockStore]:
    """One step over units of one chunk: all but the first `resident` have their states on NVMe, params and grads are in CPU memory."""
    clock = FakeClock()
    units = units_of([{f"w{i}": (2048,)} for i in range(num_chunks)], torch.float32)
    chunks = trainable_chunks(units, 2048)
    tiers = {chunk.key(group): Tier.NVME if group is Group.OPTIMIZER and chunk.unit >= resident else Tier.CPU for chunk in chunks for group in Group}
    store = ClockStore(tiers, sizes_of(chunks), clock, read_s=read_s, write_s=write_s)
    timeline = Timeline()
    kernel = ClockKernel(clock, adam_s)
    pipeline = Pipeline(
        chunks,
        store=store,
        copies=Copies(CPU, timeline),
        cpu_kernel=kernel,
        gpu_kernel=kernel,
        pools=Pools(pinned=slabs, plain=slabs),
        timeline=timeline,
        device=CPU,
        deadline_s=10,
        buffers=buffers,
    )
    present = {(unit.index, 0): frozenset({0}) for unit in units}
    pipeline.step(rules_for(units, present), GradSet(present, {chunk: Promise("test", 10) for chunk in chunks}), 1.0)
    return clock, store


def test_step_hides_reads_and_writes_behind_adam():
    clock, _ = run_on_a_clock(8, read_s=2, adam_s=3, write_s=2)
    assert clock.now == 2 + 8 * 3 + 2  # the first read and the last write stick out, nothing else does


def test_reads_run_while_resident_chunks_are_updated():
    clock, _ = run_on_a_clock(8, read_s=9, adam_s=3, write_s=2, resident=6)
    assert clock.now == 8 * 3 + 2  # both reads are over before their turn comes


def test_a_slow_disk_is_never_idle():
    """With a buffer to spare, reads follow each other without a pause; the last update and the last write stick out."""
    clock, _ = run_on_a_clock(8, read_s=5, adam_s=1, write_s=4, buffers=4)
    assert clock.now == 8 * 5 + 1 + 4


def test_without_a_gradient_nothing_is_read_or_written():
    names = ["0.up", "0.scalar"]
    with rig(everywhere(Tier.NVME)) as r:
        r.backward({name: grad for name, grad in random_grads(SHAPES, torch.float32, 0).items() if name in names})
        taken = r.grads.take()
        r.store.reads.clear()
        r.store.writes.clear()
        r.pipeline.step(rules_for(r.units, taken.present), taken, 1.0)
        flat = r.units[1].flats[0]
        slots = {i for i, slot in enumerate(flat.slots) if slot.name in names}
        touched = [chunk for chunk in r.chunks if chunk.unit == 1 and any(slot in slots for slot, _ in chunk.pieces)]
        assert 0 < len(touched) < len([chunk for chunk in r.chunks if chunk.unit == 1]) + 1
        assert r.store.reads == [chunk.key(group) for chunk in touched for group in (Group.OPTIMIZER, Group.GRAD)]
        assert r.store.writes == [chunk.key(group) for chunk in touched for group in (Group.OPTIMIZER, Group.PARAM)]


def test_parameters_without_a_gradient_keep_every_bit(tmp_path):
    with file_store(tmp_path) as open_store, rig(mixed, dtype=torch.bfloat16, open_store=open_store) as r:
        before = {state: r.values(state) for state in (State.PARAM, State.MASTER, State.EXP_AVG)}
        r.backward({"0.bias": random_grads(SHAPES, torch.bfloat16, 0)["0.bias"]})
        taken = r.grads.take()
        r.pipeline.step(rules_for(r.units, taken.present), taken, 1.0)
        for state, values in before.items():
            after = r.values(state)
            assert [name for name in values if not torch.equal(after[name], values[name])] == ["0.bias"], state


def test_a_units_update_can_be_waited_for_while_others_run():
    with rig(everywhere(Tier.NVME)) as r:
        r.backward(random_grads(SHAPES, torch.float32, 0))
        taken = r.grads.take()
        r.pipeline.begin(rules_for(r.units, taken.present), taken, 1.0)
        first, second = r.pipeline.updated(0), r.pipeline.updated(1)
        assert not first.is_completed() and not r.pipeline.is_sound
        waiter = threading.Thread(target=first.wait)
        waiter.start()
        r.pipeline.run_unit(0)
        waiter.join(10)
        assert not waiter.is_alive() and first.is_completed() and not second.is_completed()
        for unit in (1, 2, 3):
            r.pipeline.run_unit(unit)
        r.pipeline.finish()
        assert r.pipeline.is_sound
        assert second.is_completed() and r.pipeline.updated(1).is_completed()


def test_who_breaks_in_between_two_units_leaves_a_mix_of_two_steps_and_it_is_known():
    with rig(everywhere(Tier.NVME)) as r:
        r.backward(random_grads(SHAPES, torch.float32, 0))
        taken = r.grads.take()
        with pytest.raises(KeyboardInterrupt):
            r.pipeline.step(rules_for(r.units, taken.present), taken, 1.0, on_progress=Mock(side_effect=[None, KeyboardInterrupt]))
        assert not r.pipeline.is_sound
        with pytest.raises(MoverError, match="mix of two steps"):
            r.pipeline.check()


PLACEMENTS = {
    "all on nvme": everywhere(Tier.NVME),
    "mixed": mixed,
    "params in hbm": lambda chunk, group: Tier.HBM if group is Group.PARAM else Tier.NVME,
    "grads in hbm": lambda chunk, group: Tier.HBM if group is Group.GRAD else Tier.CPU,
    "only params in cpu": lambda chunk, group: Tier.CPU if group is Group.PARAM else Tier.NVME,
}
WITH_GPU = {
    "all but states on nvme": lambda chunk, group: Tier.HBM if group is Group.OPTIMIZER else Tier.NVME,
    "all but states in cpu": lambda chunk, group: Tier.HBM if group is Group.OPTIMIZER else Tier.CPU,
    "states and grads in hbm": lambda chunk, group: Tier.CPU if group is Group.PARAM else Tier.HBM,
}


def run_three_steps(place, dtype: torch.dtype, open_store=memory_store) -> dict[State, dict[str, torch.Tensor]]:
    with rig(place, dtype=dtype, grad_dtype=torch.float32, open_store=open_store) as r:
        optimizer = r.optimizer(lr=1e-2, max_grad_norm=1.0)
        for step in range(3):
            for micro in range(2):
                r.backward(random_grads(SHAPES, dtype, 10 * step + micro, missing=["0.bias"] if step == 1 else []))
            optimizer.step()
        return {state: r.values(state) for state in (State.PARAM, State.MASTER, State.EXP_AVG, State.EXP_AVG_SQ)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("base", "place"),
    [(everywhere(Tier.CPU), place) for place in PLACEMENTS.values()] + [(everywhere(Tier.HBM), place) for place in WITH_GPU.values()],
    ids=[*PLACEMENTS, *WITH_GPU],
)
def test_placement_does_not_change_a_bit(base, place, dtype: torch.dtype, tmp_path):
    expected = run_three_steps(base, dtype)
    with file_store(tmp_path) as open_store:
        got = run_three_steps(place, dtype, open_store)
    for state, values in expected.items():
        for name, value in values.items():
            assert torch.equal(got[state][name], value), (state, name)


class BrokenDrive(MemoryStore):
    """The second write of optimizer states fails."""

    def motion(self, kind, key):
        state_writes = [k for k in self.writes if k.group is Group.OPTIMIZER]
        if self.broken and kind == "write" and key.group is Group.OPTIMIZER and len(state_writes) == 2:
            return FailedWork(StorageError(5, "/nvme/optimizer", 12288, 24576))
        return super().motion(kind, key)

    broken = False


def broken_drive(chunks, place):
    healthy = memory_store(chunks, place)
    return BrokenDrive(healthy._tiers, {key: chunk.numel() for key, chunk in healthy.chunks.items()})


def test_a_failed_write_in_the_middle_of_a_step_is_typed_final_and_leaves_no_thread():
    before = set(threading.enumerate())
    with rig(everywhere(Tier.NVME), open_store=broken_drive) as r:
        optimizer = r.optimizer()
        r.store.writes.clear()
        r.store.broken = True
        r.backward(random_grads(SHAPES, torch.float32, 0))
        for _ in range(2):
            with pytest.raises(StorageError, match="at byte 12288"):
                optimizer.step()
            with pytest.raises(StorageError, match="at byte 12288"):
                r.backward(random_grads(SHAPES, torch.float32, 1))
                r.grads.wait()
        assert optimizer.step_counts() == {} and not r.pipeline.is_sound
    assert set(threading.enumerate()) == before


def test_an_interrupted_step_is_final_too():
    class Impatient:
        def update(self, *_):
            raise KeyboardInterrupt

    with rig(everywhere(Tier.NVME)) as r:
        r.pipeline._cpu_kernel = Impatient()
        r.backward(random_grads(SHAPES, torch.float32, 0))
        optimizer = r.optimizer()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with pytest.raises(MoverError, match="interrupted by KeyboardInterrupt"):
            r.pipeline.check()


def test_the_timeline_names_what_the_step_did():
    with rig(everywhere(Tier.NVME)) as r:
        r.backward(random_grads(SHAPES, torch.float32, 0))
        taken = r.grads.take()
        r.pipeline.step(rules_for(r.units, taken.present), taken, 1.0)
        updates = [span.name for span in r.timeline.spans() if span.lane is Lane.ADAM and not span.is_stall and not span.name.startswith("grad")]
        assert updates == [str(chunk.key(Group.OPTIMIZER)) for chunk in r.chunks]


def test_staging_is_counted_to_the_byte():
    with rig(everywhere(Tier.CPU)) as r:
        assert r.pipeline.staging_bytes == (0, 0) and r.grads.staging_bytes == 0
    with rig(everywhere(Tier.NVME), dtype=torch.bfloat16, buffers=4) as r:
        assert r.pipeline.staging_bytes == (4 * 2048 * (12 + 2 + 2), 0)
        assert r.grads.staging_bytes == 3 * 2048 * 2
    with rig(lambda chunk, group: Tier.HBM if group is Group.OPTIMIZER else Tier.CPU) as r:
        assert r.pipeline.staging_bytes == (0, 3 * 2048 * (4 + 4))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), buffers=st.integers(3, 6))
def test_any_placement_of_any_chunk_computes_the_same(seed: int, buffers: int):
    """States in CPU memory or on NVMe, the rest anywhere."""
    tiers = random.Random(seed)
    homes: dict[object, Tier] = {}

    def anywhere(chunk, group):
        choices = (Tier.CPU, Tier.NVME) if group is Group.OPTIMIZER else tuple(Tier)
        return homes.setdefault(chunk.key(group), tiers.choice(choices))

    missing = tiers.sample([name for unit in SHAPES for name in unit], 4)

    def run(place, buffers):
        with rig(place, dtype=torch.bfloat16, grad_dtype=torch.float32, buffers=buffers) as r:
            optimizer = r.optimizer(lr=1e-2, max_grad_norm=1.0)
            for step in range(2):
                r.backward(random_grads(SHAPES, torch.bfloat16, step, missing if step else []))
                optimizer.step()
            return r.values(State.MASTER), r.values(State.PARAM)

    for got, expected in zip(run(anywhere, buffers), run(everywhere(Tier.CPU), 3), strict=True):
        assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("tier", list(Tier))
def test_the_next_backward_may_run_under_the_step(tier: Tier):
    """The step on a thread, as an update that hides behind the next forward will be."""
    grads = [random_grads(SHAPES, torch.float32, seed) for seed in range(4)]

    def run(in_background: bool) -> dict[str, torch.Tensor]:
        with rig(everywhere(tier)) as r:
            updating = threading.Thread()
            updating.start()
            for step, arriving in enumerate(grads):
                r.backward(arriving)
                updating.join(20)
                taken = r.grads.take()
                rules = {key: {slot: RULE._replace(step=step + 1) for slot in slots} for key, slots in taken.present.items()}
                updating = threading.Thread(target=r.pipeline.step, args=(rules, taken, 1.0))
                updating.start()
                if not in_background:
                    updating.join(20)
            updating.join(20)
            return r.values(State.MASTER)

    behind, after = run(in_background=True), run(in_background=False)
    assert all(torch.equal(behind[name], value) for name, value in after.items())
