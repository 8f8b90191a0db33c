// FP4 GEMM for AVX2 + FMA + F16C: float32 products of exact weights.
//
// Weights are read in the order they lie in memory (gemm.hpp): 32 bytes are 8 rows x 8 k. Every E2M1 value is a
// bfloat16 whose two bytes a byte shuffle can look up, so that 8 rows x 8 k become eight float32 vectors with
//   3 masks and shifts, 4 shuffles, 4 byte interleaves, 4 shifts and 4 masks: 19 instructions, 2.4 per 8 weights.
// A vector then holds two neighbouring k of four rows,
//   A: (row 0, k)(row 0, k+1)(row 1, k)(row 1, k+1) | (row 4, ..)(row 5, ..)     B: the same of rows 2, 3 | 6, 7
// and is multiplied by a broadcast pair of activations; a horizontal add, once per sum, leaves A and B in row order.
//
// decode   (few rows of x): one FMA per 8 weights and row of x; the sum of each group is multiplied by its block scale
//          once, in the same vectors: 3 instructions per vector and group. In all about 4.2 instructions per 8 weights
//          at one row, 4.5 bytes of memory (NVFP4) or 4.25 (MXFP4).
//          One row alone goes through integers instead where it fits them: simd_fixed_avx2.hpp.
// tile     weights times scales (exact in float32) for 16 rows x 256 k fit half of the first-level cache; the register
//          tile is 3 rows of x by 16 rows of w by 2 k: 12 FMA for 7 loads.
#include <immintrin.h>

#include "kernels.hpp"
#include "simd_driver.hpp"
#include "simd_fixed_avx2.hpp"

namespace petit::cpu {
namespace {

constexpr int64_t kPrefetch = 2048;  // bytes ahead of the weights being read

// How many roundings a float32 sum may go through before float64 takes over: each can lose 2^-24 of what the sum has
// reached, and 2e-6 is 33 of them (tests/numerics.py). A chain of decode is 8 (NVFP4) or 16 (MXFP4) products of a group
// and 16 or 8 groups; one of a tile is 24 products and 6 of their sums; the horizontal add comes on top.
constexpr int64_t kChunk = 256;  // k
constexpr int64_t kTileChain = 24;

// NVFP4 scale bytes are used as float32 bits c << 20, which is the scale times 2^-111: zero stays zero without a test,
// and packing writes nothing else below 8 (E4M3 begins at 56), which would be subnormal. dequantise has the rest in its
// table of weights; decode multiplies it back once a group, which keeps everything in between in its true range.
constexpr int kScaleOffset = 111;

template <Format F>
constexpr int kScaleShift = F == Format::nvfp4 ? 4 : 1;  // of a byte at the top of a dword
template <Format F>
constexpr int kGroup = F == Format::nvfp4 ? 16 : 32;

// The high and low byte of every E2M1 value times 2^Offset as a bfloat16.
template <int Offset>
struct ByteTable {
    alignas(32) uint8_t high[32], low[32];
    constexpr ByteTable() : high{}, low{} {
        constexpr uint16_t one[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
        for (int i = 0; i < 32; ++i) {
            const int code = i & 7;
            const int bits = (code ? one[code] + (Offset << 7) : 0) | (i & 8 ? 0x8000 : 0);
            high[i] = static_cast<uint8_t>(bits >> 8);
            low[i] = static_cast<uint8_t>(bits & 0xff);
        }
    }
};
template <int Offset>
constexpr ByteTable<Offset> kBytes{};

// Selects, for vector v of row half h (rows 8h ..), the scale byte of each of its lanes, into the dword's top byte.
struct ScaleSelect {
    alignas(32) uint8_t at[2][2][32];
    constexpr ScaleSelect() : at{} {
        for (int h = 0; h < 2; ++h) {
            for (int v = 0; v < 2; ++v) {
                for (int lane = 0; lane < 8; ++lane) {
                    const int row = 8 * h + 4 * (lane / 4) + 2 * v + lane % 4 / 2;
                    for (int byte = 0; byte < 4; ++byte) {
                        at[h][v][4 * lane + byte] = static_cast<uint8_t>(byte == 3 ? row : 0x80);
                    }
                }
            }
        }
    }
};
constexpr ScaleSelect kScaleSelect{};

inline __m256i load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

// Weights may lie anywhere: a tensor may be a view into a file.
inline __m256i load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// `= {}` makes gcc 12 clear an array in memory and keep it there.
template <int A, int B, int C>
inline void clear(__m256 (&sums)[A][B][C]) {
    for (int a = 0; a < A; ++a) {
        for (int b = 0; b < B; ++b) {
            for (int c = 0; c < C; ++c) sums[a][b][c] = _mm256_setzero_ps();
        }
    }
}

template <int Offset>
struct Expand {
    const __m256i high = load(kBytes<Offset>.high), low = load(kBytes<Offset>.low);
    const __m256i nibbles = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));

    // value[j][v]: k0 + 2j and k0 + 2j + 1, vector A or B.
    void operator()(__m256i q, __m256 (*value)[2]) const {
        const __m256i codes[2] = {_mm256_and_si256(q, nibbles), _mm256_and_si256(_mm256_srli_epi16(q, 4), nibbles)};
        for (int j = 0; j < 2; ++j) {
            const __m256i h = _mm256_shuffle_epi8(high, codes[j]), l = _mm256_shuffle_epi8(low, codes[j]);
            const __m256i pairs[2] = {_mm256_unpacklo_epi8(l, h), _mm256_unpackhi_epi8(l, h)};
            for (int v = 0; v < 2; ++v) {
                value[j][v] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs[v], 16));
                value[j + 2][v] = _mm256_castsi256_ps(_mm256_and_si256(pairs[v], upper));
            }
        }
    }
};

template <Format F>
inline __m256 scale_lanes(__m256i bytes, int h, int v) {
    const __m256i top = _mm256_shuffle_epi8(bytes, load(kScaleSelect.at[h][v]));
    return _mm256_castsi256_ps(_mm256_srli_epi32(top, kScaleShift<F>));
}

// NVFP4 scales from their bits; a product with zero is zero.
template <Format F>
inline __m256 true_scale(__m256 bits) {
    return F == Format::nvfp4 ? _mm256_mul_ps(bits, _mm256_set1_ps(0x1p111f)) : bits;
}

inline void add_to(double* sums, __m256 values) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
    _mm256_store_pd(sums, _mm256_add_pd(_mm256_load_pd(sums), low));
    _mm256_store_pd(sums + 4, _mm256_add_pd(_mm256_load_pd(sums + 4), high));
}

inline __m256i load_scales(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m256 broadcast_pair(const float* x) {
    double pair;
    std::memcpy(&pair, x, sizeof(pair));
    return _mm256_castpd_ps(_mm256_set1_pd(pair));
}

// Rows 8 * First .. of a row block, H halves of 8 rows, against R rows of x.
template <Format F, int R, int First, int H>
inline void decode_halves(const WeightView& w, int64_t block, const float* x, double (*sums)[kRowBlock]) {
    constexpr int group = kGroup<F>;
    const uint8_t* unit = w.weight + block * w.k * 8;
    const uint8_t* scale = w.scale + block * (w.k / group) * kRowBlock;
    const Expand<0> expand;
    for (int r = 0; r < R; ++r) std::memset(sums[r] + 8 * First, 0, 8 * H * sizeof(double));
    for (int64_t k0 = 0; k0 < w.k; k0 += kChunk) {
        const int64_t k1 = k0 + kChunk < w.k ? k0 + kChunk : w.k;
        __m256 sum[R][H][2];
        clear(sum);
        for (int64_t k = k0; k < k1; k += group) {
            const __m256i bytes = load_scales(scale);
            for (int u = 0; u < group / 8; ++u) {
                _mm_prefetch(reinterpret_cast<const char*>(unit + u * 64 + kPrefetch), _MM_HINT_T0);
            }
            for (int h = 0; h < H; ++h) {  // outside the units: two sums per row of x are all that lives in registers
                __m256 part[R][2];
#pragma GCC unroll 1  // unrolled, gcc 12 runs out of registers
                for (int u = 0; u < group / 8; ++u) {
                    __m256 value[4][2];
                    expand(load_codes(unit + u * 64 + (First + h) * 32), value);
                    for (int j = 0; j < 4; ++j) {
                        for (int r = 0; r < R; ++r) {
                            const __m256 pair = broadcast_pair(x + (u * 4 + j) * R * 2 + r * 2);
                            for (int v = 0; v < 2; ++v) {
                                part[r][v] = u + j == 0 ? _mm256_mul_ps(value[j][v], pair)
                                                        : _mm256_fmadd_ps(value[j][v], pair, part[r][v]);
                            }
                        }
                    }
                }
                for (int v = 0; v < 2; ++v) {
                    const __m256 s = true_scale<F>(scale_lanes<F>(bytes, First + h, v));
                    for (int r = 0; r < R; ++r) sum[r][h][v] = _mm256_fmadd_ps(part[r][v], s, sum[r][h][v]);
                }
            }
            unit += group * 8;
            scale += kRowBlock;
            x += group * R;
        }
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < H; ++h) add_to(sums[r] + 8 * (First + h), _mm256_hadd_ps(sum[r][h][0], sum[r][h][1]));
        }
    }
}

// One row of x as integers; sums of a row block in row order. Scales are those of decode_halves.
template <Format F>
void decode_fixed_groups(const WeightView& w, int64_t block, const FixedGroup* x, double* sums) {
    constexpr int group = kGroup<F>;
    const uint8_t* unit = w.weight + block * w.k * 8;
    const uint8_t* scale = w.scale + block * (w.k / group) * kRowBlock;
    const __m256i table = load(kShiftedE2M1), nibbles = _mm256_set1_epi8(15);
    std::memset(sums, 0, kRowBlock * sizeof(double));
    for (int64_t k0 = 0; k0 < w.k; k0 += kChunk) {
        const int64_t k1 = k0 + kChunk < w.k ? k0 + kChunk : w.k;
        __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int64_t k = k0; k < k1; k += group) {
            for (int u = 0; u < group / 8; ++u) {
                _mm_prefetch(reinterpret_cast<const char*>(unit + u * 64 + kPrefetch), _MM_HINT_T0);
            }
            for (int h = 0; h < 2; ++h) {
                __m256i exact = fixed_sum(unit + 32 * h, x[0], table, nibbles);
                if constexpr (group == 32) {
                    exact = _mm256_add_epi32(exact, fixed_sum(unit + 128 + 32 * h, x[1], table, nibbles));
                }
                const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_set1_ps(x[0].unit));
                const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scale + 8 * h));
                const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), F == Format::nvfp4 ? 20 : 23);
                sum[h] = _mm256_fmadd_ps(value, true_scale<F>(_mm256_castsi256_ps(bits)), sum[h]);
            }
            unit += group * 8;
            scale += kRowBlock;
            x += group / 16;
        }
        for (int h = 0; h < 2; ++h) add_to(sums + 8 * h, sum[h]);
    }
}

template <Format F>
void dequantize_panel(const WeightView& w, int64_t block, int64_t k0, int64_t k1, float* out) {
    constexpr int group = kGroup<F>;
    const uint8_t* unit = w.weight + (block * w.k + k0) * 8;
    const uint8_t* scale = w.scale + (block * (w.k / group) + k0 / group) * kRowBlock;
    const Expand<F == Format::nvfp4 ? kScaleOffset : 0> expand;
    for (int64_t k = k0; k < k1; k += group, scale += kRowBlock) {
        const __m256i bytes = load_scales(scale);
        for (int h = 0; h < 2; ++h) {
            const __m256 s[2] = {scale_lanes<F>(bytes, h, 0), scale_lanes<F>(bytes, h, 1)};
            for (int u = 0; u < group / 8; ++u) {
                __m256 value[4][2];
                expand(load_codes(unit + u * 64 + h * 32), value);
                for (int j = 0; j < 4; ++j) {
                    for (int v = 0; v < 2; ++v) {
                        _mm256_store_ps(out + (u * 4 + j) * 32 + h * 16 + v * 8, _mm256_mul_ps(value[j][v], s[v]));
                    }
                }
            }
        }
        for (int u = 0; u < group / 8; ++u) {
            _mm_prefetch(reinterpret_cast<const char*>(unit + u * 64 + kPrefetch), _MM_HINT_T0);
        }
        unit += group * 8;
        out += group * kRowBlock;
    }
}

struct Avx2 {
    using X = float;
    static constexpr int kStep = 2;
    static constexpr int kDecodeRows = 4;
    static constexpr int64_t kDecodeMost = 4;
    static constexpr int kTileRows = 3;
    static constexpr int kTileBlocks = 1;
    static constexpr int64_t kPanel = 256;
    static constexpr int64_t kPanelFloats = kPanel * kRowBlock;

    template <Format F, int R>
    static void decode_format(const WeightView& w, int64_t block, const float* x, double (*sums)[kRowBlock]) {
        if constexpr (R <= 2) {
            decode_halves<F, R, 0, 2>(w, block, x, sums);
        } else {  // 16 registers hold the sums of 8 rows only
            decode_halves<F, R, 0, 1>(w, block, x, sums);
            decode_halves<F, R, 1, 1>(w, block, x, sums);
        }
    }

    template <int R>
    static void decode(const WeightView& w, int64_t block, const float* x, double (*sums)[kRowBlock]) {
        if (w.format == Format::nvfp4) return decode_format<Format::nvfp4, R>(w, block, x, sums);
        decode_format<Format::mxfp4, R>(w, block, x, sums);
    }

    // A single row of x has an integer form as large as itself; see simd_fixed_avx2.hpp.
    static int64_t prepare_fixed(const WeightView& w, const float* x, float* out) {
        FixedGroup* const groups = reinterpret_cast<FixedGroup*>(out);
        return w.format == Format::nvfp4 ? store_fixed<kGroup<Format::nvfp4>>(x, w.k, groups)
                                         : store_fixed<kGroup<Format::mxfp4>>(x, w.k, groups);
    }

    static void decode_fixed(const WeightView& w, int64_t block, const float* x, const float* fixed, int64_t inexact,
                             double* sums) {
        const FixedGroup* const groups = reinterpret_cast<const FixedGroup*>(fixed);
        const bool nvfp4 = w.format == Format::nvfp4;
        if (nvfp4) {
            decode_fixed_groups<Format::nvfp4>(w, block, groups, sums);
        } else {
            decode_fixed_groups<Format::mxfp4>(w, block, groups, sums);
        }
        if (inexact == 0) return;
        const int group = nvfp4 ? kGroup<Format::nvfp4> : kGroup<Format::mxfp4>;
        alignas(32) float panel[32 * kRowBlock];
        for (int64_t i = 0; i < inexact; ++i) {
            const int64_t k0 = groups[i].inexact * int64_t{group};
            dequantize(w, block, k0, k0 + group, panel);
            tile<1, 1>(panel, x + k0, group / kStep, nullptr, sums);
        }
    }

    static void dequantize(const WeightView& w, int64_t block, int64_t k0, int64_t k1, float* out) {
        if (w.format == Format::nvfp4) return dequantize_panel<Format::nvfp4>(w, block, k0, k1, out);
        dequantize_panel<Format::mxfp4>(w, block, k0, k1, out);
    }

    template <int R, int B>
    static void tile(const float* panel, const float* x, int64_t steps, const float*, double* sums) {
        static_assert(B == 1);
        alignas(32) float total[R][4][8] = {};
        for (int64_t first = 0; first < steps; first += kTileChain) {
            const int64_t last = first + kTileChain < steps ? first + kTileChain : steps;
            __m256 sum[R][1][4];
            clear(sum);
            for (int64_t step = first; step < last; ++step, panel += 32, x += 2 * R) {
                __m256 pair[R];
                for (int r = 0; r < R; ++r) pair[r] = broadcast_pair(x + 2 * r);
                for (int v = 0; v < 4; ++v) {
                    const __m256 value = _mm256_load_ps(panel + 8 * v);
                    for (int r = 0; r < R; ++r) sum[r][0][v] = _mm256_fmadd_ps(value, pair[r], sum[r][0][v]);
                }
            }
            for (int r = 0; r < R; ++r) {
                for (int v = 0; v < 4; ++v) {
                    _mm256_store_ps(total[r][v], _mm256_add_ps(_mm256_load_ps(total[r][v]), sum[r][0][v]));
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < 2; ++h) {
                add_to(sums + r * kRowBlock + 8 * h,
                       _mm256_hadd_ps(_mm256_load_ps(total[r][2 * h]), _mm256_load_ps(total[r][2 * h + 1])));
            }
        }
    }
};

}  // namespace

void grouped_gemm_avx2(const GemmProblem* problems, int64_t count, DType x_dtype, DType y_dtype, int threads) {
    Driver<Avx2>(x_dtype, y_dtype, threads).run(problems, count);
}

}  // namespace petit::cpu
