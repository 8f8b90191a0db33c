"""Checkpoint directories: every layout gives the same matrices, and every kind of damage is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import layouts
from fixtures import tiny_models

from petit_plugin.checkpoints import QuantSpec, UnsupportedCheckpointError
from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_plugin.checkpoints.data_checks import scale_problems

MODELOPT = Path(__file__).parents[1] / "fixtures" / "modelopt"
FIXTURES = sorted(p.name for p in MODELOPT.iterdir() if p.is_dir())
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def matrices(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(path)
    checkpoint.check()
    return {m.name: m for layer in checkpoint.layers for m in checkpoint.matrices(layer)}


def assert_equal(matrix: Any, codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None) -> None:
    assert torch.equal(matrix.weight, codes)
    assert torch.equal(matrix.weight_scale.view(torch.uint8), scales.view(torch.uint8))
    assert (matrix.global_scale is None) == (factor is None)
    if factor is not None:
        assert matrix.global_scale.dtype == torch.float32 and matrix.global_scale.dim() == 0
        assert float(matrix.global_scale) == float(factor)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("order", ["{e}.{leaf}", "{leaf}.{e}"])
def test_both_orders_of_expert_names(fmt: str, order: str, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts(fmt, int(rng.integers(2**31)))
    found = matrices(layouts.per_expert(tmp_path / "m", fmt, weights, order))
    assert len(found) == len(weights)
    for name, expected in weights.items():
        e, leaf = name.split(".")
        assert_equal(found[f"model.layers.0.mlp.experts.{order.format(e=e, leaf=leaf)}"], *expected)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_compressed_tensors_divisors_are_inverted_once(fmt: str, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts(fmt, int(rng.integers(2**31)))
    if fmt == "nvfp4":  # powers of two survive the inversion bit for bit
        weights = {n: (c, s, torch.tensor(2.0**-i)) for i, (n, (c, s, _)) in enumerate(weights.items())}
    found = matrices(layouts.packed(tmp_path / "m", fmt, weights))
    for name, expected in weights.items():
        assert_equal(found[f"model.layers.0.mlp.experts.{name}"], *expected)


def test_one_layer_in_both_nvfp4_conventions(tmp_path: Path) -> None:
    weights = layouts.random_experts("nvfp4", 1)
    weights = {n: (c, s, torch.tensor(1.0) / 3584) for n, (c, s, _) in weights.items()}
    divisor = layouts.edited(
        layouts.packed(tmp_path / "ct", "nvfp4", weights),
        tmp_path / "ct2",
        lambda t: t.update({k: torch.tensor([3584.0]) for k in t if k.endswith("global_scale")}),
    )
    a, b = matrices(layouts.per_expert(tmp_path / "mo", "nvfp4", weights)), matrices(divisor)
    assert a.keys() == b.keys() and all(torch.equal(a[n].global_scale, b[n].global_scale) for n in a)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("scalar", [True, False])
def test_fused_nvfp4_banks(transposed: bool, scalar: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts("nvfp4", int(rng.integers(2**31)))
    found = matrices(layouts.fused_bank(tmp_path / "m", weights, transposed, scalar))
    assert len(found) == 2 * layouts.EXPERTS
    for e in range(layouts.EXPERTS):
        for bank, leaves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            codes, scales = (torch.cat([weights[f"{e}.{leaf}"][i] for leaf in leaves]) for i in (0, 1))
            factor = weights[f"{0 if scalar else e}.{leaves[0]}"][2]
            assert_equal(found[f"model.layers.0.mlp.experts.{bank}[{e}]"], codes, scales, factor)


def test_gpt_oss_blocks_keep_interleaved_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts("mxfp4", int(rng.integers(2**31)))
    found = matrices(layouts.blocks(tmp_path / "m", weights))
    for e in range(layouts.EXPERTS):
        fused = found[f"model.layers.0.mlp.experts.gate_up_proj[{e}]"]
        for row, leaf in ((0, "gate_proj"), (1, "up_proj")):
            assert torch.equal(fused.weight[row::2], weights[f"{e}.{leaf}"][0])
            assert torch.equal(fused.weight_scale[row::2], weights[f"{e}.{leaf}"][1])
        assert_equal(found[f"model.layers.0.mlp.experts.down_proj[{e}]"], *weights[f"{e}.down_proj"])


def test_deepseek_v4_experts(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = layouts.random_experts("mxfp4", int(rng.integers(2**31)))
    path = layouts.deepseek(tmp_path / "m", weights)
    found = matrices(path)
    assert len(found) == 3 * layouts.EXPERTS
    for leaf, name in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        assert_equal(found[f"layers.0.ffn.experts.2.{name}"], *weights[f"2.{leaf}"])
    checkpoint = Checkpoint(path)
    assert set(checkpoint.foreign) == {"layers.0.attn.wq"} and not checkpoint.problems


@pytest.mark.parametrize("name", FIXTURES)
def test_modelopt_exports(name: str, tmp_path: Path) -> None:
    """Either JSON file alone, or both, give one spec; every layer is complete."""
    both = Checkpoint(MODELOPT / name)
    both.check()
    assert not any(scale_problems(both, layer) for layer in both.layers)
    assert both.spec.formats == {"mxfp4" if "mxfp4" in name else "nvfp4"}
    assert both.spec.kv_cache == ("fp8" if "kvfp8" in name else None)
    for keep in ("config.json", "hf_quant_config.json"):
        copy = tmp_path / keep
        shutil.copytree(MODELOPT / name, copy)
        if keep == "config.json":
            (copy / "hf_quant_config.json").unlink()
        else:
            config = json.loads((copy / "config.json").read_text())
            del config["quantization_config"]
            (copy / "config.json").write_text(json.dumps(config))
        assert QuantSpec.from_checkpoint(copy) == both.spec
    assert both.spec.layer_format("lm_head") is None
    assert both.spec.layer_format("model.layers.0.self_attn.qkv_proj", PACKED) is not None
    if "moe" in name:
        assert both.spec.layer_format("model.layers.1.mlp.experts") is not None
        assert both.spec.layer_format("model.layers.1.mlp.gate") is None


def test_layers_without_input_scales_are_complete() -> None:
    checkpoint = Checkpoint(MODELOPT / "llama-w4a16-nvfp4")
    assert checkpoint.layers and not any("input" in e.name for layer in checkpoint.layers for e in layer.extras)


# ---- headers against the configuration


def test_what_is_stored_in_bf16_is_not_quantized(tmp_path: Path) -> None:
    tiny = tiny_models.build(tmp_path / "m", "qwen3_moe", list_router=False)
    spec = QuantSpec.from_checkpoint(tiny.path)
    assert spec.layer_format("model.layers.0.mlp.gate") is None
    assert spec.layer_format("model.layers.0.mlp.experts") is not None

    # A linear and a bank that no list mentions: config alone says FP4, the headers know better.
    def to_bf16(tensors: layouts.Tensors) -> None:
        for name in [n for n in tensors if "layers.1.mlp.experts" in n or "layers.1.self_attn.o_proj" in n]:
            tensor = tensors.pop(name)
            if name.endswith(".weight"):
                tensors[name] = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=torch.bfloat16)

    mixed = Checkpoint(layouts.edited(tiny.path, tmp_path / "mixed", to_bf16))
    mixed.check()
    assert mixed.spec.layer_format("model.layers.1.mlp.experts") is None
    assert mixed.spec.layer_format("model.layers.1.self_attn.o_proj") is None
    assert mixed.spec.layer_format("model.layers.0.mlp.experts") is not None
    config_only = QuantSpec.from_config(tiny.config["quantization_config"])
    assert config_only.layer_format("model.layers.1.self_attn.o_proj") is not None
    assert config_only.with_checkpoint(mixed.path).layer_format("model.layers.1.self_attn.o_proj") is None
    mapped = mixed.spec.map_names(lambda names: [f"language_model.{n}" for n in names])
    assert mapped.layer_format("language_model.model.layers.1.self_attn.o_proj") is None
    assert mapped.layer_format("language_model.model.layers.0.self_attn.o_proj") is not None


def test_a_router_that_really_is_fp4_stays_fp4(tmp_path: Path) -> None:
    tiny = tiny_models.build(tmp_path / "m", "llama")

    def rename(tensors: layouts.Tensors) -> None:
        for name in [n for n in tensors if "layers.0.mlp.up_proj" in n]:
            tensors[name.replace("up_proj", "router")] = tensors.pop(name)

    spec = QuantSpec.from_checkpoint(layouts.edited(tiny.path, tmp_path / "router", rename))
    assert spec.layer_format("model.layers.0.mlp.router") is not None


def test_tied_head_is_not_quantized(tmp_path: Path) -> None:
    tiny = tiny_models.build(tmp_path / "m", "llama", exclude=["lm_head"])
    path = layouts.edited(tiny.path, tmp_path / "tied", lambda t: t.pop("lm_head.weight"))
    assert (
        QuantSpec.from_checkpoint(layouts.with_config(path, tmp_path / "t2", ignore=[])).layer_format("lm_head") is None
    )


def test_bank_with_some_experts_in_bf16_is_refused(tmp_path: Path) -> None:
    weights = layouts.random_experts("mxfp4", 3)
    name = "model.layers.0.mlp.experts.1.down_proj"

    def to_bf16(tensors: layouts.Tensors) -> None:
        del tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = torch.zeros(layouts.HIDDEN, layouts.INTERMEDIATE, dtype=torch.bfloat16)

    checkpoint = Checkpoint(
        layouts.edited(layouts.per_expert(tmp_path / "m", "mxfp4", weights), tmp_path / "b", to_bf16)
    )
    with pytest.raises(UnsupportedCheckpointError, match="some experts are stored as FP4 and others are not"):
        checkpoint.check()
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.layers\.0\.mlp\.experts"):
        checkpoint.spec.layer_format("model.layers.0.mlp.experts")


_BANK_MEMORY = """
import sys
from pathlib import Path
from petit_plugin.checkpoints.checkpoint import Checkpoint

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

checkpoint = Checkpoint(sys.argv[1])
matrices = checkpoint.matrices(checkpoint.layers[0])
next(matrices)
before = peak = anonymous()
for matrix in matrices:
    matrix.weight.max(), matrix.weight_scale.max()
    peak = max(peak, anonymous())
print(peak - before)
"""


def test_a_bank_is_read_one_expert_at_a_time(tmp_path: Path) -> None:
    """48 experts of 1.5 MB: iterating holds a few of them, not the 72 MB bank."""
    experts, n, k = 48, 1024, 3072
    path = tmp_path / "m"
    path.mkdir()
    base = "model.layers.0.mlp.experts.down_proj"
    tensors = {
        f"{base}_blocks": torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8),
        f"{base}_scales": torch.full((experts, n, k // 32), 120, dtype=torch.uint8),
    }
    from safetensors.torch import save_file

    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    run = subprocess.run([sys.executable, "-c", _BANK_MEMORY, str(path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 12_000, f"{run.stdout} kB of anonymous memory for a bank of 72 MB"
