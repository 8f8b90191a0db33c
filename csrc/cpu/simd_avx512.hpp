// What the two AVX-512 kernels share; gemm_avx512.cpp and gemm_avx512_bf16.cpp say how a product is formed:
// clang-format off
//   X, kStep                         type of an activation, activations in one broadcast
//   Table                            the E2M1 values as operand() looks them up
//   operand<I>(q, table)             the I-th of the 8 / kStep operands in 64 bytes of weights (16 rows x 8 k), one row
//                                    a lane
//   broadcast(x), dot(sum, w, x)     kStep activations to all lanes; sum plus their products with an operand
//   ExactTable                       the E2M1 values times a power of two, as exact_operand() looks them up
//   exact_operand<I>(q, table, s)    operand<I> times the scales s: exact, for a tile's panel
// clang-format on
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12's own AVX-512 headers pass deliberately undefined registers to the builtins, and gcc then warns about them.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <cpuid.h>
#include <immintrin.h>

#include "kernels.hpp"
#include "simd_driver.hpp"

namespace petit::cpu {
namespace {

// The CPUID family of an AMD processor, 0 for others.
inline unsigned amd_family() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kAuthenticAmd = 0x68747541;  // "Auth" in ebx
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != kAuthenticAmd || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 15) + (a >> 20 & 255);
}

constexpr int64_t kPrefetch = 4096;  // bytes ahead of the weights being read: some 100 ns at 40 GB/s a core

// How many roundings a float32 sum may go through before float64 takes over: each can lose 2^-24 of what the sum has
// reached, and 2e-6 is 33 of them (tests/numerics.py). 256 k are 16 pieces of 16 products: 32 roundings at most.
constexpr int64_t kChunk = 256;  // k
constexpr int64_t kPiece = 16;   // k

// NVFP4 scale bytes are used as float32 bits c << 20, which is the scale times 2^-111: zero stays zero without a test,
// and packing writes nothing else below 8 (E4M3 begins at 56), which would be subnormal. Where products with the scale
// are stored, the rest is in the table of weights; decode multiplies it back once a group, which keeps everything in
// between in its true range.
constexpr int kScaleOffset = 111;

template <Format F>
constexpr int kGroup = F == Format::nvfp4 ? 16 : 32;
template <Format F>
constexpr int kExactOffset = F == Format::nvfp4 ? kScaleOffset : 0;

template <Format F>
inline __m512 load_scales(const uint8_t* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bytes, F == Format::nvfp4 ? 20 : 23));
}

// NVFP4 scales from their bits; a product with zero is zero.
template <Format F>
inline __m512 true_scale(__m512 bits) {
    return F == Format::nvfp4 ? _mm512_mul_ps(bits, _mm512_set1_ps(0x1p111f)) : bits;
}

inline void add_to(double* sums, __m512 values) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
    const __m512d high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(values), 1)));
    _mm512_store_pd(sums, _mm512_add_pd(_mm512_load_pd(sums), low));
    _mm512_store_pd(sums + 8, _mm512_add_pd(_mm512_load_pd(sums + 8), high));
}

template <class Ops>
struct Avx512 {
    using X = typename Ops::X;
    static constexpr int kStep = Ops::kStep;
    static constexpr int kOperands = 8 / kStep;  // of 16 lanes, in 64 bytes of weights
    static constexpr int kDecodeRows = 12;       // 24 registers hold sums
    static constexpr int64_t kDecodeMost = 16;
    static constexpr int kTileRows = 12;  // times two row blocks: 24 registers hold sums
    static constexpr int kTileBlocks = 2;
    // Two 512-bit multiply-adds a cycle need the fewest loads for each; one a cycle is kept busy by 16 sums, whose shorter
    // loop needs no moves between registers: 225 against 195 GFLOP/s a core on Zen 4 (AMD family 19h).
    static int tile_rows() {
        static const bool one_a_cycle = amd_family() == 0x19;
        return one_a_cycle ? 8 : kTileRows;
    }
    static constexpr int64_t kPanel = 256;
    static constexpr int64_t kPanelFloats = kPanel * kRowBlock / kStep;

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
    static void decode_format(const WeightView& w, int64_t block, const X* x, double (*sums)[kRowBlock]) {
        constexpr int group = kGroup<F>;
        constexpr auto operands = std::make_integer_sequence<int, kOperands>();
        const uint8_t* unit = w.weight + block * w.k * 8;
        const uint8_t* scale = w.scale + block * (w.k / group) * kRowBlock;
        const typename Ops::Table table;
        for (int r = 0; r < R; ++r) std::memset(sums[r], 0, sizeof(sums[r]));
        for (int64_t k0 = 0; k0 < w.k; k0 += kChunk) {
            const int64_t k1 = k0 + kChunk < w.k ? k0 + kChunk : w.k;
            __m512 sum[R];
            for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
            for (int64_t k = k0; k < k1; k += group) {
                const __m512 s = true_scale<F>(load_scales<F>(scale));
                scale += kRowBlock;
                for (int piece = 0; piece < group / kPiece; ++piece) {
                    __m512 part[R][kChains<R>];
                    _mm_prefetch(reinterpret_cast<const char*>(unit + kPrefetch), _MM_HINT_T0);
                    _mm_prefetch(reinterpret_cast<const char*>(unit + 64 + kPrefetch), _MM_HINT_T0);
                    multiply_unit<R, true>(_mm512_loadu_si512(unit), table, x, part, operands);
                    multiply_unit<R, false>(_mm512_loadu_si512(unit + 64), table, x + 8 * R, part, operands);
                    for (int r = 0; r < R; ++r) {
                        for (int step = kChains<R> / 2; step > 0; step /= 2) {
                            for (int c = 0; c < step; ++c) part[r][c] = _mm512_add_ps(part[r][c], part[r][c + step]);
                        }
                        sum[r] = _mm512_fmadd_ps(part[r][0], s, sum[r]);
                    }
                    unit += kPiece * 8;
                    x += kPiece * R;
                }
            }
            for (int r = 0; r < R; ++r) add_to(sums[r], sum[r]);
        }
    }

    template <int R>
    static void decode(const WeightView& w, int64_t block, const X* x, double (*sums)[kRowBlock]) {
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

    // A row's sums move to `total` at a step of its own, not all rows' at once, so that the multiply-add units never wait;
    // a sum still goes through kPiece products between two moves. `total` is cleared by stores because gcc's `= {}` is a
    // rep stos, which costs 5% of a tile.
    template <int R, int B>
    static void tile(const float* panel, const X* x, int64_t steps, const X* next, double* sums) {
        constexpr int kSteps = kPiece / kStep;
        static_assert(R <= 16 && B <= 2 && kSteps <= 16);  // what the loops below unroll
        alignas(64) float total[B][R][kRowBlock];
        __m512 sum[B][R];
#pragma GCC unroll 2
        for (int b = 0; b < B; ++b) {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                sum[b][r] = _mm512_setzero_ps();
                _mm512_store_ps(total[b][r], _mm512_setzero_ps());
            }
        }
        for (int64_t first = 0; first < steps; first += kSteps) {  // steps are whole pieces
#pragma GCC unroll 16
            for (int step = 0; step < kSteps; ++step, panel += kRowBlock, x += R * kStep, next += R * kStep) {
                __m512i operand[B];
                _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
                for (int b = 0; b < B; ++b) operand[b] = _mm512_load_si512(panel + b * kPanelFloats);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const auto value = Ops::broadcast(x + r * kStep);
#pragma GCC unroll 2
                    for (int b = 0; b < B; ++b) {
                        sum[b][r] = Ops::dot(sum[b][r], operand[b], value);
                        if (r % kSteps == step) {
                            _mm512_store_ps(total[b][r], _mm512_add_ps(_mm512_load_ps(total[b][r]), sum[b][r]));
                            sum[b][r] = _mm512_setzero_ps();
                        }
                    }
                }
            }
        }
        for (int b = 0; b < B; ++b) {
            for (int r = 0; r < R; ++r) {
                add_to(sums + (b * R + r) * kRowBlock, _mm512_add_ps(_mm512_load_ps(total[b][r]), sum[b][r]));
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
