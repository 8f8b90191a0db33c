"""Gates on what is executed: vector instructions over everything launched, counted by the emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import assert_close, random_activations, reference

import petit_plugin as pp
from petit_plugin import formats
from petit_plugin.backends.hip import model, solutions

# VALU instructions per 8 weights at 16 rows of BF16 activations: conversion, GEMM, reduction and epilogue together.
BUDGET = {("gfx90a", "nvfp4"): 17, ("gfx90a", "mxfp4"): 17, ("gfx942", "nvfp4"): 16, ("gfx942", "mxfp4"): 16}
BUDGET |= {("gfx950", "nvfp4"): 13, ("gfx950", "mxfp4"): 7}
M = 16


@pytest.mark.parametrize("shape", [(8192, 8192), (57344, 8192)])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("arch", solutions.ARCHS)
def test_everything_launched_meets_its_budget(code_objects: Path, arch: str, fmt: str, shape: tuple[int, int]) -> None:
    with pp.emulated(arch) as device:
        counter = model.Counter(device)
        for chip in (c for c in model.CHIPS if c.arch == arch):
            solution = solutions.select(arch, chip.cus, fmt, "bf16", *shape, solutions.bucket(M), False)
            assert solution.role == "decode"
            estimate = model.estimate(counter, chip, solution, fmt, torch.bfloat16, *shape, M)
            assert 2 < estimate.valu_per_8_weights <= BUDGET[arch, fmt]  # a count of nothing would be less than 2


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("arch", solutions.ARCHS)
def test_the_scaled_slice_counts_what_a_whole_launch_counts(
    code_objects: Path, arch: str, fmt: str, rng: np.random.Generator
) -> None:
    n, k, cus = 384, 1792, 4
    c = getattr(pp, f"quantize_{fmt}")(torch.from_numpy(rng.standard_normal((n, k))).float() * 0.05)
    x = random_activations(rng, (M, k), torch.bfloat16)
    chip = model.Chip("small", arch, cus, 1.0, 1.0, 1.0)
    with pp.emulated(arch, cus=cus) as device:
        y = pp.linear(x, getattr(pp, f"pack_{fmt}")(*c))
        whole = device.counters()  # of the last launch: the GEMM after the activations' conversion
        counter = model.Counter(device)
        solution = solutions.select(arch, cus, fmt, "bf16", n, k, solutions.bucket(M), False)
        estimate = model.estimate(counter, chip, solution, fmt, torch.bfloat16, n, k, M)
        conversion = counter.conversion(fmt, torch.bfloat16, M, k)
    assert_close(y, reference(x, getattr(formats, fmt).dequantize(*c, dtype=torch.float64).numpy()))
    blocks = n * k * estimate.launch.m_blocks / 512  # of 8 weights a lane
    assert whole["valu"] == pytest.approx(estimate.valu_per_8_weights * blocks - conversion.valu, rel=0.03)
