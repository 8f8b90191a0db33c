// What happens to finished sums: cross-workgroup reduction when a tile was cut, then scale, bias, one rounding, store.
#pragma once
#include "layout.hpp"

namespace petit {

template <Type T>
struct ElementOf {
    using type = __bf16;
};
template <>
struct ElementOf<Type::kF16> {
    using type = _Float16;
};
template <Type T>
using Element = typename ElementOf<T>::type;

/// v * 2^e, element by element.
PETIT_DEVICE f32x4 shifted(f32x4 v, int e) {
    return f32x4{__builtin_amdgcn_ldexpf(v[0], e), __builtin_amdgcn_ldexpf(v[1], e), __builtin_amdgcn_ldexpf(v[2], e),
                 __builtin_amdgcn_ldexpf(v[3], e)};
}

/// Scale, exponent and bias of four output columns n .. n + 3, for sums kept times 2^sum_shift. The scale's own exponent joins the integer ones, so no
/// intermediate leaves float32's range unless the result does.
struct Columns {
    f32x4 mantissa, bias;
    i32 exponent[4];
};

template <Type T>
PETIT_DEVICE Columns load_columns(const GemmArgs& a, u32 n, int sum_shift) {
    Columns c;
    // The packed row arrays are padded to whole row groups: reading four is always allowed there.
    const f32x4 scale = *reinterpret_cast<const f32x4*>(a.row_scale + n);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        c.mantissa[i] = __builtin_amdgcn_frexp_mantf(scale[i]);
        c.exponent[i] = a.row_exponent[n + i] + __builtin_amdgcn_frexp_expf(scale[i]) - sum_shift;
        c.bias[i] = 0.0f;
        if (a.bias && n + i < a.n) {
            c.bias[i] = a.bias_f32 ? static_cast<const float*>(a.bias)[n + i]
                                   : static_cast<float>(static_cast<const Element<T>*>(a.bias)[n + i]);
        }
    }
    return c;
}

/// a + b in float32, rounded to odd: rounding that to 16 bits is then the same as rounding the exact sum.
PETIT_DEVICE float add_to_odd(float a, float b) {
    const float sum = a + b, part = sum - a;
    const float rest = (a - (sum - part)) + (b - part);  // exact: what `sum` lacks; NaN if it is not finite
    const u32 bits = as<u32>(sum);
    if ((bits & 1) != 0 || !(rest < 0.0f || rest > 0.0f)) return sum;
    const bool larger = (rest > 0.0f) == (bits >> 31 == 0);  // in magnitude
    return as<float>(larger ? bits + 1 : bits - 1);
}

/// y[m, n .. n + 3] = round(sum * scale * 2^(exponents) + bias): one rounding to the output type.
template <Type T>
PETIT_DEVICE void store_outputs(const GemmArgs& a, const Columns& c, f32x4 sum, u32 n, u32 m) {
    if (m >= a.m || n >= a.n) return;
    const i32 xe = a.rows[m].exponent;
    Element<T> out[4] __attribute__((aligned(8)));
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        float v = __builtin_amdgcn_ldexpf(sum[i] * c.mantissa[i], c.exponent[i] + xe);
        if (a.bias) v = add_to_odd(v, c.bias[i]);  // not adding +0 keeps a negative zero
        out[i] = static_cast<Element<T>>(v);
    }
    auto* y = static_cast<Element<T>*>(a.y) + static_cast<i64>(m) * a.y_stride + n;
    if (n + 4 <= a.n && reinterpret_cast<u64>(y) % 8 == 0) {
        *reinterpret_cast<u32x2*>(y) = *reinterpret_cast<u32x2*>(out);
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (n + i < a.n) y[i] = out[i];
    }
}

/// Where workgroup `wg` leaves its part of a tile of `blocks` 16 x 16 results, one KB each: slot 0 for the first tile it
/// works on, slot 1 for its last.
PETIT_DEVICE Buffer partial_slot(const GemmArgs& a, u32 wg, u32 which, u32 blocks) {
    const u32 bytes = blocks * kBlockBytes;
    return make_buffer(a.partials + (static_cast<u64>(wg) * 2 + which) * bytes, bytes);
}

/// Ends a workgroup's part of `tile`. Each wave owns kOwned 16 x 16 result blocks of the tile's kBlocks; `block(i)` is
/// the number of its i-th one. If other workgroups hold parts of the tile, the last to arrive adds all parts in
/// workgroup order, so the result does not depend on who was last. Returns whether this wave holds final sums.
template <int kBlocks, int kOwned, class Block>
PETIT_DEVICE bool reduce_across_workgroups(const GemmArgs& a, Partition part, u32 wg, u32 tile, u32 my_units,
                                           f32x4 (&sum)[kOwned], Block block, u32& shared_last) {
    if (my_units == a.k_tiles) return true;
    const u32 first_unit = tile * a.k_tiles;
    const u32 first = part.owner(first_unit), last = part.owner(first_unit + a.k_tiles - 1);
    // Only the tile's first owner can have begun with another tile.
    auto slot = [&](u32 owner) {
        return partial_slot(a, owner, owner == first && part.begin(owner) < first_unit ? 1u : 0u, kBlocks);
    };
    const u32 lane16 = in_vgpr(lane_id() * 16);
    const Buffer mine = slot(wg);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) store16(mine, lane16, block(i) * kBlockBytes, as<u32x4>(sum[i]));
    __builtin_amdgcn_fence(__ATOMIC_RELEASE,
                           "agent");  // every wave's own stores, before anyone counts the workgroup in
    barrier();
    if (__builtin_amdgcn_workitem_id_x() == 0) {
        const u32 arrived = __hip_atomic_fetch_add(a.counters + tile, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
        shared_last = arrived == last - first;
        if (arrived == last - first)
            __hip_atomic_store(a.counters + tile, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
    barrier();
    const bool am_last = __builtin_amdgcn_readfirstlane(shared_last) != 0;
    if (!am_last) return false;
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
#pragma unroll
    for (int i = 0; i < kOwned; ++i) sum[i] = f32x4{0, 0, 0, 0};
    for (u32 owner = first; owner <= last; ++owner) {
        const Buffer theirs = slot(owner);
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            sum[i] += as<f32x4>(load16(theirs, lane16, block(i) * kBlockBytes));
            if (i % 4 == 3) pin_schedule();
        }
    }
    return true;
}

}  // namespace petit
