"""What the ranks of one job must have in common, looked at before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from infinity.config import Config
from infinity.device import tier_of
from infinity.errors import ConfigError
from infinity.kinds import Group, Tier
from infinity.optim.exchange import is_in_one_piece
from infinity.planner.plan import Plan
from infinity.planner.working import LIVE
from infinity.sharding.groups import first_difference
from infinity.sharding.layout import UnitLayout
from infinity.sharding.ranks import Ranks
from infinity.sharding.share import Share
from infinity.storage.chunks import FlatGroup, flat_group_of


def check_alike(ranks: Ranks, share: Share, config: Config, model: nn.Module, layouts: Sequence[UnitLayout], plan: Plan) -> None:
    """Raise ConfigError on all ranks, naming the first that differs: key of the configuration, parameter, buffer, figure of the plan."""
    _check(ranks, dict(_keys(config.model_dump(mode="json"))), "the configuration", "Give every rank the same one")
    _check(ranks, dict(_params(layouts)), "the model", "Build the same one on every rank")
    _check(ranks, dict(_tensors(model)), "the model", "Build the same one on every rank")
    tier = tier_of(plan.device)
    if tier is Tier.HBM:
        hint = 'With "auto" it follows from each machine\'s memory: set budgets.hbm and budgets.cpu'
        _check(ranks, dict(_meetings(share, layouts, plan)), "where ranks exchange what each keeps whole", hint)
    if not share.is_sharded(Group.PARAM):
        return  # what is fetched, and when, is each rank's own affair
    ranks.check_same(
        (plan.prefetch_units, plan.working_bytes(tier, LIVE), plan.chunk_numel),
        "how far to run ahead, in units, bytes and elements of a chunk,",
        f'With "auto" it follows from each machine\'s memory: set prefetch.units and budgets.{tier.value}',
    )


def _check(ranks: Ranks, mine: Mapping[str, str], what: str, hint: str) -> None:
    found = first_difference(ranks.everybodys(mine, what), "nothing")
    if found is not None:
        told = f"{found.name} is {found.mine} on rank 0 and {found.other} on rank {found.rank}"
        raise ConfigError(f"{what} differs between ranks: {told}. {hint}")


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value)"""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", repr(value)


def _meetings(share: Share, layouts: Sequence[UnitLayout], plan: Plan) -> Iterator[tuple[str, str]]:
    """(flat buffer, where an update on GPUs exchanges it), by the rule of optim/exchange.py: what rests in one piece in memory meets in HBM."""
    tiers: dict[FlatGroup, set[Tier]] = {}
    for spec in plan.specs:
        if share.is_exchanged(spec.key.group):
            tiers.setdefault(flat_group_of(spec.key), set()).add(spec.tier)
    names = {layout.index: layout for layout in layouts}
    for (unit, flat, group), found in tiers.items():
        yield f"{group.value} of {names[unit].flat_name(flat)}", "in HBM" if is_in_one_piece(found) else "in CPU memory"


def _params(layouts: Sequence[UnitLayout]) -> Iterator[tuple[str, str]]:
    """(parameter, what it is laid out as), in the order of the layout."""
    for layout in layouts:
        for flat in layout.flats:
            for slot in flat.slots:
                yield slot.name, f"{flat.dtype} {list(slot.shape)}, {'trained' if flat.trainable else 'frozen'}, in unit {layout.name!r}"


def _tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(parameter or buffer, what it is in the model): values pass between ranks as they are."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, f"{tensor.dtype} {list(tensor.shape)}"
