"""Runs the compiled device kernels on the emulator directly: no host layer, every buffer poisoned.

Argument blocks mirror csrc/device/arguments.hpp. Weights come from the reference packer (backends/hip/layout.py).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numerics import F64, Checkpoint, random_checkpoint

from petit_plugin._types import CheckpointTensors, PackedMeta
from petit_plugin.backends.hip import layout, solutions

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import emulator  # noqa: E402

CODE_OBJECTS = ROOT / "petit_plugin" / "backends" / "hip" / "code_objects"
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


class GemmArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("weight", "scale", "row_scale", "row_exponent", "x", "rows")),
        *((name, ctypes.c_uint64) for name in ("bias", "y", "partials", "counters")),
        *((name, ctypes.c_int64) for name in ("plane_bytes", "y_stride")),
        *((name, ctypes.c_uint32) for name in ("n", "m", "k_tiles", "row_groups", "m_blocks")),
        *((name, ctypes.c_uint32) for name in ("units_q", "units_r", "bias_f32", "workgroups", "xcds")),
    )


class ConvertArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "out", "rows")),
        *((name, ctypes.c_int64) for name in ("x_stride_bytes", "plane_bytes")),
        *((name, ctypes.c_uint32) for name in ("slices", "k", "k_tiles")),
    )


class DequantizeArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("weight", "scale", "out")),
        *((name, ctypes.c_uint32) for name in ("n_begin", "rows", "k", "k_tiles")),
    )


class FinishArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("sum", "row_scale", "row_exponent", "bias", "y")),
        ("y_stride", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("n", "m", "bias_f32")),
        ("exponent", ctypes.c_int32),
    )


@dataclass
class Packed:
    meta: PackedMeta
    tensors: dict[str, torch.Tensor]


def pack(fmt: str, weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, arch: str) -> Packed:
    return Packed(*layout.pack(CheckpointTensors(fmt, "", weight, scale, global_scale), arch, None))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN in every float type, far out of range as an integer."""
    t = torch.empty(shape, dtype=dtype)
    t.view(torch.uint8).fill_(0xFF)
    return t


@dataclass
class Machine:
    """One arch's code object on the emulator."""

    arch: str
    module: emulator.Module = field(init=False)

    def __post_init__(self) -> None:
        self.module = emulator.get().load((CODE_OBJECTS / f"petit_{self.arch}.co").read_bytes(), self.arch)

    def close(self) -> None:
        self.module.unload()

    def launch(
        self, name: str, grid: tuple[int, int], threads: int, args: ctypes.Structure, reads: list, writes: list
    ) -> None:
        device = emulator.get()
        with device.registered(*reads, writable=False), device.registered(*writes):
            self.module.kernel(name).launch(grid=(*grid, 1), block=(threads, 1, 1), args=[bytes(args)])

    def linear(
        self,
        x: torch.Tensor,
        w: Packed,
        bias: torch.Tensor | None = None,
        *,
        solution: solutions.Solution | None = None,
        cus: int = 8,
        stats: dict[str, int] | None = None,
    ) -> torch.Tensor:
        """y of x [M, K] with the given solution or the heuristic one; x is followed by NaN in every row and after."""
        meta, t = w.meta, w.tensors
        m, k, n = x.shape[0], meta.k, meta.n
        base, _, mask = meta.arch.partition("-")
        dtype = NAMES[x.dtype]
        s = solution or solutions.select(base, cus, meta.format, dtype, n, k, solutions.bucket(m), meta.exact)
        plan = solutions.plan(s, meta.arch, cus, meta.format, dtype, n, k, m, meta.exact)
        convert = solutions.conversion_kernel(base, meta.format, dtype, meta.exact, bool(mask))
        k_tiles = -(-k // 128)
        plane = -(-m // 16) * k_tiles * 4096
        planes = solutions.planes(convert, dtype)
        padded = poisoned(m + 1, k + 8, dtype=x.dtype)
        padded[:m, :k] = x
        fragments = poisoned(plane * planes, dtype=torch.uint8)
        rows = poisoned(m, 2, dtype=torch.int32)
        slices = solutions.conversion_slices(m, k)
        emulator.get().reset_counters()
        args = ConvertArgs(
            *(padded.data_ptr(), fragments.data_ptr(), rows.data_ptr(), padded.stride(0) * 2, plane, slices, k, k_tiles)
        )
        self.launch(convert, (m, slices), 256, args, [padded], [fragments, rows])
        if stats is not None:
            stats["convert_valu"] = emulator.get().counters().valu
        tiles = -(-n // 64) * plan.m_blocks
        counters = torch.zeros(tiles, dtype=torch.int32)
        partials = poisoned(plan.partial_bytes, dtype=torch.uint8)
        stride = n + (-n % 8) + 8
        y = poisoned(m, stride, dtype=x.dtype)
        gemm = GemmArgs(
            *(t[name].data_ptr() for name in ("weight", "scale", "row_scale", "row_exponent")),
            *(fragments.data_ptr(), rows.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()),
            *(partials.data_ptr(), counters.data_ptr(), plane, stride, n, m, k_tiles, -(-n // 64), plan.m_blocks),
            *(plan.units_q, plan.units_r, int(bias is not None and bias.dtype == torch.float32)),
            *(plan.workgroups, plan.xcds),
        )
        reads = [*(t[name] for name in ("weight", "scale", "row_scale", "row_exponent")), fragments, rows]
        reads += [] if bias is None else [bias]
        self.launch(plan.kernel, (plan.workgroups, 1), plan.threads, gemm, reads, [y, partials, counters])
        if stats is not None:
            stats.update(emulator.get().counters().values)
        assert not counters.any(), "arrival counters are not back at zero"
        untouched = y.view(torch.uint8).reshape(m, stride * 2)[:, n * 2 :]
        assert bool((untouched == 0xFF).all()), "the kernel wrote beyond its columns"
        return y[:, :n].clone()

    def dequantize(self, w: Packed, dtype: torch.dtype, n_begin: int, rows: int) -> torch.Tensor:
        """Rows of the weight in the dtype, before row scales."""
        meta, t = w.meta, w.tensors
        out = poisoned(rows, meta.k, dtype=dtype)
        args = DequantizeArgs(
            t["weight"].data_ptr(), t["scale"].data_ptr(), out.data_ptr(), n_begin, rows, meta.k, -(-meta.k // 128)
        )
        mask = "_mask" if meta.arch.endswith("-mask") else ""
        name = f"petit_dequantize_{meta.format}_{NAMES[dtype]}{mask}"
        grid = (-(-args.k_tiles // 4), -(-rows // 64))
        self.launch(name, grid, 256, args, [t["weight"], t["scale"]], [out])
        return out

    def finish(self, total: torch.Tensor, w: Packed, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """round(total * row_scale * 2^row_exponent + bias) for float32 [M, N]."""
        m, n = total.shape
        scale, exponent = w.tensors["row_scale"], w.tensors["row_exponent"]
        y = poisoned(m, n + 3, dtype=dtype)
        args = FinishArgs(
            *(total.data_ptr(), scale.data_ptr(), exponent.data_ptr(), 0 if bias is None else bias.data_ptr()),
            *(y.data_ptr(), n + 3, n, m, int(bias is not None and bias.dtype == torch.float32), 0),
        )
        reads = [total, scale, exponent] + ([] if bias is None else [bias])
        self.launch(f"petit_finish_{NAMES[dtype]}", (-(-n // 256), m), 256, args, reads, [y])
        assert bool(y[:, n:].isnan().all())
        return y[:, :n].clone()


def random_packed(
    rng: np.random.Generator, fmt: str, n: int, k: int, arch: str, scales: object = None
) -> tuple[Packed, F64]:
    """A random checkpoint, packed, and its exact values."""
    c = random_checkpoint(rng, fmt, n, k, scales=scales)
    return pack_checkpoint(c, arch), c.values


def pack_checkpoint(c: Checkpoint, arch: str) -> Packed:
    factor = torch.ones(1) if c.global_scale is None else torch.from_numpy(np.array(c.global_scale, np.float32))
    return pack(c.fmt, torch.from_numpy(c.weight.copy()), torch.from_numpy(c.scale.copy()), factor, arch)
