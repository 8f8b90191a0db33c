"""pp.linear through host layer and machine code against float64: the contract for every arch, format and dtype."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from fixtures import oracle
from numerics import Checkpoint, assert_close, random_activations, random_checkpoint, reference

import petit_plugin as pp
from petit_plugin.backends.hip import device as hip_device
from petit_plugin.backends.hip.emulation import EmulatedDevice

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

FORMATS = ["nvfp4", "mxfp4"]
DTYPES = [torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100]
SHAPES = {  # N, K: less than a tile, ragged in both, several k-tiles, the shapes of small models
    "nvfp4": [(1, 16), (5, 112), (16, 64), (48, 576), (192, 32), (70, 640), (65, 144), (130, 1664)],
    "mxfp4": [(1, 32), (5, 96), (16, 64), (48, 576), (192, 32), (70, 640), (65, 160), (130, 1664)],
}


def pack(c: Checkpoint) -> pp.PackedWeight:
    w: pp.PackedWeight = getattr(pp, f"pack_{c.fmt}")(*c.torch_arguments())
    return w


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """The same rows inside a larger matrix of NaN: before, between and after them."""
    m, k = x.shape
    around = torch.full((m + 2, k + 16), float("nan"), dtype=x.dtype)
    inside = around[1 : m + 1, 8 : k + 8]
    inside.copy_(x)
    return inside


def poison_padding(w: pp.PackedWeight) -> None:
    """Rows that pad the last row group hold NaN scales and garbage codes."""
    n, exact = w.meta.n, w.meta.exact
    w.row_scale[n:] = float("nan")
    if exact:
        return  # garbage scales would only make the windowed kernel take more passes
    for row in range(n, w.row_scale.shape[0]):
        group, tile, lane = row // 64, row % 64 // 16, row % 16
        w.weight[group, :, tile, lane::16] = 0xFF


def bias_for(rng: np.random.Generator, turn: int, n: int, dtype: torch.dtype) -> torch.Tensor | None:
    kind = (None, dtype, torch.float32)[turn % 3]
    return None if kind is None else torch.from_numpy(rng.standard_normal(n)).to(kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_ragged_shapes(emulated: EmulatedDevice, fmt: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    shapes = itertools.cycle(SHAPES[fmt][i] for i in rng.permutation(len(SHAPES[fmt])))
    for turn, m in enumerate(ROWS):
        n, k = next(shapes)
        c = random_checkpoint(rng, fmt, n, k)
        w = pack(c)
        poison_padding(w)
        x, bias = random_activations(rng, (m, k), dtype), bias_for(rng, turn, n, dtype)
        y = pp.linear(surrounded(x), w, bias)
        assert y.shape == (m, n) and y.dtype == dtype and y.is_contiguous()
        try:
            assert_close(y, reference(x, c.values, bias))
        except AssertionError as error:
            raise AssertionError(f"{w.meta}, M = {m}: {error}") from error


@pytest.mark.parametrize("fmt", FORMATS)
def test_leading_dimensions(emulated: EmulatedDevice, fmt: str, rng: np.random.Generator) -> None:
    c = random_checkpoint(rng, fmt, 20, 64)
    w = pack(c)
    x = random_activations(rng, (2, 3, 64), torch.bfloat16)
    y = pp.linear(x, w)
    assert y.shape == (2, 3, 20)
    assert_close(y, reference(x, c.values))
    assert torch.equal(pp.linear(x[1, 2], w), pp.linear(x[1, 2:3], w)[0])
    assert pp.linear(x[:0], w).shape == (0, 3, 20)
    odd = torch.empty(6 * 64 + 1, dtype=torch.bfloat16)[1:].view(6, 64).copy_(x.view(6, 64))  # not 16-byte aligned
    assert torch.equal(pp.linear(odd, w), y.view(6, 20))


EXTREME_SCALES = {
    "nvfp4": [[0x01, 0x7E], [0x01, 0x02, 0x04, 0x07], [0x08, 0x7E], [0x00, 0x38], range(0x7F)],
    "mxfp4": [
        [100, 102, 103, 104, 111, 112, 113, 120],
        [0, 1, 2],
        [252, 253, 254],
        [114, 127],
        [100, 127],
        range(255),
    ],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_extreme_scales(emulated: EmulatedDevice, fmt: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Subnormal and largest scales side by side: nothing is flushed, whichever kernel the packer chose."""
    variants = set()
    for scales in EXTREME_SCALES[fmt]:
        c = random_checkpoint(rng, fmt, 20, 256, scales=list(scales))
        w = pack(c)
        variants.add(w.meta.exact)
        for m in (3, 40):
            x = random_activations(rng, (m, 256), dtype)
            assert_close(pp.linear(x, w), reference(x, c.values), norm=False)
    assert False in variants and (True in variants) == (fmt == "mxfp4" or emulated.arch == "gfx90a")


@pytest.mark.parametrize("fmt", FORMATS)
def test_negative_zeros_and_zero_blocks(emulated: EmulatedDevice, fmt: str, rng: np.random.Generator) -> None:
    """Codes of 0x8 are zeros: a weight of nothing else gives exactly 0, also where blocks have no scale."""
    c = random_checkpoint(rng, fmt, 20, 128)
    c.weight[:10] = 0x88
    c.scale[:5] = 0
    values = (
        oracle.dequantize_nvfp4(c.weight, c.scale, c.global_scale)
        if fmt == "nvfp4"
        else oracle.dequantize_mxfp4(c.weight, c.scale)
    )
    x = random_activations(rng, (4, 128), torch.bfloat16)
    y = pp.linear(x, pack(c))
    assert (y[:, :10] == 0).all()
    assert_close(y, reference(x, values))


@pytest.mark.parametrize("m", [9, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_activations(emulated: EmulatedDevice, dtype: torch.dtype, m: int, rng: np.random.Generator) -> None:
    """Rows of every magnitude the type has, in one matrix and within one row; Inf and NaN stay in their row."""
    c = random_checkpoint(rng, "nvfp4", 20, 128)
    w = pack(c)
    info = torch.finfo(dtype)
    x = random_activations(rng, (m, 128), dtype)
    x[0] = 0
    x[1] = info.smallest_normal / 8  # subnormal
    x[2] *= info.max / 64
    x[3, ::2] *= info.max / 64
    x[3, 1::2] *= info.tiny
    x[4, 7] = float("inf")
    x[5, 9] = float("nan")
    x[6] = -0.0
    y = pp.linear(surrounded(x), w)
    assert_close(y, reference(x, c.values), norm=False)
    clean = x.clone()
    clean[4:6] = 1
    others = [i for i in range(m) if i not in (4, 5)]
    assert torch.equal(y[others], pp.linear(clean, w)[others])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("m", [3, 20, 70])
def test_split_sums_are_deterministic(
    emulated: EmulatedDevice, fmt: str, m: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles cut across workgroups: the same bits whatever the order of workgroups, and counters back at zero."""
    c = random_checkpoint(rng, fmt, 72, 1440)
    w = pack(c)
    launch = emulated.launch(w.meta, "bf16", m)
    assert launch.workgroups > -(-72 // 64), "the shape was meant to be cut"
    spaces = []
    allocate = emulated.workspace
    monkeypatch.setattr(emulated, "workspace", lambda *a: spaces.append(allocate(*a)) or spaces[-1])
    x = random_activations(rng, (m, 1440), torch.bfloat16)
    y = pp.linear(x, w)
    assert_close(y, reference(x, c.values))
    assert torch.equal(y, pp.linear(x, w))
    try:
        for seed in rng.integers(1, 1 << 30, 2):
            emulated._call("petit_emu_set_option", b"seed", ctypes.c_uint64(int(seed)))
            assert torch.equal(y, pp.linear(x, w))
    finally:
        emulated._call("petit_emu_set_option", b"seed", ctypes.c_uint64(0))
    assert len(spaces) == 4
    for space in spaces:
        assert (space[: hip_device.COUNTERS * 4] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_many_rows_are_dequantised(
    emulated: EmulatedDevice, fmt: str, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    m, n, k = 520, 70, 160
    c = random_checkpoint(rng, fmt, n, k)
    w, x = pack(c), random_activations(rng, (m, k), dtype)
    bias = random_activations(rng, (n,), torch.float32)
    assert w.meta.exact or emulated.solution(w.meta, "bf16", m).role == "dense"
    assert_close(pp.linear(x, w, bias), reference(x, c.values, bias))


@pytest.mark.parametrize("m", [5, 40, 520])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_does_not_round_twice(
    emulated: EmulatedDevice, dtype: torch.dtype, m: int, rng: np.random.Generator
) -> None:
    """Sums just beside the middle between two results: float32 plus bias lands on the tie, the exact sum does not."""
    n, step = 64, 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    w = pp.pack_mxfp4(torch.full((n, 16), 0x22, dtype=torch.uint8), torch.full((n, 1), 127, dtype=torch.uint8))
    x = torch.zeros(m, 32, dtype=dtype)
    x[:, 0] = torch.from_numpy(rng.choice([-1.0, 1.0], m)) * 2.0**-24  # half a unit of float32 at 1
    low = 1 + torch.arange(n) * step
    bias = low + step / 2
    assert bias.dtype == torch.float32
    y = pp.linear(x, w, bias)
    assert_close(y, reference(x, np.ones((n, 32)), bias), norm=False)
    assert torch.equal(y.float(), torch.where(x[:, :1] > 0, low + step, low))


def test_gradients(emulated: EmulatedDevice, rng: np.random.Generator) -> None:
    """The backward pass multiplies by the packed weight in the gradient's type."""
    c = random_checkpoint(rng, "nvfp4", 20, 64)
    w = pack(c)
    x = random_activations(rng, (3, 64), torch.bfloat16).requires_grad_()
    pp.linear(x, w).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 20, dtype=torch.bfloat16) @ w.dequantize(torch.bfloat16))
