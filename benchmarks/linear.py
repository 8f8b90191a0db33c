"""pp.linear beside torch's F.linear in BF16 and in float32, on this machine, in one run.

    python -m benchmarks.linear [--quick] [--json] [--format nvfp4] [--threads N] [--shapes 4096x14336] [--rows 1 4 16]

All sides multiply by the same numbers: torch gets the packed weight dequantised. A repetition runs each side once, in
turn, so that the others' weights (117 MB to 1.9 GB) have driven ours out of the caches. Times are medians of 7, or of
as many as fit into the time limit of one case; the table says how many. Two rooflines are measured in the same run:
reading memory (the best of several reductions over 512 MB) and multiplying (the best large torch.mm in either type).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

import petit_plugin as pp
from petit_plugin import _native

SHAPES = [(4096, 14336), (8192, 8192), (57344, 8192)]
ROWS = [1, 4, 16, 64, 128, 512]
GROUP = {"nvfp4": 16, "mxfp4": 32}
# What two cores with AVX-512-BF16 are meant to reach against torch's BF16 on the same cores.
GOALS = {1: 3.5, 4: 2.5, 16: 1.4, 64: 1.0, 128: 0.9, 512: 0.9}


@dataclass
class Row:
    n: int
    k: int
    m: int
    ours_ms: float
    bf16_ms: float | None
    float32_ms: float | None
    repeats: dict[str, int]
    ratio_bf16: float | None
    ratio_float32: float | None
    read_share: float  # packed bytes per second, of the bandwidth measured in this run
    compute_share: float  # of the multiply-add rate measured in this run


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def read_bandwidth(repeats: int) -> float:
    """Bytes per second of reading 512 MB that are in no cache."""
    data = torch.ones(64 << 20, dtype=torch.float64)
    same = data.view(torch.float32)
    ways = (data.sum, data.amax, lambda: torch.dot(data, data), same.amax, lambda: torch.linalg.vector_norm(same))
    best = min(timed(way) for _ in range(repeats) for way in ways)
    return data.nbytes / best


def multiply_rate(repeats: int) -> tuple[float, str]:
    """Floating-point operations per second of a large torch.mm, and the type that is fastest."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        rate = 0.0
        for size in (512, 2048):
            if size > 512 and rate < 2e10:
                break  # a type that this CPU cannot multiply: seconds a call
            a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
            best = min(timed(functools.partial(torch.mm, a, b)) for _ in range(repeats + 1))
            rate = max(rate, 2 * size**3 / best)
        results.append((rate, str(dtype).removeprefix("torch.")))
    return max(results)


def available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def fit(n: int, k: int) -> int:
    """The largest number of rows, by halving, whose three copies take two thirds of the free memory."""
    while n > 1024 and n * k * 7 > available_bytes() * 2 // 3:
        n //= 2
    return n


def random_weight(fmt: str, n: int, k: int) -> pp.PackedWeight:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if fmt == "nvfp4":
        scale = torch.randint(0x30, 0x40, (n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
        return pp.pack_nvfp4(codes, scale, torch.tensor(1 / 64))
    return pp.pack_mxfp4(codes, torch.randint(118, 122, (n, k // 32), dtype=torch.uint8))


def measure(sides: dict[str, Callable[[], Any]], repeats: int, limit: float) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds and repetitions of each side, alternated; a side stops when it has used up `limit` seconds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            if not times[name] or sum(times[name]) + statistics.median(times[name]) <= limit:
                times[name].append(timed(run))
    return {k: statistics.median(v) for k, v in times.items()}, {k: len(v) for k, v in times.items()}


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Guards against timing a wrong result; accuracy is the tests' business."""
    error = (y.float() - expected.float()).norm() / expected.float().norm()
    if not error < 2e-2:
        raise RuntimeError(f"pp.linear and F.linear differ by {error:.3g} (relative norm)")


def bench_shape(n: int, k: int, rows: list[int], options: argparse.Namespace, roof: dict[str, float]) -> list[Row]:
    weight = random_weight(options.format, n, k)
    packed = sum(tensor.nbytes for tensor in weight.tensors().values())
    bf16, float32 = weight.dequantize(torch.bfloat16), weight.dequantize(torch.float32)
    result = []
    for m in rows:
        x = torch.randn(m, k).to(torch.bfloat16)
        x32 = x.float()
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda x=x: pp.linear(x, weight),
            "float32": lambda x32=x32: F.linear(x32, float32),
            "bf16": lambda x=x: F.linear(x, bf16),
        }
        check(pp.linear(x, weight), F.linear(x32, float32))  # warms both up, too
        seconds, repeats = measure(sides, options.repeats, options.limit)
        ours = seconds["ours"]
        row = Row(
            n, k, m, ours * 1e3, seconds["bf16"] * 1e3, seconds["float32"] * 1e3, repeats,
            seconds["bf16"] / ours, seconds["float32"] / ours,
            packed / ours / roof["read"], 2 * m * n * k / ours / roof["multiply"],
        )  # fmt: skip
        result.append(row)
        if not options.json:
            print(format_row(row, options.repeats), flush=True)
    return result


HEADER = (
    f"{'N':>6} {'K':>6} {'M':>4} | {'petit ms':>9} {'BF16 ms':>10} {'F32 ms':>9} | {'x BF16':>7} {'goal':>5} "
    f"{'x F32':>6} | {'read':>5} {'mul':>5}"
)


def format_row(row: Row, repeats: int) -> str:
    fewer = ", ".join(f"{side} {count}" for side, count in row.repeats.items() if count < repeats)
    goal = f"{GOALS[row.m]:.1f}" if row.m in GOALS else ""
    return (
        f"{row.n:>6} {row.k:>6} {row.m:>4} | {row.ours_ms:>9.2f} {row.bf16_ms:>10.2f} {row.float32_ms:>9.2f} | "
        f"{row.ratio_bf16:>7.2f} {goal:>5} {row.ratio_float32:>6.2f} | {row.read_share:>5.0%} {row.compute_share:>5.0%}"
        + (f"  (repeats: {fewer})" if fewer else "")
    )


def cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.linear", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--format", choices=sorted(GROUP), default="nvfp4")
    parser.add_argument("--threads", type=int, default=0, help="default: torch.get_num_threads()")
    parser.add_argument("--shapes", nargs="+", metavar="NxK")
    parser.add_argument("--rows", nargs="+", type=int, metavar="M")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--limit", type=float, default=8.0, help="seconds one side of one case may take (one run at least)"
    )
    parser.add_argument("--quick", action="store_true", help="one small shape, 3 repeats")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats = min(options.repeats, 3)
        options.limit = min(options.limit, 1.0)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = [(4096, 4096)] if options.quick else SHAPES
    if options.shapes:
        shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes)]
    rows = options.rows or ([1, 4, 16, 64] if options.quick else ROWS)
    read = read_bandwidth(options.repeats)
    multiply, fastest = multiply_rate(options.repeats)
    machine = {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "isa": _native.isa_name(_native.best_isa()),
        "torch": torch.__version__,
        "format": options.format,
        "read_gb_per_s": read / 1e9,
        "multiply_gflop_per_s": multiply / 1e9,
        "multiply_type": fastest,
        "load_average": os.getloadavg()[0],
    }
    if not options.json:
        print(
            f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['threads']} threads, petit {options.format} on "
            f"{machine['isa']}, torch {torch.__version__}, load {machine['load_average']:.1f}\n"
            f"measured here: read {read / 1e9:.1f} GB/s, multiply {multiply / 1e9:.0f} GFLOP/s ({fastest} torch.mm)\n"
            "'read' is the packed weight over our time, 'mul' the multiply-adds over our time, as shares of those;\n"
            f"'goal' is for two cores with AVX-512-BF16\n{HEADER}"
        )
    results = []
    for n, k in shapes:
        results += bench_shape(fit(n, k), k, rows, options, {"read": read, "multiply": multiply})
    if options.json:
        print(json.dumps({"machine": machine, "results": [asdict(row) for row in results]}, indent=2))


if __name__ == "__main__":
    main()
