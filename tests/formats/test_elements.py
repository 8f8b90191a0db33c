"""E2M1, E4M3FN and E8M0 codes against ml_dtypes: every code decoded, encoding on random, tie and boundary values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petit_plugin.formats import e2m1, e4m3, e8m0

ALL_BYTES = np.arange(256, dtype=np.uint8)
SEEDS = [int(s) for s in np.random.SeedSequence().generate_state(2)]


def same(actual: torch.Tensor, expected: np.ndarray) -> None:
    """Equal values and equal signs of zero; NaN equals NaN."""
    assert tuple(actual.shape) == expected.shape
    np.testing.assert_array_equal(actual.numpy(), expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual.numpy())[number], np.signbit(expected)[number])


def grid(dtype: type, codes: np.ndarray) -> np.ndarray:
    """The format's finite non-negative values, ascending, in float64."""
    values = codes.view(dtype).astype(np.float64)
    return np.unique(np.abs(values[np.isfinite(values)]))


def interesting(dtype: type, codes: np.ndarray, seed: int) -> np.ndarray:
    """float32: the format's values, midpoints, their float32 neighbours, random magnitudes over all octaves, limits."""
    rng = np.random.default_rng(seed)
    points = grid(dtype, codes)
    centres = np.concatenate([points, (points[1:] + points[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([centres, np.nextafter(centres, np.float32(np.inf)), np.nextafter(centres, np.float32(0))])
    spread = np.ldexp(rng.uniform(1, 2, 20000), rng.integers(-149, 128, 20000)).astype(np.float32)
    narrow = rng.normal(0, 3, 20000).astype(np.float32)
    limits = np.array([0, 1e-45, 2.0**-127, 2.0**-126, 3.4e38, 464, 464.0001, 480, 6, 7, 1e9], dtype=np.float32)
    every = np.concatenate([near, spread, narrow, limits])
    return np.concatenate([every, -every])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decode_every_code(dtype: torch.dtype) -> None:
    as_numpy = np.float32 if dtype == torch.float32 else np.float64
    codes = torch.from_numpy(ALL_BYTES.copy())
    same(e2m1.decode(codes[:16], dtype), ALL_BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(as_numpy))
    same(e4m3.decode(codes, dtype), ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(as_numpy))
    same(e4m3.decode(codes.view(torch.float8_e4m3fn), dtype), ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(as_numpy))
    # By its definition: 2^-127 is a float32 subnormal that conversions may flush.
    powers = np.array([2.0 ** (c - 127) for c in range(255)] + [np.nan]).astype(as_numpy)
    same(e8m0.decode(codes, dtype), powers)
    np.testing.assert_array_equal(ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), powers)
    if e8m0.DTYPE is not None:
        same(e8m0.decode(codes.view(e8m0.DTYPE), dtype), powers)


def test_decode_golden_values() -> None:
    """Written out by hand, so that a wrong bias or the FNUZ variant cannot hide behind a library."""
    bytes_ = torch.tensor([0x38, 0x40, 0x3C, 0x48, 0x7E, 0x01, 0x80, 0xFE], dtype=torch.uint8)
    same(e4m3.decode(bytes_), np.array([1, 2, 1.5, 4, 448, 0.001953125, -0.0, -448], dtype=np.float32))
    assert e4m3.decode(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all()
    assert e8m0.decode(torch.tensor([0], dtype=torch.uint8)).item() == 2.0**-127
    assert e8m0.decode(torch.tensor([124], dtype=torch.uint8)).item() == 0.125


@pytest.mark.parametrize("scale", ["e4m3", "e8m0"])
def test_every_product_is_exact(scale: str) -> None:
    """All 16 x 256 products of an element and a block scale, in float32, are the float64 products."""
    codes = torch.from_numpy(ALL_BYTES.copy())
    module = {"e4m3": e4m3, "e8m0": e8m0}[scale]
    numpy_scale = {"e4m3": ml_dtypes.float8_e4m3fn, "e8m0": ml_dtypes.float8_e8m0fnu}[scale]
    product = e2m1.decode(codes[:16])[:, None] * module.decode(codes)[None, :]
    elements = ALL_BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exact = elements[:, None] * ALL_BYTES.view(numpy_scale).astype(np.float64)[None, :]
    overflow = np.abs(exact) > np.finfo(np.float32).max  # 2^126 * 4 and more, only E8M0 bytes 253 and 254
    assert scale == "e8m0" or not overflow.any()
    assert overflow.sum() == (0 if scale == "e4m3" else 2 * (2 + 4))
    same(product, np.where(overflow, np.copysign(np.inf, exact), exact).astype(np.float32))
    same(product.double(), np.where(overflow, np.copysign(np.inf, exact), exact))


@pytest.mark.parametrize("seed", SEEDS)
def test_e2m1_encode(seed: int) -> None:
    values = interesting(ml_dtypes.float4_e2m1fn, ALL_BYTES[:16], seed)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(e2m1.encode_rne(torch.from_numpy(values)).numpy(), expected)


def test_e2m1_ties_and_limits() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, float("inf"), 0.0])
    expected = torch.tensor([0.0, 1, 1, 2, 2, 4, 4, 6, 6, 0])
    for sign in (1, -1):
        decoded = e2m1.decode(e2m1.encode_rne(values * sign))
        same(decoded, (expected * sign).numpy())
    with pytest.raises(ValueError, match="NaN"):
        e2m1.encode_rne(torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_encode_other_dtypes(dtype: torch.dtype) -> None:
    """16-bit inputs convert exactly; float64 must not round to float32 first."""
    rng = np.random.default_rng(SEEDS[0])
    values = torch.from_numpy(rng.normal(0, 3, 4000)).to(dtype)
    if dtype == torch.float64:
        ties = np.array([0.25, 0.75, 1.25, 17, 19, 2.0**-10, 3 * 2.0**-10, 464])
        values = torch.from_numpy(np.concatenate([ties, ties * (1 + 1e-12), ties * (1 - 1e-12), values.numpy()]))
    wide = values.double().numpy()
    for module, numpy_type in ((e2m1, ml_dtypes.float4_e2m1fn), (e4m3, ml_dtypes.float8_e4m3fn)):
        points = grid(numpy_type, ALL_BYTES[: 16 if module is e2m1 else 256])
        decoded = module.decode(module.encode_rne(values), torch.float64).numpy()
        finite = np.abs(wide) <= 464
        nearest = np.abs(np.abs(wide)[:, None] - points[None, :]).min(axis=1)
        error = np.abs(np.abs(decoded) - np.abs(wide))
        np.testing.assert_array_equal(error[finite], nearest[finite])
        assert np.isnan(decoded[~finite]).all() or module is e2m1


@pytest.mark.parametrize("seed", SEEDS)
def test_e4m3_encode(seed: int) -> None:
    values = np.append(interesting(ml_dtypes.float8_e4m3fn, ALL_BYTES, seed), [np.inf, -np.inf, np.nan, -np.nan])
    values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(e4m3.encode_rne(torch.from_numpy(values)).numpy(), expected)
    wide = torch.from_numpy(values).double()
    np.testing.assert_array_equal(e4m3.encode_rne(wide).numpy(), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_e8m0_encode(seed: int) -> None:
    values = np.append(interesting(ml_dtypes.float8_e8m0fnu, ALL_BYTES, seed), [np.inf, -np.inf, np.nan])
    values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    np.testing.assert_array_equal(e8m0.encode_nearest(torch.from_numpy(values)).numpy(), expected)


def test_e8m0_exponents() -> None:
    exponents = torch.arange(-127, 128)
    np.testing.assert_array_equal(e8m0.from_exponent(exponents).numpy(), np.arange(255))
    for outside in (-128, 128):
        with pytest.raises(ValueError, match=str(outside)):
            e8m0.from_exponent(torch.tensor([0, outside]))
    with pytest.raises(TypeError, match="float32"):
        e8m0.from_exponent(torch.zeros(2))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 15), max_size=40).filter(lambda c: len(c) % 2 == 0), st.integers(1, 3))
def test_pack_round_trip(codes: list[int], rows: int) -> None:
    tensor = torch.tensor([codes] * rows, dtype=torch.uint8).reshape(rows, len(codes))
    packed = e2m1.pack(tensor)
    assert packed.shape == (rows, len(codes) // 2)
    assert [int(b) for b in packed[0]] == [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]
    assert torch.equal(e2m1.unpack(packed), tensor)
    same(e2m1.decode_packed(packed), e2m1.decode(tensor).numpy())


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_e2m1_encode_is_nearest(value: float) -> None:
    decoded = e2m1.decode(e2m1.encode_rne(torch.tensor([value]))).item()
    clamped = max(-6.0, min(6.0, value))
    assert abs(decoded - clamped) == min(abs(m - abs(clamped)) for m in e2m1.MAGNITUDES)
    assert np.signbit(decoded) == np.signbit(value)


def test_element_argument_errors() -> None:
    with pytest.raises(ValueError, match=r"0\.\.15, got 16"):
        e2m1.decode(torch.tensor([3, 16], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"0\.\.15, got 255"):
        e2m1.pack(torch.tensor([0, 255], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"even last dimension.*\(2, 3\)"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"codes.*uint8.*int64"):
        e2m1.decode(torch.tensor([3]))
    with pytest.raises(TypeError, match="bfloat16"):
        e4m3.decode(torch.zeros(2, dtype=torch.uint8), torch.bfloat16)
    with pytest.raises(TypeError, match=r"torch\.Tensor, got list"):
        e4m3.decode([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int8"):
        e8m0.decode(torch.zeros(2, dtype=torch.int8))
