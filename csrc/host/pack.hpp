// Checkpoint tensors to the Petit CDNA layout, and back. The layout is that of csrc/device/layout.hpp (docs/layout.md):
//   weight [R][T][4 n-tiles][64 lanes][16 bytes], scale [R][T][64 lanes][1 or 2 dwords], row arrays [64 R]
// with R = ceil(n / 64) row groups and T = ceil(k / 128) k-tiles. Everything is on the host and threaded by row group.
#pragma once

#include <cstdint>

#include "../cpu/pack.hpp"

namespace petit::host {

using cpu::CheckpointView;
using cpu::Format;

constexpr int64_t kRowGroup = 64;
constexpr int64_t kTileK = 128;
constexpr int64_t kStepBytes = 4096;  // weights of one row group x k-tile

// A target and the order of the codes in a word: gfx950 takes plain order, or mask order for its fallback core.
enum class Target : int { gfx90a = 0, gfx942 = 1, gfx950 = 2, gfx950_mask = 3 };

// How scales are stored. An operand of the MFMA is code * 2^-field * scale.
struct Encoding {
    bool mask;  // codes in mask order
    bool e5m3;  // scale bytes are f16 bits >> 7 (else exponents), in rotated dwords
    int top;    // exponent that a row's largest scale gets
    int field;
};

Encoding encoding(Format format, Target target, bool exact);

struct PackedView {
    Format format;
    Target target;
    int64_t n, k;
    bool exact;
    uint8_t* weight;
    uint8_t* scale;
    int32_t* row_exponent;   // [64 R]
    const float* row_scale;  // [64 R]; read by dequantize only
};

int64_t row_groups(int64_t n);
int64_t k_tiles(int64_t k);
int64_t scale_bytes_per_step(Format format);

// First block (row, group) with a NaN scale over a non-zero code, or row -1: such a weight cannot be packed.
struct Block {
    int64_t row = -1, group = -1;
};
Block find_nan(const CheckpointView& source, int threads);

// Packs everything but the row scales. Returns whether every operand of every row is exact in the kernels of
// target.exact; if not (only possible for exact = false), what was written is not to be used: pack again with exact.
bool pack(const CheckpointView& source, const PackedView& target, int threads);

// Checkpoint codes [n, k/2] and scale bytes [n, k/group], contiguous, in canonical form: signs of scales folded into
// the codes; scales of empty MXFP4 blocks, which mean nothing, are 127.
void unpack(const PackedView& packed, uint8_t* weight, uint8_t* scale, int threads);

// What the kernels multiply by, row scale and exponent included, [n, k] contiguous, rounded once to the type.
void dequantize(const PackedView& packed, void* out, cpu::OutType type, int threads);

}  // namespace petit::host
