"""What the headers of the safetensors files say, held against what the configuration says."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from petit_plugin.checkpoints import QuantSpec

logger = logging.getLogger("petit_plugin.vllm")

_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_REQUIRED = {"nvfp4": ("weight_scale", "weight_scale_2"), "mxfp4": ("weight_scale",)}


@dataclasses.dataclass
class CheckpointIndex:
    """The few facts about a checkpoint's tensors that its configuration may get wrong.

    `plain` holds modules with a 16-bit (or wider) matrix where the configuration says FP4: quantizers forget routers and
    MTP layers in their exclude lists. `kv_scales` says whether any calibrated KV-cache scale is in the files.
    """

    plain: frozenset[str] = frozenset()
    kv_scales: bool = False

    @classmethod
    def read(cls, model: str, revision: str | None, spec: QuantSpec) -> CheckpointIndex | None:
        """Read all headers (no tensor data). None when vLLM cannot reach them; loading then does the checks."""
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        headers: dict[str, Any] = get_safetensors_params_metadata(model, revision=revision)
        if not headers:
            logger.info("petit: no safetensors headers found for %s; missing tensors show during load", model)
            return None
        return cls.from_headers(headers, spec)

    @classmethod
    def from_headers(cls, headers: Mapping[str, Mapping[str, Any]], spec: QuantSpec) -> CheckpointIndex:
        """`headers`: tensor name -> {"dtype": "U8", "shape": [...]}. Raises ValueError naming layer and parameter."""
        plain, problems = set(), []
        for name, info in headers.items():
            layer, _, parameter = name.rpartition(".")
            if parameter == "weight_scale" and f"{layer}.weight" not in headers:
                problems.append(f"layer {layer}: parameter weight is missing (its weight_scale is there)")
            if parameter != "weight" or len(info["shape"]) < 2:
                continue
            found = spec.layer_format(layer, {})
            if info["dtype"] in _FLOATS:
                if found is not None:
                    plain.add(layer)
            elif info["dtype"] == "U8" and found is None:
                problems.append(
                    f"layer {layer}: weight is uint8, but the configuration lists the layer as not quantized"
                )
            elif found is not None:
                problems += [
                    f"layer {layer}: parameter {parameter} is missing"
                    for parameter in _REQUIRED[found.format]
                    if f"{layer}.{parameter}" not in headers
                ]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ValueError(f"this checkpoint cannot be loaded: {'; '.join(problems[:8])}{more}")
        return cls(frozenset(plain), any(n.endswith((".k_scale", ".v_scale")) for n in headers))

    def map_names(self, rename: Callable[[list[str]], list[str]]) -> CheckpointIndex:
        """The same facts in a framework's names."""
        return dataclasses.replace(self, plain=frozenset(rename(sorted(self.plain))))

    def is_plain(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> bool:
        """Whether the files hold a 16-bit weight for `prefix`; ValueError when only some shards of a fused layer do."""
        parent, _, leaf = prefix.rpartition(".")
        shards = [f"{parent}.{shard}" if parent else shard for shard in packed.get(leaf, ())] or [prefix]
        plain = [shard for shard in shards if shard in self.plain]
        if plain and len(plain) != len(shards):
            raise ValueError(
                f"{prefix} fuses {', '.join(shards)}, but only {', '.join(plain)} have 16-bit weights in the checkpoint; "
                "all shards of a fused layer must be quantized alike"
            )
        return bool(plain)
