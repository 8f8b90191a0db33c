#!/usr/bin/env python3
"""Compiles csrc/device into one code object per GPU architecture. No ROCm and no GPU needed.

    python csrc/device/build.py --out DIR [--arch gfx942 ...] [--jobs N] [--cache DIR]

The compiler is the first of these that can build the target: $PETIT_CLANG, ROCm's clang, clang >= 20 on PATH, the
`ziglang` package of this Python. Results are cached by the sources, flags and compiler. Only the standard library is
used: setup.py runs this before anything is installed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ARCHS = ("gfx90a", "gfx942", "gfx950")
SOURCE = Path(__file__).resolve().parent
MINIMUM_CLANG = 20
REMEDY = "install clang >= 20, or `pip install ziglang`, or set PETIT_CLANG to a clang that knows this target"

# Code object version 5 is what ROCm 6.x loads; newer runtimes load it too.
FLAGS = (
    *("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-mcode-object-version=5"),
    *("-O3", "-std=c++20", "-Wall", "-Wextra", "-Wno-pass-failed"),
)


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str
    zig: bool = False

    def compile(self, arch: str, source: Path, out: Path) -> None:
        common = (*FLAGS, f"--offload-arch={arch}")
        if not self.zig:
            _run((*self.command, *common, "--no-gpu-bundle-output", str(source), "-o", str(out)))
            return
        # zig's driver links no device code: bitcode, object, then its lld.
        with tempfile.TemporaryDirectory() as directory:
            bitcode, obj = Path(directory) / "kernels.bc", Path(directory) / "kernels.o"
            zig = self.command[:-1]
            _run((*self.command, *common, "-c", "-emit-llvm", str(source), "-o", str(bitcode)))
            target = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-mcode-object-version=5", "-nogpulib")
            _run((*self.command, *target, "-O3", "-c", "-x", "ir", str(bitcode), "-o", str(obj)))
            _run((*zig, "ld.lld", "-shared", "--no-undefined", str(obj), "-o", str(out)))


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        raise RuntimeError(f"failed ({done.returncode}): {' '.join(command)}\n{done.stderr[-4000:]}")


def _version(command: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run((*command, "--version"), capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def candidates() -> list[tuple[tuple[str, ...], bool]]:
    """Compiler commands in order of preference, each with whether it is zig."""
    found: list[tuple[tuple[str, ...], bool]] = []
    if chosen := os.environ.get("PETIT_CLANG"):
        found.append(((chosen,), False))
    rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
    found.append(((f"{rocm}/llvm/bin/clang++",), False))
    names = ["clang", *(f"clang-{v}" for v in range(40, MINIMUM_CLANG - 1, -1))]
    found += [((path,), False) for name in names if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        found.append(((sys.executable, "-m", "ziglang", "clang"), True))
    return found


def _major(version: str) -> int:
    match = re.search(r"version (\d+)", version)
    return int(match[1]) if match else 0


def find_compiler(arch: str) -> Compiler:
    """The first compiler that builds a one-line kernel for `arch`. RuntimeError naming what was tried if none does."""
    tried = []
    for command, zig in candidates():
        version = _version(command)
        if version is None:
            if command[0] == os.environ.get("PETIT_CLANG"):
                raise RuntimeError(f"PETIT_CLANG={command[0]} does not run")
            continue
        if _major(version) < MINIMUM_CLANG and "PETIT_CLANG" not in os.environ:
            tried.append(f"{' '.join(command)} ({version}: older than {MINIMUM_CLANG})")
            continue
        compiler = Compiler(command, version, zig)
        with tempfile.TemporaryDirectory() as directory:
            probe = Path(directory) / "probe.hip"
            probe.write_text("__attribute__((global)) void probe(int* p) { *p = 1; }\n")
            try:
                compiler.compile(arch, probe, Path(directory) / "probe.co")
                return compiler
            except RuntimeError as error:
                tried.append(f"{' '.join(command)} ({str(error).splitlines()[-1][:160]})")
    listed = "; ".join(tried) or "nothing found"
    raise RuntimeError(f"no compiler for {arch}: {REMEDY}. Tried: {listed}")


def sources() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*") if p.suffix in (".hpp", ".hip", ".def"))


def _key(compiler: Compiler, arch: str) -> str:
    digest = hashlib.sha256(repr((compiler.version, compiler.zig, FLAGS, arch)).encode())
    for path in sources():
        digest.update(path.relative_to(SOURCE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def build_one(arch: str, out: Path, cache: Path) -> str:
    """Build petit_<arch>.co into `out`; returns a line saying what was done."""
    compiler = find_compiler(arch)
    cached = cache / f"petit_{arch}_{_key(compiler, arch)}.co"
    how = "cached"
    if not cached.exists():
        how = "built"
        cache.mkdir(parents=True, exist_ok=True)
        temporary = cached.with_name(f".{cached.name}.{os.getpid()}")
        compiler.compile(arch, SOURCE / "kernels.hip", temporary)
        temporary.replace(cached)
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"petit_{arch}.co"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(cached, temporary)
    temporary.replace(target)
    return f"{target.name}: {how} with {compiler.version}"


def default_cache() -> Path:
    """Shared by every checkout and build of this user: $PETIT_DEVICE_CACHE or ~/.cache/petit_plugin/device."""
    if chosen := os.environ.get("PETIT_DEVICE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "petit_plugin", "device")


def build(out: Path, archs: tuple[str, ...] = ARCHS, jobs: int | None = None, cache: Path | None = None) -> None:
    cache = cache or default_cache()
    with concurrent.futures.ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        # The newest target has most kernels: start it first.
        for line in pool.map(lambda arch: build_one(arch, out, cache), sorted(archs, reverse=True)):
            print(f"petit device code: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", nargs="*", default=ARCHS, choices=ARCHS)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--cache", type=Path)
    arguments = parser.parse_args()
    build(arguments.out, tuple(arguments.arch), arguments.jobs, arguments.cache)


if __name__ == "__main__":
    main()
