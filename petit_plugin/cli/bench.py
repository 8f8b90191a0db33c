"""`petit bench`: linear layers of Llama-3.3-70B, timed on a GPU, or counted on the emulator and modelled per chip."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import petit_plugin as pp
from petit_cli import output
from petit_plugin.backends.hip import solutions
from petit_plugin.cli import gpu

HEAD = f"{'chip':17} {'format':6} {'layer':8} {'M':>4}"


def modelled(archs: tuple[str, ...], formats: tuple[str, ...], rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    from petit_plugin.backends.hip import model

    for arch in archs:
        with pp.emulated(arch) as device:
            counter = model.Counter(device)
            for fmt in formats:
                for layer, (n, k) in gpu.SHAPES.items():
                    for m in rows:
                        for chip in (c for c in model.CHIPS if c.arch == arch):
                            s = solutions.select(arch, chip.cus, fmt, "bf16", n, k, solutions.bucket(m), False)
                            e = model.estimate(counter, chip, s, fmt, torch.bfloat16, n, k, m)
                            yield {
                                "kind": "model",
                                "chip": chip.name,
                                "arch": arch,
                                "format": fmt,
                                "layer": layer,
                                "n": n,
                                "k": k,
                                "m": m,
                                "kernel": e.launch.kernel,
                                "seconds": e.seconds,
                                "bound": e.bound,
                                "bounds": e.bounds,
                                "hbm_roofline_share": e.least_hbm / e.seconds,
                                "valu_per_8_weights": e.valu_per_8_weights,
                                "bf16_seconds": e.bf16,
                                "speedup": e.bf16 / e.seconds,
                            }


def measured(formats: tuple[str, ...], rows: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    name = torch.cuda.get_device_name()
    for fmt in formats:
        for layer, (n, k) in gpu.SHAPES.items():
            tensors = [t.cuda() for t in gpu.random_weight(fmt, n, k)]
            w = pp.pack_nvfp4(tensors[0], tensors[1], 1.0) if fmt == "nvfp4" else pp.pack_mxfp4(tensors[0], tensors[1])
            dense = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
            for m in rows:
                x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
                ours = gpu.time_on_gpu(partial(pp.linear, x, w))
                theirs = gpu.time_on_gpu(partial(torch.nn.functional.linear, x, dense))
                yield {
                    "kind": "measured",
                    "chip": name,
                    "arch": w.meta.arch,
                    "format": fmt,
                    "layer": layer,
                    "n": n,
                    "k": k,
                    "m": m,
                    "seconds": ours,
                    "weight_bandwidth": w.nbytes / ours,
                    "bf16_seconds": theirs,
                    "speedup": theirs / ours,
                }


def _line(r: dict[str, Any]) -> str:
    head = f"{r['chip']:17} {r['format']:6} {r['layer']:8} {r['m']:4} {r['seconds'] * 1e6:9.1f}"
    tail = f"{r['bf16_seconds'] * 1e6:9.1f} {r['speedup']:6.2f}x"
    if r["kind"] == "measured":
        return f"{head} {r['weight_bandwidth'] / 1e12:7.2f} TB/s {tail}"
    b = {name: seconds * 1e6 for name, seconds in r["bounds"].items()}
    return (
        f"{head} {r['bound']:>5} {b['hbm']:8.1f} {b['valu']:8.1f} {b['mfma']:8.1f} {b['lds']:8.1f} "
        f"{r['hbm_roofline_share'] * 100:6.0f}% {tail}  {r['kernel']}"
    )


def run(arch: str | None, fmt: str | None, rows: list[int], as_json: bool) -> None:
    on_gpu = gpu.has_gpu() and arch is None
    chosen = tuple(rows) or gpu.ROWS
    if any(m < 1 or m > solutions.DENSE_ABOVE for m in chosen):
        raise output.UsageError(f"--rows is in 1 .. {solutions.DENSE_ABOVE}")
    try:
        entries = (
            measured(gpu.formats(fmt), chosen)
            if on_gpu
            else modelled(gpu.emulated_archs(arch), gpu.formats(fmt), chosen)
        )
        if as_json:
            output.print_json(list(entries))
            return
        if on_gpu:
            print("measured on this GPU, caches swept before each call; torch's BF16 linear beside it")
            print(
                f"{'chip':17} {'format':6} {'layer':8} {'M':>4} {'us':>9} {'weights':>12} {'BF16 us':>9} {'speedup':>7}"
            )
        else:
            print("model, not a measurement: counts of the emulator, published rates of each chip (microseconds)")
            names = f"{'model':>9} {'bound':>5} {'HBM':>8} {'VALU':>8} {'MFMA':>8} {'LDS':>8} {'of HBM':>7}"
            print(f"{HEAD} {names} {'BF16':>9} {'speedup':>7}  kernel")
        for entry in entries:
            print(_line(entry), flush=True)
    except (RuntimeError, ValueError) as error:
        raise output.CheckFailed(str(error)) from None
