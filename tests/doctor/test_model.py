"""The plan of the configured model counts, and looking at it leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from models import tiny_gpt
from torch import nn

from infinity.config import load_config
from infinity.doctor.finding import Status
from infinity.doctor.model import check_keys, check_plan
from infinity.errors import ConfigError
from infinity.kinds import Tier

CPU = torch.device("cpu")
NVME = {"param": "nvme", "grad": "nvme", "optimizer": "nvme"}


def config_of(path: Path, **sections: object):
    return load_config({"device": "cpu", "nvme": {"paths": [str(path)]}, "placement": NVME, "budgets": {"cpu": "64MiB"}, **sections})


def test_a_model_that_fits_is_counted_and_the_path_stays_empty(tmp_path):
    plan, found = check_plan(config_of(tmp_path), lambda: tiny_gpt, CPU)
    assert plan is not None and plan.resting(Tier.NVME) > 0
    numel = sum(param.numel() for param in tiny_gpt().parameters())
    assert found.status is Status.OK and f"{numel:,} parameters" in found.found and "in nvme" in found.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"budgets": {"cpu": "64KiB"}}, "budgets.cpu = 64.00 KiB is below the minimum"),
        ({"units": {"classes": ["Blok"]}}, "units.classes"),
        ({"placement": {}, "budgets": {"cpu": "64MiB"}, "nvme": {"paths": []}}, ""),
    ],
)
def test_what_a_run_would_be_refused_for_is_a_failure(tmp_path, sections, told):
    plan, found = check_plan(config_of(tmp_path, **sections), lambda: tiny_gpt, CPU)
    assert (plan is None) == bool(told) and told in found.found
    assert found.status is (Status.FAILURE if told else Status.OK)


def test_a_path_without_room_for_the_plan_is_a_failure(tmp_path):
    nvme = {"paths": [{"path": str(tmp_path), "max_bytes": "64KiB"}]}
    plan, found = check_plan(config_of(tmp_path, nvme=nvme), lambda: tiny_gpt, CPU)
    assert plan is None and found.status is Status.FAILURE
    assert "No space left" in found.found and "max_bytes 65536" in found.found


def test_a_function_that_is_not_there_is_a_failure_that_names_the_key(tmp_path):
    def load():
        raise ConfigError("train.model = 'gpt:bild': no such function")

    _, found = check_plan(config_of(tmp_path), load, CPU)
    assert found.status is Status.FAILURE and "gpt:bild" in found.found


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = self.weight.sum().item()


def test_a_builder_that_wants_values_is_only_a_warning(tmp_path):
    """A run builds it with values, so it may well work there."""
    plan, found = check_plan(config_of(tmp_path), lambda: NeedsValues, CPU)
    assert plan is None and found.status is Status.WARNING
    assert "RuntimeError" in found.found and "torch.device('meta')" in found.way_out


def test_what_a_model_prints_is_not_ours_and_its_bytecode_is_not_written(tmp_path, capsys, monkeypatch):
    module = tmp_path / "chatty_model.py"
    module.write_text("from torch import nn\nprint('importing')\ndef build():\n    print('building')\n    return nn.Linear(8, 8)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def load():
        import chatty_model  # type: ignore[import-not-found]

        return chatty_model.build

    _, found = check_plan(config_of(tmp_path), load, CPU)
    sys.modules.pop("chatty_model")
    said = capsys.readouterr()
    assert found.status is Status.OK and said.out == "" and said.err.split() == ["importing", "building"]
    assert [path.name for path in tmp_path.iterdir()] == [module.name]


def test_keys_without_effect_are_warnings_that_name_them():
    config = load_config({"budgets": {"hbm": "1GiB"}, "precision": {"dtype": "bf16", "init_scale": 2.0}})
    found = list(check_keys(config, CPU))
    assert [finding.status for finding in found] == [Status.WARNING] * 2
    assert [finding.way_out for finding in found] == [f"remove {key} from the configuration" for key in ("budgets.hbm", "precision.init_scale")]
    assert list(check_keys(load_config({}), CPU)) == []
