"""Numbers at the edge: every code x scale, tiny and huge activations, wide rows, Inf and NaN and their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device.harness import pack_checkpoint, random_packed
from fixtures import oracle
from numerics import Checkpoint, assert_close, random_activations, reference

DTYPES = (torch.bfloat16, torch.float16)
MAGNITUDES = {
    torch.bfloat16: (1.0, 2.0**-133, 2.0**-126, 2.0**-60, 2.0**100),
    torch.float16: (1.0, 2.0**-24, 2.0**-14, 60000.0),
}


def all_codes(fmt, scales):
    """A layer whose blocks hold all 16 codes, one row a scale byte."""
    group = 16 if fmt == "nvfp4" else 32
    block = np.tile(np.array([(2 * i + 1) << 4 | 2 * i for i in range(8)], dtype=np.uint8), group // 16)
    n = len(scales)
    weight = np.tile(block, (n, 2))
    scale = np.repeat(np.array(scales, dtype=np.uint8)[:, None], 2, 1)
    if fmt == "nvfp4":
        factor = np.ones(1, np.float32)
        return Checkpoint(fmt, weight, scale, factor, oracle.dequantize_nvfp4(weight, scale, factor))
    return Checkpoint(fmt, weight, scale, None, oracle.dequantize_mxfp4(weight, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("mixed", [False, True])
def test_one_hot_over_every_code_and_scale(machine, fmt, dtype, mixed, rng):
    """One-hot activations pick single products, so nothing can hide in a sum. `mixed`: scales shuffled over rows, which
    puts both extremes of the format into one row."""
    scales = list(range(0x7F)) if fmt == "nvfp4" else list(range(60, 190))
    c = all_codes(fmt, scales)
    if mixed:
        scale = c.scale.copy()
        rng.shuffle(scale[:, 1])
        values = (
            oracle.dequantize_nvfp4(c.weight, scale, c.global_scale)
            if fmt == "nvfp4"
            else oracle.dequantize_mxfp4(c.weight, scale)
        )
        c = c._replace(scale=scale, values=values)
    w = pack_checkpoint(c, machine.arch)
    k = c.values.shape[1]
    for magnitude in MAGNITUDES[dtype]:
        chosen = rng.choice(k, min(k, 32), replace=False)
        x = torch.zeros(len(chosen), k, dtype=dtype)
        x[torch.arange(len(chosen)), torch.from_numpy(chosen)] = magnitude * (-1) ** int(rng.integers(2))
        assert_close(machine.linear(x, w, cus=2), reference(x, c.values), norm=False)


@pytest.mark.parametrize("m", [4, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_wider_than_one_plane(machine, dtype, m, rng):
    """Activations spread over the whole exponent range, with zero weights under the largest ones."""
    n, k = 24, 256
    w, values = random_packed(rng, "nvfp4", n, k, machine.arch, list(range(0x30, 0x50)))
    low, high = (-130, 60) if dtype == torch.bfloat16 else (-24, 14)
    exponents = rng.uniform(low, high, (m, k))
    x = torch.from_numpy(np.exp2(exponents) * rng.choice([-1.0, 1.0], (m, k))).to(dtype)
    keep = np.ones((m, k), bool)
    keep[: m // 2] = exponents[: m // 2] < low + (high - low) / 3  # the other half has small numbers only
    x = torch.where(torch.from_numpy(keep), x, torch.zeros((), dtype=dtype))
    assert_close(machine.linear(x, w, cus=2), reference(x, values), norm=False)


@pytest.mark.parametrize("m", [2, 33])
def test_large_activation_over_zero_weight(machine, m, rng):
    """The row's maximum meets only zero weights: what remains is far below it and must survive."""
    c = all_codes("nvfp4", list(range(0x38, 0x48)))
    w = pack_checkpoint(c, machine.arch)
    k = c.values.shape[1]
    x = torch.zeros(m, k, dtype=torch.bfloat16)
    x[:, 0] = 2.0**90  # code 0
    x[:, 3] = torch.from_numpy(np.exp2(rng.uniform(-40, 0, m))).to(torch.bfloat16)
    assert_close(machine.linear(x, w, cus=1), reference(x, c.values), norm=False)


@pytest.mark.parametrize("m", [5, 20, 36])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_row(machine, dtype, m, rng):
    w, values = random_packed(rng, ("nvfp4", "mxfp4")[rng.integers(2)], 70, 160, machine.arch, list(range(0x70, 0x78)))
    x = random_activations(rng, (m, 160), dtype)
    clean = machine.linear(x, w, cus=2)
    dirty = x.clone()
    dirty[1, 7] = float("nan")
    dirty[3, 150] = float("inf")
    dirty[4] = 0
    y = machine.linear(dirty, w, cus=2)
    others = [i for i in range(m) if i not in (1, 3, 4)]
    assert torch.equal(y[others].view(torch.int16), clean[others].view(torch.int16))
    assert bool(y[1].isnan().all())
    assert bool((y[4] == 0).all())
    assert_close(y, reference(dirty, values), norm=False)


def test_row_scales_and_overflow(machine, rng):
    """Row scales far from 1 meet activations far from 1; results beyond the type become infinite."""
    c = all_codes("nvfp4", list(range(0x30, 0x50)))
    factor = np.exp2(rng.uniform(-120, 120, c.values.shape[0])).astype(np.float32)
    c = c._replace(global_scale=factor, values=oracle.dequantize_nvfp4(c.weight, c.scale, factor))
    w = pack_checkpoint(c, machine.arch)
    x = random_activations(rng, (6, c.values.shape[1]), torch.float32)
    x = (x * torch.tensor([[1e-30], [1e-12], [1.0], [1e12], [1e25], [1e35]])).to(torch.bfloat16)
    assert_close(machine.linear(x, w, cus=1), reference(x, c.values), norm=False)
