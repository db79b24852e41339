"""Exported weights are what was trained, once each, in files that transformers reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from checkpoint.arrays import Arrays, same_bits
from safetensors.torch import load_file

from infinity.checkpoint import export_weights, save
from infinity.errors import CheckpointError
from infinity.kinds import State

TRAINED = {"embed.weight": (30, 8), "h.0.weight": (7, 5), "norm.weight": (5,)}
FROZEN = {"base": (torch.float16, (3, 3)), "ids": (torch.int64, (4,))}
BUFFERS = {"running_mean": torch.rand(5), "steps": torch.tensor(3)}


@pytest.fixture
def source(tmp_path: Path) -> Arrays:
    source = Arrays(TRAINED, FROZEN)
    for values in source.values.values():
        values.copy_(torch.randn(values.shape).mul(100))
    dtypes = {"embed.weight": torch.bfloat16, "h.0.weight": torch.bfloat16}
    save(tmp_path / "c", source, {}, 0, dtypes=dtypes, aliases={"head.weight": "embed.weight"}, buffers=BUFFERS)
    return source


def wanted(source: Arrays, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    trained = {name: source.values[name, State.MASTER] for name in TRAINED}
    frozen = {name: source.values[name, State.PARAM] for name in FROZEN}
    found = {
        "embed.weight": trained["embed.weight"].to(dtype or torch.bfloat16),
        "h.0.weight": trained["h.0.weight"].to(dtype or torch.bfloat16),
        "norm.weight": trained["norm.weight"].to(dtype or torch.float32),
        "base": frozen["base"].to(dtype or torch.float16),
        "ids": frozen["ids"],
    }
    return {**found, **BUFFERS}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()  # "head.weight" is tied, and is not there twice
    for name, values in expected.items():
        assert same_bits(got[name], values), name


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_weights_come_in_the_dtype_they_were_trained_in_or_the_one_asked_for(source: Arrays, dtype: torch.dtype | None, tmp_path: Path) -> None:
    assert export_weights(tmp_path / "c", tmp_path / "out", dtype) == tmp_path / "out"
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), wanted(source, dtype))


def test_a_single_file_can_be_asked_for(source: Arrays, tmp_path: Path) -> None:
    export_weights(tmp_path / "c", tmp_path / "w.safetensors")
    assert_equal(load_file(tmp_path / "w.safetensors"), wanted(source))
    assert sorted(os.listdir(tmp_path)) == ["c", "w.safetensors"]
    with pytest.raises(CheckpointError, match="w.safetensors exists"):
        export_weights(tmp_path / "c", tmp_path / "w.safetensors")


def test_large_models_come_in_shards_with_an_index(source: Arrays, tmp_path: Path) -> None:
    export_weights(tmp_path / "c", tmp_path / "out", shard_bytes=500)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    expected = wanted(source)
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in expected.values())
    shards = sorted({*index["weight_map"].values()})
    assert len(shards) > 1
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    loaded = {name: load_file(tmp_path / "out" / shard) for shard in shards for name in [shard]}
    assert_equal({name: loaded[shard][name] for name, shard in index["weight_map"].items()}, expected)


def test_transformers_reads_the_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    params = dict(model.named_parameters())
    source = Arrays({name: tuple(p.shape) for name, p in params.items()})
    for name, p in params.items():
        source.values[name, State.MASTER].copy_(p.detach())
    save(tmp_path / "c", source, {}, 0, aliases={"lm_head.weight": "transformer.wte.weight"})
    export_weights(tmp_path / "c", tmp_path / "out", shard_bytes=40_000)
    config.save_pretrained(tmp_path / "out")
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for name, p in back.state_dict().items():
        assert same_bits(p, model.state_dict()[name]), name


def test_nothing_is_overwritten(source: Arrays, tmp_path: Path) -> None:
    export_weights(tmp_path / "c", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match="out exists"):
        export_weights(tmp_path / "c", tmp_path / "out", torch.float32)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_checkpoint_is_not_exported(source: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "c" / "states-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    for at in range(int.from_bytes(data[:8], "little") + 8, len(data), 1000):
        data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path}.*checksum"):
        export_weights(tmp_path / "c", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["c"]
