// Which instruction set runs: what this build contains, what this CPU and kernel support, and what PETIT_CPU_ISA asks.
#include "isa.hpp"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace petit::cpu {
namespace {

struct CpuFeatures {
    bool avx2 = false;
    bool avx512 = false;
    bool avx512_bf16 = false;
};

#if defined(__x86_64__)
CpuFeatures read_features() {
    CpuFeatures features;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d)) return features;
    auto bit = [](unsigned word, int index) { return ((word >> index) & 1u) != 0; };
    const bool fma = bit(c, 12), osxsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
    if (!osxsave || !avx) return features;
    // The operating system must save the wide registers: XCR0 bits 1-2 for ymm, 5-7 for opmask and zmm as well.
    unsigned state = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    if ((state & 0x06u) != 0x06u || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
    features.avx2 = bit(b, 5) && fma && f16c;
    const bool f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31);
    features.avx512 = features.avx2 && f && dq && bw && vl && (state & 0xe0u) == 0xe0u;
    unsigned a1 = 0, b1 = 0, c1 = 0, d1 = 0;
    if (features.avx512 && a >= 1 && __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) features.avx512_bf16 = bit(a1, 5);
    return features;
}
#else
CpuFeatures read_features() { return {}; }
#endif

struct Entry {
    Isa isa;
    const char* name;
    GroupedGemmFn kernel;  // null when this build does not contain it
    bool CpuFeatures::* feature;
};

constexpr Entry kTable[] = {
    {Isa::portable, "portable", grouped_gemm_portable, nullptr},
#ifdef PETIT_HAVE_AVX2
    {Isa::avx2, "avx2", grouped_gemm_avx2, &CpuFeatures::avx2},
#else
    {Isa::avx2, "avx2", nullptr, &CpuFeatures::avx2},
#endif
#ifdef PETIT_HAVE_AVX512
    {Isa::avx512, "avx512", grouped_gemm_avx512, &CpuFeatures::avx512},
#else
    {Isa::avx512, "avx512", nullptr, &CpuFeatures::avx512},
#endif
#ifdef PETIT_HAVE_AVX512_BF16
    {Isa::avx512_bf16, "avx512_bf16", grouped_gemm_avx512_bf16, &CpuFeatures::avx512_bf16},
#else
    {Isa::avx512_bf16, "avx512_bf16", nullptr, &CpuFeatures::avx512_bf16},
#endif
};

const Entry& entry(Isa isa) {
    for (const Entry& e : kTable) {
        if (e.isa == isa) return e;
    }
    throw std::invalid_argument("unknown instruction set number " + std::to_string(static_cast<int>(isa)));
}

}  // namespace

const char* isa_name(Isa isa) { return entry(isa).name; }

bool isa_built(Isa isa) { return entry(isa).kernel != nullptr; }

bool isa_supported(Isa isa) {
    static const CpuFeatures features = read_features();
    const Entry& e = entry(isa);
    return e.kernel != nullptr && (e.feature == nullptr || features.*e.feature);
}

Isa best_isa() {
    if (const char* wanted = std::getenv("PETIT_CPU_ISA"); wanted != nullptr && *wanted != '\0') {
        return parse_isa(wanted);
    }
    for (Isa isa : {Isa::avx512_bf16, Isa::avx512, Isa::avx2}) {
        if (isa_supported(isa)) return isa;
    }
    return Isa::portable;
}

Isa parse_isa(const char* wanted) {
    std::string known;
    for (const Entry& e : kTable) {
        if (std::strcmp(e.name, wanted) == 0) {
            if (isa_supported(e.isa)) return e.isa;
            throw std::invalid_argument(std::string("PETIT_CPU_ISA=") + wanted + ": " +
                                        (e.kernel ? "this CPU does not support it" : "this build does not contain it") +
                                        "; unset it to let petit choose");
        }
        known += known.empty() ? e.name : std::string(", ") + e.name;
    }
    throw std::invalid_argument(std::string("PETIT_CPU_ISA=") + wanted + " is not one of " + known);
}

void grouped_gemm(const GemmProblem* problems, int64_t count, DType x_dtype, DType y_dtype, int threads, Isa isa) {
    const GroupedGemmFn kernel = entry(isa).kernel;
    if (kernel == nullptr || !isa_supported(isa)) {
        throw std::invalid_argument(std::string("instruction set ") + entry(isa).name + " cannot run here");
    }
    int64_t exact = 0;
    for (int64_t i = 0; i < count; ++i) exact += problems[i].w.exact ? 1 : 0;
    if (exact == 0) return kernel(problems, count, x_dtype, y_dtype, threads);
    if (exact == count) return grouped_gemm_portable(problems, count, x_dtype, y_dtype, threads);
    std::vector<GemmProblem> split[2];
    for (int64_t i = 0; i < count; ++i) split[problems[i].w.exact ? 1 : 0].push_back(problems[i]);
    kernel(split[0].data(), static_cast<int64_t>(split[0].size()), x_dtype, y_dtype, threads);
    grouped_gemm_portable(split[1].data(), exact, x_dtype, y_dtype, threads);
}

}  // namespace petit::cpu
