"""A device the HIP backend runs on: its code object, plans, streams and workspaces.

Device is a GPU of this process (tensors on "cuda"); EmulatedDevice in emulation.py is the development emulator (tensors
on "cpu"). Code objects load when weights are packed; launching allocates nothing after a stream's first use.
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

    def __init__(self, index: int, arch: str) -> None:
        properties = torch.cuda.get_device_properties(index)
        name = getattr(properties, "gcnArchName", "").split(":")[0]
        if torch.version.hip is None or name != arch:
            what = name or f"no AMD GPU ({properties.name})"
            raise ValueError(f"device {index} is {what}, but the weight is packed for {arch}; pack it for this device")
        self.index, self.arch, self.cus = index, arch, properties.multi_processor_count
        self.runtime = _native.HipRuntime(os.environ.get("PETIT_HIP_RUNTIME", ""))
        self.code = load_code(self.runtime, index, arch)
        self._plans: dict[tuple[object, ...], Prepared] = {}
        self._workspaces: dict[int, list[torch.Tensor]] = {}
        self._reserved = 0
        logger.info("HIP device %d: %s, %d CUs, runtime %s", index, arch, self.cus, self.runtime.path)

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def solution(self, meta: PackedMeta, dtype: str, m: int) -> solutions.Solution:
        return solutions.select(self.arch, self.cus, meta.format, dtype, meta.n, meta.k, solutions.bucket(m), meta.exact)

    def prepare(self, meta: PackedMeta, dtype: str, m: int) -> Prepared:
        """The plan for m rows, made once."""
        key = (meta, dtype, m)
        if key not in self._plans:
            self._plans[key] = self._make(meta, dtype, m)
        return self._plans[key]

    def _make(self, meta: PackedMeta, dtype: str, m: int) -> Prepared:
        launch = self.launch(meta, dtype, m)
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
        planes = 1 if convert.startswith("petit_arrange") else solutions.PLANES[dtype]
        rows = COUNTERS * 4
        x = rows + _aligned(m * 8)
        partials = x + _aligned(plane * planes)
        return (x, rows, partials, 0, plane), partials + launch.partial_bytes

    def reserve(self, meta: PackedMeta) -> None:
        """Note that launches for this weight will come, so that workspaces are made large enough at once."""
        for m in (16, 32, 64, solutions.DENSE_ABOVE):
            launch = self.launch(meta, "bf16", m)
            self._reserved = max(self._reserved, self.workspace_layout(meta, "bf16", m, launch, "")[1])

    def workspace(self, nbytes: int, stream: int) -> torch.Tensor:
        """At least nbytes for launches on `stream`. Outgrown ones are kept: a captured graph may still use them."""
        have = self._workspaces.setdefault(stream, [])
        if not have or have[-1].numel() < nbytes:
            size = max(nbytes, self._reserved)
            have.append(torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", self.index)))
            logger.info("HIP device %d: workspace of %.1f MB for stream %#x", self.index, size / 1e6, stream)
        return have[-1]

    @contextmanager
    def visible(self, tensors: Sequence[torch.Tensor | None], writable: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around launches that touch these tensors; a GPU needs nothing."""
        yield

    def matmul_f32(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [m, k] @ w [n, k].T in float32, from 16-bit operands, by the vendor library."""
        return torch.mm(x, w.t(), out_dtype=torch.float32)  # type: ignore[call-overload]
