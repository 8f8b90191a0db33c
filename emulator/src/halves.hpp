// f16 lanes as float lanes, eight at a time.
#pragma once
#include "wave.hpp"

namespace petit_emu {

struct alignas(64) FRow {
    float l[kLanes];
};

// out = float(half in bits [shift, shift+16) of each lane)
inline void halves_to_float(const u32* x, int shift, FRow& out) {
    for (int l = 0; l < kLanes; l += 8) {
        __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + l));
        v = _mm256_and_si256(_mm256_srl_epi32(v, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(0xffff));
        const __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        _mm256_storeu_ps(out.l + l, _mm256_cvtph_ps(h));
    }
}
// f16(in) in the low 16 bits of each lane, rounded as MXCSR says.
inline void float_to_halves(const FRow& in, u32* out) {
    for (int l = 0; l < kLanes; l += 8) {
        const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(in.l + l), _MM_FROUND_CUR_DIRECTION);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + l), _mm256_cvtepu16_epi32(h));
    }
}

// a*b + c rounded once to f16: the float result is rounded to odd, so rounding it to f16 afterwards is the correct
// rounding.
inline float fma_for_half(float a, float b, float c) {
    const double exact = static_cast<double>(a) * b + c;
    const float f = static_cast<float>(exact);
    const double back = f;
    u32 bits = b32(f);
    if (back != exact && exact == exact) {
        bits -= std::fabs(back) > std::fabs(exact);
        bits |= 1u;
    }
    return f32(bits);
}

}  // namespace petit_emu
