// Activation pre-pass: x [m, k] (bf16 or f16, row-major) -> fragment order, once per GEMM instead of once per workgroup.
//
// f16 cores: each row is scaled by a power of two so that its largest finite magnitude lies in [2^14, 2^15) and stored as
// f16, exactly: bf16 has 8 significant bits, f16 11. One plane holds 28 octaves, all of them normal f16 numbers (gfx90a
// flushes subnormal MFMA operands). A row with a wider spread gets further planes, each 28 octaves down; the GEMM adds
// the planes up, so no activation is ever lost. Zeros, Inf and NaN go to plane 0 unchanged.
// bf16 core: a copy. Elements with k >= K read as zero through the ranged row descriptor, so nothing beyond a row is
// ever touched and the GEMM needs no masks.
//
// A workgroup handles one row, or one slice of it (grid y): it scans the whole row, then writes its slice.
// Cost: about 3 VALU per element scanned and 3 per element written, 16 bytes a lane each way.
#pragma once
#include "layout.hpp"

namespace petit {

using u16x2 = u16 __attribute__((ext_vector_type(2)));

template <Type T>
struct Bits {
    static constexpr u16 kInf = T == Type::kBf16 ? 0x7f80 : 0x7c00;
    PETIT_DEVICE static float value(u32 bits16) {
        if constexpr (T == Type::kBf16) return as<float>(bits16 << 16);
        return static_cast<float>(as<_Float16>(static_cast<u16>(bits16)));
    }
};

/// Extremes of the row's magnitude bits; `smallest` is that of the non-zero ones minus one (0xffff if none).
struct Extremes {
    u16x2 largest{0, 0}, smallest{0xffff, 0xffff};
    PETIT_DEVICE void add(u32 pair) {
        const u16x2 mag = as<u16x2>(pair & 0x7fff7fffu);
        largest = __builtin_elementwise_max(largest, mag);
        smallest = __builtin_elementwise_min(smallest, static_cast<u16x2>(mag - u16x2{1, 1}));
    }
    PETIT_DEVICE void add(u32 largest_bits, u32 smallest_bits) {
        largest = __builtin_elementwise_max(largest, as<u16x2>(largest_bits));
        smallest = __builtin_elementwise_min(smallest, as<u16x2>(smallest_bits));
    }
};

template <Type T>
PETIT_DEVICE u32 drop_non_finite(u32 pair) {
    if ((pair & 0x7fffu) >= Bits<T>::kInf) pair &= 0xffff0000u;
    if ((pair >> 16 & 0x7fffu) >= Bits<T>::kInf) pair &= 0xffffu;
    return pair;
}

template <Type T>
PETIT_DEVICE Extremes scan_row(Buffer row, u32 pieces, u32 thread, u32 threads, bool finite_only) {
    Extremes e;
    for (u32 q = thread; q < pieces; q += threads) {
        const u32x4 v = load16(row, q * 16, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) e.add(finite_only ? drop_non_finite<T>(v[i]) : v[i]);
    }
    return e;
}

/// Extremes over the workgroup's threads, the same in every one.
PETIT_DEVICE Extremes combine(Extremes e, u32x2 (&meet)[256]) {
    const u32 thread = __builtin_amdgcn_workitem_id_x();
    barrier();
    meet[thread] = u32x2{as<u32>(e.largest), as<u32>(e.smallest)};
#pragma unroll
    for (u32 half = 128; half > 0; half /= 2) {
        barrier();
        if (thread < half) {
            e.add(meet[thread + half][0], meet[thread + half][1]);
            meet[thread] = u32x2{as<u32>(e.largest), as<u32>(e.smallest)};
        }
    }
    barrier();
    Extremes all;
    all.add(__builtin_amdgcn_readfirstlane(meet[0][0]), __builtin_amdgcn_readfirstlane(meet[0][1]));
    return all;
}

/// Eight values times 2^shift as f16; with several planes, those outside this plane's 28 octaves become zero.
template <Type T>
PETIT_DEVICE u32x4 to_plane(u32x4 v, int shift, bool first, bool only) {
    constexpr float kLow = 1.0f / 8192.0f;  // 2^-13 .. 2^15 is one plane
    u32x4 out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f16x2 h;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float s = __builtin_amdgcn_ldexpf(Bits<T>::value(half ? v[i] >> 16 : v[i] & 0xffffu), shift);
            if (!only) {
                const float mag = __builtin_fabsf(s);
                const bool inside = mag >= kLow && mag < 32768.0f;
                if (!inside && !(first && !(mag < 32768.0f))) s = 0.0f;
            }
            h[half] = static_cast<_Float16>(s);
        }
        out[i] = as<u32>(h);
    }
    return out;
}

template <Type T, bool kScaled>
PETIT_DEVICE void convert_row(const ConvertArgs& a) {
    PETIT_SHARED static u32x2 meet[256];
    const u32 thread = __builtin_amdgcn_workitem_id_x(), m = __builtin_amdgcn_workgroup_id_x();
    const u32 slice = __builtin_amdgcn_workgroup_id_y();
    const u32 threads = 256 * a.slices;
    const Buffer row = make_buffer(a.x + static_cast<i64>(m) * a.x_stride_bytes, a.k * 2);

    int shift = 0;
    RowInfo info{0, 1};
    if constexpr (kScaled) {
        Extremes e = combine(scan_row<T>(row, a.k / 8, thread, 256, false), meet);
        if (max(e.largest[0], e.largest[1]) >= Bits<T>::kInf) e = combine(scan_row<T>(row, a.k / 8, thread, 256, true), meet);
        const u16 largest = max(e.largest[0], e.largest[1]);
        if (largest != 0) {
            const u16 smallest = static_cast<u16>(min(e.smallest[0], e.smallest[1]) + 1);
            const int top = __builtin_amdgcn_frexp_expf(Bits<T>::value(largest)) - 1;
            const int low = __builtin_amdgcn_frexp_expf(Bits<T>::value(smallest)) - 1;
            shift = 14 - top;
            info = RowInfo{-shift, 1 + (top - low) / static_cast<int>(kPlaneOctaves)};
        }
    }
    if (slice == 0 && thread == 0) a.rows[m] = info;

    u8* out = a.out + (static_cast<u64>(m / 16) * a.k_tiles) * kFragmentBytes + m % 16 * 16;
    for (u32 q = slice * 256 + thread; q < a.k_tiles * 16; q += threads) {
        const u32x4 v = load16(row, q * 16, 0);
        u8* to = out + static_cast<u64>(q / 16) * kFragmentBytes + q % 4 * 1024 + q / 4 % 4 * 256;
        if constexpr (!kScaled) {
            *reinterpret_cast<u32x4*>(to) = v;
        } else {
            for (int p = 0; p < info.planes; ++p, to += a.plane_bytes)
                *reinterpret_cast<u32x4*>(to) =
                    to_plane<T>(v, shift + static_cast<int>(kPlaneOctaves) * p, p == 0, info.planes == 1);
        }
    }
}

}  // namespace petit
