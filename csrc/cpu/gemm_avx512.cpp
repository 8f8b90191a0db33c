// FP4 GEMM for AVX-512 (F, BW, DQ, VL): float32 products of exact weights.
//
// A dword of the packed weights is one row's eight codes, so 64 bytes loaded are 16 rows x 8 k, and
// clang-format off
//   decode   per 16 weights: one shift, one 16-entry lookup (vpermps reads only the low four bits: no mask), and one FMA
//            with a broadcast activation per row of x: 1 + 0.5 R instructions per 8 weights, and 4.5 bytes of memory
//            (NVFP4) or 4.25 (MXFP4). The sum of 16 k is multiplied by its block scale once: one FMA per row of x and
//            256 weights.
//   tile     weights times scales, exact in float32, of 32 rows x 256 k stay in the second-level cache; the register
//            tile is 8 or 12 rows of x by 32 of w.
// clang-format on
#include "simd_avx512.hpp"

namespace petit::cpu {
namespace {

struct Float32Ops {
    using X = float;
    static constexpr int kStep = 1;

    using ExactTable = FloatTable;
    struct Table : FloatTable {
        Table() : FloatTable(0) {}
    };

    template <int I>
    static __m512i operand(__m512i q, const FloatTable& table) {
        return _mm512_castps_si512(_mm512_permutexvar_ps(code_at<I>(q), table.value));
    }

    template <int I>
    static __m512i exact_operand(__m512i q, const FloatTable& table, __m512 scale) {
        return _mm512_castps_si512(_mm512_mul_ps(_mm512_permutexvar_ps(code_at<I>(q), table.value), scale));
    }

    static __m512 broadcast(const float* x) { return _mm512_set1_ps(*x); }
    static __m512 dot(__m512 sum, __m512i weight, __m512 x) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(weight), x, sum);
    }
};

}  // namespace

void grouped_gemm_avx512(const GemmProblem* problems, int64_t count, DType x_dtype, DType y_dtype, int threads) {
    Driver<Avx512<Float32Ops>>(x_dtype, y_dtype, threads).run(problems, count);
}

}  // namespace petit::cpu
