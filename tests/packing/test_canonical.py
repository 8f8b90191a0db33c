"""What packing repairs, proves and refuses: negative and NaN scales, E8M0 range, padding."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from fixtures import oracle
from numerics import assert_close, random_activations, random_checkpoint, reference

import petit_plugin as pp

WINDOW_LOW, WINDOW_HIGH = 67, 187


def u8(array: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.uint8).copy())


def same_numbers(packed: pp.PackedWeight, exact: np.ndarray) -> None:
    got = packed.dequantize(torch.float64).numpy()
    assert np.array_equal(got, exact)
    assert np.array_equal(np.signbit(got), np.signbit(exact))


def test_all_negative_zero_gives_exactly_zero() -> None:
    """ModelOpt writes zero as nibble 8, and MXFP4 zero blocks as bytes 0x88 with scale byte 0."""
    weight = torch.full((17, 64), 0x88, dtype=torch.uint8)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    for packed in (
        pp.pack_mxfp4(weight, torch.zeros(17, 4, dtype=torch.uint8)),
        pp.pack_nvfp4(weight, torch.full((17, 8), 0x38, dtype=torch.uint8), 1.0),
    ):
        assert torch.equal(pp.linear(x, packed), torch.zeros(3, 17, dtype=torch.bfloat16))
        assert torch.equal(packed.unpack().weight, weight)


def test_block_mixing_negative_zero_with_every_code() -> None:
    weight = u8([[8 | code << 4 for code in range(16)]] * 2)
    exact = oracle.dequantize_mxfp4(weight.numpy(), np.array([[127], [130]], np.uint8))
    same_numbers(pp.pack_mxfp4(weight, u8([[127], [130]])), exact)


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0x38, 1), (0x40, 2), (0x3C, 1.5), (0x48, 4), (0x7E, 448), (0x01, 2.0**-9), (0x07, 7 * 2.0**-9), (0x08, 2.0**-6)],
)
def test_e4m3_scales_known_values(byte: int, value: float) -> None:
    weight = torch.full((1, 8), 0x22, dtype=torch.uint8)  # all ones
    assert pp.pack_nvfp4(weight, u8([[byte]]), 1.0).dequantize()[0, 0].item() == value


@pytest.mark.parametrize("exponent", range(-9, -1))
def test_small_scales_with_unit_global_scale(exponent: int) -> None:
    weight = torch.arange(0, 256, 32, dtype=torch.uint8).reshape(1, 8)
    byte = torch.tensor([[2.0**exponent]]).to(torch.float8_e4m3fn)
    exact = oracle.dequantize_nvfp4(weight.numpy(), byte.view(torch.uint8).numpy(), 1.0)
    same_numbers(pp.pack_nvfp4(weight, byte, 1.0), exact)


@pytest.mark.parametrize("byte", [100, 102, 103, 104, 111, 112, 113, 120])
def test_float16_keeps_mxfp4_subnormals(byte: int) -> None:
    weight = u8([[code | 0x20 for code in range(16)]])
    exact = oracle.dequantize_mxfp4(weight.numpy(), np.array([[byte]], np.uint8))
    got = pp.pack_mxfp4(weight, u8([[byte]])).dequantize(torch.float16)
    assert np.array_equal(got.numpy(), exact.astype(np.float16))


def test_e8m0_dtype_and_bytes_mean_the_same(rng: np.random.Generator) -> None:
    if not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("torch older than 2.7 has no float8_e8m0fnu")
    c = random_checkpoint(rng, "mxfp4", 5, 64)
    weight, scale = c.torch_arguments()
    typed = pp.pack_mxfp4(weight, scale.view(torch.float8_e8m0fnu))
    assert torch.equal(typed.scale, pp.pack_mxfp4(weight, scale).scale)


def test_negative_block_scales_move_into_the_codes(rng: np.random.Generator) -> None:
    c = random_checkpoint(rng, "nvfp4", 20, 96, scales=[b for b in range(256) if b & 0x7F != 0x7F])
    packed = pp.pack_nvfp4(*c.torch_arguments())
    same_numbers(packed, c.values)
    again = packed.unpack()
    assert (again.weight_scale.view(torch.uint8) < 0x80).all()
    negative = np.repeat(c.scale >= 0x80, 8, axis=1)
    assert np.array_equal(again.weight.numpy(), np.where(negative, c.weight ^ 0x88, c.weight))


@pytest.mark.parametrize(("fmt", "byte", "neutral"), [("nvfp4", 0x7F, 0), ("nvfp4", 0xFF, 0), ("mxfp4", 255, 127)])
def test_nan_scale_over_a_zero_block_is_harmless(fmt: str, byte: int, neutral: int) -> None:
    group = 16 if fmt == "nvfp4" else 32
    weight = torch.full((2, group), 0x22, dtype=torch.uint8)  # two groups a row
    weight[1, group // 2 :] = 0x80  # a block of zeros of both signs
    scale = torch.full((2, 2), 0x38 if fmt == "nvfp4" else 127, dtype=torch.uint8)
    scale[1, 1] = byte
    packed = pp.pack_nvfp4(weight, scale, 1.0) if fmt == "nvfp4" else pp.pack_mxfp4(weight, scale)
    assert packed.dequantize().tolist() == [[1.0] * 2 * group, [1.0] * group + [0.0] * group]
    assert packed.unpack().weight_scale.view(torch.uint8)[1, 1] == neutral


@pytest.mark.parametrize(("fmt", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0xFF), ("mxfp4", 255)])
def test_nan_scale_is_refused_with_the_first_place(rng: np.random.Generator, fmt: str, byte: int) -> None:
    c = random_checkpoint(rng, fmt, 64, 256)
    c.weight[:] |= 0x11
    for row, group in ((40, 1), (7, 5), (7, 3)):
        c.scale[row, group] = byte
    with pytest.raises(ValueError, match=r"model\.layers\.3\.o_proj\.weight_scale\[7, 3\] is NaN"):
        getattr(pp, f"pack_{fmt}")(*c.torch_arguments(), name="model.layers.3.o_proj")


def test_failed_pack_leaves_out_untouched(rng: np.random.Generator) -> None:
    c = random_checkpoint(rng, "nvfp4", 20, 64)
    packed = pp.pack_nvfp4(*c.torch_arguments())
    before = {name: tensor.clone() for name, tensor in packed.tensors().items()}
    weight, scale, factor = random_checkpoint(rng, "nvfp4", 20, 64).torch_arguments()
    scale.view(torch.uint8)[19, 3], weight[19, 31] = 0x7F, 0x11
    with pytest.raises(ValueError, match="NaN"):
        pp.pack_nvfp4(weight, scale, factor, out=packed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in packed.tensors().items())


@pytest.mark.parametrize(("low", "high"), [(0, 100), (30, 150), (100, 200), (134, 254), (67, 187), (0, 0), (254, 254)])
def test_rows_outside_the_window_get_a_power_of_two(rng: np.random.Generator, low: int, high: int) -> None:
    c = random_checkpoint(rng, "mxfp4", 35, 320, scales=range(low, high + 1))
    c.scale[3], c.weight[3, :16] = rng.integers(120, 130, 10), 0x80  # a row inside the window, with a zero block
    c.weight[4, 16:32], c.scale[4, 1] = 0x08, 254  # zero blocks keep any byte
    c.weight[5, 16:32], c.scale[5, 1] = 0x08, 0
    c = c._replace(values=oracle.dequantize_mxfp4(c.weight, c.scale))
    packed = pp.pack_mxfp4(*c.torch_arguments())
    assert not packed.meta.exact
    assert (packed.row_exponent is None) == (low >= WINDOW_LOW and high <= WINDOW_HIGH)
    nonzero = (packed.unpack().weight.reshape(35, 10, 16) & 0x77).any(-1).numpy()
    stored = packed.scale.permute(0, 2, 1).reshape(-1, 10)[:35].numpy()
    assert ((stored >= WINDOW_LOW) & (stored <= WINDOW_HIGH))[nonzero].all()
    same_numbers(packed, c.values)
    again = packed.unpack()
    assert np.array_equal(again.weight.numpy(), c.weight) and np.array_equal(again.weight_scale.numpy(), c.scale)


def test_a_row_too_wide_runs_exactly(rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    c = random_checkpoint(rng, "mxfp4", 20, 128)
    c.scale[7] = [20, 141, 80, 127]
    c.weight[7] |= 0x11
    c = c._replace(values=oracle.dequantize_mxfp4(c.weight, c.scale))
    with caplog.at_level(logging.WARNING, logger="petit_plugin"):
        packed = pp.pack_mxfp4(*c.torch_arguments(), name="mlp.down_proj")
    assert packed.meta.exact and packed.row_exponent is None
    assert [record.getMessage().split(" spans")[0] for record in caplog.records] == ["mlp.down_proj.weight_scale"]
    same_numbers(packed, c.values)
    assert np.array_equal(packed.unpack().weight_scale.numpy(), c.scale)
    x = random_activations(rng, (4, 128), torch.float32)
    assert_close(pp.linear(x, packed), reference(x, c.values))


def test_a_wide_span_of_zero_blocks_only_is_not_exact(rng: np.random.Generator) -> None:
    c = random_checkpoint(rng, "mxfp4", 16, 96)
    c.scale[:] = [20, 140, 100]
    c.weight[:] |= 0x11
    c.weight[:, 16:32] = 0x80  # the block with byte 140
    packed = pp.pack_mxfp4(*c.torch_arguments())
    assert not packed.meta.exact and packed.row_exponent is not None
    same_numbers(packed, oracle.dequantize_mxfp4(c.weight, c.scale))


def test_out_with_new_row_exponents(rng: np.random.Generator) -> None:
    """Reload in place: row exponents need their tensor; a weight that has it takes weights that do not need it."""
    plain = random_checkpoint(rng, "mxfp4", 20, 64)
    shifted = random_checkpoint(rng, "mxfp4", 20, 64, scales=range(1, 60))
    packed = pp.pack_mxfp4(*plain.torch_arguments())
    with pytest.raises(ValueError, match="row exponents"):
        pp.pack_mxfp4(*shifted.torch_arguments(), out=packed)
    assert np.array_equal(packed.dequantize(torch.float64).numpy(), plain.values)
    packed = pp.pack_mxfp4(*shifted.torch_arguments())
    pp.pack_mxfp4(*plain.torch_arguments(), out=packed)
    assert np.array_equal(packed.dequantize(torch.float64).numpy(), plain.values)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_padded_rows_are_neutral(rng: np.random.Generator, fmt: str) -> None:
    c = random_checkpoint(rng, fmt, 17, 64, scales=range(1, 40) if fmt == "mxfp4" else None)
    packed = getattr(pp, f"pack_{fmt}")(*c.torch_arguments())
    assert (packed.weight[1].reshape(-1, 16, 4)[:, 1:] == 0).all()
    assert (packed.scale[1][:, 1:] == (0 if fmt == "nvfp4" else 127)).all()
    assert packed.row_scale.numel() == 1 or (packed.row_scale[17:] == 0).all()
    assert packed.row_exponent is None or (packed.row_exponent[17:] == 0).all()
