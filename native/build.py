"""What cffi builds: `infinity._native`, one stable-ABI extension. `setup.py` names `FFI`."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI as _FFI

_HERE = Path(__file__).resolve().parent
_SOURCES = ("cpu", "pool", "memory", "plain", "avx2", "avx512", "adam", "convert", "crc32c", "aio", "aio_worker", "aio_backend")

FFI = _FFI()
FFI.cdef((_HERE / "infinity.h").read_text())
FFI.set_source(
    "infinity._native",
    "#include <stddef.h>\n#include <stdint.h>\n#include <infinity.h>\n",
    sources=[f"native/{name}.c" for name in _SOURCES],
    depends=[f"native/{path.name}" for path in sorted(_HERE.glob("*.h"))],
    include_dirs=["native"],
    libraries=["m", "dl", "pthread"],
    # No contraction: a fused multiply-add stands only where the source says so, hence every instruction set rounds alike.
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra"],
    py_limited_api=True,
)

if __name__ == "__main__":
    FFI.compile(verbose=True)
