"""Run a command in a fresh memory cgroup, and say how much it took: proof that a run stays inside a limit.

    python tools/cgroup.py --limit 1GiB -- infinity train examples/tiny.toml

Where no cgroup can be made (no rights, a read-only /sys) the command runs all the same, without the limit, after a line
that says why. The exit code is the command's; a process that the kernel killed for memory gives 137. Both versions of
cgroups work: v1's memory controller, and v2 where a parent hands the memory controller down.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class NotPermittedError(Exception):
    """No cgroup can be made here; the text says why."""


@dataclass(frozen=True)
class Names:
    """How a version of cgroups calls its files."""

    limit: str
    swap_limit: str
    swap_is_extra: bool  # v2 limits swap alone, v1 memory and swap together
    peak: str
    kills: str


V1 = Names("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", False, "memory.max_usage_in_bytes", "memory.oom_control")
V2 = Names("memory.max", "memory.swap.max", True, "memory.peak", "memory.events")


class MemoryCgroup:
    """A cgroup of our own with a limit in bytes; `close()` removes it."""

    def __init__(self, limit_bytes: int) -> None:
        reasons = []
        for parent, names in _candidates():
            self.folder, self.names = parent / f"infinity-{os.getpid()}", names
            try:
                self._make(limit_bytes)
                return
            except OSError as error:
                reasons.append(f"{error.filename or self.folder}: {error.strerror}")
        raise NotPermittedError("; ".join(reasons) or "no memory controller under /sys/fs/cgroup")

    def _make(self, limit_bytes: int) -> None:
        self.folder.mkdir()
        try:
            (self.folder / self.names.limit).write_text(str(limit_bytes))
            swap = self.folder / self.names.swap_limit
            if swap.exists():  # without swap accounting, swapped pages are not counted
                swap.write_text("0" if self.names.swap_is_extra else str(limit_bytes))
            self._probe()
        except OSError:
            self.close()
            raise

    def _probe(self) -> None:
        """A process that may enter: rights to the folder do not always mean rights to move."""
        probe = subprocess.Popen(["sleep", "5"])
        try:
            (self.folder / "cgroup.procs").write_text(str(probe.pid))
        finally:
            probe.kill()
            probe.wait()

    def enter(self) -> None:
        """Move the calling process inside."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """The most that was charged at any time, page cache included; None before Linux 5.19 on v2."""
        try:
            return int((self.folder / self.names.peak).read_text())
        except OSError:
            return None

    def kills(self) -> int:
        """Processes that the kernel killed because the limit was reached."""
        lines = (self.folder / self.names.kills).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        """Remove the folder; one that still has processes in it stays, which the kernel insists on."""
        try:
            self.folder.rmdir()
        except OSError as error:
            print(f"cgroup: {self.folder} stays: {error.strerror}", file=sys.stderr)


def _candidates() -> Iterator[tuple[Path, Names]]:
    """Folders in which a memory cgroup might be made: beside or below our own, nearest first."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from ((folder, V1) for folder in _upwards(ROOT / "memory", path))
        elif not controllers and (ROOT / "cgroup.controllers").exists():
            for folder in _upwards(ROOT, path):
                if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                    yield folder, V2


def _upwards(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.lstrip("/")
    while True:
        if folder.is_dir():
            yield folder
        if folder == root:
            return
        folder = folder.parent


def run(limit_bytes: int, command: list[str]) -> int:
    try:
        cgroup = MemoryCgroup(limit_bytes)
    except NotPermittedError as reason:
        print(f"cgroup: running without the limit of {_mib(limit_bytes)}, since no memory cgroup can be made here: {reason}", file=sys.stderr)
        return _wait(subprocess.Popen(command))
    try:
        code = _wait(subprocess.Popen(command, preexec_fn=cgroup.enter))
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        peak = cgroup.peak_bytes()
        charged = "" if peak is None else f"peak {_mib(peak)} charged, page cache included; "
        print(f"cgroup: limit {_mib(limit_bytes)}; {charged}largest process {_mib(largest)} resident, shared libraries included", file=sys.stderr)
        if kills := cgroup.kills():
            print(f"cgroup: the kernel killed {kills} process{'es' if kills > 1 else ''} that went over the limit", file=sys.stderr)
    finally:
        cgroup.close()
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches the command too, which decides; we only wait for it."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # not SIG_IGN, which a child would inherit
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"


def _parse_limit(text: str) -> int:
    number, unit = text[:-3], text[-3:].upper()
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit: write it as 512MiB or 1.5GiB")
    return int(float(number) * UNITS[unit])


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command in a fresh memory cgroup.")
    parser.add_argument("--limit", type=_parse_limit, required=True, help="such as 512MiB or 1.5GiB")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("name a command after --")
    return run(arguments.limit, command)


if __name__ == "__main__":
    sys.exit(main())
