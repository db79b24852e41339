"""A run begins with the model's values, to the bit, inside the memory of three chunks of each kind."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from infinity import native
from infinity.errors import StorageError
from infinity.kinds import OPTIMIZER_STATES, Group, State, Tier
from infinity.planner.place import pieces, specs_of
from infinity.runtime import origin
from infinity.runtime.adopt import Adoption
from infinity.runtime.origin import Origin, checksum
from infinity.runtime.states import States
from infinity.runtime.units import find_units, make_units
from infinity.sharding.ranks import Ranks
from infinity.sizes import MiB
from infinity.storage.copies import Copies
from infinity.storage.nvme import NvmePath
from infinity.storage.slabs import SlabPool
from infinity.storage.store import Store
from infinity.storage.tiers import Pools
from infinity.storage.work import Work
from infinity.timeline import Timeline

CHUNK = 4096


class Odd(nn.Module):
    """Values of every kind: large, tiny, frozen, complex, not contiguous, shared."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(70, 130) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(50, 40).t())
        self.phases = nn.Parameter(torch.randn(30, 7, dtype=torch.complex64))
        self.one = nn.Parameter(torch.randn(()))
        self.tied = self.blocks[0].weight


@pytest.fixture
def model() -> Odd:
    torch.manual_seed(0)
    return Odd()


@pytest.fixture(params=["nvme", "cpu", "mixed"])
def tiers(request):
    """(key) -> tier."""
    return {"nvme": lambda key: Tier.NVME, "cpu": lambda key: Tier.CPU, "mixed": lambda key: Tier.NVME if key.chunk % 2 else Tier.CPU}[request.param]


def units_of(model: nn.Module, dtype: torch.dtype):
    def cast(name: str, old: torch.dtype) -> torch.dtype:
        return dtype

    return make_units(find_units(model, threshold_numel=1000, cast=cast), cast=cast)


class Rig:
    """A store for a model's units, and what is in it."""

    def __init__(self, units, tiers, path) -> None:
        timeline = Timeline()
        self.pool = SlabPool(pin=False, threads=1)
        copies = Copies(torch.device("cpu"), timeline)
        pools = Pools(pinned=self.pool, plain=self.pool)
        self.store = Store(paths=[NvmePath(path=path, weight=1.0)], run="r", pools=pools, copies=copies, timeline=timeline)
        chunks = pieces([unit.layout for unit in units], CHUNK, accumulates=False)
        self.specs = specs_of(chunks, {piece.key: tiers(piece.key) for piece in chunks}, accumulates=False)
        self.store.build(self.specs, [unit.name for unit in units])
        self.states = States(units, self.store, self.pool, chunk_numel=CHUNK, deadline_s=30)
        self.units = units

    def adopt(self, on_read=lambda piece: None, room_bytes=1 << 20) -> None:
        read = Origin(Ranks(timeout_s=1.0, timeline=Timeline()), on_read).pieces
        with Adoption(self.units, self.store, self.pool, chunk_numel=CHUNK, room_bytes=room_bytes, read=read) as adoption:
            for unit in self.units:
                adoption.take(unit, [param.detach() for param in unit.params])

    def resting(self) -> int:
        return sum(spec.padded_nbytes for spec in self.specs if spec.tier is Tier.CPU)

    def close(self) -> None:
        self.store.close()
        self.pool.close()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def rig(request, model, tiers, tmp_path):
    made = Rig(units_of(model, request.param), tiers, tmp_path)
    yield made
    made.close()


def real(values: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).detach().reshape(-1)


def test_every_state_begins_as_it_should(rig, model):
    rig.adopt()
    values = dict(model.named_parameters())
    for unit in rig.units:
        for flat in unit.layout.flats:
            for slot in flat.slots:
                wanted = real(values[slot.name])
                assert torch.equal(rig.states.read(slot.name, State.PARAM, 0, slot.numel), wanted.to(flat.dtype)), slot.name
                if flat.trainable:
                    master, *moments = (rig.states.read(slot.name, state, 0, slot.numel) for state in OPTIMIZER_STATES)
                    assert torch.equal(master, wanted), f"{slot.name}: masters keep every bit"
                    assert not any(moment.any() for moment in moments)


def test_padding_is_zero(rig):
    """What a recycled buffer held before must not reach the files."""
    taken = [rig.pool.take(CHUNK * 12).fill_(255) for _ in range(3)]
    del taken
    rig.adopt()
    for spec in rig.specs:
        if spec.key.group is Group.GRAD:
            continue
        buffer = rig.pool.take(spec.padded_nbytes)
        rig.store.fetch(spec.key, buffer).wait()
        numel, unit = spec.parts[0].numel, rig.units[spec.key.unit]
        covered = torch.zeros(numel, dtype=torch.bool)
        flat = unit.layout.flats[spec.key.flat]
        for _, run in flat.pieces(flat.chunks(CHUNK)[spec.key.chunk]):
            covered[run.start : run.stop] = True
        first = buffer[: spec.parts[0].nbytes].view(spec.parts[0].dtype)
        assert not first[~covered].any(), spec.key
        assert not buffer[spec.parts[0].nbytes :].any(), spec.key


def test_no_more_than_three_chunks_of_each_kind_are_held(rig):
    rig.adopt()
    assert rig.pool.peak_bytes <= rig.resting() + 3 * CHUNK * (12 + 4)
    assert rig.pool.allocated_bytes == rig.resting(), "what was borrowed is back with the system"


def test_every_value_is_read_once(rig, model, monkeypatch):
    monkeypatch.setattr(origin, "_PIECE_BYTES", 512)
    seen: Counter[str] = Counter()

    def on_read(piece: torch.Tensor) -> None:
        assert 0 < piece.nbytes <= 512
        seen["elements"] += piece.numel()

    rig.adopt(on_read)
    assert seen["elements"] == sum(real(param).numel() for param in model.parameters())


def test_the_checksum_is_that_of_all_bytes_in_order(model, monkeypatch):
    units = units_of(model, torch.bfloat16)
    whole = torch.cat([real(param).contiguous().view(torch.uint8) for unit in units for param in unit.params])
    for piece_bytes in (8, 100, MiB):
        monkeypatch.setattr(origin, "_PIECE_BYTES", piece_bytes)
        assert checksum(units, lambda piece: None) == f"{native.crc32c(whole):08x}"


def test_chunks_are_filled_while_others_are_written(model, tmp_path, monkeypatch):
    """Writes are waited for when their buffer is needed again, three chunks later."""
    rig = Rig(units_of(model, torch.float32), lambda key: Tier.NVME, tmp_path)
    events: list[str] = []
    write_back = rig.store.write_back

    class Slow:
        def __init__(self, name: str, work: Work) -> None:
            self.name, self.work = name, work

        def wait(self, timeout_s: float | None = None) -> None:
            events.append(f"wait {self.name}")
            self.work.wait(timeout_s)

        def is_completed(self) -> bool:
            return False

    def started(key, source):
        events.append(f"write {key}")
        return Slow(str(key), write_back(key, source))

    monkeypatch.setattr(rig.store, "write_back", started)
    rig.adopt()
    states = [event for event in events if "optimizer" in event]
    written = [event.removeprefix("write ") for event in states if event.startswith("write")]
    assert len(written) > 4
    for place, key in enumerate(written[:-3]):
        assert states.index(f"wait {key}") > states.index(f"write {written[place + 2]}"), "two more were filled in the meantime"
        assert states.index(f"wait {key}") < states.index(f"write {written[place + 3]}")
    assert {event for event in events if event.startswith("wait")} == {f"wait {key}" for key in {e.split()[1] for e in events}}, "all, at the end"
    rig.close()


def test_a_write_that_fails_is_an_error_of_the_adoption(model, tmp_path, monkeypatch):
    rig = Rig(units_of(model, torch.float32), lambda key: Tier.NVME, tmp_path)
    write_back = rig.store.write_back

    class Refused:
        def wait(self, timeout_s: float | None = None) -> None:
            raise StorageError(5, "file", 0, 1)

        def is_completed(self) -> bool:
            return True

    last = rig.specs[-1].key
    monkeypatch.setattr(rig.store, "write_back", lambda key, source: Refused() if key == last else write_back(key, source))
    with pytest.raises(StorageError):
        rig.adopt()
    rig.close()
