"""Bytes follow weights, room is honoured, and a lack of it is told before anything is created."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage.storage_rig import make_spec

from infinity.errors import StorageError
from infinity.kinds import Group, Tier
from infinity.sizes import GiB, MiB
from infinity.storage.deal import Share, deal

METADATA = {group: {"group": str(group)} for group in Group}
weights_lists = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


def share(weight: float = 1.0, free_bytes: int = 1 << 50, max_bytes: int | None = None) -> Share:
    return Share(directory=Path("/"), weight=weight, free_bytes=free_bytes, max_bytes=max_bytes)


def specs_of(sizes):
    return [make_spec(index % 3, index, 2048 * size, Tier.NVME) for index, size in enumerate(sizes)]


def held_bytes(drafts, count):
    return [sum(draft.data_bytes for draft in drafts if draft.path == path) for path in range(count)]


@given(weights=weights_lists, sizes=st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_each_path_holds_its_share_to_within_a_chunk_per_path(weights, sizes):
    specs = specs_of(sizes)
    held = held_bytes(deal(specs, [share(weight) for weight in weights], METADATA), len(weights))
    total, largest = sum(spec.padded_nbytes for spec in specs), max(spec.padded_nbytes for spec in specs)
    assert sum(held) == total
    for weight, nbytes in zip(weights, held, strict=True):
        assert abs(nbytes - total * weight / sum(weights)) <= largest * len(weights)


@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=60), limit=st.integers(0, 40))
def test_a_paths_limit_is_never_exceeded_and_the_others_take_the_rest(sizes, limit):
    specs = specs_of(sizes)
    drafts = deal(specs, [share(max_bytes=limit * MiB), share()], METADATA)
    assert sum(draft.nbytes for draft in drafts if draft.path == 0) <= limit * MiB
    assert sorted(spec.key for draft in drafts for spec in draft.specs) == sorted(spec.key for spec in specs)


def test_one_units_chunks_are_spread_over_all_paths():
    specs = [make_spec(0, chunk, 1 << 20, Tier.NVME) for chunk in range(8)]
    drafts = deal(specs, [share() for _ in range(4)], METADATA)
    assert held_bytes(drafts, 4) == [2 * specs[0].padded_nbytes] * 4


def test_too_little_room_names_needed_and_free_bytes_of_every_path():
    specs = [make_spec(0, chunk, MiB, Tier.NVME) for chunk in range(4)]
    with pytest.raises(StorageError) as caught:
        deal(specs, [share(free_bytes=13 * MiB), share(max_bytes=5 * MiB)], METADATA)
    assert caught.value.errno == errno.ENOSPC
    text = str(caught.value)
    assert f"{13 * MiB} are free" in text and f"{5 * MiB} of its max_bytes left" in text and text.count(" needs ") == 2


def test_paths_on_one_device_share_its_free_bytes():
    specs = [make_spec(0, chunk, MiB, Tier.NVME) for chunk in range(4)]
    with pytest.raises(StorageError, match="are free"):
        deal(specs, [share(free_bytes=30 * MiB), share(free_bytes=30 * MiB)], METADATA)
    assert deal(specs, [share(free_bytes=GiB), share(free_bytes=GiB)], METADATA)
