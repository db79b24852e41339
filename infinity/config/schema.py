"""Every setting of the engine, one model per owner. After this page nobody checks a value again."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from infinity.config.section import AutoBytes, Bytes, Directory, Number, Section, Whole
from infinity.kinds import Tier
from infinity.sizes import SECTOR_BYTES, GiB, MiB

CHUNK_GRANULE_BYTES = 2048 * 4
"""A chunk is a multiple of 2048 elements, and its states are fp32."""


class Budgets(Section):
    """Bytes one process may hold in a tier: state at rest, staging, pinned buffers, live units and gradients."""

    hbm: AutoBytes = "auto"
    """GPU memory, activations included, in bytes. "auto": all that is free. 0: nothing rests there, and training takes what it needs.
    Without a GPU it is 0."""

    activations: AutoBytes = "auto"
    """Of `hbm`, what states leave to activations, in bytes. "auto": a quarter of hbm, half where hbm is "auto". Too little ends in
    torch.OutOfMemoryError, too much in more bytes moved per step."""

    cpu: AutoBytes = "auto"
    """CPU memory in bytes. "auto": four fifths of what is available. Less means more bytes from and to NVMe in each step;
    a number below the minimum is refused with the minimum."""


Place = Literal["auto", "hbm", "cpu", "nvme"]


class Placement(Section):
    """Which tier states live on: "auto" fills HBM, then CPU memory, then NVMe; a tier's name pins them there."""

    param: Place = "auto"
    """Parameters, read twice in each forward and backward. On NVMe: 2 reads and 1 write of their bytes per step."""

    grad: Place = "auto"
    """Gradients between backward and the update. On NVMe: 1 write and 1 read of their bytes per micro-step."""

    optimizer: Place = "auto"
    """Masters and Adam states, 12 bytes per element, read and written once in each step: 24 bytes per element and step on NVMe."""


class NvmePath(Section):
    """One directory on one drive."""

    path: Directory
    """A directory that exists and is writable; files go to PATH/infinity/RUN. Give each drive its own."""

    weight: Annotated[Number, Field(gt=0)] | None = None
    """Share of the bytes this path takes, relative to the others. Unset: its measured bandwidth decides."""

    max_bytes: Bytes | None = None
    """The most bytes to keep there. Unset: what is free."""

    ranks: Annotated[tuple[Annotated[Whole, Field(ge=0)], ...], Field(min_length=1)] | None = None
    """Over several processes, which of a machine (0, 1, ... on each) use this path: those whose GPU is near the drive, for instance. Unset: all."""

    read_rate: Annotated[Number, Field(gt=0)] | None = None
    """Bytes per second that the plan counts on, as `infinity tune` writes them. Unset: measured when a run starts, and kept beside it."""

    write_rate: Annotated[Number, Field(gt=0)] | None = None
    """The same for writing; both or neither."""

    @model_validator(mode="after")
    def _both_rates(self) -> Self:
        if (self.read_rate is None) != (self.write_rate is None):
            raise ValueError(f"{self.path} has one of read_rate and write_rate: set both, or neither so that they are measured")
        return self


def _as_path(value: object) -> object:
    return value if isinstance(value, dict | NvmePath) else {"path": value}


class Nvme(Section):
    """Where state files live, and how they are read and written."""

    paths: tuple[Annotated[NvmePath, BeforeValidator(_as_path)], ...] = ()
    """Directories, one per drive: strings, or tables of path, weight and max_bytes. Relative ones start at this file's folder. None: no NVMe tier."""

    block_size: Bytes = MiB
    """Largest single request handed to the kernel: a multiple of 4096, 4KiB to 1GiB. Smaller costs system calls, larger adds latency."""

    queue_depth: Whole = Field(32, ge=1, le=1024)
    """Requests in flight per worker, 1 to 1024. Past the drive's own depth more only adds latency."""

    readers: Whole = Field(1, ge=1, le=16)
    """Threads that read, per path, 1 to 16. One saturates most drives."""

    writers: Whole = Field(1, ge=1, le=16)
    """Threads that write, per path, 1 to 16."""

    deadline_s: Number = Field(120.0, gt=0, le=86400)
    """Seconds after which a request that does not finish is an error rather than a hang, up to a day."""

    @field_validator("block_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        if value < SECTOR_BYTES or value % SECTOR_BYTES:
            nearest = max(SECTOR_BYTES, value // SECTOR_BYTES * SECTOR_BYTES)
            raise ValueError(f"{value} is not a multiple of {SECTOR_BYTES}, which direct I/O needs. Try {nearest}.")
        if value > GiB:
            raise ValueError(f"{value} is more than the kernel takes at once: at most {GiB}, 1GiB. Try 1MiB.")
        return value

    @field_validator("paths")
    @classmethod
    def _weighted_alike(cls, value: tuple[NvmePath, ...]) -> tuple[NvmePath, ...]:
        bare = [entry.path for entry in value if entry.weight is None]
        if bare and len(bare) < len(value):
            raise ValueError(f"{', '.join(bare)} has no weight but others do: give every path a weight, or none so that their rates are measured")
        return value

    @field_validator("paths")
    @classmethod
    def _distinct(cls, value: tuple[NvmePath, ...]) -> tuple[NvmePath, ...]:
        seen: set[str] = set()
        for entry in value:
            if entry.path in seen:
                raise ValueError(f"{entry.path} is named twice: give each path once; a weight raises its share")
            seen.add(entry.path)
        return value


class Store(Section):
    """The run that the files on NVMe belong to."""

    run: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run, also the name of its directory under each path: letters, digits, dot, dash and underscore."""

    resume: Literal["auto", "never", "must"] = "auto"
    """What to do with an earlier state of this run. "auto": go on with it if there is one; "never": start anew; "must": fail if there is none."""


class Precision(Section):
    """Number formats. Masters and Adam states are always fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What parameters and gradients are cast to. "bf16" and "fp16" halve the bytes of both and want a processor with that
    arithmetic; "fp16" needs engine.scale(loss)."""

    keep_fp32: tuple[str, ...] = ()
    """Parameters that stay fp32: names or shell patterns such as "*.norm.weight"."""

    init_scale: Number = Field(65536.0, gt=0)
    """fp16 only: the first factor on the loss."""

    growth_factor: Number = Field(2.0, gt=1)
    """fp16 only: what the factor is multiplied by after growth_interval steps in a row without overflow."""

    backoff_factor: Number = Field(0.5, gt=0, lt=1)
    """fp16 only: what the factor is multiplied by after a step that overflowed, which is skipped."""

    growth_interval: Whole = Field(2000, ge=1)
    """fp16 only: steps in a row without overflow before the factor grows."""


def _off(value: object) -> object:
    return None if value == "off" else value


Beta = Annotated[Number, Field(ge=0, lt=1)]


class Optimizer(Section):
    """AdamW, with the names and defaults of torch.optim.AdamW. Parameter groups given in code override lr, betas, eps and weight_decay."""

    lr: Number = Field(1e-3, ge=0)
    """Learning rate before any schedule."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square, each from 0 to below 1."""

    eps: Number = Field(1e-8, ge=0)
    """Added to the root of the second moment."""

    weight_decay: Number = Field(1e-2, ge=0)
    """Decoupled weight decay: each step multiplies weights by 1 - lr * weight_decay."""

    max_grad_norm: Annotated[Annotated[Number, Field(gt=0)] | None, BeforeValidator(_off)] = None
    """Global gradient norm to clip at; "off" does not clip."""

    threads: Annotated[Whole, Field(ge=1, le=4096)] | Literal["auto"] = "auto"
    """Threads that update states and add up gradients on the CPU, 1 to 4096. "auto": all cores, less two where there are more than
    four. Where the drives set the pace, fewer make the step no longer and leave cores to data loading and I/O."""

    chunk_size: Bytes = 16 * MiB
    """Bytes of one fp32 state that are read, updated and written in one go: a multiple of 8KiB. The step holds three chunks of three
    states each in CPU memory, with several paths two more for each. Halved where budgets.cpu is small; where all states rest in one
    memory tier a chunk is a whole flat buffer."""

    @field_validator("chunk_size")
    @classmethod
    def _whole_granules(cls, value: int) -> int:
        if value < CHUNK_GRANULE_BYTES or value % CHUNK_GRANULE_BYTES:
            nearest = max(CHUNK_GRANULE_BYTES, value // CHUNK_GRANULE_BYTES * CHUNK_GRANULE_BYTES)
            raise ValueError(f"{value} is not a multiple of {CHUNK_GRANULE_BYTES} (2048 elements of fp32). Try {nearest}.")
        return value


class Zero(Section):
    """Training over several processes (ranks), started by torchrun."""

    stage: Annotated[Whole, Field(ge=0, le=3)] = 3
    """What is sharded over the ranks, so that each keeps 1/N of it: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too. Each stage
    takes less memory; 3 moves half as much again between ranks as the others. Without effect in one process."""

    shard_group: Annotated[Whole, Field(ge=1)] | Literal["auto"] = "auto"
    """How many ranks split the states between them, a divisor of their number; "auto": all. Set to the ranks of one node, states are split inside
    each node and kept once per node, and between nodes only gradients travel, 1/N of them per rank. Costs memory: 1/N is of this N."""

    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that ranks wait for each other, and 120 more to join. One that has died, or stopped, for so long ends the others with an error
    that names it. Set it above the longest stretch that one rank spends alone, in a slow data loader for instance."""


class Prefetch(Section):
    """How far the mover runs ahead of compute."""

    units: Annotated[Whole, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Units fetched ahead of the one in use, 0 to 1024. Each costs one unit of memory; 0 fetches on demand, which hides nothing.
    "auto": 2, and up to 32 as long as the units that are live take an eighth of the budget of the tier that computes, or half of
    what is left of it once everything has its place."""


Spec = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Units(Section):
    """How the model is cut into units, which are fetched, used and released together."""

    classes: tuple[str, ...] = ()
    """Class names of the modules that become units, such as "Block". None: elements of repeated module lists are found automatically."""

    threshold: Whole = Field(1 << 20, ge=1)
    """Elements of its own above which any other module, such as an embedding, becomes a unit; the rest stays together in the root unit."""

    function: Spec | None = None
    """What decides alone, as module:function, in place of classes and threshold. The function takes (name, module) and says whether
    the module is a unit."""

    @model_validator(mode="after")
    def _one_rule(self) -> Units:
        if self.classes and self.function:
            raise ValueError("classes and function both say what is a unit: set one of them")
        return self


class Train(Section):
    """The run of `infinity train`. A loop of your own heeds only accumulation."""

    model: Spec | None = None
    """What builds the model, as module:function. The function takes nothing and gives an nn.Module
    whose forward(**batch) gives a loss or an object with .loss."""

    data: Spec | None = None
    """Where batches come from, as module:function. The function takes (config, rank, world_size) and gives an iterable of dicts of tensors.
    Over several processes that is a rank's own share: each goes through its own again when it ends."""

    steps: Whole = Field(1000, ge=1)
    """Optimizer steps of the whole run."""

    batch_size: Whole = Field(8, ge=1)
    """Sequences in one micro-step of one rank; for the data function. Activations in memory grow with it."""

    sequence_length: Whole = Field(1024, ge=1)
    """Tokens per sequence; for the data function. Activations in memory grow with it."""

    accumulation: Whole = Field(1, ge=1)
    """Micro-steps per optimizer step, on each rank; `infinity train` divides the loss of each by this number.
    Above 1, gradients rest in fp32, 4 bytes per element."""

    warmup_steps: Whole = Field(0, ge=0)
    """Steps over which the learning rate rises linearly to optimizer.lr: a step's share of them is its share of the rate."""

    schedule: Literal["cosine", "constant"] = "constant"
    """The learning rate after the warm-up: "cosine" falls to 0 at the last step."""

    seed: Whole = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, of dropout and of the order of the data."""

    log_every: Whole = Field(10, ge=1)
    """Steps between two printed lines; metrics.jsonl has every step."""

    save_every: Whole = Field(0, ge=0)
    """Steps between two checkpoints in output/step-N; 0 saves only at the end. Each holds all weights
    and Adam states: 12 bytes per element and more."""

    output: Directory = "runs"
    """Directory for checkpoints, metrics.jsonl and trace.json; made if missing."""


class Config(Section):
    """The whole configuration."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Where the model computes: "auto" (cuda where there is one), "cpu", "cuda" or "cuda:N". Tensors in the model's arguments are moved there."""

    budgets: Budgets = Budgets()
    placement: Placement = Placement()
    nvme: Nvme = Nvme()
    store: Store = Store()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    zero: Zero = Zero()
    prefetch: Prefetch = Prefetch()
    units: Units = Units()
    train: Train = Train()

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, data: Any) -> Any:
        """Absent sections are built from their fields, so that default paths see the configuration file's folder too."""
        if not isinstance(data, dict):
            return data
        absent = {name for name, field in cls.model_fields.items() if isinstance(field.default, Section) and name not in data}
        return data | {name: {} for name in absent}

    @model_validator(mode="after")
    def _nvme_has_paths(self) -> Config:
        pinned = [name for name, place in self.placement if place == Tier.NVME]
        if pinned and not self.nvme.paths:
            raise ValueError(f'placement.{pinned[0]} = "nvme" needs a directory: set nvme.paths')
        return self
