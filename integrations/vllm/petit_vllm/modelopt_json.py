"""The one place where vLLM refuses an FP4 checkpoint before it asks any plugin.

Checkpoints whose quantization is described only by ``hf_quant_config.json`` (no ``quantization_config`` in
``config.json``) pass through a function of vLLM that knows FP8 and NVFP4 and raises "Unknown ModelOpt quant algo" for
everything else, before plugins are asked. It has no hook, so it is wrapped; the wrapper answers only for the FP4
algorithms below and leaves every other checkpoint to the original. Without petit such a checkpoint still ends in an
error: vLLM's own ModelOpt reader then refuses the algorithm.
"""

from __future__ import annotations

import functools
from typing import Any

EXTRA_ALGORITHMS = frozenset({"MXFP4", "W4A16_NVFP4", "MIXED_PRECISION"})


def nested_algorithm(quant_config: Any) -> str | None:
    """Upper-case ``quant_algo`` of a ModelOpt dictionary in the ``hf_quant_config.json`` dialect, else None."""
    if not isinstance(quant_config, dict):
        return None
    producer, nested = quant_config.get("producer"), quant_config.get("quantization")
    if not isinstance(producer, dict) or producer.get("name") != "modelopt" or not isinstance(nested, dict):
        return None
    algorithm = nested.get("quant_algo")
    return str(algorithm).upper() if algorithm is not None else None


def accept_more_algorithms() -> None:
    """Wrap vLLM's reader of ``hf_quant_config.json`` once."""
    import vllm.config  # noqa: F401  (first: the next module and this one import each other)
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase as Convertor

    original = Convertor._normalize_quantization_config
    if getattr(original, "petit_wrapped", False):
        return

    @functools.wraps(original)
    def normalize(self: Any, config: Any) -> Any:
        quant_config: Any = getattr(config, "quantization_config", None)
        if nested_algorithm(quant_config) in EXTRA_ALGORITHMS:
            quant_config["quant_method"] = "modelopt"
            return quant_config
        return original(self, config)

    normalize.petit_wrapped = True  # type: ignore[attr-defined]
    Convertor._normalize_quantization_config = normalize
