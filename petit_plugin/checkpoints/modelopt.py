"""NVIDIA ModelOpt. Two JSON dialects, one content:

flat, `quantization_config` in config.json:
    {"quant_method": "modelopt", "quant_algo", "ignore": [...], "config_groups", "kv_cache_scheme", "producer"}
nested, hf_quant_config.json (older; announced as deprecated):
    {"producer", "quantization": {"quant_algo", "group_size", "exclude_modules": [...], "kv_cache_quant_algo"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petit_plugin.checkpoints.errors import NotFp4CheckpointError, UnsupportedCheckpointError
from petit_plugin.checkpoints.kv_cache import kv_cache_format
from petit_plugin.checkpoints.spec import (
    GROUP_SIZES,
    ForeignFormat,
    LayerFormat,
    QuantSpec,
    Rule,
    Scheme,
    require_fp4,
    rule,
)
from petit_plugin.checkpoints.values import as_mapping, list_of_str, mapping_of

# Every one of these stores the weights as code * block scale [* weight_scale_2]; they differ in the activations, which
# stay 16-bit here.
_FP4_ALGOS = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
}
_REFUSED = {"NVFP4_SVD": "its low-rank branch (svdquant_lora_a/b) is not implemented"}
# fmt: off
_FOREIGN = frozenset({
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "FP8_BLOCK_SCALES", "MXFP8", "W4A16_AWQ",
    "W4A8_AWQ", "INT4_AWQ", "INT8", "INT8_SQ", "INT8_SMOOTHQUANT", "W8A16", "W8A8_SQ_PER_CHANNEL",
})
# fmt: on


def scheme_of_algo(algo: Any, group_size: Any, where: str) -> Scheme:
    """The scheme a `quant_algo` stands for. `where` (a layer or "the checkpoint") is named in errors."""
    if algo is None or str(algo).upper() in ("NONE", "NO_QUANT", ""):
        return None
    name = str(algo).upper()
    if name in _FP4_ALGOS:
        fmt = _FP4_ALGOS[name]
        if group_size not in (None, 0, GROUP_SIZES[fmt]):
            raise UnsupportedCheckpointError(
                f"{where}: {name} with group_size {group_size}: petit serves group_size {GROUP_SIZES[fmt]} only"
            )
        return LayerFormat(fmt, GROUP_SIZES[fmt], name, pre_quant_scale=name == "NVFP4_AWQ")
    if name in _FOREIGN:
        return ForeignFormat(name)
    if name in _REFUSED:
        raise UnsupportedCheckpointError(f"{where}: quant_algo {name} cannot be served: {_REFUSED[name]}")
    raise UnsupportedCheckpointError(
        f"{where}: unknown quant_algo {algo!r}; petit reads {', '.join(_FP4_ALGOS)} and MIXED_PRECISION"
    )


def _listed_layers(body: Mapping[str, Any]) -> dict[str, Scheme]:
    """MIXED_PRECISION: module -> scheme, from `quantized_layers` or, without it, from `config_groups`' targets."""
    layers = mapping_of(body, "quantized_layers")
    out: dict[str, Scheme] = {}
    if layers:
        for name, entry in layers.items():
            entry = as_mapping(entry, f"layer {name}")
            out[name] = scheme_of_algo(entry.get("quant_algo"), entry.get("group_size"), f"layer {name}")
        return out
    groups = mapping_of(body, "config_groups")
    if not groups:
        raise UnsupportedCheckpointError(
            "quant_algo MIXED_PRECISION without quantized_layers: cannot tell the layers apart"
        )
    for key, group in groups.items():
        where = f"config_groups.{key}"
        group = as_mapping(group, where)
        for target in list_of_str(group, "targets", f"{where}."):
            out[target] = scheme_of_group(group, f"layer {target}")
    return out


def scheme_of_group(group: Mapping[str, Any], where: str) -> Scheme:
    """The scheme of one entry of `config_groups`, from the description of its weights."""
    weights = mapping_of(group, "weights", f"{where}.")
    if not weights:
        return None
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if (bits, kind) == (4, "float"):
        if size == 16:
            return LayerFormat("nvfp4", 16, "NVFP4")
        if size == 32:
            return LayerFormat("mxfp4", 32, "MXFP4")
        raise UnsupportedCheckpointError(f"{where}: 4-bit float weights with group_size {size}; petit serves 16 and 32")
    if (bits, kind) == (8, "float"):
        return ForeignFormat("MXFP8" if size == 32 else "FP8")
    return ForeignFormat(f"{kind}{bits}")


def read(config: Mapping[str, Any]) -> QuantSpec:
    """Either dialect -> QuantSpec."""
    nested = config.get("quantization")
    if nested is not None and not isinstance(nested, Mapping):
        raise UnsupportedCheckpointError(f"hf_quant_config: 'quantization' must be an object, not {nested!r}")
    body: Mapping[str, Any] = nested if nested is not None else config
    algo = body.get("quant_algo")
    if not algo:
        raise UnsupportedCheckpointError("the ModelOpt quantization config has no quant_algo")

    kv = kv_cache_format(body.get("kv_cache_quant_algo") or body.get("kv_cache_scheme"))
    excludes = [*list_of_str(body, "exclude_modules"), *list_of_str(body, "ignore")]
    producer = config.get("producer") or {}
    label = (
        " ".join(str(producer[k]) for k in ("name", "version") if producer.get(k)) if isinstance(producer, dict) else ""
    )
    rules: list[Rule] = [rule(dict.fromkeys(excludes), None)] if excludes else []

    if str(algo).upper() == "MIXED_PRECISION":
        by_scheme: dict[Scheme, list[str]] = {}
        for name, scheme in _listed_layers(body).items():
            by_scheme.setdefault(scheme, []).append(name)
        rules += [rule(names, scheme, rank=1) for scheme, names in by_scheme.items()]
        # A layer that is not listed is not quantized: nothing is inherited from a parent or a sibling.
        spec = QuantSpec("modelopt", None, tuple(rules), kv, label)
        return require_fp4(spec, "ModelOpt MIXED_PRECISION")

    default = scheme_of_algo(algo, body.get("group_size"), "the checkpoint")
    if not isinstance(default, LayerFormat):
        raise NotFp4CheckpointError(f"ModelOpt quant_algo {algo!r} is not an FP4 format")
    for name, group in mapping_of(body, "config_groups").items():
        where = f"config_groups.{name}"
        described = scheme_of_group(as_mapping(group, where), where)
        if isinstance(described, LayerFormat) and described.format != default.format:
            raise UnsupportedCheckpointError(
                f"config_groups.{name} describes {described.algo} weights, but quant_algo is {algo}"
            )
    return QuantSpec("modelopt", default, tuple(rules), kv, label)
