"""`petit verify`: every FP4 matrix through the kernels' layout, against the reference.

For slices of rows of each matrix: the packed weight must give the checkpoint's tensors back bit for bit, its
dequantized values must equal the reference's, and a small product must be within the numerics contract of a float64
product.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from petit_plugin.checkpoints.checkpoint import Checkpoint, Fp4Matrix
from petit_plugin.checkpoints.layers import Fp4Layer
from petit_plugin.cli import model_path, output
from petit_plugin.cli.output import collapse

if TYPE_CHECKING:
    import torch

    from petit_plugin import PackedWeight

SLICE_ELEMENTS = 8 << 20
GEMM_ROWS = 3
# |y - ref| <= 4e-6 * sum |x w| for float32 results; the rounding of y itself is far below it.
GEMM_BOUND = 4e-6


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
    exact = torch.nan_to_num(exact, nan=0.0)
    if not torch.equal(packed.dequantize(torch.float64), exact):
        return "the packed weight dequantizes to other values than the checkpoint's"
    if not _round_trip(packed, weight, scale):
        return "the packed weight does not give the checkpoint's tensors back"
    x = torch.randn(GEMM_ROWS, layer.k, generator=generator)
    y = pp.linear(x, packed).double()
    reference = x.double() @ exact.T
    bound = GEMM_BOUND * (x.double().abs() @ exact.abs().T) + torch.finfo(torch.float32).tiny
    wrong = (y - reference).abs() > bound
    overflow = reference.abs() > torch.finfo(torch.float32).max
    if bool((wrong & ~overflow).any()):
        worst = float(((y - reference).abs() / bound)[~overflow].max())
        return f"a product is {worst:.3g} times further from float64 than the numerics contract allows"
    return None


def _round_trip(packed: PackedWeight, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether unpacking gives the same bytes, but for what packing makes canonical (sign and NaN of block scales)."""
    import torch

    back, stored = packed.unpack(), scale.view(torch.uint8)
    is_nvfp4 = packed.meta.format == "nvfp4"
    canonical = (stored >= 128) | (stored == 0x7F) if is_nvfp4 else stored == 255
    same_scale = (back.weight_scale.view(torch.uint8) == stored) | canonical
    blocks = (back.weight == weight).view(*stored.shape, -1).all(-1) | canonical
    return bool(same_scale.all()) and bool(blocks.all())


def results(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """One entry for every matrix: {"name", "format", "n", "k", "ok", "problem"}."""
    import torch

    generator = torch.Generator().manual_seed(int.from_bytes(b"petit", "little"))
    for layer in checkpoint.layers:
        for matrix in checkpoint.matrices(layer):
            problem = check_matrix(matrix, layer, generator)
            yield {
                "name": matrix.name,
                "format": layer.format.format,
                "n": layer.n,
                "k": layer.k,
                "ok": problem is None,
                "problem": problem,
            }


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
    found = list(_with_progress(results(checkpoint), sum(layer.experts or 1 for layer in checkpoint.layers), as_json))
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
