"""One set of random FP4 experts, written in every layout that checkpoints use, and ways to damage a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import configs
from safetensors.torch import load_file, save_file

from petit_plugin.formats import quantize_mxfp4, quantize_nvfp4

EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 96
LAYER = "model.layers.0"
Tensors = dict[str, torch.Tensor]
# name -> (codes, scales, global scale or None); "3.gate_proj" is expert 3's
Weights = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def random_experts(fmt: str, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    }
    out: Weights = {}
    for e in range(EXPERTS):
        for leaf, shape in shapes.items():
            w = torch.randn(shape, generator=generator)
            out[f"{e}.{leaf}"] = (*quantize_mxfp4(w), None) if fmt == "mxfp4" else tuple(quantize_nvfp4(w))  # type: ignore[assignment]
    return out


def _write(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir(parents=True)
    base = {"architectures": ["TinyForCausalLM"], "num_hidden_layers": 1, "hidden_size": HIDDEN}
    tensors = tensors | {
        "model.embed_tokens.weight": torch.zeros(8, HIDDEN, dtype=torch.bfloat16),
        f"{LAYER}.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16),
        f"{LAYER}.input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    (path / "config.json").write_text(json.dumps(base | config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def per_expert(
    path: Path, fmt: str, weights: Weights, order: str = "{e}.{leaf}", names: dict[str, str] | None = None
) -> Path:
    """ModelOpt, one tensor per expert; `order` "{leaf}.{e}" is projection before index."""
    tensors: Tensors = {}
    for name, (codes, scales, factor) in weights.items():
        e, leaf = name.split(".")
        module = f"{LAYER}.mlp.experts." + order.format(e=e, leaf=leaf)
        tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"] = codes, scales
        if factor is not None:
            tensors[f"{module}.weight_scale_2"] = factor
            tensors[f"{module}.input_scale"] = torch.tensor(float("inf"))  # a dead expert's; must not matter
    algo = {"nvfp4": "NVFP4", "mxfp4": "mxfp4"}[fmt]
    return _write(
        path, {"quantization_config": configs.modelopt_flat(algo, ["lm_head", "model.embed_tokens"])}, tensors
    )


def packed(path: Path, fmt: str, weights: Weights) -> Path:
    """compressed-tensors: weight_packed and divisors for global scales."""
    tensors: Tensors = {}
    for name, (codes, scales, factor) in weights.items():
        module = f"{LAYER}.mlp.experts.{name}"
        tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"] = codes, scales
        if factor is not None:
            tensors[f"{module}.weight_global_scale"] = factor.reciprocal().reshape(1)
    group = (configs.CT_NVFP4, "nvfp4-pack-quantized") if fmt == "nvfp4" else (configs.CT_MXFP4, "mxfp4-pack-quantized")
    return _write(path, {"quantization_config": configs.compressed_tensors(*group, ["lm_head"])}, tensors)


def _stack(weights: Weights, leaves: tuple[str, ...], index: int) -> torch.Tensor:
    parts = [torch.cat([weights[f"{e}.{leaf}"][index].view(torch.uint8) for leaf in leaves]) for e in range(EXPERTS)]
    return torch.stack(parts)


def fused_bank(path: Path, weights: Weights, transposed: bool, scalar: bool) -> Path:
    """ModelOpt NVFP4, all experts in one tensor; `transposed`: [E, K/2, N]. One global scale, or one per expert."""
    tensors: Tensors = {}
    for bank, leaves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        base = f"{LAYER}.mlp.experts.{bank}"
        codes, scales = (_stack(weights, leaves, i) for i in (0, 1))
        if transposed:
            codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
        tensors[base] = codes
        tensors[f"{base}_weight_scale"] = scales.contiguous().view(torch.float8_e4m3fn)
        factors = torch.tensor([float(weights[f"{e}.{leaves[0]}"][2]) for e in range(EXPERTS)])  # type: ignore[arg-type]
        tensors[f"{base}_weight_scale_2"] = factors[0] if scalar else factors
        tensors[f"{base}_input_scale"] = torch.tensor(0.1)
        tensors[f"{base}_bias"] = torch.zeros(EXPERTS, codes.shape[1])
    return _write(path, {"quantization_config": configs.modelopt_flat("NVFP4", ["lm_head"])}, tensors)


def blocks(path: Path, weights: Weights) -> Path:
    """gpt-oss: [E, N, K/32, 16] blocks with gate and up rows interleaved."""
    tensors: Tensors = {}
    for bank, leaves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        base = f"{LAYER}.mlp.experts.{bank}"
        codes, scales = (_stack(weights, leaves, i) for i in (0, 1))
        if len(leaves) == 2:
            rows = torch.arange(codes.shape[1]).reshape(2, -1).T.reshape(-1)
            codes, scales = codes[:, rows], scales[:, rows]
        tensors[f"{base}_blocks"] = codes.reshape(*scales.shape, 16)
        tensors[f"{base}_scales"] = scales
        tensors[f"{base}_bias"] = torch.zeros(EXPERTS, codes.shape[1], dtype=torch.bfloat16)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _write(path, {"quantization_config": config}, tensors)


def deepseek(path: Path, weights: Weights) -> Path:
    """DeepSeek-V4: I8 codes, E8M0 scales, w1 / w3 / w2, in an FP8 model."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors: Tensors = {}
    for name, (codes, scales, _) in weights.items():
        e, leaf = name.split(".")
        module = f"layers.0.ffn.experts.{e}.{names[leaf]}"
        tensors[f"{module}.weight"] = codes.view(torch.int8)
        tensors[f"{module}.scale"] = scales.view(torch.float8_e8m0fnu)
    tensors["layers.0.attn.wq.weight"] = torch.zeros(32, HIDDEN, dtype=torch.float8_e4m3fn)
    tensors["layers.0.attn.wq.scale"] = torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    config = {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}, "expert_dtype": "fp4"}
    return _write(path, config, tensors)


# ---- damage


def edited(source: Path, target: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of a one-file checkpoint whose tensors went through `edit` (which changes the dict in place)."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    return target


def with_config(source: Path, target: Path, **keys: Any) -> Path:
    """A copy whose quantization_config has other values under `keys`; hf_quant_config.json is dropped."""
    shutil.copytree(source, target)
    (target / "hf_quant_config.json").unlink(missing_ok=True)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= keys
    (target / "config.json").write_text(json.dumps(config))
    return target


def truncated(source: Path, target: Path, missing: int) -> Path:
    """A copy whose safetensors file lacks its last `missing` bytes."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-missing])
    return target
