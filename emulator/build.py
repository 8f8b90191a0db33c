"""Compiles the emulator's shared library on demand and keeps it in a cache keyed by its sources and compiler."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "src"
# -ffp-contract=off and -frounding-math: product and sum are two roundings, and the rounding mode changes at run time.
FLAGS = [
    "-std=c++20",
    "-O3",
    "-march=x86-64-v3",
    "-fPIC",
    "-ffp-contract=off",
    "-frounding-math",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
]


def cache_dir() -> Path:
    root = os.environ.get("PETIT_EMULATOR_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "petit_emulator"
    )
    path = Path(root)
    path.mkdir(parents=True, exist_ok=True)
    return path


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "clang++-22"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise RuntimeError("the emulator needs a C++20 compiler (g++ >= 12 or clang++); set CXX")


def library() -> Path:
    """Path of libpetit_emulator.so, built if its sources or the compiler changed (about a minute on two cores)."""
    cxx = compiler()
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    files = sorted(SOURCE.glob("*.?pp"))
    digest = hashlib.sha256((cxx + version + " ".join(FLAGS)).encode())
    for f in files:
        digest.update(f.name.encode() + f.read_bytes())
    home = cache_dir() / digest.hexdigest()[:16]
    target = home / "libpetit_emulator.so"
    if target.exists():
        return target
    home.mkdir(exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(cxx, [f for f in files if f.suffix == ".cpp"], home, target)
    return target


def object_key(source: Path, cxx: str) -> str:
    """Hash of the compiler, the flags, a source and every header of ours that it includes, directly or not."""
    seen: dict[str, bytes] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if path.name in seen or not path.exists():
            continue
        seen[path.name] = path.read_bytes()
        todo += [SOURCE / name for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)]
    digest = hashlib.sha256(" ".join([cxx, *FLAGS]).encode())
    for name in sorted(seen):
        digest.update(name.encode() + seen[name])
    return digest.hexdigest()[:24]


def _compile(cxx: str, sources: list[Path], home: Path, target: Path) -> None:
    objects = cache_dir() / "objects"
    objects.mkdir(exist_ok=True)

    def one(source: Path) -> Path:
        out = objects / f"{source.stem}-{object_key(source, cxx)}.o"
        if not out.exists():
            part = out.with_suffix(f".{os.getpid()}.tmp")
            run([cxx, *FLAGS, "-c", str(source), "-o", str(part)])
            part.replace(out)
        return out

    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"building the emulator failed:\n{' '.join(command)}\n{done.stderr[-6000:]}")

    # The slowest files first, so that two workers end together.
    sources = sorted(sources, key=lambda f: -f.stat().st_size)
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        compiled = list(pool.map(one, sources))
    part = target.with_suffix(".tmp")
    run([cxx, "-shared", "-o", str(part), *map(str, compiled), "-lpthread", "-Wl,-z,defs"])
    with contextlib.suppress(OSError):
        part.replace(target)
