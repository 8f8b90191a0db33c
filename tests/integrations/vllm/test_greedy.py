"""Greedy tokens and logits of served checkpoints against transformers on the dequantised weights, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import MODELOPT, engine, greedy, hugging_face_logits
from fixtures import tiny_models
from petit_vllm.config import PetitConfig

STEPS = 32
TOLERANCE = 1e-4


def compare(model: Path, reference: Path, prompts: list[list[int]], **options: Any) -> None:
    """8 prompts, 32 tokens: every token equal, every row of logits within TOLERANCE relative (norm and maximum)."""
    with engine(model, **options) as llm:
        assert type(llm.llm_engine.vllm_config.quant_config) is PetitConfig
        tokens, ours = greedy(llm, prompts, STEPS)
    theirs = hugging_face_logits(reference, prompts, tokens)
    worst = 0.0
    for prompt, chosen, got, want in zip(prompts, tokens, ours, theirs, strict=True):
        assert len(chosen) == STEPS
        assert got.shape == want.shape
        assert want.argmax(dim=-1).tolist() == chosen, f"prompt {prompt}"
        difference = (got - want).double()
        worst = max(worst, float((difference.norm(dim=-1) / want.double().norm(dim=-1)).max()))
        worst = max(worst, float((difference.abs().amax(-1) / want.double().abs().amax(-1)).max()))
    print(f"largest relative difference of logits: {worst:.2e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_tiny(checkpoint: Any, tmp_path: Path, arch: str, fmt: str) -> None:
    """q, k, v and gate, up have different global scales here."""
    model = checkpoint(arch, fmt=fmt)
    compare(model, tiny_models.write_reference(model, tmp_path / "reference"), tiny_models.prompts())


@pytest.mark.parametrize("name", sorted(p.name for p in MODELOPT.iterdir() if p.is_dir()))
def test_exported_by_modelopt(tmp_path: Path, name: str) -> None:
    """Files written by nvidia-modelopt itself. The cache is kept in float32: an FP8 one is not exact."""
    reference = tiny_models.write_reference(MODELOPT / name, tmp_path / "reference")
    compare(MODELOPT / name, reference, tiny_models.prompts(), kv_cache_dtype="float32")


def test_awkward_shapes(checkpoint: Any, tmp_path: Path) -> None:
    """Sizes that are no multiple of 128, biases, a quantised lm_head, a router the configuration forgot to exclude."""
    sizes = {"hidden": 144, "intermediate": 208, "heads": 3, "kv_heads": 1, "head_dim": 32, "vocab": 200}
    model = checkpoint("llama", exclude=(), attention_bias=True, dialect="nested", **sizes)
    prompts = tiny_models.prompts(vocab=sizes["vocab"])
    compare(model, tiny_models.write_reference(model, tmp_path / "dense"), prompts)
    model = checkpoint("qwen3_moe", list_router=False, dialect="nested")
    compare(model, tiny_models.write_reference(model, tmp_path / "moe"), tiny_models.prompts())


def test_compiled(checkpoint: Any, tmp_path: Path) -> None:
    """vLLM traces the whole model as one graph; the eager backend runs it, so that no minutes go into inductor."""
    model = checkpoint("qwen3_moe")
    reference = tiny_models.write_reference(model, tmp_path / "reference")
    compile_options = {"backend": "eager", "mode": 3}
    compare(model, reference, tiny_models.prompts(), enforce_eager=False, compilation_config=compile_options)


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    """A real model: SmolLM2-135M, quantised by `petit quantize`."""
    import smollm2
    from transformers import AutoTokenizer

    model = smollm2.fp4_checkpoint("nvfp4")
    texts = (
        "The capital of France is",
        "Once upon a time there was",
        "def fibonacci(n):\n",
        "Water boils at",
        "The three primary colours are",
        "In 1969, the first",
        "My favourite recipe starts with",
        "Q: What is 12 + 30?\nA:",
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    compare(model, tiny_models.write_reference(model, tmp_path / "reference"), prompts)
