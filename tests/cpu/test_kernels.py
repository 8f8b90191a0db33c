"""Every kernel against float64 over the shapes that cut its tiles somewhere: rows, columns, formats, types, bias."""

from __future__ import annotations

import itertools

import kernel_library
import numpy as np
import pytest
import torch
from cases import Call, cycle, make_layer, run
from numerics import DTYPES, assert_close, random_activations, reference

ROWS = [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 100, 130]
OUTPUTS = [1, 5, 16, 17, 48, 192, 33]
COLUMNS = {"nvfp4": [16, 32, 48, 112, 576, 640, 2880, 272], "mxfp4": [32, 64, 96, 160, 576, 640, 2880, 288]}
BIASES = [None, torch.float32, torch.bfloat16, None, torch.float16]


@pytest.fixture(params=kernel_library.KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    kernel_library.require(request.param)
    return request.param


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", ROWS)
def test_contract(kernel: str, fmt: str, m: int, rng: np.random.Generator) -> None:
    slow = kernel.endswith("-simde") or kernel == "portable"
    start = int(rng.integers(280))
    # 7 x 8 x 3 x 5 combinations, walked from a random place; over all rows and kernels every pair is met.
    combinations = itertools.islice(cycle(OUTPUTS, COLUMNS[fmt], DTYPES, BIASES), start, start + (4 if slow else 8))
    for n, k, dtype, bias_dtype in combinations:
        if slow and m * n * k > 4_000_000:
            n = 17
        layer = make_layer(rng, fmt, n, k)
        x = random_activations(rng, (m, k), dtype)
        bias = None if bias_dtype is None else random_activations(rng, (n,), bias_dtype)
        (y,) = run(kernel, [Call(layer, x, bias=bias)])
        assert_close(y, reference(x, layer.values, bias))


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_other_result_types(kernel: str, x_dtype: torch.dtype, rng: np.random.Generator) -> None:
    """The expert layers of a mixture keep float32 between their two products."""
    layer = make_layer(rng, "nvfp4", 40, 96)
    for m, y_dtype in itertools.product((2, 30), DTYPES):
        x = random_activations(rng, (m, 96), x_dtype)
        (y,) = run(kernel, [Call(layer, x, y_dtype=y_dtype)])
        assert y.dtype == y_dtype
        assert_close(y, reference(x, layer.values))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_groups_and_gathered_rows(kernel: str, fmt: str, rng: np.random.Generator) -> None:
    """Problems of different sizes in one call, empty ones among them, rows picked in any order and more than once."""
    calls, expected = [], []
    for m, n in ((0, 32), (1, 48), (3, 17), (0, 16), (20, 33), (40, 5)):
        layer = make_layer(rng, fmt, n, 192)
        x = random_activations(rng, (16, 192), torch.bfloat16)
        rows = torch.from_numpy(rng.integers(0, 16, m))
        calls.append(Call(layer, x, bias=random_activations(rng, (n,), torch.float32)).gather(rows))
        expected.append(reference(x[rows], layer.values, calls[-1].bias))
    for y, ref in zip(run(kernel, calls), expected, strict=True):
        assert_close(y, ref)


@pytest.mark.parametrize("m", [1, 3, 16, 40])
def test_same_bits_for_any_number_of_threads(kernel: str, m: int, rng: np.random.Generator) -> None:
    layer = make_layer(rng, "nvfp4", 400, 1040)
    x = random_activations(rng, (m, 1040), torch.bfloat16)
    results = [run(kernel, [Call(layer, x, y_dtype=torch.float32)], threads)[0] for threads in (1, 2, 3, 2)]
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("m", [4, 18, 40])
def test_a_row_depends_on_no_other(kernel: str, m: int, rng: np.random.Generator) -> None:
    """NaN, infinities and huge or subnormal numbers stay in their row: all others keep their bits."""
    layer = make_layer(rng, "mxfp4", 50, 320)
    x = random_activations(rng, (m, 320), torch.bfloat16)
    (clean,) = run(kernel, [Call(layer, x)])
    hostile = x.clone()
    at = int(rng.integers(m))
    for value in (float("nan"), float("inf"), 1e30, 1e-39):
        hostile[at] = value
        (y,) = run(kernel, [Call(layer, hostile)])
        others = torch.arange(m) != at
        assert torch.equal(y[others], clean[others])
        assert_close(y, reference(hostile, layer.values), norm=False)


def test_more_rows_than_one_piece(kernel: str, rng: np.random.Generator) -> None:
    """More rows than are prepared at once (512), and more activations than are held at once."""
    layer = make_layer(rng, "nvfp4", 17, 32)
    x = random_activations(rng, (1100, 32), torch.bfloat16)
    (y,) = run(kernel, [Call(layer, x)])
    assert_close(y, reference(x, layer.values))
