"""Gradients on their way into a flat: small ones wait for each other, and every one arrives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity.runtime import flat_grads
from tests.runtime.in_memory import attach


@pytest.fixture
def unit():
    """A unit of four parameters, and what holds its gradients."""
    hooks, residency = attach(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), classes=("Sequential",))
    (unit,) = [unit for unit in hooks._live.units if unit.seats]
    return unit, residency


def arrivals(unit):
    generator = torch.Generator().manual_seed(3)
    return {seat: torch.randn(seat.slot.shape, generator=generator) for seat in unit.seats}


@pytest.mark.parametrize(("most_waiting_bytes", "launches"), [(0, 4), (40, 2), (1 << 20, 1)])
def test_they_arrive_however_many_may_wait(unit, monkeypatch, most_waiting_bytes, launches):
    monkeypatch.setattr(flat_grads, "_MOST_WAITING_BYTES", most_waiting_bytes)
    copy, sizes = torch._foreach_copy_, []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda places, grads: (sizes.append(len(grads)), copy(places, grads)))
    unit, residency = unit
    grads = arrivals(unit)
    for seat, grad in grads.items():
        unit.grads.arrive(seat, grad)
    assert unit.grads.is_full()
    unit.grads.hand_down()
    assert all(torch.equal(residency.grads[unit.unit][seat.name], grad) for seat, grad in grads.items())
    assert len(sizes) == launches and sum(sizes) == 4


def test_what_comes_twice_is_added_also_to_what_waits(unit):
    unit, residency = unit
    grads = arrivals(unit)
    first, *others = grads
    unit.grads.arrive(first, grads[first])
    unit.grads.arrive(first, grads[first])
    unit.grads.arrive(others[0], grads[others[0]])
    unit.grads.hand_down()
    found = residency.grads[unit.unit]
    assert torch.equal(found[first.name], 2 * grads[first]) and torch.equal(found[others[0].name], grads[others[0]])
    assert set(found) == {first.name, others[0].name}


def test_only_a_bounded_amount_waits(unit, monkeypatch):
    monkeypatch.setattr(flat_grads, "_MOST_WAITING_BYTES", 40)
    unit, _ = unit
    for seat, grad in arrivals(unit).items():
        unit.grads.arrive(seat, grad)
        assert all(filling.waiting_bytes <= 40 for filling in unit.grads._filling.values())


def test_a_view_counts_as_what_it_keeps_from_being_freed(unit, monkeypatch):
    monkeypatch.setattr(flat_grads, "_MOST_WAITING_BYTES", 4000)
    unit, _ = unit
    seat = next(iter(arrivals(unit)))
    unit.grads.arrive(seat, torch.zeros(2000)[: seat.slot.numel].view(seat.slot.shape))
    assert not any(filling.waiting for filling in unit.grads._filling.values())
