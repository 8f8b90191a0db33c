// Bit casts and the small float formats. Conversions to f16 go through F16C, the others are written out.
#pragma once
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace petit_emu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i8 = std::int8_t;
using i16 = std::int16_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

inline float f32(u32 x) { return std::bit_cast<float>(x); }
inline u32 b32(float x) { return std::bit_cast<u32>(x); }
inline double f64(u64 x) { return std::bit_cast<double>(x); }
inline u64 b64(double x) { return std::bit_cast<u64>(x); }

// f16 <-> f32; the second follows the rounding mode of MXCSR, the third always rounds to nearest even.
inline float h2f(u32 x) { return _cvtsh_ss(static_cast<u16>(x)); }
inline u32 f2h(float x) { return static_cast<u16>(_cvtss_sh(x, _MM_FROUND_CUR_DIRECTION)); }
inline u32 f2h_rne(float x) { return static_cast<u16>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline u32 f2h_rtz(float x) { return static_cast<u16>(_cvtss_sh(x, _MM_FROUND_TO_ZERO)); }

inline float bf2f(u32 x) { return f32(x << 16); }
inline u32 f2bf(float x) {  // RNE, NaN stays a quiet NaN
    u32 b = b32(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return (b >> 16) | 0x40u;
    return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}

// A double rounded once to f16: to f32 with round-to-odd first, so that the second rounding is harmless.
inline u32 d2h_rne(double x) {
    float f = static_cast<float>(x);
    if (std::isfinite(f) && static_cast<double>(f) != x) {
        u32 b = b32(f);
        bool away = std::fabs(static_cast<double>(f)) > std::fabs(x);
        if (away) b -= 1;
        f = f32(b | 1u);
    }
    return f2h_rne(f);
}

// A small float described by its field widths. `fnuz`: bias one higher, one NaN (0x80), no negative zero.
struct MiniFormat {
    int exp_bits, man_bits, bias;
    bool fnuz, has_inf, has_nan;
    constexpr int bits() const { return 1 + exp_bits + man_bits; }
};
inline constexpr MiniFormat kE4M3{4, 3, 7, false, false, true}, kE5M2{5, 2, 15, false, true, true};
inline constexpr MiniFormat kE4M3Fnuz{4, 3, 8, true, false, true}, kE5M2Fnuz{5, 2, 16, true, false, true};
inline constexpr MiniFormat kE2M3{2, 3, 1, false, false, false}, kE3M2{3, 2, 3, false, false, false};
inline constexpr MiniFormat kE2M1{2, 1, 1, false, false, false};

inline double mini_decode(u32 code, const MiniFormat& f) {
    const u32 sign = (code >> (f.exp_bits + f.man_bits)) & 1u;
    const u32 e = (code >> f.man_bits) & ((1u << f.exp_bits) - 1u), m = code & ((1u << f.man_bits) - 1u);
    const u32 emax = (1u << f.exp_bits) - 1u;
    if (f.fnuz && sign && e == 0 && m == 0) return std::nan("");
    if (f.has_inf && e == emax) return m ? std::nan("") : (sign ? -INFINITY : INFINITY);
    if (!f.fnuz && !f.has_inf && f.has_nan && e == emax && m == (1u << f.man_bits) - 1u) return std::nan("");
    const double mag = e ? std::ldexp(1.0 + std::ldexp(m, -f.man_bits), int(e) - f.bias)
                         : std::ldexp(double(m), 1 - f.bias - f.man_bits);
    return sign ? -mag : mag;
}

// RNE with saturation to the largest finite value (formats with NaN keep NaN; without, NaN saturates positive).
// `saturate` false: overflow gives Inf, or NaN where there is no Inf.
inline u32 mini_encode(double x, const MiniFormat& f, bool saturate) {
    const u32 sign_bit = 1u << (f.exp_bits + f.man_bits);
    const u32 man_mask = (1u << f.man_bits) - 1u, emax = (1u << f.exp_bits) - 1u;
    const u32 nan = f.fnuz      ? sign_bit
                    : f.has_inf ? (emax << f.man_bits) | (1u << (f.man_bits - 1)) | (man_mask & 1u)
                                : (emax << f.man_bits) | man_mask;
    const u32 largest = f.has_inf                ? ((emax - 1u) << f.man_bits) | man_mask
                        : (!f.fnuz && f.has_nan) ? ((emax << f.man_bits) | man_mask) - 1u
                                                 : (emax << f.man_bits) | man_mask;
    const u32 overflow = f.has_inf ? emax << f.man_bits : nan;
    if (std::isnan(x)) return f.has_nan ? nan : largest;
    const u32 sign = std::signbit(x) ? sign_bit : 0u;
    const double mag = std::fabs(x);
    if (mag == 0) return f.fnuz ? 0u : sign;
    if (std::isinf(x)) return sign | (saturate ? largest : overflow);
    int e = std::ilogb(mag);
    if (e < 1 - f.bias) e = 1 - f.bias;
    const double q = std::nearbyint(std::ldexp(mag, f.man_bits - e));  // caller runs in RNE
    u64 n = static_cast<u64>(q);
    if (n >> (f.man_bits + 1)) n >>= 1, ++e;
    u64 code = (n >> f.man_bits) ? (u64(e + f.bias) << f.man_bits) | (n & man_mask) : n;
    if (code > largest) return sign | (saturate ? largest : overflow);
    if (code == 0 && f.fnuz) return 0u;
    return sign | static_cast<u32>(code);
}

}  // namespace petit_emu
