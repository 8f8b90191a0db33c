# ruff: noqa: E501  (kernel and assembly text)
"""Matrix instructions: bit for bit against mmasim on gfx90a and gfx942, against float64 on gfx950."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
import torch
from device_code import assemble
from mmasim.amd import MFMA

import emulator

TYPES = {
    "f16": (torch.float16, 16),
    "bf16": (torch.bfloat16, 16),
    "fp8": (torch.float8_e4m3fnuz, 8),
    "bf8": (torch.float8_e5m2fnuz, 8),
    "f32": (torch.float32, 32),
}
# arch, mnemonic, mmasim name, rows, k, A type, B type
EXACT = [
    ("gfx90a", "16x16x16f16", "f32_16x16x16f16", 16, 16, "f16", "f16"),
    ("gfx90a", "32x32x8f16", "f32_32x32x8f16", 32, 8, "f16", "f16"),
    ("gfx90a", "16x16x16bf16_1k", "f32_16x16x16bf16_1k", 16, 16, "bf16", "bf16"),
    ("gfx90a", "32x32x8bf16_1k", "f32_32x32x8bf16_1k", 32, 8, "bf16", "bf16"),
    ("gfx942", "16x16x16_f16", "f32_16x16x16_f16", 16, 16, "f16", "f16"),
    ("gfx942", "32x32x8_f16", "f32_32x32x8_f16", 32, 8, "f16", "f16"),
    ("gfx942", "16x16x16_bf16", "f32_16x16x16_bf16", 16, 16, "bf16", "bf16"),
    ("gfx942", "32x32x8_bf16", "f32_32x32x8_bf16", 32, 8, "bf16", "bf16"),
    ("gfx942", "16x16x32_fp8_fp8", "f32_16x16x32_fp8_fp8", 16, 32, "fp8", "fp8"),
    ("gfx942", "16x16x32_bf8_fp8", "f32_16x16x32_bf8_fp8", 16, 32, "bf8", "fp8"),
    ("gfx942", "32x32x16_fp8_bf8", "f32_32x32x16_fp8_bf8", 32, 16, "fp8", "bf8"),
    ("gfx942", "32x32x16_bf8_bf8", "f32_32x32x16_bf8_bf8", 32, 16, "bf8", "bf8"),
]
GFX950 = [
    ("16x16x32_f16", 16, 32, "f16"),
    ("32x32x16_f16", 32, 16, "f16"),
    ("16x16x32_bf16", 16, 32, "bf16"),
    ("32x32x16_bf16", 32, 16, "bf16"),
]


def body(name: str, a_regs: int, c_regs: int, inline_zero: bool = False, more: str = "") -> str:
    """A at 0 (32 bytes a lane), B at 2048, C at 4096 (64 bytes a lane), scales at 8192; D over C."""
    loads = [f"  global_load_dwordx4 v[{8 + 4 * i}:{11 + 4 * i}], v1, s[4:5] offset:{16 * i}" for i in range(2)]
    loads += [f"  global_load_dwordx4 v[{16 + 4 * i}:{19 + 4 * i}], v1, s[8:9] offset:{16 * i}" for i in range(2)]
    loads += [
        f"  global_load_dwordx4 v[{32 + 4 * i}:{35 + 4 * i}], v2, s[6:7] offset:{16 * i}" for i in range(c_regs // 4)
    ]
    stores = [
        f"  global_store_dwordx4 v2, v[{32 + 4 * i}:{35 + 4 * i}], s[6:7] offset:{16 * i}" for i in range(c_regs // 4)
    ]
    a, b, c = f"v[8:{7 + a_regs}]", f"v[16:{15 + a_regs}]", f"v[32:{31 + c_regs}]"
    return "\n".join(
        [
            "  s_load_dwordx4 s[4:7], s[0:1], 0x0",
            "  s_load_dwordx2 s[8:9], s[0:1], 0x10",
            "  v_lshlrev_b32_e32 v1, 5, v0",
            "  v_lshlrev_b32_e32 v2, 6, v0",
            "  s_waitcnt lgkmcnt(0)",
            *loads,
            "  s_waitcnt vmcnt(0)",
            f"  v_mfma_f32_{name} {c}, {a}, {b}, {0 if inline_zero else c}{more}",
            "  s_nop 15",
            *stores,
        ]
    )


def operand(x: torch.Tensor, bits: int, rows: int) -> np.ndarray:
    """[rows, k] -> 64 lanes of 32 bytes: lane l has row l % rows and the k group l / rows."""
    groups = 64 // rows
    raw = x.contiguous().view(torch.uint8).numpy().reshape(rows, groups, -1).transpose(1, 0, 2).reshape(64, -1)
    out = np.zeros((64, 32), np.uint8)
    out[:, : raw.shape[1]] = raw
    assert raw.shape[1] * 8 // bits * groups == x.shape[1]
    return out


def rows_of(rows: int) -> np.ndarray:
    lane, reg = np.arange(64)[:, None], np.arange(rows * rows // 64)[None, :]
    return 4 * (lane // 16) + reg if rows == 16 else 8 * (reg // 4) + 4 * (lane // 32) + reg % 4


def c_to_lanes(c: np.ndarray) -> np.ndarray:
    rows = c.shape[0]
    out = np.zeros((64, 16), np.float32)
    out[:, : rows * rows // 64] = c[rows_of(rows), np.arange(64)[:, None] % rows]
    return out


def c_from_lanes(lanes: np.ndarray, rows: int) -> np.ndarray:
    c = np.zeros((rows, rows), np.float32)
    c[rows_of(rows), np.arange(64)[:, None] % rows] = lanes[:, : rows * rows // 64]
    return c


@functools.cache
def module(arch: str) -> emulator.Module:
    kernels = {}
    for a, name, _, rows, k, ta, _ in EXACT:
        if a == arch:
            kernels[f"k{name}"] = body(name, rows * k * TYPES[ta][1] // 64 // 32, rows * rows // 64)
    if arch == "gfx950":
        for name, rows, k, t in GFX950:
            kernels[f"k{name}"] = body(name, rows * k * TYPES[t][1] // 64 // 32, rows * rows // 64)
    return emulator.load(assemble(kernels, arch), arch)


def run(
    arch: str, name: str, rows: int, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, bits: tuple[int, int]
) -> np.ndarray:
    d = c_to_lanes(c.numpy())
    module(arch).kernel(f"k{name}").launch(
        1, 64, [operand(a, bits[0], rows), d, operand(b.T.contiguous(), bits[1], rows)]
    )
    return c_from_lanes(d, rows)


def random_codes(rng: np.random.Generator, kind: str, shape: tuple[int, int], mode: str) -> torch.Tensor:
    """wide: any finite code, denormals included; near: values of similar size (much cancellation); special: also Inf and NaN."""
    dtype, bits = TYPES[kind]
    if mode == "near":
        return torch.from_numpy(rng.standard_normal(shape) * 2.0).to(dtype)
    raw = rng.integers(0, 1 << bits, shape)
    codes = torch.from_numpy(raw.astype(np.uint16 if bits == 16 else np.uint8)).view(dtype)
    if mode == "wide":
        codes = torch.where(torch.isfinite(codes.float()), codes.float(), torch.zeros(())).to(dtype)
    return codes


@pytest.mark.parametrize("mode", ["near", "wide", "special"])
@pytest.mark.parametrize("case", EXACT, ids=lambda c: f"{c[0]}-{c[1]}")
def test_bits_match_mmasim(case: tuple, mode: str, rng: np.random.Generator) -> None:
    arch, name, theirs, rows, k, ta, tb = case
    oracle = MFMA("CDNA2" if arch == "gfx90a" else "CDNA3", theirs)
    for step in range(6):
        a, b = random_codes(rng, ta, (rows, k), mode), random_codes(rng, tb, (k, rows), mode)
        scale = [1.0, 0.0, 1e-6, 1e6, 1e30, 1e-38][step]
        c = torch.from_numpy((rng.standard_normal((rows, rows)) * scale).astype(np.float32))
        got, want = run(arch, name, rows, a, b, c, (TYPES[ta][1], TYPES[tb][1])), oracle(a, b, c).numpy()
        nan = np.isnan(want)
        assert (np.isnan(got) == nan).all()
        differ = (got.view(np.uint32) != want.view(np.uint32)) & ~nan
        assert not differ.any(), f"{differ.sum()} of {differ.size} differ, first {got[differ][0]!r} {want[differ][0]!r}"


@pytest.mark.parametrize("case", GFX950, ids=lambda c: c[0])
def test_gfx950_wide_k_within_tolerance(case: tuple, rng: np.random.Generator) -> None:
    name, rows, k, t = case
    a, b = random_codes(rng, t, (rows, k), "near"), random_codes(rng, t, (k, rows), "near")
    c = torch.from_numpy(rng.standard_normal((rows, rows)).astype(np.float32))
    got = run("gfx950", name, rows, a, b, c, (16, 16))
    x, y, z = (v.double().numpy() for v in (a, b, c))
    bound = 2e-6 * (np.abs(x) @ np.abs(y) + np.abs(z))
    assert (np.abs(got - (x @ y + z)) <= bound).all()
    assert np.abs(got).max() > 1


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kinds", [("fp4", "fp4"), ("fp8", "fp8"), ("bf8", "fp4"), ("fp4", "bf8")], ids="-".join)
def test_f8f6f4_against_float64(kinds: tuple[str, str], scaled: bool, rows: int, rng: np.random.Generator) -> None:
    k = 128 if rows == 16 else 64
    selector = {"fp8": 0, "bf8": 1, "fp4": 4}
    groups = 64 // rows
    values, raw, registers = [], [], []
    for kind in kinds:
        if kind == "fp4":
            codes = rng.integers(0, 16, (rows, k)).astype(np.uint8)
            values.append(FP4[codes])
            packed = (codes[:, ::2] | codes[:, 1::2] << 4).reshape(rows, groups, 16)
            registers.append(4)
        else:
            dtype = ml_dtypes.float8_e4m3fn if kind == "fp8" else ml_dtypes.float8_e5m2
            x = (rng.standard_normal((rows, k)) * 3).astype(dtype)
            values.append(x.astype(np.float64))
            # Two chunks of 16 k a lane: 16 g and 16 groups + 16 g.
            packed = x.view(np.uint8).reshape(rows, 2, groups, 16).transpose(0, 2, 1, 3).reshape(rows, groups, 32)
            registers.append(8)
        lanes = np.zeros((64, 32), np.uint8)
        lanes[:, : packed.shape[2]] = packed.transpose(1, 0, 2).reshape(64, -1)
        raw.append(lanes)
    scales = (
        rng.integers(120, 135, (2, rows, k // 32)).astype(np.uint8)
        if scaled
        else np.full((2, rows, k // 32), 127, np.uint8)
    )
    c = rng.standard_normal((rows, rows)).astype(np.float32)
    d = c_to_lanes(c)
    suffix = f" cbsz:{selector[kinds[0]]} blgp:{selector[kinds[1]]}"
    shape = f"{rows}x{rows}x{k}_f8f6f4"
    if scaled:
        # Byte 2 of v56 and byte 1 of v57 are the scales of A and B.
        words = np.zeros((2, 64), np.uint32)
        for side, byte in ((0, 2), (1, 1)):
            words[side] = rng.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32) & ~np.uint32(0xFF << 8 * byte)
            words[side] |= scales[side].T.reshape(-1).astype(np.uint32) << np.uint32(8 * byte)
        text = body(
            shape, 8, 4 if rows == 16 else 16, more=", v56, v57 op_sel:[0,1,0] op_sel_hi:[1,0,0]" + suffix
        ).replace("v_mfma_f32", "v_mfma_scale_f32")
        extra = words
    else:
        text, extra = body(shape, 8, 4 if rows == 16 else 16, more=suffix), np.zeros((2, 64), np.uint32)
    for first, count in zip((8, 16), registers, strict=True):
        if count == 4:  # FP4: half the registers
            text = text.replace(f"v[{first}:{first + 7}],", f"v[{first}:{first + 3}],")
    # The scales lie behind B: 64 lanes of 32 bytes, then two dwords a lane.
    b_and_scales = np.concatenate([raw[1].reshape(-1), extra.T.reshape(-1).view(np.uint8)]) if scaled else raw[1]
    if scaled:
        load = "  v_lshlrev_b32_e32 v3, 3, v0\n  global_load_dwordx2 v[56:57], v3, s[8:9] offset:2048\n  s_waitcnt vmcnt(0)\n"
        text = text.replace("  v_mfma", load + "  v_mfma")
    with emulator.load(assemble({"k": text}, "gfx950"), "gfx950") as loaded:
        loaded.kernel("k").launch(1, 64, [raw[0], d, np.ascontiguousarray(b_and_scales)])
    weights = [values[s] * np.repeat(2.0 ** (scales[s].astype(float) - 127), 32, axis=1) for s in (0, 1)]
    want = weights[0] @ weights[1].T + c
    got = c_from_lanes(d, rows)
    assert (np.abs(got - want) <= 1e-6 * (np.abs(weights[0]) @ np.abs(weights[1]).T + np.abs(c))).all()
