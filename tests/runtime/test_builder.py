"""A model built in files equals the model built in memory, to the bit, and nothing of it is left behind."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from infinity.errors import ConfigError, StorageError
from infinity.runtime.builder import build

SPILL = 1024  # small enough that most tensors of a small model go to files
WINDOW = 8192


def same_as_eager(builder: Callable[[], nn.Module], spool: Path, *, spill_bytes: int = SPILL, window_bytes: int = WINDOW) -> nn.Module:
    torch.manual_seed(7)
    eager = builder()
    eager_rng = torch.get_rng_state()
    torch.manual_seed(7)
    built = build(builder, str(spool), window_bytes=window_bytes, spill_bytes=spill_bytes)
    assert torch.equal(torch.get_rng_state(), eager_rng)
    assert list(spool.iterdir()) == []
    for named in ("named_parameters", "named_buffers"):
        wanted, got = dict(getattr(eager, named)()), dict(getattr(built, named)())
        assert list(got) == list(wanted)
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype and got[name].stride() == tensor.stride(), name
            assert got[name].requires_grad == tensor.requires_grad and type(got[name]) is type(tensor), name
            assert same_bits(got[name], tensor), name
    return built


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class TinyGPT(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width, padding_idx=0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 300, bias=False)
        self.head.weight = self.embed.weight
        angles = torch.outer(torch.arange(128).float(), 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("mask", torch.full((128, 128), float("-inf")).triu(1), persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def hf_config(kind: str) -> object:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "llama":
        return transformers.LlamaConfig(num_key_value_heads=2, **common)
    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    if kind == "bert":
        return transformers.BertConfig(**common)
    if kind == "mixtral":
        return transformers.MixtralConfig(num_key_value_heads=2, num_local_experts=4, **common)
    return transformers.T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)


def hf_model(kind: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}.get(kind, transformers.AutoModelForCausalLM)
    return lambda: auto.from_config(hf_config(kind))


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(hf_model("llama")(), config)


def conv_net() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 8, 3), nn.GroupNorm(2, 8), nn.LSTM(8, 16, 2))
    return net.to(memory_format=torch.channels_last)


def parametrized() -> nn.Module:
    parametrizations = nn.utils.parametrizations
    return nn.ModuleList(
        [
            parametrizations.weight_norm(nn.Linear(64, 48)),
            parametrizations.spectral_norm(nn.Linear(64, 48)),
            parametrizations.orthogonal(nn.Linear(48, 48)),
        ]
    )


def every_initialiser() -> nn.Module:
    init = nn.init
    names = "uniform_ normal_ ones_ zeros_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ trunc_normal_ orthogonal_ eye_"
    params = {name: getattr(init, name)(nn.Parameter(torch.empty(70, 33))) for name in names.split()}
    params["constant_"] = init.constant_(nn.Parameter(torch.empty(70, 33)), 0.3)
    params["sparse_"] = init.sparse_(nn.Parameter(torch.empty(70, 33)), 0.1)
    params["dirac_"] = init.dirac_(nn.Parameter(torch.empty(16, 16, 3)))
    return nn.ParameterDict(params)


class EveryFactory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        n, like = 1009, torch.empty(17, 61).t()
        made = {
            "zeros": torch.zeros(n),
            "ones": torch.ones(n, dtype=torch.int16),
            "full": torch.full((n,), 2.5),
            "rand": torch.rand(n),
            "randn": torch.randn(n),
            "full_by_name": torch.full(size=(n,), fill_value=True),
            "randint": torch.randint(0, 9, (n,)),
            "randperm": torch.randperm(n),
            "arange": torch.arange(n),
            "linspace": torch.linspace(0, 1, n),
            "eye": torch.eye(40),
            "tril": torch.ones(40, 40).tril(),
            "zeros_like": torch.zeros_like(like),
            "ones_like": torch.ones_like(like),
            "full_like": torch.full_like(like, 3),
            "rand_like": torch.rand_like(like),
            "randn_like": torch.randn_like(like, dtype=torch.float64),
            "new_zeros": like.new_zeros(n),
            "new_ones": like.new_ones(n),
            "new_full": like.new_full((n,), 4.0),
            "new_tensor": torch.zeros(1).new_tensor(list(range(n))),
            "cat": torch.cat([torch.rand(n), torch.ones(n)]),
            "stack": torch.stack([torch.rand(n)] * 2),
            "clone": torch.rand(60, 30).t().clone(),
            "cast": torch.randn(60, 30).t().to(torch.bfloat16),
            "half": torch.randn(n).half(),
            "complex": torch.polar(torch.ones(n), torch.rand(n)),
            "numpy": torch.from_numpy(np.arange(float(n))),
            "legacy": torch.Tensor(n).uniform_(),
            "expanded": torch.rand(1, 600).expand(7, 600),
            "generator": torch.randn(n, generator=torch.Generator().manual_seed(3)),
            "normal": torch.normal(0.0, 1.0, (n,)),
            "bool": torch.rand(4 * n) > 0.5,
            "copied": copy.deepcopy(torch.rand(n)),
            "meshed": torch.meshgrid(torch.arange(40), torch.arange(40), indexing="ij")[0],
            "bernoulli": torch.empty(n).bernoulli_(0.3),
            "exponential": torch.empty(n).exponential_(),
            "random": torch.empty(n).random_(),
            "cauchy": torch.empty(n).cauchy_(),
            "geometric": torch.empty(n).geometric_(0.4),
            "log_normal": torch.empty(n).log_normal_(),
        }
        for name, tensor in made.items():
            self.register_buffer(f"made_{name}", tensor, persistent=False)


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.half = copy.deepcopy(layer).half()
        self.double = nn.Linear(40, 40).to(torch.float64)
        self.frozen = nn.Parameter(torch.rand(40, 40), requires_grad=False)


BUILDERS = {
    "gpt": TinyGPT,
    "lora": lora,
    "conv": conv_net,
    "parametrized": parametrized,
    "initialisers": every_initialiser,
    "factories": EveryFactory,
    "copies": Copies,
    **{kind: (lambda kind=kind: hf_model(kind)()) for kind in ("llama", "t5", "gpt2", "bert", "mixtral")},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("spill_bytes", [1, SPILL])
@pytest.mark.parametrize("name", BUILDERS)
def test_built_equals_eager_to_the_bit(name: str, spill_bytes: int, tmp_path: Path) -> None:
    same_as_eager(BUILDERS[name], tmp_path, spill_bytes=spill_bytes)


def test_tied_parameters_stay_one(tmp_path: Path) -> None:
    model = same_as_eager(TinyGPT, tmp_path)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extra", [-17, -1, 0, 1, 15, 16, 17])
def test_working_in_pieces_draws_the_same_numbers(dtype: torch.dtype, extra: int, tmp_path: Path) -> None:
    numel = 3 * (64 << 10) // dtype.itemsize + extra  # the smallest piece is 64 KiB

    def builder() -> nn.Module:
        names = {"normal": torch.empty(numel, dtype=dtype).normal_(0.5, 0.02), "uniform": torch.empty(numel, dtype=dtype).uniform_(-3, 5)}
        names["randn"] = torch.randn(numel, dtype=dtype)
        names["cast"] = names["randn"].to(torch.float32 if dtype != torch.float32 else torch.bfloat16)
        return nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in names.items()})

    same_as_eager(builder, tmp_path, window_bytes=1 << 16)


def test_large_tensors_live_in_files_and_leave_with_them(tmp_path: Path) -> None:
    model = build(lambda: nn.Linear(512, 512), str(tmp_path), spill_bytes=1 << 20)
    assert mapped_bytes(tmp_path) == [512 * 512 * 4]  # the weight; the bias is small
    model.weight.data = torch.zeros(())
    gc.collect()
    assert mapped_bytes(tmp_path) == []


def mapped_bytes(directory: Path) -> list[int]:
    """Sizes of this process's mappings of files (unlinked ones too) in `directory`."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(directory) in line:
            start, stop = (int(address, 16) for address in line.split()[0].split("-"))
            sizes.append(stop - start)
    return sizes


def unfilled(builder: Callable[[], nn.Module], spool: Path) -> str:
    with pytest.raises(ConfigError, match="without values") as caught:
        build(builder, str(spool), spill_bytes=SPILL)
    assert list(spool.iterdir()) == []
    return str(caught.value).partition("without values: ")[2].partition(". Initialise")[0]


def parameter(tensor: torch.Tensor) -> nn.ParameterDict:
    return nn.ParameterDict({"p": nn.Parameter(tensor, requires_grad=False)})


def with_buffer() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module.register_buffer("table", torch.empty(5), persistent=False)
    return module


def partly(*, rows: int) -> torch.Tensor:
    tensor = torch.empty(64, 64)
    for row in range(rows):
        tensor[row] = row
    return tensor


def halves(*, second: bool) -> torch.Tensor:
    tensor = torch.empty(64, 64)
    tensor[:, 0::2] = torch.rand(64, 32)
    if second:
        tensor[:, 1::2] = 1.0
    return tensor


def as_pairs(*, both: bool) -> torch.Tensor:
    tensor = torch.empty(64, dtype=torch.complex64)
    torch.view_as_real(tensor)[:, 0] = 1.0
    if both:
        torch.view_as_real(tensor)[:, 1].zero_()
    return tensor


@pytest.mark.parametrize(
    ("builder", "names"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.utils.skip_init(nn.Linear, 2, 2)), "1.weight, 1.bias"),
        (lambda: nn.utils.skip_init(nn.Linear, 64, 64), "weight, bias"),
        (with_buffer, "table"),
        (lambda: parameter(torch.empty(64, 64)), "p"),
        (lambda: parameter(torch.empty(64, 64).clone()), "p"),
        (lambda: parameter(torch.empty(64, 64).to(torch.bfloat16)), "p"),
        (lambda: parameter(torch.empty(64, 64).mul_(2.0)), "p"),
        (lambda: parameter(torch.empty(64, 64) + torch.ones(64, 64)), "p"),
        (lambda: parameter(torch.ones(64, 64).copy_(torch.empty(64, 64))), "p"),
        (lambda: parameter(torch.cat([torch.ones(600), torch.empty(600)])), "p"),
        (lambda: parameter(copy.deepcopy(torch.empty(64, 64))), "p"),
        (lambda: parameter(torch.Tensor(64, 64)), "p"),
        (lambda: parameter(torch.ones(4).resize_(64, 64)), "p"),
        (lambda: parameter(torch.empty_like(torch.ones(64, 64))), "p"),
        (lambda: parameter(partly(rows=63)), "p"),
        (lambda: parameter(halves(second=False)), "p"),
        (lambda: parameter(as_pairs(both=False)), "p"),
        (lambda: parameter(torch.empty(64, 64).masked_fill_(torch.ones(64, 64, dtype=torch.bool), 1.0)), "p"),
        (lambda: nn.Linear(2, 2, device="meta").to_empty(device="cpu"), "weight, bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_were_never_filled_are_named(builder: Callable[[], nn.Module], names: str, tmp_path: Path) -> None:
    assert unfilled(builder, tmp_path) == names


@pytest.mark.parametrize(
    "builder",
    [
        lambda: parameter(partly(rows=64)),
        lambda: parameter(halves(second=True)),
        lambda: parameter(as_pairs(both=True)),
        lambda: parameter(partly(rows=10)[:10]),
        lambda: parameter(partly(rows=10)[:10] * 2),
        lambda: parameter(torch.zeros_like(torch.empty(64, 64))),
        lambda: parameter(torch.empty(64, 64).new_full((64, 64), 2.0)),
        lambda: parameter(torch.eye(64, out=torch.empty(64, 64))),
        lambda: parameter(torch.mul(torch.ones(64, 64), 2.0, out=torch.empty(0))),
        lambda: parameter(torch.empty(64, 64).t_().fill_(2.0)),
        lambda: parameter(torch.empty(64, 48).t().copy_(torch.ones(48, 64))),
        lambda: parameter(torch.empty(64, 64).view(torch.int32).zero_().view(torch.float32)),
        lambda: parameter(torch.empty(0, 8)),
        lambda: nn.Linear(64, 64, device="meta").to_empty(device="cpu").apply(nn.Linear.reset_parameters),
    ],
)  # fmt: skip
def test_tensors_filled_in_parts_or_through_views_are_filled(builder: Callable[[], nn.Module], tmp_path: Path) -> None:
    same_as_eager(builder, tmp_path)


def status_bytes(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def test_only_the_window_is_in_memory(tmp_path: Path) -> None:
    window, rows = 16 << 20, 40_000
    build(lambda: nn.Embedding(2000, 1000), str(tmp_path), window_bytes=1 << 20)  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = status_bytes("VmHWM")
    model = build(lambda: nn.Embedding(rows, 1000), str(tmp_path), window_bytes=window)
    assert model.weight.nbytes > 9 * window
    assert status_bytes("VmHWM") - before < window + window // 4 + (4 << 20)  # and one piece, and a little for Python


CAPPED = """
import os, sys, torch
from torch import nn
from infinity.runtime.builder import build

def peak_bytes():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50_000, 1024)
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((4096, 4096), float(i)) for i in range(15))

build(lambda: nn.Linear(600, 600), sys.argv[1])  # imports what it needs
torch.manual_seed(11)
before = peak_bytes()
model = build(Large, sys.argv[1], window_bytes=32 << 20)
print("grown", peak_bytes() - before, "bytes", sum(p.nbytes for p in model.parameters()))
gone = torch.zeros(())
for p in model.parameters():
    print(sum(int(piece.sum()) for piece in p.detach().view(torch.int32).flatten().split(1 << 17)))
    p.data = gone
"""


def uncapped_sums() -> list[int]:
    """What CAPPED prints, made one tensor at a time."""
    torch.manual_seed(11)
    made = (layer for layer in (nn.Embedding(50_000, 1024), *(nn.Linear(4096, 4096) for _ in range(3))))
    sums = [int(p.detach().view(torch.int32).sum()) for layer in made for p in layer.parameters()]
    return sums + [int(torch.full((4096, 4096), float(i)).view(torch.int32).sum()) for i in range(15)]


@pytest.mark.slow
def test_a_model_of_four_times_the_memory_limit_is_built(tmp_path: Path) -> None:
    limit = 320 << 20
    group = Path(f"/sys/fs/cgroup/memory/infinity-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a writable memory cgroup (v1): {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        command = ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", sys.executable, "-c", CAPPED, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
    finally:
        group.rmdir()
    first, *sums = done.stdout.splitlines()
    _, grown, _, nbytes = first.split()
    assert int(nbytes) > 4 * limit
    assert int(grown) < (32 << 20) + (16 << 20)  # the window and one piece, rounded up
    assert [int(line) for line in sums] == uncapped_sums()
    assert list(tmp_path.iterdir()) == []


def test_a_builder_on_the_meta_device_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.weight \(meta\), 0\.bias \(meta\).*device='cpu'"):
        build(lambda: nn.Sequential(nn.Linear(2, 2, device="meta")), str(tmp_path))


def test_a_lazy_parameter_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lazy parameters have no shape yet: weight, bias"):
        build(lambda: nn.LazyLinear(2), str(tmp_path))


def test_a_builder_that_returns_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="returned int, not a torch.nn.Module"):
        build(lambda: 3, str(tmp_path))  # type: ignore[arg-type,return-value]


def test_an_exception_in_the_builder_passes_and_leaves_no_files(tmp_path: Path) -> None:
    def builder() -> nn.Module:
        nn.Linear(512, 512)
        self_made = torch.randn(512, 512)
        raise KeyError(f"mine {self_made.shape}")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError, match="mine"):
        build(builder, str(tmp_path))
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and mapped_bytes(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert type(torch.empty(3) + 1) is torch.Tensor  # the mode is off again


@pytest.mark.parametrize("where", ["missing", "file"])
def test_a_bad_spool_directory_is_refused_by_name(where: str, tmp_path: Path) -> None:
    path = tmp_path / where
    if where == "file":
        path.write_text("")
    with pytest.raises(ConfigError, match=f"{path}.*directory"):
        build(lambda: nn.Linear(2, 2), str(path))


def test_a_full_disk_is_an_error_that_names_bytes(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{1 << 50} bytes wanted.*free there") as caught:
        build(lambda: parameter(torch.empty(1 << 25, 1 << 25, dtype=torch.uint8)), str(tmp_path))
    assert caught.value.filename == str(tmp_path) and list(tmp_path.iterdir()) == []
