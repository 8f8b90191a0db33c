// The number windows. A row's scales are moved by a power of two so that the largest sits just below what f16 can take;
// the row exponent undoes it in float32. Whether the rest of the row is then exact is proved block by block:
//   gfx90a          every operand a normal f16 (its MFMA flushes subnormals)
//   gfx942, gfx950  every operand a multiple of 2^-24
//   fused MXFP4     every conversion result a normal f16
// A row that does not fit makes the layer EXACT: E8M0 bytes with the row's largest at 255, taken window by window, or
// (NVFP4) operands without the 2^-14 of the mask field, whose window holds every E4M3 row.
#include "pack.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "../cpu/numbers.hpp"
#include "../cpu/parallel.hpp"
#include "words.hpp"

namespace petit::host {
namespace {

constexpr int kWindowTop = 255;  // EXACT MXFP4: the byte of a row's largest scale
constexpr int kFusedTop = 140;   // fused MXFP4: 2^13, so that 6 * 2^13 < 65504
constexpr int kNone = -1000;     // exponent of a row without scales

bool is_nan(Format format, uint8_t scale) { return format == Format::nvfp4 ? (scale & 0x7f) == 0x7f : scale == 0xff; }

bool all_zero(const uint8_t* codes, int64_t bytes) {
    uint8_t any = 0;
    for (int64_t i = 0; i < bytes; ++i) any |= codes[i];
    return (any & 0x77) == 0;
}

// An E4M3 magnitude as (8 + fraction) / 8 * 2^exponent; the byte is not 0 and not NaN.
struct Scale {
    int exponent, fraction;
};
Scale split_e4m3(uint8_t c) {
    if (c >= 8) return {(c >> 3) - 7, c & 7};
    const int top = c >= 4 ? 2 : c >= 2 ? 1 : 0;
    return {top - 9, (c << (3 - top)) & 7};
}

// Smallest non-zero |code| of a block times two: 1 is 0.5, 12 is 6. 0 if there is none.
int smallest_doubled(const uint8_t* codes, int64_t bytes) {
    constexpr int kDoubled[8] = {99, 1, 2, 3, 4, 6, 8, 12};
    int least = 99;
    for (int64_t i = 0; i < bytes; ++i) least = std::min({least, kDoubled[codes[i] & 7], kDoubled[codes[i] >> 4 & 7]});
    return least == 99 ? 0 : least;
}

// One row's scales as they will be stored, and its exponent.
struct Row {
    int exponent = 0;
    bool fits = true;
};

Row encode_nvfp4(const CheckpointView& s, int64_t row, Target target, const Encoding& e, uint8_t* out) {
    const int64_t groups = s.k / 16;
    const uint8_t* scales = s.scale + row * s.scale_stride;
    const uint8_t* codes = s.weight + row * s.weight_stride;
    uint8_t largest = 0;
    for (int64_t g = 0; g < groups; ++g) {
        const uint8_t c = scales[g] & 0x7f;
        if (c != 0x7f) largest = std::max(largest, c);
    }
    const int top = largest == 0 ? 0 : split_e4m3(largest).exponent;
    Row result{top - e.top + e.field, true};
    for (int64_t g = 0; g < groups; ++g) {
        const uint8_t c = scales[g] & 0x7f;
        if (c == 0 || c == 0x7f) {
            out[g] = 0;
            continue;
        }
        const Scale v = split_e4m3(c);
        const int stored = v.exponent - top + e.top;  // -5 .. 15: E4M3 spans 17 octaves
        out[g] = static_cast<uint8_t>((stored + 15) << 3 | v.fraction);
        // Only the fast mask core of gfx90a can lose something: code * (8 + fraction) / 8 * 2^(stored - 14) < 2^-14.
        if (target == Target::gfx90a && e.field == 14 && stored < 1) {
            const int64_t product = static_cast<int64_t>(smallest_doubled(codes + g * 8, 8)) * (8 + v.fraction);
            if (product != 0 && product < (16ll << -stored)) result.fits = false;
        }
    }
    return result;
}

Row encode_mxfp4(const CheckpointView& s, int64_t row, Target target, const Encoding& e, bool exact, uint8_t* out) {
    const int64_t groups = s.k / 32;
    const uint8_t* scales = s.scale + row * s.scale_stride;
    const uint8_t* codes = s.weight + row * s.weight_stride;
    int top = kNone;
    for (int64_t g = 0; g < groups; ++g) {
        out[g] = all_zero(codes + g * 16, 16) ? 0 : 1;
        if (out[g]) top = std::max(top, scales[g] - 127);
    }
    if (top == kNone) top = 0;
    Row result{top - e.top + e.field, true};
    for (int64_t g = 0; g < groups; ++g) {
        if (!out[g]) continue;
        const int below = scales[g] - 127 - top;  // <= 0
        const int stored = below + e.top;
        if (!e.e5m3) {
            const int byte = below + (exact ? kWindowTop : kFusedTop);
            out[g] = static_cast<uint8_t>(std::max(byte, 0));
            if (!exact && stored - 1 < -14) result.fits = false;
            continue;
        }
        if (stored < -14) {  // not even the scale is a normal f16
            out[g] = 0;
            result.fits = false;
            continue;
        }
        out[g] = static_cast<uint8_t>((stored + 15) << 3);
        const bool always = target == Target::gfx90a ? stored >= 1 : stored - e.field - 1 >= -24;  // even for 0.5
        if (!always) {
            const int least = smallest_doubled(codes + g * 16, 16);
            const int exponent = (least == 1 ? -1 : least < 4 ? 0 : least < 8 ? 1 : 2) + stored - e.field;
            if (exponent < -14) result.fits = false;
        }
    }
    return result;
}

int64_t group_of(Format format) { return cpu::group_size(format); }

// Packs one row group. `stored` is scratch, [64][k / group].
bool pack_group(const CheckpointView& s, const PackedView& t, const Encoding& e, int64_t group, uint8_t* stored) {
    const int64_t size = group_of(s.format), blocks = s.k / size, tiles = k_tiles(s.k);
    const int64_t n0 = group * kRowGroup, rows = std::min(kRowGroup, s.n - n0);
    bool fits = true;
    for (int64_t r = 0; r < rows; ++r) {
        const Row row = s.format == Format::nvfp4 ? encode_nvfp4(s, n0 + r, t.target, e, stored + r * blocks)
                                                  : encode_mxfp4(s, n0 + r, t.target, e, t.exact, stored + r * blocks);
        t.row_exponent[n0 + r] = row.exponent;
        fits &= row.fits;
    }
    for (int64_t r = rows; r < kRowGroup; ++r) t.row_exponent[n0 + r] = 0;

    const int64_t dwords = 32 / size;
    uint8_t* weight = t.weight + group * tiles * kStepBytes;
    uint8_t* scale = t.scale + group * tiles * scale_bytes_per_step(s.format);
    for (int64_t kt = 0; kt < tiles; ++kt) {
        for (int64_t j = 0; j < 4; ++j) {
            for (int64_t lane = 0; lane < 64; ++lane, weight += 16) {
                const int64_t row = j * 16 + lane % 16, k0 = kt * kTileK + lane / 16 * 32;
                uint32_t word[4] = {};
                if (row < rows && k0 < s.k) {
                    const uint8_t* codes = s.weight + (n0 + row) * s.weight_stride + k0 / 2;
                    std::memcpy(word, codes, std::min<int64_t>(16, (s.k - k0) / 2));
                    if (s.format == Format::nvfp4) {
                        const uint8_t* scales = s.scale + (n0 + row) * s.scale_stride + k0 / 16;
                        for (int64_t h = 0; h < 2 && k0 + 16 * h < s.k; ++h) {
                            if (scales[h] & 0x80) word[2 * h] ^= 0x88888888u, word[2 * h + 1] ^= 0x88888888u;
                        }
                    }
                    if (e.mask)
                        for (uint32_t& w : word) w = kToMask(w);
                }
                std::memcpy(weight, word, 16);
            }
        }
        for (int64_t lane = 0; lane < 64; ++lane) {
            for (int64_t d = 0; d < dwords; ++d, scale += 4) {
                const int64_t block = (kt * kTileK + lane / 16 * 32) / size + d;
                uint8_t four[4] = {};
                for (int64_t j = 0; j < 4; ++j) {
                    const int64_t row = j * 16 + lane % 16;
                    if (row < rows && block < blocks) four[j] = stored[row * blocks + block];
                }
                uint32_t dword;
                std::memcpy(&dword, four, 4);
                if (e.e5m3) dword = join_e5m3(four);
                std::memcpy(scale, &dword, 4);
            }
        }
    }
    return fits;
}

// Scale byte as stored of (row in group, block).
uint8_t stored_scale(const PackedView& p, const Encoding& e, int64_t group, int64_t row, int64_t block) {
    const int64_t size = group_of(p.format), k0 = block * size, dwords = 32 / size;
    const int64_t lane = k0 % kTileK / 32 * 16 + row % 16;
    const uint8_t* at = p.scale + (group * k_tiles(p.k) + k0 / kTileK) * scale_bytes_per_step(p.format) +
                        (lane * dwords + k0 % 32 / size) * 4;
    if (!e.e5m3) return at[row / 16];
    uint32_t dword;
    std::memcpy(&dword, at, 4);
    uint8_t four[4];
    split_e5m3(dword, four);
    return four[row / 16];
}

// Codes of 32 k of a row as a checkpoint has them.
void load_codes(const PackedView& p, const Encoding& e, int64_t group, int64_t row, int64_t k0, uint32_t (&word)[4]) {
    const int64_t lane = k0 % kTileK / 32 * 16 + row % 16;
    const uint8_t* at = p.weight + (group * k_tiles(p.k) + k0 / kTileK) * kStepBytes + row / 16 * 1024 + lane * 16;
    std::memcpy(word, at, 16);
    if (e.mask)
        for (uint32_t& w : word) w = kToPlain(w);
}

// The stored scale times 2^(row exponent - field): exponent and fraction of the true one; fraction -1 means zero.
Scale true_scale(const PackedView& p, const Encoding& e, uint8_t stored, int32_t row_exponent) {
    if (stored == 0) return {0, -1};
    if (!e.e5m3) return {stored - (p.exact ? kWindowTop : kFusedTop) + e.top - e.field + row_exponent, 0};
    return {(stored >> 3) - 15 - e.field + row_exponent, stored & 7};
}

uint8_t to_e4m3(Scale v) {
    if (v.fraction < 0) return 0;
    if (v.exponent >= -6) return static_cast<uint8_t>((v.exponent + 7) << 3 | v.fraction);
    return static_cast<uint8_t>((8 | v.fraction) >> (-6 - v.exponent));
}

}  // namespace

int64_t row_groups(int64_t n) { return (n + kRowGroup - 1) / kRowGroup; }
int64_t k_tiles(int64_t k) { return (k + kTileK - 1) / kTileK; }
int64_t scale_bytes_per_step(Format format) { return format == Format::nvfp4 ? 512 : 256; }

Encoding encoding(Format format, Target target, bool exact) {
    const bool mask = target != Target::gfx950;
    if (format == Format::mxfp4 && (exact || !mask)) return {mask, false, 13, 0};  // windowed, or fused
    if (mask && !exact) return {true, true, 15, 14};
    return {mask, true, 12, 0};  // 6 * 1.875 * 2^12 < 65504
}

Block find_nan(const CheckpointView& s, int threads) {
    const int64_t size = group_of(s.format), blocks = s.k / size;
    auto first_in = [&](int64_t row) {
        for (int64_t g = 0; g < blocks; ++g) {
            if (is_nan(s.format, s.scale[row * s.scale_stride + g]) &&
                !all_zero(s.weight + row * s.weight_stride + g * size / 2, size / 2))
                return g;
        }
        return int64_t{-1};
    };
    std::atomic<int64_t> found{s.n};
    cpu::parallel_for(threads, s.n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end && row < found.load(); ++row) {
            if (first_in(row) < 0) continue;
            int64_t seen = found.load();
            while (row < seen && !found.compare_exchange_weak(seen, row)) {
            }
        }
    });
    return found < s.n ? Block{found, first_in(found)} : Block{};
}

bool pack(const CheckpointView& source, const PackedView& target, int threads) {
    const Encoding e = encoding(source.format, target.target, target.exact);
    const int64_t blocks = source.k / group_of(source.format);
    std::atomic<bool> fits{true};
    cpu::parallel_for(threads, row_groups(source.n), [&](int64_t begin, int64_t end) {
        std::vector<uint8_t> stored(kRowGroup * blocks);
        for (int64_t group = begin; group < end; ++group)
            if (!pack_group(source, target, e, group, stored.data())) fits = false;
    });
    return fits;
}

void unpack(const PackedView& p, uint8_t* weight, uint8_t* scale, int threads) {
    const Encoding e = encoding(p.format, p.target, p.exact);
    const int64_t blocks = p.k / group_of(p.format);
    cpu::parallel_for(threads, p.n, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const int64_t group = n / kRowGroup, row = n % kRowGroup;
            for (int64_t k0 = 0; k0 < p.k; k0 += 32) {
                uint32_t word[4];
                load_codes(p, e, group, row, k0, word);
                std::memcpy(weight + (n * p.k + k0) / 2, word, std::min<int64_t>(16, (p.k - k0) / 2));
            }
            for (int64_t g = 0; g < blocks; ++g) {
                const Scale v = true_scale(p, e, stored_scale(p, e, group, row, g), p.row_exponent[n]);
                const int byte = p.format == Format::nvfp4 ? to_e4m3(v) : v.fraction < 0 ? 127 : v.exponent + 127;
                scale[n * blocks + g] = static_cast<uint8_t>(byte);
            }
        }
    });
}

void dequantize(const PackedView& p, void* out, cpu::OutType type, int threads) {
    const Encoding e = encoding(p.format, p.target, p.exact);
    const int64_t size = group_of(p.format);
    cpu::parallel_for(threads, p.n, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const int64_t group = n / kRowGroup, row = n % kRowGroup;
            for (int64_t k0 = 0; k0 < p.k; k0 += size) {
                uint32_t word[4];
                load_codes(p, e, group, row, k0 / 32 * 32, word);
                const Scale v = true_scale(p, e, stored_scale(p, e, group, row, k0 / size), p.row_exponent[n]);
                const double factor = v.fraction < 0 ? 0.0
                                                     : (1.0 + 0.125 * v.fraction) * cpu::power_of_two(v.exponent) *
                                                           static_cast<double>(p.row_scale[n]);
                for (int64_t i = 0; i < size; ++i) {
                    const int64_t k = k0 + i;
                    const double value = cpu::kE2M1[word[k % 32 / 8] >> (4 * (k % 8)) & 15] * factor;
                    const int64_t at = n * p.k + k;
                    if (type == cpu::OutType::f64) {
                        static_cast<double*>(out)[at] = value;
                    } else {
                        cpu::store_number(out, at, static_cast<cpu::DType>(type), value);
                    }
                }
            }
        }
    });
}

}  // namespace petit::host
