"""Checkpoint -> packed -> checkpoint, and the packed bytes themselves, against an independent description."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fixtures import oracle
from layout_oracle import layout, round_to
from numerics import GROUP, Checkpoint, random_checkpoint

import petit_plugin as pp

SHAPES = [(1, 32), (15, 96), (16, 128), (17, 160), (33, 2880), (100, 64), (5, 3712)]


def pack(c: Checkpoint, **options: object) -> pp.PackedWeight:
    return getattr(pp, f"pack_{c.fmt}")(*c.torch_arguments(), **options)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_is_bit_equal(rng: np.random.Generator, fmt: str, n: int, k: int) -> None:
    c = random_checkpoint(rng, fmt, n, k, scales=range(0x7F) if fmt == "nvfp4" else range(255))
    got = pack(c).unpack()
    assert np.array_equal(got.weight.numpy(), c.weight)
    assert np.array_equal(got.weight_scale.view(torch.uint8).numpy(), c.scale)
    if c.global_scale is None:
        assert got.global_scale is None
    else:
        assert got.weight_scale.dtype == torch.float8_e4m3fn
        assert np.array_equal(got.global_scale.numpy(), c.global_scale)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (21, 96)])
def test_packed_bytes_are_the_documented_layout(rng: np.random.Generator, fmt: str, n: int, k: int) -> None:
    c = random_checkpoint(rng, fmt, n, k, scales=range(0x7F) if fmt == "nvfp4" else range(67, 188))
    packed = pack(c)
    weight, scale = layout(fmt, c.weight, c.scale)
    assert np.array_equal(packed.weight.numpy(), weight)
    assert np.array_equal(packed.scale.numpy(), scale)
    expected = np.ones(1, np.float32)
    if c.global_scale is not None and n > 1:
        expected = np.zeros(-(-n // 16) * 16, np.float32)
        expected[:n] = c.global_scale
    elif c.global_scale is not None:
        expected = c.global_scale
    assert np.array_equal(packed.row_scale.numpy(), expected)
    assert packed.row_exponent is None and not packed.meta.exact


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_rounds_the_exact_product_once(rng: np.random.Generator, fmt: str, dtype: torch.dtype) -> None:
    c = random_checkpoint(rng, fmt, 37, 320, scales=range(0x7F) if fmt == "nvfp4" else range(60, 180))
    if c.global_scale is not None:  # from numbers that underflow float16 to numbers that overflow it
        c.global_scale[:] = np.ldexp(rng.uniform(1, 2, 37), rng.integers(-40, 12, 37)) * rng.choice([-1, 1], 37)
        c = c._replace(values=oracle.dequantize_nvfp4(c.weight, c.scale, c.global_scale))
    got = pack(c).dequantize(dtype).double().numpy()
    limits = {torch.bfloat16: (7, -126, 127), torch.float16: (10, -14, 15), torch.float32: (23, -126, 127)}
    expected = c.values if dtype == torch.float64 else round_to(c.values, *limits[dtype])
    assert np.array_equal(got, expected)
    assert np.array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("code", range(16))
def test_every_code_times_every_scale_is_exact(code: int) -> None:
    """16 x 256 products of each format, NaN scales aside (a zero code makes even those harmless)."""
    for fmt, nans in (("nvfp4", (0x7F, 0xFF)), ("mxfp4", (255,))):
        bytes_ = np.array([b for b in range(256) if b not in nans or code in (0, 8)], np.uint8)
        scale = bytes_[:, None]  # one row per scale byte, one group per row
        weight = np.full((len(bytes_), GROUP[fmt] // 2), code * 17, np.uint8)
        if fmt == "nvfp4":
            packed = pp.pack_nvfp4(torch.from_numpy(weight), torch.from_numpy(scale), 1.0)
            exact = oracle.dequantize_nvfp4(weight, scale, 1.0)
        else:
            packed = pp.pack_mxfp4(torch.from_numpy(weight), torch.from_numpy(scale))
            exact = oracle.dequantize_mxfp4(weight, scale)
        exact[np.isnan(exact)] = 0.0
        assert np.array_equal(packed.dequantize(torch.float64).numpy(), exact)


def test_global_scale_may_be_scalar_one_or_per_row(rng: np.random.Generator) -> None:
    c = random_checkpoint(rng, "nvfp4", 20, 64, per_row=False)
    weight, scale, factor = c.torch_arguments()
    for given in (factor, factor.reshape(()), float(factor), factor.expand(20), factor.expand(20).contiguous()):
        packed = pp.pack_nvfp4(weight, scale, given)
        assert np.array_equal(packed.dequantize(torch.float64).numpy(), c.values)
        assert torch.equal(packed.unpack().global_scale, factor.expand(20))
        one = not isinstance(given, torch.Tensor) or given.numel() == 1
        assert packed.row_scale.shape == (1,) if one else packed.row_scale.shape == (32,)


def test_one_scale_and_one_per_row_share_a_storage_where_they_fit(rng: np.random.Generator) -> None:
    """Reload in place: storage for a scale per row takes one; storage for one takes rows that agree to the bit."""
    c = random_checkpoint(rng, "nvfp4", 20, 64, per_row=False)
    weight, scale, factor = c.torch_arguments()
    several = factor.expand(20).clone()
    several[7] *= 2
    for first, second in ((several, factor), (factor, factor.expand(20)), (factor, float(factor))):
        packed = pp.pack_nvfp4(weight.flip(0), scale, first)
        assert pp.pack_nvfp4(weight, scale, second, out=packed) is packed
        assert np.array_equal(packed.dequantize(torch.float64).numpy(), c.values)
    zeros = torch.zeros(20)
    zeros[3] = -0.0
    for differing in (several, zeros):
        with pytest.raises(ValueError, match=r"global_scale differs from row to row.*without out="):
            pp.pack_nvfp4(weight.flip(0), scale, differing, out=packed)
        assert np.array_equal(packed.dequantize(torch.float64).numpy(), c.values), "an error writes nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_scale_gives_the_bits_of_one_per_row(rng: np.random.Generator, dtype: torch.dtype) -> None:
    c = random_checkpoint(rng, "nvfp4", 37, 160, per_row=False)
    weight, scale, factor = c.torch_arguments()
    x = torch.from_numpy(rng.standard_normal((5, 160))).to(dtype)
    one, many = (pp.pack_nvfp4(weight, scale, g) for g in (factor, factor.expand(37)))
    assert one.nbytes < many.nbytes
    assert torch.equal(pp.linear(x, one), pp.linear(x, many))
    assert torch.equal(one.dequantize(dtype), many.dequantize(dtype))


def test_fused_shards_with_their_own_scales_equal_the_shards(rng: np.random.Generator) -> None:
    """q, k and v with different global scales: one packed weight, each row with its own scale."""
    shards = [random_checkpoint(rng, "nvfp4", n, 64, per_row=False) for n in (24, 8, 8)]
    for shard, value in zip(shards, (1e-3, 2e-3, 5e-4), strict=True):
        shard.global_scale[:] = np.float32(value)
    apart = torch.cat([pack(shard).dequantize(torch.float32) for shard in shards])
    fused = pp.pack_nvfp4(
        *(torch.cat([s.torch_arguments()[i].view(torch.uint8) for s in shards]) for i in (0, 1)),
        torch.cat([s.torch_arguments()[2].expand(s.weight.shape[0]) for s in shards]),
    )
    assert torch.equal(fused.dequantize(torch.float32), apart)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_tensors_and_from_tensors_share_storage(rng: np.random.Generator, fmt: str) -> None:
    c = random_checkpoint(rng, fmt, 18, 64)
    packed = pack(c)
    again = pp.PackedWeight.from_tensors(packed.meta, packed.tensors())
    assert {n: t.data_ptr() for n, t in again.tensors().items()} == {
        n: t.data_ptr() for n, t in packed.tensors().items()
    }
    assert torch.equal(again.dequantize(), packed.dequantize())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_out_packs_into_the_same_storage(rng: np.random.Generator, fmt: str) -> None:
    first, second = (random_checkpoint(rng, fmt, 18, 64) for _ in range(2))
    packed = pack(first)
    pointers = {name: tensor.data_ptr() for name, tensor in packed.tensors().items()}
    for tensor in packed.tensors().values():
        tensor.view(torch.uint8).fill_(0xA5)  # nothing of the old contents, padding included, may survive
    assert pack(second, out=packed) is packed
    assert {name: tensor.data_ptr() for name, tensor in packed.tensors().items()} == pointers
    for name, tensor in pack(second).tensors().items():
        assert torch.equal(tensor, packed.tensors()[name]), name


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_any_strides(rng: np.random.Generator, fmt: str) -> None:
    c = random_checkpoint(rng, fmt, 19, 128)
    weight, scale, *rest = c.torch_arguments()
    wide = torch.full((19, 200), 0xFF, dtype=torch.uint8)
    wide[:, 7 : 7 + 64] = weight
    tall = torch.full((40, scale.shape[1]), 0xFF, dtype=torch.uint8).view(scale.dtype)
    tall[1:39:2] = scale
    for w in (wide[:, 7 : 7 + 64], weight.t().contiguous().t(), weight.flip(0).flip(0)):
        for s in (tall[1:39:2], scale.t().contiguous().t()):
            packed = getattr(pp, f"pack_{fmt}")(w, s, *rest)
            assert np.array_equal(packed.dequantize(torch.float64).numpy(), c.values)


def test_rows_beyond_two_gigabytes() -> None:
    """Row offsets are 64-bit: rows 1.5 GiB apart, of which only a few pages are ever touched."""
    stride = 3 << 29
    weight = torch.empty(2 * stride + 64, dtype=torch.uint8).as_strided((3, 16), (stride, 1))
    weight.copy_(torch.arange(48, dtype=torch.uint8).reshape(3, 16))
    packed = pp.pack_mxfp4(weight, torch.tensor([[127], [128], [126]], dtype=torch.uint8))
    assert torch.equal(packed.unpack().weight, weight)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_bytes(rng: np.random.Generator, threads: int) -> None:
    c = random_checkpoint(rng, "nvfp4", 130, 64)
    expected, before = pack(c), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        packed = pack(c)
        assert torch.equal(packed.dequantize(), expected.dequantize())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(packed.tensors().values(), expected.tensors().values(), strict=True))
