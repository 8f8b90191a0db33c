// Conversions between numbers of different types.
#include "valu.hpp"

namespace petit_emu {
namespace {

template <class T>
T saturate(double x) {  // truncation with saturation, NaN -> 0
    if (std::isnan(x)) return 0;
    x = std::trunc(x);
    if (x <= double(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
    if (x >= double(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
    return static_cast<T>(x);
}
float round_half_up(float x) { return static_cast<float>(std::floor(double(x) + 0.5)); }
u32 pkrtz(u32 a, u32 b) { return f2h_rtz(f32(a)) | f2h_rtz(f32(b)) << 16; }
u32 snorm(float x) {
    return u32(i32(std::nearbyint(std::fmin(std::fmax(std::isnan(x) ? 0.0f : x, -1.0f), 1.0f) * 32767.0f))) & 0xffffu;
}
u32 unorm(float x) {
    return u32(std::nearbyint(std::fmin(std::fmax(std::isnan(x) ? 0.0f : x, 0.0f), 1.0f) * 65535.0f)) & 0xffffu;
}

// gfx942: FNUZ, gfx950: OCP. `M` is the format.
template <const MiniFormat& M>
void cvt_f32_mini(Wave& w, const Inst& in) {  // one byte; SDWA picks which
    vop1<[](u32 a) -> u32 { return b32(static_cast<float>(mini_decode(a & 0xffu, M))); }>(w, in);
}
template <const MiniFormat& M>
void cvt_pk_f32_mini(Wave& w, const Inst& in) {  // two bytes of a word -> two f32
    const u64 lanes = w.exec();
    Row t;
    // The word is picked by SDWA (already shifted down) or by op_sel[0].
    const u32* a = w.src(in, 1, t, lanes);
    const int shift = (in.op_sel & 1) && !in.sdwa.on ? 16 : 0;
    const unsigned d = in.ops[0].reg;
    Row r[2];
    for (int l = 0; l < kLanes; ++l)
        for (int h = 0; h < 2; ++h)
            r[h].l[l] = b32(static_cast<float>(mini_decode(a[l] >> (shift + 8 * h) & 0xffu, M)));
    for (int h = 0; h < 2; ++h) {
        w.may_write(d + h);
        blend(w.v[d + h].l, r[h].l, lanes);
        w.mark(d + h, lanes);
    }
}
template <const MiniFormat& M>
void cvt_pk_mini_f32(
    Wave& w, const Inst& in) {  // two f32 -> two bytes in the half that op_sel[2] or [3] names; the other half stays
    const u64 lanes = w.exec();
    Row t0, t1, out;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes);
    const bool high = in.op_sel >> 2;
    const u32* old = w.v[in.ops[0].reg].l;
    for (int l = 0; l < kLanes; ++l) {
        const u32 x = mini_encode(f32(a[l]), M, in.clamp) | mini_encode(f32(b[l]), M, in.clamp) << 8;
        out.l[l] = high ? (old[l] & 0xffffu) | x << 16 : (old[l] & 0xffff0000u) | x;
    }
    store_row(w, in, out, lanes);
}

u32 cvt_f16_u16(u32 a) { return f2h(float(a & 0xffffu)); }
u32 cvt_f16_i16(u32 a) { return f2h(float(i16(a))); }

}  // namespace

void add_vop_convert(OpTable& t, Arch arch) {
    const auto cv = [&](const char* name, Handler fn, Ty from, Ty to) -> OpDef& {
        return t.convert(name, fn, from, to);
    };
#define C1(name, from, to, expr) cv(name, vop1<[](u32 a) -> u32 { return (expr); }>, from, to)
    C1("v_cvt_f32_i32", Ty::b32, Ty::f32, b32(float(i32(a))));
    C1("v_cvt_f32_u32", Ty::b32, Ty::f32, b32(float(a)));
    C1("v_cvt_i32_f32", Ty::f32, Ty::b32, u32(saturate<i32>(f32(a))));
    C1("v_cvt_u32_f32", Ty::f32, Ty::b32, saturate<u32>(f32(a)));
    C1("v_cvt_rpi_i32_f32", Ty::f32, Ty::b32, u32(saturate<i32>(round_half_up(f32(a)))));
    C1("v_cvt_flr_i32_f32", Ty::f32, Ty::b32, u32(saturate<i32>(std::floor(f32(a)))));
    C1("v_cvt_f16_f32", Ty::f32, Ty::f16, f2h(f32(a)));
    C1("v_cvt_f32_f16", Ty::f16, Ty::f32, b32(h2f(a)));
    C1("v_cvt_f16_u16", Ty::i16, Ty::f16, cvt_f16_u16(a));
    C1("v_cvt_f16_i16", Ty::i16, Ty::f16, cvt_f16_i16(a));
    C1("v_cvt_u16_f16", Ty::f16, Ty::i16, u32(saturate<u16>(h2f(a))));
    C1("v_cvt_i16_f16", Ty::f16, Ty::i16, u32(u16(saturate<i16>(h2f(a)))));
    C1("v_cvt_f32_ubyte0", Ty::b32, Ty::f32, b32(float(a & 0xffu)));
    C1("v_cvt_f32_ubyte1", Ty::b32, Ty::f32, b32(float(a >> 8 & 0xffu)));
    C1("v_cvt_f32_ubyte2", Ty::b32, Ty::f32, b32(float(a >> 16 & 0xffu)));
    C1("v_cvt_f32_ubyte3", Ty::b32, Ty::f32, b32(float(a >> 24)));
    C1("v_cvt_off_f32_i4", Ty::b32, Ty::f32, b32(float(i32((a & 15u) ^ 8u) - 8) / 16.0f));
    C1("v_cvt_f32_bf16", Ty::i16, Ty::f32, a << 16);
    t.convert("v_cvt_f64_f32", vopw<[](u64 a) { return b64(f32(u32(a))); }, 1, 0, true>, Ty::f32, Ty::f64);
    t.convert("v_cvt_f64_i32", vopw<[](u64 a) { return b64(double(i32(u32(a)))); }, 1, 0, true>, Ty::b32, Ty::f64);
    t.convert("v_cvt_f64_u32", vopw<[](u64 a) { return b64(double(u32(a))); }, 1, 0, true>, Ty::b32, Ty::f64);
    t.convert("v_cvt_f32_f64", vopw<[](u64 a) { return u64(b32(static_cast<float>(f64(a)))); }, 1, 1, false>, Ty::f64,
              Ty::f32);
    t.convert("v_cvt_i32_f64", vopw<[](u64 a) { return u64(u32(saturate<i32>(f64(a)))); }, 1, 1, false>, Ty::f64,
              Ty::b32);
    t.convert("v_cvt_u32_f64", vopw<[](u64 a) { return u64(saturate<u32>(f64(a))); }, 1, 1, false>, Ty::f64, Ty::b32);
    for (const char* n : {"v_cvt_pkrtz_f16_f32", "v_cvt_pk_rtz_f16_f32"}) cv(n, vop2<pkrtz>, Ty::f32, Ty::b32);
#define C2(name, from, to, expr) cv(name, vop2<[](u32 a, u32 b) -> u32 { return (expr); }>, from, to)
    C2("v_cvt_pk_f16_f32", Ty::f32, Ty::b32, f2h(f32(a)) | f2h(f32(b)) << 16);
    C2("v_cvt_pk_bf16_f32", Ty::f32, Ty::b32, f2bf(f32(a)) | f2bf(f32(b)) << 16);
    C2("v_cvt_pk_u16_u32", Ty::b32, Ty::b32, std::min(a, 0xffffu) | std::min(b, 0xffffu) << 16);
    C2("v_cvt_pk_i16_i32", Ty::b32, Ty::b32,
       (u32(std::min(std::max(i32(a), -32768), 32767)) & 0xffffu) | u32(std::min(std::max(i32(b), -32768), 32767))
                                                                        << 16);
    C2("v_cvt_pknorm_i16_f32", Ty::f32, Ty::b32, snorm(f32(a)) | snorm(f32(b)) << 16);
    C2("v_cvt_pknorm_u16_f32", Ty::f32, Ty::b32, unorm(f32(a)) | unorm(f32(b)) << 16);
    t.convert("v_cvt_pk_u8_f32", vop3<[](u32 a, u32 b, u32 c) -> u32 {
                  const u32 s = 8 * (b & 3);
                  return (c & ~(0xffu << s)) | u32(saturate<u8>(f32(a))) << s;
              }>,
              Ty::f32, Ty::b32);
    if (arch == Arch::gfx942) {
        cv("v_cvt_f32_fp8", cvt_f32_mini<kE4M3Fnuz>, Ty::b32, Ty::f32),
            cv("v_cvt_f32_bf8", cvt_f32_mini<kE5M2Fnuz>, Ty::b32, Ty::f32);
        cv("v_cvt_pk_f32_fp8", cvt_pk_f32_mini<kE4M3Fnuz>, Ty::b32, Ty::f32),
            cv("v_cvt_pk_f32_bf8", cvt_pk_f32_mini<kE5M2Fnuz>, Ty::b32, Ty::f32);
        cv("v_cvt_pk_fp8_f32", cvt_pk_mini_f32<kE4M3Fnuz>, Ty::f32, Ty::b32),
            cv("v_cvt_pk_bf8_f32", cvt_pk_mini_f32<kE5M2Fnuz>, Ty::f32, Ty::b32);
    } else if (arch == Arch::gfx950) {
        cv("v_cvt_f32_fp8", cvt_f32_mini<kE4M3>, Ty::b32, Ty::f32),
            cv("v_cvt_f32_bf8", cvt_f32_mini<kE5M2>, Ty::b32, Ty::f32);
        cv("v_cvt_pk_f32_fp8", cvt_pk_f32_mini<kE4M3>, Ty::b32, Ty::f32),
            cv("v_cvt_pk_f32_bf8", cvt_pk_f32_mini<kE5M2>, Ty::b32, Ty::f32);
        cv("v_cvt_pk_fp8_f32", cvt_pk_mini_f32<kE4M3>, Ty::f32, Ty::b32),
            cv("v_cvt_pk_bf8_f32", cvt_pk_mini_f32<kE5M2>, Ty::f32, Ty::b32);
    }
}

}  // namespace petit_emu
