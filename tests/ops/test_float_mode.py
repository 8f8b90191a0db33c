"""torch.set_flush_denormal changes no result: every kernel keeps subnormals on every thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numerics import random_checkpoint

import petit_plugin as pp


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def with_flushing(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    assert torch.set_flush_denormal(True)
    try:
        return function()
    finally:
        torch.set_flush_denormal(False)


def subnormal(y: torch.Tensor) -> torch.Tensor:
    magnitude = y.view(torch.int32) & 0x7FFFFFFF
    return (magnitude > 0) & (magnitude < 0x00800000)


def packed(rng: np.random.Generator) -> tuple[pp.PackedWeight, np.ndarray]:
    c = random_checkpoint(rng, "nvfp4", 256, 64)
    weight, scale, _ = c.torch_arguments()
    values = c.values / c.global_scale.astype(np.float64)[:, None] * float(np.float32(1e-40))
    return pp.pack_nvfp4(weight, scale, torch.tensor(1e-40)), values


@pytest.mark.usefixtures("threads")
def test_dequantize(rng: np.random.Generator) -> None:
    w, values = packed(rng)
    y = with_flushing(lambda: w.dequantize(torch.float32))
    assert subnormal(y[:128]).any() and subnormal(y[128:]).any()
    assert torch.equal(y, torch.from_numpy(values.astype(np.float32)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("isa", ["portable", "avx2"])
@pytest.mark.parametrize("m", [1, 20])
def test_linear(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, isa: str, m: int) -> None:
    if pp._native.best_isa() == 0 and isa != "portable":
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setenv("PETIT_CPU_ISA", isa)
    w, _ = packed(rng)
    x = torch.from_numpy(rng.standard_normal((m, 64))).float()
    expected = pp.linear(x, w)
    assert subnormal(expected).any()
    assert torch.equal(with_flushing(lambda: pp.linear(x, w)), expected)


@pytest.mark.usefixtures("threads")
def test_exact_weights(rng: np.random.Generator) -> None:
    """Block scales from 2^-127 to 2^100 in one row: the float64 kernel."""
    c = random_checkpoint(rng, "mxfp4", 256, 64, scales=[0, 1, 227])
    w = pp.pack_mxfp4(*c.torch_arguments())
    assert w.meta.exact
    x = torch.zeros(2, 64)
    x[:, :32] = 1.0 if c.scale[:, 0].min() < 2 else 0.0
    expected = pp.linear(x, w)
    assert subnormal(expected).any()
    assert torch.equal(with_flushing(lambda: pp.linear(x, w)), expected)
