"""The kernel's files: where they are, and their text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Where the kernel tells about itself: proc(5) and sysfs(5)."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


def read_text(file: Path) -> str:
    """What a file says, "" where there is none or it may not be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_number(file: Path) -> int | None:
    """The one number that a file holds; None where it holds anything else."""
    text = read_text(file)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def read_field(file: Path, key: str) -> str:
    """The value of a line `key: value`, "" without one."""
    found = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", read_text(file), flags=re.MULTILINE)
    return found[1].strip() if found else ""


def parse_cpus(text: str) -> set[int]:
    """`0-2,5` -> {0, 1, 2, 5}: cpuset(7), list format."""
    cpus: set[int] = set()
    for word in filter(None, text.split(",")):
        first, _, last = word.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
