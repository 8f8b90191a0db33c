// Activations as the SIMD kernels read them: one pass over x per call, instead of a conversion in every inner loop.
//
// A problem's rows are cut into blocks of nearly equal size (never more than a kernel's register tile holds) and a
// block of R rows is stored as X[k / step][R][step], X being float or bfloat16 bits: what the kernel broadcasts for one
// k-step of all its rows is contiguous, whatever R is, and a run of k is contiguous too.
//
// The exponents of all finite, non-zero elements of a row have to lie in a window that depends on the format: inside it
// no product with any weight is subnormal and no sum overflows, so float32 loses nothing but its roundings, and an
// instruction that flushes subnormals (vdpbf16ps) has nothing to flush. A row outside is stored times a power of two
// that brings it inside, and the epilogue multiplies back; a row too wide for the window (kTooWide) is left to the
// portable kernel. It cannot be cut off at either end: the largest elements may all meet zero weights. A row's own
// content decides, so no row ever depends on another.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "gemm.hpp"
#include "numbers.hpp"

namespace petit::cpu {
namespace {

// Exponents of x. A product's least factors are 2^-1 (the code) and 2^-15 or 2^-60 (the scale), the largest 6 and 2^16
// or 2^60; 2^20 of those may be added up. Ten more bits below: products of a bfloat16 x are multiples of a number that
// is normal, so that vdpbf16ps flushes none of their sums either.
struct Window {
    int least, most;
};
constexpr Window kWindow[] = {{-126 + 16 + 10, 80}, {-126 + 61 + 10, 40}};  // by Format

constexpr int kTooWide = 1 << 20;  // in place of a shift

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

// The float32 bits of a row's smallest and largest magnitude among the finite ones but zero; largest is 0 without any.
struct Extent {
    uint32_t smallest, largest;
};

// Of a positive float32, by its bits.
inline int exponent_of(uint32_t bits) {
    int exponent = static_cast<int>(bits >> 23) - 127;
    if (exponent == -127) {  // subnormal: count the leading zeros of the fraction
        for (uint32_t bit = 0x400000u; (bits & bit) == 0; bit >>= 1) --exponent;
    }
    return exponent;
}

// Power of two e such that the row is stored as x * 2^-e, or kTooWide.
inline int row_shift(Extent extent, Format format) {
    if (extent.largest == 0) return 0;
    const Window window = kWindow[static_cast<int>(format)];
    const int most = exponent_of(extent.largest), least = exponent_of(extent.smallest);
    if (most - least > window.most - window.least) return kTooWide;
    if (most > window.most) return most - window.most;
    return least < window.least ? least - window.least : 0;
}

// Eight elements of a row from i on, as float32 bits. k is a multiple of 16.
inline __m256i load_eight(const void* row, int64_t i, DType dtype) {
    if (dtype == DType::f32)
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const float*>(row) + i));
    const uint16_t* half = static_cast<const uint16_t*>(row) + i;
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(half));
    if (dtype == DType::f16) return _mm256_castps_si256(_mm256_cvtph_ps(bits));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}

// The row as float32.
template <DType Type>
inline Extent load_row(const void* row, int64_t k, float* out) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), infinity = _mm256_set1_epi32(0x7f800000);
    const __m256i one = _mm256_set1_epi32(1);
    __m256i largest = _mm256_setzero_si256(), below_smallest = _mm256_set1_epi32(-1);  // unsigned: zero wraps around
    for (int64_t i = 0; i < k; i += 8) {
        const __m256i bits = load_eight(row, i, Type);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bits);
        const __m256i absolute = _mm256_and_si256(bits, magnitude);
        const __m256i finite = _mm256_and_si256(absolute, _mm256_cmpgt_epi32(infinity, absolute));
        largest = _mm256_max_epu32(largest, finite);
        below_smallest = _mm256_min_epu32(below_smallest, _mm256_sub_epi32(finite, one));
    }
    alignas(32) uint32_t high[8], low[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(high), largest);
    _mm256_store_si256(reinterpret_cast<__m256i*>(low), below_smallest);
    for (int i = 1; i < 8; ++i) {
        high[0] = high[i] > high[0] ? high[i] : high[0];
        low[0] = low[i] < low[0] ? low[i] : low[0];
    }
    return {low[0] + 1, high[0]};
}

// One row into its place in a block of R rows (`out` points at its first element there); returns the exponent, or
// kTooWide. `work` holds k floats.
template <int Step>
int store_row(const void* row, int64_t k, DType dtype, Format format, int64_t R, float* out, float* work) {
    float* const line = R == 1 ? out : work;
    const Extent extent = dtype == DType::bf16  ? load_row<DType::bf16>(row, k, line)
                          : dtype == DType::f16 ? load_row<DType::f16>(row, k, line)
                                                : load_row<DType::f32>(row, k, line);
    const int shift = row_shift(extent, format);
    if (shift != 0 && shift != kTooWide) {
        const double factor = power_of_two(-shift);
        for (int64_t i = 0; i < k; ++i) line[i] = static_cast<float>(line[i] * factor);
    }
    if (R == 1) return shift;
    for (int64_t i = 0; i < k / Step; ++i) std::memcpy(out + i * R * Step, line + i * Step, Step * sizeof(float));
    return shift;
}

// The same for a kernel that multiplies bfloat16 pairs: bits are copied unless the row has to be shifted.
template <int Step>
int store_row(const void* row, int64_t k, DType, Format format, int64_t R, uint16_t* out, float* work) {
    const uint16_t* x = static_cast<const uint16_t*>(row);
    const int shift = row_shift(load_row<DType::bf16>(row, k, work), format);
    if (shift == 0 || shift == kTooWide) {
        for (int64_t i = 0; i < k / Step; ++i) std::memcpy(out + i * R * Step, x + i * Step, Step * sizeof(uint16_t));
        return shift;
    }
    // Exact: inside the window a bfloat16 only changes its exponent.
    const double factor = power_of_two(-shift);
    for (int64_t i = 0; i < k; ++i) {
        const float value = static_cast<float>(work[i] * factor);
        out[i / Step * R * Step + i % Step] = static_cast<uint16_t>(bits_as<uint32_t>(value) >> 16);
    }
    return shift;
}

}  // namespace
}  // namespace petit::cpu
