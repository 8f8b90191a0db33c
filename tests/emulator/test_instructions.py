"""Scalar and vector instructions against the ISA document's pseudocode (PyPI tinygrad), random and special operands."""

from __future__ import annotations

import functools
import math
import re
import subprocess

import numpy as np
from device_code import ARCHS, ROOT, assemble
from instruction_forms import Form, forms, kernel
from pseudocode import Machine, Unsupported, decode
from tinygrad.runtime.autogen.amd.cdna import str_pcode as tables

import emulator

GROUPS = 1

# Results of approximate instructions may differ from the oracle by this many ulps.
ULPS = {
    "v_exp_f32": 1,
    "v_log_f32": 1,
    "v_exp_f16": 1,
    "v_log_f16": 1,
    "v_rsq_f32": 1,
    "v_rsq_f16": 1,
    "v_rcp_f16": 1,
    "v_sqrt_f16": 1,
    "v_rsq_f64": 2,
    "v_rcp_f64": 1,
    "v_exp_legacy_f32": 1,
    "v_log_legacy_f32": 1,
    "v_fract_f32": 1,
    "v_fract_f64": 1,
    "v_fract_f16": 1,
}
# The pseudocode says nothing about the sign of a zero result here, or about zero and denormal operands.
ZERO_SIGN_OPEN = {"v_fract_f32", "v_fract_f64", "v_fract_f16"}
NORMAL_OPERANDS_ONLY = {"v_frexp_exp_i32_f32", "v_frexp_exp_i32_f64", "v_frexp_exp_i16_f16", "v_exp_f32", "v_log_f32"}
# The pseudocode of these is known to be wrong, incomplete or not executable; each has its own test or a reason.
NOT_BY_PSEUDOCODE = {
    "v_div_scale_f32": "compares with DENORM symbolically; division is tested as a whole (test_kernels.py)",
    "v_div_scale_f64": "same",
    "v_div_fmas_f32": "the document's factor (2^32) does not undo v_div_scale's (2^64); the whole division is tested",
    "v_div_fmas_f64": "same",
    **{f"s_{n}_b64": "a jump" for n in ("getpc", "setpc", "swappc", "call")},
    **{
        f"v_rndne_f{n}": "adds one half in the operand's own precision, which rounds: test_lanes.py"
        for n in (16, 32, 64)
    },
    "v_cvt_rpi_i32_f32": "adds one half in f32, which rounds for large operands",
    "v_lerp_u8": "the document's widths drop the carry: test_lanes.py",
    "v_div_fixup_legacy_f16": "the document leaves the type of its infinities open; compilers do not emit it",
    "v_cvt_off_f32_i4": "needs a table the document gives elsewhere: test_lanes.py",
    "v_readfirstlane_b32": "crosses lanes: test_lanes.py",
    "v_readlane_b32": "crosses lanes: test_lanes.py",
    "v_writelane_b32": "crosses lanes: test_lanes.py",
}


@functools.cache
def all_forms() -> dict[str, Form]:
    from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS

    return {f.name: f for f in forms(OPERANDS, tables.PCODE)}


@functools.cache
def helper(name: str) -> str | None:
    for op, text in tables.PCODE.items():
        if re.sub(r"_e(32|64)$", "", op.name.lower()) == name:
            return text
    return None


def base(name: str) -> str:
    return re.sub(r"_e(32|64)$", "", name)


@functools.cache
def known_forms(arch: str) -> dict[str, Form]:
    """The forms that the emulator knows and this architecture's assembler accepts."""
    from device_code import clang

    known = {n: f for n, f in all_forms().items() if emulator.get().knows(arch, base(n))}
    text = "\n".join(f.text for f in known.values())
    done = subprocess.run(
        [clang(), "-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c", "-", "-o", "/dev/null"],
        input=text,
        capture_output=True,
        text=True,
    )
    bad = {int(m.group(1)) for m in re.finditer(r"<stdin>:(\d+):\d+: error", done.stderr)}
    return {n: f for i, (n, f) in enumerate(known.items(), 1) if i not in bad and base(n) not in NOT_BY_PSEUDOCODE}


@functools.cache
def module(arch: str) -> emulator.Module:
    return emulator.load(assemble({n: kernel(f) for n, f in known_forms(arch).items()}, arch), arch)


SPECIAL = {
    0: [
        0,
        1,
        2,
        31,
        32,
        63,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFFFF,
        0xFFFF,
        0x8000,
        0x7FFF,
        0xFFFFFF,
        0x00800000,
        0x01020304,
        0x0C0D0A0B,
    ],
    32: [
        0,
        0x80000000,
        0x3F800000,
        0xBF800000,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        1,
        0x007FFFFF,
        0x00800000,
        0x7F7FFFFF,
        0x4F000000,
        0x3F000000,
        0x40490FDB,
    ],
    16: [
        0,
        0x8000,
        0x3C00,
        0xBC00,
        0x7C00,
        0xFC00,
        0x7E00,
        1,
        0x3FF,
        0x400,
        0x7BFF,
        0x3800,
        0x3C003C00,
        0x00018001,
        0x12345678,
    ],
}


def random_words(rng: np.random.Generator, n: int, float_bits: int) -> np.ndarray:
    x = rng.integers(0, 1 << 32, n, dtype=np.uint64)
    if float_bits == 32:  # mostly exponents that meet each other
        x = x & 0x807FFFFF | (rng.integers(90, 165, n).astype(np.uint64) << np.uint64(23))
    elif float_bits == 16:
        x = rng.integers(0, 0x7C00, n).astype(np.uint64) | rng.integers(0, 2, n).astype(np.uint64) << np.uint64(15)
        x |= (
            rng.integers(0, 0x7C00, n).astype(np.uint64) | rng.integers(0, 2, n).astype(np.uint64) << np.uint64(15)
        ) << np.uint64(16)
    small = rng.random(n) < 0.15
    x[small] = rng.integers(0, 64, int(small.sum())).astype(np.uint64) if float_bits == 0 else x[small]
    special = rng.random(n) < 0.3
    x[special] = rng.choice(
        np.array(SPECIAL[float_bits if float_bits in SPECIAL else 0], np.uint64), int(special.sum())
    )
    return x.astype(np.uint32)


def inputs(rng: np.random.Generator, form: Form) -> tuple[np.ndarray, np.ndarray]:
    lanes = random_words(rng, GROUPS * 64 * 8, form.float_bits if form.float_bits != 64 else 0).reshape(GROUPS, 64, 8)
    if form.float_bits == 64:  # plausible doubles: random mantissa, exponents around one
        shape = lanes[..., 1::2].shape
        high = rng.integers(990, 1056, shape).astype(np.uint32) << 20 | rng.integers(0, 1 << 20, shape).astype(
            np.uint32
        )
        keep = rng.random(shape) < 0.8
        lanes[..., 1::2] = np.where(keep, high | rng.integers(0, 2, shape).astype(np.uint32) << 31, lanes[..., 1::2])
    return np.ascontiguousarray(lanes), random_words(rng, GROUPS * 8, 0).reshape(GROUPS, 8)


def pair(words: np.ndarray, at: int) -> int:
    return int(words[at]) | int(words[at + 1]) << 32


def pieces(form: Form, bits: int) -> list[int]:
    """A packed float result, element by element."""
    m = re.fullmatch(r"v_pk_\w+_f(16|32)", base(form.name))
    width = int(m.group(1)) if m else 0
    return [bits >> i & ((1 << width) - 1) for i in range(0, form.dest_width, width)] if m else [bits]


def same(got: int, want: int, dest: str | None, ulps: int, any_zero: bool = False) -> bool:
    if got == want:
        return True
    if any_zero and dest and not (got | want) & ~(1 << int(dest[1:]) - 1):
        return True
    if dest is None:
        return False
    x, y = decode(got, dest), decode(want, dest)
    if math.isnan(x) or math.isnan(y):
        return math.isnan(x) and math.isnan(y)
    return bool(ulps) and abs(got - want) <= ulps


def result_type(form: Form) -> str | None:
    """The float type of the result, or None for an integer."""
    name = base(form.name)
    part = name.split("_")[2] if name.startswith("v_cvt_") else name.split("_")[-1]
    return part if part in ("f16", "f32", "f64", "bf16") and "frexp_exp" not in name else None


def denormal_or_zero(bits: int, width: int) -> bool:
    e_bits, m_bits = {16: (5, 10), 32: (8, 23), 64: (11, 52)}[width]
    return bits >> m_bits & ((1 << e_bits) - 1) == 0


def check(arch: str, form: Form, rng: np.random.Generator) -> None:
    lanes, scalars = inputs(rng, form)
    out = np.zeros((GROUPS, 64, 8), np.uint32)
    module(arch).kernel(form.name).launch(GROUPS, 64, [lanes, out, scalars])
    dest = result_type(form)
    text = form.pseudocode.replace("WAVE_MODE.IEEE", "WAVE_MODE_IEEE")
    for g in range(GROUPS):
        vcc = pair(scalars[g], 6)
        for lane in range(1 if form.scalar else 64):
            mask = [(1 << w) - 1 for w in form.widths] + [0] * 3
            if form.scalar:
                s = [pair(scalars[g], 2 * k) & mask[k] for k in range(2)]
                m = Machine(
                    helper,
                    S0=s[0],
                    S1=s[1],
                    D0=pair(scalars[g], 4),
                    SCC=int(scalars[g][6]) >> 7 & 1,
                    laneId=0,
                    EXEC=(1 << 64) - 1,
                )
            else:
                s = [pair(lanes[g][lane], 2 * k) & mask[k] for k in range(3)]
                m = Machine(
                    helper,
                    S0=s[0],
                    S1=s[1],
                    S2=s[2],
                    D0=pair(lanes[g][lane], 6),
                    VCC=vcc,
                    laneId=lane,
                    WAVE_MODE_IEEE=1,
                    ROUND_MODE=0,
                    ROUND_NEAREST_EVEN=0,
                    ROUND_TOWARD_ZERO=3,
                    SDWA_SRC0_SEL=0,
                    OPSEL=0,
                    OPSEL_HI=0,
                )
                m.mem["D"] = m.mem["D0"]
            if base(form.name).startswith("v_cmp"):
                m.mem["D0"] = vcc
            if base(form.name) in NORMAL_OPERANDS_ONLY and denormal_or_zero(s[0], form.float_bits):
                continue
            m.run(text)
            got = out[g][lane]
            where = f"{arch} {form.text} lane {lane} sources {[hex(x) for x in s]}"
            if form.scalar:
                if form.dest_width:
                    width = (1 << form.dest_width) - 1
                    assert pair(got, 4) & width == m.mem["D0"] & width, where
                assert int(got[6]) & 1 == m.mem["SCC"] & 1, f"{where}: SCC"
                assert int(got[7]) == m.mem["EXEC"] & 0xFFFFFFFF, f"{where}: EXEC"
                continue
            if base(form.name).startswith("v_cmp"):
                assert pair(got, 2) >> lane & 1 == m.mem["D0"] >> lane & 1, f"{where}: {pair(got, 2) >> lane & 1}"
                continue
            if form.writes_mask:
                assert pair(got, 2) >> lane & 1 == m.mem["VCC"] >> lane & 1, f"{where}: carry"
            packed = base(form.name).startswith("v_pk_")
            bits = form.dest_width if packed or dest is None else int(dest.lstrip("bf"))
            width = (1 << bits) - 1
            got_parts, want_parts = pieces(form, pair(got, 0) & width), pieces(form, m.mem["D0"] & width)
            for x, y in zip(got_parts, want_parts, strict=True):
                ok = same(x, y, dest, ULPS.get(base(form.name), 0), base(form.name) in ZERO_SIGN_OPEN)
                assert ok, f"{where}: emulator {x:#x}, oracle {y:#x}"


@functools.cache
def used_by_kernels(arch: str) -> frozenset[str]:
    """Mnemonics in the shipped code object."""
    path = ROOT / "petit_plugin" / "backends" / "hip" / "code_objects" / f"petit_{arch}.co"
    return frozenset(i.name for i in emulator.disassemble(path.read_bytes())) if path.exists() else frozenset()


# Instructions of the shipped kernels that the pseudocode oracle cannot evaluate, and where they are checked instead.
CHECKED_ELSEWHERE = {
    "v_perm_b32": "test_lanes.py",
    "v_alignbit_b32": "test_lanes.py",
    "v_bitop3_b16": "test_lanes.py",
    "v_bitop3_b32": "test_lanes.py",
    "v_mad_u64_u32": "test_lanes.py",
    "v_readfirstlane_b32": "test_lanes.py",
    "v_readlane_b32": "test_lanes.py",
    "v_writelane_b32": "test_lanes.py",
    "v_cvt_scalef32_pk_bf16_fp4": "test_lanes.py",
    "v_cvt_scalef32_pk_f16_fp4": "test_lanes.py",
    "v_cvt_scalef32_pk_f32_fp4": "test_lanes.py",
    "v_permlane16_swap_b32": "test_lanes.py",
    "v_permlane32_swap_b32": "test_lanes.py",
    "v_cmpx": "test_lanes.py",
    "v_accvgpr_read_b32": "test_lanes.py",
    "v_accvgpr_write_b32": "test_lanes.py",
    "v_nop": "does nothing",
    "v_rndne_f32": "test_lanes.py",
    "s_movk_i32": "test_lanes.py",
    "s_addk_i32": "test_lanes.py",
    "s_mulk_i32": "test_lanes.py",
    "s_cmpk": "test_lanes.py",
}


def test_every_vector_and_scalar_instruction_of_the_kernels_has_an_oracle() -> None:
    everything: dict[str, list[str]] = {}
    for arch in ARCHS:
        forms_here = {base(n) for n in known_forms(arch)}
        alu = {n for n in used_by_kernels(arch) if emulator.get().knows(arch, n) in ("valu", "salu")}
        open_ = {n for n in alu - forms_here if not any(n.startswith(known) for known in CHECKED_ELSEWHERE)}
        if open_:
            everything[arch] = sorted(open_)
        assert all(emulator.get().knows(arch, n) for n in used_by_kernels(arch))
    assert not everything, f"no oracle checks {everything}"


def test_instructions_match_the_isa_pseudocode(rng: np.random.Generator) -> None:
    """Every form on one of its architectures, chosen anew in each run; those of shipped kernels on each user."""
    by_name: dict[str, list[str]] = {}
    for arch in ARCHS:
        for name in known_forms(arch):
            by_name.setdefault(name, []).append(arch)
    checked: dict[str, set[str]] = {a: set() for a in ARCHS}
    unsupported: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name, archs in by_name.items():
        chosen = {str(rng.choice(archs))} | {a for a in archs if base(name) in used_by_kernels(a)}
        for arch in chosen:
            try:
                check(arch, known_forms(arch)[name], rng)
                checked[arch].add(base(name))
            except Unsupported as e:
                unsupported[name] = str(e)
            except AssertionError as e:
                failed[name] = str(e)
    everything = set().union(*checked.values())
    missed = {base(n) for n in unsupported} & set().union(*(used_by_kernels(a) for a in ARCHS))
    assert missed <= set(CHECKED_ELSEWHERE), f"in a shipped kernel, but no oracle understands {missed}"
    print(f"{len(everything)} instructions checked; not understood by the oracle: {unsupported}")
    assert not failed, "\n".join(failed.values())
    assert len(everything) > 300
