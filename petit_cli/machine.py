"""Looking at the machine without starting anything: no device is initialised, no framework imported."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16")


def cpu_kernel() -> tuple[str | None, str]:
    """(name of the CPU kernels that run here, "") or (None, why there are none)."""
    try:
        from petit_plugin import _native

        return _native.isa_name(_native.best_isa()), ""
    except (ImportError, RuntimeError, ValueError) as error:
        return None, str(error)


def cpu_info() -> dict[str, Any]:
    """Model, instruction sets that matter here, and how many cores this process may use."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    flags = set(fields.get("flags", "").split())
    return {
        "architecture": platform.machine(),
        "model": fields.get("model name", "unknown"),
        "instruction_sets": [f for f in _FLAGS if f in flags],
        "cores": len(os.sched_getaffinity(0)),
    }


def isa_table() -> list[dict[str, Any]]:
    """Every CPU kernel family: built into the native module, supported by this CPU, and the one that runs."""
    from petit_plugin import _native

    best = _native.best_isa()
    return [
        {
            "name": _native.isa_name(isa),
            "built": bool(_native.isa_built(isa)),
            "supported": bool(_native.isa_supported(isa)),
            "runs": isa == best,
        }
        for isa in range(4)
    ]


def openmp_runtimes() -> list[str]:
    """OpenMP libraries mapped into this process (more than one cannot share threads)."""
    names = ("libgomp", "libomp", "libiomp")
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if os.path.basename(p).startswith(names))


def amd_gpus() -> list[dict[str, Any]]:
    """AMD GPUs the kernel driver knows, read from sysfs: {"arch": "gfx942", "compute_units": 304, "memory_bytes"}."""
    gpus = []
    for node in sorted(_KFD.glob("*"), key=lambda p: int(p.name) if p.name.isdigit() else 0):
        numbers = _numbers(node / "properties")
        version = numbers.get("gfx_target_version", 0)
        if not version:
            continue  # a CPU
        major, minor, step = version // 10000, version // 100 % 100, version % 100
        simds = numbers.get("simd_count", 0)
        memory = sum(_numbers(bank / "properties").get("size_in_bytes", 0) for bank in (node / "mem_banks").glob("*"))
        gpus.append(
            {
                "arch": f"gfx{major}{minor:x}{step:x}",
                "compute_units": simds // max(numbers.get("simd_per_cu", 4), 1),
                "memory_bytes": memory,
            }
        )
    return gpus


def _numbers(file: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].lstrip("-").isdigit()}


def installed(*names: str) -> tuple[str, str] | None:
    """(distribution, version) of the first of `names` that is installed. Nothing is imported."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def entry_points(group: str) -> list[str]:
    """Our entry points in `group`, as "name = module:function"."""
    found = importlib.metadata.entry_points(group=group)
    return sorted(f"{e.name} = {e.value}" for e in found if e.value.split(":")[0].startswith("petit_"))
