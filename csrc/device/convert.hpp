// Activation pre-pass: x [m, k] (bf16 or f16, row-major) -> fragment order, once per GEMM instead of once per workgroup.
//
// Each row is scaled by a power of two so that its largest finite magnitude lies in [2^14, 2^15) and stored as f16 (or bf16
// for gfx950's bf16 core), exactly: bf16 has 8 significant bits, f16 11. One f16 plane holds 28 octaves, all of them normal
// numbers (gfx90a flushes subnormal MFMA operands); a bf16 plane 112. A row with a wider spread gets further planes, each
// that much further down; the GEMM adds the planes up, so no activation is ever lost. Zeros, Inf and NaN go to plane 0 as
// they are. Elements with k >= K read as zero through the ranged row descriptor, so nothing beyond a row is ever touched
// and the GEMM needs no masks.
//
// A workgroup handles one row, or one slice of it (grid y): it scans the whole row, then writes its slice.
// Cost: about 2 VALU per element scanned and 3 per element written, 16 bytes a lane each way.
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

/// Extremes of the row's magnitude bits, as two maxima: the largest, and the complement of the smallest non-zero one
/// minus 1 (0 - 1 wraps to 0xffff, whose complement is 0 and never wins).
struct Extremes {
    u16x2 largest{0, 0}, smallest{0, 0};
    PETIT_DEVICE void add(u32 pair) {
        const u16x2 mag = as<u16x2>(pair & 0x7fff7fffu);
        largest = __builtin_elementwise_max(largest, mag);
        smallest = __builtin_elementwise_max(smallest, static_cast<u16x2>(u16x2{0, 0} - mag));  // ~(mag - 1) = -mag
    }
    /// Both maxima in one register: largest low, smallest high.
    PETIT_DEVICE u16x2 both() const {
        return __builtin_elementwise_max(u16x2{largest[0], smallest[0]}, u16x2{largest[1], smallest[1]});
    }
};

template <Type T>
PETIT_DEVICE u32 drop_non_finite(u32 pair) {
    if ((pair & 0x7fffu) >= Bits<T>::kInf) pair &= 0xffff0000u;
    if ((pair >> 16 & 0x7fffu) >= Bits<T>::kInf) pair &= 0xffffu;
    return pair;
}

/// This thread's share of the row. Four loads are in flight at a time; those past the end of the row give zeros.
template <Type T>
PETIT_DEVICE u16x2 scan_row(Buffer row, u32 pieces, u32 thread, bool finite_only) {
    Extremes e;
    for (u32 q = thread; q < pieces; q += 4 * 256) {
        u32x4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = load16(row, in_vgpr(q * 16) + i * 4096, 0);
#pragma unroll
        for (int i = 0; i < 16; ++i) e.add(finite_only ? drop_non_finite<T>(v[i / 4][i % 4]) : v[i / 4][i % 4]);
    }
    return e.both();
}

/// Maximum over the workgroup's four waves, the same in every thread.
PETIT_DEVICE u32 combine(u16x2 mine, u32 (&meet)[4]) {
    u32 v = as<u32>(mine);
    auto step = [&](u32 other) { v = as<u32>(__builtin_elementwise_max(as<u16x2>(v), as<u16x2>(other))); };
    // Within a wave by DPP: rows of 16 lanes by shifts, then row to row; lane 63 has it all.
    step(__builtin_amdgcn_update_dpp(0, v, 0x111, 0xf, 0xf, false));
    step(__builtin_amdgcn_update_dpp(0, v, 0x112, 0xf, 0xf, false));
    step(__builtin_amdgcn_update_dpp(0, v, 0x114, 0xf, 0xf, false));
    step(__builtin_amdgcn_update_dpp(0, v, 0x118, 0xf, 0xf, false));
    step(__builtin_amdgcn_update_dpp(0, v, 0x142, 0xa, 0xf, false));
    step(__builtin_amdgcn_update_dpp(0, v, 0x143, 0xc, 0xf, false));
    lds_barrier();
    if (lane_id() == 63) meet[wave_id()] = v;
    lds_barrier();
    v = meet[0];
    step(meet[1]);
    step(meet[2]);
    step(meet[3]);
    return __builtin_amdgcn_readfirstlane(v);
}

/// Eight values times 2^shift in the plane's type; with several planes, those outside this plane's octaves become zero.
template <Type T, Type kTo>
PETIT_DEVICE u32x4 to_plane(u32x4 v, int shift, bool first, bool only) {
    const float low =
        __builtin_amdgcn_ldexpf(1.0f, 15 - static_cast<int>(kTo == Type::kF16 ? kPlaneOctaves : kWidePlaneOctaves));
    u32x4 out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float s[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            s[half] = __builtin_amdgcn_ldexpf(Bits<T>::value(half ? v[i] >> 16 : v[i] & 0xffffu), shift);
            if (!only) {
                const float mag = __builtin_fabsf(s[half]);
                const bool inside = mag >= low && mag < 32768.0f;
                if (!inside && !(first && !(mag < 32768.0f))) s[half] = 0.0f;
            }
        }
        if constexpr (kTo == Type::kF16) {
            out[i] = as<u32>(f16x2{static_cast<_Float16>(s[0]), static_cast<_Float16>(s[1])});
        } else {  // the low halves are zero: a bf16 was scaled by a power of two
            out[i] = __builtin_amdgcn_perm(as<u32>(s[1]), as<u32>(s[0]), 0x07060302u);
        }
    }
    return out;
}

/// One slice of one row. kTo: the operand type of the core that will read it.
template <Type T, Type kTo>
PETIT_DEVICE void convert_row(const ConvertArgs& a) {
    PETIT_SHARED static u32 meet[4];
    const u32 thread = __builtin_amdgcn_workitem_id_x(), m = __builtin_amdgcn_workgroup_id_x();
    const u32 slice = __builtin_amdgcn_workgroup_id_y();
    const Buffer row = make_buffer(a.x + static_cast<i64>(m) * a.x_stride_bytes, a.k * 2);
    constexpr int kOctaves = kTo == Type::kF16 ? kPlaneOctaves : kWidePlaneOctaves;

    u32 extremes = combine(scan_row<T>(row, a.k / 8, thread, false), meet);
    if ((extremes & 0xffffu) >= Bits<T>::kInf) extremes = combine(scan_row<T>(row, a.k / 8, thread, true), meet);
    const u32 largest = extremes & 0xffffu, smallest = 0x10000u - (extremes >> 16);
    int shift = 0;
    RowInfo info{0, 1};
    if (largest != 0) {
        const int top = __builtin_amdgcn_frexp_expf(Bits<T>::value(largest)) - 1;
        const int low = __builtin_amdgcn_frexp_expf(Bits<T>::value(smallest)) - 1;
        shift = 14 - top;
        info = RowInfo{-shift, 1 + (top - low) / kOctaves};
    }
    info.exponent = __builtin_amdgcn_readfirstlane(info.exponent);
    info.planes = __builtin_amdgcn_readfirstlane(info.planes);
    if (slice == 0 && thread == 0) a.rows[m] = info;

    u8* out = a.out + (static_cast<u64>(m / 16) * a.k_tiles) * kFragmentBytes + m % 16 * 16;
    for (u32 q = slice * 256 + thread; q < a.k_tiles * 16; q += 256 * a.slices) {
        const u32x4 v = load16(row, q * 16, 0);
        u8* to = out + static_cast<u64>(q / 16) * kFragmentBytes + q % 4 * 1024 + q / 4 % 4 * 256;
        if (info.planes == 1) {
            *reinterpret_cast<u32x4*>(to) = to_plane<T, kTo>(v, -info.exponent, true, true);
        } else {
            for (int p = 0; p < info.planes; ++p, to += a.plane_bytes)
                *reinterpret_cast<u32x4*>(to) = to_plane<T, kTo>(v, kOctaves * p - info.exponent, p == 0, false);
        }
    }
}

}  // namespace petit
