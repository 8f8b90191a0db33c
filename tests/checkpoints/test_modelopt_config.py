from __future__ import annotations

from typing import Any

import pytest
from checkpoints.configs import PACKED, modelopt_flat, modelopt_nested

from petit_plugin.checkpoints import (
    LayerFormat,
    NotFp4CheckpointError,
    QuantSpec,
    UnsupportedCheckpointError,
    attention_scale_name,
)

NVFP4 = ("nvfp4", 16)
MXFP4 = ("mxfp4", 32)


def found(spec: QuantSpec, name: str) -> tuple[str, int] | None:
    layer = spec.layer_format(name, PACKED)
    return None if layer is None else (layer.format, layer.group_size)


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ("NVFP4", NVFP4),
        ("W4A16_NVFP4", NVFP4),
        ("NVFP4_AWQ", NVFP4),
        ("W4A8_NVFP4_FP8", NVFP4),
        ("mxfp4", MXFP4),
        ("MXFP4", MXFP4),
        ("W4A8_MXFP4_FP8", MXFP4),
    ],
)
@pytest.mark.parametrize("kv", [None, "FP8", "NVFP4"])
def test_both_dialects_give_the_same_spec(algo: str, expected: tuple[str, int], kv: str | None) -> None:
    exclude = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn*"]
    scheme = {"FP8": {"dynamic": False, "num_bits": 8, "type": "float"}, "NVFP4": "NVFP4", None: None}[kv]
    flat = modelopt_flat(algo, exclude, **({"kv_cache_scheme": scheme} if scheme else {}))
    group = {"group_size": expected[1]} if "W4A8_MX" in algo else {}
    nested = modelopt_nested(algo, exclude, kv_cache_quant_algo=kv, **group)
    spec = QuantSpec.from_config(flat)
    assert spec == QuantSpec.from_config(nested)
    assert spec.dialect == "modelopt" and spec.producer == "modelopt 0.47.0"
    assert spec.kv_cache == (kv.lower() if kv else None)
    assert spec.formats == {expected[0]}
    assert found(spec, "model.layers.0.self_attn.qkv_proj") == expected
    assert found(spec, "model.layers.1.self_attn.qkv_proj") is None
    assert found(spec, "lm_head") is None
    layer = spec.layer_format("model.layers.0.mlp.down_proj")
    assert isinstance(layer, LayerFormat) and layer.algo == algo.upper()
    assert layer.pre_quant_scale is (algo == "NVFP4_AWQ")


@pytest.mark.parametrize("missing", ["ignore", "config_groups", "producer"], ids=lambda key: f"without {key}")
def test_optional_keys(missing: str) -> None:
    config = modelopt_flat("NVFP4")
    del config[missing]
    assert QuantSpec.from_config(config).formats == {"nvfp4"}


def test_nested_without_kv_key_and_legacy_spelling() -> None:
    spec = QuantSpec.from_config({"quantization": {"quant_algo": "NVFP4", "exclude_modules": None}})
    assert spec.kv_cache is None and spec.formats == {"nvfp4"}


@pytest.mark.parametrize(
    ("exclude", "name", "expected"),
    [
        ("mtp*", "mtp.layers.0.mlp.gate_up_proj", None),
        ("mtp*", "model.layers.0.mlp.gate_up_proj", NVFP4),
        ("*.mlp.gate", "model.layers.0.mlp.gate", None),
        ("*.mlp.gate", "model.layers.0.mlp.gate_up_proj", NVFP4),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.gate_up_proj", None),  # the fused name itself
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.qkv_proj", None),
        ("model.layers.0.self_attn.*", "model.layers.0.self_attn.qkv_proj", None),
        ("model.layers.0", "model.layers.0.self_attn.qkv_proj", None),
        ("model.layers.1*", "model.layers.10.mlp.down_proj", NVFP4),
        ("model.layers.0.mlp.shared_expert*", "model.layers.0.mlp.shared_expert.down_proj", None),
        ("model.layers.0.mlp.shared_expert_gate", "model.layers.0.mlp.shared_expert.down_proj", NVFP4),
        ("model.layers.0.mlp.shared_expert_gate", "model.layers.0.mlp.shared_expert_gate", None),
        ("model.layers.0.mlp.experts*", "model.layers.0.mlp.experts", None),
        ("model.layers.0.mlp.experts*", "model.layers.0.mlp.experts.routed_experts", None),
        ("*.experts.*", "model.layers.0.mlp.experts", None),
        ("model.layers.3.mlp.experts.7.down_proj", "model.layers.3.mlp.experts", None),  # one leaf takes the bank out
        ("model.layers.3.mlp.experts.7.down_proj", "model.layers.2.mlp.experts", NVFP4),
        ("lm_head", "language_model.lm_head", None),
        ("model.layers.0.mlp.down_proj", "language_model.model.layers.0.mlp.down_proj", None),
    ],
)
def test_excludes(exclude: str, name: str, expected: tuple[str, int] | None) -> None:
    assert found(QuantSpec.from_config(modelopt_flat("NVFP4", [exclude])), name) == expected


@pytest.mark.parametrize("exclude", [["*.q_proj"], ["model.layers.0.self_attn.v_proj"], [r"re:.*\.(k|v)_proj"]])
def test_partly_excluded_fused_layer_is_refused(exclude: list[str]) -> None:
    spec = QuantSpec.from_config(modelopt_flat("NVFP4", exclude))
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.layers\.0\.self_attn\.qkv_proj fuses .*exclude all"):
        spec.layer_format("model.layers.0.self_attn.qkv_proj", PACKED)
    assert found(spec, "model.layers.0.self_attn.o_proj") == NVFP4


def test_all_shards_excluded_one_by_one() -> None:
    spec = QuantSpec.from_config(modelopt_flat("NVFP4", ["*.q_proj", "*.k_proj", "*.v_proj"]))
    assert found(spec, "model.layers.0.self_attn.qkv_proj") is None


def test_framework_prefix_mapper() -> None:
    def mapper(names: list[str]) -> list[str]:
        swaps = {
            "model.language_model.": "language_model.model.",
            "model.visual.": "visual.",
            "lm_head.": "language_model.lm_head.",
        }
        return [next((new + n[len(old) :] for old, new in swaps.items() if n.startswith(old)), n) for n in names]

    config = modelopt_flat("NVFP4", ["model.visual*", "model.language_model.layers.0.mlp.down_proj", "lm_head"])
    spec = QuantSpec.from_config(config).map_names(mapper)
    assert found(spec, "visual.blocks.0.mlp.fc1") is None
    assert found(spec, "language_model.model.layers.0.mlp.down_proj") is None
    assert found(spec, "language_model.model.layers.1.mlp.down_proj") == NVFP4
    assert found(spec, "language_model.lm_head") is None


def test_routers_stay_16_bit_even_if_no_list_names_them() -> None:
    spec = QuantSpec.from_config(modelopt_flat("NVFP4", ["lm_head"]))
    for name in (
        "model.layers.0.mlp.gate",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.mlp.shared_expert_gate",
    ):
        assert found(spec, name) is None
    assert found(spec, "model.layers.0.mlp.shared_expert.gate_up_proj") == NVFP4


MIXED: dict[str, Any] = {
    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    "model.layers.0.self_attn.k_proj": {"quant_algo": "FP8"},
    "model.layers.0.self_attn.v_proj": {"quant_algo": "FP8"},
    "model.layers.0.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.1.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.1.mlp.up_proj": {"quant_algo": "MXFP4", "group_size": 32},
    "model.layers.2.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.3.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.3.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.3.mlp.experts.0.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.3.mlp.shared_experts.down_proj": {"quant_algo": "MXFP8", "group_size": 32},
    "model.layers.4.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
    "model.layers.5.mlp.experts.0.w1": {"quant_algo": "NVFP4"},
    "model.layers.5.mlp.experts.0.w2": {"quant_algo": "FP8"},
    "mtp.layers.0.eh_proj": {"quant_algo": "NVFP4", "group_size": 16},
}


@pytest.mark.parametrize("dialect", ["flat", "nested"])
def test_mixed_precision_lists_layers(dialect: str) -> None:
    make = {"flat": modelopt_flat, "nested": modelopt_nested}[dialect]
    spec = QuantSpec.from_config(make("MIXED_PRECISION", [], quantized_layers=MIXED))
    assert spec.formats == {"nvfp4", "mxfp4"}
    assert found(spec, "model.layers.0.mlp.gate_up_proj") == NVFP4
    assert found(spec, "model.layers.3.mlp.experts") == NVFP4
    assert found(spec, "model.layers.4.mlp.experts") == NVFP4
    # not listed: not quantized, whatever its siblings are
    for name in (
        "model.layers.0.mlp.down_proj",
        "model.layers.0.linear_attn.conv1d",
        "model.layers.0.linear_attn.in_proj_ba",
    ):
        assert found(spec, name) is None
    assert spec.foreign_format("model.layers.0.self_attn.qkv_proj", PACKED).algo == "FP8"  # type: ignore[union-attr]
    with pytest.raises(
        UnsupportedCheckpointError, match=r"model\.layers\.0\.self_attn\.qkv_proj is quantized with FP8"
    ):
        spec.layer_format("model.layers.0.self_attn.qkv_proj", PACKED)
    with pytest.raises(UnsupportedCheckpointError, match=r"shared_experts\.down_proj is quantized with MXFP8"):
        spec.layer_format("model.layers.3.mlp.shared_experts.down_proj")
    with pytest.raises(UnsupportedCheckpointError, match=r"gate_proj: NVFP4, up_proj: MXFP4"):
        spec.layer_format("model.layers.1.mlp.gate_up_proj", PACKED)
    with pytest.raises(UnsupportedCheckpointError, match=r"gate_proj: NVFP4, up_proj: not quantized"):
        spec.layer_format("model.layers.2.mlp.gate_up_proj", PACKED)
    with pytest.raises(UnsupportedCheckpointError, match=r"layers\.5\.mlp\.experts has experts in different formats"):
        spec.layer_format("model.layers.5.mlp.experts")


def test_mtp_layers_are_numbered_after_the_decoder_by_frameworks() -> None:
    from dataclasses import replace

    spec = QuantSpec.from_config(modelopt_flat("MIXED_PRECISION", [], quantized_layers=MIXED))
    assert found(spec, "mtp.layers.0.eh_proj") == NVFP4
    assert found(spec, "mtp.layers.48.eh_proj") is None
    spec = replace(spec, num_hidden_layers=48)
    assert found(spec, "mtp.layers.48.eh_proj") == NVFP4
    assert found(spec, "mtp.layers.49.eh_proj") is None


def test_mixed_precision_from_config_groups() -> None:
    groups = {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["a.up_proj"]},
        "group_1": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["a.down_proj"]},
    }
    spec = QuantSpec.from_config(modelopt_flat("MIXED_PRECISION", config_groups=groups))
    assert found(spec, "a.up_proj") == NVFP4
    assert spec.foreign_format("a.down_proj") is not None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (modelopt_flat("NVFP4_SVD"), "NVFP4_SVD cannot be served: its low-rank branch"),
        (modelopt_flat("NVFP5"), "unknown quant_algo 'NVFP5'"),
        (modelopt_nested("NVFP4", group_size=32), "NVFP4 with group_size 32"),
        (
            modelopt_flat("MIXED_PRECISION", quantized_layers={"x.y": {"quant_algo": "NVFP9"}}),
            "layer x.y: unknown.*NVFP9",
        ),
        (
            modelopt_flat("MIXED_PRECISION", quantized_layers={"x.y": {"quant_algo": "NVFP4_SVD"}}),
            "layer x.y.*NVFP4_SVD",
        ),
        (modelopt_flat("MIXED_PRECISION", quantized_layers={"x.y": "NVFP4"}), "layer x.y.*object"),
        (modelopt_flat("MIXED_PRECISION"), "without quantized_layers"),
        (modelopt_flat("NVFP4", kv_cache_scheme={"num_bits": 8, "type": "int"}), "8-bit int"),
        (modelopt_nested("NVFP4", kv_cache_quant_algo="NVFP4_AFFINE"), "NVFP4_AFFINE"),
        (modelopt_nested("NVFP4", kv_cache_quant_algo="INT8"), "INT8"),
        ({"quant_method": "modelopt"}, "no quant_algo"),
        ({"quantization": ["NVFP4"]}, "must be an object"),
        ({"config": 1}, "no quant_method"),
        (modelopt_flat("MXFP4", config_groups=modelopt_flat("NVFP4")["config_groups"]), "describes NVFP4 weights"),
    ],
)
def test_refused_with_one_sentence(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=text) as error:
        QuantSpec.from_config(config)
    assert not isinstance(error.value, NotFp4CheckpointError)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        modelopt_flat("FP8"),
        modelopt_nested("FP8", group_size=None),
        modelopt_flat("MXFP8"),
        modelopt_flat("W4A16_AWQ"),
        modelopt_flat("MIXED_PRECISION", quantized_layers={"x": {"quant_algo": "FP8"}}),
        {"quant_method": "fp8"},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_without_fp4_it_is_handed_back(config: dict[str, Any]) -> None:
    with pytest.raises(NotFp4CheckpointError):
        QuantSpec.from_config(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.attn.k_scale"),  # ModelOpt
        ("model.layers.0.self_attn.v_proj.v_scale", "model.layers.0.self_attn.attn.v_scale"),
        ("model.layers.0.self_attn.k_proj.output_scale", "model.layers.0.self_attn.attn.k_scale"),  # Quark
        ("model.layers.0.self_attn.v_proj.output_scale", "model.layers.0.self_attn.attn.v_scale"),
        ("model.layers.0.self_attn.qkv_proj.k_scale", "model.layers.0.self_attn.attn.k_scale"),  # fused already
        ("model.layers.0.self_attn.v_scale", "model.layers.0.self_attn.attn.v_scale"),  # compressed-tensors
        ("model.layers.0.self_attn.attn.k_scale", "model.layers.0.self_attn.attn.k_scale"),
        ("model.layers.0.self_attn.q_proj.output_scale", None),
        ("model.layers.0.self_attn.k_proj.weight_scale", None),
        ("model.layers.0.self_attn.k_proj.v_scale", None),
    ],
)
def test_kv_scale_names(name: str, expected: str | None) -> None:
    assert attention_scale_name(name) == expected
