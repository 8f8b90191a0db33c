"""The machine code of the GEMM kernels on the emulator, against float64 and the numerics contract."""

from __future__ import annotations

import pytest
import torch
from device.harness import random_packed
from numerics import assert_close, random_activations, reference

import emulator
from petit_plugin.backends.hip.solutions import Solution

KINDS = [(f, d) for f in ("nvfp4", "mxfp4") for d in (torch.bfloat16, torch.float16)]
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100)
# Scales close enough together for gfx90a's fast kernels too.
NARROW = {"nvfp4": range(0x30, 0x60), "mxfp4": range(118, 128)}


def target(machine, variant=""):
    return machine.arch + variant


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("fmt", "dtype"), KINDS)
def test_rows(machine, fmt, dtype, m, rng):
    n, k = (72, 192 + 16 * (fmt == "nvfp4"))
    w, values = random_packed(rng, fmt, n, k, machine.arch, list(NARROW[fmt]))
    assert not w.meta.exact
    x = random_activations(rng, (m, k), dtype)
    bias = random_activations(rng, (n,), dtype if m % 2 else torch.float32) if m % 3 else None
    y = machine.linear(x, w, bias, cus=3)
    assert_close(y, reference(x, values, bias))


@pytest.mark.parametrize(("n", "k"), [(1, 32), (5, 64), (16, 576), (48, 640), (192, 2880), (300, 112)])
@pytest.mark.parametrize("m", [3, 20, 33])
def test_ragged(machine, n, k, m, rng):
    fmt = "mxfp4" if k % 32 == 0 and rng.integers(2) else "nvfp4"
    dtype = (torch.bfloat16, torch.float16)[rng.integers(2)]
    w, values = random_packed(rng, fmt, n, k, machine.arch, list(NARROW[fmt]))
    x = random_activations(rng, (m, k), dtype)
    assert_close(machine.linear(x, w, cus=5), reference(x, values))


@pytest.mark.parametrize(("fmt", "dtype"), KINDS)
def test_tile_128(machine, fmt, dtype, rng):
    w, values = random_packed(rng, fmt, 330, 320, machine.arch, list(NARROW[fmt]))
    x = random_activations(rng, (140, 320), dtype)
    y = machine.linear(x, w, solution=Solution("tile", 128, 1, 1), cus=5)
    assert_close(y, reference(x, values))


@pytest.mark.parametrize("m", [3, 20, 40])
@pytest.mark.parametrize(("fmt", "dtype"), KINDS)
def test_exact_variants(machine, fmt, dtype, m, rng):
    """Rows whose scales span more than the fast kernels hold."""
    if fmt == "nvfp4" and machine.arch != "gfx90a":
        w, _ = random_packed(rng, fmt, 40, 256, machine.arch, list(range(1, 0x7F)))
        assert not w.meta.exact  # nothing to test: these targets hold every E4M3 row
        return
    scales = list(range(1, 0x7F)) if fmt == "nvfp4" else list(range(40, 160))
    w, values = random_packed(rng, fmt, 70, 288, machine.arch, scales)
    assert w.meta.exact
    x = random_activations(rng, (m, 288), dtype)
    y = machine.linear(x, w, cus=3)
    assert_close(y, reference(x, values), norm=False)


@pytest.mark.parametrize(("role", "rows"), [("decode", 16), ("decode", 32), ("tile", 64), ("tile", 128)])
def test_same_bits_whatever_the_order(machine, role, rows, rng):
    """Cut tiles are finished by whoever comes last; the sum must not depend on it. Also: two runs, same bits."""
    fmt = ("nvfp4", "mxfp4")[rng.integers(2)]
    w, values = random_packed(rng, fmt, 130, 1024, machine.arch, list(NARROW[fmt]))
    x = random_activations(rng, (rows, 1024), torch.bfloat16)
    results = []
    try:
        for seed in (0, 1, 2, 3):
            emulator.get().set_option("seed", seed)
            results.append(machine.linear(x, w, solution=Solution(role, rows, 1, 1), cus=13))
    finally:
        emulator.get().set_option("seed", 0)
    assert_close(results[0], reference(x, values))
    for other in results[1:]:
        assert torch.equal(other.view(torch.int16), results[0].view(torch.int16))


def test_gfx950_mask_core(machine, rng):
    """gfx950's alternative core, over weights in mask order."""
    if machine.arch != "gfx950":
        assert not any(name.endswith("_mask") for name in machine.module.names())
        return
    for fmt, dtype in KINDS:
        w, values = random_packed(rng, fmt, 72, 192, "gfx950-mask", list(NARROW[fmt]))
        for m in (5, 40):
            x = random_activations(rng, (m, 192), dtype)
            assert_close(machine.linear(x, w, cus=3), reference(x, values))


@pytest.mark.parametrize(("fmt", "dtype"), KINDS)
def test_large_m_path(machine, fmt, dtype, rng):
    """Dequantised weights are the operands, exactly; the finish kernel rounds once."""
    w, values = random_packed(rng, fmt, 200, 224, machine.arch, list(NARROW[fmt]))
    dense = torch.cat([machine.dequantize(w, dtype, 0, 128), machine.dequantize(w, dtype, 128, 72)])
    factor = w.tensors["row_scale"][:200].double() * torch.exp2(w.tensors["row_exponent"][:200].double())
    assert torch.equal(dense.double() * factor[:, None], torch.from_numpy(values))
    x = random_activations(rng, (9, 224), dtype)
    bias = random_activations(rng, (200,), torch.float32)
    total = (x.double() @ dense.double().T).float()
    assert_close(machine.finish(total, w, bias, dtype), reference(x, values, bias))
