"""`petit inspect`: what a checkpoint holds, from its configuration and headers (and its scales, unless --quick)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from petit_cli import output
from petit_cli.output import collapse, size
from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_plugin.checkpoints.safetensors_files import FLOATS
from petit_plugin.checkpoints.values import list_of_str
from petit_plugin.cli import model_path


def report(path: Path, quick: bool = False) -> dict[str, Any]:
    """Everything `petit inspect --json` prints, as plain objects. Raises when there is nothing to describe."""
    checkpoint = Checkpoint(path)
    spec = checkpoint.spec
    problems = list(checkpoint.problems)
    if not quick:
        from petit_plugin.checkpoints.data_checks import scale_problems

        problems += [p for layer in checkpoint.layers for p in scale_problems(checkpoint, layer)]
    layers = [
        {
            "name": layer.name,
            "format": layer.format.format,
            "algo": layer.format.algo,
            "n": layer.n,
            "k": layer.k,
            "experts": layer.experts,
            "bytes": layer.nbytes,
            "pre_quant_scale": any(e.name.endswith("pre_quant_scale") for e in layer.extras),
        }
        for layer in checkpoint.layers
    ]
    fp4_bytes = sum(layer.nbytes for layer in checkpoint.layers)
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    as_bf16 = total - fp4_bytes + 2 * sum(layer.numel for layer in checkpoint.layers)
    extras: dict[str, int] = {}
    for layer in checkpoint.layers:
        for extra in layer.extras:
            suffix = extra.name.removeprefix(layer.name).lstrip("._")
            if suffix.startswith("input"):  # calibration for 4-bit activations; activations stay 16-bit here
                extras[suffix] = extras.get(suffix, 0) + 1
    plain = [n.removesuffix(".weight") for n, t in checkpoint.tensors.items() if _is_plain_matrix(n, t.dtype, t.shape)]
    refused = [{"layer": layer, "reason": reason} for layer, reason in checkpoint.refused]
    architectures = list_of_str(checkpoint.config, "architectures")
    return {
        "schema": 1,
        "model": str(path),
        "ok": not problems and not refused,
        "architecture": architectures[0] if architectures else None,
        "dialect": spec.dialect,
        "producer": spec.producer,
        "formats": sorted(spec.formats),
        "kv_cache": spec.kv_cache,
        "summary": {
            "fp4_layers": len(layers),
            "fp4_parameters": sum(layer.numel for layer in checkpoint.layers),
            "fp4_bytes": fp4_bytes,
            "total_bytes": total,
            "bf16_bytes": as_bf16,
            "saved_bytes": as_bf16 - total,
        },
        "layers": layers,
        "foreign": [{"name": n, "algo": f.algo} for n, f in checkpoint.foreign.items()],
        "unquantized": plain,
        "unquantized_by_headers": sorted(n for n in spec.unquantized if "embed" not in n.rpartition(".")[2]),
        "ignored_tensors": extras,
        "refused": refused,
        "vllm": {"ok": not _vllm_gaps(checkpoint), "not_yet": _vllm_gaps(checkpoint)},
        "problems": problems,
        "warnings": list(spec.warnings),
    }


def _vllm_gaps(checkpoint: Checkpoint) -> list[str]:
    """What the vLLM plugin of this version does not serve, though the kernels and `petit verify` handle it."""
    gaps = []
    if checkpoint.spec.dialect != "modelopt":
        gaps.append(f"the {checkpoint.spec.dialect} dialect")
    if any(layer.experts is not None for layer in checkpoint.layers):
        gaps.append("all experts in one tensor")
    if any(e.name.endswith("pre_quant_scale") for layer in checkpoint.layers for e in layer.extras):
        gaps.append("pre_quant_scale")
    gaps += [f"{algo} layers beside FP4" for algo in sorted({f.algo for f in checkpoint.foreign.values()})]
    return gaps


def _is_plain_matrix(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    return dtype in FLOATS and len(shape) == 2 and name.endswith(".weight")


def _layer_table(found: dict[str, Any]) -> Table:
    table = Table(title="FP4 layers", title_justify="left")
    for heading in ("layer", "format", "N", "K", "count", "on disk", "in BF16"):
        table.add_column(heading, justify="left" if heading in ("layer", "format") else "right", overflow="fold")
    by_name = {layer["name"]: layer for layer in found["layers"]}
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for layer in found["layers"]:
        kinds.setdefault((layer["format"], layer["algo"], layer["n"], layer["k"]), []).append(layer["name"])
    rows = [(label, members) for names in kinds.values() for label, members in collapse(names)]
    for label, members in sorted(rows):
        first = by_name[members[0]]
        matrices = sum(by_name[m]["experts"] or 1 for m in members)
        table.add_row(
            label,
            first["format"] if first["algo"].lower() == first["format"] else f"{first['format']} ({first['algo']})",
            str(first["n"]),
            str(first["k"]),
            str(matrices),
            size(sum(by_name[m]["bytes"] for m in members)),
            size(2 * matrices * first["n"] * first["k"]),
        )
    return table


def _backend_line(found: dict[str, Any]) -> str:
    from petit_cli.machine import cpu_kernel

    kernel, why = cpu_kernel()
    runs = f"CPU, {kernel} kernels" if kernel else f"nothing on this machine ({why})"
    padded = sorted({f"N {layer['n']} to {-(-layer['n'] // 16) * 16}" for layer in found["layers"] if layer["n"] % 16})
    return runs + (f"; rows padded: {', '.join(padded)}" if padded else "")


def print_text(found: dict[str, Any]) -> None:
    console = output.console()
    numbers = found["summary"]
    console.print(f"[bold]{found['model']}[/bold]", soft_wrap=True)
    console.print(
        f"{found['architecture']}, {found['dialect']} ({found['producer']}), "
        f"KV cache {found['kv_cache'] or 'not quantized'}"
    )
    if found["layers"]:
        console.print(_layer_table(found))
    ratio = numbers["bf16_bytes"] / numbers["total_bytes"] if numbers["total_bytes"] else 1.0
    console.print(
        f"{numbers['fp4_layers']} FP4 layers. {size(numbers['total_bytes'])} on disk, {size(numbers['bf16_bytes'])} "
        f"with those layers in BF16: {size(numbers['saved_bytes'])} saved, {ratio:.2f}x smaller."
    )
    console.print(f"Would run on: {_backend_line(found)}", markup=False, soft_wrap=True)
    gaps = found["vllm"]["not_yet"]
    console.print(
        f"vLLM plugin: {'not yet: ' + ', '.join(gaps) if gaps else 'serves it'}", markup=False, soft_wrap=True
    )
    for title, names in (
        ("Not quantized", found["unquantized"]),
        ("Not quantized although the config does not exclude it", found["unquantized_by_headers"]),
    ):
        if names:
            console.print(f"{title}: " + ", ".join(label for label, _ in collapse(names)), markup=False, soft_wrap=True)
    for algo in sorted({f["algo"] for f in found["foreign"]}):
        names = [f["name"] for f in found["foreign"] if f["algo"] == algo]
        text = ", ".join(label for label, _ in collapse(names))
        console.print(f"Left to the framework ({algo}): {text}", markup=False, soft_wrap=True)
    for suffix, count in found["ignored_tensors"].items():
        console.print(f"Ignored: {count} x {suffix} (activations are not quantized)", markup=False)
    for warning in found["warnings"]:
        output.say(f"warning: {warning}")
    for entry in found["refused"]:
        output.say(f"refused: {entry['reason']}")
    for problem in found["problems"]:
        output.say(f"error: {problem}")


def run(model: str, as_json: bool, quick: bool) -> None:
    path = model_path.resolve(model)
    try:
        found = report(path, quick)
    except ValueError as error:
        if as_json:
            output.print_json({"schema": 1, "model": str(path), "ok": False, "problems": [str(error)]})
            raise typer.Exit(1) from None
        raise
    if as_json:
        output.print_json(found)
    else:
        print_text(found)
    if not found["ok"]:
        raise typer.Exit(1)
