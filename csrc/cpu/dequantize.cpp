#include <algorithm>

#include "numbers.hpp"
#include "pack.hpp"
#include "parallel.hpp"

namespace petit::cpu {
namespace {

void store(void* out, int64_t index, OutType type, double value) {
    if (type == OutType::f64) {
        static_cast<double*>(out)[index] = value;
    } else {
        store_number(out, index, static_cast<DType>(type), value);
    }
}

// Code, block scale and row scale multiply exactly in float64 (2 + 4 + 24 significant bits), so there is one rounding.
void dequantize_row(const WeightView& w, int64_t row, void* out, OutType type) {
    const int64_t group = group_size(w.format);
    const int64_t block = row / kRowBlock, r = row % kRowBlock;
    const double row_scale =
        static_cast<double>(w.row_scale[row]) * (w.row_exponent ? power_of_two(w.row_exponent[row]) : 1.0);
    for (int64_t g = 0; g < w.k / group; ++g) {
        const double scale = scale_value(w.format, w.scale[(block * (w.k / group) + g) * kRowBlock + r]) * row_scale;
        for (int64_t u = g * group / 8; u < (g + 1) * group / 8; ++u) {
            uint32_t q;
            std::memcpy(&q, w.weight + (block * (w.k / 8) + u) * 64 + 4 * r, sizeof(q));
            const int64_t at = row * w.k + 8 * u;
            for (int p = 0; p < 4; ++p) {
                store(out, at + 2 * p, type, kE2M1[(q >> (4 * p)) & 15] * scale);
                store(out, at + 2 * p + 1, type, kE2M1[(q >> (16 + 4 * p)) & 15] * scale);
            }
        }
    }
}

}  // namespace

void dequantize(const WeightView& packed, void* out, OutType type, int threads) {
    parallel_for(threads, packed.n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) dequantize_row(packed, row, out, type);
    });
}

}  // namespace petit::cpu
