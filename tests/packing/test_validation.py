"""Wrong tensors are refused with a message that names the tensor, what it is and what to do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import petit_plugin as pp

W = torch.zeros(32, 64, dtype=torch.uint8)  # [N, K/2]: N = 32, K = 128
S = torch.zeros(32, 8, dtype=torch.uint8)  # NVFP4
M = torch.zeros(32, 4, dtype=torch.uint8)  # MXFP4
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None, S, 1.0), TypeError, ["q.weight", "NoneType"]),
        ((W, None, 1.0), TypeError, ["q.weight_scale", "NoneType"]),
        ((W, S, None), TypeError, ["q.global_scale", "NoneType"]),
        ((W.to(torch.bfloat16), S, 1.0), TypeError, ["q.weight ", "bfloat16", "uint8"]),
        ((W.view(torch.int8), S, 1.0), TypeError, ["q.weight ", "int8", "uint8"]),
        ((W, S.float(), 1.0), TypeError, ["q.weight_scale", "float32", "float8_e4m3fn"]),
        ((W, S.view(torch.float8_e4m3fnuz), 1.0), TypeError, ["q.weight_scale", "fnuz", "bytes", "float8_e4m3fn"]),
        ((W, S.view(torch.float8_e5m2), 1.0), TypeError, ["q.weight_scale", "e5m2"]),
        ((W[0], S, 1.0), ValueError, ["q.weight ", "[64]", "two dimensions"]),
        ((W[None], S, 1.0), ValueError, ["q.weight ", "[1, 32, 64]"]),
        ((W, S[:, :7], 1.0), ValueError, ["q.weight_scale", "[32, 7]", "[32, 8]", "16"]),
        ((W, S[:31], 1.0), ValueError, ["q.weight_scale", "[31, 8]", "[32, 8]"]),
        ((W, M, 1.0), ValueError, ["q.weight_scale", "[32, 4]", "[32, 8]"]),
        ((W[:, :60], S, 1.0), ValueError, ["q.weight ", "K = 120", "16", "shard"]),
        ((W[:0], S[:0], 1.0), ValueError, ["q.weight ", "[0, 64]"]),
        ((W[:, :0], S[:, :0], 1.0), ValueError, ["q.weight ", "[32, 0]"]),
        ((W, S, torch.ones(31)), ValueError, ["q.global_scale", "[31]", "[32]"]),
        ((W, S, torch.ones(32, 1)), ValueError, ["q.global_scale", "[32, 1]"]),
        ((W, S, torch.ones(1, dtype=torch.bfloat16)), TypeError, ["q.global_scale", "bfloat16", "float32"]),
        ((W, S, torch.ones(1, dtype=torch.float64)), TypeError, ["q.global_scale", "float64"]),
        ((W, S, float("nan")), ValueError, ["q.global_scale", "nan", "row 0"]),
        ((W, S, torch.tensor([1.0] * 9 + [float("inf")] + [1.0] * 22)), ValueError, ["q.global_scale", "inf", "row 9"]),
        ((W, S.to("meta"), 1.0), ValueError, ["q.weight_scale", "meta", "cpu"]),
        ((W, S, torch.ones(1, device="meta")), ValueError, ["q.global_scale", "meta", "cpu"]),
        ((W.to("meta"), S.to("meta"), 1.0), ValueError, ["meta"]),
        ((W, S, 1e-60), ValueError, ["q.global_scale", "1e-60", "zero in float32"]),
        ((W, S, 1e39), ValueError, ["q.global_scale", "1e+39", "float32"]),
        ((W, S, float("inf")), ValueError, ["q.global_scale", "inf", "row 0"]),
        ((W, S, True), TypeError, ["q.global_scale", "bool"]),
    ],
)
def test_nvfp4(arguments: tuple[Any, ...], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        pp.pack_nvfp4(*arguments, name="q")
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((W, S), ValueError, ["weight_scale", "[32, 8]", "[32, 4]", "32"]),
        ((W, M.float()), TypeError, ["weight_scale", "float32", "uint8"]),
        ((W, M.view(E4M3)), TypeError, ["weight_scale", "float8_e4m3fn", "uint8"]),
        ((W[:, :56], M), ValueError, ["weight ", "K = 112", "32"]),
    ],
)
def test_mxfp4(arguments: tuple[Any, ...], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        pp.pack_mxfp4(*arguments)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_group_cut_by_tensor_parallelism_is_refused_with_the_numbers() -> None:
    """1856 / 8 = 232 columns a rank cut a group of 16."""
    with pytest.raises(ValueError, match=r"K = 232.*group 16.*shard on group boundaries"):
        pp.pack_nvfp4(torch.zeros(16, 116, dtype=torch.uint8), torch.zeros(16, 14, dtype=torch.uint8), 1.0)


@pytest.mark.parametrize("arch", ["gfx1100", "cuda", ""])
def test_unknown_arch_names_what_there_is(arch: str) -> None:
    with pytest.raises(ValueError, match=r"arch .*cpu"):
        pp.pack_nvfp4(W, S, 1.0, arch=arch)


def test_zero_and_negative_global_scales_multiply() -> None:
    weight, scale = torch.full((2, 8), 0x22, dtype=torch.uint8), torch.full((2, 1), 0x38, dtype=torch.uint8)
    packed = pp.pack_nvfp4(weight, scale, torch.tensor([0.0, -3.0]))
    assert packed.dequantize().tolist() == [[0.0] * 16, [-3.0] * 16]


def test_out_of_another_weight_is_refused() -> None:
    packed = pp.pack_nvfp4(W, S, 1.0)
    with pytest.raises(ValueError, match="out is"):
        pp.pack_nvfp4(W[:16], S[:16], 1.0, out=packed)
    with pytest.raises(ValueError, match="out is"):
        pp.pack_mxfp4(W, M, out=packed)


def test_from_tensors_checks_what_it_is_given() -> None:
    packed = pp.pack_mxfp4(W, M)
    good = packed.tensors()
    for bad, words in [
        ({name: t for name, t in good.items() if name != "scale"}, "missing tensors"),
        ({**good, "bias": good["row_scale"]}, "unknown tensors"),
        ({**good, "row_scale": good["row_scale"].double()}, "row_scale"),
        ({**good, "weight": good["weight"][:1]}, "weight"),
        ({**good, "row_scale": good["row_scale"].to("meta")}, "row_scale"),
        ({**good, "scale": good["scale"].transpose(0, 1)}, "scale"),
    ]:
        with pytest.raises(ValueError, match=words):
            pp.PackedWeight.from_tensors(packed.meta, bad)


@pytest.mark.parametrize(
    ("meta", "scale_groups", "words"),
    [
        (("nvfp4", "cpu", 16, 24), 1, "k is 24.*multiple of 16"),  # shapes agree when the half group is forgotten
        (("mxfp4", "cpu", 16, 48), 1, "k is 48.*multiple of 32"),
        (("nvfp4", "cpu", 16, 0), 0, "k is 0"),
        (("nvfp4", "cpu", 0, 16), 1, "n is 0"),
        (("mxfp4", "cpu", -16, 32), 1, "n is -16"),
        (("fp4", "cpu", 16, 32), 1, "format is 'fp4'.*nvfp4, mxfp4"),
        (("nvfp4", "cpu", 16, 32, True), 2, "exact"),
    ],
)
def test_numbers_no_weight_can_have(meta: tuple[Any, ...], scale_groups: int, words: str) -> None:
    """They are refused before a kernel gets addresses, wherever they enter."""
    numbers, rows = pp.PackedMeta(*meta), max(meta[2], 0)
    tensors = {
        "weight": torch.zeros(rows // 16, meta[3] // 8, 64, dtype=torch.uint8),
        "scale": torch.zeros(rows // 16, scale_groups, 16, dtype=torch.uint8),
        "row_scale": torch.zeros(rows),
    }
    packed = pp.PackedWeight(numbers, **tensors)
    for use in (
        lambda: pp.PackedWeight.from_tensors(numbers, tensors),
        lambda: pp.linear(torch.zeros(1, meta[3]), packed),
        packed.dequantize,
        packed.unpack,
    ):
        with pytest.raises(ValueError, match=words):
            use()


def test_from_tensors_refuses_what_is_no_plain_tensor() -> None:
    packed = pp.pack_nvfp4(W, S, 1.0)
    good = packed.tensors()
    for bad in ({**good, "weight": [1]}, {**good, "scale": None}):
        with pytest.raises(TypeError, match=r"(weight|scale) of packed weight .* must be a torch\.Tensor"):
            pp.PackedWeight.from_tensors(packed.meta, bad)
    with pytest.raises(ValueError, match="row_scale of packed weight"):
        pp.PackedWeight.from_tensors(packed.meta, {**good, "row_scale": good["row_scale"].to_sparse()})
    with pytest.raises(ValueError, match=r"unknown tensors \['row_exponent'\]"):
        pp.PackedWeight.from_tensors(packed.meta, {**good, "row_exponent": torch.zeros(32, dtype=torch.int32)})


def test_packing_an_ordinary_layer_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="petit_plugin"):
        pp.pack_nvfp4(W, S, 1.0)
        pp.pack_mxfp4(W, M)
    assert caplog.records == []


def test_repr_says_what_it_is() -> None:
    assert repr(pp.pack_nvfp4(W, S, 1.0)).startswith("PackedWeight(nvfp4 [32, 128] for cpu, ")
