"""Bytes as numbers and as text. Text appears only in configuration and on the screen."""

from __future__ import annotations

import re

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

SECTOR_BYTES = 4096
"""Offsets, lengths and addresses of direct I/O are multiples of this (open(2), O_DIRECT; probed with statx DIOALIGN)."""

MIN_FILE_BYTES = 512 * KiB
"""A shard file is never smaller than this."""

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power


def parse_bytes(text: str | int) -> int:
    """`"1MiB"` -> 1048576, `"1.5 GB"` -> 1500000000, a bare number is bytes. Raises ValueError with the accepted forms."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f'{text!r} is not a size: write bytes as a number, or "512KiB", "1.5GiB" (binary), "2GB" (decimal)')
    return round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_bytes(nbytes: float) -> str:
    """1048576 -> `"1.00 MiB"`."""
    for factor, unit in ((GiB * 1024, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """2.5e9 -> `"2.50 GB/s"`; rates are decimal, as drives are sold."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2f} MB/s"


def align_up(value: int, granule: int) -> int:
    """The smallest multiple of `granule` that is not below `value`."""
    return -(-value // granule) * granule
