// The Petit CDNA layout and the argument block of the GEMM kernels (docs/layout.md has the pictures).
//
// Weights: groups of 64 rows x k-tiles of 128. One (row group, k-tile) step is 4 KB: four n-tiles of 16 rows, each
// 64 lanes x 16 bytes, lane 16g + r holding W[16 j + r, 32 g .. 32 g + 31]. A wave therefore loads a step as four
// consecutive 1 KB rows of 16-byte lanes and the steps of one row group are contiguous in k.
// Scales: one dword a lane and step (MXFP4) or two (NVFP4); see ScaleE5M3x4.
// Activations (written by convert.hpp): per 16 rows and k-tile 4 KB, piece t, lane 16g + m = x[m, 32g + 8t .. + 7].
#pragma once
#include "arch/arch.hpp"
#include "arguments.hpp"

namespace petit {

constexpr u32 kRowsPerGroup = 64;
constexpr u32 kTileK = 128;
constexpr u32 kStepBytes = 4096;        // weights of 64 rows x 128 k
constexpr u32 kFragmentBytes = 4096;    // activations of 16 rows x 128 k
constexpr u32 kBlockBytes = 1024;       // 16 x 16 float32 results
constexpr u32 kPlaneOctaves = 28;       // octaves of activation magnitude one f16 plane holds exactly
constexpr u32 kWidePlaneOctaves = 112;  // the same of a bf16 plane
// Sums over several planes or windows are kept times 2^80, so that parts far below the largest are not lost under 2^-126.
constexpr int kSumShift = 80;

/// The work is a line of units (tile, k-tile), k fastest, cut into one piece a workgroup whose lengths differ by at most one.
/// So every CU gets the same bytes whatever the shape, and a tile is finished by a run of consecutive workgroups.
struct Partition {
    u32 q, r;
    PETIT_DEVICE u32 begin(u32 wg) const { return wg * q + min(wg, r); }
    PETIT_DEVICE u32 owner(u32 unit) const {
        const u32 longer = r * (q + 1);
        return unit < longer ? unit / (q + 1) : r + (unit - longer) / q;
    }
};

/// Hardware hands workgroup ids to the dies in turn; this numbers them so that consecutive ones (which share tiles and
/// finish each other's) sit on one die. The grid is a multiple of `xcds`, or xcds is 1.
PETIT_DEVICE u32 workgroup_number(const GemmArgs& a) {
    const u32 id = __builtin_amdgcn_workgroup_id_x();
    if (a.xcds == 1) return id;
    if ((a.xcds & (a.xcds - 1)) == 0) {
        const u32 bits = __builtin_ctz(a.xcds);
        return (id & (a.xcds - 1)) * (a.workgroups >> bits) + (id >> bits);
    }
    return id % a.xcds * (a.workgroups / a.xcds) + id / a.xcds;
}

template <Core C>
constexpr int plane_octaves = C == Core::kConvertBf16 ? kWidePlaneOctaves : kPlaneOctaves;

/// Planes of activation row m; rows that do not exist have none and read as zero.
PETIT_DEVICE i32 planes_of(const GemmArgs& a, u32 m) { return m < a.m ? a.rows[m].planes : 0; }

}  // namespace petit
