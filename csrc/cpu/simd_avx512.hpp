// What the two AVX-512 kernels share; gemm_avx512.cpp and gemm_avx512_bf16.cpp say how a product is formed:
//   X, kStep                  type of an activation, activations in one broadcast
//   Table<Offset>             the E2M1 values times 2^Offset, as its lookup wants them
//   operand<I>(q, table)      the I-th of 8 / kStep operands that 64 bytes of weights (16 rows x 8 k) hold, one row a
//   lane broadcast(x), dot(acc, operand, x) store_exact<F>(...)       64 bytes of weights times their block scales,
//   exact, into a tile's panel
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12's own AVX-512 headers pass deliberately undefined registers to the builtins, and gcc then warns about them.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "kernels.hpp"
#include "simd_driver.hpp"

namespace petit::cpu {
namespace {

constexpr int64_t kChunk = 1024;     // k summed before a second-level sum takes over, to bound the rounding error
constexpr int64_t kPrefetch = 4096;  // bytes ahead of the weights being read: some 100 ns at 40 GB/s a core

// NVFP4 scale bytes are used as float32 bits c << 20, which is the scale times 2^-111 (zero stays zero without a test);
// the weights' table has 2^64 of that in decode, and all of it where products with the scale are stored.
constexpr int kScaleOffset = 111;
constexpr int kDecodeOffset = 64;

template <Format F>
constexpr int kGroup = F == Format::nvfp4 ? 16 : 32;
template <Format F>
constexpr int kExactOffset = F == Format::nvfp4 ? kScaleOffset : 0;

template <Format F>
inline __m512 load_scales(const uint8_t* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bytes, F == Format::nvfp4 ? 20 : 23));
}

template <class Ops>
struct Avx512 {
    using X = typename Ops::X;
    static constexpr int kStep = Ops::kStep;
    static constexpr int kOperands = 8 / kStep;  // of 16 lanes, in 64 bytes of weights
    static constexpr int kDecodeRows = 12;       // 24 registers hold sums
    static constexpr int64_t kDecodeMost = 24;
    static constexpr int kTileRows = 14;  // times two row blocks: 28 registers hold sums
    static constexpr int kTileBlocks = 2;
    static constexpr int64_t kPanel = 256;
    static constexpr int64_t kPanelFloats = kPanel * kRowBlock / kStep;

    static int decode_residual(Format format) { return format == Format::nvfp4 ? kScaleOffset - kDecodeOffset : 0; }

    // A few rows of x give the multiply-add units too few independent sums; they get several each.
    template <int R>
    static constexpr int kChains = R == 1   ? 4
                                   : R <= 3 ? 2
                                            : 1;

    template <int R, bool First, class Table, int... I>
    static void multiply_unit(__m512i q, const Table& table, const X* x, __m512 (*part)[kChains<R>],
                              std::integer_sequence<int, I...>) {
        (multiply<R, First, I>(Ops::template operand<I>(q, table), x + I * R * kStep, part), ...);
    }

    template <int R, bool First, int I>
    static void multiply(__m512i operand, const X* x, __m512 (*part)[kChains<R>]) {
        constexpr int chain = I % kChains<R>;
        for (int r = 0; r < R; ++r) {
            const __m512 before = First && I < kChains<R> ? _mm512_setzero_ps() : part[r][chain];
            part[r][chain] = Ops::dot(before, operand, Ops::broadcast(x + r * kStep));
        }
    }

    template <Format F, int R>
    static void decode_format(const WeightView& w, int64_t block, const X* x, float (*sums)[kRowBlock]) {
        constexpr int group = kGroup<F>;
        constexpr auto operands = std::make_integer_sequence<int, kOperands>();
        const uint8_t* unit = w.weight + block * w.k * 8;
        const uint8_t* scale = w.scale + block * (w.k / group) * kRowBlock;
        const typename Ops::template Table<F == Format::nvfp4 ? kDecodeOffset : 0> table;
        __m512 total[R];
        for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
        for (int64_t k0 = 0; k0 < w.k; k0 += kChunk) {
            const int64_t k1 = k0 + kChunk < w.k ? k0 + kChunk : w.k;
            __m512 sum[R];
            for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
            for (int64_t k = k0; k < k1; k += group) {
                __m512 part[R][kChains<R>];
                _mm_prefetch(reinterpret_cast<const char*>(unit + kPrefetch), _MM_HINT_T0);
                multiply_unit<R, true>(_mm512_loadu_si512(unit), table, x, part, operands);
                for (int u = 1; u < group / 8; ++u) {
                    _mm_prefetch(reinterpret_cast<const char*>(unit + u * 64 + kPrefetch), _MM_HINT_T0);
                    multiply_unit<R, false>(_mm512_loadu_si512(unit + u * 64), table, x + u * 8 * R, part, operands);
                }
                const __m512 s = load_scales<F>(scale);
                for (int r = 0; r < R; ++r) {
                    for (int step = kChains<R> / 2; step > 0; step /= 2) {
                        for (int c = 0; c < step; ++c) part[r][c] = _mm512_add_ps(part[r][c], part[r][c + step]);
                    }
                    sum[r] = _mm512_fmadd_ps(part[r][0], s, sum[r]);
                }
                unit += group * 8;
                scale += kRowBlock;
                x += group * R;
            }
            for (int r = 0; r < R; ++r) total[r] = _mm512_add_ps(total[r], sum[r]);
        }
        for (int r = 0; r < R; ++r) _mm512_store_ps(sums[r], total[r]);
    }

    template <int R>
    static void decode(const WeightView& w, int64_t block, const X* x, float (*sums)[kRowBlock]) {
        if (w.format == Format::nvfp4) return decode_format<Format::nvfp4, R>(w, block, x, sums);
        decode_format<Format::mxfp4, R>(w, block, x, sums);
    }

    template <Format F>
    static void dequantize_format(const WeightView& w, int64_t block, int64_t k0, int64_t k1, float* out) {
        constexpr int group = kGroup<F>;
        constexpr auto operands = std::make_integer_sequence<int, kOperands>();
        const uint8_t* unit = w.weight + (block * w.k + k0) * 8;
        const uint8_t* scale = w.scale + (block * (w.k / group) + k0 / group) * kRowBlock;
        const typename Ops::ExactTable table(kExactOffset<F>);
        for (int64_t k = k0; k < k1; k += group, scale += kRowBlock) {
            const __m512 s = load_scales<F>(scale);
            for (int u = 0; u < group / 8; ++u, unit += 64, out += kOperands * kRowBlock) {
                _mm_prefetch(reinterpret_cast<const char*>(unit + kPrefetch), _MM_HINT_T0);
                store_unit(_mm512_loadu_si512(unit), table, s, out, operands);
            }
        }
    }

    template <int... I>
    static void store_unit(__m512i q, const typename Ops::ExactTable& table, __m512 s, float* out,
                           std::integer_sequence<int, I...>) {
        (_mm512_store_si512(out + I * kRowBlock, Ops::template exact_operand<I>(q, table, s)), ...);
    }

    static void dequantize(const WeightView& w, int64_t block, int64_t k0, int64_t k1, float* out) {
        if (w.format == Format::nvfp4) return dequantize_format<Format::nvfp4>(w, block, k0, k1, out);
        dequantize_format<Format::mxfp4>(w, block, k0, k1, out);
    }

    template <int R, int B>
    static void tile(const float* panel, const X* x, int64_t steps, float* sums) {
        __m512 sum[B][R];
        for (int b = 0; b < B; ++b) {
            for (int r = 0; r < R; ++r) sum[b][r] = _mm512_setzero_ps();
        }
        for (int64_t step = 0; step < steps; ++step, panel += kRowBlock, x += R * kStep) {
            __m512i operand[B];
            for (int b = 0; b < B; ++b) operand[b] = _mm512_load_si512(panel + b * kPanelFloats);
            for (int r = 0; r < R; ++r) {
                const auto value = Ops::broadcast(x + r * kStep);
                for (int b = 0; b < B; ++b) sum[b][r] = Ops::dot(sum[b][r], operand[b], value);
            }
        }
        for (int b = 0; b < B; ++b) {
            for (int r = 0; r < R; ++r) {
                float* const to = sums + (b * R + r) * kRowBlock;
                _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), sum[b][r]));
            }
        }
    }
};

// The bits of the E2M1 values times 2^offset in float32.
struct FloatTable {
    __m512 value;
    explicit FloatTable(int offset) {
        alignas(64) float values[16];
        for (int i = 0; i < 16; ++i) {
            const uint32_t bits = bits_as<uint32_t>(kE2M1[i]);
            const uint32_t shifted = i & 7 ? bits + (static_cast<uint32_t>(offset) << 23) : bits;
            values[i] = bits_as<float>(shifted);
        }
        value = _mm512_load_ps(values);
    }
};

// Bit at which the code of k0 + K lies in a row's dword (gemm.hpp). A lookup reads the four bits from there up.
template <int K>
inline __m512i code_at(__m512i q) {
    constexpr unsigned bit = K / 2 * 4 + K % 2 * 16;
    if constexpr (bit == 0) {
        return q;
    } else {
        return _mm512_srli_epi32(q, bit);
    }
}

}  // namespace
}  // namespace petit::cpu
