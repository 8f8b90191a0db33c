"""Quark, compressed-tensors, gpt-oss and DeepSeek-V4 quantization configs."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints.configs import (
    CT_FP8,
    CT_MXFP4,
    CT_NVFP4,
    FP8_TENSOR,
    MXFP4_WEIGHT,
    NVFP4_WEIGHT,
    PACKED,
    compressed_tensors,
    quark,
)

from petit_plugin.checkpoints import NotFp4CheckpointError, QuantSpec, UnsupportedCheckpointError, deepseek

PINNED_BLOCK = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "group_size": None, "block_size": [128, 128]}}
PINNED_MXFP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}


def found(spec: QuantSpec, name: str) -> str | None:
    layer = spec.layer_format(name, PACKED)
    return None if layer is None else layer.format


@pytest.mark.parametrize(
    ("weight", "expected"), [(MXFP4_WEIGHT, "mxfp4"), ([MXFP4_WEIGHT], "mxfp4"), (NVFP4_WEIGHT, "nvfp4")]
)
def test_quark_formats(weight: Any, expected: str) -> None:
    spec = QuantSpec.from_config(quark(weight))
    assert spec.dialect == "quark" and spec.formats == {expected} and spec.kv_cache is None
    assert found(spec, "model.layers.0.self_attn.qkv_proj") == expected
    assert found(spec, "model.layers.0.mlp.experts") == expected


@pytest.mark.parametrize(
    ("exclude", "name", "expected"),
    [
        ("lm_head", "lm_head", None),
        ("re:.*gate_proj", "model.layers.0.mlp.down_proj", "mxfp4"),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", None),
        ("re:.*v_proj", "model.visual.blocks.0.attn.proj", "mxfp4"),
        ("visual.blocks.0.attn.qkv_proj", "visual.blocks.0.attn.qkv_proj", None),  # fused already in the checkpoint
        ("model.layers.78.mlp.experts.*.down_proj", "model.layers.78.mlp.experts", None),
        ("model.layers.78.mlp.experts.31.down_proj", "model.layers.78.mlp.experts", None),
        ("model.layers.78.mlp.experts.31.down_proj", "model.layers.7.mlp.experts", "mxfp4"),
        ("re:model.layers.0.self_attn.[qkv]_proj", "model.layers.0.self_attn.qkv_proj", None),
    ],
)
def test_quark_excludes(exclude: str, name: str, expected: str | None) -> None:
    assert found(QuantSpec.from_config(quark(exclude=[exclude])), name) == expected


def test_quark_v_proj_regex_does_not_mean_qkv_proj() -> None:
    spec = QuantSpec.from_config(quark(exclude=["re:.*v_proj"]))
    with pytest.raises(UnsupportedCheckpointError, match="q_proj: MXFP4, k_proj: MXFP4, v_proj: not quantized"):
        spec.layer_format("model.layers.0.self_attn.qkv_proj", PACKED)


def test_quark_with_thousands_of_excludes_stays_quick() -> None:
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{p}"
        for i in range(3)
        for e in range(192)
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    spec = QuantSpec.from_config(quark(exclude=names))
    assert [found(spec, f"model.layers.{i}.mlp.experts") for i in (0, 2, 3, 30)] == [None, None, "mxfp4", "mxfp4"]


@pytest.mark.parametrize(
    ("pin", "algo"), [(PINNED_BLOCK, "fp8_e4m3 per_block"), (PINNED_MXFP8, "fp8_e4m3 per_group group 32")]
)
def test_quark_pinned_layers_never_fall_through(pin: dict[str, Any], algo: str) -> None:
    spec = QuantSpec.from_config(
        quark(layer_quant_config={"*.o_proj": pin, "model.layers.1.mlp.down_proj": {"weight": None}})
    )
    assert spec.foreign_format("model.layers.0.self_attn.o_proj").algo == algo  # type: ignore[union-attr]
    with pytest.raises(
        UnsupportedCheckpointError, match=rf"model\.layers\.0\.self_attn\.o_proj is quantized with {algo}"
    ):
        spec.layer_format("model.layers.0.self_attn.o_proj")
    assert found(spec, "model.layers.1.mlp.down_proj") is None
    assert found(spec, "model.layers.0.mlp.down_proj") == "mxfp4"


def test_quark_fp8_model_with_pinned_fp4_experts() -> None:
    spec = QuantSpec.from_config(quark(FP8_TENSOR, layer_quant_config={"*.experts.*": {"weight": MXFP4_WEIGHT}}))
    assert found(spec, "model.layers.0.mlp.experts") == "mxfp4"
    assert spec.foreign_format("model.layers.0.self_attn.o_proj") is not None


def test_quark_two_patterns_that_disagree_are_an_error() -> None:
    spec = QuantSpec.from_config(
        quark(layer_quant_config={"*.o_proj": PINNED_BLOCK, "*.self_attn.*": {"weight": None}})
    )
    with pytest.raises(UnsupportedCheckpointError, match=r"o_proj matches several groups"):
        spec.layer_format("model.layers.0.self_attn.o_proj")


def test_quark_kv_cache() -> None:
    pins = {f"*{p}_proj": {"weight": MXFP4_WEIGHT, "output_tensors": FP8_TENSOR} for p in "kv"}
    export = {"kv_cache_group": ["*k_proj", "*v_proj"], "weight_format": "real_quantized"}
    spec = QuantSpec.from_config(quark(layer_quant_config=pins, export=export))
    assert spec.kv_cache == "fp8" and found(spec, "model.layers.0.self_attn.qkv_proj") == "mxfp4"


def test_compressed_tensors_formats() -> None:
    nvfp4 = QuantSpec.from_config(compressed_tensors(ignore=["lm_head", r"re:.*mlp\.gate$"]))
    assert nvfp4.formats == {"nvfp4"} and found(nvfp4, "model.layers.0.mlp.gate_up_proj") == "nvfp4"
    assert found(nvfp4, "model.layers.0.mlp.gate") is None and found(nvfp4, "lm_head") is None
    mxfp4 = QuantSpec.from_config(compressed_tensors(CT_MXFP4, "mxfp4-pack-quantized", quant_method="mxfp4"))
    assert mxfp4.dialect == "compressed-tensors" and mxfp4.formats == {"mxfp4"}  # a framework renamed the method
    kv = compressed_tensors(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False})
    assert QuantSpec.from_config(kv).kv_cache == "fp8"


def test_compressed_tensors_overlapping_groups() -> None:
    """The producer tries exact names, then regexes in the order of their text, then the class Linear."""
    groups = {
        "group_0": {
            "targets": [r"re:.*mlp\.experts\..*", "Linear"],
            "weights": CT_NVFP4,
            "format": "nvfp4-pack-quantized",
        },
        "group_1": {"targets": [r"re:.*layers\.(5[6-9]|6[0-3])\..*"], "weights": CT_FP8, "format": "float-quantized"},
        "group_2": {
            "targets": ["model.layers.60.self_attn.o_proj"],
            "weights": CT_NVFP4,
            "format": "nvfp4-pack-quantized",
        },
    }
    spec = QuantSpec.from_config(compressed_tensors(fmt="mixed-precision", config_groups=groups))
    assert found(spec, "model.layers.55.mlp.experts") == "nvfp4"
    assert spec.foreign_format("model.layers.56.mlp.experts").algo == "float-quantized"  # type: ignore[union-attr]
    assert spec.foreign_format("model.layers.63.mlp.gate_up_proj", PACKED) is not None
    assert found(spec, "model.layers.60.self_attn.o_proj") == "nvfp4"
    assert found(spec, "model.layers.6.self_attn.o_proj") == "nvfp4"


@pytest.mark.parametrize(
    ("version", "warned"), [("0.13.0", True), ("0.9.3", True), ("0.14.0", False), ("0.17.0", False), (None, False)]
)
def test_old_mxfp4_producer_is_warned_about(version: str | None, warned: bool) -> None:
    spec = QuantSpec.from_config(compressed_tensors(CT_MXFP4, "mxfp4-pack-quantized", version=version))
    assert bool(spec.warnings) is warned and all("bias 125" in w for w in spec.warnings)
    assert not QuantSpec.from_config(compressed_tensors(version=version)).warnings


def test_gpt_oss_quantizes_experts_only() -> None:
    exclude = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    spec = QuantSpec.from_config({"quant_method": "mxfp4", "modules_to_not_convert": exclude})
    assert spec.dialect == "gpt-oss" and spec.formats == {"mxfp4"}
    assert found(spec, "model.layers.3.mlp.experts") == "mxfp4"
    for name in (
        "model.layers.3.self_attn.qkv_proj",
        "model.layers.3.mlp.router",
        "lm_head",
        "model.layers.3.anything",
    ):
        assert found(spec, name) is None


def test_deepseek_v4_experts() -> None:
    config = {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}, "expert_dtype": "fp4"}
    assert deepseek.is_fp4(config) and not deepseek.is_fp4({"quantization_config": {"quant_method": "fp8"}})
    spec = deepseek.read(config)
    assert found(spec, "layers.3.ffn.experts") == "mxfp4"
    assert found(spec, "layers.3.ffn.experts.7.w1") == "mxfp4"
    assert spec.foreign_format("layers.3.ffn.shared_experts.w1") is not None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (quark({**MXFP4_WEIGHT, "group_size": 16}), "group_size 16"),
        (quark({**MXFP4_WEIGHT, "is_dynamic": True}), "is_dynamic"),
        (quark([NVFP4_WEIGHT[0], MXFP4_WEIGHT]), "not one petit serves"),
        (quark(export={"weight_format": "fake_quantized"}), "fake_quantized"),
        (quark(layer_type_quant_config={"nn.Linear": {"weight": FP8_TENSOR}}), "nn.Linear"),
        (
            quark(layer_quant_config={"*q_proj": {"weight": MXFP4_WEIGHT, "output_tensors": FP8_TENSOR}}),
            "KV cache only",
        ),
        (quark(algo_config=[{"name": "rotation", "online_r1_rotation": True}]), "online_r1_rotation"),
        (compressed_tensors({**CT_NVFP4, "group_size": 32}), "group_size 32"),
        (compressed_tensors({**CT_NVFP4, "symmetric": False}), "asymmetric"),
        (compressed_tensors({**CT_NVFP4, "actorder": "group"}), "actorder"),
        (compressed_tensors(quantization_status="frozen"), "frozen"),
        (compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
        (compressed_tensors(transform_config={"config_groups": {"u": {}}}), "transforms"),
        (compressed_tensors(config_groups={"g": {"targets": ["Conv2d"], "weights": CT_NVFP4}}), "Conv2d"),
    ],
)
def test_refused_with_one_sentence(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=text) as error:
        QuantSpec.from_config(config)
    assert not isinstance(error.value, NotFp4CheckpointError)


@pytest.mark.parametrize("config", [quark(FP8_TENSOR), compressed_tensors(CT_FP8, "float-quantized")])
def test_without_fp4_it_is_handed_back(config: dict[str, Any]) -> None:
    with pytest.raises(NotFp4CheckpointError):
        QuantSpec.from_config(config)
