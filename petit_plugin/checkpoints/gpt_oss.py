"""gpt-oss's own MXFP4 (`quant_method: "mxfp4"`): only the experts are FP4, as blocks and scales of all experts at once.

{"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petit_plugin.checkpoints.spec import LayerFormat, QuantSpec, rule
from petit_plugin.checkpoints.values import list_of_str


def read(config: Mapping[str, Any]) -> QuantSpec:
    """A gpt-oss `quantization_config` -> QuantSpec whose default applies to experts only."""
    excludes = list_of_str(config, "modules_to_not_convert")
    rules = (rule(excludes, None),) if excludes else ()
    return QuantSpec("gpt-oss", LayerFormat("mxfp4", 32, "MXFP4"), rules, None, "gpt-oss", experts_only=True)
