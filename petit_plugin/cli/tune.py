"""`petit tune`: the best solution for each shape, timed on a GPU or by the emulator's model, as a solution file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import petit_plugin as pp
from petit_cli import output
from petit_plugin.backends import backend_for
from petit_plugin.backends.hip import model, solutions
from petit_plugin.backends.hip.backend import HipBackend
from petit_plugin.backends.hip.device import Device
from petit_plugin.backends.hip.solutions import Key, Solution
from petit_plugin.cli import gpu


def candidates(m: int) -> Iterator[Solution]:
    """Every kernel that does not waste more than half of its rows, on several grids."""
    for role, rows in solutions.SHAPES:
        if role == "dense" or (rows > 16 and rows >= 4 * m) or (role == "decode" and m > 2 * rows):
            continue
        for workgroups in (1, 2, 3, 4):
            for least in (2, 4, 8):
                yield Solution(role, rows, workgroups_per_cu=workgroups, min_units=least)


def _best(m: int, cost: Callable[[Solution], float]) -> tuple[Solution, float]:
    return min(((s, cost(s)) for s in candidates(m)), key=lambda pair: pair[1])


def _modelled_cost(counter: model.Counter, chip: model.Chip, fmt: str, n: int, k: int, m: int, s: Solution) -> float:
    return model.estimate(counter, chip, s, fmt, torch.bfloat16, n, k, m).seconds


def _measured_cost(device: Device, x: torch.Tensor, w: pp.PackedWeight, s: Solution | None) -> float:
    device.forced = s
    try:
        return gpu.time_on_gpu(partial(pp.linear, x, w))
    finally:
        device.forced = None


def modelled(
    archs: tuple[str, ...], formats: tuple[str, ...], shapes: list[tuple[int, int]], rows: tuple[int, ...]
) -> Iterator[tuple[Key, Solution, float, float]]:
    """(key, best solution, its seconds, the current choice's seconds), one chip an arch: the one with most CUs."""
    for arch in archs:
        chip = next(c for c in model.CHIPS if c.arch == arch)
        with pp.emulated(arch) as device:
            counter = model.Counter(device)
            for fmt in formats:
                for n, k in shapes:
                    for m in rows:
                        cost = partial(_modelled_cost, counter, chip, fmt, n, k, m)
                        bucket = solutions.bucket(m)
                        now = solutions.select(arch, chip.cus, fmt, "bf16", n, k, bucket, False)
                        found, seconds = _best(m, cost)
                        yield (arch, chip.cus, fmt, "bf16", n, k, bucket), found, seconds, cost(now)


def measured(
    formats: tuple[str, ...], shapes: list[tuple[int, int]], rows: tuple[int, ...]
) -> Iterator[tuple[Key, Solution, float, float]]:
    for fmt in formats:
        for n, k in shapes:
            tensors = [t.cuda() for t in gpu.random_weight(fmt, n, k)]
            w = pp.pack_nvfp4(tensors[0], tensors[1], 1.0) if fmt == "nvfp4" else pp.pack_mxfp4(tensors[0], tensors[1])
            backend = backend_for(w.meta.arch)
            assert isinstance(backend, HipBackend)
            device = backend.device(w.device, w.meta.arch)
            for m in rows:
                x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")

                cost = partial(_measured_cost, device, x, w)
                found, seconds = _best(m, cost)
                yield (device.arch, device.cus, fmt, "bf16", n, k, solutions.bucket(m)), found, seconds, cost(None)


def run(out: Path | None, arch: str | None, fmt: str | None, shapes: list[str], rows: list[int], show: bool) -> None:
    if show:
        print(solutions.as_text(solutions.table()))
        return
    if out is None:
        raise output.UsageError("--out FILE is needed (or --show, to print the table in use)")
    chosen = [gpu.parse_shape(text) for text in shapes] or list(gpu.SHAPES.values())
    m = tuple(rows) or gpu.ROWS
    if any(value < 1 or value > solutions.DENSE_ABOVE for value in m):
        raise output.UsageError(f"--rows is in 1 .. {solutions.DENSE_ABOVE}")
    on_gpu = gpu.has_gpu() and arch is None
    print("measured on this GPU" if on_gpu else "model, not a measurement: counts of the emulator, published rates")
    entries: dict[Key, Solution] = {}
    try:
        results = (
            measured(gpu.formats(fmt), chosen, m)
            if on_gpu
            else modelled(gpu.emulated_archs(arch), gpu.formats(fmt), chosen, m)
        )
        for key, solution, seconds, before in results:
            entries[key] = solution
            print(f"{key}: {before * 1e6:.1f} -> {seconds * 1e6:.1f} us  {solution}", flush=True)
    except (RuntimeError, ValueError) as error:
        raise output.CheckFailed(str(error)) from None
    out.write_text(solutions.dump(entries))
    print(f"{len(entries)} solutions in {out}; use them with PETIT_SOLUTIONS={out}")
