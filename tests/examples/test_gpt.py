"""The example: its model is a language model, and its batches are a function of seed, rank and batch number."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

from infinity.config import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpt():
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt  # type: ignore[import-not-found]

    yield gpt
    sys.path.remove(str(ROOT / "examples"))
    sys.modules.pop("gpt")


def windows(gpt, **changes):
    settings = {"batch_size": 2, "length": 5, "seed": 3}
    return gpt.Windows(torch.arange(200, dtype=torch.uint8), **(settings | changes))


def first(data, count: int) -> list[torch.Tensor]:
    return [batch["tokens"] for batch in itertools.islice(data, count)]


def test_a_fresh_model_knows_nothing(gpt):
    torch.manual_seed(0)
    model = gpt.build_toy()
    tokens = torch.randint(256, (4, 33))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(256), abs=0.1)
    assert model(tokens).shape == (4, 33, 256)


def test_no_byte_sees_what_comes_after_it(gpt):
    torch.manual_seed(0)
    model = gpt.build_toy()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])


def test_recompute_changes_no_gradient(gpt):
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = gpt.GPT(gpt.Shape(layers=2, heads=2, width=16, context=8, recompute=recompute))
        tokens = torch.arange(9)[None]
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_targets_are_the_bytes_after(gpt):
    batch = next(iter(windows(gpt)))
    assert torch.equal(batch["targets"], batch["tokens"] + 1)
    assert batch["tokens"].dtype == torch.int64


def test_ranks_share_a_pass_without_overlap(gpt):
    alone = windows(gpt, batch_size=1)
    starts = [set(), set()]
    for rank in range(2):
        data = windows(gpt, batch_size=1, rank=rank, world_size=2)
        starts[rank] = {tokens[0, 0].item() for tokens in first(data, data.batches_per_pass)}
    assert not starts[0] & starts[1]
    assert starts[0] | starts[1] <= {tokens[0, 0].item() for tokens in first(alone, alone.batches_per_pass)}


def test_each_pass_has_its_own_order_and_the_seed_decides_it(gpt):
    data = windows(gpt)
    both = first(data, 2 * data.batches_per_pass)
    again = first(windows(gpt), 2 * data.batches_per_pass)
    assert all(map(torch.equal, both, again))
    assert not torch.equal(torch.cat(both[: data.batches_per_pass]), torch.cat(both[data.batches_per_pass :]))
    assert not torch.equal(torch.cat(both), torch.cat(first(windows(gpt, seed=4), len(both))))


@pytest.mark.parametrize("taken", [0, 1, 18, 19, 20])
def test_a_saved_place_goes_on_with_the_next_batch(gpt, taken):
    data, other = windows(gpt), windows(gpt)
    first(data, taken)
    other.load_state_dict(data.state_dict())
    assert all(map(torch.equal, first(other, 3), first(windows(gpt), taken + 3)[taken:]))


def test_a_text_too_short_for_one_batch_is_refused(gpt):
    with pytest.raises(ValueError, match="do not fill one batch"):
        windows(gpt, batch_size=100)


def test_the_text_is_the_standard_library(gpt):
    config = load_config(ROOT / "examples" / "tiny.toml")
    data = gpt.data(config, 0, 1)
    assert b"class JSONEncoder" in data.text.numpy().tobytes()
    assert next(iter(data))["tokens"].shape == (config.train.batch_size, config.train.sequence_length)


def test_the_example_is_larger_than_its_memory(gpt):
    config = load_config(ROOT / "examples" / "tiny.toml")
    with torch.device("meta"):
        elements = sum(param.numel() for param in gpt.build().parameters())
    assert elements * 4 * (2 + 3) > 3 * config.budgets.cpu  # parameter, gradient, master and two moments, fp32
