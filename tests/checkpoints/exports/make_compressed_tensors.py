"""Export tiny models with llm-compressor itself: python make_compressed_tensors.py [NAME...]

Needs llmcompressor 0.14 with compressed-tensors 0.19, torch 2.13 and transformers 5.19, and the repository's root and
tests/ on PYTHONPATH. Beside each export lie the float32 values that the exported weights stand for, computed by
compressed-tensors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from fixtures import tiny_models
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
SIZES = {"hidden": 128, "intermediate": 192, "layers": 2, "heads": 2, "kv_heads": 1, "vocab": 128}
EXPORTS = {"compressed-tensors-llama-nvfp4": "NVFP4A16", "compressed-tensors-llama-mxfp4": "MXFP4A16"}


def export(name: str) -> None:
    shape = tiny_models.shape("llama", **SIZES)
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "config.json").write_text(json.dumps(tiny_models.model_config(shape)))
        save_file(tiny_models.random_weights(shape), Path(source) / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        recipe = QuantizationModifier(targets="Linear", scheme=EXPORTS[name], ignore=["lm_head"])
        oneshot(model=model, recipe=recipe)
        values = {
            n: forward_quantize(m, m.weight, "weight", m.quantization_scheme.weights).detach().float().clone()
            for n, m in model.named_modules()
            if n.endswith(("layers.0.self_attn.k_proj", "layers.0.mlp.up_proj"))
        }
        model.save_pretrained(HERE / name, save_compressed=True)
    save_file(values, HERE / f"{name}.values.safetensors")
    for file in (HERE / name).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or EXPORTS:
        export(wanted)
