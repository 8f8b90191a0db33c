"""Milliseconds per token at batch 1 in vLLM: SmolLM2-135M in FP4 through petit against the same model in BF16.

    python benchmarks/vllm_latency.py [--runs 7] [--tokens 128] [--format nvfp4] [--limit 1.05] [--json]

Run it with the Python of the environment that holds vLLM. Both servers are up at once, with the same flags and thread
binding; requests alternate between them, so that both see the same machine. An idle server does not compute; how much
processor time it took meanwhile is printed. A run is one streamed completion; its figure is the time between the first
and the last token, divided by the tokens between. With --limit, exit code 1 says that the ratio of medians exceeds it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import smollm2
from vllm_server import ServerError, VllmServer, free_port

PROMPT = "Once upon a time there was a lighthouse keeper who"
NAME = "model"


def ms_per_token(url: str, tokens: int) -> float:
    """One streamed greedy completion of exactly `tokens` tokens."""
    body = {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    times = []
    with (
        httpx.Client(trust_env=False, timeout=300) as client,
        client.stream("POST", f"{url}/completions", json=body) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    if len(times) < tokens // 2:
        raise ServerError(f"{url} streamed {len(times)} pieces for {tokens} tokens")
    return 1e3 * (times[-1] - times[0]) / (tokens - 1)


def cpu_seconds(group: int) -> float:
    """Processor time used so far by all processes of a process group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(servers: dict[str, VllmServer], runs: int, tokens: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """`runs` alternated runs after one that is not counted; each server's processor share while the other worked."""
    figures: dict[str, list[float]] = {name: [] for name in servers}
    idle: dict[str, list[float]] = {name: [] for name in servers}
    for run in range(runs + 1):
        for name, server in servers.items():
            others = {n: cpu_seconds(s.process_group) for n, s in servers.items() if n != name}
            started = time.perf_counter()
            value = ms_per_token(server.url, tokens)
            elapsed = time.perf_counter() - started
            if run == 0:
                continue
            figures[name].append(value)
            for other, before in others.items():
                idle[other].append((cpu_seconds(servers[other].process_group) - before) / elapsed)
    return figures, {name: statistics.median(values) for name, values in idle.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each (at least 5)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--format", choices=("nvfp4", "mxfp4"), default="nvfp4")
    parser.add_argument("--limit", type=float, help="largest allowed ratio FP4 / BF16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.runs < 5:
        parser.error("--runs must be at least 5")

    models = {"fp4": smollm2.fp4_checkpoint(args.format), "bf16": smollm2.bf16_checkpoint()}
    try:
        with contextlib.ExitStack() as stack:
            servers = {}
            for name, model in models.items():
                flags = ["--dtype", "bfloat16", "--served-model-name", NAME]
                flags += ["--quantization", "petit"] if name == "fp4" else []
                log = smollm2.DIRECTORY / f"latency-{name}.log"
                servers[name] = stack.enter_context(VllmServer(model, free_port(), log, flags))
            figures, idle = measure(servers, args.runs, args.tokens)
    except ServerError as error:
        print(f"vllm_latency: {error}", file=sys.stderr)
        return 1
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratio = medians["fp4"] / medians["bf16"]
    if args.json:
        result = {"ms_per_token": figures, "median": medians, "ratio": ratio, "idle_cpu_share": idle}
        print(json.dumps(result | {"tokens": args.tokens, "format": args.format}))
    else:
        print(f"SmolLM2-135M, vLLM with --enforce-eager, batch 1, {args.tokens} tokens, {args.runs} alternated runs")
        for name, label in (("fp4", f"petit {args.format}"), ("bf16", "BF16")):
            listed = " ".join(f"{value:.1f}" for value in figures[name])
            print(f"{label:12} {medians[name]:7.1f} ms/token   runs: {listed}   idle CPU share {idle[name]:.3f}")
        print(f"petit / BF16 {ratio:7.3f}")
    return 1 if args.limit is not None and ratio > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
