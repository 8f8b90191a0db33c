"""fused_moe beside a BF16 loop over experts with torch's F.linear, on this machine, in one run.

    python benchmarks/moe.py [--shape qwen3-30b-a3b] [--format nvfp4] [--tokens 1 4 16 64] [--repeats 9] [--json]

Every repetition routes to other experts, so weights come from memory and not from a cache, and the two sides alternate.
Times are medians. "GB/s" is the packed bytes of the experts that were touched, divided by our time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import petit_plugin as pp


class Shape(NamedTuple):
    experts: int
    topk: int
    hidden: int
    intermediate: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
}
GROUPS = {"nvfp4": 16, "mxfp4": 32}


def random_experts(fmt: str, shape: Shape, generator: torch.Generator) -> pp.PackedExperts:
    """Random codes with block scales near 2^-5, packed."""
    e, _, h, i = shape
    group = GROUPS[fmt]

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)

    def scales(*size: int) -> torch.Tensor:
        low, high = (0x30, 0x40) if fmt == "nvfp4" else (120, 123)
        return torch.randint(low, high, size, dtype=torch.uint8, generator=generator)

    factor = {"w13_global_scale": 1 / 64, "w2_global_scale": 1 / 64} if fmt == "nvfp4" else {}
    return pp.pack_experts(
        *(fmt, codes(e, 2 * i, h // 2), scales(e, 2 * i, h // group)),
        *(codes(e, h, i // 2), scales(e, h, i // group)),
        **factor,
    )


def torch_loop(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """What a framework without a fused kernel runs: one pair of BF16 GEMMs for every expert that has tokens."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w13[expert]).chunk(2, dim=-1)
        y.index_add_(0, token, F.linear(F.silu(gate) * up, w2[expert]).float() * weights[token, slot, None])
    return y.to(x.dtype)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(
    experts: pp.PackedExperts,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shape: Shape,
    tokens: int,
    repeats: int,
    generator: torch.Generator,
) -> dict[str, float]:
    ours, theirs, touched, worst = [], [], [], 0.0
    for repeat in range(repeats + 1):
        x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
        ids = torch.rand(tokens, shape.experts, generator=generator).topk(shape.topk).indices
        weights = torch.rand(tokens, shape.topk, generator=generator).softmax(-1)
        results = {}

        def fused(x=x, weights=weights, ids=ids, results=results) -> None:
            results["ours"] = pp.fused_moe(x, experts, weights, ids)

        def loop(x=x, weights=weights, ids=ids, results=results) -> None:
            results["torch"] = torch_loop(x, w13, w2, weights, ids)

        a, b = seconds(fused), seconds(loop)
        if repeat:  # the first one warms both up
            ours.append(a)
            theirs.append(b)
            touched.append(ids.unique().numel() / shape.experts * experts.nbytes)
        error = (results["ours"].float() - results["torch"].float()).norm() / results["torch"].float().norm()
        worst = max(worst, float(error))
    ms, torch_ms = 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs)
    gbps = statistics.median(size / second / 1e9 for size, second in zip(touched, ours, strict=True))
    return {"tokens": tokens, "ms": ms, "torch_ms": torch_ms, "ratio": torch_ms / ms, "gbps": gbps, "difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=GROUPS, default="nvfp4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="a list of objects, one per number of tokens")
    options = parser.parse_args()
    shape, generator = SHAPES[options.shape], torch.Generator().manual_seed(options.seed)
    experts = random_experts(options.format, shape, generator)
    w13, w2 = experts.dequantize(torch.bfloat16)
    rows = [measure(experts, w13, w2, shape, tokens, options.repeats, generator) for tokens in options.tokens]
    if options.json:
        print(json.dumps([{"shape": options.shape, "format": options.format, **row} for row in rows], indent=1))
        return
    threads = torch.get_num_threads()
    print(
        f"{options.shape}: {shape.experts} experts, top-{shape.topk}, hidden {shape.hidden}, intermediate "
        f"{shape.intermediate}; {options.format} {experts.nbytes / 1e6:.0f} MB beside bfloat16 "
        f"{2 * (w13.numel() + w2.numel()) / 1e6:.0f} MB; {threads} threads"
    )
    print(f"{'tokens':>6} {'petit ms':>9} {'torch ms':>9} {'ratio':>6} {'GB/s':>6}")
    for row in rows:
        print(f"{row['tokens']:>6} {row['ms']:>9.2f} {row['torch_ms']:>9.2f} {row['ratio']:>6.2f} {row['gbps']:>6.1f}")
    worst = max(row["difference"] for row in rows)
    print(f"largest relative difference between the two results: {worst:.1e}")


if __name__ == "__main__":
    main()
