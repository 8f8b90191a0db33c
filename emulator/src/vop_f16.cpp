// f16 vector instructions: computed in float, rounded once.
#include "float_rules.hpp"
#include "halves.hpp"
#include "valu.hpp"

namespace petit_emu {
namespace {

template <auto F, int N, bool Accumulate = false>
void half_op(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Row t, out;
    FRow s[3];
    for (int k = 0; k < N; ++k) halves_to_float(w.src(in, k + 1, t, lanes), 0, s[k]);
    if constexpr (Accumulate) {
        w.need(in.ops[0].reg, lanes);
        halves_to_float(w.v[in.ops[0].reg].l, 0, s[N]);
    }
    FRow r;
    PETIT_EMU_LANES {
        if constexpr (N + Accumulate == 1)
            r.l[l] = F(s[0].l[l]);
        else if constexpr (N + Accumulate == 2)
            r.l[l] = F(s[0].l[l], s[1].l[l]);
        else
            r.l[l] = F(s[0].l[l], s[1].l[l], s[2].l[l]);
    }
    float_to_halves(r, out.l);
    if (in.post)
        finish_valu(w, in, out, lanes);
    else
        store_row(w, in, out, lanes);
}

float med3(float a, float b, float c) {
    if (a != a || b != b || c != c) return min_ieee(min_ieee(a, b), c);
    return std::max(std::min(a, b), std::min(std::max(a, b), c));
}
float fract(float a) {
    const float r = a - std::floor(a);
    return r >= 1.0f ? 0x1.ffcp-1f : r;
}
float div_fixup(float s0, float s1, float s2) {
    const bool negative = std::signbit(s1) != std::signbit(s2);
    const auto sign = [&](float x) { return negative ? -x : x; };
    if (s2 != s2) return s2;
    if (s1 != s1) return s1;
    if ((s1 == 0 && s2 == 0) || (std::isinf(s1) && std::isinf(s2))) return -std::numeric_limits<float>::quiet_NaN();
    if (s1 == 0 || std::isinf(s2)) return sign(INFINITY);
    if (std::isinf(s1) || s2 == 0) return sign(0.0f);
    return sign(std::fabs(s0));
}
u32 frexp_exp(u32 a) {
    const float x = h2f(a);
    if (!std::isfinite(x) || x == 0) return 0;
    int e;
    std::frexp(x, &e);
    return u32(e) & 0xffffu;
}
float frexp_mant(float x) {
    if (!std::isfinite(x)) return x;
    int e;
    return std::frexp(x, &e);
}

}  // namespace

void add_vop_f16(OpTable& t) {
    const auto add = [&](const char* name, Handler fn, Dst dst = Dst::full) -> OpDef& {
        return t.add(name, fn, Unit::valu, Ty::f16, dst);
    };
#define G1(name, expr) add(name, half_op<[](float a) -> float { return (expr); }, 1>)
#define G2(name, expr) add(name, half_op<[](float a, float b) -> float { return (expr); }, 2>)
#define G3(name, dst, expr) add(name, half_op<[](float a, float b, float c) -> float { return (expr); }, 3>, dst)
    G2("v_add_f16", a + b);
    G2("v_sub_f16", a - b);
    G2("v_subrev_f16", b - a);
    G2("v_mul_f16", a * b);
    G2("v_min_f16", min_ieee(a, b));
    G2("v_max_f16", max_ieee(a, b));
    G3("v_fma_f16", Dst::keep_high, fma_for_half(a, b, c));
    G3("v_fma_legacy_f16", Dst::full, fma_for_half(a, b, c));
    G3("v_mad_f16", Dst::keep_high, h2f(f2h(a * b)) + c);
    G3("v_mad_legacy_f16", Dst::full, h2f(f2h(a * b)) + c);
    G3("v_min3_f16", Dst::keep_high, min_ieee(min_ieee(a, b), c));
    G3("v_max3_f16", Dst::keep_high, max_ieee(max_ieee(a, b), c));
    G3("v_med3_f16", Dst::keep_high, med3(a, b, c));
    G3("v_div_fixup_f16", Dst::keep_high, div_fixup(a, b, c));
    G3("v_div_fixup_legacy_f16", Dst::full, div_fixup(a, b, c));
    add("v_fmac_f16", half_op<[](float a, float b, float c) -> float { return fma_for_half(a, b, c); }, 2, true>);
    add("v_mac_f16", half_op<[](float a, float b, float c) -> float { return h2f(f2h(a * b)) + c; }, 2, true>);
    G1("v_trunc_f16", std::trunc(a));
    G1("v_ceil_f16", std::ceil(a));
    G1("v_floor_f16", std::floor(a));
    G1("v_rndne_f16", std::nearbyint(a));
    G1("v_fract_f16", fract(a));
    G1("v_rcp_f16", 1.0f / a);
    G1("v_sqrt_f16", std::sqrt(a));
    G1("v_rsq_f16", 1.0f / std::sqrt(a));
    G1("v_exp_f16", std::exp2(a));
    G1("v_log_f16", std::log2(a));
    G1("v_frexp_mant_f16", frexp_mant(a));
    G1("v_sin_f16", static_cast<float>(std::sin(6.283185307179586 * a)));
    G1("v_cos_f16", static_cast<float>(std::cos(6.283185307179586 * a)));
    t.convert("v_frexp_exp_i16_f16", vop1<frexp_exp>, Ty::f16, Ty::i16);
    add("v_ldexp_f16",
        vop2<[](u32 a, u32 b) -> u32 { return f2h(std::ldexp(h2f(a), std::min(std::max(i32(i16(b)), -100), 100))); }>);
}

}  // namespace petit_emu
