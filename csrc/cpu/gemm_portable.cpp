// The kernel in plain C++, in float64: for any CPU, for weights whose range float32 sums cannot hold, and for single
// rows of activations of that kind. A panel of 16 rows x kPanel is decoded once per block of activation rows.
#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "numbers.hpp"
#include "parallel.hpp"

namespace petit::cpu {
namespace {

constexpr int64_t kPanel = 64;        // k decoded at a time: what fits the first-level cache
constexpr int64_t kActivations = 32;  // rows of x that share a decoded panel

// w[j][r] = value of row n0 + r at k0 + j, without row scale and exponent: exact.
void decode_panel(const WeightView& w, int64_t block, int64_t k0, int64_t k1, double (*out)[kRowBlock]) {
    const int64_t group = group_size(w.format);
    for (int64_t k = k0; k < k1; k += 8) {
        const uint8_t* unit = w.weight + (block * (w.k / 8) + k / 8) * 64;
        const uint8_t* scales = w.scale + (block * (w.k / group) + k / group) * kRowBlock;
        for (int64_t r = 0; r < kRowBlock; ++r) {
            uint32_t q;
            std::memcpy(&q, unit + 4 * r, sizeof(q));
            const double scale = scale_value(w.format, scales[r]);
            for (int p = 0; p < 4; ++p) {
                out[k - k0 + 2 * p][r] = static_cast<double>(kE2M1[(q >> (4 * p)) & 15]) * scale;
                out[k - k0 + 2 * p + 1][r] = static_cast<double>(kE2M1[(q >> (16 + 4 * p)) & 15]) * scale;
            }
        }
    }
}

void load_activations(const GemmProblem& p, DType dtype, int64_t row, int64_t k0, int64_t k1, double* out) {
    const int64_t base = (p.x_rows ? p.x_rows[row] : row) * p.x_stride;
    for (int64_t k = k0; k < k1; ++k) out[k - k0] = load_number(p.x, base + k, dtype);
}

void run_row_block(const GemmProblem& p, int64_t block, DType x_dtype, DType y_dtype) {
    const WeightView& w = p.w;
    const int64_t n0 = block * kRowBlock;
    const int64_t rows = std::min(kRowBlock, w.n - n0);
    double panel[kPanel][kRowBlock];
    double x[kPanel];
    double total[kActivations][kRowBlock];
    for (int64_t m0 = 0; m0 < p.m; m0 += kActivations) {
        const int64_t m1 = std::min(p.m, m0 + kActivations);
        std::fill(&total[0][0], &total[0][0] + kActivations * kRowBlock, 0.0);
        for (int64_t k0 = 0; k0 < w.k; k0 += kPanel) {
            const int64_t k1 = std::min(w.k, k0 + kPanel);
            decode_panel(w, block, k0, k1, panel);
            for (int64_t m = m0; m < m1; ++m) {
                load_activations(p, x_dtype, m, k0, k1, x);
                double sum[kRowBlock] = {};
                for (int64_t j = 0; j < k1 - k0; ++j) {
                    for (int64_t r = 0; r < kRowBlock; ++r) sum[r] += x[j] * panel[j][r];
                }
                for (int64_t r = 0; r < kRowBlock; ++r) total[m - m0][r] += sum[r];
            }
        }
        for (int64_t m = m0; m < m1; ++m) {
            for (int64_t r = 0; r < rows; ++r) {
                double y = total[m - m0][r] * w.scale_of_row(n0 + r);
                if (w.row_exponent) y *= power_of_two(w.row_exponent[n0 + r]);
                if (p.bias) y += load_number(p.bias, n0 + r, p.bias_dtype);
                store_number(p.y, m * p.y_stride + n0 + r, y_dtype, y);
            }
        }
    }
}

}  // namespace

void grouped_gemm_portable(const GemmProblem* problems, int64_t count, DType x_dtype, DType y_dtype, int threads) {
    std::vector<int64_t> first(static_cast<size_t>(count) + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
        first[i + 1] = first[i] + (problems[i].m > 0 ? padded_rows(problems[i].w.n) / kRowBlock : 0);
    }
    parallel_for(threads, first.back(), [&](int64_t begin, int64_t end) {
        int64_t i = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
        for (int64_t task = begin; task < end; ++task) {
            while (task >= first[i + 1]) ++i;
            run_row_block(problems[i], task - first[i], x_dtype, y_dtype);
        }
    });
}

}  // namespace petit::cpu
