// VOP3P: packed 16-bit, packed f32, mixed precision FMA, dot products.
#include <algorithm>

#include "float_rules.hpp"
#include "halves.hpp"
#include "valu.hpp"

namespace petit_emu {
namespace {

// Half `high` of source k of a packed instruction, in the low 16 bits, with op_sel and neg.
void pick(const Wave& w, const Inst& in, int k, bool high, Row& out, u64 lanes, bool is_float) {
    Row t;
    const u32* p = w.dword(in.ops[k], 0, t, lanes);
    const bool from_high = (high ? in.op_sel_hi : in.op_sel) >> (k - 1) & 1;
    const bool neg = (high ? in.neg_hi : in.neg_lo) >> (k - 1) & 1;
    const u32 flip = neg && is_float ? 0x8000u : 0u;
    if (from_high) {
        PETIT_EMU_LANES out.l[l] = (p[l] >> 16) ^ flip;
    } else {
        PETIT_EMU_LANES out.l[l] = (p[l] & 0xffffu) ^ flip;
    }
}

template <auto F, int N>
void packed_half(Wave& w, const Inst& in) {  // float lane function
    const u64 lanes = w.exec();
    Row r[2], t;
    FRow s[3], y;
    for (int h = 0; h < 2; ++h) {
        for (int k = 0; k < N; ++k) {
            pick(w, in, k + 1, h, t, lanes, true);
            halves_to_float(t.l, 0, s[k]);
        }
        PETIT_EMU_LANES {
            if constexpr (N == 2)
                y.l[l] = F(s[0].l[l], s[1].l[l]);
            else
                y.l[l] = F(s[0].l[l], s[1].l[l], s[2].l[l]);
        }
        if (in.clamp)
            for (float& x : y.l) x = x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
        float_to_halves(y, r[h].l);
    }
    PETIT_EMU_LANES r[0].l[l] |= r[1].l[l] << 16;
    store_row(w, in, r[0], lanes);
}

template <auto F, auto S, int N>
void packed_int(Wave& w, const Inst& in) {  // u32 lane function of zero-extended halves; S saturates
    const u64 lanes = w.exec();
    Row s[3], r[2];
    for (int h = 0; h < 2; ++h) {
        for (int k = 0; k < N; ++k) pick(w, in, k + 1, h, s[k], lanes, false);
        PETIT_EMU_LANES {
            if constexpr (N == 2)
                r[h].l[l] = in.clamp ? S(s[0].l[l], s[1].l[l]) : F(s[0].l[l], s[1].l[l]);
            else
                r[h].l[l] = in.clamp ? S(s[0].l[l], s[1].l[l], s[2].l[l]) : F(s[0].l[l], s[1].l[l], s[2].l[l]);
        }
    }
    PETIT_EMU_LANES r[0].l[l] = (r[0].l[l] & 0xffffu) | r[1].l[l] << 16;
    store_row(w, in, r[0], lanes);
}

// v_pk_*_f32: two dwords a source.
template <auto F, int N, bool Float = true>
void packed_f32(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row r[2], t[3];
    for (int h = 0; h < 2; ++h) {
        const u32* s[3];
        for (int k = 0; k < N; ++k) {
            const bool from_high = (h ? in.op_sel_hi : in.op_sel) >> k & 1;
            const bool neg = Float && ((h ? in.neg_hi : in.neg_lo) >> k & 1);
            s[k] = w.dword(in.ops[k + 1], from_high, t[k], lanes);
            if (neg) {
                for (int l = 0; l < kLanes; ++l) t[k].l[l] = s[k][l] ^ 0x80000000u;
                s[k] = t[k].l;
            }
        }
        PETIT_EMU_LANES {
            if constexpr (N == 1)
                r[h].l[l] = F(s[0][l]);
            else if constexpr (N == 2)
                r[h].l[l] = F(s[0][l], s[1][l]);
            else
                r[h].l[l] = F(s[0][l], s[1][l], s[2][l]);
        }
        if (in.clamp)
            for (u32& x : r[h].l) x = b32(f32(x) > 0 ? (f32(x) < 1 ? f32(x) : 1.0f) : 0.0f);
    }
    const unsigned d = in.ops[0].reg;
    for (int h = 0; h < 2; ++h) {
        w.may_write(d + h);
        blend(w.v[d + h].l, r[h].l, lanes);
        w.mark(d + h, lanes);
    }
}
// Low result from source 0, high result from source 1; op_sel (not op_sel_hi) names the half of each.
void v_pk_mov_b32(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row t[2], r[2];
    u64 valid[2];
    for (int h = 0; h < 2; ++h) {
        const bool high = in.op_sel >> h & 1;
        const Operand& o = in.ops[1 + h];
        // A move: "not initialised" travels with the value.
        valid[h] = lanes;
        if (o.kind == Operand::vgpr) {
            valid[h] = w.pending[o.reg + high] ? lanes : lanes & w.ready[o.reg + high];
            std::memcpy(r[h].l, w.dword(o, high, t[h], valid[h]), sizeof r[h].l);
        } else
            std::memcpy(r[h].l, w.dword(o, high, t[h], lanes), sizeof r[h].l);
    }
    const unsigned d = in.ops[0].reg;
    for (int h = 0; h < 2; ++h) {
        w.may_write(d + h);
        blend(w.v[d + h].l, r[h].l, lanes);
        w.ready[d + h] = (w.ready[d + h] & ~lanes) | valid[h];
    }
}

// Each source is f32, or (op_sel_hi) the f16 half that op_sel names; neg_hi means abs here.
void mix_sources(const Wave& w, const Inst& in, FRow s[3], u64 lanes) {
    for (int k = 0; k < 3; ++k) {
        Row t;
        const u32* p = w.dword(in.ops[k + 1], 0, t, lanes);
        if (in.op_sel_hi >> k & 1)
            halves_to_float(p, (in.op_sel >> k & 1) ? 16 : 0, s[k]);
        else
            PETIT_EMU_LANES s[k].l[l] = f32(p[l]);
        if (in.neg_hi >> k & 1 || in.ops[k + 1].abs)
            for (float& x : s[k].l) x = std::fabs(x);
        if (in.neg_lo >> k & 1 || in.ops[k + 1].neg)
            for (float& x : s[k].l) x = -x;
    }
}
template <int Half>  // -1: f32 result; 0, 1: half of the destination
void fma_mix(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    FRow s[3], r;
    mix_sources(w, in, s, lanes);
    PETIT_EMU_LANES r.l[l] =
        Half < 0 ? std::fma(s[0].l[l], s[1].l[l], s[2].l[l]) : fma_for_half(s[0].l[l], s[1].l[l], s[2].l[l]);
    if (in.clamp)
        for (float& x : r.l) x = x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
    Row out;
    if constexpr (Half < 0)
        PETIT_EMU_LANES out.l[l] = b32(r.l[l]);
    else {
        float_to_halves(r, out.l);
        const u32* old = w.v[in.ops[0].reg].l;
        PETIT_EMU_LANES out.l[l] = Half ? (old[l] & 0xffffu) | out.l[l] << 16 : (old[l] & 0xffff0000u) | out.l[l];
    }
    store_row(w, in, out, lanes);
}

template <bool Bf, bool Accumulate>
void dot2_f32(Wave& w, const Inst& in) {  // c + a.lo*b.lo + a.hi*b.hi
    const u64 lanes = valu_lanes(w, in);
    Row t[3], out;
    const u32 *a = w.src(in, 1, t[0], lanes), *b = w.src(in, 2, t[1], lanes);
    const u32* c = Accumulate ? (w.need(in.ops[0].reg, lanes), w.v[in.ops[0].reg].l) : w.src(in, 3, t[2], lanes);
    for (int l = 0; l < kLanes; ++l) {
        float p[2];
        for (int h = 0; h < 2; ++h) {
            const bool ha = (h ? in.op_sel_hi : in.op_sel) & 1, hb = (h ? in.op_sel_hi : in.op_sel) >> 1 & 1;
            const bool na = !Accumulate && ((h ? in.neg_hi : in.neg_lo) & 1),
                       nb = !Accumulate && ((h ? in.neg_hi : in.neg_lo) >> 1 & 1);
            const u32 x = (Accumulate ? h : ha) ? a[l] >> 16 : a[l] & 0xffffu,
                      y = (Accumulate ? h : hb) ? b[l] >> 16 : b[l] & 0xffffu;
            p[h] = (Bf ? bf2f(x) : h2f(x)) * (Bf ? bf2f(y) : h2f(y)) * (na != nb ? -1.0f : 1.0f);
        }
        float z = f32(c[l]);
        if (!Accumulate && (in.neg_lo >> 2 & 1)) z = -z;
        float r = Bf && !Accumulate ? (p[0] + p[1]) + z : (z + p[0]) + p[1];
        if (in.clamp) r = r > 0 ? (r < 1 ? r : 1.0f) : 0.0f;
        out.l[l] = b32(r);
    }
    store_row(w, in, out, lanes);
}

constexpr i32 s16(u32 x) { return i32(i16(x)); }
constexpr u32 sat_i16(i32 x) { return u32(std::clamp(x, -32768, 32767)) & 0xffffu; }

}  // namespace

void add_vop_packed(OpTable& t) {
    const auto add = [&](const char* name, Handler fn, Ty ty) { t.add(name, fn, Unit::valu, ty); };
#define P2(name, expr) add(name, packed_half<[](float a, float b) -> float { return (expr); }, 2>, Ty::pkf16)
#define P3(name, expr) add(name, packed_half<[](float a, float b, float c) -> float { return (expr); }, 3>, Ty::pkf16)
    P2("v_pk_add_f16", a + b);
    P2("v_pk_mul_f16", a * b);
    P2("v_pk_min_f16", min_ieee(a, b));
    P2("v_pk_max_f16", max_ieee(a, b));
    P3("v_pk_fma_f16", fma_for_half(a, b, c));
    P3("v_pk_minimum3_f16", minimum(minimum(a, b), c));
    P3("v_pk_maximum3_f16", maximum(maximum(a, b), c));
#define I2(name, expr, sat)                                                                                         \
    add(name, packed_int<[](u32 a, u32 b) -> u32 { return (expr); }, [](u32 a, u32 b) -> u32 { return (sat); }, 2>, \
        Ty::pk16)
#define I3(name, expr, sat)                                              \
    add(name,                                                            \
        packed_int<[](u32 a, u32 b, u32 c) -> u32 { return (expr); },    \
                   [](u32 a, u32 b, u32 c) -> u32 { return (sat); }, 3>, \
        Ty::pk16)
    I2("v_pk_add_u16", a + b, std::min(a + b, 0xffffu));
    I2("v_pk_sub_u16", a - b, a > b ? a - b : 0u);
    I2("v_pk_add_i16", a + b, sat_i16(s16(a) + s16(b)));
    I2("v_pk_sub_i16", a - b, sat_i16(s16(a) - s16(b)));
    I2("v_pk_mul_lo_u16", a * b, a * b);
    I2("v_pk_lshlrev_b16", b << (a & 15), b << (a & 15));
    I2("v_pk_lshrrev_b16", b >> (a & 15), b >> (a & 15));
    I2("v_pk_ashrrev_i16", u32(s16(b) >> (a & 15)), u32(s16(b) >> (a & 15)));
    I2("v_pk_min_u16", std::min(a, b), std::min(a, b));
    I2("v_pk_max_u16", std::max(a, b), std::max(a, b));
    I2("v_pk_min_i16", u32(std::min(s16(a), s16(b))), u32(std::min(s16(a), s16(b))));
    I2("v_pk_max_i16", u32(std::max(s16(a), s16(b))), u32(std::max(s16(a), s16(b))));
    I3("v_pk_mad_u16", a * b + c, std::min(u32(a) * b + c, 0xffffu));
    I3("v_pk_mad_i16", u32(s16(a) * s16(b) + s16(c)), sat_i16(s16(a) * s16(b) + s16(c)));
    add("v_pk_fma_f32", packed_f32<[](u32 a, u32 b, u32 c) -> u32 { return b32(std::fma(f32(a), f32(b), f32(c))); }, 3>,
        Ty::pkf32);
    add("v_pk_mul_f32", packed_f32<[](u32 a, u32 b) -> u32 { return b32(f32(a) * f32(b)); }, 2>, Ty::pkf32);
    add("v_pk_add_f32", packed_f32<[](u32 a, u32 b) -> u32 { return b32(f32(a) + f32(b)); }, 2>, Ty::pkf32);
    add("v_pk_mov_b32", v_pk_mov_b32, Ty::pkf32);
    for (const char* n : {"v_fma_mix_f32", "v_mad_mix_f32"}) add(n, fma_mix<-1>, Ty::f32);
    for (const char* n : {"v_fma_mixlo_f16", "v_mad_mixlo_f16"}) add(n, fma_mix<0>, Ty::f32);
    for (const char* n : {"v_fma_mixhi_f16", "v_mad_mixhi_f16"}) add(n, fma_mix<1>, Ty::f32);
    add("v_dot2_f32_f16", dot2_f32<false, false>, Ty::pkf16), add("v_dot2c_f32_f16", dot2_f32<false, true>, Ty::pkf16);
    add("v_dot2_f32_bf16", dot2_f32<true, false>, Ty::b32), add("v_dot2c_f32_bf16", dot2_f32<true, true>, Ty::b32);
}

}  // namespace petit_emu
