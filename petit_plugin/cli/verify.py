"""`petit verify`: every FP4 matrix through the kernels' layout, against the reference.

For slices of rows of each matrix: the packed weight must give the checkpoint's tensors back bit for bit, its
dequantized values must equal the reference's, and a small product must be within the numerics contract of a float64
product.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from petit_cli import output
from petit_cli.output import collapse
from petit_plugin.checkpoints.checkpoint import Checkpoint, Fp4Matrix
from petit_plugin.checkpoints.layers import Fp4Layer
from petit_plugin.cli import model_path
from petit_plugin.cli.workers import Workers, workers

if TYPE_CHECKING:
    import torch

    from petit_plugin import PackedWeight

SLICE_ELEMENTS = 8 << 20
# (type of x and y, rows of x, c): a few rows run other kernels than many. The numerics contract is
# |y - ref| <= 1/2 ulp(ref) + c * sum |x w|.
PRODUCTS = (("float32", 3, 4e-6), ("bfloat16", 20, 2e-6))


def check_matrix(matrix: Fp4Matrix, layer: Fp4Layer, generator: torch.Generator) -> str | None:
    """One sentence about what is wrong with `matrix`, or None."""
    from petit_plugin.checkpoints.data_checks import scale_problem

    problem = scale_problem(matrix, layer)
    if problem is not None:
        return problem
    step = max(1, SLICE_ELEMENTS // layer.k)
    for start in range(0, layer.n, step):
        problem = _check_rows(matrix, layer, slice(start, min(start + step, layer.n)), generator)
        if problem is not None:
            return f"layer {matrix.name}, rows from {start}: {problem}"
    return None


def _check_rows(matrix: Fp4Matrix, layer: Fp4Layer, rows: slice, generator: torch.Generator) -> str | None:
    import torch

    import petit_plugin as pp
    from petit_plugin.formats import dequantize_mxfp4, dequantize_nvfp4

    weight, scale = matrix.weight[rows], matrix.weight_scale[rows]
    try:
        if layer.format.format == "nvfp4":
            factor = matrix.global_scale
            assert factor is not None
            packed = pp.pack_nvfp4(weight, scale, factor)
            exact = dequantize_nvfp4(weight, scale.view(torch.uint8), factor, torch.float64)
        else:
            packed = pp.pack_mxfp4(weight, scale)
            exact = dequantize_mxfp4(weight, scale.view(torch.uint8), torch.float64)
    except (TypeError, ValueError) as error:
        return f"cannot be packed: {error}"
    # NaN scales of zero blocks are the only place where the reference gives NaN; the packed weight holds zeros there.
    exact = torch.nan_to_num(exact, nan=0.0, posinf=float("inf"), neginf=-float("inf"))
    if not torch.equal(packed.dequantize(torch.float64), exact):
        return "the packed weight dequantizes to other values than the checkpoint's"
    if not _round_trip(packed, weight, scale):
        return "the packed weight does not give the checkpoint's tensors back"
    for dtype, count, c in PRODUCTS:
        x = torch.randn(count, layer.k, generator=generator).to(getattr(torch, dtype))
        problem = product_problem(x.double(), pp.linear(x, packed), exact, c)
        if problem is not None:
            return f"{dtype}, {count} rows of x: {problem}"
    return None


def product_problem(x: torch.Tensor, y: torch.Tensor, exact: torch.Tensor, c: float) -> str | None:
    """What is wrong with y [M, N] as the product of x [M, K] and exact [N, K] (both float64), or None."""
    import torch

    info = torch.finfo(y.dtype)
    result, reference = y.double(), x @ exact.T
    ulp = info.eps * torch.exp2(torch.frexp(reference.abs().clamp(min=info.tiny)).exponent.double() - 1)
    bound = ulp / 2 + c * (x.abs() @ exact.abs().T)
    limit = info.max * (1 + info.eps / 4)  # rounding to nearest gives infinity from here on
    overflow = result.isinf() & (result.sign() == reference.sign()) & (reference.abs() + bound >= limit)
    wrong = ~(((result - reference).abs() <= bound) | overflow)  # a NaN is wrong, too
    if not bool(wrong.any()):
        return None
    if not bool(result[wrong].isfinite().all()):
        bad = result[wrong & ~result.isfinite()]
        return f"a product is {float(bad[0])}"
    worst = float(((result - reference).abs() / bound)[wrong].max())
    return f"a product is {worst:.3g} times further from float64 than the numerics contract allows"


def _round_trip(packed: PackedWeight, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether unpacking gives the same bytes, but for what packing makes canonical (sign and NaN of block scales)."""
    import torch

    back, stored = packed.unpack(), scale.view(torch.uint8)
    is_nvfp4 = packed.meta.format == "nvfp4"
    canonical = (stored >= 128) | (stored == 0x7F) if is_nvfp4 else stored == 255
    same_scale = (back.weight_scale.view(torch.uint8) == stored) | canonical
    blocks = (back.weight == weight).view(*stored.shape, -1).all(-1) | canonical
    return bool(same_scale.all()) and bool(blocks.all())


def results(checkpoint: Checkpoint, pool: Workers) -> Iterator[dict[str, Any]]:
    """One entry for every matrix: {"name", "format", "n", "k", "ok", "problem"}."""
    import torch

    def check(layer: Fp4Layer) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(zlib.crc32(layer.name.encode()))
        entries = []
        for matrix in checkpoint.matrices(layer):
            pool.check()
            problem = check_matrix(matrix, layer, generator)
            entry = {"name": matrix.name, "format": layer.format.format, "n": layer.n, "k": layer.k}
            entries.append(entry | {"ok": problem is None, "problem": problem})
        return entries

    for entries in pool.map(check, checkpoint.layers):
        yield from entries


def run(model: str, as_json: bool) -> None:
    path = model_path.resolve(model)
    began = time.monotonic()
    try:
        checkpoint = Checkpoint(path)
    except ValueError as error:
        if as_json:
            output.print_json({"schema": 1, "model": str(path), "ok": False, "problems": [str(error)], "layers": []})
            raise typer.Exit(1) from None
        raise
    problems = [*checkpoint.problems, *(reason for _, reason in checkpoint.refused)]
    with workers() as pool:
        total = sum(layer.experts or 1 for layer in checkpoint.layers)
        found = list(_with_progress(results(checkpoint, pool), total, as_json))
    problems += [entry["problem"] for entry in found if not entry["ok"]]
    ok = not problems
    if as_json:
        output.print_json({"schema": 1, "model": str(path), "ok": ok, "problems": problems, "layers": found})
    else:
        console = output.console()
        for fmt, n, k in dict.fromkeys((e["format"], e["n"], e["k"]) for e in found):
            names = [e["name"] for e in found if e["ok"] and (e["format"], e["n"], e["k"]) == (fmt, n, k)]
            for label, members in collapse(names, expert_only=True):
                count = f" x {len(members)}" if len(members) > 1 else ""
                console.print(f"ok    {label}  {fmt} [{n}, {k}]{count}", markup=False, highlight=False, soft_wrap=True)
        for problem in problems:
            output.say(f"error: {problem}")
        good = sum(e["ok"] for e in found)
        console.print(
            f"{good} FP4 matrices verified, {len(problems)} problems, {time.monotonic() - began:.1f} s", highlight=False
        )
    if not ok:
        raise typer.Exit(1)


def _with_progress(entries: Iterator[dict[str, Any]], total: int, quiet: bool) -> Iterator[dict[str, Any]]:
    console = output.error_console()
    if quiet or not console.is_terminal:
        yield from entries
        return
    from rich.progress import track

    yield from track(entries, "verifying", total=total, console=console, transient=True)
