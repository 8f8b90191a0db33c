// Large M: weights back to 16 bits, row-major, for a vendor GEMM; and the step after it.
//
// dequantize: rows [n_begin, n_begin + rows) of W as E2M1 x block scale, exact, before the row scale (the same numbers
// the GEMM kernels multiply by). One wave per (row group, k-tile) step; reads 4 KB + scales, writes 16 KB in 16-byte pieces.
// finish: y = round(sum * row_scale * 2^row_exponent + bias) from the float32 product: the only rounding.
#pragma once
#include "epilogue.hpp"

namespace petit {

template <Format F, Type T, Core C, bool kExact>
PETIT_DEVICE void dequantize(const DequantizeArgs& a) {
    using W = Weights<F, C, kExact>;
    const u32 lane = lane_id();
    const u32 kt = __builtin_amdgcn_workgroup_id_x() * 4 + wave_id();
    if (kt >= a.k_tiles) return;
    const u64 step = static_cast<u64>(a.n_begin / kRowsPerGroup + __builtin_amdgcn_workgroup_id_y()) * a.k_tiles + kt;
    constexpr u32 kScaleBytes = W::kScaleDwords * 4;
    const Buffer weight = make_buffer(a.weight + step * kStepBytes, kStepBytes);
    const Buffer scale = make_buffer(a.scale + step * (kScaleBytes * kWave), kScaleBytes * kWave);
    u32 raw[W::kScaleDwords];
#pragma unroll
    for (int d = 0; d < W::kScaleDwords; ++d) raw[d] = load4<kStream>(scale, lane * kScaleBytes + d * 4, 0);
    W scales;
    bool more = false;
    scales.decode(raw, 0, more);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32x4 w = load16<kStream>(weight, lane * 16, j * 1024);
        const u32 row = __builtin_amdgcn_workgroup_id_y() * kRowsPerGroup + j * 16 + lane % 16;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            u32x4 v = scales.word(w[t], j, t);
            if constexpr (T == Type::kBf16 && C != Core::kConvertBf16) {
                bf16x8 b;
#pragma unroll
                for (int i = 0; i < 8; ++i) b[i] = static_cast<__bf16>(static_cast<float>(as<f16x8>(v)[i]));
                v = as<u32x4>(b);
            }
            const u32 k = kt * kTileK + lane / 16 * 32 + t * 8;
            if (row < a.rows && k < a.k)  // K is a multiple of 8
                *reinterpret_cast<u32x4*>(a.out + (static_cast<u64>(row) * a.k + k) * 2) = v;
        }
    }
}

template <Type T>
PETIT_DEVICE void finish(const FinishArgs& a) {
    const u32 n = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
    const u32 m = __builtin_amdgcn_workgroup_id_y();
    if (n >= a.n) return;
    const float scale = a.row_scale[n];
    const int e = a.row_exponent[n] + a.exponent + __builtin_amdgcn_frexp_expf(scale);
    float v = __builtin_amdgcn_ldexpf(a.sum[static_cast<u64>(m) * a.n + n] * __builtin_amdgcn_frexp_mantf(scale), e);
    if (a.bias) {
        v = add_to_odd(v, a.bias_f32 ? static_cast<const float*>(a.bias)[n]
                                     : static_cast<float>(static_cast<const Element<T>*>(a.bias)[n]));
    }
    static_cast<Element<T>*>(a.y)[static_cast<i64>(m) * a.y_stride + n] = static_cast<Element<T>>(v);
}

}  // namespace petit
