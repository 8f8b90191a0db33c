// What every CPU kernel is given, and the one entry point that runs them.
//
// y[m, n] = round( (sum_k x[m, k] * w[n, k]) * row_scale[n] * 2^row_exponent[n] + bias[n] ), where w is E2M1 times its
// block scale, exactly; the products are accumulated in float32 (float64 by the portable kernel, and for an `exact`
// weight); there is one rounding, to y's type.
//
// Packed weight: rows padded to 16, k a multiple of the group (16 for NVFP4, 32 for MXFP4) and not padded.
//   weight [n_pad/16][k/8][64]  64 bytes = 16 rows x 8 k. Little-endian dword r belongs to row n0 + r; bits 4p..4p+3 of
//                               its low half are the code of k0 + 2p, of its high half the code of k0 + 2p + 1.
//   scale  [n_pad/16][k/g][16]  one byte a row. NVFP4: unsigned E5M3, 0 is zero, else 2^((c>>3) - 16) * (1 + (c&7)/8),
//                               whose float32 bits are (c << 20) + 0x37800000. MXFP4: 2^(c - 127); c is in [67, 187]
//                               for every block that is not all zero, unless the weight is `exact`.
// Padded rows hold zero codes, neutral scales and, where there is one per row, row_scale 0. Rows n..n_pad are never
// written to y.
#pragma once

#include <cstdint>

namespace petit::cpu {

enum class Format : int { nvfp4 = 0, mxfp4 = 1 };
enum class DType : int { bf16 = 0, f16 = 1, f32 = 2 };
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

inline constexpr int64_t kRowBlock = 16;

struct WeightView {
    Format format;
    int64_t n;  // rows of the layer; the tensors hold n rounded up to 16
    int64_t k;
    const uint8_t* weight;
    const uint8_t* scale;
    const float* row_scale;      // [n_pad], or [1] when all rows have the same
    int64_t row_scale_stride;    // 1, or 0 for [1]
    const int8_t* row_exponent;  // [n_pad], or null for all zero
    bool exact;                  // needs the portable kernel (MXFP4 rows that span more than float32 sums can hold)

    float scale_of_row(int64_t row) const { return row_scale[row * row_scale_stride]; }
};

struct GemmProblem {
    const void* x;          // row i of the problem is row (x_rows ? x_rows[i] : i) of x
    int64_t x_stride;       // elements from one row of x to the next; the row itself is contiguous
    const int32_t* x_rows;  // [m], or null
    int64_t m;              // may be 0
    WeightView w;
    const void* bias;  // [n], or null
    DType bias_dtype;
    void* y;           // [m, n], written completely and never read
    int64_t y_stride;  // elements
};

// Runs `count` independent problems, the work split over (problem, row block). The result of a row depends neither on
// the number of threads nor on what the other rows of x hold.
void grouped_gemm(const GemmProblem* problems, int64_t count, DType x_dtype, DType y_dtype, int threads, Isa isa);

Isa best_isa();
bool isa_supported(Isa isa);

}  // namespace petit::cpu
