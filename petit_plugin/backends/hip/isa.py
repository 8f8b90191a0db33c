"""What the compiled kernels contain: the report behind `petit isa`. Standard library only.

Numbers are static counts of the innermost MFMA loop, which is where a GEMM spends its time. One lane's eight weights
are one 32-bit word; a word feeds `mfma_per_word` MFMA instructions for every 16 rows of activations, which is how the
number of words in the loop is known without trusting names of registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from petit_plugin.backends.hip import solutions
from petit_plugin.backends.hip.disassembly import Instruction, Kernel, read_kernels

CODE_OBJECTS = Path(__file__).parent / "code_objects"
MFMA_PER_WORD = {"gfx90a": 2, "gfx942": 2, "gfx950": 1}
LDS_BYTES = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}
SIMDS, REGISTERS, GRANULE, MAX_WAVES = 4, 512, 8, 8  # a CU; vector registers a lane; allocation unit; waves a SIMD
_NAME = re.compile(r"petit_(decode|tile)_(nvfp4|mxfp4)_(bf16|f16)_m(\d+)(_exact)?(_mask)?")


@dataclass(frozen=True)
class Report:
    """One kernel. Rates are per 8 weights of a lane; `valu_per_8_weights` includes the activation pre-pass amortised
    over (N, K) = (8192, 8192) at 16 rows, `loop_valu_per_8_weights` does not. Bytes are per lane, wave or CU, as named.
    """

    kernel: str
    arch: str
    format: str | None
    dtype: str | None
    role: str
    rows: int | None
    exact: bool
    vgpr: int
    agpr: int
    lds_bytes: int
    scratch_bytes: int
    occupancy: int
    valu_per_8_weights: float | None
    loop_valu_per_8_weights: float | None
    mfma_per_8_weights: float | None
    weight_load_bytes: int | None
    accvgpr_moves: int
    scratch_instructions: int
    bytes_in_flight_per_cu: int | None
    loop_bytes: int
    selected_for: list[list[int]]


def occupancy(resources: dict[str, int], arch: str) -> int:
    """Waves a SIMD can hold: registers (V and A share one file) and LDS."""
    rounded = -(-max(1, resources["vgpr"] + resources["agpr"]) // GRANULE) * GRANULE
    waves = min(MAX_WAVES, REGISTERS // rounded)
    if resources["lds_bytes"]:
        groups = LDS_BYTES[arch] // resources["lds_bytes"]
        waves = min(waves, groups * (resources["threads"] // 64) // SIMDS)
    return waves


def weight_loads(loop: list[Instruction]) -> list[Instruction]:
    """The 16-byte loads whose data goes to the vector ALU: weights. Activations go to MFMA or LDS only."""
    found = []
    for i, load in enumerate(loop):
        if load.load_bytes != 16:
            continue
        live = load.writes
        for use in loop[i + 1 :] + loop[: i + 1]:
            if use.is_valu and use.reads & live:
                found.append(load)
                break
            live = live - use.writes
            if not live:
                break
    return found


def bytes_in_flight(loop: list[Instruction], loads: list[Instruction]) -> int:
    """Weight bytes of one wave still on their way after the loop's s_waitcnt vmcnt, at the least of them.

    Loads return in order, so vmcnt(n) leaves the newest n. The loop is walked twice: the second time is steady.
    """
    counted = {load.address for load in loads}
    outstanding: list[int] = []
    least: int | None = None
    for turn in range(2):
        for instruction in loop:
            if instruction.is_vmem:
                outstanding.append(64 * 16 if instruction.address in counted else 0)
            wait = re.search(r"vmcnt\((\d+)\)", instruction.operands) if instruction.name == "s_waitcnt" else None
            if wait:
                left = int(wait[1])
                outstanding = outstanding[len(outstanding) - left :] if left < len(outstanding) else outstanding
                if turn == 1:
                    least = min(sum(outstanding), least if least is not None else 1 << 30)
    return least or 0


def conversion_valu(kernel: Kernel, rows: int, k: int) -> float:
    """VALU instructions of the activation pre-pass for [rows, k]: each slice scans its row, then writes its part."""
    loops = [body for body in kernel.loops() if any(i.load_bytes == 16 for i in body)]

    def per_piece(stores: bool) -> float:
        """The cheapest such loop (others serve rare rows), per 16 bytes a lane loads."""
        bodies = [b for b in loops if any("store" in i.name for i in b) == stores]
        return min(sum(i.is_valu for i in b) / sum(i.load_bytes == 16 for i in b) for b in bodies)

    inside = {i.address for body in loops for i in body}
    fixed = sum(i.is_valu and i.address not in inside for i in kernel.instructions)  # once a wave, at most
    slices = solutions.conversion_slices(rows, k)
    pieces = -(-k // 128) * 16 / 64  # 16-byte pieces of a row, 64 to a wave
    return rows * (pieces * (slices * per_piece(False) + per_piece(True)) + slices * 4 * fixed)


def analyse(kernel: Kernel, arch: str, conversion: dict[str, float]) -> Report:
    resources = kernel.resources
    loop = kernel.hot_loop()
    name = _NAME.fullmatch(kernel.name)
    waves = occupancy(resources, arch)
    values: dict[str, object] = {}
    if name and loop:
        role, fmt, dtype, rows = name[1], name[2], name[3], int(name[4])
        mfma = sum(i.is_mfma for i in loop)
        words = mfma / (MFMA_PER_WORD[arch] * rows // 16)
        valu = sum(i.is_valu for i in loop) / words
        loads = weight_loads(loop)
        narrow = 16 if len(loads) * 4 == words else min((i.load_bytes for i in loop if i.load_bytes), default=0)
        converter = solutions.conversion_kernel(arch, fmt, dtype, bool(name[5]), bool(name[6]))
        solution_waves = solutions.waves_per_simd(role, rows, waves)
        values = {
            "format": fmt,
            "dtype": dtype,
            "role": role,
            "rows": rows,
            "exact": bool(name[5]),
            "valu_per_8_weights": round(valu + conversion[converter], 3),
            "loop_valu_per_8_weights": round(valu, 3),
            "mfma_per_8_weights": mfma / words,
            "weight_load_bytes": narrow,
            "bytes_in_flight_per_cu": bytes_in_flight(loop, loads) * SIMDS * solution_waves,
            "selected_for": solutions.selected_shapes(kernel.name, arch),
        }
    else:
        parts = kernel.name.removeprefix("petit_").split("_")
        values = {
            "format": next((p for p in parts if p in ("nvfp4", "mxfp4")), None),
            "dtype": next((p for p in parts if p in ("bf16", "f16")), None),
            "role": parts[0],
            "rows": None,
            "exact": False,
            "valu_per_8_weights": None,
            "loop_valu_per_8_weights": None,
            "mfma_per_8_weights": None,
            "weight_load_bytes": None,
            "bytes_in_flight_per_cu": None,
            "selected_for": [],
        }
    return Report(
        kernel=kernel.name,
        arch=arch,
        vgpr=resources["vgpr"],
        agpr=resources["agpr"],
        lds_bytes=resources["lds_bytes"],
        scratch_bytes=resources["scratch_bytes"],
        occupancy=waves,
        accvgpr_moves=sum("accvgpr" in i.name for i in loop),
        scratch_instructions=sum(i.name.startswith("scratch_") for i in kernel.instructions),
        loop_bytes=loop[-1].address - loop[0].address if loop else 0,
        **values,  # type: ignore[arg-type]
    )


def report(arch: str | None = None, directory: Path = CODE_OBJECTS) -> Iterator[Report]:
    """Reports of every kernel of one arch, or of all built ones. FileNotFoundError if a code object is missing."""
    for name in (arch,) if arch else solutions.ARCHS:
        path = directory / f"petit_{name}.co"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; build it with `python csrc/device/build.py --out {directory}`")
        kernels = read_kernels(path)
        weight_words = 8192 * 8192 / 8 / 64  # wave words of the reference layer
        conversion = {
            kernel: conversion_valu(kernels[kernel], 16, 8192) / weight_words
            for kernel in kernels
            if kernel.startswith(("petit_convert", "petit_arrange"))
        }
        for kernel in kernels.values():
            yield analyse(kernel, name, conversion)


def as_json(reports: Iterator[Report]) -> list[dict[str, object]]:
    return [asdict(entry) for entry in reports]
