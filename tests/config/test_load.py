"""What `load_config` accepts, and what it says about the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.config import Config, load_config
from infinity.errors import ConfigError
from infinity.sizes import GiB, MiB

TOML = """
device = "cpu"
[budgets]
cpu = "1.5GiB"
[nvme]
paths = [{ path = "disk", weight = 1 }, { path = "/mnt/b", weight = 2, max_bytes = "10MB" }]
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "conf" / "run.toml"
    path.parent.mkdir()
    path.write_text(TOML)
    return path


def refused(source: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_an_empty_configuration_is_the_defaults():
    assert load_config({}) == Config()


def test_sizes_are_text_outside_and_bytes_inside(toml):
    config = load_config(toml)
    assert config.budgets.cpu == GiB * 3 // 2
    assert config.nvme.block_size == MiB
    assert config.nvme.paths[1].max_bytes == 10_000_000


def test_relative_paths_start_at_the_file(toml):
    config = load_config(str(toml))
    assert config.nvme.paths[0].path == str(toml.parent / "disk")
    assert config.nvme.paths[1].path == "/mnt/b"
    assert config.train.output == str(toml.parent / "runs")


def test_dots_in_paths_are_worked_out(toml):
    assert load_config(toml, ["train.output=../out/./a"]).train.output == str(toml.parent.parent / "out" / "a")


def test_relative_paths_of_a_mapping_start_at_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config({"nvme": {"paths": ["disk"]}}).nvme.paths[0].path == str(tmp_path / "disk")


def test_the_environment_is_not_read(toml, monkeypatch):
    monkeypatch.setenv("DISK", "/elsewhere")
    config = load_config({"nvme": {"paths": ["/mnt/$DISK"]}})
    assert config.nvme.paths[0].path == "/mnt/$DISK"


def test_json_and_toml_say_the_same(toml, tmp_path):
    same = {
        "device": "cpu",
        "budgets": {"cpu": "1.5GiB"},
        "nvme": {"paths": [{"path": "disk", "weight": 1}, {"path": "/mnt/b", "weight": 2, "max_bytes": "10MB"}]},
    }
    path = toml.with_suffix(".json")
    path.write_text(json.dumps(same))
    assert load_config(path) == load_config(toml)


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("nvme.queue_depth=64", "nvme", "queue_depth", 64),
        ("budgets.cpu=4GiB", "budgets", "cpu", 4 * GiB),
        ('budgets.cpu="4GiB"', "budgets", "cpu", 4 * GiB),
        ("budgets.cpu=auto", "budgets", "cpu", "auto"),
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.betas=[0.9, 0.95]", "optimizer", "betas", (0.9, 0.95)),
        ("optimizer.max_grad_norm=1", "optimizer", "max_grad_norm", 1.0),
        ("optimizer.max_grad_norm=off", "optimizer", "max_grad_norm", None),
        ("train.model=gpt:build", "train", "model", "gpt:build"),
        ('units.classes=["Block"]', "units", "classes", ("Block",)),
        ("store.run = a=b", "store", "run", None),
    ],
)
def test_set_words_are_toml_and_bare_words_are_strings(word, section, key, value):
    if value is None and section == "store":
        assert 'store.run = "a=b"' in refused({}, word)
    else:
        assert getattr(getattr(load_config({}, [word]), section), key) == value


def test_set_words_win_over_the_file_and_the_last_one_wins(toml):
    config = load_config(toml, ["budgets.cpu=1GiB", "budgets.cpu=2GiB"])
    assert config.budgets.cpu == 2 * GiB
    assert config.device == "cpu"


def test_a_config_passes_through_and_can_be_overridden(toml):
    config = load_config(toml)
    assert load_config(config) is config
    assert load_config(config, ["train.steps=7"]).train.steps == 7
    assert load_config(config, ["train.steps=7"]).nvme == config.nvme


def test_a_mapping_is_not_changed_by_overrides():
    values = {"nvme": {"queue_depth": 8}}
    load_config(values, ["nvme.queue_depth=16"])
    assert values == {"nvme": {"queue_depth": 8}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nvme": {"block_sise": "1MiB"}}, "nvme.block_sise: no such key; did you mean block_size?"),
        ({"nvmee": {}}, "nvmee: no such key; did you mean nvme?"),
        ({"block_size": 1}, "block_size: no such key; did you mean nvme.block_size?"),
        ({"zzz": 1}, "zzz: no such key; the top level has budgets"),
        ({"nvme": {"paths": [{"path": "x", "wight": 2}]}}, "nvme.paths[0].wight: no such key; did you mean weight?"),
        ({"nvme": 5}, "nvme = 5: is a section: write [nvme]"),
        ({"nvme": {"block_size": 5000}}, "nvme.block_size = 5000: 5000 is not a multiple of 4096, which direct I/O needs. Try 4096."),
        ({"nvme": {"block_size": "2GiB"}}, "2147483648 is more than the kernel takes at once: at most 1073741824"),
        ({"nvme": {"block_size": True}}, "nvme.block_size = true"),
        ({"nvme": {"queue_depth": 0}}, "nvme.queue_depth = 0"),
        ({"nvme": {"queue_depth": True}}, "true and false are not numbers"),
        ({"nvme": {"paths": ["a", "a"]}}, "is named twice"),
        ({"nvme": {"paths": [""]}}, "is empty: name a directory"),
        ({"budgets": {"cpu": "4 gallons"}}, "'4 gallons' is not a size"),
        ({"budgets": {"cpu": -1}}, "is negative"),
        ({"nvme": {"paths": ["/a", {"path": "/b", "weight": 2}]}}, "/a has no weight but others do"),
        ({"placement": {"optimizer": "disk"}}, "'auto', 'hbm', 'cpu' or 'nvme'"),
        ({"placement": {"optimizer": "nvme"}}, 'placement.optimizer = "nvme" needs a directory: set nvme.paths'),
        ({"optimizer": {"chunk_size": "9KiB"}}, "Try 8192."),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas[1] = 1.0"),
        ({"optimizer": {"lr": float("inf")}}, "finite"),
        ({"optimizer": {"lr": "nan"}}, "finite"),
        ({"device": "tpu"}, "is not a device"),
        ({"store": {"run": "../escape"}}, "is not a name of a run"),
        ({"train": {"model": "gpt.build"}}, "write module:function"),
    ],
)
def test_each_mistake_is_named_with_its_value_and_the_way_out(values, said):
    assert said in refused(values)


def test_all_problems_are_listed_together_under_the_file(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[nvme]\nqueue_depth = 0\nblock_sise = 1\n[optimizer]\nlr = "fast"\n')
    text = refused(path)
    assert text.startswith(f"{path}: 3 problems")
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.toml", None, "no such file. `infinity init"),
        ("broken.toml", "a = ", "not valid TOML"),
        ("broken.json", "{", "not valid JSON"),
        ("list.json", "[]", "holds a list"),
        ("run.yaml", "a: 1", ".toml or .json files, not '.yaml'"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    text = refused(tmp_path / name)
    assert said in text
    assert str(tmp_path / name) in text


def test_a_directory_is_not_a_configuration(tmp_path):
    assert "cannot be read" in refused(tmp_path)


@pytest.mark.parametrize("word", ["nvme.queue_depth", "=3", "nvme..x=1"])
def test_malformed_set_words_are_shown(word):
    assert f"--set {word!r}" in refused({}, word)


def test_a_set_word_cannot_reach_inside_a_value():
    assert "is a value, not a section" in refused({"device": "cpu"}, "device.kind=1")


def test_configurations_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().nvme.queue_depth = 3  # type: ignore[misc]
