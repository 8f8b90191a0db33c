"""Export tiny models with AMD Quark itself: python make_quark.py [NAME...]

Needs amd-quark 0.13 (with its requirements), torch 2.13 and transformers 5.19, and the repository's root and tests/ on
PYTHONPATH. Beside each export lie the float32 values that the exported weights stand for, computed by Quark.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from fixtures import tiny_models
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
SIZES = {
    "llama": {"hidden": 128, "intermediate": 192, "layers": 2, "heads": 2, "kv_heads": 1, "vocab": 128},
    "qwen3_moe": {
        "hidden": 128,
        "intermediate": 64,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "vocab": 128,
        "experts": 4,
    },
}
EXPORTS = {
    "quark-llama-mxfp4": ("llama", "mxfp4"),
    "quark-llama-nvfp4": ("llama", "nvfp4"),
    "quark-qwen3-moe-mxfp4": ("qwen3_moe", "mxfp4"),
}


def export(name: str) -> None:
    arch, scheme = EXPORTS[name]
    shape = tiny_models.shape(arch, **SIZES[arch])
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "config.json").write_text(json.dumps(tiny_models.model_config(shape)))
        save_file(tiny_models.random_weights(shape), Path(source) / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        quantizer = ModelQuantizer(LLMTemplate.get(arch).get_config(scheme=scheme))
        data = [{"input_ids": torch.randint(3, shape.vocab, (1, 16))} for _ in range(4)]
        model = quantizer.freeze(quantizer.quantize_model(model, data))
        values = {
            n: m._weight_quantizer(m.weight).detach().clone()
            if getattr(m, "_weight_quantizer", None)
            else m.weight.detach()
            for n, m in model.named_modules()
            if n.endswith(("layers.0.self_attn.k_proj", "layers.0.mlp.up_proj", "experts.3.up_proj"))
        }
        with torch.no_grad():
            export_safetensors(model, HERE / name)
    save_file(values, HERE / f"{name}.values.safetensors")
    for file in (HERE / name).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or EXPORTS:
        export(wanted)
