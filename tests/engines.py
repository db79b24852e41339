"""Engines on temporary paths, and what they hold: configurations, parameters, gradients at rest."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager

import torch
from models import batches, tiny_gpt

import infinity
from infinity.kinds import Group, State, Tier
from infinity.storage import probe
from infinity.storage.chunks import ChunkKey
from infinity.storage.slabs import SlabPool

NVME = {"param": "nvme", "grad": "nvme", "optimizer": "nvme"}
CPU = {"param": "cpu", "grad": "cpu", "optimizer": "cpu"}


def settings(path, placement=NVME, **sections):
    """A configuration of one path with small chunks; `sections` are laid over it, key by key."""
    config = {
        "device": "cpu",
        "budgets": {"cpu": "64MiB"},
        "nvme": {"paths": [str(path)], "deadline_s": 30.0},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "chunk_size": "8KiB"},
        "store": {"resume": "never"},
        "placement": placement,
        "prefetch": {"units": 2},
        "units": {"threshold": 1000},
    }
    for name, keys in sections.items():
        config[name] = {**config.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return config


def mixed(config, model):
    """The same, with a budget in which half of the states rest on the CPU and the others, of the same units too, on NVMe."""
    config = {**config, "placement": {}, "budgets": {"cpu": 0}}
    plan = infinity.plan(model, config)
    half = plan.working_bytes(Tier.CPU) + sum(plan.resting(tier) for tier in Tier) // 2
    return {**config, "budgets": {"cpu": half}}


def known_rates(path, kept={}):  # noqa: B006
    """Spare `path` the measurement: it is on the disk that was measured first."""
    home = path / probe.HOME
    home.mkdir(parents=True, exist_ok=True)
    device = os.stat(path).st_dev
    if device in kept:
        (home / "rates.json").write_text(kept[device])
    else:
        probe.rates(path)
        kept[device] = (home / "rates.json").read_text()
    return path


def values_of(engine):
    """Every parameter, by name."""
    with engine.gathered(engine.model):
        return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def states_of(engine):
    """Every state at rest, by name and state: masters and moments of what is trained, parameters of what is frozen."""
    states = engine._parts.states
    return {(entry.name, entry.state): states.read(entry.name, entry.state, 0, torch.Size(entry.shape).numel()) for entry in states.tensors()}


def params_and_masters(engine, name):
    """(parameter, master) of a trained parameter as they rest, flat."""
    numel = dict(engine.model.named_parameters())[name].numel()
    states = engine._parts.states
    return states.read(name, State.PARAM, 0, numel), states.read(name, State.MASTER, 0, numel)


def grads_of(engine):
    """The gradient at rest of every trained parameter, by name; None where none has arrived."""
    parts, slabs, found = engine._parts, SlabPool(pin=False, threads=1), {}
    parts.grads.wait()
    for unit in parts.units:
        for f, flat in enumerate(unit.layout.flats):
            if flat.trainable:
                whole = torch.cat([_grad_chunk(parts, slabs, unit.layout.index, f, c) for c in range(len(flat.chunks(parts.plan.chunk_numel)))])
                present = parts.grads.present(unit.layout.index, f)
                found.update({slot.name: slot.view(whole).clone() if s in present else None for s, slot in enumerate(flat.slots)})
    slabs.close()
    return found


def _grad_chunk(parts, slabs, unit, flat, chunk):
    spec = parts.store.spec(ChunkKey(unit=unit, flat=flat, group=Group.GRAD, chunk=chunk))
    buffer = slabs.take(spec.padded_nbytes)
    parts.store.fetch(spec.key, buffer).wait()
    return buffer[: spec.nbytes].view(spec.parts[0].dtype).clone()


def ulp_distance(a, b):
    """How many floats lie between, element by element; complex numbers part by part."""

    def ordered(x):
        bits = as_real(x).contiguous().view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return (ordered(a) - ordered(b)).abs().max().item()


def as_real(x):
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()


def threads():
    """Names of the threads that the engine has started, and how many the system counts in this process."""
    named = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("infinity"))
    return named, len(os.listdir("/proc/self/task"))


def descriptors():
    """What this process has open."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            pass  # the listing's own
    return sorted(found)


def files_below(path):
    """Shard files, manifests and marks; the measured rates and locks, which hold no state, left out."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and file.name not in ("rates.json", "lock"))


def decay_groups(named):
    """Matrices decay, vectors do not."""
    named = list(named)
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def step(engine, steps=1):
    """Plain training steps."""
    for ids in batches(steps):
        engine.model(ids).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def train_and_die(path):
    """The life of a process that is killed in the middle of its third step."""
    engine = infinity.initialize(tiny_gpt(), settings(path, store={"resume": "auto"}))
    for i, ids in enumerate(batches(3)):
        engine.model(ids).backward()
        if i == 2:
            engine._parts.pipeline._update_on_cpu = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        engine.optimizer.step()


def try_to_open(path, answers):
    """What a second process is told."""
    try:
        infinity.initialize(tiny_gpt(), settings(path)).close()
        answers.put("opened")
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


@contextmanager
def small_disk(place, nbytes):
    """A file system of `nbytes` mounted at `place`: raises OSError where mounting is not allowed."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "infinity-test", str(place)], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(place)
        raise OSError(done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
