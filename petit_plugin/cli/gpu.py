"""What `petit bench` and `petit tune` share: where they run, and timing on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from petit_cli import output
from petit_plugin.backends.hip import solutions

SHAPES = {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}  # Llama-3.3-70B
ROWS = (1, 8, 16, 32, 64, 256)
FORMATS = ("nvfp4", "mxfp4")
GROUP = {"nvfp4": 16, "mxfp4": 32}


def has_gpu() -> bool:
    return torch.version.hip is not None and torch.cuda.is_available()


def emulated_archs(arch: str | None) -> tuple[str, ...]:
    if arch is None:
        return solutions.ARCHS
    if arch not in solutions.ARCHS:
        raise output.UsageError(f"--arch {arch}: there are kernels for {', '.join(solutions.ARCHS)}")
    return (arch,)


def formats(chosen: str | None) -> tuple[str, ...]:
    return FORMATS if chosen is None else (chosen,)


def parse_shape(text: str) -> tuple[int, int]:
    """ "N,K" as numbers."""
    try:
        n, k = (int(part) for part in text.split(","))
    except ValueError:
        raise output.UsageError(f"--shape {text}: expected N,K, for example 8192,8192") from None
    if n < 1 or k < 32 or k % 32:
        raise output.UsageError(f"--shape {text}: N is at least 1 and K a multiple of 32")
    return n, k


def random_weight(fmt: str, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """Checkpoint tensors with random codes and scales near 1."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    low, high = (0x30, 0x40) if fmt == "nvfp4" else (124, 130)
    return codes, torch.randint(low, high, (n, k // GROUP[fmt]), dtype=torch.uint8)


def time_on_gpu(run: Callable[[], object], repeats: int = 30) -> float:
    """Median seconds of one call, each after the caches have been swept by a 512 MB write."""
    sweep = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    run()
    seconds: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sweep.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return float(statistics.median(seconds))
