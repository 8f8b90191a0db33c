"""Quantization configs: which checkpoints petit takes, and which method each layer gets."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from petit_plugin.checkpoints import ForeignFormat, LayerFormat, QuantSpec, UnsupportedCheckpointError
from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_vllm import METHODS, compat
from petit_vllm.summary import LoadSummary

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

logger = logging.getLogger("petit_plugin.vllm")


class PetitConfig(QuantizationConfig):  # type: ignore[misc]
    """``--quantization petit``: ModelOpt checkpoints with NVFP4 or MXFP4 weights, on ROCm and CPU."""

    method: ClassVar[str] = "petit"
    formats: ClassVar[frozenset[str]] = frozenset({"nvfp4", "mxfp4"})

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kv_scales_on_disk = False
        self.summary = LoadSummary()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(formats={sorted(self.spec.formats)}, kv_cache={self.spec.kv_cache})"

    def get_name(self) -> str:
        return self.method

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        dtypes = [torch.bfloat16, torch.float16]
        return [*dtypes, torch.float32] if compat.platform() == "cpu" else dtypes

    @classmethod
    def get_min_capability(cls) -> int:
        return 90  # gfx90a reports (9, 0); never asked on CPU

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PetitConfig:
        """Read either JSON dialect; raises ValueError for what this method cannot serve."""
        return cls(cls._read(config))

    @classmethod
    def _read(cls, config: dict[str, Any]) -> QuantSpec:
        platform = compat.platform()
        if platform not in ("rocm", "cpu"):
            raise ValueError(
                f"--quantization {cls.method}: petit runs on ROCm GPUs and CPUs, but this vLLM on {platform}. "
                "Leave the flag out to use vLLM's own FP4 method."
            )
        spec = QuantSpec.from_config(config)
        if spec.dialect != "modelopt":
            raise UnsupportedCheckpointError(
                f"--quantization {cls.method}: this is a {spec.dialect} checkpoint; in vLLM petit serves NVIDIA "
                "ModelOpt's (NVFP4, W4A16_NVFP4, MXFP4). Leave the flag out to use vLLM's own method."
            )
        if not spec.formats <= cls.formats:
            found = " and ".join(sorted(spec.formats))
            raise ValueError(
                f"--quantization {cls.method} was asked for, but the checkpoint holds {found} layers. "
                f"Use --quantization petit{'_' + found if len(spec.formats) == 1 else ''} or leave the flag out."
            )
        return spec

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Called by vLLM for every method and every quantized checkpoint; the first answer wins, unchecked.

        A petit method the user named answers with itself or raises. Without a flag the ModelOpt FP4 checkpoints are
        taken on ROCm and CPU. Names that no method has are refused here, because vLLM would replace them silently with
        its own reading of the checkpoint.
        """
        if user_quant is None:
            return cls.method if cls.method == "petit" and _autodetect(hf_quant_cfg) else None
        if user_quant in METHODS:
            if user_quant != cls.method:
                return None
            cls._read(hf_quant_cfg)
            return cls.method
        _refuse_unknown_method(user_quant)
        return None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the checkpoint's headers and stop before loading when they contradict the configuration.

        A checkpoint that is not on this machine yet is checked while it loads.
        """
        if not Path(model_name).is_dir():
            logger.info("petit: %s is not a local directory; missing tensors show during load", model_name)
            return
        checkpoint = Checkpoint(model_name, self.spec)
        checkpoint.check()
        self.spec = checkpoint.spec  # knows routers and other layers that are 16-bit whatever the configuration says
        self.kv_scales_on_disk = any(name.endswith((".k_scale", ".v_scale")) for name in checkpoint.tensors)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.spec = self.spec.map_names(lambda names: list(hf_to_vllm_mapper.apply_list(names)))

    def layer_format(self, prefix: str) -> LayerFormat | None:
        """Format of the (possibly fused) module `prefix` in vLLM's names, None for a 16-bit one."""
        found: LayerFormat | None = self.spec.layer_format(prefix, self.packed_modules_mapping)
        if found is not None and found.pre_quant_scale:
            raise UnsupportedCheckpointError(
                f"layer {prefix}: {found.algo} multiplies its activations by a pre_quant_scale; petit does not do that "
                "in vLLM yet"
            )
        return found

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for one layer; None where vLLM's own 16-bit method is right."""
        from vllm.model_executor.layers.attention import Attention, MLAAttention
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, (Attention, MLAAttention)):
            from petit_vllm.kv_cache import kv_cache_method

            return kv_cache_method(self, layer, prefix)
        if isinstance(layer, RoutedExperts):
            from petit_vllm.moe import PetitMoEMethod

            found = self.layer_format(prefix)  # one answer for the bank: it runs as one kernel
            self.summary.saw(prefix, found)
            return None if found is None else PetitMoEMethod(self, found, layer.moe_config, prefix)
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            from petit_vllm.linear import PetitLinearMethod

            found = self.layer_format(prefix)
            self.summary.saw(prefix, found)
            if found is not None:
                return PetitLinearMethod(self, found, prefix)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        return None


class PetitNvfp4Config(PetitConfig):
    """``--quantization petit_nvfp4``: as petit, and the checkpoint must be NVFP4."""

    method = "petit_nvfp4"
    formats = frozenset({"nvfp4"})


class PetitMxfp4Config(PetitConfig):
    """``--quantization petit_mxfp4``: as petit, and the checkpoint must be MXFP4."""

    method = "petit_mxfp4"
    formats = frozenset({"mxfp4"})


def _autodetect(hf_quant_cfg: dict[str, Any]) -> bool:
    """Whether to take a checkpoint nobody asked us to take."""
    if os.environ.get("PETIT_AUTODETECT", "1") == "0" or compat.platform() not in ("rocm", "cpu"):
        return False
    try:
        spec = QuantSpec.from_config(hf_quant_cfg)
    except ValueError:
        return False  # not FP4, or something petit does not serve: vLLM's own methods decide
    schemes = [spec.default, *(rule.scheme for rule in spec.rules)]
    if spec.dialect != "modelopt" or any(isinstance(scheme, ForeignFormat) for scheme in schemes):
        return False
    if any(isinstance(scheme, LayerFormat) and scheme.pre_quant_scale for scheme in schemes):
        return False
    _say_taken(compat.platform())
    return True


@functools.cache
def _say_taken(platform: str) -> None:
    logger.info("petit: serving this FP4 checkpoint on %s (PETIT_AUTODETECT=0 turns this off)", platform)


def _refuse_unknown_method(user_quant: str) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if user_quant not in QUANTIZATION_METHODS:
        raise ValueError(
            f"--quantization {user_quant}: no such method. petit registers {', '.join(METHODS)}; "
            "leave the flag out to let the checkpoint decide."
        )


def register_methods() -> None:
    """Enter the three methods in vLLM's table (again is harmless)."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    for config in (PetitConfig, PetitNvfp4Config, PetitMxfp4Config):
        register_quantization_config(config.method)(config)
