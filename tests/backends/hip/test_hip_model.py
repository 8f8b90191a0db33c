"""Layers of a real model's shapes, on the CPU backend and on the emulator; and gfx950's other kernels."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import assert_close, random_activations, random_checkpoint, reference

import petit_plugin as pp
from petit_plugin.formats import nvfp4

ROOT = Path(__file__).resolve().parents[3]
# One transformer block of SmolLM2-135M: N, K of its linear layers.
BLOCK = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
BLOCK |= {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}
CHECKPOINT = ROOT / ".demo" / "smollm2-135m-nvfp4" / "model.safetensors"


def block_layers(rng: np.random.Generator, real: bool) -> dict[str, tuple[torch.Tensor, ...]]:
    """Checkpoint tensors (weight, weight_scale, weight_scale_2) by layer name."""
    if not real:
        made = {}
        for name, shape in BLOCK.items():
            made[name] = tuple(pp.quantize_nvfp4(torch.from_numpy(rng.standard_normal(shape)).float() * 0.05))
        return made
    from safetensors import safe_open

    found = {}
    with safe_open(CHECKPOINT, "pt") as tensors:
        for name in BLOCK:
            part = "mlp" if name in ("gate", "up", "down") else "self_attn"
            stem = f"model.layers.7.{part}.{name}_proj"
            found[name] = tuple(tensors.get_tensor(f"{stem}.{t}") for t in ("weight", "weight_scale", "weight_scale_2"))
    return found


@pytest.mark.parametrize("source", ["synthetic", "checkpoint"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_one_block_agrees_with_the_cpu(code_objects: Path, arch: str, source: str, rng: np.random.Generator) -> None:
    if source == "checkpoint" and not CHECKPOINT.exists():
        pytest.skip(f"{CHECKPOINT} is not there; `make demo` makes it")
    layers = block_layers(rng, source == "checkpoint")
    for name, shape in BLOCK.items():
        w = layers[name]
        assert (w[0].shape[0], w[0].shape[1] * 2) == shape
        values = nvfp4.dequantize(*w, dtype=torch.float64).numpy()
        x = random_activations(rng, (5, shape[1]), torch.bfloat16)
        ref = reference(x, values)
        on_cpu = pp.linear(x, pp.pack_nvfp4(*w, name=name))
        with pp.emulated(arch):
            packed = pp.pack_nvfp4(*w, name=name)
            assert packed.meta.arch == arch
            emulated = pp.linear(x, packed)
        assert_close(on_cpu, ref)
        assert_close(emulated, ref)
        # Both are within the contract of the same number, so they differ by one rounding at most.
        step = torch.maximum(on_cpu.abs(), emulated.abs()).float() * 2.0**-7 + 1e-6 * float(ref.magnitude.max())
        assert ((on_cpu.float() - emulated.float()).abs() <= step).all()


def test_the_mask_kernels_of_gfx950(
    code_objects: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIT_GFX950_CORE", "mask")
    with pp.emulated("gfx950"):
        for fmt, dtype, m in itertools.product(("nvfp4", "mxfp4"), (torch.bfloat16, torch.float16), (5, 40)):
            c = random_checkpoint(rng, fmt, 70, 288)
            w, x = getattr(pp, f"pack_{fmt}")(*c.torch_arguments()), random_activations(rng, (m, 288), dtype)
            assert w.meta.arch == "gfx950-mask"
            assert_close(pp.linear(x, w), reference(x, c.values))
