// Picks the generation and composes it into `Weights<format, core, exact>`: how a wave turns packed words and scales
// into MFMA operands. Everything that differs between generations stays in this directory.
#pragma once

#if defined(__gfx90a__)
#include "gfx90a.hpp"
#elif defined(__gfx942__)
#include "gfx942.hpp"
#elif defined(__gfx950__)
#include "gfx950.hpp"
#else
#error "petit: unsupported target"
#endif

namespace petit {

enum class Format : int { kNvFp4 = 0, kMxFp4 = 1 };
enum class Type : int { kBf16 = 0, kF16 = 1 };

// kMask: bit masks (mask nibble order). kConvert: gfx950 conversion to f16, kConvertBf16: to bf16 (plain order).
enum class Core : int { kMask = 0, kConvert = 1, kConvertBf16 = 2 };

constexpr Core default_core(Format f, Type t) {
    if (!arch::kHasFp4Convert) return Core::kMask;
    return f == Format::kMxFp4 && t == Type::kBf16 ? Core::kConvertBf16 : Core::kConvert;
}

template <Core C>
PETIT_DEVICE f32x4 mma(u32x4 a, u32x4 b, f32x4 acc) {
#if defined(__gfx950__)
    if constexpr (C == Core::kConvertBf16) return arch::mma_bf16(a, b, acc);
#endif
    return arch::mma_f16(a, b, acc);
}

/// Unscaled f16 weights: E2M1 * 2^-14 for the mask core, E2M1 for the conversion.
template <Core C>
PETIT_DEVICE u32x4 expand(u32 q) {
#if defined(__gfx950__)
    if constexpr (C != Core::kMask) return arch::convert_f16(q, 1.0f);
#endif
    return arch::expand_mask(q);
}

/// Scales of one k-tile x four n-tiles and the dequantisation of a word with them.
/// kScaleDwords dwords a lane: NVFP4 has two (k halves of the lane's 32), MXFP4 one.
template <Format F, Core C, bool kExact>
struct Weights {
    static constexpr int kScaleDwords = F == Format::kNvFp4 ? 2 : 1;
    static constexpr bool kWindowed = F == Format::kMxFp4 && kExact;
    static constexpr bool kFused = F == Format::kMxFp4 && C != Core::kMask && !kExact;

    arch::ScaleE5M3x4 e5m3[kScaleDwords];
    _Float16 window[4];
    float power[4];

    /// A scale dword turned so that n-tile `first` (0 or 2) comes first.
    PETIT_DEVICE static u32 from_tile(u32 d, u32 first) {
        return kWindowed || kFused ? d >> (8 * first) : __builtin_rotateleft32(d, 4 * first);
    }

    template <int kTiles = 4>
    PETIT_DEVICE void decode(const u32* raw, [[maybe_unused]] int pass, [[maybe_unused]] bool& more) {
        if constexpr (kWindowed) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) window[j] = arch::window_scale((raw[0] >> (8 * j)) & 255u, pass, more);
        } else if constexpr (kFused) {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) power[j] = as<float>(((raw[0] >> (8 * j)) & 255u) << 23);
        } else {
#pragma unroll
            for (int d = 0; d < kScaleDwords; ++d) e5m3[d].decode(raw[d]);
        }
    }

    /// Word `t` (k = 8t .. 8t + 7 of the lane's 32) of n-tile `j` as 8 operand values.
    PETIT_DEVICE u32x4 word(u32 q, int j, int t) const {
#if defined(__gfx950__)
        if constexpr (kFused && C == Core::kConvertBf16) return arch::convert_bf16(q, power[j]);
        if constexpr (kFused && C == Core::kConvert) return arch::convert_f16(q, power[j]);
#endif
        u32x4 w = expand<C>(q);
        if constexpr (kExact && C == Core::kMask) w = arch::scale_f16(w, static_cast<_Float16>(16384.0f));
        if constexpr (kWindowed) return arch::scale_f16(w, window[j]);
        return arch::scale_f16(w, e5m3[F == Format::kNvFp4 ? t / 2 : 0].get(j));
    }
};

}  // namespace petit
