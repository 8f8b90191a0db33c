// Bit orders of the packed words: eight E2M1 codes, and four scales of a lane.
#pragma once

#include <array>
#include <cstdint>

namespace petit::host {

// Mask order serves the f16 core of csrc/device/arch/mask_core.hpp, which reads {q, q << 8, bitreverse q,
// bitreverse(q) << 8} & 0x8e008e00 as four pairs: the sign in bit 15 of a half, the other three bits in 11, 10, 9.
constexpr int mask_bit(int plain) {
    constexpr int kHalfBits[4] = {9, 10, 11, 15};
    const int nibble = plain / 4, pair = nibble / 2;
    const int shown = kHalfBits[plain % 4] + 16 * (nibble % 2);
    switch (pair) {
        case 0:
            return shown;
        case 1:
            return shown - 8;
        case 2:
            return 31 - shown;
        default:
            return 39 - shown;
    }
}

// What each byte of a word contributes to the permuted word.
struct WordTable {
    std::array<std::array<uint32_t, 256>, 4> byte{};

    constexpr explicit WordTable(bool to_mask) {
        int target[32]{};
        for (int plain = 0; plain < 32; ++plain) {
            if (to_mask) {
                target[plain] = mask_bit(plain);
            } else {
                target[mask_bit(plain)] = plain;
            }
        }
        for (int b = 0; b < 4; ++b)
            for (int v = 0; v < 256; ++v)
                for (int bit = 0; bit < 8; ++bit)
                    byte[b][v] |= static_cast<uint32_t>(v >> bit & 1) << target[8 * b + bit];
    }

    uint32_t operator()(uint32_t w) const {
        return byte[0][w & 255] | byte[1][w >> 8 & 255] | byte[2][w >> 16 & 255] | byte[3][w >> 24];
    }
};

inline constexpr WordTable kToMask{true};
inline constexpr WordTable kToPlain{false};

// Four E5M3 scales of n-tiles 0..3, placed so that one AND with 0x7f807f80 yields tiles 0 and 1 as f16 and, after a
// rotation by 8, tiles 2 and 3.
constexpr uint32_t rotate_left(uint32_t v, int bits) { return v << bits | v >> (32 - bits); }
constexpr uint32_t join_e5m3(const uint8_t (&s)[4]) {
    return rotate_left(s[0] | s[3] << 8 | s[1] << 16 | static_cast<uint32_t>(s[2]) << 24, 7);
}
constexpr void split_e5m3(uint32_t dword, uint8_t (&s)[4]) {
    const uint32_t v = rotate_left(dword, 25);
    s[0] = v & 255, s[3] = v >> 8 & 255, s[1] = v >> 16 & 255, s[2] = v >> 24;
}

}  // namespace petit::host
