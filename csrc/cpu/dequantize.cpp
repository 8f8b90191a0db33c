#include <cmath>

#include "numbers.hpp"
#include "pack.hpp"
#include "parallel.hpp"

namespace petit::cpu {
namespace {

// How one output type is made from an exact float64 product. `normal` is the same rounding for magnitudes that are
// known to be normal numbers of the type: a few integer operations.
template <int Mantissa, int Bias>
struct Half {
    using Bits = uint16_t;
    static constexpr Bits kSign = 0x8000;
    static constexpr double kLeast = Bias == 15 ? 0x1p-14 : 0x1p-126;
    static constexpr double kMost = Bias == 15 ? 0x1p15 : 0x1p127;
    static Bits any(double value) { return round_to_16_bits(value, Mantissa, Bias); }
    static Bits normal(double value) {
        constexpr int kDrop = 52 - Mantissa;
        const uint64_t bits = bits_as<uint64_t>(value);
        const uint64_t rounded = (bits + ((1ull << (kDrop - 1)) - 1) + ((bits >> kDrop) & 1)) >> kDrop;
        return static_cast<Bits>(rounded - (static_cast<uint64_t>(1023 - Bias) << Mantissa));
    }
};

struct Float {
    using Bits = uint32_t;
    static constexpr Bits kSign = 0x80000000u;
    static constexpr double kLeast = 0, kMost = 0;
    static Bits any(double value) { return bits_as<Bits>(static_cast<float>(value)); }
    static Bits normal(double value) { return any(value); }
};

struct Double {
    using Bits = uint64_t;
    static constexpr Bits kSign = 1ull << 63;
    static constexpr double kLeast = 0, kMost = 0;
    static Bits any(double value) { return bits_as<Bits>(value); }
    static Bits normal(double value) { return any(value); }
};

using BFloat16 = Half<7, 127>;
using Float16 = Half<10, 15>;

// Code, block scale and row scale multiply exactly in float64 (2 + 4 + 24 significant bits), so there is one rounding.
// A group has only eight magnitudes: they are rounded once, and its elements look them up.
template <class Type>
void dequantize_row(const WeightView& w, int64_t row, typename Type::Bits* out) {
    using Bits = typename Type::Bits;
    const int64_t group = group_size(w.format);
    const int64_t block = row / kRowBlock, r = row % kRowBlock;
    const uint8_t* units = w.weight + block * (w.k / 8) * 64 + 4 * r;
    const double row_scale =
        static_cast<double>(w.scale_of_row(row)) * (w.row_exponent ? power_of_two(w.row_exponent[row]) : 1.0);
    for (int64_t g = 0; g < w.k / group; ++g) {
        const double scale = scale_value(w.format, w.scale[(block * (w.k / group) + g) * kRowBlock + r]) * row_scale;
        const double magnitude = std::fabs(scale);
        const Bits flip = std::signbit(scale) ? Type::kSign : 0;
        Bits values[16];
        if (magnitude * kE2M1[1] >= Type::kLeast && magnitude * kE2M1[7] <= Type::kMost) {
            values[0] = 0;
            for (int i = 1; i < 8; ++i) values[i] = Type::normal(kE2M1[i] * magnitude);
        } else {
            for (int i = 0; i < 8; ++i) values[i] = Type::any(kE2M1[i] * magnitude);
        }
        for (int i = 0; i < 8; ++i) {
            values[i + 8] = static_cast<Bits>(values[i] ^ Type::kSign ^ flip);
            values[i] = static_cast<Bits>(values[i] ^ flip);
        }
        for (int64_t u = 0; u < group / 8; ++u, units += 64, out += 8) {
            uint32_t q;
            std::memcpy(&q, units, sizeof(q));
            for (int p = 0; p < 4; ++p) {
                out[2 * p] = values[(q >> (4 * p)) & 15];
                out[2 * p + 1] = values[(q >> (16 + 4 * p)) & 15];
            }
        }
    }
}

template <class Type>
void dequantize_all(const WeightView& w, void* out, int threads) {
    parallel_for(threads, w.n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            dequantize_row<Type>(w, row, static_cast<typename Type::Bits*>(out) + row * w.k);
        }
    });
}

}  // namespace

void dequantize(const WeightView& packed, void* out, OutType type, int threads) {
    switch (type) {
        case OutType::bf16:
            return dequantize_all<BFloat16>(packed, out, threads);
        case OutType::f16:
            return dequantize_all<Float16>(packed, out, threads);
        case OutType::f32:
            return dequantize_all<Float>(packed, out, threads);
        case OutType::f64:
            return dequantize_all<Double>(packed, out, threads);
    }
}

}  // namespace petit::cpu
