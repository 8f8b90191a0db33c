// gfx950 v_cvt_scalef32_*: conversions to and from FP4/FP8/BF8 with a power-of-two scale (only the exponent of the f32
// scale counts).
#include "valu.hpp"

namespace petit_emu {
namespace {

enum class Wide16 : u8 { f32, f16, bf16 };

double scale_of(u32 bits) { return std::ldexp(1.0, int(bits >> 23 & 0xffu) - 127); }
u32 narrow(double x, Wide16 type) {
    if (type == Wide16::f16) return d2h_rne(x);
    return f2bf(
        static_cast<float>(x));  // at most 4 significant bits: the step through f32 is exact above its denormals
}

// Two values from a byte (FP4) or a word (FP8): d, src, scale; op_sel picks the byte or word.
template <const MiniFormat& M, Wide16 To>
void from_mini(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row t0, t1, r[2];
    const u32 *a = w.dword(in.ops[1], 0, t0, lanes), *s = w.src(in, 2, t1, lanes);
    constexpr int bits = M.bits();
    const int shift = bits == 4 ? 8 * (in.op_sel & 3) : 16 * (in.op_sel & 1);
    for (int l = 0; l < kLanes; ++l)
        for (int h = 0; h < 2; ++h) {
            const double x = mini_decode(a[l] >> (shift + bits * h) & ((1u << bits) - 1u), M) * scale_of(s[l]);
            r[h].l[l] = To == Wide16::f32 ? b32(static_cast<float>(x)) : narrow(x, To);
        }
    const unsigned d = in.ops[0].reg;
    if constexpr (To == Wide16::f32) {
        for (int h = 0; h < 2; ++h) {
            w.may_write(d + h);
            blend(w.v[d + h].l, r[h].l, lanes);
            w.mark(d + h, lanes);
        }
    } else {
        PETIT_EMU_LANES r[0].l[l] |= r[1].l[l] << 16;
        store_row(w, in, r[0], lanes);
    }
}

// Two values to a byte or a word of the destination, the rest of which stays. f32: d, a, b, scale; 16-bit: d, pair,
// scale.
template <const MiniFormat& M, Wide16 From>
void to_mini(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row t0, t1, t2, out;
    const u32* a = w.src(in, 1, t0, lanes);
    const u32* b = From == Wide16::f32 ? w.src(in, 2, t1, lanes) : a;
    const u32* s = w.src(in, From == Wide16::f32 ? 3 : 2, t2, lanes);
    constexpr int bits = M.bits();
    const int shift = bits == 4 ? 8 * (in.op_sel >> 2 & 3) : 16 * (in.op_sel >> 3 & 1);
    const u32 mask = ((1u << (2 * bits)) - 1u) << shift;
    const u32* old = w.v[in.ops[0].reg].l;
    for (int l = 0; l < kLanes; ++l) {
        double x[2];
        if constexpr (From == Wide16::f32)
            x[0] = f32(a[l]), x[1] = f32(b[l]);
        else if constexpr (From == Wide16::f16)
            x[0] = h2f(a[l]), x[1] = h2f(a[l] >> 16);
        else
            x[0] = bf2f(a[l] & 0xffffu), x[1] = bf2f(a[l] >> 16);
        const double inverse = 1.0 / scale_of(s[l]);
        const u32 y = mini_encode(x[0] * inverse, M, true) | mini_encode(x[1] * inverse, M, true) << bits;
        out.l[l] = (old[l] & ~mask) | (y << shift & mask);
    }
    store_row(w, in, out, lanes);
}

template <const MiniFormat& M>
void family(OpTable& t, const std::string& type) {
    const auto add = [&](const std::string& name, Handler fn) {
        t.add("v_cvt_scalef32_pk_" + name, fn, Unit::valu, Ty::f32);
    };
    add("f32_" + type, from_mini<M, Wide16::f32>), add("f16_" + type, from_mini<M, Wide16::f16>),
        add("bf16_" + type, from_mini<M, Wide16::bf16>);
    add(type + "_f32", to_mini<M, Wide16::f32>), add(type + "_f16", to_mini<M, Wide16::f16>),
        add(type + "_bf16", to_mini<M, Wide16::bf16>);
}

}  // namespace

void add_vop_scale_convert(OpTable& t) { family<kE2M1>(t, "fp4"), family<kE4M3>(t, "fp8"), family<kE5M2>(t, "bf8"); }

}  // namespace petit_emu
