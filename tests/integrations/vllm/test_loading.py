"""Loading whole checkpoints: the summary, and tensors that are missing or wrong."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from petit_vllm.config import PetitConfig
from safetensors.torch import load_file, save_file
from vllm_engines import engine

from petit_plugin.checkpoints.checkpoint import Checkpoint


@contextlib.contextmanager
def loading_checks_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As for a checkpoint whose headers cannot be read beforehand (one that is still on a hub)."""
    monkeypatch.setattr(PetitConfig, "maybe_update_config", lambda *args, **kwargs: None)
    yield


def damaged(source: Path, target: Path, damage: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    damage(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_summary_line(checkpoint: Any) -> None:
    model = checkpoint("qwen3_moe")
    with engine(model) as llm:
        text = llm.llm_engine.vllm_config.quant_config.summary.text()
    # 2 x (qkv, o, experts); the router twice and lm_head stay as they are.
    assert text.startswith("petit: 6 FP4 layers (6 nvfp4), 3 in 16 bit; ")
    fp4 = Checkpoint(model).layers
    weights = sum(layer.n * layer.k for layer in fp4)
    found = re.search(r"FP4 layers take ([\d.]+) MB, ([\d.]+) MB in BF16", text)
    assert found is not None
    assert float(found[2]) == pytest.approx(2 * weights / 1e6, abs=0.06)
    # 4.5 bits a weight and a float32 for each row.
    assert float(found[1]) == pytest.approx((weights * 4.5 / 8 + sum(4 * layer.n for layer in fp4)) / 1e6, abs=0.06)
    assert "backend cpu" in text
    assert "input_scale not used" in text


@pytest.mark.parametrize("parameter", ["weight", "weight_scale", "weight_scale_2"])
def test_missing_expert_tensors_are_listed(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameter: str
) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        for expert in (0, 3, 6):
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.{parameter}"]

    model = damaged(checkpoint("qwen3_moe"), tmp_path / "m", lose)
    with (
        loading_checks_only(monkeypatch),
        pytest.raises(ValueError, match=rf"layers\.1\.mlp\.experts.*parameter {parameter} .*missing") as caught,
        engine(model),
    ):
        pass
    if parameter != "weight":
        assert "w3 (up_proj) of experts 0, 3, 6" in str(caught.value)


def test_missing_dense_tensor(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = damaged(checkpoint(), tmp_path / "m", lambda t: t.pop("model.layers.0.self_attn.k_proj.weight_scale"))
    with (
        loading_checks_only(monkeypatch),
        pytest.raises(ValueError, match=r"layers\.0\.self_attn\.qkv_proj: parameter weight_scale of k_proj is missing"),
        engine(model),
    ):
        pass


def test_16_bit_layer_that_the_config_forgot(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the headers at hand it is served in 16 bit; without them it is an error, never a silent cast."""

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.self_attn.o_proj"
        n, half = tensors[f"{name}.weight"].shape
        tensors[f"{name}.weight"] = torch.ones(n, 2 * half, dtype=torch.bfloat16)
        for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{name}.{suffix}"]

    model = damaged(checkpoint(), tmp_path / "m", plain)
    with engine(model) as llm:
        assert "7 FP4 layers (7 nvfp4), 2 in 16 bit" in llm.llm_engine.vllm_config.quant_config.summary.text()
    with (
        loading_checks_only(monkeypatch),
        pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj: parameter weight is bfloat16.*exclude_modules"),
        engine(model),
    ):
        pass


def test_input_scale_may_be_anything(checkpoint: Any, tmp_path: Path) -> None:
    """Inf or absent: activations are not quantised, so it is not read."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if name.endswith("input_scale")]
        for name in names[::2]:
            tensors[name] = torch.tensor(torch.inf)
        for name in names[1::2]:
            del tensors[name]

    model = damaged(checkpoint("qwen3_moe"), tmp_path / "m", spoil)
    with engine(checkpoint("qwen3_moe")) as llm:
        want = generate(llm)
    with engine(model) as llm:
        assert generate(llm) == want


def test_dummy_weights(checkpoint: Any) -> None:
    with engine(checkpoint("qwen3_moe", fmt="mxfp4"), load_format="dummy") as llm:
        assert len(generate(llm)) == 8


def generate(llm: Any) -> list[int]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 17, 42]}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_fp8_cache(checkpoint: Any) -> None:
    """The checkpoint asks for an FP8 cache: its calibrated scales are in use."""
    model = checkpoint(kv_scales=True)
    if torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported():
        with engine(model, dtype="bfloat16") as llm:
            scales = llm.apply_model(kv_scales)[0]
            assert len(generate(llm)) == 8
        from fixtures.tiny_models import KV_SCALES

        assert scales == pytest.approx([s * (i + 1) for i in range(2) for s in KV_SCALES])
    else:  # vLLM's FP8 cache on the CPU needs AVX-512
        with pytest.raises(NotImplementedError, match="FP8 KV cache on CPU requires"), engine(model, dtype="bfloat16"):
            pass
        with engine(model, dtype="bfloat16", kv_cache_dtype="bfloat16") as llm:
            assert len(generate(llm)) == 8


def kv_scales(model: torch.nn.Module) -> list[float]:
    attention = [m for m in model.modules() if hasattr(m, "_k_scale_float")]
    return [scale for m in attention for scale in (m._k_scale_float, m._v_scale_float)]
