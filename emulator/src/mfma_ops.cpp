// MFMA instructions: operand layouts, then the arithmetic of the generation.
#include <array>

#include "group.hpp"
#include "halves.hpp"
#include "mfma.hpp"
#include "valu.hpp"

namespace petit_emu {
namespace {

enum class El : u8 { f16, bf16, f32, fp8, bf8, fp6, bf6, fp4 };

struct Number {
    float value;
    i32 sig, exp;
};

// Significand with `man` fraction bits, exponent of the leading position; denormals keep the smallest exponent.
Number unpack16(u32 code, int man, int bias, float value) {
    const int exp_bits = 15 - man;
    const i32 e = i32(code >> man & ((1u << exp_bits) - 1u)), m = i32(code & ((1u << man) - 1u));
    const i32 sig = e ? m | (1 << man) : m;
    return {value, code >> 15 & 1u ? -sig : sig, (e ? e : 1) - bias};
}
Number unpack_mini(u32 code, const MiniFormat& f) {
    const float v = static_cast<float>(mini_decode(code, f));
    const i32 e = i32(code >> f.man_bits & ((1u << f.exp_bits) - 1u)), m = i32(code & ((1u << f.man_bits) - 1u));
    const i32 sig = e ? m | (1 << f.man_bits) : m;
    return {v, (code >> (f.exp_bits + f.man_bits) & 1u) ? -sig : sig, (e ? e : 1) - f.bias};
}
template <const MiniFormat& F>
const Number* mini_table() {
    static const auto table = [] {
        std::array<Number, 256> t;
        for (u32 c = 0; c < 256; ++c) t[c] = unpack_mini(c & ((1u << F.bits()) - 1u), F);
        return t;
    }();
    return table.data();
}

int bits_of(El e) {
    return e == El::f32                    ? 32
           : e == El::f16 || e == El::bf16 ? 16
           : e == El::fp4                  ? 4
           : e == El::fp6 || e == El::bf6  ? 6
                                           : 8;
}
int fraction_of(El e) {
    return e == El::f16                   ? 10
           : e == El::bf16                ? 7
           : e == El::fp8 || e == El::fp6 ? 3
           : e == El::bf8 || e == El::bf6 ? 2
                                          : 1;
}

Number decode(El e, u32 code, bool ocp) {
    switch (e) {
        case El::f16:
            return unpack16(code, 10, 15, h2f(code));
        case El::bf16:
            return unpack16(code, 7, 127, bf2f(code));
        case El::f32:
            return {f32(code), 0, 0};
        case El::fp8:
            return ocp ? mini_table<kE4M3>()[code] : mini_table<kE4M3Fnuz>()[code];
        case El::bf8:
            return ocp ? mini_table<kE5M2>()[code] : mini_table<kE5M2Fnuz>()[code];
        case El::fp6:
            return mini_table<kE2M3>()[code];
        case El::bf6:
            return mini_table<kE3M2>()[code];
        default:
            return mini_table<kE2M1>()[code];
    }
}

// Element j of lane group g -> k. The 8-bit types of the 128-wide f8f6f4 form are held as two 16-element chunks a lane
// (reported, not verified on silicon); everything else is contiguous.
int k_of(El e, bool f8f6f4, int groups, int per_lane, int g, int j) {
    if (f8f6f4 && bits_of(e) == 8) return (j / 16) * 16 * groups + 16 * g + j % 16;
    return g * per_lane + j;
}

// One operand of M (or N) x K spread over 64 lanes: lane l holds row l % rows, k group l / rows.
template <class Put>
void read_operand(const Wave& w, const Operand& o, El e, int rows, int k, bool f8f6f4, bool ocp, bool& special,
                  Put put) {
    const int groups = kLanes / rows, per_lane = k / groups, bits = bits_of(e);
    const int dwords = (per_lane * bits + 31) / 32;
    if (o.kind != Operand::vgpr || o.dwords < dwords) w.die("a matrix operand has too few registers");
    for (int d = 0; d < dwords; ++d) w.need(o.reg + unsigned(d), ~0ull);
    for (int l = 0; l < kLanes; ++l) {
        u32 raw[9] = {};
        for (int d = 0; d < dwords; ++d) raw[d] = w.v[o.reg + d].l[l];
        for (int j = 0; j < per_lane; ++j) {
            const int at = j * bits;
            const u64 pair = raw[at / 32] | u64(raw[at / 32 + 1]) << 32;
            const u32 code = bits == 32 ? raw[j] : u32(pair >> (at % 32)) & ((1u << bits) - 1u);
            const Number x = decode(e, code, ocp);
            special |= !std::isfinite(x.value);
            put(l % rows, k_of(e, f8f6f4, groups, per_lane, l / rows, j), x);
        }
    }
}

// The 16-bit case of read_operand, 64 lanes at a time: row k of the tile is 16 or 32 neighbouring lanes.
template <El E>
void read_operand16(const Wave& w, const Operand& o, int rows, int k, bool flush, bool& special, i32 (*sig)[kMaxDim],
                    i32 (*exp)[kMaxDim], float (*value)[kMaxDim]) {
    constexpr int man = E == El::f16 ? 10 : 7, bias = E == El::f16 ? 15 : 127;
    constexpr u32 top = (1u << (15 - man)) - 1u;
    const int groups = kLanes / rows, per_lane = k / groups;
    if (o.kind != Operand::vgpr || o.dwords < per_lane / 2) w.die("a matrix operand has too few registers");
    u32 any = 0;
    for (int j = 0; j < per_lane; ++j) {
        w.need(o.reg + unsigned(j / 2), ~0ull);
        const u32* raw = w.v[o.reg + j / 2].l;
        const int shift = 16 * (j & 1);
        Row s, x;
        FRow f;
        if constexpr (E == El::f16)
            halves_to_float(raw, shift, f);
        else
            PETIT_EMU_LANES f.l[l] = f32(raw[l] >> shift << 16);
        PETIT_EMU_LANES {
            const u32 code = raw[l] >> shift & 0xffffu, e = code >> man & top, m = code & ((1u << man) - 1u);
            const u32 mag = e ? m | (1u << man) : m, negative = 0u - (code >> 15);
            any |= e == top;
            s.l[l] = (mag ^ negative) - negative;
            x.l[l] = (e ? e : 1u) - u32(bias);
            f.l[l] = flush && !e ? 0.0f : f.l[l];
        }
        for (int g = 0; g < groups; ++g) {
            const int at = g * per_lane + j;
            std::memcpy(sig[at], s.l + g * rows, 4u * unsigned(rows));
            std::memcpy(exp[at], x.l + g * rows, 4u * unsigned(rows));
            std::memcpy(value[at], f.l + g * rows, 4u * unsigned(rows));
        }
    }
    special |= any != 0;
}

int c_row(int m, int reg, int lane) {
    return m == 16 ? 4 * (lane / 16) + reg : 8 * (reg / 4) + 4 * (lane / 32) + reg % 4;
}

Tile& scratch_tile() {
    static thread_local Tile t;
    return t;
}

void read_c(const Wave& w, const Operand& o, Tile& t) {
    const int regs = t.m * t.n / kLanes;
    if (o.kind == Operand::vgpr && o.dwords != regs) w.die("the C operand has the wrong number of registers");
    for (int r = 0; r < regs; ++r) {
        if (o.kind == Operand::vgpr) w.need(o.reg + unsigned(r), ~0ull);
        for (int l = 0; l < kLanes; ++l) {
            const u32 x = o.kind == Operand::vgpr ? w.v[o.reg + r].l[l] : static_cast<u32>(o.bits);
            t.special |= (x & 0x7f800000u) == 0x7f800000u;
            t.c[c_row(t.m, r, l)][l & (t.n - 1)] = f32(x);
        }
    }
}
void write_d(Wave& w, const Operand& o, const Tile& t) {
    const int regs = t.m * t.n / kLanes;
    for (int r = 0; r < regs; ++r) {
        w.may_write(o.reg + unsigned(r));
        for (int l = 0; l < kLanes; ++l) w.v[o.reg + r].l[l] = b32(t.c[c_row(t.m, r, l)][l & (t.n - 1)]);
        w.mark(o.reg + unsigned(r), ~0ull);
    }
}

void load_tile(const Wave& w, const Inst& in, Tile& t, El ea, El eb, bool f8f6f4) {
    const Arch arch = w.group->launch->arch;
    const bool ocp = arch == Arch::gfx950;
    t.special = false;
    if (in.cbsz || in.abid || in.blgp)
        if (!f8f6f4) w.die("cbsz, abid and blgp are not modelled");
    read_operand(w, in.ops[1], ea, t.m, t.k, f8f6f4, ocp, t.special, [&](int i, int k, const Number& x) {
        t.a[k][i] = x.value, t.a_sig[k][i] = x.sig, t.a_exp[k][i] = x.exp;
    });
    read_operand(w, in.ops[2], eb, t.n, t.k, f8f6f4, ocp, t.special, [&](int j, int k, const Number& x) {
        t.b[k][j] = x.value, t.b_sig[k][j] = x.sig, t.b_exp[k][j] = x.exp;
    });
    read_c(w, in.ops[3], t);
}

template <int M, int K, El EA, El EB>
void mfma(Wave& w, const Inst& in) {
    Tile& t = scratch_tile();
    t.m = t.n = M, t.k = K;
    if constexpr (EA == El::f16 || EA == El::bf16) {
        if (in.cbsz || in.abid || in.blgp) w.die("cbsz, abid and blgp are not modelled");
        const bool flush = w.group->launch->arch == Arch::gfx90a;
        t.special = false;
        read_operand16<EA>(w, in.ops[1], M, K, flush, t.special, t.a_sig, t.a_exp, t.a);
        read_operand16<EB>(w, in.ops[2], M, K, flush, t.special, t.b_sig, t.b_exp, t.b);
        read_c(w, in.ops[3], t);
    } else {
        load_tile(w, in, t, EA, EB, false);
    }
    if constexpr (EA == El::f32)
        mfma_fma(t);
    else if (w.group->launch->arch == Arch::gfx90a)
        mfma_cdna2(t);
    else if constexpr (EA == El::fp8 || EA == El::bf8)
        mfma_cdna3_fp8(t, fraction_of(EA) + fraction_of(EB));
    else
        mfma_cdna3(t, 2 * fraction_of(EA), 8);
    write_d(w, in.ops[0], t);
}

// f8f6f4, optionally with one E8M0 scale per row and 32 k. No bit model is published: the products and the sum are
// exact (double), C is added, and the result is rounded once.
template <int M, int K, bool Scaled>
void mfma_f8f6f4(Wave& w, const Inst& in) {
    static constexpr El types[5] = {El::fp8, El::bf8, El::fp6, El::bf6, El::fp4};
    if (in.cbsz > 4 || in.blgp > 4) w.die("cbsz or blgp does not name a type");
    Tile& t = scratch_tile();
    t.m = t.n = M, t.k = K;
    load_tile(w, in, t, types[in.cbsz], types[in.blgp], true);
    constexpr int blocks = K / 32;
    double sa[kMaxDim][blocks], sb[kMaxDim][blocks];
    for (int side = 0; side < 2; ++side) {
        Row spare;
        const u32* s = nullptr;
        int byte = 0;
        if constexpr (Scaled) {
            s = w.dword(in.ops[4 + side], 0, spare, ~0ull);
            byte = (in.op_sel >> side & 1) | (in.op_sel_hi >> side & 1) << 1;
        }
        for (int r = 0; r < M; ++r)
            for (int b = 0; b < blocks; ++b) {
                const u32 e = Scaled ? s[r + M * b] >> (8 * byte) & 0xffu : 127u;
                (side ? sb : sa)[r][b] = e == 255 ? std::nan("") : std::ldexp(1.0, int(e) - 127);
            }
    }
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < M; ++j) {
            double sum = 0;
            for (int b = 0; b < blocks; ++b) {
                double part = 0;
                for (int k = 32 * b; k < 32 * b + 32; ++k) part += double(t.a[k][i]) * double(t.b[k][j]);
                sum += part * (sa[i][b] * sb[j][b]);
            }
            t.c[i][j] = static_cast<float>(sum + double(t.c[i][j]));
        }
    write_d(w, in.ops[0], t);
}

}  // namespace

void add_mfma(OpTable& t, Arch arch) {
    const auto add = [&](const std::string& name, Handler fn, int cycles) {
        t.add("v_mfma_f32_" + name, fn, Unit::mfma, Ty::f32).cycles = cycles;
    };
    if (arch == Arch::gfx90a) {
        add("16x16x16f16", mfma<16, 16, El::f16, El::f16>, 32), add("32x32x8f16", mfma<32, 8, El::f16, El::f16>, 64);
        add("16x16x16bf16_1k", mfma<16, 16, El::bf16, El::bf16>, 32),
            add("32x32x8bf16_1k", mfma<32, 8, El::bf16, El::bf16>, 64);
        add("16x16x4f32", mfma<16, 4, El::f32, El::f32>, 32), add("32x32x2f32", mfma<32, 2, El::f32, El::f32>, 64);
        return;
    }
    const bool g950 = arch == Arch::gfx950;
    add("16x16x16_f16", mfma<16, 16, El::f16, El::f16>, 16), add("32x32x8_f16", mfma<32, 8, El::f16, El::f16>, 32);
    add("16x16x16_bf16", mfma<16, 16, El::bf16, El::bf16>, 16),
        add("32x32x8_bf16", mfma<32, 8, El::bf16, El::bf16>, 32);
    add("16x16x4_f32", mfma<16, 4, El::f32, El::f32>, 32), add("32x32x2_f32", mfma<32, 2, El::f32, El::f32>, 64);
    add("16x16x32_fp8_fp8", mfma<16, 32, El::fp8, El::fp8>, 16),
        add("16x16x32_bf8_bf8", mfma<16, 32, El::bf8, El::bf8>, 16);
    add("16x16x32_fp8_bf8", mfma<16, 32, El::fp8, El::bf8>, 16),
        add("16x16x32_bf8_fp8", mfma<16, 32, El::bf8, El::fp8>, 16);
    add("32x32x16_fp8_fp8", mfma<32, 16, El::fp8, El::fp8>, 32),
        add("32x32x16_bf8_bf8", mfma<32, 16, El::bf8, El::bf8>, 32);
    add("32x32x16_fp8_bf8", mfma<32, 16, El::fp8, El::bf8>, 32),
        add("32x32x16_bf8_fp8", mfma<32, 16, El::bf8, El::fp8>, 32);
    if (!g950) return;
    add("16x16x32_f16", mfma<16, 32, El::f16, El::f16>, 16), add("32x32x16_f16", mfma<32, 16, El::f16, El::f16>, 32);
    add("16x16x32_bf16", mfma<16, 32, El::bf16, El::bf16>, 16),
        add("32x32x16_bf16", mfma<32, 16, El::bf16, El::bf16>, 32);
    // Cycles for FP4/FP6 operands; the counter adds the same again when an operand is 8 bits wide.
    add("16x16x128_f8f6f4", mfma_f8f6f4<16, 128, false>, 16), add("32x32x64_f8f6f4", mfma_f8f6f4<32, 64, false>, 32);
    t.add("v_mfma_scale_f32_16x16x128_f8f6f4", mfma_f8f6f4<16, 128, true>, Unit::mfma, Ty::f32).cycles = 16;
    t.add("v_mfma_scale_f32_32x32x64_f8f6f4", mfma_f8f6f4<32, 64, true>, Unit::mfma, Ty::f32).cycles = 32;
}

}  // namespace petit_emu
