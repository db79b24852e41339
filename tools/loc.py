"""Lines per file, and what a change adds and removes. No cap, only daylight.

    python tools/loc.py             lines of every source file, largest last in each folder
    python tools/loc.py REVISION    added and removed lines per file since REVISION
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SUFFIXES = {".py", ".c", ".h"}


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    return [path for path in map(Path, listing.splitlines()) if path.suffix in SUFFIXES and path.is_file()]


def print_sizes() -> None:
    folders: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for path in tracked():
        folders[str(path.parent)].append((len(path.read_text(encoding="utf-8").splitlines()), path))
    for folder, files in sorted(folders.items()):
        print(f"{sum(lines for lines, _ in files):7,}  {folder}/")
        for lines, path in sorted(files):
            print(f"{lines:7,}      {path.name}")
    print(f"{sum(lines for files in folders.values() for lines, _ in files):7,}  total")


def print_change(revision: str) -> None:
    subprocess.run(["git", "--no-pager", "diff", "--stat=120", revision], check=True)


if __name__ == "__main__":
    print_change(sys.argv[1]) if len(sys.argv) > 1 else print_sizes()
