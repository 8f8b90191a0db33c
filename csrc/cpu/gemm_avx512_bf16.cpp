// FP4 GEMM for AVX-512-BF16: bfloat16 activations, pairs of exact products per instruction, float32 sums.
//
// A dword of the packed weights is one row's eight codes, pairs (k, k + 1) in the same place of its two halves, so
// clang-format off
//   decode   per 32 weights: one 16-bit shift, one lookup (vpermw reads five bits: the table is there twice, no mask)
//            and one vdpbf16ps with a broadcast pair of activations per row of x: 0.5 + 0.25 R instructions per 8
//            weights, and 4.5 bytes of memory (NVFP4) or 4.25 (MXFP4). The sum of 16 k is multiplied by its block scale
//            once.
//   tile     E2M1 times a block scale has at most 6 significant bits: exact in bfloat16. 32 rows x 256 k of such pairs
//            fit half of the first-level cache; the register tile is 8 or 12 rows of x by 32 of w.
// clang-format on
// vdpbf16ps treats subnormal inputs and results as zero; simd_activations.hpp keeps every row of x away from them.
// Activations of other types are multiplied in float32 (gemm_avx512.cpp).
#include "simd_avx512.hpp"

namespace petit::cpu {
namespace {

struct BFloat16Ops {
    using X = uint16_t;
    static constexpr int kStep = 2;

    using ExactTable = FloatTable;
    struct Table {
        __m512i value;
        Table() {
            alignas(64) uint16_t values[32];
            for (int i = 0; i < 32; ++i) {
                values[i] = static_cast<uint16_t>(bits_as<uint32_t>(kE2M1[i & 15]) >> 16);
            }
            value = _mm512_load_si512(values);
        }
    };

    template <int I>
    static __m512i operand(__m512i q, const Table& table) {
        if constexpr (I == 0) {
            return _mm512_permutexvar_epi16(q, table.value);
        } else {
            return _mm512_permutexvar_epi16(_mm512_srli_epi16(q, 4 * I), table.value);
        }
    }

    template <int I>
    static __m512i exact_operand(__m512i q, const FloatTable& table, __m512 scale) {
        const __m512 even = _mm512_mul_ps(_mm512_permutexvar_ps(code_at<2 * I>(q), table.value), scale);
        const __m512 odd = _mm512_mul_ps(_mm512_permutexvar_ps(code_at<2 * I + 1>(q), table.value), scale);
        return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
    }

    static __m512i broadcast(const uint16_t* x) {
        int pair;
        std::memcpy(&pair, x, sizeof(pair));
        return _mm512_set1_epi32(pair);
    }
    static __m512 dot(__m512 sum, __m512i weights, __m512i x) {
        return _mm512_dpbf16_ps(sum, bits_as<__m512bh>(weights), bits_as<__m512bh>(x));
    }
};

}  // namespace

void grouped_gemm_avx512_bf16(const GemmProblem* problems, int64_t count, DType x_dtype, DType y_dtype, int threads) {
    if (x_dtype != DType::bf16) return grouped_gemm_avx512(problems, count, x_dtype, y_dtype, threads);
    Driver<Avx512<BFloat16Ops>>(x_dtype, y_dtype, threads).run(problems, count);
}

}  // namespace petit::cpu
