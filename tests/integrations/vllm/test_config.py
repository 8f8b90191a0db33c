"""Which quantization config vLLM really ends up with. vLLM has several ways to end up with its own, silently."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELOPT, engine_config
from petit_vllm import compat
from petit_vllm.config import PetitConfig, PetitMxfp4Config, PetitNvfp4Config
from safetensors.torch import load_file, save_file


def config_class(model: Path, **options: Any) -> type:
    return type(engine_config(model, **options).quant_config)


def edited(source: Path, target: Path, **quantization: Any) -> Path:
    """A copy of a checkpoint with entries of config.json's quantization_config replaced (None: removed)."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    body = config["quantization_config"] | quantization
    config["quantization_config"] = {k: v for k, v in body.items() if v is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("dialect", ["flat", "nested", "both"])
@pytest.mark.parametrize(
    ("fmt", "algo"), [("nvfp4", "NVFP4"), ("nvfp4", "W4A16_NVFP4"), ("mxfp4", "mxfp4")], ids=lambda v: str(v)
)
def test_every_dialect_and_algorithm_is_taken(checkpoint: Any, fmt: str, algo: str, dialect: str) -> None:
    # The nested dialect alone with MXFP4 or W4A16_NVFP4 stops in vLLM before plugins are asked, unless it is helped.
    model = checkpoint(fmt=fmt, algo=algo, dialect=dialect)
    assert config_class(model, quantization="petit") is PetitConfig
    assert config_class(model, quantization=f"petit_{fmt}") in (PetitNvfp4Config, PetitMxfp4Config)
    assert config_class(model) is PetitConfig, "no flag: taken on CPU"


@pytest.mark.parametrize("name", sorted(p.name for p in MODELOPT.iterdir() if p.is_dir()))
def test_checkpoints_written_by_modelopt_are_taken(name: str) -> None:
    assert config_class(MODELOPT / name) is PetitConfig


def test_named_format_must_be_the_checkpoints(checkpoint: Any) -> None:
    with pytest.raises(ValueError, match=r"petit_mxfp4 was asked for, but the checkpoint holds nvfp4"):
        engine_config(checkpoint(fmt="nvfp4"), quantization="petit_mxfp4")
    with pytest.raises(ValueError, match=r"petit_nvfp4 was asked for, but the checkpoint holds mxfp4"):
        engine_config(checkpoint(fmt="mxfp4"), quantization="petit_nvfp4")


@pytest.mark.parametrize("name", ["nosuch", "petit_nvfp44"])
def test_unknown_method_is_not_replaced_by_vllms_own(checkpoint: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"--quantization {name}: no such method"):
        engine_config(checkpoint(), quantization=name)


def test_autodetect_can_be_turned_off(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    monkeypatch.setenv("PETIT_AUTODETECT", "0")
    assert config_class(checkpoint(), quantization="petit") is PetitConfig
    assert config_class(checkpoint(), dtype="bfloat16") is ModelOptNvFp4Config
    with pytest.raises(ValueError, match="ModelOpt currently only supports"):
        engine_config(checkpoint(fmt="mxfp4"))


def test_another_method_named_by_the_user_is_left_alone(checkpoint: Any) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    assert config_class(checkpoint(), quantization="modelopt_fp4", dtype="bfloat16") is ModelOptNvFp4Config


@pytest.mark.parametrize(
    ("platform", "taken"), [("rocm", "petit"), ("cpu", "petit"), ("cuda", None), ("xpu", None), ("tpu", None)]
)
def test_autodetect_by_platform(checkpoint: Any, monkeypatch: pytest.MonkeyPatch, platform: str, taken: str) -> None:
    config = json.loads((checkpoint() / "config.json").read_text())["quantization_config"]
    monkeypatch.setattr(compat, "platform", lambda: platform)
    assert PetitConfig.override_quantization_method(config, None) == taken
    for method in (PetitNvfp4Config, PetitMxfp4Config):
        assert method.override_quantization_method(config, None) is None
    if taken is None:
        with pytest.raises(ValueError, match=rf"petit runs on ROCm GPUs and CPUs, but this vLLM on {platform}"):
            PetitConfig.override_quantization_method(config, "petit")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8.*not an FP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "NVFP4_SVD cannot be served"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP5"}, "unknown quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 8}, "group_size 8"),
        ({"quant_method": "awq", "bits": 4}, "not an FP4 dialect"),
        ({"quant_method": "mxfp4"}, "gpt-oss checkpoint"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                    }
                },
            },
            "compressed-tensors checkpoint",
        ),
    ],
    ids=lambda v: v.get("quant_algo", v["quant_method"]) if isinstance(v, dict) else "",
)
def test_what_petit_does_not_serve(config: dict[str, Any], says: str) -> None:
    assert PetitConfig.override_quantization_method(config, None) is None, "no flag: handed back to vLLM"
    with pytest.raises(ValueError, match=says):
        PetitConfig.override_quantization_method(config, "petit")
    with pytest.raises(ValueError, match=says):
        PetitConfig.from_config(config)


def test_mixed_precision_with_other_formats_is_handed_back() -> None:
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        },
    }
    assert PetitConfig.override_quantization_method(config, None) is None


def test_a_16_bit_model_cannot_be_served_as_petit(checkpoint: Any, tmp_path: Path) -> None:
    from fixtures import tiny_models

    plain = tiny_models.write_reference(checkpoint(), tmp_path / "plain")
    with pytest.raises(ValueError, match=r"config file for petit|quantization"):
        engine_config(plain, quantization="petit")
    assert engine_config(plain).quant_config is None


def test_fp8_cache_is_taken_from_the_checkpoint(checkpoint: Any) -> None:
    for dialect in ("flat", "nested"):
        config = engine_config(checkpoint(kv_scales=True, dialect=dialect))
        assert isinstance(config.quant_config, PetitConfig)
        assert config.cache_config.cache_dtype == "fp8_e4m3"
        assert config.quant_config.kv_scales_on_disk


def test_config_travels_to_workers(checkpoint: Any) -> None:
    config = pickle.loads(pickle.dumps(engine_config(checkpoint("qwen3_moe")).quant_config))
    assert type(config) is PetitConfig
    assert config.layer_format("model.layers.0.mlp.experts").format == "nvfp4"
    assert config.layer_format("model.layers.0.mlp.gate") is None


def test_exclusions_in_vllms_names(checkpoint: Any, tmp_path: Path) -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    names = ["lm_head", "model.layers.1*", "*.mlp.down_proj", "model.layers.0.self_attn.o_proj"]
    nested = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": names},
    }
    flat = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": names}
    for body in (nested, flat):
        config = PetitConfig.from_config(body)
        config.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
        layer = "language_model.model.layers"
        assert config.layer_format(f"{layer}.0.self_attn.qkv_proj").format == "nvfp4"
        assert config.layer_format(f"{layer}.10.mlp.gate_up_proj").format == "nvfp4", "layers.1* is not layers.10"
        for plain in ("1.self_attn.qkv_proj", "1.mlp.gate_up_proj", "0.mlp.down_proj", "0.self_attn.o_proj"):
            assert config.layer_format(f"{layer}.{plain}") is None, plain
        assert config.layer_format("lm_head") is None
    config = PetitConfig.from_config({**flat, "ignore": ["model.layers.0.self_attn.q_proj"]})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.qkv_proj fuses modules in different formats"):
        config.layer_format("model.layers.0.self_attn.qkv_proj")


@pytest.mark.parametrize("parameter", ["weight", "weight_scale", "weight_scale_2"])
def test_missing_tensor_stops_before_loading(checkpoint: Any, tmp_path: Path, parameter: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint("qwen3_moe"), broken)
    tensors = load_file(broken / "model.safetensors")
    lost = f"model.layers.1.mlp.experts.3.up_proj.{parameter}"
    del tensors[lost]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.3\.up_proj") as caught:
        engine_config(broken)
    assert parameter in str(caught.value)


def test_awq_is_refused_for_its_activation_scales(checkpoint: Any, tmp_path: Path) -> None:
    model = edited(checkpoint(), tmp_path / "awq", quant_algo="NVFP4_AWQ")
    body = json.loads((model / "config.json").read_text())["quantization_config"]
    assert PetitConfig.override_quantization_method(body, None) is None
    with pytest.raises(ValueError, match="pre_quant_scale"):
        PetitConfig.from_config(body).layer_format("model.layers.0.mlp.down_proj")
