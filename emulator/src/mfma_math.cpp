#include "mfma.hpp"

#include <algorithm>
#include <cmath>

namespace petit_emu {
namespace {

constexpr int kZeroExp = -999;

// floor(x * 2^s) for |x| < 2^53
inline double floor_scaled(double x, int s) {
    if (s < -200) s = -200;
    return std::floor(x * std::bit_cast<double>(u64(1023 + s) << 52));
}
inline double pow2(int e) { return std::ldexp(1.0, e); }

// dot: integer in units of 2^(e_dot - 24); adds it to c as the gfx942 datapath does.
inline float join(double dot, int e_dot, float c, bool drop_far_c) {
    const u32 cb = b32(c);
    const int ce = std::max<int>(int(cb >> 23 & 0xffu), 1) - 127;
    const double cm = std::copysign(double((cb & 0x7fffffu) | ((cb >> 23 & 0xffu) ? 0x800000u : 0u)), c);  // units of 2^(ce - 23)
    const int e_max = std::max(e_dot, ce);
    const double d = floor_scaled(dot, 9 - 1 + e_dot - e_max);       // units of 2^(e_max - 32)
    double s = floor_scaled(cm, 1 + ce - e_max);                     // units of 2^(e_max - 24)
    if (drop_far_c && ce < e_max - 25) s = 0;
    double sum = d + s * 256.0;
    if (sum == 0) return (std::signbit(d) && std::signbit(s)) ? -0.0f : 0.0f;
    // Keep 31 bits below the leading one, but never below 2^-157.
    const int lead = int(b64(sum) >> 52 & 0x7ffu) - 1023;
    const int drop = std::max(lead - 31, -157 - (e_max - 32));
    if (drop > 0) sum = std::floor(sum * pow2(-drop)) * pow2(drop);
    return static_cast<float>(sum * pow2(e_max - 32));
}

// With an Inf or NaN about, or a product that overflows f32 (it becomes Inf), those decide the result by themselves.
bool decided(const Tile& t, int i, int j, int k0, int k1, float c) {
    if (!std::isfinite(c)) return true;
    for (int k = k0; k < k1; ++k)
        if (!(std::fabs(double(t.a[i][k]) * double(t.b[k][j])) < 0x1p128)) return true;
    return false;
}
float decide(const Tile& t, int i, int j, int k0, int k1, float c) {
    double sum = c;
    for (int k = k0; k < k1; ++k) {
        const double p = double(t.a[i][k]) * double(t.b[k][j]);
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
        const i32 as = t.a_sig[i][k], ae = t.a_exp[i][k];
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
    const unsigned csr = _mm_getcsr();
    _mm_setcsr(_MM_MASK_MASK | 0x8040u);  // flush results and sources, RNE
    const int n = t.n;
    alignas(64) float c[kMaxDim];
    for (int i = 0; i < t.m; ++i) {
        for (int j = 0; j < n; ++j) c[j] = std::fabs(t.c[i][j]) < 0x1p-126f ? 0.0f : t.c[i][j];
        for (int k = 0; k < t.k; k += 4) {
            const float a0 = t.a[i][k], a1 = t.a[i][k + 1], a2 = t.a[i][k + 2], a3 = t.a[i][k + 3];
#pragma GCC ivdep
            for (int j = 0; j < n; ++j) {
                const float s0 = a0 * t.b[k][j] + a1 * t.b[k + 1][j];
                const float s1 = a2 * t.b[k + 2][j] + a3 * t.b[k + 3][j];
                c[j] = c[j] + (s0 + s1);
            }
        }
        for (int j = 0; j < n; ++j) t.c[i][j] = c[j];
    }
    _mm_setcsr(csr);
}

void mfma_cdna3(Tile& t, int product_fraction, int group) {
    const int n = t.n, shift = 24 - product_fraction;
    for (int i = 0; i < t.m; ++i) {
        for (int k0 = 0; k0 < t.k; k0 += group) {
            int sum[kMaxDim], e_max[kMaxDim];
            truncated_sums(t, i, k0, k0 + group, 1, shift, sum, e_max);
            for (int j = 0; j < n; ++j) {
                float& c = t.c[i][j];
                const bool look = t.special || e_max[j] > 125 || !std::isfinite(c);
                if (look && decided(t, i, j, k0, k0 + group, c)) c = decide(t, i, j, k0, k0 + group, c);
                else c = join(sum[j], e_max[j], c, false);
            }
        }
    }
}

void mfma_cdna3_fp8(Tile& t, int product_fraction) {
    const int n = t.n, shift = 24 - product_fraction;
    for (int i = 0; i < t.m; ++i) {
        for (int k0 = 0; k0 < t.k; k0 += 16) {
            int even[kMaxDim], e_even[kMaxDim], odd[kMaxDim], e_odd[kMaxDim];
            truncated_sums(t, i, k0, k0 + 16, 2, shift, even, e_even);
            truncated_sums(t, i, k0 + 1, k0 + 16, 2, shift, odd, e_odd);
            for (int j = 0; j < n; ++j) {
                float& c = t.c[i][j];
                if ((t.special || !std::isfinite(c)) && decided(t, i, j, k0, k0 + 16, c)) {
                    c = decide(t, i, j, k0, k0 + 16, c);
                    continue;
                }
                const int e = std::max(e_even[j], e_odd[j]);
                const double dot = floor_scaled(even[j], e_even[j] - e) + floor_scaled(odd[j], e_odd[j] - e);
                c = join(dot, e, c, true);
            }
        }
    }
}

void mfma_fma(Tile& t) {
    for (int i = 0; i < t.m; ++i)
        for (int j = 0; j < t.n; ++j)
            for (int k = 0; k < t.k; ++k) t.c[i][j] = std::fma(t.a[i][k], t.b[k][j], t.c[i][j]);
}

}  // namespace petit_emu
