#include <algorithm>
#include <cmath>

#include "mfma.hpp"

namespace petit_emu {
namespace {

constexpr int kZeroExp = -999;

// 2^e in each double, e from -1022 to 1023
inline __m256d pow2(__m128i e) {
    const __m256i wide = _mm256_cvtepi32_epi64(_mm_add_epi32(e, _mm_set1_epi32(1023)));
    return _mm256_castsi256_pd(_mm256_slli_epi64(wide, 52));
}
inline __m256d floor_scaled(__m256d x, __m128i s) {
    return _mm256_floor_pd(_mm256_mul_pd(x, pow2(_mm_max_epi32(s, _mm_set1_epi32(-200)))));
}

// dot: integers in units of 2^(e_dot - 24); adds them to four c as the gfx942 datapath does.
inline __m128 join4(__m256d dot, __m128i e_dot, __m128 c, bool drop_far_c) {
    const __m128i bits = _mm_castps_si128(c), field = _mm_and_si128(_mm_srli_epi32(bits, 23), _mm_set1_epi32(0xff));
    const __m128i hidden = _mm_andnot_si128(_mm_cmpeq_epi32(field, _mm_setzero_si128()), _mm_set1_epi32(0x800000));
    const __m128i ce = _mm_sub_epi32(_mm_max_epi32(field, _mm_set1_epi32(1)), _mm_set1_epi32(127));
    const __m128i man = _mm_or_si128(_mm_and_si128(bits, _mm_set1_epi32(0x7fffff)), hidden);  // units of 2^(ce - 23)
    const __m256d sign = _mm256_and_pd(_mm256_cvtps_pd(c), _mm256_set1_pd(-0.0));
    const __m256d cm = _mm256_or_pd(_mm256_cvtepi32_pd(man), sign);
    const __m128i e_max = _mm_max_epi32(e_dot, ce);
    const __m256d d =
        floor_scaled(dot, _mm_add_epi32(_mm_sub_epi32(e_dot, e_max), _mm_set1_epi32(8)));  // units of 2^(e_max - 32)
    __m256d s =
        floor_scaled(cm, _mm_add_epi32(_mm_sub_epi32(ce, e_max), _mm_set1_epi32(1)));  // units of 2^(e_max - 24)
    if (drop_far_c) {
        const __m128i far = _mm_cmplt_epi32(ce, _mm_sub_epi32(e_max, _mm_set1_epi32(25)));
        s = _mm256_andnot_pd(_mm256_castsi256_pd(_mm256_cvtepi32_epi64(far)), s);
    }
    __m256d sum = _mm256_add_pd(d, _mm256_mul_pd(s, _mm256_set1_pd(256.0)));
    // Keep 31 bits below the leading one, but never below 2^-157.
    const __m256i lead64 = _mm256_and_si256(_mm256_srli_epi64(_mm256_castpd_si256(sum), 52), _mm256_set1_epi64x(0x7ff));
    const __m128i lead =
        _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(lead64, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)));
    __m128i drop =
        _mm_max_epi32(_mm_sub_epi32(lead, _mm_set1_epi32(1023 + 31)), _mm_sub_epi32(_mm_set1_epi32(-125), e_max));
    drop = _mm_max_epi32(drop, _mm_setzero_si128());
    sum =
        _mm256_mul_pd(_mm256_floor_pd(_mm256_mul_pd(sum, pow2(_mm_sub_epi32(_mm_setzero_si128(), drop)))), pow2(drop));
    return _mm256_cvtpd_ps(_mm256_mul_pd(sum, pow2(_mm_sub_epi32(e_max, _mm_set1_epi32(32)))));
}

inline __m128i at(const int* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Round to nearest even, denormals kept, whatever the MODE of the wave.
struct MatrixMode {
    unsigned saved = _mm_getcsr();
    explicit MatrixMode(unsigned flush = 0) { _mm_setcsr(_MM_MASK_MASK | flush); }
    ~MatrixMode() { _mm_setcsr(saved); }
};

// With an Inf or NaN about, or a product that overflows f32 (it becomes Inf), those decide the result by themselves.
bool decided(const Tile& t, int i, int j, int k0, int k1, float c) {
    if (!std::isfinite(c)) return true;
    for (int k = k0; k < k1; ++k)
        if (!(std::fabs(double(t.a[k][i]) * double(t.b[k][j])) < 0x1p128)) return true;
    return false;
}
float decide(const Tile& t, int i, int j, int k0, int k1, float c) {
    double sum = c;
    for (int k = k0; k < k1; ++k) {
        const double p = double(t.a[k][i]) * double(t.b[k][j]);
        sum += std::fabs(p) >= 0x1p128 ? std::copysign(double(INFINITY), p) : p;
    }
    return static_cast<float>(sum);
}

// Sum over k0, k0+step, ... of products truncated toward zero at 24 bits below the largest exponent.
inline void truncated_sums(const Tile& t, int i, int k0, int k1, int step, int shift, int* sum, int* e_max) {
    const int n = t.n;
    alignas(32) i32 p[16][kMaxDim], e[16][kMaxDim];
    for (int j = 0; j < n; ++j) e_max[j] = kZeroExp, sum[j] = 0;
    int count = 0;
    for (int k = k0; k < k1; k += step, ++count) {
        const i32 as = t.a_sig[k][i], ae = t.a_exp[k][i];
#pragma GCC ivdep
        for (int j = 0; j < n; ++j) {
            const i32 q = as * t.b_sig[k][j];
            const i32 x = q ? ae + t.b_exp[k][j] : kZeroExp;
            p[count][j] = q, e[count][j] = x;
            e_max[j] = x > e_max[j] ? x : e_max[j];
        }
    }
    for (int c = 0; c < count; ++c) {
#pragma GCC ivdep
        for (int j = 0; j < n; ++j) {
            const i32 q = p[c][j], s = q >> 31;
            const u32 mag = u32((q ^ s) - s) << shift;
            const u32 by = u32(e_max[j] - e[c][j]);
            const i32 v = by < 32 ? i32(mag >> by) : 0;
            sum[j] += (v ^ s) - s;
        }
    }
}

}  // namespace

void mfma_cdna2(Tile& t) {
    const MatrixMode mode(0x8040u);  // flush results and sources
    const int n = t.n;
    alignas(64) float c[kMaxDim];
    for (int i = 0; i < t.m; ++i) {
        for (int j = 0; j < n; ++j) c[j] = std::fabs(t.c[i][j]) < 0x1p-126f ? 0.0f : t.c[i][j];
        for (int k = 0; k < t.k; k += 4) {
            const float a0 = t.a[k][i], a1 = t.a[k + 1][i], a2 = t.a[k + 2][i], a3 = t.a[k + 3][i];
#pragma GCC ivdep
            for (int j = 0; j < n; ++j) {
                const float s0 = a0 * t.b[k][j] + a1 * t.b[k + 1][j];
                const float s1 = a2 * t.b[k + 2][j] + a3 * t.b[k + 3][j];
                c[j] = c[j] + (s0 + s1);
            }
        }
        for (int j = 0; j < n; ++j) t.c[i][j] = c[j];
    }
}

void mfma_cdna3(Tile& t, int product_fraction, int group) {
    const MatrixMode mode;
    const int n = t.n, shift = 24 - product_fraction;
    for (int i = 0; i < t.m; ++i) {
        for (int k0 = 0; k0 < t.k; k0 += group) {
            int sum[kMaxDim], e_max[kMaxDim];
            truncated_sums(t, i, k0, k0 + group, 1, shift, sum, e_max);
            bool look = t.special;
            for (int j = 0; j < n; ++j) look |= (e_max[j] > 125) | !std::isfinite(t.c[i][j]);
            float decided_c[kMaxDim];
            if (look)
                for (int j = 0; j < n; ++j)
                    decided_c[j] =
                        decided(t, i, j, k0, k0 + group, t.c[i][j]) ? decide(t, i, j, k0, k0 + group, t.c[i][j]) : 0;
            alignas(32) float joined[kMaxDim];
            for (int j = 0; j < n; j += 4)
                _mm_store_ps(joined + j,
                             join4(_mm256_cvtepi32_pd(at(sum + j)), at(e_max + j), _mm_loadu_ps(&t.c[i][j]), false));
            for (int j = 0; j < n; ++j)
                t.c[i][j] = look && decided(t, i, j, k0, k0 + group, t.c[i][j]) ? decided_c[j] : joined[j];
        }
    }
}

void mfma_cdna3_fp8(Tile& t, int product_fraction) {
    const MatrixMode mode;
    const int n = t.n, shift = 24 - product_fraction;
    for (int i = 0; i < t.m; ++i) {
        for (int k0 = 0; k0 < t.k; k0 += 16) {
            int even[kMaxDim], e_even[kMaxDim], odd[kMaxDim], e_odd[kMaxDim];
            truncated_sums(t, i, k0, k0 + 16, 2, shift, even, e_even);
            truncated_sums(t, i, k0 + 1, k0 + 16, 2, shift, odd, e_odd);
            for (int j = 0; j < n; j += 4) {
                const __m128i e = _mm_max_epi32(at(e_even + j), at(e_odd + j));
                const __m256d dot =
                    _mm256_add_pd(floor_scaled(_mm256_cvtepi32_pd(at(even + j)), _mm_sub_epi32(at(e_even + j), e)),
                                  floor_scaled(_mm256_cvtepi32_pd(at(odd + j)), _mm_sub_epi32(at(e_odd + j), e)));
                alignas(16) float joined[4];
                _mm_store_ps(joined, join4(dot, e, _mm_loadu_ps(&t.c[i][j]), true));
                for (int q = 0; q < 4; ++q) {
                    float& c = t.c[i][j + q];
                    const bool by_special = (t.special || !std::isfinite(c)) && decided(t, i, j + q, k0, k0 + 16, c);
                    c = by_special ? decide(t, i, j + q, k0, k0 + 16, c) : joined[q];
                }
            }
        }
    }
}

void mfma_fma(Tile& t) {
    for (int i = 0; i < t.m; ++i)
        for (int j = 0; j < t.n; ++j)
            for (int k = 0; k < t.k; ++k) t.c[i][j] = std::fma(t.a[k][i], t.b[k][j], t.c[i][j]);
}

}  // namespace petit_emu
