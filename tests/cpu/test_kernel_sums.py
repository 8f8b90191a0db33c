"""Sums whose terms lie far apart: what is left when the largest cancel, or meet zero weights."""

from __future__ import annotations

import kernel_library
import numpy as np
import pytest
import torch
from cases import Call, make_layer, run
from numerics import assert_close, random_activations, reference


@pytest.fixture(params=kernel_library.KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    kernel_library.require(request.param)
    return request.param


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 4, 20])
@pytest.mark.parametrize("k", [1024, 8192])
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_small_terms_beside_a_sum_that_cancels(
    kernel: str, fmt: str, m: int, k: int, at: str, rng: np.random.Generator
) -> None:
    """Two large terms that the bias takes away again: each addition after them may lose 2^-24 of what they give."""
    if kernel.endswith("-simde") and k > 1024:
        k = 2048
    layer = make_layer(rng, fmt, 16, k, codes=2, scales=[128 if fmt == "nvfp4" else 127])
    layer.row_scale[:16] = 1
    values = np.ones((16, k))
    where = {"first": 0, "middle": k // 2, "last": k - 2}[at]
    smalls, distances = (0.99609375, 0.125, 0.9999), (1, 2, 16)
    if kernel.endswith("-simde"):  # slow
        smalls, distances = smalls[:1], distances[:1]
    for small in smalls:
        x = torch.full((m, k), small, dtype=torch.float32)
        for distance in distances:
            x = x.clone()
            x[:, where] = 2.0**24
            x[:, (where + distance) % k] = 2.0**24
            bias = torch.full((16,), -(2.0**25))
            for dtype in (torch.bfloat16, torch.float32):
                (y,) = run(kernel, [Call(layer, x.to(dtype), bias=bias, y_dtype=torch.bfloat16)])
                assert_close(y, reference(x.to(dtype), values, bias), norm=False)
            x[:, (where + distance) % k] = small


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 4, 20])
@pytest.mark.parametrize("span", [40, 80, 120, 180, 250])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_activation_meets_a_zero_weight(
    kernel: str, fmt: str, m: int, span: int, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """The rest of the row decides the result, however much smaller it is, with every block scale there is."""
    k = 64 if kernel.endswith("-simde") else 320
    for byte in (56, 112, 182) if fmt == "nvfp4" else (67, 127, 187):
        for top in sorted({-126 + span, -39, 0, 41, 127}):
            if top > 127 or top - span < -126:
                continue
            columns = rng.integers(0, k, 3)
            codes = rng.integers(0, 16, (20, k))
            codes[:, columns] = rng.choice([0, 8], 3)
            layer = make_layer(rng, fmt, 20, k, codes=codes, scales=[byte])
            x = random_activations(rng, (m, k), torch.float64)
            x = (x.sign() * (1 + x.abs() % 1) * 2.0 ** (top - span)).float()
            x[: (m + 1) // 2, columns] = 1.5 * 2.0**top
            (y,) = run(kernel, [Call(layer, x.to(dtype), y_dtype=torch.float32)])
            assert_close(y, reference(x.to(dtype), layer.values), norm=False)
