"""DeepSeek-V4's own layout: experts in MXFP4 (`expert_dtype: "fp4"`), every other linear in block FP8.

The quantization config alone says FP8; that the experts are FP4 stands in the model's config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petit_plugin.checkpoints.spec import ForeignFormat, LayerFormat, QuantSpec, rule


def is_fp4(model_config: Mapping[str, Any]) -> bool:
    quant = model_config.get("quantization_config")
    return (
        isinstance(quant, Mapping) and quant.get("quant_method") == "fp8" and model_config.get("expert_dtype") == "fp4"
    )


def read(model_config: Mapping[str, Any]) -> QuantSpec:
    """A whole config.json -> QuantSpec."""
    experts = LayerFormat("mxfp4", 32, "MXFP4")
    rules = (rule(["re:.*\\.experts(\\.|$)"], experts),)
    return QuantSpec("deepseek-v4", ForeignFormat("FP8_BLOCK_SCALES"), rules, None, "deepseek")
