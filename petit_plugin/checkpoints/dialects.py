"""Which dialect a quantization config is written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from petit_plugin.checkpoints import compressed_tensors, gpt_oss, modelopt, quark
from petit_plugin.checkpoints.errors import NotFp4CheckpointError, UnsupportedCheckpointError
from petit_plugin.checkpoints.spec import QuantSpec

_READERS: dict[str, Callable[[Mapping[str, Any]], QuantSpec]] = {
    "quark": quark.read,
    "compressed-tensors": compressed_tensors.read,
    "mxfp4": gpt_oss.read,
}


def spec_from_config(config: Mapping[str, Any]) -> QuantSpec:
    if not isinstance(config, Mapping):
        raise UnsupportedCheckpointError(
            f"the quantization config must be a JSON object, not {str(config)[:80]!r}: export the checkpoint again"
        )
    method = str(config.get("quant_method") or "").lower().replace("_", "-")
    if method.startswith("modelopt") or "quantization" in config or "quant_algo" in config:
        return modelopt.read(config)
    # Some frameworks rewrite the method's name, so a compressed-tensors body is recognised by its shape.
    if method in ("", "compressed-tensors", "mxfp4") and "config_groups" in config:
        return compressed_tensors.read(config)
    if method in _READERS:
        return _READERS[method](config)
    if not method:
        raise UnsupportedCheckpointError("the quantization config has no quant_method: cannot tell its dialect")
    raise NotFp4CheckpointError(f"quant_method {config.get('quant_method')!r} is not an FP4 dialect petit reads")
