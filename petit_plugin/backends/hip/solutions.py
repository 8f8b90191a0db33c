"""Which kernel runs, with which grid: data, and a heuristic where there is none. Standard library only.

A Solution names a compiled kernel and its grid policy. TABLE is the shipped tuning, keyed (arch, CUs, format, dtype,
N, K, M bucket); a user's JSON file (PETIT_SOLUTIONS) is merged over it. Nothing here was timed on hardware: the entries
are what the traffic model of docs/kernels.md picks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

logger = logging.getLogger("petit_plugin.backends.hip.solutions")

ARCHS = ("gfx90a", "gfx942", "gfx950")
ROW_GROUP, TILE_K = 64, 128
DIES = {("gfx942", 304): 8, ("gfx942", 228): 6, ("gfx950", 256): 8}  # XCDs by (arch, CUs); others count as one
DEFAULT_CUS = {"gfx90a": 110, "gfx942": 304, "gfx950": 256}
DENSE_ABOVE = 512  # rows; more are dequantised to 16 bits for the vendor GEMM
PLANES = {"bf16": 10, "f16": 2}  # f16 planes of 28 octaves that cover the dtype: 2^-133..2^127, 2^-24..2^15
WIDE_PLANES = 3  # bf16 planes of 112 octaves
REFERENCE_SHAPES = tuple(  # Llama-3.3-70B: qkv, o, gate_up, down
    (n, k, m) for n, k in ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)) for m in (1, 8, 16, 32, 64, 256)
)


@dataclass(frozen=True)
class Solution:
    """role: "decode", "tile" or "dense" (dequantise + vendor GEMM). rows: activation rows a workgroup covers.
    workgroups_per_cu: grid = that times the CUs, fewer when a workgroup would get less than min_units k-tiles.
    xcds: dies the ids are spread over (0: the device's)."""

    role: str
    rows: int
    workgroups_per_cu: int = 2
    min_units: int = 4
    xcds: int = 0

    def __post_init__(self) -> None:
        if (self.role, self.rows) not in SHAPES:
            raise ValueError(f"no kernel {self.role} with {self.rows} rows; there are {sorted(SHAPES)}")
        for name, least, most in (("workgroups_per_cu", 1, 8), ("min_units", 1, 1 << 20), ("xcds", 0, 64)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}; expected a whole number in {least} .. {most}")


@dataclass(frozen=True)
class Shape:
    """What a kernel's template says: waves, columns of y a workgroup covers, 1 KB result blocks it leaves if cut."""

    waves: int
    columns: int
    blocks: int


SHAPES = {
    ("decode", 16): Shape(4, 64, 4),
    ("decode", 32): Shape(4, 64, 8),
    ("tile", 64): Shape(4, 256, 64),
    ("tile", 128): Shape(8, 256, 128),
    ("dense", 0): Shape(0, 0, 0),
}
EXACT_TILE = Shape(8, 256, 64)  # tile 64 in its EXACT form: half a row group a wave
HEURISTIC = (
    (16, Solution("decode", 16)),
    (32, Solution("decode", 32)),
    (64, Solution("tile", 64)),
    (DENSE_ABOVE, Solution("tile", 128, workgroups_per_cu=1)),
)
Key = tuple[str, int, str, str, int, int, int]
# MI300X has bandwidth to spare for partial sums only on tall layers: three workgroups a CU there (895 = 2.95 x 304).
TABLE: Mapping[Key, Solution] = {
    ("gfx942", 304, "nvfp4", "bf16", 57344, 8192, 16): Solution("decode", 16, workgroups_per_cu=3),
    ("gfx942", 304, "mxfp4", "bf16", 57344, 8192, 16): Solution("decode", 16, workgroups_per_cu=3),
}


def bucket(m: int) -> int:
    """The M bucket: the next power of two."""
    return 1 << max(0, m - 1).bit_length()


def check_key(key: Key) -> None:
    """Raises ValueError naming the part of a table key that is wrong."""
    if len(key) != 7:
        raise ValueError(f"key {list(key)} has {len(key)} parts; expected arch, CUs, format, dtype, N, K, M bucket")
    arch, _, fmt, dtype, _, k, m_bucket = key
    for value, allowed in ((arch, ARCHS), (fmt, ("nvfp4", "mxfp4")), (dtype, ("bf16", "f16"))):
        if value not in allowed:
            raise ValueError(f"key {list(key)}: {value!r} is none of {', '.join(allowed)}")
    if any(type(number) is not int or number < 1 for number in (key[1], *key[4:])):
        raise ValueError(f"key {list(key)}: CUs, N, K and M bucket are whole numbers from 1")
    if bucket(m_bucket) != m_bucket or k % (16 if fmt == "nvfp4" else 32):
        raise ValueError(f"key {list(key)}: the M bucket is a power of two, K a multiple of the format's group")


def parse(text: str) -> dict[Key, Solution]:
    """A solution file: a JSON list of {"key": [...], "solution": {...}}. ValueError saying which entry is wrong."""
    found: dict[Key, Solution] = {}
    entries = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError("expected a JSON list")
    for i, entry in enumerate(entries):
        try:
            key = tuple(entry["key"])
            check_key(key)
            found[key] = Solution(**entry["solution"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"entry {i}: {error}") from error
    return found


def dump(entries: Mapping[Key, Solution]) -> str:
    """The text that parse() reads: one entry a line."""
    lines = (json.dumps({"key": list(key), "solution": asdict(entries[key])}) for key in sorted(entries))
    return "[\n" + ",\n".join(lines) + "\n]\n"


@cache
def table() -> Mapping[Key, Solution]:
    """TABLE with the user's file (PETIT_SOLUTIONS) over it.

    Raises ValueError for a file that does not parse or names a kernel that does not exist.
    """
    path = os.environ.get("PETIT_SOLUTIONS")
    if not path:
        return TABLE
    try:
        user = parse(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"PETIT_SOLUTIONS={path} is no solution file: {error}") from error
    return {**TABLE, **user}


def as_text(entries: Mapping[Key, Solution]) -> str:
    """The table for people, and the rule for everything it does not list."""
    head = f"{'arch':7} {'CUs':>4} {'format':6} {'dtype':5} {'N':>6} {'K':>6} {'M<=':>4}  solution"
    lines = [head]
    for key in sorted(entries):
        arch, cus, fmt, dtype, n, k, m_bucket = key
        lines.append(f"{arch:7} {cus:4} {fmt:6} {dtype:5} {n:6} {k:6} {m_bucket:4}  {entries[key]}")
    lines.append("everything else:")
    lines += [f"{'M <= ' + str(limit):>51}  {solution}" for limit, solution in HEURISTIC]
    lines.append(f"{'above':>51}  {Solution('dense', 0)}")
    return "\n".join(lines)


@cache
def select(arch: str, cus: int, fmt: str, dtype: str, n: int, k: int, m_bucket: int, exact: bool) -> Solution:
    """The solution for a GEMM; logs once where the table has none."""
    found = table().get((arch, cus, fmt, dtype, n, k, m_bucket))
    if found is None:
        found = next((s for limit, s in HEURISTIC if m_bucket <= limit), Solution("dense", 0))
        logger.info(
            "no tuned solution for %s (%d CUs) %s %s N=%d K=%d M<=%d: %s", arch, cus, fmt, dtype, n, k, m_bucket, found
        )
    if exact and (found.role == "dense" or found.rows == 128):
        found = replace(found, role="tile", rows=64, workgroups_per_cu=1)  # the only EXACT kernel for many rows
    return found


@dataclass(frozen=True)
class Launch:
    """A grid: `workgroups` pieces of the line of (tile, k-tile) units, q + 1 for the first r of them, else q."""

    kernel: str
    threads: int
    workgroups: int
    units_q: int
    units_r: int
    m_blocks: int
    xcds: int
    blocks: int

    @property
    def partial_bytes(self) -> int:
        return self.workgroups * 2 * self.blocks * 1024


def kernel_name(role: str, fmt: str, dtype: str, rows: int, exact: bool, mask: bool) -> str:
    return f"petit_{role}_{fmt}_{dtype}_m{rows}{'_exact' if exact else ''}{'_mask' if mask else ''}"


def plan(solution: Solution, arch: str, cus: int, fmt: str, dtype: str, n: int, k: int, m: int, exact: bool) -> Launch:
    """The launch of a decode or tile solution. `arch` may end in "-mask" (gfx950 weights in mask order)."""
    base, _, mask = arch.partition("-")
    shape = EXACT_TILE if exact and solution.role == "tile" else SHAPES[(solution.role, solution.rows)]
    k_tiles = -(-k // TILE_K)
    m_blocks = -(-m // solution.rows)
    units = -(-n // shape.columns) * m_blocks * k_tiles
    workgroups = max(1, min(cus * solution.workgroups_per_cu, units // solution.min_units))
    if workgroups > cus:
        workgroups -= workgroups % cus  # every CU gets as many
    xcds = solution.xcds or DIES.get((base, cus), 1)
    if workgroups % xcds:
        xcds = 1
    name = kernel_name(solution.role, fmt, dtype, solution.rows, exact, bool(mask))
    q, r = divmod(units, workgroups)
    return Launch(name, shape.waves * 64, workgroups, q, r, m_blocks, xcds, shape.blocks)


def tail_efficiency(launch: Launch, cus: int) -> float:
    """Mean over busiest load of a CU when workgroups are dealt out evenly: 1 is a perfect balance."""
    units = launch.workgroups * launch.units_q + launch.units_r
    rounds = -(-launch.workgroups // cus)
    busiest = rounds * launch.units_q + min(rounds, -(-launch.units_r // cus) if launch.units_r else 0)
    return units / (cus * busiest)


def conversion_kernel(arch: str, fmt: str, dtype: str, exact: bool, mask: bool) -> str:
    """The pre-pass a GEMM kernel needs: gfx950's bf16 MXFP4 kernel multiplies bf16 as it is, all others scaled f16."""
    plain = arch == "gfx950" and fmt == "mxfp4" and dtype == "bf16" and not exact and not mask
    return "petit_arrange_bf16" if plain else f"petit_convert_{dtype}"


def planes(conversion: str, dtype: str) -> int:
    """Planes of converted activations a pre-pass may write."""
    return WIDE_PLANES if conversion == "petit_arrange_bf16" else PLANES[dtype]


def conversion_slices(rows: int, k: int) -> int:
    """Workgroups a row of activations is split over, so that few rows still use many CUs."""
    return max(1, min(-(-k // 2048), 256 // rows if rows else 1))


def waves_per_simd(role: str, rows: int, limit: int) -> int:
    """Waves a SIMD holds with the heuristic's grid, at most what the kernel's resources allow."""
    solution = next((s for _, s in HEURISTIC if (s.role, s.rows) == (role, rows)), None)
    launched = solution.workgroups_per_cu * SHAPES[(role, rows)].waves // 4 if solution else limit
    return min(limit, launched)


def selected_shapes(kernel: str, arch: str) -> list[list[int]]:
    """The reference shapes [N, K, M] for which the shipped data picks this kernel on the arch's usual device."""
    cus = DEFAULT_CUS[arch]
    found = []
    for n, k, m in REFERENCE_SHAPES:
        for fmt in ("nvfp4", "mxfp4"):
            for dtype in ("bf16", "f16"):
                s = select(arch, cus, fmt, dtype, n, k, bucket(m), False)
                if s.role != "dense" and kernel == kernel_name(s.role, fmt, dtype, s.rows, False, False):
                    found.append([n, k, m])
    return found
