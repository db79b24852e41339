"""Gradients come to rest where they belong, added up, and their norm is torch's."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.fakes import FailedWork, MemoryStore
from optim.rig import SHAPES, Rig, everywhere, file_store, memory_store, mixed, random_grads, rig

from infinity.errors import MoverError, StorageError
from infinity.kinds import Group, State, Tier
from infinity.optim.grads import _Countdown
from infinity.storage.work import COMPLETED

TIERS = list(Tier)


def flat_values(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([grad.float().reshape(-1) for grad in grads.values()])


def at_rest(r: Rig) -> dict[str, torch.Tensor]:
    r.grads.wait()
    return r.values(State.GRAD)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_backward_rests_as_it_came(tier: Tier, dtype: torch.dtype):
    grads = random_grads(SHAPES, dtype, seed=0)
    with rig(everywhere(tier), dtype=dtype) as r:
        r.backward(grads)
        rested = at_rest(r)
        assert all(torch.equal(rested[name], grads[name]) for name in grads)
        assert r.grads.norm() == pytest.approx(flat_values(grads).double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_micro_steps_add_up_in_fp32(tier: Tier, dtype: torch.dtype):
    micro = [random_grads(SHAPES, dtype, seed) for seed in range(4)]
    with rig(everywhere(tier), dtype=dtype, grad_dtype=torch.float32) as r:
        for grads in micro:
            r.backward(grads)
        rested = at_rest(r)
        for name in micro[0]:
            expected = micro[0][name].float()
            for grads in micro[1:]:
                expected += grads[name].float()
            assert torch.equal(rested[name], expected)
        assert r.grads.norm() == pytest.approx(flat_values(rested).double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("tier", TIERS)
def test_a_unit_used_twice_adds_in_its_own_dtype_as_autograd_does(tier: Tier):
    first, second = (random_grads(SHAPES, torch.bfloat16, seed) for seed in (0, 1))
    with rig(everywhere(tier), dtype=torch.bfloat16) as r:
        r.backward(first)
        r.backward(second)
        rested = at_rest(r)
        assert all(torch.equal(rested[name], first[name] + second[name]) for name in first)


@settings(max_examples=25, deadline=None)
@given(arrivals=st.lists(st.sets(st.sampled_from([name for unit in SHAPES for name in unit])), min_size=1, max_size=4), tier=st.sampled_from(TIERS))
def test_present_is_the_union_and_the_rest_counts_as_nothing(arrivals: list[set[str]], tier: Tier):
    everything = random_grads(SHAPES, torch.float32, seed=0)
    total: dict[str, torch.Tensor] = {}
    with rig(everywhere(tier)) as r:
        for names in arrivals:
            r.backward({name: everything[name] for name in names})
            for name in names:
                total[name] = total[name] + everything[name] if name in total else everything[name]
        for unit in r.units:
            names = {unit.flats[0].slots[i].name for i in r.grads.present(unit.index, 0)}
            assert names == set(unit.flats[0].slots[i].name for i in range(len(unit.flats[0].slots))) & set(total)
        expected = flat_values(total).double().norm().item() if total else 0.0
        assert r.grads.norm() == pytest.approx(expected, rel=1e-9)
        assert r.grads.is_empty() == (not total)


@pytest.mark.parametrize("tier", TIERS)
def test_after_take_or_clear_the_next_backward_starts_afresh(tier: Tier):
    with rig(everywhere(tier)) as r:
        for seed, finish in ((0, lambda: r.grads.take().drop()), (1, r.grads.clear), (2, lambda: None)):
            grads = random_grads(SHAPES, torch.float32, seed)
            r.backward(grads)
            rested = at_rest(r)
            assert all(torch.equal(rested[name], grads[name]) for name in grads)
            finish()


def test_real_files_hold_what_was_added(tmp_path):
    micro = [random_grads(SHAPES, torch.bfloat16, seed) for seed in range(3)]
    with file_store(tmp_path) as open_store, rig(mixed, dtype=torch.bfloat16, grad_dtype=torch.float32, open_store=open_store) as r:
        for grads in micro:
            r.backward(grads)
        rested = at_rest(r)
        assert all(torch.equal(rested[name], micro[0][name].float() + micro[1][name].float() + micro[2][name].float()) for name in micro[0])


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
def test_a_taken_chunk_is_not_overwritten_before_it_is_done(tier: Tier):
    first, second = (random_grads(SHAPES, torch.float32, seed) for seed in (0, 1))
    with rig(everywhere(tier)) as r:
        r.backward(first)
        taken = r.grads.take()
        r.backward(second)
        for chunk in r.chunks[1:]:
            taken.done(chunk)
        with pytest.raises(MoverError):
            r.grads._mover._deadline_s = 0.05  # units arrive last to first, so the first chunk is the one that is missing
            r.grads.wait()
        assert torch.equal(r.state_of(r.chunks[0], State.GRAD)[:2048], first["embed"].reshape(-1)[:2048])
        r.grads._mover._deadline_s = 20.0
        taken.done(r.chunks[0])
        assert torch.equal(at_rest(r)["embed"], second["embed"])


def test_the_arriving_buffer_is_released_exactly_once():
    released: list[int] = []
    done = threading.Event()
    flat = torch.zeros(6144)
    with rig(mixed) as r:
        r.grads.arrive(1, 0, torch.zeros(r.units[1].flats[0].numel), frozenset({1}), lambda: (released.append(1), done.set()))
        assert done.wait(10)
        r.grads.arrive(1, 0, flat, frozenset(), lambda: released.append(2))
        r.grads.wait()
        assert released == [1, 2]


class FailingStore(MemoryStore):
    """The third write of a gradient goes wrong."""

    def motion(self, kind, key):
        gradient_writes = [k for k in self.writes if k.group is Group.GRAD]
        if kind == "write" and key.group is Group.GRAD and len(gradient_writes) == 3:
            return FailedWork(StorageError(5, "/nvme/grad", 4096, 8192))
        return super().motion(kind, key)


def failing_store(chunks, place):
    healthy = memory_store(chunks, place)
    return FailingStore(healthy._tiers, {key: chunk.numel() for key, chunk in healthy.chunks.items()})


def test_a_failed_write_reaches_every_waiter_and_the_next_call():
    with rig(everywhere(Tier.NVME), open_store=failing_store) as r:
        for seed in range(3):
            try:
                r.backward(random_grads(SHAPES, torch.float32, seed))
            except StorageError:
                pass
        for call in (r.grads.wait, r.grads.take, r.grads.wait):
            with pytest.raises(StorageError, match="at byte 4096"):
                call()
        r.grads.close()
        assert not r.grads._mover._thread.is_alive()


def test_a_dead_thread_lets_go_of_the_buffers_it_was_given():
    released = threading.Semaphore(0)

    class DeadStore(MemoryStore):
        def write_back(self, key, source):
            if key.group is Group.GRAD:
                raise StorageError(28, "/nvme/grad", 0, 8192)
            return super().write_back(key, source)

    def open_store(chunks, place):
        healthy = memory_store(chunks, place)
        return DeadStore(healthy._tiers, {key: chunk.numel() for key, chunk in healthy.chunks.items()})

    with rig(everywhere(Tier.NVME), open_store=open_store) as r:
        numel = r.units[1].flats[0].numel
        r.grads.arrive(1, 0, torch.zeros(numel), frozenset({0, 1, 2, 3}), released.release)
        assert released.acquire(timeout=10)
        with pytest.raises(StorageError):
            r.grads.norm()
        with pytest.raises(StorageError):
            r.grads.arrive(1, 0, torch.zeros(numel), frozenset({0}))


@pytest.mark.parametrize("way", ["let_go", "land_oldest"])
def test_an_interrupt_while_bytes_are_given_back_loses_none(way, monkeypatch):
    back = []
    with rig(everywhere(Tier.CPU)) as r:
        count = _Countdown(lambda: back.append(1))
        count.start(1)
        r.grads._coming_down.append((COMPLETED, count))
        down, interrupts = _Countdown.down, [KeyboardInterrupt]

        def interrupted(self):
            if interrupts:
                raise interrupts.pop()
            down(self)

        monkeypatch.setattr(_Countdown, "down", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(r.grads, way)()
        getattr(r.grads, way)()
        getattr(r.grads, way)()
    assert back == [1]
