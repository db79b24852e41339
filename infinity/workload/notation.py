"""Sizes, times and lists as fio writes them: `fio(1)`, PARAMETER TYPES. Raises ValueError with the accepted forms."""

from __future__ import annotations

import re

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "": 1.0, "s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6}
_MAX_BYTES = 1 << 62


def parse_size(text: str, kb_base: int = 1024) -> int:
    """`"4k"` -> 4096, `"1mi"` -> 1000000, `"0x1000"` -> 4096. With `kb_base` 1000, k means 1000 and ki 1024."""
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)([kmgtp]?)(i?)b?", text.strip(), flags=re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size: write a whole number of bytes with k, m, g, t or p, such as 4k or 16g")
    is_binary = (kb_base == 1024) != bool(match[3])  # fio's compatibility mode has the prefixes the other way round
    number = int(match[1], 0) if match[1].lower().startswith("0x") else int(match[1])
    nbytes = int(number * (1024 if is_binary else 1000) ** _POWERS[match[2].lower()])
    if nbytes > _MAX_BYTES:
        raise ValueError(f"{text!r} is more than any file holds")
    return nbytes


def parse_range(text: str, kb_base: int = 1024) -> tuple[int, int]:
    """`"1k-4k"` or `"1k:4k"` -> (1024, 4096); in the wrong order they are swapped, as fio does."""
    low, separator, high = re.sub("[:]", "-", text.strip()).partition("-")
    if not separator:
        raise ValueError(f"{text!r} is not a range: write two sizes, such as 4k-64k")
    ends = sorted((parse_size(low, kb_base), parse_size(high, kb_base)))
    return ends[0], ends[1]


def parse_seconds(text: str) -> float:
    """`"10m"` -> 600.0, `"500ms"` -> 0.5; a bare number is seconds."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.strip(), flags=re.IGNORECASE)
    factor = _SECONDS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a time: write a whole number of seconds, or one with d, h, m, s, ms or us, such as 10m")
    return int(match[1]) * factor


def parse_count(text: str) -> int:
    """A whole number without a unit."""
    if not re.fullmatch(r"\d{1,18}", text.strip()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def parse_bool(text: str) -> bool:
    """1, 0, true or false."""
    known = {"1": True, "true": True, "0": False, "false": False}
    if text.strip().lower() not in known:
        raise ValueError(f"{text!r} is neither 1 nor 0")
    return known[text.strip().lower()]


def split_names(text: str) -> tuple[str, ...]:
    r"""`"a:b\:c"` -> ("a", "b:c"): paths are separated by colons, a colon inside one is written \:."""
    names = [name.replace("\\:", ":") for name in re.split(r"(?<!\\):", text.strip())]
    if not all(names):
        raise ValueError(f"{text!r} has an empty name in it: separate paths with one colon, and write \\: for a colon inside one")
    return tuple(names)


def format_size(nbytes: int) -> str:
    """4096 -> `"4KiB"`, 5000 -> `"5000B"`: exactly."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes >> (10 * power)}{unit}"
    return f"{nbytes}B"
