# ruff: noqa: E501  (kernel and assembly text)
"""What the pseudocode oracle cannot do, against NumPy: lane crossing, DPP, SDWA, byte instructions, carries, mini floats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_code import ARCHS, assemble

import emulator

LANE = np.arange(64)
LOAD = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32_e32 v1, 5, v0
  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[10:13], v1, s[4:5]
  global_load_dwordx4 v[14:17], v1, s[4:5] offset:16
  s_waitcnt vmcnt(0)
"""
STORE = """
  s_nop 4
  v_lshlrev_b32_e32 v1, 4, v0
  global_store_dwordx4 v1, v[16:19], s[6:7]
"""


def run(body: str, words: np.ndarray, arch: str = "gfx942") -> np.ndarray:
    """words [64, 8] -> v10..v17 of each lane; returns v16..v19 of each lane (v18, v19 start as zero)."""
    out = np.zeros((64, 4), np.uint32)
    text = LOAD + "  v_mov_b32_e32 v18, 0\n  v_mov_b32_e32 v19, 0\n" + body + STORE
    with emulator.load(assemble({"k": text}, arch), arch) as module:
        module.kernel("k").launch(1, 64, [np.ascontiguousarray(words), out, None])
    return out


@pytest.fixture
def words(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 1 << 32, (64, 8), dtype=np.uint64).astype(np.uint32)


def test_byte_permute(words: np.ndarray, rng: np.random.Generator) -> None:
    words[:, 4] = rng.integers(0, 14, (64, 4)).astype(np.uint8).reshape(64, 4).view(np.uint32)[:, 0]
    source = np.concatenate(
        [words[:, 2:3].view(np.uint8), words[:, 0:1].view(np.uint8)], axis=1
    )  # bytes 0-3 of S1, 4-7 of S0
    sign = np.where(source[:, [1, 3, 5, 7]] & 0x80, 0xFF, 0).astype(np.uint8)
    table = np.concatenate([source, sign, np.zeros((64, 1), np.uint8), np.full((64, 1), 0xFF, np.uint8)], axis=1)
    want = np.take_along_axis(table, words[:, 4:5].view(np.uint8).astype(np.int64), axis=1).copy().view(np.uint32)[:, 0]
    assert (run("  v_perm_b32 v16, v10, v12, v14", words)[:, 0] == want).all()
    # A selector in a scalar register.
    words[:, 4] = 0x06010502
    want = np.take_along_axis(table, words[:, 4:5].view(np.uint8).astype(np.int64), axis=1).copy().view(np.uint32)[:, 0]
    assert (run("  s_mov_b32 s20, 0x06010502\n  v_perm_b32 v16, v10, v12, s20", words)[:, 0] == want).all()


def test_three_input_logic(words: np.ndarray, rng: np.random.Generator) -> None:
    a, b, c = (words[:, k] for k in (0, 2, 4))
    for table in rng.integers(0, 256, 3):
        want = np.zeros(64, np.uint32)
        for row in range(8):
            if table >> row & 1:
                want |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        text = (
            f"  v_bitop3_b32 v16, v10, v12, v14 bitop3:{table:#x}\n  v_bitop3_b16 v17, v10, v12, v14 bitop3:{table:#x}"
        )
        out = run(text, words, "gfx950")
        assert (out[:, 0] == want).all()
        assert (out[:, 1] & 0xFFFF == want & 0xFFFF).all()


def test_funnel_shift(words: np.ndarray) -> None:
    wide = words[:, 0].astype(np.uint64) << np.uint64(32) | words[:, 2]
    out = run("  v_alignbit_b32 v16, v10, v12, v14\n  v_alignbit_b32 v17, v10, v12, 13", words)
    assert (out[:, 0] == (wide >> (words[:, 4] & 31).astype(np.uint64)).astype(np.uint32)).all()
    assert (out[:, 1] == (wide >> np.uint64(13)).astype(np.uint32)).all()


def test_rounding_to_integers(words: np.ndarray, rng: np.random.Generator) -> None:
    x = np.concatenate([np.arange(-16, 16) / 2, rng.standard_normal(32) * 10.0 ** rng.integers(0, 4, 32)]).astype(
        np.float32
    )
    words[:, 0] = x.view(np.uint32)
    words[:, 2] = x.astype(np.float16).view(np.uint16)
    out = run("  v_rndne_f32_e32 v16, v10\n  v_rndne_f16_e32 v17, v12", words)
    assert (out[:, 0] == np.rint(x).view(np.uint32)).all()
    half = out[:, 1].astype(np.uint16).view(np.float16)
    assert np.array_equal(half, np.rint(x.astype(np.float16)), equal_nan=True)


def test_scalar_immediates() -> None:
    body = "  s_movk_i32 s20, 0x8001\n  s_movk_i32 s21, 0x64\n  s_addk_i32 s21, 0xfff0\n  s_mulk_i32 s20, 3\n"
    body += (
        "  s_cmpk_lt_u32 s21, 0x55\n  s_cselect_b32 s22, 1, 0\n  s_cmpk_gt_i32 s20, 0xfffe\n  s_cselect_b32 s23, 1, 0\n"
    )
    moves = "".join(f"  v_mov_b32_e32 v{16 + i}, s{20 + i}\n" for i in range(4))
    out = run(body + moves, np.zeros((64, 8), np.uint32))
    assert (out == np.array([(-32767 * 3) & 0xFFFFFFFF, 84, 1, 0], np.uint32)).all()


def test_accumulator_registers(words: np.ndarray) -> None:
    body = "  v_accvgpr_write_b32 a3, v10\n  v_accvgpr_write_b32 a4, 7\n  s_nop 2\n"
    out = run(body + "  v_accvgpr_read_b32 v16, a3\n  v_accvgpr_read_b32 v17, a4", words)
    assert (out[:, 0] == words[:, 0]).all() and (out[:, 1] == 7).all()


def test_compare_and_set_exec(words: np.ndarray) -> None:
    body = "  v_cmpx_lt_u32_e32 vcc, v10, v12\n  v_mov_b32_e32 v16, 5\n  s_mov_b64 exec, -1"
    out = run(body, words)
    assert (out[:, 0] == np.where(words[:, 0] < words[:, 2], 5, words[:, 6])).all()


def test_byte_sums(words: np.ndarray) -> None:
    a, b = (words[:, k : k + 1].view(np.uint8).astype(np.int64) for k in (0, 2))
    c = words[:, 4].astype(np.int64)
    sad = np.abs(a - b).sum(1)
    body = "  v_sad_u8 v16, v10, v12, v14\n  v_sad_hi_u8 v17, v10, v12, v14\n  v_sad_u32 v18, v10, v12, v14\n  v_lerp_u8 v19, v10, v12, v14"
    out = run(body, words).astype(np.int64)
    mask = 0xFFFFFFFF
    assert (out[:, 0] == (sad + c & mask)).all()
    assert (out[:, 1] == ((sad << 16) + c & mask)).all()
    assert (out[:, 2] == (np.abs(words[:, 0].astype(np.int64) - words[:, 2].astype(np.int64)) + c & mask)).all()
    lerp = (a + b + (words[:, 4:5].view(np.uint8) & 1)) >> 1
    assert (out[:, 3] == lerp.astype(np.uint8).view(np.uint32)[:, 0]).all()


@pytest.mark.parametrize("signed", [False, True])
def test_wide_multiply_add(words: np.ndarray, signed: bool) -> None:
    a, b = ([int(np.int32(x)) if signed else int(x) for x in words[:, k]] for k in (0, 2))
    c = [int(words[i, 4]) | int(words[i, 5]) << 32 for i in range(64)]
    name = "v_mad_i64_i32" if signed else "v_mad_u64_u32"
    out = run(
        f"  {name} v[16:17], vcc, v10, v12, v[14:15]\n  v_mov_b32_e32 v18, vcc_lo\n  v_mov_b32_e32 v19, vcc_hi", words
    )
    for i in range(64):
        total = a[i] * b[i] + (c[i] - (1 << 64) if signed and c[i] >> 63 else c[i])
        assert int(out[i, 0]) | int(out[i, 1]) << 32 == total & ((1 << 64) - 1)
        carry = (int(out[i, 2]) | int(out[i, 3]) << 32) >> i & 1
        assert carry == (not -(1 << 63) <= total < 1 << 63 if signed else total >> 64)


DPP = {
    "quad_perm:[1,0,3,2]": LANE ^ 1,
    "quad_perm:[3,3,0,1]": (LANE & ~3) + np.array([3, 3, 0, 1])[LANE & 3],
    "row_shl:3": np.where((LANE & 15) + 3 < 16, LANE + 3, -1),
    "row_shr:5": np.where((LANE & 15) >= 5, LANE - 5, -1),
    "row_ror:4": (LANE & ~15) | (LANE - 4) & 15,
    "row_mirror": LANE ^ 15,
    "row_half_mirror": LANE ^ 7,
    "row_bcast:15": np.where(LANE >= 16, (LANE & ~15) - 1, -1),
    "row_bcast:31": np.where(LANE >= 32, 31, -1),
    "row_newbcast:6": (LANE & ~15) | 6,
    "wave_shl:1": np.where(LANE < 63, LANE + 1, -1),
    "wave_ror:1": (LANE - 1) % 64,
}


@pytest.mark.parametrize("control", DPP)
def test_dpp(control: str, words: np.ndarray) -> None:
    source = DPP[control]
    plain = run(f"  v_mov_b32_dpp v16, v10 {control} row_mask:0xf bank_mask:0xf", words, "gfx90a")[:, 0]
    moved = words[np.maximum(source, 0), 0]
    assert (plain == np.where(source >= 0, moved, words[:, 6])).all()
    zero = run(f"  v_add_u32_dpp v16, v10, v12 {control} row_mask:0xb bank_mask:0x7 bound_ctrl:0", words, "gfx90a")[
        :, 0
    ]
    active = (0xB >> (LANE >> 4) & 1) & (0x7 >> (LANE >> 2 & 3) & 1)
    want = np.where(source >= 0, moved, 0).astype(np.uint32) + words[:, 2]
    assert (zero == np.where(active, want, words[:, 6])).all()


def test_sdwa(words: np.ndarray) -> None:
    byte = words[:, 0:1].view(np.uint8)
    half = words[:, 2:3].view(np.uint16)
    body = "  v_add_u32_sdwa v16, v10, v12 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1\n"
    body += "  v_add_u32_sdwa v17, sext(v10), v12 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:WORD_0\n"
    body += "  v_lshlrev_b16_sdwa v18, v10, v12 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:WORD_1"
    out = run(body, words, "gfx90a")
    assert (out[:, 0] == byte[:, 2].astype(np.uint32) + half[:, 1]).all()
    low = (byte[:, 3].astype(np.int8).astype(np.int64) + half[:, 0] & 0xFFFF).astype(np.uint32)
    assert (out[:, 1] == (words[:, 7] & 0xFFFF | low << 16)).all()
    shifted = (half[:, 1].astype(np.uint32) << (byte[:, 0] & 15) & 0xFFFF) & 0xFF
    assert (out[:, 2] == shifted << 8).all()


def test_scalar_lane_moves(words: np.ndarray) -> None:
    body = "  s_mov_b64 exec, 0xf0\n  v_readfirstlane_b32 s20, v10\n  s_mov_b64 exec, -1\n  v_readlane_b32 s21, v12, 63\n  v_writelane_b32 v16, s21, 9\n"
    out = run(
        body + "  v_mov_b32_e32 v17, s20\n  v_mbcnt_lo_u32_b32 v18, -1, 0\n  v_mbcnt_hi_u32_b32 v18, -1, v18", words
    )
    assert (out[:, 1] == words[4, 0]).all()
    assert out[9, 0] == words[63, 2] and (np.delete(out[:, 0], 9) == np.delete(words[:, 6], 9)).all()
    assert (out[:, 2] == LANE).all()


def test_permutes_through_lds(words: np.ndarray, rng: np.random.Generator) -> None:
    order = rng.permutation(64)
    words[:, 0] = order * 4
    out = run("  ds_bpermute_b32 v16, v10, v12\n  ds_permute_b32 v17, v10, v12\n  s_waitcnt lgkmcnt(0)", words)
    assert (out[:, 0] == words[order, 2]).all()
    assert (out[order, 1] == words[:, 2]).all()


def test_permlane_swaps(words: np.ndarray) -> None:
    out = run("  v_permlane16_swap_b32_e32 v16, v17", words, "gfx950")
    d, s = words[:, 6].reshape(2, 2, 16).copy(), words[:, 7].reshape(2, 2, 16).copy()
    d[:, 1], s[:, 0] = words[:, 7].reshape(2, 2, 16)[:, 0], words[:, 6].reshape(2, 2, 16)[:, 1]
    assert (out[:, 0] == d.reshape(64)).all() and (out[:, 1] == s.reshape(64)).all()
    out = run("  v_permlane32_swap_b32_e32 v16, v17", words, "gfx950")
    assert (out[:, 0] == np.concatenate([words[:32, 6], words[:32, 7]])).all()
    assert (out[:, 1] == np.concatenate([words[32:, 6], words[32:, 7]])).all()


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("byte", range(4))
def test_fp4_to_16_bit_with_scale(byte: int, words: np.ndarray, rng: np.random.Generator) -> None:
    exponent = rng.integers(110, 140, 64)
    words[:, 2] = exponent.astype(np.uint32) << 23 | words[:, 2] & 0x7FFFFF  # only the exponent of the scale counts
    sel = f"op_sel:[{byte & 1},{byte >> 1},0]" if byte else ""
    out = run(
        f"  v_cvt_scalef32_pk_bf16_fp4 v16, v10, v12 {sel}\n  v_cvt_scalef32_pk_f16_fp4 v17, v10, v12 {sel}\n"
        f"  v_cvt_scalef32_pk_f32_fp4 v[18:19], v10, v12 {sel}",
        words,
        "gfx950",
    )
    codes = words[:, 0:1].view(np.uint8)[:, byte]
    want = np.stack([FP4[codes & 15], FP4[codes >> 4]], 1) * 2.0 ** (exponent - 127)[:, None]
    assert (out[:, 0:1].copy().view(ml_dtypes.bfloat16).astype(np.float64) == want).all()
    assert (out[:, 1:2].copy().view(np.float16).astype(np.float64) == want.astype(np.float16)).all()
    assert (out[:, 2:4].copy().view(np.float32) == want).all()
    zeros = np.signbit(want) == np.signbit(out[:, 2:4].copy().view(np.float32))
    assert zeros.all()


def test_f32_to_fp4(words: np.ndarray, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((64, 2)) * 4).astype(np.float32)
    x[:16, 0] = [
        0.25,
        0.75,
        1.25,
        1.75,
        2.5,
        3.5,
        5.0,
        7.0,
        -0.25,
        -0.75,
        -1.25,
        -1.75,
        -2.5,
        -3.5,
        -5.0,
        -100.0,
    ]  # ties and overflow
    words[:, 0], words[:, 2], words[:, 4] = x[:, 0].view(np.uint32), x[:, 1].view(np.uint32), 127 << 23
    out = run("  v_cvt_scalef32_pk_fp4_f32 v16, v10, v12, v14 op_sel:[0,0,0,1]", words, "gfx950")[:, 0]
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    byte = out >> 16 & 0xFF
    assert (FP4[byte & 15] == want[:, 0]).all() and (FP4[byte >> 4] == want[:, 1]).all()
    assert (out & 0xFF00FFFF == words[:, 6] & 0xFF00FFFF).all()


@pytest.mark.parametrize(
    ("arch", "kind", "dtype"),
    [
        ("gfx942", "fp8", ml_dtypes.float8_e4m3fnuz),
        ("gfx942", "bf8", ml_dtypes.float8_e5m2fnuz),
        ("gfx950", "fp8", ml_dtypes.float8_e4m3fn),
        ("gfx950", "bf8", ml_dtypes.float8_e5m2),
    ],
)
def test_fp8_conversions(arch: str, kind: str, dtype: Any, words: np.ndarray, rng: np.random.Generator) -> None:
    codes = words[:, 0:1].view(np.uint8)
    out = run(
        f"  v_cvt_pk_f32_{kind}_e32 v[16:17], v10\n  v_cvt_pk_f32_{kind}_sdwa v[18:19], v10 src0_sel:WORD_1",
        words,
        arch,
    )
    want = codes.view(dtype).astype(np.float32)
    assert np.array_equal(out.view(np.float32), want, equal_nan=True)
    x = (rng.standard_normal((64, 2)) * 10.0 ** rng.integers(-3, 2, (64, 2))).astype(np.float32)
    words[:, 0], words[:, 2] = x[:, 0].view(np.uint32), x[:, 1].view(np.uint32)
    packed = run(f"  v_cvt_pk_{kind}_f32 v16, v10, v12 op_sel:[0,0,1]", words, arch)[:, 0]
    assert (packed & 0xFFFF == words[:, 6] & 0xFFFF).all()
    assert ((packed >> 16).astype(np.uint16).reshape(64, 1).view(np.uint8) == x.astype(dtype).view(np.uint8)).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_f32_rounding_mode(arch: str, words: np.ndarray) -> None:
    words[:, 0], words[:, 2] = np.float32(1).view(np.uint32), np.float32(2.0**-30).view(np.uint32)
    body = "".join(
        f"  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), {mode}\n  v_add_f32_e32 v{16 + mode}, v10, v12\n"
        for mode in range(4)
    )
    out = run(body, words, arch).view(np.float32)
    up = np.nextafter(np.float32(1), np.float32(2))
    assert (out == np.array([1, up, 1, 1], np.float32)).all()
