"""A device the HIP backend runs on: its code object, plans, streams and workspaces.

Device is a GPU of this process (tensors on "cuda"); EmulatedDevice in emulation.py is the development emulator (tensors
on "cpu"). Code objects load when weights are packed. A workspace is made at a stream's first launch, large enough for
every weight packed so far; after that launches allocate nothing but their result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from petit_plugin import _native
from petit_plugin._types import PackedMeta
from petit_plugin.backends.hip import solutions

logger = logging.getLogger("petit_plugin.backends.hip")

CODE_OBJECTS = Path(__file__).parent / "code_objects"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
COUNTERS = 1 << 16  # tiles a launch may have; their arrival counters lie first in a workspace and stay zero
ALIGN = 256


CORE = "PETIT_GFX950_CORE"


def arch_name(device: torch.device) -> str:
    """What weights on this GPU are packed for. ValueError in one sentence for a GPU without kernels.

    PETIT_GFX950_CORE=mask asks for gfx950's bit-mask kernels, in case its conversion instructions are slow.
    """
    properties = torch.cuda.get_device_properties(device)
    name = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    if torch.version.hip is None or name not in solutions.ARCHS:
        what = name or f"no AMD GPU ({properties.name})"
        raise ValueError(
            f"{device} is {what}; petit_plugin has kernels for {', '.join(solutions.ARCHS)} and for the CPU"
        )
    return variant(name)


def variant(arch: str) -> str:
    """`arch`, or its variant that PETIT_GFX950_CORE asks for."""
    core = os.environ.get(CORE, "")
    if core not in ("", "convert", "mask"):
        raise ValueError(f"{CORE}={core}; expected convert or mask")
    return "gfx950-mask" if arch == "gfx950" and core == "mask" else arch


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def load_code(runtime: _native.HipRuntime, device: int, arch: str) -> _native.DeviceCode:
    path = CODE_OBJECTS / f"petit_{arch}.co"
    if not path.exists():
        raise RuntimeError(f"{path} is missing: this build has no kernels for {arch}; reinstall with a compiler for it")
    return _native.DeviceCode(runtime, device, path.read_bytes(), path.name)


@dataclass(frozen=True)
class Prepared:
    """A plan and the workspace bytes it needs."""

    plan: _native.LinearPlan
    launch: solutions.Launch
    nbytes: int


class Device:
    """One GPU. Raises ValueError in one sentence if its arch is not the one the weights are packed for."""

    forced: solutions.Solution | None = None  # tuning sets it

    def __init__(self, index: int, arch: str) -> None:
        name = arch_name(torch.device("cuda", index)).partition("-")[0]
        if name != arch:
            raise ValueError(f"cuda:{index} is {name}, but the weight is packed for {arch}; pack it for this device")
        self.index, self.arch = index, arch
        self.cus = int(torch.cuda.get_device_properties(index).multi_processor_count)
        self.dense = hasattr(torch.ops.aten.mm, "dtype")  # float32 results from 16-bit operands
        if not self.dense:
            logger.warning(
                "torch %s has no float32 result for 16-bit matrices; many rows run the tile kernels", torch.__version__
            )
        self.runtime = _native.HipRuntime(os.environ.get("PETIT_HIP_RUNTIME", ""))
        self.code = load_code(self.runtime, index, arch)
        self._plans: dict[tuple[object, ...], Prepared] = {}
        self._workspaces: dict[int, list[torch.Tensor]] = {}
        self._reserved = 0
        logger.info("HIP device %d: %s, %d CUs, runtime %s", index, arch, self.cus, self.runtime.path)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def solution(self, meta: PackedMeta, dtype: str, m: int) -> solutions.Solution:
        if self.forced is not None:
            return self.forced
        key = (self.arch, self.cus, meta.format, dtype, meta.n, meta.k)
        if not self.dense and m > solutions.DENSE_ABOVE:
            m = solutions.DENSE_ABOVE
        return solutions.select(*key, solutions.bucket(m), meta.exact)

    def prepare(self, meta: PackedMeta, dtype: str, m: int) -> Prepared:
        """The plan for m rows, made once."""
        key = (meta, dtype, m, self.forced)
        if key not in self._plans:
            self._plans[key] = self.make(meta, dtype, m, self.launch(meta, dtype, m))
        return self._plans[key]

    def make(self, meta: PackedMeta, dtype: str, m: int, launch: solutions.Launch) -> Prepared:
        base, _, mask = meta.arch.partition("-")
        convert = solutions.conversion_kernel(base, meta.format, dtype, meta.exact, bool(mask))
        offsets, nbytes = self.workspace_layout(meta, dtype, m, launch, convert)
        shape = f"x [{m}, {meta.k}] {dtype} x {meta.format} [{meta.n}, {meta.k}] on device {self.index}"
        grid = (launch.threads, launch.workgroups, launch.units_q, launch.units_r, launch.m_blocks, launch.xcds)
        slices = solutions.conversion_slices(m, meta.k)
        plan = _native.LinearPlan(self.code, convert, launch.kernel, shape, (meta.n, meta.k, m), grid, slices, offsets)
        return Prepared(plan, launch, nbytes)

    def launch(self, meta: PackedMeta, dtype: str, m: int) -> solutions.Launch:
        s = self.solution(meta, dtype, m)
        if s.role == "dense":
            raise ValueError(f"M = {m} is not a single launch; split it into {solutions.DENSE_ABOVE} rows at a time")
        return solutions.plan(s, meta.arch, self.cus, meta.format, dtype, meta.n, meta.k, m, meta.exact)

    def workspace_layout(
        self, meta: PackedMeta, dtype: str, m: int, launch: solutions.Launch, convert: str
    ) -> tuple[tuple[int, int, int, int, int], int]:
        """Offsets of x, row infos, partial sums, counters and the plane stride; total bytes."""
        tiles = launch.units_q * launch.workgroups + launch.units_r  # units, an upper bound of tiles
        tiles //= -(-meta.k // solutions.TILE_K)
        if tiles > COUNTERS:
            raise ValueError(f"[{meta.n}, {meta.k}] at M = {m} has {tiles} tiles; at most {COUNTERS} are supported")
        plane = -(-m // 16) * -(-meta.k // solutions.TILE_K) * 4096
        planes = solutions.planes(convert, dtype)
        rows = COUNTERS * 4
        x = rows + _aligned(m * 8)
        partials = x + _aligned(plane * planes)
        return (x, rows, partials, 0, plane), partials + launch.partial_bytes

    def reserve(self, meta: PackedMeta) -> None:
        """Note that launches for this weight will come, so that workspaces are made large enough at once."""
        for dtype in DTYPE_NAMES.values():
            m = 1
            while m <= solutions.DENSE_ABOVE:
                if self.solution(meta, dtype, m).role != "dense":
                    nbytes = self.workspace_layout(meta, dtype, m, self.launch(meta, dtype, m), "")[1]
                    self._reserved = max(self._reserved, nbytes)
                m *= 2

    def workspace(self, nbytes: int, stream: int) -> torch.Tensor:
        """At least nbytes for launches on `stream`, counters zero. Outgrown ones are kept for graphs."""
        have = self._workspaces.setdefault(stream, [])
        if have and have[-1].numel() >= nbytes:
            return have[-1]
        device = torch.device("cuda", self.index)
        if torch.cuda.is_current_stream_capturing():
            # Nothing ran on this stream before. The workspace then belongs to the graph, which zeroes its counters at
            # every replay; it cannot serve launches outside the graph.
            space = torch.empty(nbytes, dtype=torch.uint8, device=device)
            space[: COUNTERS * 4].zero_()
            return space
        size = max(nbytes, self._reserved)
        space = torch.empty(size, dtype=torch.uint8, device=device)
        space[: COUNTERS * 4].zero_()
        have.append(space)
        logger.info("HIP device %d: workspace of %.1f MB for stream %#x", self.index, size / 1e6, stream)
        return space

    @contextmanager
    def visible(self, tensors: Sequence[torch.Tensor | None], writable: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around launches that touch these tensors; a GPU needs nothing."""
        yield

    def matmul_f32(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [m, k] @ w [n, k].T in float32, from 16-bit operands, by the vendor library."""
        return torch.mm(x, w.t(), out_dtype=torch.float32)
