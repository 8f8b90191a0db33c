"""compressed-tensors (llm-compressor): nvfp4-pack-quantized, mxfp4-pack-quantized, and mixed-precision groups.

    {"quant_method": "compressed-tensors", "format", "config_groups": {name: {"targets", "weights", "input_activations",
     "format"?}}, "ignore": [...], "kv_cache_scheme", "version"}

Global scales are divisors on disk (`weight_global_scale`); readers of tensors invert them once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from petit_plugin.checkpoints.errors import UnsupportedCheckpointError
from petit_plugin.checkpoints.kv_cache import kv_cache_format
from petit_plugin.checkpoints.spec import ForeignFormat, LayerFormat, QuantSpec, Rule, Scheme, require_fp4, rule
from petit_plugin.checkpoints.values import as_mapping, list_of_str, mapping_of

_CLASS_RANK = 1_000_000


def _scheme(group: Mapping[str, Any], default_format: str | None, where: str) -> Scheme:
    weights = mapping_of(group, "weights", f"{where}.")
    if not weights:
        return None
    fmt = group.get("format") or default_format
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    strategy = weights.get("strategy")
    if (bits, kind) != (4, "float"):
        return ForeignFormat(str(fmt) if fmt and fmt != "mixed-precision" else f"{kind}{bits} {strategy}")
    if group.get("output_activations"):
        raise UnsupportedCheckpointError(f"{where}: quantized outputs are served for the KV cache only")
    if weights.get("actorder"):
        raise UnsupportedCheckpointError(
            f"{where}: FP4 weights with actorder {weights['actorder']!r} are not supported"
        )
    if weights.get("symmetric") is False:
        raise UnsupportedCheckpointError(f"{where}: asymmetric FP4 weights are not supported")
    if (strategy, size) == ("tensor_group", 16) and fmt in ("nvfp4-pack-quantized", "mixed-precision", None):
        return LayerFormat("nvfp4", 16, "nvfp4-pack-quantized")
    if (strategy, size) == ("group", 32) and fmt in ("mxfp4-pack-quantized", "mixed-precision", None):
        return LayerFormat("mxfp4", 32, "mxfp4-pack-quantized")
    raise UnsupportedCheckpointError(
        f"{where}: 4-bit float weights in format {fmt!r}, strategy {strategy!r}, group_size {size} are not supported"
    )


def _version(text: Any) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", str(text or ""))
    return (int(found[1]), int(found[2])) if found else None


def _rank_targets(groups: Mapping[str, Any], default_format: str | None) -> tuple[list[Rule], Scheme]:
    """Targets in the order in which the producer applied them: exact names, then regexes sorted by their text, then
    the class Linear. The first that matches decides; a target written in two groups belongs to the later one.
    """
    by_target: dict[str, Scheme] = {}
    for key, group in groups.items():
        where = f"config_groups.{key}"
        group = as_mapping(group, where)
        scheme = _scheme(group, default_format, where)
        by_target |= dict.fromkeys(list_of_str(group, "targets", f"{where}."), scheme)

    default = by_target.pop("Linear", None)
    rules: list[Rule] = []
    for position, target in enumerate(sorted(by_target, key=lambda t: (t.startswith("re:"), t))):
        is_class = not target.startswith("re:") and "." not in target and target[:1].isupper()
        if is_class:
            raise UnsupportedCheckpointError(
                f"target class {target!r} ({by_target[target]}): petit knows the class Linear"
            )
        rules.append(rule([target], by_target[target], rank=2 + position))
    return rules, default


def read(config: Mapping[str, Any]) -> QuantSpec:
    """A compressed-tensors `quantization_config` -> QuantSpec."""
    status = config.get("quantization_status")
    if status not in (None, "compressed"):
        raise UnsupportedCheckpointError(
            f"compressed-tensors quantization_status {status!r}: only compressed weights are FP4"
        )
    sparsity = mapping_of(config, "sparsity_config")
    if sparsity and sparsity.get("format") not in (None, "dense"):
        raise UnsupportedCheckpointError(
            f"compressed-tensors sparsity format {sparsity.get('format')!r} is not supported"
        )
    if mapping_of(config, "transform_config").get("config_groups"):
        raise UnsupportedCheckpointError("compressed-tensors transforms (run-time rotations) are not supported")

    rules, default = _rank_targets(mapping_of(config, "config_groups"), config.get("format"))
    ignore = list_of_str(config, "ignore")
    if ignore:
        rules.insert(0, rule(dict.fromkeys(ignore), None))
    version = _version(config.get("version"))
    label = f"compressed-tensors {config['version']}" if config.get("version") else "compressed-tensors"
    spec = QuantSpec("compressed-tensors", default, tuple(rules), kv_cache_format(config.get("kv_cache_scheme")), label)
    if "mxfp4" in spec.formats and version is not None and version < (0, 14):
        warning = (
            f"{label} wrote some MXFP4 scales with exponent bias 125 instead of 127: weights four times too small mean "
            "that the checkpoint has to be exported again with 0.14 or later"
        )
        spec = replace(spec, warnings=(warning,))
    return require_fp4(spec, label)
