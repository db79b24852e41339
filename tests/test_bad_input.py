"""What cannot work is refused in one sentence: which key, file or parameter, which number, and the way out. Nothing is written before."""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from engines import CPU, NVME, files_below, known_rates, settings, threads
from models import batches, tiny_gpt
from torch import nn

import infinity
from infinity.errors import CapacityError, CheckpointError, ConfigError, StorageError, TraceError


def changed(config, section, **keys):
    return {**config, section: {**config.get(section, {}), **keys}}


def refused(tmp_path, model, config, kind, told, **options):
    """`initialize` raises `kind` with every text of `told`; the disk, the model and the process are as before."""
    known_rates(tmp_path)
    before, running = files_below(tmp_path), threads()[0]
    with pytest.raises(kind) as caught:
        infinity.initialize(model, config, **options)
    assert type(caught.value) is kind
    missing = [text for text in told if not re.search(text, str(caught.value))]
    assert not missing, f"{caught.value} does not say {missing}"
    assert files_below(tmp_path) == before
    assert threads()[0] == running
    if isinstance(model, nn.Module):
        assert not any("_infinity_seat" in p.__dict__ for p in model.parameters())


MISTAKES = {
    "unknown key": ("nvme", {"queue_dept": 8}, ["nvme.queue_dept", "did you mean queue_depth"]),
    "unknown section": ("nvmes", {"paths": []}, ["nvmes", "nvme"]),
    "wrong type": ("nvme", {"queue_depth": "many"}, ["nvme.queue_depth", "many"]),
    "out of range": ("nvme", {"queue_depth": 4096}, ["nvme.queue_depth", "4096", "1024"]),
    "not a size": ("budgets", {"cpu": "lots"}, ["budgets.cpu", "lots"]),
    "negative": ("budgets", {"cpu": -1}, ["budgets.cpu", "-1"]),
    "not aligned": ("nvme", {"block_size": 5000}, ["nvme.block_size", "5000", "4096"]),
    "no such tier": ("placement", {"param": "disk"}, ["placement.param", "disk"]),
    "no such dtype": ("precision", {"dtype": "fp8"}, ["precision.dtype", "fp8", "bf16"]),
    "a run with a slash": ("store", {"run": "a/b"}, ["store.run", "a/b", "letters, digits"]),
    "no such parameter": ("precision", {"dtype": "bf16", "keep_fp32": ["*.nrom"]}, ["precision.keep_fp32", r"\*.nrom"]),
    "no such class": ("units", {"classes": ["Blok"]}, ["units.classes", "Blok", "Block"]),
    "nvme without paths": ("nvme", {"paths": []}, ["placement.param", "nvme.paths"]),
    "weights for some": ("nvme", {"paths": [{"path": ".", "weight": 1.0}, "/tmp"]}, ["nvme.paths", "weight"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_configuration(tmp_path, mistake):
    section, keys, told = MISTAKES[mistake]
    refused(tmp_path, tiny_gpt(), changed(settings(tmp_path), section, **keys), ConfigError, told)


def test_a_configuration_file_that_is_missing_or_malformed_is_named(tmp_path):
    refused(tmp_path, tiny_gpt(), tmp_path / "nowhere.toml", ConfigError, ["nowhere.toml", "infinity init"])
    (tmp_path / "bad.toml").write_text("[nvme\n")
    refused(tmp_path, tiny_gpt(), tmp_path / "bad.toml", ConfigError, ["bad.toml", "TOML"])


def test_paths_that_cannot_hold_files(tmp_path):
    (tmp_path / "file").write_text("")
    paths = {
        tmp_path / "nowhere": ["nvme.paths", "nowhere does not exist", "Create the directory"],
        tmp_path / "file": ["nvme.paths", "file is not a directory"],
    }
    for path, told in paths.items():
        refused(tmp_path, tiny_gpt(), settings(path), ConfigError, told)
    twice = changed(settings(tmp_path), "nvme", paths=[str(tmp_path), str(tmp_path / "file" / "..")])
    refused(tmp_path, tiny_gpt(), twice, ConfigError, ["named twice"])


def test_paths_that_are_all_for_other_ranks(tmp_path):
    entry = {"path": str(tmp_path), "ranks": [1]}
    with pytest.raises(ConfigError, match="nvme.paths: all of them are for other ranks of this machine than 0. Add it to ranks of one"):
        infinity.initialize(tiny_gpt(), settings(tmp_path, nvme={"paths": [entry]}))
    with pytest.raises(ConfigError, match=r"nvme.paths.0.*ranks"):
        infinity.initialize(tiny_gpt(), settings(tmp_path, nvme={"paths": [{**entry, "ranks": []}]}))


def test_a_read_only_path(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "infinity-test", str(place)], capture_output=True).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    try:
        refused(tmp_path, tiny_gpt(), settings(place), ConfigError, ["nvme.paths", str(place), "not writable|read-only"])
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_memory_in_place_of_a_disk_is_warned_of(tmp_path, caplog):
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("needs a writable /dev/shm")
    place = shm / f"infinity-bad-input-{os.getpid()}"
    place.mkdir()
    try:
        with caplog.at_level(logging.WARNING, "infinity"), infinity.initialize(tiny_gpt(), settings(place)):
            pass
    finally:
        subprocess.run(["rm", "-r", str(place)], check=True)
    assert any("memory, not a disk" in record.message and str(place) in record.message for record in caplog.records)


def test_a_path_that_may_not_hold_enough(tmp_path):
    config = changed(settings(tmp_path), "nvme", paths=[{"path": str(tmp_path), "max_bytes": "64KiB"}])
    refused(tmp_path, tiny_gpt(), config, StorageError, ["No space left", "65536", "max_bytes", "bytes free|are free", r"\d{7} bytes"])


def minimum_of(error):
    """The number that the message names."""
    return int(re.search(r"below the minimum of (\d+) bytes", str(error)).group(1))


@pytest.mark.parametrize("placement", [NVME, CPU, {}, {"param": "cpu", "optimizer": "nvme"}], ids=["nvme", "cpu", "auto", "some"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_budget_below_the_minimum_names_it_and_the_minimum_works(tmp_path, placement, prefetch):
    config = settings(tmp_path, placement, prefetch={"units": prefetch})
    told = ["budgets.cpu = 10", "below the minimum of", "live units|gradients", "Raise budgets.cpu, lower prefetch.units"]
    refused(tmp_path, tiny_gpt(), changed(config, "budgets", cpu=10), CapacityError, told)
    with pytest.raises(CapacityError) as caught:
        infinity.plan(tiny_gpt(), changed(config, "budgets", cpu=10))
    least = minimum_of(caught.value)
    if placement in (NVME, CPU):  # elsewhere a mix of tiers may do with less than the sum of what the message names
        refused(tmp_path, tiny_gpt(), changed(config, "budgets", cpu=least - 1), CapacityError, [f"minimum of {least} bytes"])
    with infinity.initialize(tiny_gpt(), changed(config, "budgets", cpu=least)) as engine:
        for ids in batches(3):
            engine.model(ids).backward()
            engine.optimizer.step()
        assert engine.global_step == 3
        assert engine._parts.pools.plain.peak_bytes <= least


def test_states_that_need_a_path_and_have_none(tmp_path):
    config = settings(tmp_path, {}, nvme={"paths": []})
    needed = infinity.plan(tiny_gpt(), changed(settings(known_rates(tmp_path)), "budgets", cpu="64MiB")).working_bytes("cpu")
    refused(tmp_path, tiny_gpt(), changed(config, "budgets", cpu=needed), ConfigError, ["nvme.paths is empty", r"\d+ bytes", "Name a directory"])


def test_hbm_where_there_is_none(tmp_path):
    config = settings(tmp_path, {**NVME, "param": "hbm"})
    refused(tmp_path, tiny_gpt(), config, CapacityError, ['placement.param = "hbm"', "device is cpu", "Use cpu or nvme"])


@pytest.mark.parametrize(
    ("section", "keys", "told"),
    [
        ("budgets", {"hbm": "1GiB"}, "budgets.hbm = 1.00 GiB has no effect: the model computes on the cpu"),
        ("budgets", {"activations": "1GiB"}, "budgets.activations has no effect"),
        ("precision", {"dtype": "bf16", "init_scale": 8.0}, "precision.init_scale has no effect: only fp16"),
    ],
)
def test_a_key_that_has_no_effect_is_told(tmp_path, caplog, section, keys, told):
    with caplog.at_level(logging.WARNING, "infinity"):
        infinity.plan(tiny_gpt(), changed(settings(known_rates(tmp_path)), section, **keys))
    assert [told in record.message for record in caplog.records] == [True]


def test_a_function_says_what_is_a_unit(tmp_path, monkeypatch):
    (tmp_path / "rules.py").write_text("def is_unit(name, module): return name in ('blocks.0', 'blocks.1')\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = settings(known_rates(tmp_path))
    made = infinity.plan(tiny_gpt(), {**config, "units": {"function": "rules:is_unit"}})
    assert {spec.parts[0].name.partition("|")[0] for spec in made.specs} == {"blocks.0", "blocks.1", "root"}
    for units, told in (
        ({"function": "rules:number"}, ["units.function", "has no function 'number'", "is_unit"]),
        ({"function": "rulez:is_unit"}, ["units.function", "no module 'rulez'"]),
        ({"function": "rules:is_unit", "classes": ["Block"]}, ["units", "set one of them"]),
    ):
        refused(tmp_path, tiny_gpt(), {**config, "units": units}, ConfigError, told)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_where_there_is_none(tmp_path, device):
    config = {**settings(tmp_path), "device": device}
    refused(tmp_path, tiny_gpt(), config, ConfigError, [f'device = "{device}"', "no CUDA device", "auto"])


class Bare(nn.Module):
    """One parameter, whatever it is."""

    def __init__(self, param):
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = param


MODELS = {
    "fp64": (lambda: Bare(nn.Parameter(torch.ones(4, dtype=torch.float64))), ["inner.weight", "float64", "fp32, bf16, fp16", "freeze it"]),
    "complex128": (lambda: Bare(nn.Parameter(torch.ones(4, dtype=torch.complex128))), ["inner.weight", "complex128"]),
    "no values": (lambda: Bare(nn.Parameter(torch.ones(4, device="meta"))), ["inner.weight", "meta", "function that builds"]),
    "no shape": (lambda: nn.Sequential(nn.LazyLinear(4)), ["0.weight", "lazy", "one forward"]),
    "sparse": (lambda: Bare(nn.Parameter(torch.eye(4).to_sparse())), ["inner.weight", "sparse"]),
    "no parameters": (nn.Identity, ["no parameters"]),
    "nothing to train": (lambda: nn.Linear(4, 4).requires_grad_(False), ["nothing to train", "requires_grad"]),
    "no module": (lambda: {"weight": 1}, ["dict", "torch.nn.Module"]),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_cannot_be_trained(tmp_path, model):
    build, told = MODELS[model]
    refused(tmp_path, build(), settings(tmp_path), ConfigError, told)


def test_a_builder_that_fails_says_so_itself(tmp_path):
    def broken():
        raise ZeroDivisionError("in user code")

    refused(tmp_path, broken, settings(tmp_path), ZeroDivisionError, ["in user code"])
    refused(tmp_path, lambda: None, settings(tmp_path), ConfigError, ["NoneType", "torch.nn.Module"])
    refused(tmp_path, lambda: Bare(nn.Parameter(torch.empty(4))), settings(tmp_path), ConfigError, ["inner.weight", "without values"])


def test_parameters_that_are_not_free(tmp_path):
    config = settings(tmp_path)
    held = tiny_gpt()
    with infinity.initialize(held, settings(known_rates(tmp_path / "other"))):
        with pytest.raises(TraceError, match="held by another engine.*detach"):
            infinity.initialize(held, config)
        with pytest.raises(TraceError, match="cannot be copied"):
            copy.deepcopy(held)
    trained = tiny_gpt()
    trained(batches(1)[0]).backward()
    refused(tmp_path, trained, config, TraceError, ["already has a gradient", r"model.zero_grad\(\)"])
    trained.zero_grad()
    assert trained(batches(1)[0]).isfinite(), "the model is as it was"


GROUPS = {
    "another model's": (lambda named: [{"params": list(tiny_gpt().parameters())}], ["param_groups", "not one the engine trains", "named_parameters"]),
    "twice": (lambda named: [{"params": (all_ := [p for _, p in named])}, {"params": all_[:1]}], ["param_groups", "more than one parameter group"]),
    "a tensor": (lambda named: next(p for _, p in named), ["param_groups", "tensor"]),
    "empty": (lambda named: [], ["param_groups", "empty"]),
    "negative lr": (lambda named: [{"params": [p for _, p in named], "lr": -1.0}], ["lr", "-1.0"]),
    "betas": (lambda named: [{"params": [p for _, p in named], "betas": (0.9, 1.0)}], ["betas", "1.0"]),
    "amsgrad": (lambda named: [{"params": [p for _, p in named], "amsgrad": True}], ["amsgrad", "not offered"]),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_param_groups_that_cannot_be_honoured(tmp_path, groups):
    build, told = GROUPS[groups]
    refused(tmp_path, tiny_gpt(), settings(tmp_path), ConfigError, told, param_groups=build)


def test_groups_of_generators_are_taken_as_torch_takes_them(tmp_path):
    model = tiny_gpt(tied=False)
    groups = [{"params": model.blocks.parameters(), "lr": 0.5}, {"params": (p for n, p in model.named_parameters() if not n.startswith("blocks"))}]
    with infinity.initialize(model, settings(known_rates(tmp_path)), param_groups=iter(groups)) as engine:
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 1e-3]
        assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == len(list(model.parameters()))


class Opaque:
    def state_dict(self):
        return {"position": object()}

    def load_state_dict(self, state):
        pass


def test_what_is_registered_can_be_saved_or_is_refused_at_once(tmp_path):
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path), store={"resume": "auto"})) as engine:
        with pytest.raises(CheckpointError, match=r"register\(loader=...\).*has no state_dict"):
            engine.register(loader=[1, 2])
        with pytest.raises(CheckpointError, match=r"loader.*position.*without pickle"):
            engine.register(loader=Opaque())
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        engine.register(scheduler=scheduler)
        with pytest.raises(CheckpointError, match="scheduler.*taken"):
            engine.register(scheduler=scheduler)
        engine.save(tmp_path / "here")
        with pytest.raises(CheckpointError, match="here exists.*another name"):
            engine.save(tmp_path / "here")
        with pytest.raises(StorageError, match="tmp_file|Not a directory"):
            engine.save(tmp_path / "here" / "manifest.json" / "x")


def test_gradients_that_torch_would_miss(tmp_path):
    with infinity.initialize(tiny_gpt(), settings(known_rates(tmp_path))) as engine:
        engine.model(batches(1)[0]).backward()
        with pytest.raises(TraceError, match="max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)
        with pytest.raises(TraceError, match="set_to_none"):
            engine.optimizer.zero_grad(set_to_none=False)
        with pytest.raises(TraceError, match="precision.dtype"):
            engine.model.half()
        engine.clip_grad_norm_(1.0)
        engine.model(batches(1)[0]).backward()
        with pytest.raises(TraceError, match="after the last backward"):
            engine.optimizer.step()
