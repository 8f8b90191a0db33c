// gfx90a (MI200). 16x16x16 MFMA only, and its operands are flushed when subnormal: the packer guarantees that every
// scaled weight is a normal f16, and rows are scaled so that every activation is.
#pragma once
#include "mask_core.hpp"

namespace petit::arch {

constexpr bool kPlainNibbles = false;
constexpr bool kHasFp4Convert = false;

/// acc += A(16 x 32) B(32 x 16); each lane holds 8 k of row / column lane % 16, in the same order for both.
PETIT_DEVICE f32x4 mma_f16(u32x4 a, u32x4 b, f32x4 acc) {
    acc =
        __builtin_amdgcn_mfma_f32_16x16x16f16(as<f16x4>(u32x2{a[0], a[1]}), as<f16x4>(u32x2{b[0], b[1]}), acc, 0, 0, 0);
    return __builtin_amdgcn_mfma_f32_16x16x16f16(as<f16x4>(u32x2{a[2], a[3]}), as<f16x4>(u32x2{b[2], b[3]}), acc, 0, 0,
                                                 0);
}

}  // namespace petit::arch
