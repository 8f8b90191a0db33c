"""The reference packer: bit orders against the arithmetic the kernels do, round trips, and the proof of exactness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fixtures import oracle
from numerics import random_checkpoint

from petit_plugin._types import CheckpointTensors
from petit_plugin.backends.hip import layout, words

TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx950-mask")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def source(c, name="layer"):
    factor = torch.ones(1) if c.global_scale is None else torch.from_numpy(np.array(c.global_scale, np.float32))
    return CheckpointTensors(c.fmt, name, torch.from_numpy(c.weight.copy()), torch.from_numpy(c.scale.copy()), factor)


def bit_reverse(q):
    return int(f"{q:032b}"[::-1], 2)


def test_mask_order_gives_f16_pairs(rng):
    """The four masks of the f16 core, done in Python integers, give the eight codes times 2^-14 in k order."""
    plain = torch.from_numpy(rng.integers(0, 256, (500, 4), dtype=np.uint8))
    packed = words.permute_words(plain)
    assert torch.equal(words.permute_words(packed, inverse=True), plain)
    for row, q in zip(plain.numpy(), packed.numpy().view("<u4")[:, 0].tolist(), strict=True):
        codes = [int(v) >> s & 15 for v in row for s in (0, 4)]
        r = bit_reverse(q)
        masked = [(v & 0xFFFFFFFF) & 0x8E008E00 for v in (q, q << 8, r, r << 8)]
        halves = np.array([h for v in masked for h in (v & 0xFFFF, v >> 16)], dtype=np.uint16).view(np.float16)
        assert np.array_equal(halves.astype(np.float64) * 2**14, E2M1[codes])
        assert np.array_equal(np.signbit(halves), np.signbit(E2M1[codes]))


def test_scale_dwords_decode_with_two_masks(rng):
    scales = torch.from_numpy(rng.integers(0, 248, (300, 4), dtype=np.uint8))
    packed = words.pack_e5m3(scales)
    assert torch.equal(words.unpack_e5m3(packed).reshape(300, 4), scales)
    for want, d in zip(scales.numpy(), packed.numpy().view("<u4")[:, 0].tolist(), strict=True):
        rotated = (d << 8 | d >> 24) & 0xFFFFFFFF
        low, high = d & 0x7F807F80, rotated & 0x7F807F80
        assert [low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16] == [int(s) << 7 for s in want]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("fmt", "n", "k"), [("nvfp4", 5, 112), ("nvfp4", 130, 640), ("mxfp4", 1, 32), ("mxfp4", 70, 288)]
)
def test_round_trip_and_exact_values(target, fmt, n, k, rng):
    c = random_checkpoint(rng, fmt, n, k)
    meta, tensors = layout.pack(source(c), target, None)
    for name, (shape, dtype) in layout.shapes(meta).items():
        assert tensors[name].shape == shape
        assert tensors[name].dtype == dtype
    codes, scales = layout.unpack(meta, tensors)
    assert np.array_equal(codes.numpy(), c.weight)
    if fmt == "nvfp4":
        assert np.array_equal(scales.numpy(), c.scale)
    else:
        used = (c.weight.reshape(n, -1, 16) & 0x77).any(-1)
        assert np.array_equal(scales.numpy()[used], c.scale[used])
    w = layout.dequantize(*(tensors[t] for t in ("weight", "scale", "row_scale", "row_exponent")), meta, torch.float64)
    assert np.array_equal(w.numpy(), c.values)


def test_padding_is_zero_and_out_is_filled(rng):
    c = random_checkpoint(rng, "nvfp4", 3, 32)
    _, tensors = layout.pack(source(c), "gfx942", None)
    stored = int(tensors["weight"].ne(0).sum())
    assert stored <= 3 * 16
    assert not tensors["row_scale"][3:].any()
    out = {name: torch.full_like(t, 99) for name, t in tensors.items()}
    pointers = {name: t.data_ptr() for name, t in out.items()}
    _, again = layout.pack(source(c), "gfx942", out)
    for name in tensors:
        assert again[name].data_ptr() == pointers[name]
        assert torch.equal(again[name], tensors[name])


def test_negative_and_nan_scales(rng):
    c = random_checkpoint(rng, "nvfp4", 8, 64)
    scale = c.scale.copy()
    scale[2, 1] |= 0x80
    scale[5, 0] = 0xFF
    weight = c.weight.copy()
    weight[5, :8] = 0x80  # the NaN scale's block holds only zeros
    damaged = c._replace(weight=weight, scale=scale)
    meta, tensors = layout.pack(source(damaged), "gfx942", None)
    w = layout.dequantize(*(tensors[t] for t in ("weight", "scale", "row_scale", "row_exponent")), meta, torch.float64)
    clean = scale.copy()
    clean[5, 0] = 0
    want = oracle.dequantize_nvfp4(weight, clean, c.global_scale)
    assert np.array_equal(w.numpy(), want)
    weight[5, 3] = 0x10
    with pytest.raises(ValueError, match=r"layer\.weight_scale\[5, 0\] is NaN"):
        layout.pack(source(c._replace(weight=weight, scale=scale)), "gfx942", None)


def operands(c, target):
    """Every f16 operand code * 2^-field * scale of the fast kernel, in float64, from the row's own rule."""
    canonical = layout.canonical(source(c))
    tops = layout.row_tops(canonical)
    e = layout.encoding(c.fmt, target, False)
    scale = canonical.significand.double() * torch.exp2((canonical.exponent - tops[:, None] + e.top).double())
    codes = torch.from_numpy(c.weight)
    values = torch.from_numpy(E2M1)[torch.stack([codes & 15, codes >> 4], -1).long()]
    values = values.reshape(c.weight.shape[0], scale.shape[1], -1)
    return (values * scale[..., None] * 2.0**-e.field).flatten(1).numpy(), layout.fits(
        canonical, tops, c.fmt, target
    ).numpy()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_fits_is_a_proof(target, fmt, rng):
    """A row said to fit has only operands that f16 holds (normal ones on gfx90a); most that do not fit break that."""
    spread = np.arange(0, 0x7F) if fmt == "nvfp4" else np.arange(100, 130)
    c = random_checkpoint(rng, fmt, 400, 64, scales=spread)
    product, fits = operands(c, target)
    with np.errstate(over="ignore"):
        exact = product.astype(np.float16).astype(np.float64) == product
    if target == "gfx90a" or (fmt == "mxfp4" and target == "gfx950"):
        exact &= (np.abs(product) >= 2.0**-14) | (product == 0)
    truly = exact.all(1)
    assert not (fits & ~truly).any()
    assert (fits == truly).mean() > 0.9
    assert np.abs(product).max() <= 65504
    if fmt == "nvfp4" and target != "gfx90a":
        assert fits.all()  # so these targets need no EXACT NVFP4 kernel
