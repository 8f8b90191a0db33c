"""KV-cache scales of the checkpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

if TYPE_CHECKING:
    from petit_vllm.config import PetitConfig

logger = logging.getLogger("petit_plugin.vllm")


class PetitKVCacheMethod(BaseKVCacheMethod):  # type: ignore[misc]
    """vLLM's own FP8 KV-cache scales, and a warning where calibrated ones got lost on the way."""

    def __init__(self, config: PetitConfig, prefix: str) -> None:
        super().__init__(config)
        self.prefix = prefix

    def create_weights(self, layer: torch.nn.Module) -> None:
        super().create_weights(layer)
        for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
            parameter = getattr(layer, name)
            parameter.data = parameter.data.float()  # made in the model's dtype, where bfloat16 would round the scales

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.quant_config.kv_scales_on_disk and hasattr(layer, "k_scale"):
            lost = [name for name in ("k_scale", "v_scale") if float(getattr(layer, name)) < 0]
            if lost:
                logger.warning(
                    "petit: the checkpoint has KV-cache scales, but %s got no %s; an FP8 cache uses 1.0 there",
                    self.prefix,
                    " and no ".join(lost),
                )
        super().process_weights_after_loading(layer)


def kv_cache_method(config: PetitConfig, layer: torch.nn.Module, prefix: str) -> PetitKVCacheMethod:
    """The method of an attention layer; ValueError for a cache type petit cannot serve."""
    cache_dtype = str(getattr(layer, "kv_cache_dtype", "auto"))
    if "nvfp4" in cache_dtype:
        raise ValueError(
            f"{prefix}: the checkpoint asks for an NVFP4 KV cache, which petit does not serve. "
            "Start vLLM with --kv-cache-dtype bfloat16 (or fp8); the weights load all the same."
        )
    return PetitKVCacheMethod(config, prefix)
