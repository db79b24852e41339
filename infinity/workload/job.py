"""One fio job as a checked value. Names, meanings and defaults are fio's, except direct=1 and iomem=mmaphuge."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from infinity.config.section import Section
from infinity.native import READ, WRITE
from infinity.workload.notation import parse_bool, parse_count, parse_range, parse_seconds, parse_size, split_names

ALIASES = {"readwrite": "rw", "blocksize": "bs", "blocksize_range": "bsrange", "mem": "iomem"}
"""fio's second names for a key."""

BLOCK_KEYS = frozenset({"bs", "bsrange", "bssplit"})
"""Three ways to say one thing: the one that is given last holds."""

FLAGS = frozenset({"time_based"})
"""Keys that may stand without a value, as in fio."""

FULL_PERCENT = 100

MAX_BLOCK_BYTES = 1 << 30
"""The engine's largest transfer."""


class Blocks(NamedTuple):
    """The block sizes of one direction and how often each is drawn."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def smallest(self) -> int:
        return min(self.sizes)


def _kb_base(info: ValidationInfo) -> int:
    return int((info.context or {}).get("kb_base", 1024))


def _size(value: Any, info: ValidationInfo) -> Any:
    return parse_size(value, _kb_base(info)) if isinstance(value, str) else value


def _blocks(value: Any, info: ValidationInfo) -> Any:
    """bs: one size, or sizes for reads, writes (and trims), separated by commas; a range is taken as bsrange is."""
    if not isinstance(value, str):
        return value
    return _per_direction(value, 1, lambda word: _range(word, info) if "-" in word else Blocks((parse_size(word, _kb_base(info)),), (1.0,)))


def _block_ranges(value: Any, info: ValidationInfo) -> Any:
    return _per_direction(value, 0, lambda word: _range(word, info)) if isinstance(value, str) else value


def _block_splits(value: Any, info: ValidationInfo) -> Any:
    return _per_direction(value, 0, lambda word: _split(word, info)) if isinstance(value, str) else value


def _per_direction(text: str, allows_empty: int, parse: Any) -> tuple[Blocks, Blocks]:
    """`a` for both, `a,b` for reads and writes, `,b` leaves reads at the default."""
    words = text.split(",")
    if len(words) > 2:
        raise ValueError(f"{text!r} has a part for trims: only reads and writes are there")
    default = Blocks((4096,), (1.0,))
    if len(words) == 1:
        words *= 2
    return tuple(parse(word) if word or not allows_empty else default for word in words)  # type: ignore[return-value]


def _range(word: str, info: ValidationInfo) -> Blocks:
    low, high = parse_range(word, _kb_base(info))
    if not low:
        raise ValueError(f"{word!r} begins at 0: a block has at least one byte")
    sizes = tuple(range(low, high + 1, low))  # fio: a multiple of the smallest
    return Blocks(sizes, (1 / len(sizes),) * len(sizes))


def _split(word: str, info: ValidationInfo) -> Blocks:
    """`4k/10:64k/50:32k/40`; what has no percentage shares the rest."""
    sizes, given = [], []
    for part in word.split(":"):
        size, _, percent = part.partition("/")
        sizes.append(parse_size(size, _kb_base(info)))
        given.append(parse_count(percent) if percent else None)
    rest, blanks = FULL_PERCENT - sum(percent or 0 for percent in given), given.count(None)
    if rest < 0 or (rest > 0 and not blanks):
        raise ValueError(f"{word!r}: the percentages add up to {FULL_PERCENT - rest}, not to 100")
    weights = tuple((rest / blanks if percent is None else percent) / FULL_PERCENT for percent in given)
    return Blocks(tuple(sizes), weights)


def _seconds(value: Any) -> Any:
    return parse_seconds(value) if isinstance(value, str) else value


def _count(value: Any) -> Any:
    return parse_count(value) if isinstance(value, str) else value


def _flag(value: Any) -> Any:
    return parse_bool(value or "1") if isinstance(value, str) else value


def _bool(value: Any) -> Any:
    return parse_bool(value) if isinstance(value, str) else value


def _names(value: Any) -> Any:
    return split_names(value) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_count)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Bool = Annotated[bool, BeforeValidator(_bool)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class Job(Section):
    """What one section of a job file asks for. The text under a key is its `--help`."""

    name: str = Field(min_length=1)
    """Name of the job; on the command line it also begins the next job. Keys before the first --name hold for all."""

    rw: Literal["read", "write", "randread", "randwrite", "rw", "randrw"] = "read"
    """read, write, randread, randwrite, rw (or readwrite), randrw."""

    rwmixread: Annotated[Count, Field(ge=0, le=FULL_PERCENT)] = 50
    """Percentage of the blocks of rw and randrw that are reads."""

    bs: Annotated[tuple[Blocks, Blocks], BeforeValidator(_blocks)] = (Blocks((4096,), (1.0,)),) * 2
    """Block size; "8k,32k" is for reads and for writes, "4k-64k" is a range."""

    bsrange: Annotated[tuple[Blocks, Blocks] | None, BeforeValidator(_block_ranges)] = None
    """Block sizes drawn from a range, multiples of its smaller end: 4k-64k."""

    bssplit: Annotated[tuple[Blocks, Blocks] | None, BeforeValidator(_block_splits)] = None
    """Block sizes with their percentages: 4k/10:64k/50:32k/40."""

    iodepth: Annotated[Count, Field(ge=1, le=65536)] = 1
    """Blocks in flight, reads and writes together. Beyond 1 it needs ioengine=libaio."""

    numjobs: Annotated[Count, Field(ge=1, le=1024)] = 1
    """Clones of the job, each a thread with an engine of its own."""

    size: Annotated[int | None, BeforeValidator(_size)] = None
    """Bytes of each clone, over all of its files; the size of the files where they exist already."""

    runtime: Annotated[Seconds, Field(ge=0)] = 0.0
    """Stop after this time even when size is not done; seconds, or 500ms, 10m, 2h."""

    time_based: Annotated[bool, BeforeValidator(_flag)] = False
    """Go on until runtime is over, from the start again when size is done."""

    ramp_time: Annotated[Seconds, Field(ge=0)] = 0.0
    """Run this long before anything is counted; comes on top of runtime."""

    direct: Bool = True
    """O_DIRECT, past the page cache. fio's default is 0."""

    ioengine: Literal["psync", "libaio"] = "psync"
    """psync: pread and pwrite, one at a time. libaio: kernel AIO, what training uses."""

    filename: Names = ()
    """Files or block devices shared by all clones, several separated by ":", used in turn. Without it each clone has NAME.CLONE.0."""

    directory: Names = ()
    """Where the files are; several separated by ":" are dealt out to the clones. The working directory without it."""

    fsync: Annotated[Count, Field(ge=0)] = 0
    """fsync(2) after this many writes; 0 is never."""

    verify: Literal["", "crc32c"] = ""
    """crc32c: blocks carry a checksum; what a job writes it reads back and checks, a job that only reads checks what is there."""

    unlink: Bool = False
    """Remove the files when done; without it they stay for the next run."""

    iomem: Literal["malloc", "mmap", "mmaphuge"] = "mmaphuge"
    """Memory of the blocks. mmaphuge is 2 MiB pages as training uses them, transparent ones: none need be reserved. fio's default is malloc."""

    target: str = "cpu"
    """Where blocks end, or come from: cpu is CPU memory; cuda, or cuda:1, is HBM through pinned memory, both stages at once. Not fio's."""

    kb_base: Literal[1000, 1024] = 1024
    """1024: k is 1024 and ki is 1000, as fio has always had it. 1000: k is 1000 and ki is 1024."""

    @field_validator("rw", mode="before")
    @classmethod
    def _no_modifier(cls, value: Any) -> Any:
        if isinstance(value, str) and ":" in value:
            raise ValueError(f"{value!r}: offset modifiers (:<nr>) are not supported")
        return "rw" if value == "readwrite" else value

    @field_validator("verify", mode="before")
    @classmethod
    def _synonym(cls, value: Any) -> Any:
        return "crc32c" if value == "crc32c-intel" else value

    @field_validator("target")
    @classmethod
    def _device(cls, value: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", value):
            raise ValueError(f"{value!r}: choose cpu, cuda, or cuda:N")
        return value

    @field_validator("kb_base", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return _count(value)

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str) -> str:
        if "/" in value:
            raise ValueError(f"{value!r} has a slash in it: say where the files are with directory")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Job:
        if self.time_based and not self.runtime:
            raise ValueError("time_based needs a runtime")
        largest = max(blocks.largest for blocks in self.blocks)
        smallest = min(blocks.smallest for blocks in self.blocks)
        if not smallest or largest > MAX_BLOCK_BYTES:
            raise ValueError(f"a block of {smallest if not smallest else largest} bytes: the engine takes 1 byte to 1 GiB")
        if self.size is not None and self.size // max(len(self.filename), 1) < largest:
            raise ValueError(f"size={self.size} is too small for a block of {largest} bytes in each of {max(len(self.filename), 1)} files")
        if self.verify and self.writes and self.filename and self.numjobs > 1:
            raise ValueError("verify needs a file for each clone, or one would check what another is writing: leave filename out, or numjobs at 1")
        if self.verify and smallest < MIN_VERIFY_BYTES:
            raise ValueError(f"verify needs blocks of {MIN_VERIFY_BYTES} bytes and more: this job has {smallest}")
        if self.verify and self.target != "cpu":
            raise ValueError("verify looks at blocks in CPU memory: leave target at cpu")
        return self

    @property
    def blocks(self) -> tuple[Blocks, Blocks]:
        """Of reads and of writes, as far as the job has them."""
        pair = self.bsrange or self.bssplit or self.bs
        return (pair[READ] if self.reads else pair[WRITE], pair[WRITE] if self.writes else pair[READ])

    @property
    def reads(self) -> bool:
        return self.rw in ("read", "randread", "rw", "randrw")

    @property
    def writes(self) -> bool:
        return self.rw in ("write", "randwrite", "rw", "randrw")

    @property
    def is_random(self) -> bool:
        return self.rw.startswith("rand")

    @property
    def depth(self) -> int:
        """What the engine keeps in flight: plain calls are one at a time."""
        return self.iodepth if self.ioengine == "libaio" else 1


MIN_VERIFY_BYTES = 512
"""A verified block begins with its header: see verify.py."""
