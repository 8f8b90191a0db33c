"""The C++ packer: byte for byte the reference of layout.py, back to the checkpoint, and exact wherever it says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numerics import GROUP, Checkpoint, as_f64, half_ulp, random_checkpoint

import petit_plugin as pp
from petit_plugin._types import CheckpointTensors
from petit_plugin.backends.hip import layout, packing

FORMATS = ["nvfp4", "mxfp4"]
ARCHS = list(packing.TARGETS)


def source_of(c: Checkpoint, name: str = "layer") -> CheckpointTensors:
    factor = np.ones(1, np.float32) if c.global_scale is None else c.global_scale
    return CheckpointTensors(
        c.fmt,
        name,
        torch.from_numpy(c.weight.copy()),
        torch.from_numpy(c.scale.copy()),
        torch.from_numpy(factor.copy()),
    )


def hostile(rng: np.random.Generator, fmt: str, wide: bool) -> Checkpoint:
    """Random shape; any scales, a part of them or all, negative ones, empty blocks, NaN over empty blocks."""
    group = GROUP[fmt]
    n, k = int(rng.integers(1, 150)), int(rng.integers(1, 14)) * group
    low = int(rng.integers(0, 0x7E if fmt == "nvfp4" else 254))
    high = min(low + int(rng.integers(1, 130)), 0x7F if fmt == "nvfp4" else 255)
    if wide:
        n, k, low, high = 70, 640, 0, 0x7F if fmt == "nvfp4" else 255
    c = random_checkpoint(rng, fmt, n, k, scales=range(low, high))
    weight, scale = c.weight.copy(), c.scale.copy()
    blocks = weight.reshape(n, -1, group // 2)
    empty = rng.random(scale.shape) < rng.choice([0.0, 0.1] if wide else [0.0, 0.1, 0.9])
    blocks[empty] &= 0x88
    blocks[rng.random(scale.shape) < 0.2] &= 0xCC  # no 0.5 or 1.5 in them: the smallest code varies
    if fmt == "nvfp4":
        scale |= (rng.random(scale.shape) < 0.2).astype(np.uint8) << 7
        scale[empty] = rng.choice([0x7F, 0x30, 0xFF, 0], int(empty.sum()))
    else:
        scale[empty] = rng.choice([0, 127, 255], int(empty.sum()))
    return c._replace(weight=weight, scale=scale)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("arch", ARCHS)
def test_same_bytes_as_the_reference(fmt: str, arch: str, rng: np.random.Generator) -> None:
    exact = 0
    for turn in range(25):
        source = source_of(hostile(rng, fmt, wide=turn == 0))
        want_meta, want = layout.pack(source, arch, None)
        meta, got = packing.pack(source, arch, None)
        assert meta == want_meta
        assert list(got) == list(want) == list(packing.NAMES)
        for name in want:
            assert torch.equal(got[name], want[name]), (meta, name)
        for a, b in zip(packing.unpack(meta, got), layout.unpack(meta, want), strict=True):
            assert torch.equal(a, b)
        args = (want["weight"], want["scale"], want["row_scale"], want["row_exponent"])
        assert torch.equal(packing.dequantize(got, meta, torch.float64), layout.dequantize(*args, meta, torch.float64))
        exact += meta.exact
    assert exact > 0 or (fmt == "nvfp4" and arch != "gfx90a")
    assert not (exact and fmt == "nvfp4" and arch != "gfx90a")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("arch", ARCHS)
def test_back_to_the_checkpoint(fmt: str, arch: str, rng: np.random.Generator) -> None:
    """Codes and scales bit for bit, the values exact in float64, over scales of every magnitude."""
    for n, k, scales in ((1, GROUP[fmt], None), (70, 576, None), (65, 2880, range(0x7F if fmt == "nvfp4" else 255))):
        c = random_checkpoint(rng, fmt, n, k, scales=scales)
        w = getattr(pp, f"pack_{fmt}")(*c.torch_arguments(), arch=arch)
        assert w.meta.arch == arch
        codes, scale, factor = w.unpack()
        assert np.array_equal(codes.numpy(), c.weight)
        assert np.array_equal(scale.view(torch.uint8).numpy(), c.scale)
        assert factor is None or np.array_equal(factor.numpy(), c.global_scale)
        assert np.array_equal(w.dequantize(torch.float64).numpy(), c.values)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):  # torch rounds float64 to 16 bits twice
            got, finite = as_f64(w.dequantize(dtype)), np.abs(c.values) <= torch.finfo(dtype).max
            assert (np.abs(got - c.values)[finite] <= half_ulp(c.values, dtype)[finite]).all(), dtype
        again = pp.PackedWeight.from_tensors(w.meta, w.tensors())
        assert torch.equal(again.dequantize(), w.dequantize())


@pytest.mark.parametrize("arch", ARCHS)
def test_out_is_the_same_storage_and_untouched_by_errors(arch: str, rng: np.random.Generator) -> None:
    first, second = (random_checkpoint(rng, "nvfp4", 40, 96) for _ in range(2))
    w = pp.pack_nvfp4(*first.torch_arguments(), arch=arch)
    where = {name: t.data_ptr() for name, t in w.tensors().items()}
    before = {name: t.clone() for name, t in w.tensors().items()}
    bad = second.scale.copy()
    bad[3, 2] = 0x7F
    second.weight[3, 16] |= 1  # not an empty block
    with pytest.raises(ValueError, match=r"q_proj.weight_scale\[3, 2\] is NaN"):
        pp.pack_nvfp4(*second._replace(scale=bad).torch_arguments(), out=w, name="q_proj")
    assert all(torch.equal(t, before[name]) for name, t in w.tensors().items())
    assert pp.pack_nvfp4(*second.torch_arguments(), out=w) is w
    assert {name: t.data_ptr() for name, t in w.tensors().items()} == where
    fresh = pp.pack_nvfp4(*second.torch_arguments(), arch=arch)
    assert all(torch.equal(t, fresh.tensors()[name]) for name, t in w.tensors().items())


def test_strided_checkpoints_and_padding(rng: np.random.Generator) -> None:
    """A slice of a fused weight packs without a copy; padding is zero."""
    c = random_checkpoint(rng, "nvfp4", 70, 160)
    weight, scale, factor = c.torch_arguments()
    part = pp.pack_nvfp4(weight[3:20, 16:48], scale[3:20, 2:6], factor[3:20], arch="gfx942")
    assert np.array_equal(part.dequantize(torch.float64).numpy(), c.values[3:20, 32:96])
    group, tiles = part.weight.shape[:2]
    assert (group, tiles) == (1, 1)
    codes = layout.unpack_codes(pp.PackedMeta("nvfp4", "gfx942", 64, 128), part.weight)
    assert codes[17:].count_nonzero() == 0 and codes[:, 32:].count_nonzero() == 0
    assert part.row_scale[17:].count_nonzero() == 0 and part.row_exponent[17:].count_nonzero() == 0


def test_an_exact_layer_is_reported_once_by_name(rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    c = random_checkpoint(rng, "mxfp4", 20, 256, scales=[60, 127])
    with caplog.at_level("INFO", "petit_plugin"):
        w = pp.pack_mxfp4(*c.torch_arguments(), arch="gfx942", name="down_proj")
    assert w.meta.exact
    (record,) = caplog.records
    assert "down_proj.weight_scale" in record.message and "EXACT" in record.message
