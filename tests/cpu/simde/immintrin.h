// Stands in for the compiler's <immintrin.h> in the test build of the AVX-512 kernels: the same sources, every vector
// instruction computed by SIMDe in portable code, on any CPU.
#pragma once

// clang's SSE2 header already has types of these names, unlike SIMDe's.
#include <emmintrin.h>
#define __m128bh petit_m128bh
#define __m256bh petit_m256bh
#define __m512bh petit_m512bh

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

// SIMDe's vdpbf16ps keeps subnormals and honours the rounding mode. The instruction does neither: inputs and results
// that are subnormal count as zero, and of each pair the odd element is added first, each step rounded to nearest even.
static inline float petit_flush(float value) {
    const bool subnormal = value > -0x1p-126f && value < 0x1p-126f;
    return subnormal ? value * 0.0f : value;
}

static inline simde__m512 petit_dpbf16(simde__m512 sum, simde__m512bh a, simde__m512bh b) {
    float out[16];
    uint32_t x[16], y[16];
    simde_memcpy(out, &sum, sizeof(out));
    simde_memcpy(x, &a, sizeof(x));
    simde_memcpy(y, &b, sizeof(y));
    for (int i = 0; i < 16; ++i) {
        out[i] = petit_flush(out[i]);
        for (const uint32_t mask : {0xffff0000u, 0x0000ffffu}) {
            const int up = mask == 0xffffu ? 16 : 0;
            const float p = petit_flush(simde_uint32_as_float32((x[i] & mask) << up));
            const float q = petit_flush(simde_uint32_as_float32((y[i] & mask) << up));
            out[i] = petit_flush(simde_math_fmaf(p, q, out[i]));
        }
    }
    simde_memcpy(&sum, out, sizeof(out));
    return sum;
}

#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, a, b) petit_dpbf16(sum, a, b)

#ifndef _mm512_cvtepu8_epi32  // not in every release of SIMDe
static inline simde__m512i petit_cvtepu8_epi32(simde__m128i bytes) {
    uint8_t in[16];
    uint32_t out[16];
    simde_memcpy(in, &bytes, sizeof(in));
    for (int i = 0; i < 16; ++i) out[i] = in[i];
    simde__m512i wide;
    simde_memcpy(&wide, out, sizeof(wide));
    return wide;
}
#define _mm512_cvtepu8_epi32(bytes) petit_cvtepu8_epi32(bytes)
#endif

#ifndef _mm512_cvtps_pd
static inline simde__m512d petit_cvtps_pd(simde__m256 values) {
    float in[8];
    double out[8];
    simde_memcpy(in, &values, sizeof(in));
    for (int i = 0; i < 8; ++i) out[i] = in[i];
    simde__m512d wide;
    simde_memcpy(&wide, out, sizeof(wide));
    return wide;
}
#define _mm512_cvtps_pd(values) petit_cvtps_pd(values)
#endif
