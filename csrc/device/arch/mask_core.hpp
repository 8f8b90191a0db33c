// The f16 core: FP4 -> f16 with bit masks and packed multiplies, on any CDNA generation.
//
// E2M1 (s ee m) lands in f16 bits 15 and 11..9: that f16 is exactly value * 2^-14 (E2M1's subnormal becomes an f16
// subnormal of the same form). The weights are stored so that four masks of one 32-bit word q give four f16 pairs:
//     q,  q << 8,  bitreverse(q),  bitreverse(q) << 8      each & 0x8e008e00
// which uses each of the 32 bits once: 7 instructions for 8 weights, and 4 v_pk_mul_f16 for the block scale.
#pragma once
#include "types.hpp"

namespace petit::arch {

constexpr u32 kFieldMask = 0x8e008e00u;

/// 8 weights (f16, value * 2^-14) of one word in mask order; pair p of the result is (k = 2p, 2p + 1).
PETIT_DEVICE u32x4 expand_mask(u32 q) {
    const u32 r = __builtin_bitreverse32(q);
    return u32x4{q & kFieldMask, (q << 8) & kFieldMask, r & kFieldMask, (r << 8) & kFieldMask};
}

PETIT_DEVICE u32x4 scale_f16(u32x4 w, _Float16 s) {
    const f16x2 ss{s, s};
    return u32x4{as<u32>(as<f16x2>(w[0]) * ss), as<u32>(as<f16x2>(w[1]) * ss), as<u32>(as<f16x2>(w[2]) * ss),
                 as<u32>(as<f16x2>(w[3]) * ss)};
}

/// Block scales of four n-tiles from one dword. A scale is an unsigned E5M3 byte, that is f16 bits >> 7; the four bytes
/// are placed so that one AND yields two of them as f16 and one rotate + AND the other two (3 instructions for 4).
struct ScaleE5M3x4 {
    f16x2 low, high;
    PETIT_DEVICE void decode(u32 d) {
        low = as<f16x2>(d & 0x7f807f80u);
        high = as<f16x2>(__builtin_rotateleft32(d, 8) & 0x7f807f80u);
    }
    PETIT_DEVICE _Float16 get(int tile) const { return tile < 2 ? low[tile] : high[tile - 2]; }
};

/// EXACT MXFP4: E8M0 bytes taken one window of 27 octaves at a time. Inside the window the scale is an f16 power of two
/// 2^-13..2^13 whose products with E2M1 are all normal; outside it is 0 and the weight belongs to another pass.
constexpr int kWindowOctaves = 27;
constexpr int kWindowTopByte = 255;  // the packer moves each row's largest scale here
PETIT_DEVICE _Float16 window_scale(u32 byte, int pass, bool& more) {
    const int field = static_cast<int>(byte) - (kWindowTopByte - kWindowOctaves * pass) + 28;
    more |= field < 2 && byte != 0;  // 0 marks a block without weights
    const u32 bits = field >= 2 && field <= 28 ? static_cast<u32>(field) << 10 : 0u;
    return as<_Float16>(static_cast<u16>(bits));
}

}  // namespace petit::arch
