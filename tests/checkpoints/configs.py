"""Quantization configs as the exporters write them, for the table tests."""

from __future__ import annotations

from typing import Any

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def modelopt_flat(algo: str = "NVFP4", ignore: list[str] | None = None, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "ignore": ignore or [],
        "producer": PRODUCER,
    }
    if algo.upper().startswith(("NVFP4", "W4A16_NVFP4")):
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        config["config_groups"] = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return config | more


def modelopt_nested(algo: str = "NVFP4", exclude: list[str] | None = None, **more: Any) -> dict[str, Any]:
    body = {"quant_algo": algo, "kv_cache_quant_algo": None, "exclude_modules": exclude or []}
    if algo.upper() != "MXFP4":
        body["group_size"] = 16
    return {"producer": PRODUCER, "quantization": body | more}


MXFP4_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
FP8_TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
NVFP4_WEIGHT = [
    {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "fp8_e4m3", "is_dynamic": False},
    FP8_TENSOR,
]


def quark(weight: Any = MXFP4_WEIGHT, exclude: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "version": "0.13",
        "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": exclude or [],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    } | more


CT_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
CT_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
CT_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def compressed_tensors(
    weights: dict[str, Any] = CT_NVFP4, fmt: str = "nvfp4-pack-quantized", ignore: list[str] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ignore or [],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "version": "0.17.0",
    } | more
