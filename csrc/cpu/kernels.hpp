// The kernels behind grouped_gemm(), one per instruction set. Each is compiled in files named *_<isa>.cpp with that
// set's flags (CMakeLists.txt); PETIT_HAVE_<ISA> says which are in this build. An `exact` weight never reaches them:
// isa.cpp sends it to the portable kernel, which works in float64.
#pragma once

#include "gemm.hpp"

namespace petit::cpu {

using GroupedGemmFn = void (*)(const GemmProblem* problems, int64_t count, DType x_dtype, DType y_dtype, int threads);

void grouped_gemm_portable(const GemmProblem*, int64_t count, DType x_dtype, DType y_dtype, int threads);
void grouped_gemm_avx2(const GemmProblem*, int64_t count, DType x_dtype, DType y_dtype, int threads);
void grouped_gemm_avx512(const GemmProblem*, int64_t count, DType x_dtype, DType y_dtype, int threads);
void grouped_gemm_avx512_bf16(const GemmProblem*, int64_t count, DType x_dtype, DType y_dtype, int threads);

}  // namespace petit::cpu
