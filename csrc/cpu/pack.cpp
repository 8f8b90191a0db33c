// The canonical form: a negative block scale gives its sign to the codes; a NaN scale over an all-zero block becomes
// neutral; a NaN scale over anything else is refused. Everything else survives the round trip bit for bit.
#include "pack.hpp"

#include <algorithm>
#include <atomic>

#include "numbers.hpp"
#include "parallel.hpp"

namespace petit::cpu {
namespace {

constexpr int kWindowLow = 67;  // MXFP4 bytes that float32 products and sums hold with room to spare
constexpr int kWindowHigh = 187;

constexpr bool is_nan(Format format, uint8_t scale) {
    return format == Format::nvfp4 ? (scale & 0x7f) == 0x7f : scale == 0xff;
}

bool all_zero(const uint8_t* codes, int64_t bytes) {
    uint8_t any = 0;
    for (int64_t i = 0; i < bytes; ++i) any |= codes[i];
    return (any & 0x77) == 0;
}

// E4M3 magnitude (7 bits, not NaN) to E5M3 with subnormals normalised.
uint8_t e4m3_to_e5m3(uint8_t scale) {
    if (scale >= 8) return static_cast<uint8_t>(scale + (9 << 3));
    if (scale == 0) return 0;
    const int top = scale >= 4 ? 2 : scale >= 2 ? 1 : 0;
    return static_cast<uint8_t>(((top + 7) << 3) | ((scale << (3 - top)) & 7));
}

uint8_t e5m3_to_e4m3(uint8_t c) {
    if (c >= (10 << 3)) return static_cast<uint8_t>(c - (9 << 3));
    if (c == 0) return 0;
    return static_cast<uint8_t>((8 | (c & 7)) >> (10 - (c >> 3)));
}

// Nibbles 0..7 of a checkpoint dword to the packed order (even k in the low half, odd k in the high half), and back.
uint32_t even(uint32_t v) {
    v &= 0x0f0f0f0fu;
    v = (v | (v >> 4)) & 0x00ff00ffu;
    return (v | (v >> 8)) & 0xffffu;
}

uint32_t spread(uint32_t v) {
    v = (v | (v << 8)) & 0x00ff00ffu;
    return (v | (v << 4)) & 0x0f0f0f0fu;
}

uint32_t to_packed(uint32_t v) { return even(v) | (even(v >> 4) << 16); }

uint32_t from_packed(uint32_t v) { return spread(v & 0xffffu) | (spread(v >> 16) << 4); }

struct RowPlan {
    int64_t nan_group = -1;
    int exponent = 0;
    bool exact = false;
};

RowPlan plan_row(const CheckpointView& s, int64_t row) {
    RowPlan plan;
    const int64_t group = group_size(s.format);
    const uint8_t* scales = s.scale + row * s.scale_stride;
    const uint8_t* codes = s.weight + row * s.weight_stride;
    int low = 255, high = -1;
    bool outside = false;
    for (int64_t g = 0; g < s.k / group; ++g) {
        const uint8_t c = scales[g];
        const bool nan = is_nan(s.format, c);
        const bool odd = s.format == Format::mxfp4 && (c < kWindowLow || c > kWindowHigh);
        if ((nan || odd) && all_zero(codes + g * group / 2, group / 2)) continue;
        if (nan) {
            plan.nan_group = g;
            return plan;
        }
        outside |= odd;
        low = std::min<int>(low, c);
        high = std::max<int>(high, c);
    }
    if (!outside) return plan;
    if (high - low <= kWindowHigh - kWindowLow) {  // zero blocks inside the window may widen it: look again without
        plan.exponent = low < kWindowLow ? low - kWindowLow : high - kWindowHigh;
        return plan;
    }
    low = 255, high = -1;
    for (int64_t g = 0; g < s.k / group; ++g) {
        if (all_zero(codes + g * group / 2, group / 2)) continue;
        low = std::min<int>(low, scales[g]);
        high = std::max<int>(high, scales[g]);
    }
    plan.exact = high - low > kWindowHigh - kWindowLow;
    if (!plan.exact) plan.exponent = low < kWindowLow ? low - kWindowLow : high - kWindowHigh;
    return plan;
}

// One 16-row block. Rows beyond n read nothing and become neutral.
void pack_block(const CheckpointView& s, const PackedView& t, int64_t block) {
    const int64_t group = group_size(s.format);
    const int64_t groups = s.k / group;
    const int64_t n0 = block * kRowBlock;
    const int64_t rows = std::min(kRowBlock, s.n - n0);
    const uint8_t neutral = s.format == Format::nvfp4 ? 0 : 127;
    uint8_t* weight = t.weight + block * (s.k / 8) * 64;
    uint8_t* scale = t.scale + block * groups * kRowBlock;
    for (int64_t g = 0; g < groups; ++g, scale += kRowBlock) {
        uint32_t sign[kRowBlock] = {};
        for (int64_t r = 0; r < rows; ++r) {
            const uint8_t c = s.scale[(n0 + r) * s.scale_stride + g];
            if (is_nan(s.format, c)) {
                scale[r] = neutral;
            } else if (s.format == Format::nvfp4) {
                scale[r] = e4m3_to_e5m3(c & 0x7f);
                sign[r] = c & 0x80 ? 0x88888888u : 0;
            } else {
                const int shift = t.row_exponent ? t.row_exponent[n0 + r] : 0;
                const uint8_t* codes = s.weight + (n0 + r) * s.weight_stride + g * group / 2;
                scale[r] = static_cast<uint8_t>(shift != 0 && !all_zero(codes, group / 2) ? c - shift : c);
            }
        }
        for (int64_t r = rows; r < kRowBlock; ++r) scale[r] = neutral;
        for (int64_t u = 0; u < group / 8; ++u, weight += 64) {
            const uint8_t* codes = s.weight + n0 * s.weight_stride + g * group / 2 + 4 * u;
            uint32_t unit[kRowBlock] = {};
            for (int64_t r = 0; r < rows; ++r) std::memcpy(&unit[r], codes + r * s.weight_stride, 4);
            for (int64_t r = 0; r < kRowBlock; ++r) unit[r] = to_packed(unit[r] ^ sign[r]);
            std::memcpy(weight, unit, 64);
        }
    }
}

void unpack_block(const WeightView& w, int64_t block, uint8_t* weight, uint8_t* scale) {
    const int64_t group = group_size(w.format);
    const int64_t groups = w.k / group;
    const int64_t n0 = block * kRowBlock;
    const int64_t rows = std::min(kRowBlock, w.n - n0);
    for (int64_t u = 0; u < w.k / 8; ++u) {
        uint32_t unit[kRowBlock];
        std::memcpy(unit, w.weight + (block * (w.k / 8) + u) * 64, 64);
        for (int64_t r = 0; r < rows; ++r) {
            const uint32_t codes = from_packed(unit[r]);
            std::memcpy(weight + (n0 + r) * (w.k / 2) + 4 * u, &codes, 4);
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        const int shift = w.row_exponent ? w.row_exponent[n0 + r] : 0;
        for (int64_t g = 0; g < groups; ++g) {
            const uint8_t c = w.scale[(block * groups + g) * kRowBlock + r];
            const uint8_t* codes = weight + (n0 + r) * (w.k / 2) + g * group / 2;
            uint8_t& out = scale[(n0 + r) * groups + g];
            if (w.format == Format::nvfp4) {
                out = e5m3_to_e4m3(c);
            } else {  // a zero block keeps its byte whatever the row's shift, which may not fit it
                out = static_cast<uint8_t>(shift != 0 && !all_zero(codes, group / 2) ? c + shift : c);
            }
        }
    }
}

}  // namespace

PackPlan plan_packing(const CheckpointView& source, int8_t* row_exponent, int threads) {
    std::atomic<int64_t> nan_row{source.n};
    std::atomic<bool> shifted{false}, exact{false};
    const bool mxfp4 = source.format == Format::mxfp4;
    parallel_for(threads, source.n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const RowPlan plan = plan_row(source, row);
            if (plan.nan_group >= 0) {
                int64_t seen = nan_row.load();
                while (row < seen && !nan_row.compare_exchange_weak(seen, row)) {
                }
            }
            if (plan.exponent != 0) shifted = true;
            if (plan.exact) exact = true;
            if (mxfp4) row_exponent[row] = static_cast<int8_t>(plan.exponent);  // at most 67 either way
        }
    });
    PackPlan plan;
    if (nan_row < source.n) {
        plan.nan_row = nan_row;
        plan.nan_group = plan_row(source, nan_row).nan_group;
    }
    plan.exact = exact;
    plan.shifted = shifted && !exact;
    if (mxfp4) std::fill(row_exponent + (exact ? 0 : source.n), row_exponent + padded_rows(source.n), int8_t{0});
    return plan;
}

void pack(const CheckpointView& source, const PackedView& target, int threads) {
    parallel_for(threads, padded_rows(source.n) / kRowBlock, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) pack_block(source, target, block);
    });
}

void unpack(const WeightView& packed, uint8_t* weight, uint8_t* scale, int threads) {
    parallel_for(threads, padded_rows(packed.n) / kRowBlock, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) unpack_block(packed, block, weight, scale);
    });
}

}  // namespace petit::cpu
