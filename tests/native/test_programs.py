"""The C sources under test programs in C: with faults that Python cannot inject, and under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {  # of each program
    "aio_faults_program": ("aio", "aio_worker", "aio_backend"),
    "aio_life_program": ("aio", "aio_worker", "aio_backend"),
    "aio_scatter_program": ("aio", "aio_worker", "aio_backend"),
    "kernels_program": ("cpu", "pool", "memory", "plain", "avx2", "avx512", "adam", "convert", "crc32c"),
}
FLAGS = ["-std=gnu11", "-g", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]
LIBRARIES = ["-lm", "-ldl", "-lpthread"]
BUILDS = {
    "plain": ["-O1"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}


def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler")
    return found


def build(program: str, flags: list[str], target: Path) -> None:
    sources = [f"tests/native/{program}.c", *(f"native/{name}.c" for name in SOURCES[program])]
    command = [compiler(), *FLAGS, *flags, *sources, "-o", str(target), *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode and "sanitize" in " ".join(flags) and ("cannot find" in done.stderr or "unsupported" in done.stderr):
        pytest.skip("this compiler has no such sanitizer")
    assert done.returncode == 0, done.stderr


def fixed_addresses() -> list[str]:
    """ThreadSanitizer of older compilers cannot cope with the address randomisation of newer kernels."""
    setarch = shutil.which("setarch")
    return [setarch, "-R"] if setarch and subprocess.run([setarch, "-R", "true"], capture_output=True).returncode == 0 else []


QUICK = [("aio_faults_program", "plain"), ("aio_scatter_program", "plain")]
SLOW = [pytest.param(program, kind, marks=pytest.mark.slow) for program in SOURCES for kind in BUILDS if (program, kind) not in QUICK]


@pytest.mark.parametrize(("program", "kind"), [*QUICK, *SLOW])
def test_program_passes(program: str, kind: str, tmp_path: Path) -> None:
    build(program, BUILDS[kind], tmp_path / program)
    prefix = fixed_addresses() if kind == "thread" else []
    done = subprocess.run([*prefix, str(tmp_path / program), str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
