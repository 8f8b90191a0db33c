"""The ends of the number range, long sums, rounding, modes of the processor, and memory that must not be read."""

from __future__ import annotations

import ctypes
import mmap

import kernel_library
import numpy as np
import pytest
import torch
from cases import Call, make_layer, run
from numerics import DTYPES, assert_close, random_activations, reference


@pytest.fixture(params=kernel_library.KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    kernel_library.require(request.param)
    return request.param


# NVFP4: zero and 2^-15 .. 2^15, more than packing writes. MXFP4: the window of the fast kernels.
EXTREMES = {"nvfp4": np.r_[0, 8:256], "mxfp4": np.arange(67, 188)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 3, 13, 30])
def test_all_scales(kernel: str, m: int, fmt: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    layer = make_layer(rng, fmt, 33, 320, scales=EXTREMES[fmt], exponents=80 if fmt == "mxfp4" else 0)
    x = random_activations(rng, (m, 320), dtype)
    (y,) = run(kernel, [Call(layer, x)])
    assert_close(y, reference(x, layer.values), norm=False)


@pytest.mark.parametrize("m", [1, 20])
def test_zero_blocks_with_any_scale(kernel: str, m: int, rng: np.random.Generator) -> None:
    layer = make_layer(rng, "mxfp4", 20, 64, scales=np.r_[0:67, 188:255], codes=rng.choice([0, 8], (20, 64)))
    x = random_activations(rng, (m, 64), torch.bfloat16)
    (y,) = run(kernel, [Call(layer, x)])
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few", [True, False])
def test_extreme_activations(kernel: str, fmt: str, dtype: torch.dtype, few: bool, rng: np.random.Generator) -> None:
    """Rows of one magnitude each, from subnormal to the type's largest, and rows of zeros of both signs."""
    info = torch.finfo(dtype)
    smallest = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}[dtype]
    largest = 15 if dtype == torch.float16 else 127
    powers = [smallest, smallest + 3, -126, -60, -41, -40, 39, 40, 41, 100, largest]
    powers = [p for p in powers if smallest <= p <= largest]
    rows = [np.ldexp(np.clip(rng.standard_normal(160), -1.9, 1.9), p) for p in powers]
    x = torch.from_numpy(np.array(rows)).clamp(info.min, info.max).to(dtype)
    x = torch.cat([x, torch.zeros(1, 160, dtype=dtype), -torch.zeros(1, 160, dtype=dtype)])
    layer = make_layer(rng, fmt, 20, 160)
    if few:
        calls = [Call(layer, x[i : i + 2], y_dtype=torch.float32) for i in range(0, len(x), 2)]
        y = torch.cat(run(kernel, calls))
    else:
        (y,) = run(kernel, [Call(layer, x.repeat(3, 1), y_dtype=torch.float32)])
        x = x.repeat(3, 1)
    assert_close(y, reference(x, layer.values), norm=False)


@pytest.mark.parametrize("m", [1, 4, 20])
def test_products_beyond_float32(kernel: str, m: int, rng: np.random.Generator) -> None:
    """Sums that only the row scale brings back into float32."""
    layer = make_layer(rng, "nvfp4", 20, 32, scales=[255], codes=rng.integers(6, 8, (20, 32)))
    layer.row_scale[:20] *= np.float32(2.0**-30)
    x = torch.full((m, 32), 3e38)
    (y,) = run(kernel, [Call(layer, x)])
    ref = reference(x, layer.values * 2.0**-30)
    assert np.isfinite(ref.value).all() and bool(torch.isfinite(y).all())
    assert_close(y, ref, norm=False)


@pytest.mark.parametrize("m", [1, 20])
def test_special_values_follow_float_arithmetic(kernel: str, m: int, rng: np.random.Generator) -> None:
    """Infinity times zero is NaN, times a negative weight minus infinity, and opposite infinities meet as NaN."""
    layer = make_layer(rng, "nvfp4", 64, 32)
    for special in (float("inf"), float("-inf"), float("nan")):
        x = random_activations(rng, (m, 32), torch.float32)
        x[0, int(rng.integers(32))] = special
        (y,) = run(kernel, [Call(layer, x)])
        assert_close(y, reference(x, layer.values), norm=False)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 3, 40])
def test_tiny_beside_large(kernel: str, fmt: str, dtype: torch.dtype, groups: int, rng: np.random.Generator) -> None:
    """One row, some of whose groups hold numbers so far apart that no common integer scale fits them (AVX2 uses one):
    their large elements meet zero weights, so that the tiny ones decide the result."""
    k = 4096
    codes = rng.integers(0, 16, (20, k))
    x = random_activations(rng, (1, k), dtype)
    for group in rng.choice(k // 32, groups, replace=False):
        column = 32 * group + int(rng.integers(32))
        x[0, 32 * group : 32 * group + 32] *= 2.0**-9
        x[0, column] = 3000.0
        codes[:, column] = rng.choice([0, 8], 20)
    x[0, -64:] = 0
    layer = make_layer(rng, fmt, 20, k, codes=codes)
    (y,) = run(kernel, [Call(layer, x, y_dtype=torch.float32)])
    assert_close(y, reference(x, layer.values))


@pytest.mark.parametrize("k", [8192, 28672])
@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_sums_of_one_sign(kernel: str, m: int, k: int, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Rounding errors of a long sum add up where nothing cancels; equal terms make them all point the same way."""
    if kernel.endswith("-simde") and m > 1:
        k //= 4
    layer = make_layer(rng, "mxfp4", 16, k, codes=rng.integers(1, 8, (16, k)), scales=np.arange(120, 123))
    x = random_activations(rng, (m, k), dtype).abs()
    x[0] = 1.1
    (y,) = run(kernel, [Call(layer, x, y_dtype=torch.float32)])
    assert_close(y, reference(x, layer.values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding(kernel: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Sums a hair above and below the middle of two results, where rounding to float32 first would go wrong."""
    layer = make_layer(rng, "nvfp4", 64, 16)
    step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    middles = 1 + step * (rng.integers(0, 100, 64) + 0.5)
    bias = torch.from_numpy(middles * rng.choice([-1, 1], 64)).float()
    for m in (1, 20):
        x = random_activations(rng, (m, 16), torch.float32) * 2.0**-30
        (y,) = run(kernel, [Call(layer, x, bias=bias, y_dtype=dtype)])
        assert_close(y, reference(x, layer.values, bias), norm=False)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("m", [2, 20])
def test_flush_modes_change_nothing(kernel: str, m: int, threads: int, rng: np.random.Generator) -> None:
    layer = make_layer(rng, "mxfp4", 20, 96, scales=EXTREMES["mxfp4"])
    x = random_activations(rng, (m, 96), torch.float32) * torch.logspace(-44, 30, m)[:, None]
    (expected,) = run(kernel, [Call(layer, x)], threads)
    assert torch.set_flush_denormal(True)
    try:
        (y,) = run(kernel, [Call(layer, x)], threads)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(y, expected)
    assert_close(y, reference(x, layer.values), norm=False)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("m", [1, 3, 20])
def test_nothing_is_read_past_the_end(kernel: str, m: int, fmt: str, rng: np.random.Generator) -> None:
    """Weights, scales and activations end where an unmapped page begins: a read beyond them would end the process."""
    n, k = 33, 96
    layer = make_layer(rng, fmt, n, k)
    x = random_activations(rng, (m, k), torch.bfloat16)
    expected = reference(x, layer.values)
    with Fence() as fence:
        layer.weight, layer.scale, layer.row_scale = map(fence.copy, (layer.weight, layer.scale, layer.row_scale))
        call = Call(layer, x)
        problem = call.problem()
        bits = fence.copy(x.view(torch.int16).numpy())
        problem.x, problem.x_stride = bits.ctypes.data, k
        kernel_library.grouped_gemm(kernel, [problem], 0, 0, 2)
        assert_close(call.result(), expected)


class Fence:
    """Arrays copied to the end of mapped memory, each before a page that may not be touched."""

    def __enter__(self) -> Fence:
        self._maps: list[mmap.mmap] = []
        self._arrays: list[object] = []
        self._mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        self._mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return self

    def copy(self, array: np.ndarray) -> np.ndarray:
        page = mmap.PAGESIZE
        size = -(-array.nbytes // page) * page
        room = mmap.mmap(-1, size + page)
        whole = np.frombuffer(room, np.uint8)
        assert self._mprotect(whole.ctypes.data + size, page, 0) == 0
        inside = whole[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
        inside[...] = array
        self._maps.append(room)
        return inside

    def __exit__(self, *_: object) -> None:
        for room in self._maps:  # freed with the arrays that still look at them
            address = np.frombuffer(room, np.uint8).ctypes.data
            self._mprotect(address, len(room), 3)
