"""Over ranks the values of rank 0 are everybody's, and nobody else has them whole."""

from __future__ import annotations

import logging

import torch
from torch import nn

import infinity
from tests.ranks import run_ranks


def settings(folder, **sections):
    return {
        "device": "cpu",
        "budgets": {"cpu": "64MiB"},
        "nvme": {"paths": [str(folder)], "deadline_s": 30.0},
        "optimizer": {"chunk_size": "8KiB"},
        "placement": {"optimizer": "nvme"},
        "store": {"resume": "never"},
        **sections,
    }


class Everything(nn.Module):
    """Parameters tied, frozen, complex, without elements, of no dimension, of several dtypes; buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(97, 64), nn.Linear(64, 97, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(50, 40).t())
        self.phases = nn.Parameter(torch.randn(30, 7, dtype=torch.complex64))
        self.one, self.none = nn.Parameter(torch.randn(())), nn.Parameter(torch.empty(0, 3))
        self.short = nn.Parameter(torch.randn(33).bfloat16())
        self.named_home = nn.Parameter(torch.randn(600, 700, device="cpu"))
        self.norm = nn.BatchNorm1d(64)
        self.norm.running_mean.uniform_()
        sheet = torch.randn(5, 7)
        self.register_buffer("drawn", sheet[:3], persistent=False)
        self.register_buffer("doubles", torch.rand(3, dtype=torch.float64))
        self.register_buffer("flags", torch.rand(11) < 0.5)
        self.register_buffer("waves", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("wide", torch.randn(4, 1).expand(4, 6))
        self.register_buffer("corner", sheet[1:4, 2:4], persistent=False)
        self.register_buffer("missing", None)
        self.kept = [self.drawn, self.embed.weight]


class Peeks(nn.Module):
    """Reads a value while it is built."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.linear, self.scale = nn.Linear(64, 64), rates[1]
        self.register_buffer("drawn", torch.randn(3))


class Stray(nn.Module):
    """Keeps a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(64, 64), {"angles": torch.rand(3)}


class Hooked(nn.Module):
    """Changes a gradient on its way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.linear.weight.register_hook(torch.zeros_like)


class Sparse(nn.Module):
    """A buffer that is not elements in a row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("edges", torch.rand(4, 4).to_sparse())


KINDS = (Everything, Peeks, Stray, Hooked, Sparse)
NEEDS_VALUES = {
    Peeks: "without values, on the meta device, the model builder ended with RuntimeError: Tensor.item() cannot be called on meta tensors",
    Stray: "ended with ConfigError: table: a tensor that is neither a parameter nor a buffer. This rank builds it with values",
    Hooked: "ended with ConfigError: linear.weight has a hook or a view, or was used under autograd",
    Sparse: "This rank builds it with values",
}
"""And what a rank says that builds it on its own."""


def values_of(model):
    """Everything by name, as bytes."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    dense = [(name, tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()) for name, tensor in named]
    real = [(name, torch.view_as_real(tensor) if tensor.is_complex() else tensor) for name, tensor in dense]
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in real}


def begin(builder, folder):
    """(values, the next random number), of a run's first moment."""
    with infinity.initialize(builder, settings(folder)) as engine:
        drawn = torch.rand(()).item()
        with engine.gathered():
            if builder is Everything or isinstance(builder, Everything):
                model = engine.model
                assert model.head.weight is model.embed.weight is model.kept[1] and model.kept[0] is model.drawn
                assert model.corner.untyped_storage().data_ptr() == model.drawn.untyped_storage().data_ptr()
            if builder is Stray:
                assert engine.model.table["angles"].shape == (3,) and not engine.model.table["angles"].is_meta
            return values_of(engine.model), drawn


def eager(kind):
    """As the engine keeps them: its parameters are fp32."""
    torch.manual_seed(7)
    model = kind()
    for param in model.parameters():
        param.data = param.data if param.is_complex() else param.data.float()
    return values_of(model), torch.rand(()).item()


class Told(logging.Handler):
    """What the engine warned of."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def build_on_ranks(rank, world_size, folder):
    """What each kind of builder begins with under one seed, and the warnings; then a builder, and modules, under seeds of their own."""
    found, told = {}, Told()
    logging.getLogger("infinity").addHandler(told)
    for kind in KINDS:
        torch.manual_seed(7)
        told.messages.clear()
        found[kind] = *begin(kind, folder), list(told.messages)
    for way, kind in (("builder", Everything), ("module", Everything), ("module", Sparse)):
        torch.manual_seed(7 + rank)
        found[way, kind] = begin(kind if way == "builder" else kind(), folder)
    return found


def test_all_ranks_begin_with_rank_0s_values_as_eager_construction_gives_them(tmp_path):
    first, second = run_ranks(build_on_ranks, 2, tmp_path)
    for kind in KINDS:
        assert first[kind] == (*eager(kind), [])
        assert second[kind][:2] == first[kind][:2], f"{kind.__name__}: its generator stands where eager construction leaves it, too"
        assert [NEEDS_VALUES[kind] in message for message in second[kind][2]] == [True] * (kind in NEEDS_VALUES)
    for way, kind in (("builder", Everything), ("module", Everything), ("module", Sparse)):
        assert first[way, kind] == eager(kind)
        values, drawn = second[way, kind]
        assert values == first[way, kind][0] and drawn != first[way, kind][1], f"{way}, {kind.__name__}"


class Unfilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8), nn.Parameter(torch.empty(8))


class Unreadable(nn.Parameter):
    """Its values were in a file that is gone."""

    def detach(self):
        raise OSError("the file is gone")


class HasUnreadable(nn.Module):
    def __init__(self, is_the_one):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        if is_the_one:
            self.blocks[2].weight = Unreadable(torch.zeros(64, 64))


class Counts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(3, dtype=dtype))


def fail_to_begin(rank, world_size, folder):
    """What each attempt raises."""
    found = {}
    attempts = {
        "unfilled": Unfilled,
        "unreadable": HasUnreadable(rank == 0),
        "unreadable elsewhere": lambda: HasUnreadable(False),
        "dtypes": nn.Linear(8, 8, dtype=(torch.float32, torch.bfloat16)[rank]),
        "buffers": lambda: Counts((torch.int64, torch.int32)[rank]),
    }
    for name, model in attempts.items():
        try:
            infinity.initialize(model, settings(folder)).close()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_rank_0_cannot_give_is_told_on_all_ranks(tmp_path):
    first, second = run_ranks(fail_to_begin, 2, tmp_path)
    assert first["unfilled"].startswith("ConfigError: the model builder left tensors without values: bias")
    assert second["unfilled"].startswith("RankError: preparing the run failed on rank 0, of 1 that failed: ConfigError: the model builder left")
    assert first["unreadable"] == "OSError: the file is gone"
    assert second["unreadable"] == "RankError: writing the first values failed on rank 0: OSError: the file is gone"
    assert "unreadable elsewhere" not in first | second, "the ranks can begin anew"
    told = "ConfigError: the model differs between ranks: {}"
    assert first["dtypes"] == second["dtypes"]
    assert first["dtypes"].startswith(told.format("weight is torch.float32 [8, 8] on rank 0 and torch.bfloat16 [8, 8] on rank 1"))
    assert first["buffers"].startswith(told.format("count is torch.int64 [3] on rank 0 and torch.int32 [3] on rank 1"))


def step_once(model, folder):
    """(values at the beginning, at the end, steps taken) of the run in `folder`, which is published."""
    with infinity.initialize(model, settings(folder, store={"resume": "auto"})) as engine:
        with engine.gathered():
            begun = values_of(engine.model)
        engine.model.linear(torch.ones(2, 8)).sum().backward()
        engine.model.count += 1 + engine.rank
        engine.optimizer.step()
        with engine.gathered():
            return begun, values_of(engine.model), engine.global_step


def go_on(rank, world_size, folder):
    torch.manual_seed(rank)
    return [step_once(Counts(torch.float32), folder / "module"), step_once(lambda: Counts(torch.float32), folder / "builder")]


def test_a_run_of_differently_seeded_ranks_goes_on(tmp_path):
    """It is known by rank 0's values; from there on each rank's buffers are its own."""
    for way in ("module", "builder"):
        (tmp_path / way).mkdir()
    first, second = (run_ranks(go_on, 2, tmp_path) for _ in range(2))
    for way in range(2):
        assert first[0][way][0] == first[1][way][0] and first[0][way][1] != first[1][way][1]
        for rank in range(2):
            assert second[rank][way][0] == first[rank][way][1] and second[rank][way][2] == 2
