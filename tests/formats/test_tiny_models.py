"""The checkpoints other tests are built on: ModelOpt's names, dtypes and configuration, and greedy text that varies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fixtures import tiny_models
from safetensors.torch import load_file

MODELOPT = Path(tiny_models.__file__).parent / "modelopt"
TWINS = {
    "llama-nvfp4-kvfp8": {"arch": "llama", "fmt": "nvfp4", "kv_scales": True},
    "llama-w4a16-nvfp4": {"arch": "llama", "fmt": "nvfp4", "algo": "W4A16_NVFP4"},
    "llama-mxfp4": {"arch": "llama", "fmt": "mxfp4"},
    "qwen3-moe-nvfp4": {"arch": "qwen3_moe", "fmt": "nvfp4"},
    "qwen3-moe-mxfp4": {"arch": "qwen3_moe", "fmt": "mxfp4"},
}


@pytest.mark.parametrize("name", TWINS)
def test_built_like_modelopt(name: str, tmp_path: Path) -> None:
    """The same recipe through our builder gives ModelOpt's tensors, but for the calibrated input and KV scales."""
    exclude = ["lm_head", "model.embed_tokens"]
    ours = tiny_models.build(tmp_path / "m", dialect="both", exclude=exclude, shared_scales=True, **TWINS[name])
    built, exported = (load_file(p / "model.safetensors") for p in (ours.path, MODELOPT / name))
    assert built.keys() == exported.keys()
    for key, tensor in built.items():
        assert tensor.dtype == exported[key].dtype and tensor.shape == exported[key].shape, key
        if not key.endswith(("input_scale", "k_scale", "v_scale")):
            same = torch.equal(tensor.reshape(-1).view(torch.uint8), exported[key].reshape(-1).view(torch.uint8))
            assert same, key
    for file in ("config.json", "hf_quant_config.json"):
        a, b = (json.loads((p / file).read_text()) for p in (ours.path, MODELOPT / name))
        if file == "config.json":
            a, b = a["quantization_config"], b["quantization_config"]
        assert a == b


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_builder_options(fmt: str, tmp_path: Path) -> None:
    sizes = {"hidden": 576, "heads": 9, "kv_heads": 3, "intermediate": 704, "layers": 2, "attention_bias": True}
    ckpt = tiny_models.build(
        tmp_path / "m", "llama", fmt=fmt, dialect="nested", exclude=["lm_head", "*.0.mlp*", "*.v_proj"], **sizes
    )
    stored = load_file(ckpt.path / "model.safetensors")
    assert "quantization_config" not in json.loads((ckpt.path / "config.json").read_text())
    assert (
        json.loads((ckpt.path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"][1] == "*.0.mlp*"
    )
    for module in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.v_proj"):
        assert module in ckpt.excluded and stored[f"{module}.weight"].dtype == torch.bfloat16
    assert stored["model.layers.1.mlp.down_proj.weight"].shape == (576, 352)
    assert stored["model.layers.1.self_attn.q_proj.bias"].dtype == torch.bfloat16
    if fmt == "nvfp4":
        q, k = (float(stored[f"model.layers.0.self_attn.{p}_proj.weight_scale_2"]) for p in "qk")
        assert abs(q / k - 1) > 0.1
    with pytest.raises(ValueError, match="arch must be one of"):
        tiny_models.build(tmp_path / "n", "gpt2")
    with pytest.raises(FileExistsError):
        tiny_models.build(tmp_path / "m", "llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_greedy_decoding_is_lively(name: str, tmp_path: Path) -> None:
    """8 prompts x 32 tokens: many different tokens, no special ones, the best logit mostly well ahead."""
    pytest.importorskip("transformers")
    reference = tiny_models.write_reference(MODELOPT / name, tmp_path / "ref")
    tokens, logits = tiny_models.hf_greedy(reference, tiny_models.prompts())
    assert len({tuple(t) for t in tokens}) == 8
    assert all(len(set(t)) >= 15 and min(t) >= len(tiny_models.SPECIAL_TOKENS) for t in tokens)
    top = torch.cat(logits).topk(2).values
    gap = top[:, 0] - top[:, 1]
    assert gap.median() > 1 and gap.quantile(0.05) > 0.05 and gap.min() > 1e-4
