"""Builds the C extension. Everything else about the distribution stands in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup


def compiler_command() -> str:
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]


def check_toolchain() -> None:
    """A missing compiler should say what to install, not end in a page of build output."""
    if sys.platform != "linux":
        sys.exit("infinity runs on Linux only: it needs direct I/O and kernel AIO.")
    if shutil.which(compiler_command()) is None:
        sys.exit(f"No C compiler: {compiler_command()!r} is not on PATH. Install one (Debian, Ubuntu: apt install gcc) or set CC.")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        sys.exit(f"No Python headers: {header} does not exist. Install them (Debian, Ubuntu: apt install python3-dev).")


if set(sys.argv) & {"build", "build_ext", "bdist_wheel", "install", "develop", "editable_wheel"}:
    check_toolchain()

setup(
    cffi_modules=["native/build.py:FFI"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
