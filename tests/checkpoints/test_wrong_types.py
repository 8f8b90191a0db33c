"""Valid JSON of the wrong shape is refused with its key, its value and a remedy: no traceback, no guess."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints.configs import FP8_TENSOR, MXFP4_WEIGHT, NVFP4_WEIGHT, compressed_tensors, modelopt_flat, quark
from checkpoints.configs import modelopt_nested as nested
from cli.runner import petit

from petit_plugin.checkpoints import BrokenCheckpointError, QuantSpec, UnsupportedCheckpointError
from petit_plugin.checkpoints.safetensors_files import load_json, read_header

MODELOPT = Path(__file__).parents[1] / "fixtures" / "modelopt"
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
MIXED = {"quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}}


def _ct_group(**group: Any) -> dict[str, Any]:
    config = compressed_tensors()
    config["config_groups"]["group_0"] |= group
    return config


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ("nvfp4", "quantization config", "nvfp4"),
        (["nvfp4"], "quantization config", "nvfp4"),
        (modelopt_flat() | {"ignore": 5}, "ignore", "5"),
        (modelopt_flat() | {"ignore": "lm_head"}, "ignore", "'lm_head'"),
        (modelopt_flat() | {"ignore": ["lm_head", 3]}, "ignore", "3"),
        (modelopt_flat() | {"ignore": ["re:("]}, "pattern", "re:("),
        (modelopt_flat() | {"config_groups": [1]}, "config_groups", "[1]"),
        (modelopt_flat() | {"config_groups": {"group_0": 7}}, "config_groups.group_0", "7"),
        (modelopt_flat() | {"config_groups": {"group_0": {"weights": "fp4"}}}, "config_groups.group_0.weights", "fp4"),
        (modelopt_flat("MIXED_PRECISION", quantized_layers={"a.b": 4}), "layer a.b", "4"),
        (modelopt_flat("MIXED_PRECISION", config_groups={"g": {"targets": "Linear"}}), "config_groups.g.targets", "L"),
        (nested() | {"quantization": "NVFP4"}, "quantization", "NVFP4"),
        (nested(exclude_modules="lm_head"), "exclude_modules", "lm_head"),
        (compressed_tensors() | {"ignore": "lm_head"}, "ignore", "lm_head"),
        (compressed_tensors() | {"config_groups": [1]}, "config_groups", "[1]"),
        (compressed_tensors() | {"config_groups": {"group_0": 1}}, "config_groups.group_0", "1"),
        (_ct_group(targets="Linear"), "config_groups.group_0.targets", "'Linear'"),
        (_ct_group(weights=[4]), "config_groups.group_0.weights", "[4]"),
        (_ct_group(targets=["re:[a"]), "pattern", "re:[a"),
        (compressed_tensors() | {"sparsity_config": "dense"}, "sparsity_config", "dense"),
        (compressed_tensors() | {"transform_config": [0]}, "transform_config", "[0]"),
        (quark([1, 2]), "global_quant_config.weight[0]", "1"),
        (quark([1]), "global_quant_config.weight[0]", "1"),
        (quark("fp4"), "global_quant_config", "'fp4'"),
        (quark() | {"global_quant_config": "fp4"}, "global_quant_config", "fp4"),
        (quark() | {"algo_config": ["x"]}, "algo_config", "'x'"),
        (quark() | {"exclude": "lm_head"}, "exclude", "lm_head"),
        (quark() | {"exclude": ["re:a{99999999999}"]}, "pattern", "re:a{"),
        (quark() | {"export": "real_quantized"}, "export", "real_quantized"),
        (quark() | {"export": {"kv_cache_group": "*k_proj"}}, "export.kv_cache_group", "*k_proj"),
        (quark() | {"layer_quant_config": ["x"]}, "layer_quant_config", "['x']"),
        (quark() | {"layer_quant_config": {"a.b": "fp4"}}, "layer a.b", "fp4"),
        (GPT_OSS | {"modules_to_not_convert": "self_attn"}, "modules_to_not_convert", "self_attn"),
    ],
)
def test_key_value_and_remedy(config: Any, key: str, value: str) -> None:
    with pytest.raises(UnsupportedCheckpointError) as caught:
        QuantSpec.from_config(config)
    assert key in str(caught.value) and value in str(caught.value), caught.value


def _variants(value: Any) -> Iterator[Any]:
    """`value` with one of its parts, however deep, replaced by something of another type."""
    yield from (None, True, 5, 1.5, "x", "re:(", [], ["x"], [1, 2], [None], [[]], {}, {"x": 1}, {"x": ["y"]})
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        for other in _variants(part):
            changed = copy.copy(value)
            changed[key] = other
            yield changed


@pytest.mark.parametrize(
    "config",
    [
        modelopt_flat(),
        modelopt_flat("MXFP4", ignore=["lm_head"]),
        modelopt_flat("MIXED_PRECISION", **MIXED),
        nested(exclude=["lm_head", "re:.*gate"]),
        compressed_tensors(ignore=["lm_head"], sparsity_config={"format": "dense"}, transform_config={}),
        quark(exclude=["lm_head"], algo_config=[{"name": "rotation", "r1": True}]),
        quark(
            NVFP4_WEIGHT,
            layer_quant_config={"*k_proj": {"weight": MXFP4_WEIGHT, "output_tensors": FP8_TENSOR}},
            export={"kv_cache_group": ["*k_proj"], "weight_format": "real_quantized"},
        ),
        GPT_OSS,
    ],
    ids=lambda config: config.get("quant_method", "nested"),
)
def test_no_wrong_type_anywhere_gives_anything_else(config: dict[str, Any]) -> None:
    QuantSpec.from_config(config)
    variants = list(_variants(config))
    assert len(variants) > 40
    for changed in variants:
        before = json.dumps(changed)
        try:
            spec = QuantSpec.from_config(changed)
            spec.scheme("model.layers.0.mlp.down_proj")
        except UnsupportedCheckpointError:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {before}") from error


@pytest.mark.parametrize("key", ["quantization_config", "text_config", "architectures"])
@pytest.mark.parametrize("value", ["nvfp4", [1, 2], 3])
@pytest.mark.parametrize("command", ["inspect"])
def test_command_line(key: str, value: Any, command: str, tmp_path: Path) -> None:
    config = json.loads((MODELOPT / "llama-mxfp4" / "config.json").read_text())
    for file in (MODELOPT / "llama-mxfp4").glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    result = petit(command, tmp_path)
    assert result.code == 1 and result.err.startswith("error: ") and result.err.count("\n") == 1


@pytest.mark.parametrize("number", ["Infinity", "1e400", "2.0", '"2"', "true", "null", "[2]", "NaN"])
@pytest.mark.parametrize("where", ["shape", "data_offsets"])
def test_header_numbers(number: str, where: str, tmp_path: Path) -> None:
    shape, end = (number, "2") if where == "shape" else ("2", number)
    text = f'{{"a": {{"dtype": "U8", "shape": [{shape}], "data_offsets": [0, {end}]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"ab")
    with pytest.raises(BrokenCheckpointError, match=r"tensor a: malformed header entry"):
        read_header(tmp_path / "model.safetensors")


def test_deeply_nested_json(tmp_path: Path) -> None:
    deep = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (tmp_path / "config.json").write_bytes(deep)
    with pytest.raises(BrokenCheckpointError, match=r"config\.json: not valid JSON"):
        load_json(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(BrokenCheckpointError, match="header is not JSON"):
        read_header(tmp_path / "model.safetensors")
