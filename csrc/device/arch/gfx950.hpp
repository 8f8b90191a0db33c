// gfx950 (MI350). 16x16x32 MFMA and FP4 conversions with a fused power-of-two scale. The conversion reads plain nibble
// order (byte j = k 2j low, 2j + 1 high) and uses only the exponent of its scale: right for E8M0, wrong for E4M3.
#pragma once
#include "mask_core.hpp"

namespace petit::arch {

constexpr bool kPlainNibbles = true;
constexpr bool kHasFp4Convert = true;

PETIT_DEVICE f32x4 mma_f16(u32x4 a, u32x4 b, f32x4 acc) {
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(as<f16x8>(a), as<f16x8>(b), acc, 0, 0, 0);
}
PETIT_DEVICE f32x4 mma_bf16(u32x4 a, u32x4 b, f32x4 acc) {
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(as<bf16x8>(a), as<bf16x8>(b), acc, 0, 0, 0);
}

/// 8 weights * scale in f16 / bf16; scale must be a power of two.
PETIT_DEVICE u32x4 convert_f16(u32 q, float scale) {
    return u32x4{as<u32>(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(q, scale, 0)),
                 as<u32>(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(q, scale, 1)),
                 as<u32>(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(q, scale, 2)),
                 as<u32>(__builtin_amdgcn_cvt_scalef32_pk_f16_fp4(q, scale, 3))};
}
PETIT_DEVICE u32x4 convert_bf16(u32 q, float scale) {
    return u32x4{as<u32>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(q, scale, 0)),
                 as<u32>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(q, scale, 1)),
                 as<u32>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(q, scale, 2)),
                 as<u32>(__builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(q, scale, 3))};
}

}  // namespace petit::arch
