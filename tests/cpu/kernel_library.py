"""Builds the kernels into small test-only libraries and calls them through ctypes.

The installed module can only run what this CPU has. Here the same sources are built once more, and the AVX-512 ones a
second time against SIMDe (tests/cpu/simde), which computes every vector instruction in portable code.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_CPU = _ROOT / "csrc" / "cpu"
_BUILD = _ROOT / "build" / "tests-cpu"
_CXX = os.environ.get("CXX", "c++")
# Assertions of a test must not depend on contraction or on the optimiser's taste: the flags of CMakeLists.txt.
_FLAGS = ["-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", f"-I{_CPU}"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# SIMDe without any native vector set: gcc's own headers would define the 512-bit types as well.
_SIMDE = ["-O1", f"-I{_HERE / 'simde'}"]


class WeightView(ctypes.Structure):
    """csrc/cpu/gemm.hpp"""

    _fields_ = (
        ("format", ctypes.c_int),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("row_scale_stride", ctypes.c_int64),
        ("row_exponent", ctypes.c_void_p),
        ("exact", ctypes.c_bool),
    )


class GemmProblem(ctypes.Structure):
    """csrc/cpu/gemm.hpp"""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("x_rows", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("w", WeightView),
        ("bias", ctypes.c_void_p),
        ("bias_dtype", ctypes.c_int),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
    )


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What /proc/cpuinfo says this CPU has."""
    with open("/proc/cpuinfo") as lines:
        return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())


def native(isa: str) -> bool:
    """Whether this CPU can run `isa` itself."""
    needs: dict[str, set[str]] = {"portable": set(), "avx2": {"avx2", "fma", "f16c"}}
    needs["avx512"] = needs["avx2"] | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    needs["avx512_bf16"] = needs["avx512"] | {"avx512_bf16"}
    return needs[isa] <= cpu_flags()


def _run(command: Sequence[str], source: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


@functools.cache
def simde_missing() -> bool:
    return _run([_CXX, "-x", "c++", "-E", "-"], "#include <simde/x86/avx512.h>\n").returncode != 0


def _units(kind: str) -> list[tuple[Path, list[str]]]:
    shared = [(_CPU / "parallel.cpp", ["-O2"]), (_CPU / "gemm_portable.cpp", ["-O3"])]
    if kind == "simde":
        kernels = [(_CPU / f"gemm_{isa}.cpp", _SIMDE) for isa in ("avx512", "avx512_bf16")]
        return [*kernels, *shared, (_HERE / "entry.cpp", ["-DPETIT_TEST_AVX512"])]
    units = [(_CPU / "gemm_avx2.cpp", ["-O3", *_AVX2]), *shared]
    defines = ["-DPETIT_TEST_BASE"]
    if native("avx512_bf16"):
        units += [
            (_CPU / "gemm_avx512.cpp", ["-O3", *_AVX512]),
            (_CPU / "gemm_avx512_bf16.cpp", ["-O3", *_AVX512, "-mavx512bf16"]),
        ]
        defines.append("-DPETIT_TEST_AVX512")
    return [*units, (_HERE / "entry.cpp", defines)]


def _fingerprint(units: list[tuple[Path, list[str]]]) -> str:
    digest = hashlib.sha256(_run([_CXX, "--version"]).stdout.encode())
    headers = sorted([*_CPU.glob("*.hpp"), *_HERE.glob("simde/*.h")])
    for path, flags in [*units, *((header, []) for header in headers)]:
        digest.update(f"{path.name} {flags} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _library(kind: str) -> ctypes.CDLL:
    units = _units(kind)
    target = _BUILD / f"{kind}-{_fingerprint(units)}.so"
    if not target.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILD) as directory:
            objects = [f"{directory}/{number}.o" for number in range(len(units))]
            commands = [
                [_CXX, *_FLAGS, *flags, "-c", str(path), "-o", out]
                for (path, flags), out in zip(units, objects, strict=True)
            ]
            with ThreadPoolExecutor(max_workers=2) as pool:
                results = list(pool.map(_run, commands))
            results.append(_run([_CXX, "-shared", *objects, "-ldl", "-lpthread", "-o", f"{directory}/out.so"]))
            for result in results:
                assert result.returncode == 0, f"{' '.join(result.args)}\n{result.stderr[-4000:]}"
            os.replace(f"{directory}/out.so", target)
    return ctypes.CDLL(str(target))


# What the tests run over: what this CPU can run itself, and the AVX-512 kernels under SIMDe wherever they are.
KERNELS = ["portable", "avx2"]
if native("avx512_bf16"):
    KERNELS += ["avx512", "avx512_bf16"]
KERNELS += ["avx512-simde", "avx512_bf16-simde"]


def require(kernel: str) -> None:
    """Skips (or, in CI, fails) if the kernel cannot run on this machine."""
    isa, _, simulated = kernel.partition("-")
    if simulated and simde_missing():
        reason = "libsimde-dev is not installed: the AVX-512 kernels cannot be tested on every CPU"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    if not simulated and not native(isa):
        pytest.skip(f"this CPU has no {isa}")


def grouped_gemm(kernel: str, problems: Sequence[GemmProblem], x_dtype: int, y_dtype: int, threads: int) -> None:
    isa, _, simulated = kernel.partition("-")
    library = _library("simde" if simulated else "native")
    array = (GemmProblem * len(problems))(*problems)
    status = library.petit_test_grouped_gemm(
        isa.encode(), array, ctypes.c_int64(len(problems)), x_dtype, y_dtype, threads
    )
    assert status == 0, f"{isa} is not in the test library"
