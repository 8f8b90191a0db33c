// Activations as the SIMD kernels read them: one pass over x per call, instead of a conversion in every inner loop.
//
// A problem's rows are cut into blocks of nearly equal size (never more than a kernel's register tile holds) and a
// block of R rows is stored as X[k / step][R][step], X being float or bfloat16 bits: what the kernel broadcasts for one
// k-step of all its rows is contiguous, whatever R is, and a run of k is contiguous too.
//
// A row whose largest finite magnitude lies outside [2^-40, 2^40) is stored times a power of two that brings it into
// [1, 2); the epilogue multiplies back. Inside the window neither a product of the kernels nor their sums can overflow
// or become subnormal by an intermediate scale, and an instruction that flushes subnormals (vdpbf16ps) has nothing to
// flush that float32 arithmetic would have kept. A row's own content decides, so no row ever depends on another.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "gemm.hpp"
#include "numbers.hpp"

namespace petit::cpu {
namespace {

constexpr int kWindow = 40;

struct RowBlocks {
    int64_t rows, count;

    RowBlocks(int64_t rows_, int64_t most) : rows(rows_), count((rows_ + most - 1) / most) {}
    int64_t first(int64_t block) const {
        const int64_t extra = rows % count;
        return block * (rows / count) + (block < extra ? block : extra);
    }
    int64_t size(int64_t block) const { return rows / count + (block < rows % count ? 1 : 0); }
    int64_t holding(int64_t row) const {
        const int64_t size = rows / count, extra = rows % count, wide = extra * (size + 1);
        return row < wide ? row / (size + 1) : extra + (row - wide) / size;
    }
};

// Power of two e such that the row is stored as x * 2^-e; `largest` holds the float32 bits of its largest finite |x|.
inline int row_shift(uint32_t largest) {
    if (largest == 0) return 0;
    int exponent = static_cast<int>(largest >> 23) - 127;
    if (exponent >= -kWindow && exponent < kWindow) return 0;
    if (exponent == -127) {  // subnormal: count the leading zeros of the fraction
        for (uint32_t bit = 0x400000u; (largest & bit) == 0; bit >>= 1) --exponent;
    }
    return exponent;
}

inline uint32_t finite_magnitude(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffffu;
    return magnitude < 0x7f800000u ? magnitude : 0u;
}

inline void load_float_row(const void* row, int64_t k, DType dtype, float* out) {
    const uint16_t* half = static_cast<const uint16_t*>(row);
    switch (dtype) {
        case DType::bf16:
            for (int64_t i = 0; i < k; ++i) out[i] = bf16_to_float(half[i]);
            return;
        case DType::f16:
            for (int64_t i = 0; i < k; i += 8) {
                _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i))));
            }
            return;
        case DType::f32:
            break;
    }
    std::memcpy(out, row, static_cast<size_t>(k) * sizeof(float));
}

// One row into its place in a block of R rows (`out` points at its first element there); returns the exponent.
// `work` holds k floats.
template <int Step>
int store_row(const void* row, int64_t k, DType dtype, int64_t R, float* out, float* work) {
    float* line = R == 1 ? out : work;
    load_float_row(row, k, dtype, line);
    int shift = 0;
    if (dtype != DType::f16) {  // every float16 lies inside the window
        uint32_t largest = 0;
        for (int64_t i = 0; i < k; ++i) {
            const uint32_t magnitude = finite_magnitude(bits_as<uint32_t>(line[i]));
            largest = magnitude > largest ? magnitude : largest;
        }
        shift = row_shift(largest);
        if (shift != 0) {
            const double factor = power_of_two(-shift);
            for (int64_t i = 0; i < k; ++i) line[i] = static_cast<float>(line[i] * factor);
        }
    }
    if (R == 1) return shift;
    for (int64_t i = 0; i < k / Step; ++i) std::memcpy(out + i * R * Step, line + i * Step, Step * sizeof(float));
    return shift;
}

// The same for a kernel that multiplies bfloat16 pairs: bits are copied unless the row has to be shifted.
template <int Step>
int store_row(const void* row, int64_t k, DType, int64_t R, uint16_t* out, float*) {
    const uint16_t* x = static_cast<const uint16_t*>(row);
    uint32_t largest = 0;
    for (int64_t i = 0; i < k; ++i) {
        const uint32_t magnitude = finite_magnitude(static_cast<uint32_t>(x[i]) << 16);
        largest = magnitude > largest ? magnitude : largest;
    }
    const int shift = row_shift(largest);
    if (shift == 0) {
        for (int64_t i = 0; i < k / Step; ++i) std::memcpy(out + i * R * Step, x + i * Step, Step * sizeof(uint16_t));
        return 0;
    }
    // Exact for every element that is not 2^-126 times the row's largest, since a bfloat16 only changes its exponent.
    const double factor = power_of_two(-shift);
    for (int64_t i = 0; i < k; ++i) {
        const float value = static_cast<float>(bf16_to_float(x[i]) * factor);
        out[i / Step * R * Step + i % Step] = static_cast<uint16_t>(bits_as<uint32_t>(value) >> 16);
    }
    return shift;
}

}  // namespace
}  // namespace petit::cpu
