"""What a launch costs on a chip, from counts of the emulator: a model, never a measurement.

The machine code of a kernel runs on the emulator over a slice: one tile of 4 and of 12 k-tiles, and one cut in two.
That gives the cost of a unit (tile x k-tile), of a tile's start and end, and of a cut; a GEMM is so many of each. The
activation pre-pass is counted at its full size. Bounds per chip, each as if it were alone:
  hbm   bytes / bandwidth: packed weights once, x, y, partial sums written and read (converted activations stay in L2)
  valu  wave instructions x 4 cycles / (4 SIMDs x CUs x clock)
  mfma  matrix cycles / (4 SIMDs x CUs x clock)
  lds   LDS cycles / (CUs x clock)
The last three are divided by the grid's balance over the CUs. The modelled time is the largest bound; launch latency,
conversion rates and imperfect overlap are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from petit_plugin._types import CheckpointTensors, PackedMeta
from petit_plugin.backends.hip import packing, solutions
from petit_plugin.backends.hip.device import DTYPE_NAMES
from petit_plugin.backends.hip.emulation import EmulatedDevice


@dataclass(frozen=True)
class Chip:
    """Published figures: bandwidth in TB/s, dense BF16 in TFLOP/s, clock in GHz."""

    name: str
    arch: str
    cus: int
    ghz: float
    hbm: float
    bf16: float


CHIPS = (
    Chip("MI250X (one GCD)", "gfx90a", 110, 1.7, 1.64, 191),
    Chip("MI300X", "gfx942", 304, 2.1, 5.3, 1307),
    Chip("MI325X", "gfx942", 304, 2.1, 6.0, 1307),
    Chip("MI355X", "gfx950", 256, 2.4, 8.0, 2500),
)


class Counts(NamedTuple):
    """Wave instructions of the vector ALU, matrix cycles of a SIMD, LDS cycles of a CU."""

    valu: float = 0.0
    mfma: float = 0.0
    lds: float = 0.0

    def plus(self, other: Counts, times: float = 1.0) -> Counts:
        return Counts(*(a + times * b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Counts:
        return Counts(*(a * factor for a in self))


class Costs(NamedTuple):
    unit: Counts
    tile: Counts
    cut: Counts


@dataclass(frozen=True)
class Estimate:
    """Seconds of each bound for one GEMM on one chip, and what a plain BF16 GEMM costs in the same model."""

    chip: Chip
    launch: solutions.Launch
    hbm: float
    valu: float
    mfma: float
    lds: float
    least_hbm: float  # without partial sums
    bf16: float
    valu_per_8_weights: float

    @cached_property
    def bounds(self) -> dict[str, float]:
        return {"hbm": self.hbm, "valu": self.valu, "mfma": self.mfma, "lds": self.lds}

    @property
    def bound(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def seconds(self) -> float:
        return self.bounds[self.bound]


class Counter:
    """Counts kernels on an emulated device, each once."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self._costs: dict[tuple[str, int], Costs] = {}
        self._conversions: dict[tuple[str, int, int], Counts] = {}

    def _last(self) -> Counts:
        found = self.device.counters()
        return Counts(found["valu"], found["mfma_cycles"], found["lds_cycles"])

    def _run(
        self, fmt: str, dtype: torch.dtype, solution: solutions.Solution, m: int, tiles: int, groups: int
    ) -> Counts:
        """One tile of `tiles` k-tiles over `groups` workgroups."""
        arch, name = self.device.arch, DTYPE_NAMES[dtype]
        shape = solutions.SHAPES[(solution.role, solution.rows)]
        n, k = shape.columns, tiles * solutions.TILE_K
        group = 16 if fmt == "nvfp4" else 32
        codes = torch.full((n, k // 2), 0x5A, dtype=torch.uint8)
        scales = torch.full((n, k // group), 0x38 if fmt == "nvfp4" else 127, dtype=torch.uint8)
        meta, w = packing.pack(CheckpointTensors(fmt, "", codes, scales, torch.ones(1)), arch, None)
        q, r = divmod(tiles, groups)
        kernel = solutions.kernel_name(solution.role, fmt, name, solution.rows, False, False)
        launch = solutions.Launch(kernel, shape.waves * 64, groups, q, r, 1, 1, shape.blocks)
        prepared = self.device.make(meta, name, m, launch)
        x, y = torch.ones(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
        space = self.device.workspace(prepared.nbytes, 0)
        with self.device.visible((x, *w.values()), (y, space)):
            prepared.plan.run(
                *(x.data_ptr(), k * 2, w["weight"].data_ptr(), w["scale"].data_ptr(), w["row_scale"].data_ptr()),
                *(w["row_exponent"].data_ptr(), 0, False),
                *(y.data_ptr(), n, space.data_ptr(), 0),
            )
        return self._last()

    def costs(self, fmt: str, dtype: torch.dtype, solution: solutions.Solution, m: int) -> Costs:
        rows = min(m, solution.rows)
        kernel = solutions.kernel_name(solution.role, fmt, DTYPE_NAMES[dtype], solution.rows, False, False)
        key = (kernel, rows)
        if key not in self._costs:
            short = self._run(fmt, dtype, solution, rows, 4, 1)
            long = self._run(fmt, dtype, solution, rows, 12, 1)
            cut = self._run(fmt, dtype, solution, rows, 12, 2)
            unit = long.plus(short, -1).times(1 / 8)
            self._costs[key] = Costs(unit, short.plus(unit, -4), cut.plus(long, -1))
        return self._costs[key]

    def conversion(self, fmt: str, dtype: torch.dtype, m: int, k: int) -> Counts:
        """The activation pre-pass of x [m, k], at its full size."""
        name = DTYPE_NAMES[dtype]
        kernel = solutions.conversion_kernel(self.device.arch, fmt, name, False, False)
        key = (kernel, m, k)
        if key not in self._conversions:
            meta = PackedMeta(fmt, self.device.arch, 64, k)
            launch = solutions.plan(
                solutions.Solution("decode", 32), meta.arch, self.device.cus, fmt, name, 64, k, m, False
            )
            prepared = self.device.make(meta, name, m, launch)
            x = torch.ones(m, k, dtype=dtype)
            space = self.device.workspace(prepared.nbytes, 0)
            with self.device.visible((x,), (space,)):
                prepared.plan.convert(x.data_ptr(), k * 2, space.data_ptr(), 0)
            self._conversions[key] = self._last()
        return self._conversions[key]


def cut_parts(launch: solutions.Launch, k_tiles: int) -> tuple[int, int]:
    """(cuts, parts of tiles that were cut): a workgroup's start inside a tile is a cut."""
    starts = (wg * launch.units_q + min(wg, launch.units_r) for wg in range(1, launch.workgroups))
    cut_tiles = [start // k_tiles for start in starts if start % k_tiles]
    return len(cut_tiles), len(cut_tiles) + len(set(cut_tiles))


def estimate(
    counter: Counter, chip: Chip, solution: solutions.Solution, fmt: str, dtype: torch.dtype, n: int, k: int, m: int
) -> Estimate:
    """The model of y [m, n] = x [m, k] W^T on `chip`. The solution is a decode or tile one."""
    name = DTYPE_NAMES[dtype]
    launch = solutions.plan(solution, chip.arch, chip.cus, fmt, name, n, k, m, False)
    tiles_k = -(-k // solutions.TILE_K)
    units = launch.workgroups * launch.units_q + launch.units_r
    cuts, parts = cut_parts(launch, tiles_k)
    cost = counter.costs(fmt, dtype, solution, m)
    total = Counts().plus(cost.unit, units).plus(cost.tile, units // tiles_k).plus(cost.cut, cuts)
    total = total.plus(counter.conversion(fmt, dtype, m, k))

    padded = -(-n // solutions.ROW_GROUP) * solutions.ROW_GROUP * tiles_k * solutions.TILE_K
    weights = padded / 2 + padded / (16 if fmt == "nvfp4" else 32)
    traffic = weights + 2 * m * k + 2 * m * n
    simds = 4 * chip.cus * chip.ghz * 1e9 * solutions.tail_efficiency(launch, chip.cus)
    dense = max((2 * n * k + 2 * m * k + 2 * m * n) / (chip.hbm * 1e12), 2 * m * n * k / (chip.bf16 * 1e12))
    return Estimate(
        chip=chip,
        launch=launch,
        hbm=(traffic + 2 * parts * launch.blocks * 1024) / (chip.hbm * 1e12),
        valu=total.valu * 4 / simds,
        mfma=total.mfma / simds,
        lds=total.lds * 4 / simds,
        least_hbm=traffic / (chip.hbm * 1e12),
        bf16=dense,
        valu_per_8_weights=total.valu * 64 * 8 / (padded * launch.m_blocks) if launch.m_blocks else 0.0,
    )
