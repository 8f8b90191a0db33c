"""AMD Quark (`quant_method: "quark"`): MXFP4 and NVFP4, excludes by name, wildcard or regex, layers pinned one by one.

{"global_quant_config": {"weight", "input_tensors", "output_tensors", "bias"}, "layer_quant_config": {pattern: cfg},
 "layer_type_quant_config": {}, "exclude": [...], "export": {"kv_cache_group": [...], "weight_format", ...}}
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from petit_plugin.checkpoints.errors import NotFp4CheckpointError, UnsupportedCheckpointError
from petit_plugin.checkpoints.spec import ForeignFormat, LayerFormat, QuantSpec, Rule, Scheme, require_fp4, rule
from petit_plugin.checkpoints.values import as_mapping, list_of_str, mapping_of


def _one_spec(spec: Mapping[str, Any], where: str) -> Scheme:
    dtype, qscheme, group = spec.get("dtype"), spec.get("qscheme"), spec.get("group_size")
    if dtype != "fp4":
        return ForeignFormat(f"{dtype} {qscheme}" + (f" group {group}" if group else ""))
    if qscheme == "per_group" and group == 32 and spec.get("scale_format") in ("e8m0", None):
        if spec.get("is_dynamic"):
            raise UnsupportedCheckpointError(f"{where}: weights marked is_dynamic are not stored as FP4")
        return LayerFormat("mxfp4", 32, "MXFP4")
    raise UnsupportedCheckpointError(
        f"{where}: fp4 weights with qscheme {qscheme}, group_size {group}, scale_format {spec.get('scale_format')}; "
        "petit serves per_group 32 e8m0 (MXFP4) and the two-level per_group 16 form (NVFP4)"
    )


def _weight_scheme(cfg: Any, where: str) -> Scheme:
    """The scheme of one {"weight": ..., ...} entry; a weight of null is a layer that is not quantized."""
    cfg = as_mapping(cfg, where)
    if cfg.get("bias"):
        raise UnsupportedCheckpointError(f"{where}: quantized biases are not supported")
    weight = cfg.get("weight")
    if not weight:
        return None
    if isinstance(weight, Mapping):
        return _one_spec(weight, where)
    if isinstance(weight, list) and len(weight) == 1:
        return _one_spec(as_mapping(weight[0], f"{where}.weight[0]"), where)
    if isinstance(weight, list) and len(weight) == 2:
        inner, outer = (as_mapping(level, f"{where}.weight[{i}]") for i, level in enumerate(weight))
        if inner.get("dtype") == "fp4" and (inner.get("qscheme"), inner.get("group_size")) == ("per_group", 16):
            if (outer.get("dtype"), outer.get("qscheme")) == ("fp8_e4m3", "per_tensor"):
                return LayerFormat("nvfp4", 16, "NVFP4")
        elif inner.get("dtype") != "fp4":
            return ForeignFormat(f"{inner.get('dtype')}+{outer.get('dtype')}")
    raise UnsupportedCheckpointError(f"{where}: Quark weight description {weight!r} is not one petit serves")


def _kv_cache(config: Mapping[str, Any]) -> str | None:
    group = list_of_str(mapping_of(config, "export"), "kv_cache_group", "export.")
    cache = mapping_of(
        config, "kv_cache_quant_config"
    )  # newer files; older ones have the entries among the layers only
    for name, cfg in [*cache.items(), *mapping_of(config, "layer_quant_config").items()]:
        if not isinstance(cfg, Mapping) or not cfg.get("output_tensors"):
            continue
        spec = mapping_of(cfg, "output_tensors", f"layer {name}: ")
        if name not in cache and not any(name == g or fnmatch.fnmatchcase(name, g) for g in group):
            raise UnsupportedCheckpointError(f"layer {name}: quantized outputs are served for the KV cache only")
        if (spec.get("dtype"), spec.get("qscheme")) != ("fp8_e4m3", "per_tensor"):
            raise UnsupportedCheckpointError(
                f"KV cache: {spec.get('dtype')} {spec.get('qscheme')} is not supported; petit knows per-tensor fp8_e4m3"
            )
        return "fp8"
    return None


def _check_algorithms(config: Mapping[str, Any]) -> None:
    algos = config.get("algo_config") or []
    for algo in algos if isinstance(algos, list) else [algos]:
        algo = as_mapping(algo, "each entry of algo_config")
        online = [k for k, v in algo.items() if v is True and (k.startswith("online") or k in ("r3", "r4"))]
        if online:
            raise UnsupportedCheckpointError(
                f"Quark {algo.get('name')} works on activations at run time ({', '.join(online)}): not supported"
            )


def read(config: Mapping[str, Any]) -> QuantSpec:
    """A Quark `quantization_config` -> QuantSpec."""
    default = _weight_scheme(mapping_of(config, "global_quant_config"), "global_quant_config")
    weight_format = mapping_of(config, "export").get("weight_format")
    if weight_format not in (None, "real_quantized"):
        raise UnsupportedCheckpointError(f"Quark weight_format {weight_format!r}: only real_quantized weights are FP4")
    if mapping_of(config, "global_quant_config").get("output_tensors"):
        raise UnsupportedCheckpointError("global_quant_config: quantized outputs are served for the KV cache only")
    for kind, cfg in mapping_of(config, "layer_type_quant_config").items():
        if _weight_scheme(cfg, f"layer type {kind}") != default:
            raise UnsupportedCheckpointError(f"layer_type_quant_config gives {kind} a format of its own: not supported")

    rules: list[Rule] = []
    exclude = list_of_str(config, "exclude")
    if exclude:
        rules.append(rule(dict.fromkeys(exclude), None))
    by_scheme: dict[Scheme, list[str]] = {}
    for name, cfg in mapping_of(config, "layer_quant_config").items():
        by_scheme.setdefault(_weight_scheme(cfg, f"layer {name}"), []).append(name)
    # One rank for all of them: a layer that two patterns pin differently is an error, never a matter of order.
    rules += [rule(names, scheme, rank=1) for scheme, names in by_scheme.items()]

    if config.get("softmax_quant_spec"):
        raise UnsupportedCheckpointError("Quark softmax_quant_spec: a quantized softmax is not supported")
    kv = _kv_cache(config)
    _check_algorithms(config)
    label = f"quark {config['version']}" if config.get("version") else "quark"
    spec = QuantSpec("quark", default, tuple(rules), kv, label)
    if isinstance(default, ForeignFormat) and not spec.formats:
        raise NotFp4CheckpointError(f"Quark {default.algo} is not an FP4 format")
    return require_fp4(spec, "Quark")
