// GCC vectorises the selects below only when told that nobody reads the floating-point exception flags.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include "moe_activation.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numbers.hpp"

namespace petit::cpu {
namespace {

constexpr int64_t kBlock = 64;  // values staged in float32 before they are rounded together

// exp(x) to about 1 ulp, written so that the compiler vectorises it: x = n ln 2 + r, |r| <= ln 2 / 2, and exp(r) by its
// Taylor polynomial (the next term, r^8 / 8!, is below 6e-9). Overflow gives inf, underflow 0, NaN stays NaN.
inline float fast_exp(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const float shifted = x * 1.44269504f + kRound;
    const float n = shifted - kRound;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r * r + r;
    p = p + 1.0f;
    // 2^n in two factors, because n runs from -150 to 128.
    const int32_t exponent = bits_as<int32_t>(shifted) - bits_as<int32_t>(kRound);
    const int32_t half = exponent >> 1;
    const float low = bits_as<float>((half + 127) << 23);
    const float high = bits_as<float>((exponent - half + 127) << 23);
    return p * low * high;
}

inline float over_one_plus_exp(float numerator, float x) { return numerator / (1.0f + fast_exp(-x)); }

template <ActivationKind kind>
inline float apply(float g, float alpha) {
    if constexpr (kind == ActivationKind::silu) return over_one_plus_exp(g, alpha * g);
    if constexpr (kind == ActivationKind::gelu) return 0.5f * g * std::erfc(g * -0.70710678118654752f);
    // (1 + tanh z) / 2 = sigmoid(2 z), which keeps its relative precision for negative z.
    if constexpr (kind == ActivationKind::gelu_tanh) {
        return over_one_plus_exp(g, 1.59576912160573f * (g + 0.044715f * g * g * g));
    }
    if constexpr (kind == ActivationKind::relu2) return g < 0.0f ? 0.0f : g * g;
}

template <ActivationKind kind>
void activate_as(const Activation& a, const float* sums, const float* bias, float router, int64_t size, int64_t begin,
                 int64_t end, void* out, DType out_dtype) {
    alignas(64) float gate[kBlock], up[kBlock];
    const auto load = [&](float* to, int64_t from, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[i] = router * sums[from + i];
        if (bias) {
            for (int64_t i = 0; i < count; ++i) to[i] += bias[from + i];
        }
    };
    const float alpha = a.alpha, beta = a.beta, limit = a.limit;
    const int64_t element = out_dtype == DType::f32 ? 4 : 2;
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t count = std::min(kBlock, end - at);
        load(gate, at, count);
        // Comparisons are written so that a NaN takes the branch that keeps it.
        if (a.gated) {
            load(up, size + at, count);
            for (int64_t i = 0; i < count; ++i) {
                const float g = gate[i] > limit ? limit : gate[i];
                float u = up[i] > limit ? limit : up[i];
                u = u < -limit ? -limit : u;
                gate[i] = apply<kind>(g, alpha) * (u + beta);
            }
        } else {
            for (int64_t i = 0; i < count; ++i) gate[i] = apply<kind>(gate[i], alpha);
        }
        round_row(gate, count, static_cast<char*>(out) + at * element, out_dtype);
    }
}

inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline uint16_t to_f16(float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the sum with 0.5 has float16's subnormal spacing, so the float32 addition does the rounding.
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x47800000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return static_cast<uint16_t>(half | sign);
}

}  // namespace

void activate(const Activation& activation, const float* sums, const float* bias, float router, int64_t size,
              int64_t begin, int64_t end, void* out, DType out_dtype) {
    const auto run = [&](auto function) { function(activation, sums, bias, router, size, begin, end, out, out_dtype); };
    switch (activation.kind) {
        case ActivationKind::silu:
            return run(activate_as<ActivationKind::silu>);
        case ActivationKind::gelu:
            return run(activate_as<ActivationKind::gelu>);
        case ActivationKind::gelu_tanh:
            return run(activate_as<ActivationKind::gelu_tanh>);
        case ActivationKind::relu2:
            return run(activate_as<ActivationKind::relu2>);
    }
}

void round_row(const float* values, int64_t count, void* out, DType dtype) {
    uint16_t* half = static_cast<uint16_t*>(out);
    switch (dtype) {
        case DType::bf16:
            for (int64_t i = 0; i < count; ++i) half[i] = to_bf16(values[i]);
            return;
        case DType::f16:
            for (int64_t i = 0; i < count; ++i) half[i] = to_f16(values[i]);
            return;
        case DType::f32:
            std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
            return;
    }
}

}  // namespace petit::cpu
