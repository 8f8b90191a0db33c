// The kernels' C door for the tests: one instruction set's grouped_gemm by name, without the choice made in isa.cpp.
#include <cstring>

#include "kernels.hpp"

using petit::cpu::DType;
using petit::cpu::GemmProblem;

extern "C" int petit_test_grouped_gemm(const char* isa, const GemmProblem* problems, int64_t count, int x_dtype,
                                       int y_dtype, int threads) {
    const struct {
        const char* name;
        petit::cpu::GroupedGemmFn run;
    } table[] = {
#ifdef PETIT_TEST_BASE
        {"portable", petit::cpu::grouped_gemm_portable},
        {"avx2", petit::cpu::grouped_gemm_avx2},
#endif
#ifdef PETIT_TEST_AVX512
        {"avx512", petit::cpu::grouped_gemm_avx512},
        {"avx512_bf16", petit::cpu::grouped_gemm_avx512_bf16},
#endif
    };
    for (const auto& entry : table) {
        if (std::strcmp(entry.name, isa) == 0) {
            entry.run(problems, count, static_cast<DType>(x_dtype), static_cast<DType>(y_dtype), threads);
            return 0;
        }
    }
    return 1;
}
