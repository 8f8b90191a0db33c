"""Checkpoints written by the real tools, against the values that those tools say the weights have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from petit_plugin.checkpoints.checkpoint import Checkpoint
from petit_plugin.checkpoints.data_checks import scale_problems
from petit_plugin.formats import dequantize_mxfp4, dequantize_nvfp4

EXPORTS = Path(__file__).parent / "exports"
NAMES = sorted(p.name for p in EXPORTS.iterdir() if p.is_dir())
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_the_exports_are_there() -> None:
    assert {n.split("-")[0] for n in NAMES} >= {"quark", "compressed"}


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str) -> None:
    checkpoint = Checkpoint(EXPORTS / name)
    checkpoint.check()
    assert checkpoint.spec.formats == {"nvfp4" if "nvfp4" in name else "mxfp4"}
    expected = load_file(EXPORTS / f"{name}.values.safetensors")
    compared = 0
    for layer in checkpoint.layers:
        assert not scale_problems(checkpoint, layer)
        for matrix in checkpoint.matrices(layer):
            if matrix.name not in expected:
                continue
            if matrix.global_scale is None:
                values = dequantize_mxfp4(matrix.weight, matrix.weight_scale)
            else:
                values = dequantize_nvfp4(matrix.weight, matrix.weight_scale, matrix.global_scale)
            # The tool multiplies in its own order (and NVFP4 has a float32 product), so the last bit may differ.
            torch.testing.assert_close(values, expected[matrix.name].float(), rtol=2e-7, atol=0)
            compared += 1
    assert compared == len(expected) > 0


@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str) -> None:
    spec = Checkpoint(EXPORTS / name).spec
    fmt = "nvfp4" if "nvfp4" in name else "mxfp4"
    for module in ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"):
        found = spec.layer_format(module, PACKED)
        assert found is not None and found.format == fmt
    # Quark 0.13 leaves the experts of a transformers 5 model in float32 and does not say so: the headers do.
    mlp, expected = ("experts", None) if "quark-qwen3-moe" in name else ("gate_up_proj", fmt)
    layer = spec.layer_format(f"model.layers.0.mlp.{mlp}", PACKED)
    assert (layer.format if layer else None) == expected
    assert spec.layer_format("lm_head") is None
    assert spec.layer_format("model.layers.0.mlp.gate") is None
