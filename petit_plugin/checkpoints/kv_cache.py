"""KV-cache formats and the names under which quantizers store the cache's scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from petit_plugin.checkpoints.errors import UnsupportedCheckpointError

# (projection or attention module) (scale): ModelOpt k_proj.k_scale, Quark k_proj.output_scale, compressed-tensors
# self_attn.k_scale, names already fused (qkv_proj.k_scale) or already mapped (attn.k_scale).
_KV_SCALE = re.compile(
    r"^(?P<attn>.*?)(?:\.(?P<proj>k|v)_proj\.(?:output_scale|(?P=proj)_scale)"
    r"|(?<!_proj)\.(?:(?:qkv_proj|attn)\.)?(?P<kv>[kv])_scale)$"
)


def kv_cache_format(value: Any) -> str | None:
    """None, "fp8" or "nvfp4" for a `kv_cache_scheme` / `kv_cache_quant_algo`: a dict, a name or nothing.

    Raises UnsupportedCheckpointError for anything else.
    """
    if value is None or value == "" or value == {}:
        return None
    if isinstance(value, Mapping):
        bits, kind = value.get("num_bits"), value.get("type")
        if (bits, kind) == (8, "float"):
            return "fp8"
        if (bits, kind) == (4, "float"):
            return "nvfp4"
        raise UnsupportedCheckpointError(f"KV cache: {bits}-bit {kind} is not supported; petit knows FP8 and NVFP4")
    name = str(value).upper()
    if name in ("NONE", "NULL"):
        return None
    if name in ("FP8", "FP8_CAST", "FP8_E4M3"):
        return "fp8"
    if name in ("NVFP4", "NVFP4_CAST"):
        return "nvfp4"
    raise UnsupportedCheckpointError(f"KV cache: {value!r} is not supported; petit knows FP8 and NVFP4")


def attention_scale_name(name: str) -> str | None:
    """Where a framework's attention keeps the KV scale stored as `name`: "...self_attn.attn.k_scale", or None.

    >>> attention_scale_name("model.layers.0.self_attn.k_proj.k_scale")
    'model.layers.0.self_attn.attn.k_scale'
    """
    found = _KV_SCALE.match(name)
    if not found:
        return None
    return f"{found['attn']}.attn.{found['proj'] or found['kv']}_scale"
