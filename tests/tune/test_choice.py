"""Which setting is recommended, from rates that are made up."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import load_config
from infinity.sizes import KiB, MiB
from infinity.tune import Measured, Mode, Setting, choose, grid
from infinity.tune.choice import MOST_SPREAD, TOLERANCE
from infinity.tune.section import render_json, render_toml
from infinity.tune.setting import DEFAULT, MOST_IN_FLIGHT

SMALL = Setting(512 * KiB, 8, 1)
WIDE = Setting(4 * MiB, 16, 2)


def measured(scores: dict[Setting, float], path: str = "/", spread: float = 0.0) -> Measured:
    """Every mode at the setting's rate, three rounds `spread` apart."""
    rounds = (1 - spread / 2, 1.0, 1 + spread / 2)
    return Measured(Path(path), {(setting, mode): [score * turn for turn in rounds] for setting, score in scores.items() for mode in Mode})


def test_the_cheapest_within_two_percent_of_the_best_is_chosen():
    assert choose([measured({SMALL: 0.985, DEFAULT: 1.0, WIDE: 0.99})]).setting == SMALL
    assert choose([measured({SMALL: 0.97, DEFAULT: 1.0, WIDE: 1.01})]).setting == DEFAULT
    assert choose([measured({SMALL: 0.9, DEFAULT: 0.9, WIDE: 1.0})]).setting == WIDE


def test_threads_cost_more_than_memory_and_memory_more_than_calls():
    assert Setting(4 * MiB, 32, 1).cost < Setting(256 * KiB, 4, 2).cost
    assert Setting(1 * MiB, 8, 1).cost < Setting(1 * MiB, 16, 1).cost
    assert Setting(2 * MiB, 8, 1).cost < Setting(1 * MiB, 16, 1).cost


def test_paths_share_one_setting():
    """What is best on one path alone is not taken when it costs the other one more."""
    first, second = measured({SMALL: 1.0, WIDE: 0.9}, "/"), measured({SMALL: 0.5, WIDE: 1.0}, "/tmp")
    assert choose([first]).setting == SMALL and choose([first, second]).setting == WIDE


@given(spread=st.floats(TOLERANCE + 0.001, MOST_SPREAD - 0.001), share=st.floats(0.5, 0.999))
def test_the_default_stays_unless_the_best_beats_it_by_more_than_the_spread(spread, share):
    choice = choose([measured({DEFAULT: share, WIDE: 1.0}, spread=spread)])
    assert choice.spread == pytest.approx(spread)
    if share < 1 - spread - 1e-9:
        assert choice.setting == WIDE
    elif share > 1 - spread + 1e-9:
        assert choice.setting == DEFAULT and "stays" in choice.reason


def test_rounds_that_lie_far_apart_support_nothing():
    choice = choose([measured({DEFAULT: 0.5, WIDE: 1.0}, spread=0.4)])
    assert choice.setting is None and choice.best == WIDE and "40%" in choice.reason and "--rounds" in choice.reason


def test_the_grid_keeps_within_what_a_configuration_and_memory_allow():
    settings = grid()
    assert DEFAULT in settings and len(set(settings)) == len(settings) > 30
    assert all(setting.in_flight <= MOST_IN_FLIGHT for setting in settings)
    assert not grid([64 * MiB], [64], [1])


@given(
    setting=st.sampled_from(grid()),
    rates=st.lists(st.floats(1e6, 3e10), min_size=1, max_size=4),
)
def test_what_is_written_is_what_a_configuration_reads(setting, rates):
    paths = [measured({setting: rate}, f"/mnt/nvme {index}") for index, rate in enumerate(rates)]
    for path in paths:
        path.path = Path("/")  # exists: its device is asked for
    choice = choose(paths[:1])
    loaded = load_config(tomllib.loads(render_toml(paths[:1], choice))).nvme
    assert (loaded.block_size, loaded.queue_depth, loaded.readers, loaded.writers) == (
        setting.block_bytes,
        setting.depth,
        setting.workers,
        setting.workers,
    )
    (entry,) = loaded.paths
    assert entry.read_rate == entry.write_rate == round(rates[0]) and entry.weight == pytest.approx(rates[0] / 1e9, abs=1e-4)
    assert len(json.loads(render_json(paths, choice, {}))["paths"]) == len(rates)
