"""Buffers serve again, and only when nobody reads them any more."""

from __future__ import annotations

import gc

import torch
from models import Keeps
from torch import nn

from infinity.runtime.buffers import Buffers
from infinity.runtime.cutter import Cutter, Cutters
from infinity.sharding.layout import ParamSpec, layout_unit
from infinity.storage.slabs import PAGE_BYTES, SlabPool, footprint
from tests.runtime.in_memory import attach

CPU = torch.device("cpu")


def flat_of(*shapes, prefix=""):
    specs = [ParamSpec(name=f"{prefix}{n}", shape=shape, dtype=torch.float32, trainable=True) for n, shape in enumerate(shapes)]
    return layout_unit(0, "unit", specs).flats[0]


def test_a_buffer_serves_the_next_of_its_size_and_idle_memory_stays_within_its_limit():
    slabs = SlabPool(pin=False, threads=1)
    buffers = Buffers(CPU, slabs, None)
    first = buffers.take(1 << 18, torch.float32, 0)
    address = first.data_ptr()
    buffers.give(first)
    assert buffers.idle_bytes == footprint(1 << 20, CPU)
    assert buffers.take(1 << 18, torch.float32, 0) is first and first.data_ptr() == address and not buffers.idle_bytes
    buffers.give(first)
    other = buffers.take(1 << 19, torch.float32, 0)
    assert not buffers.idle_bytes, "idle memory of another size makes room"
    kept = buffers.take(1 << 18, torch.float32, 0)
    buffers.give(kept)
    buffers.take(1 << 20, torch.float32, kept.nbytes + PAGE_BYTES)
    assert buffers.idle_bytes == footprint(kept.nbytes, CPU), "within the limit it stays"
    del first, kept, other
    buffers.shrink(0)
    slabs.close()


def test_places_are_cut_once_per_buffer_and_die_with_it():
    layout = flat_of((3, 5), (7,))
    cutter = Cutter(layout)
    flat = torch.arange(2048.0)
    places = cutter.cut(flat).places
    assert all(a is b for a, b in zip(places, cutter.cut(flat).places, strict=True))
    assert [place.shape for place in places] == [(3, 5), (7,)] and all(map(torch.equal, places, (slot.view(flat) for slot in layout.slots)))
    places[0].fill_(-1.0)
    assert flat[:15].eq(-1).all(), "the same memory"
    again = cutter.cut(flat.clone()).places
    assert again[0] is not places[0]
    del flat
    gc.collect()
    assert not cutter._known


def test_flats_that_are_cut_alike_share_a_cutter():
    cutters = Cutters()
    assert cutters.of(flat_of((4, 4), (4,))) is cutters.of(flat_of((4, 4), (4,), prefix="other"))
    assert cutters.of(flat_of((4, 4), (4,))) is not cutters.of(flat_of((4,), (4, 4)))


def test_a_buffer_of_which_a_view_is_kept_serves_nobody_else():
    model = nn.Sequential(Keeps(), Keeps(), Keeps())
    hooks, residency = attach(model, threshold_numel=1, classes=("Keeps",))
    released = []
    release = residency.release

    def watched(unit, *, is_changed, is_shared):
        released.append((unit.name, is_changed or is_shared))
        release(unit, is_changed=is_changed, is_shared=is_shared)

    residency.release = watched
    x = torch.randn(2, 8)
    model(x).sum().backward()
    assert len(released) >= 6 and not any(is_held for _, is_held in released), "or nothing would ever serve again"
    model[1].keeps = True
    released.clear()
    model(x)
    value = residency.value("1.linear.weight").t()
    assert [is_held for name, is_held in released if name == "1"] == [True]
    assert torch.equal(model[1].kept, value), "what the user holds is not overwritten"
    with hooks.gathered(model[0], write=False):
        model[0].linear.weight.data.add_(1.0)
    assert released[-1] == ("0", True), "it may have been written to past torch's notice"
