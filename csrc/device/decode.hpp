// Decode GEMM: y = x W^T for a few rows (16 or 32), bound by the weight stream.
//
// A workgroup of four waves works on 64 weight rows at a time; the waves take k-tiles in turn, so each weight is read
// once, by one wave, straight into registers, and no wave waits for another inside the loop. One step of a wave is
// 64 rows x 128 k: four 16-byte weight loads, one scale load and four activation loads per 16 rows (fragment order,
// from L2; they cost as many bytes as the weights at 16 rows), all issued one step ahead. At the end of a tile the four
// waves' sums meet in LDS, cut tiles are reduced across workgroups (epilogue.hpp).
//
// Cost per lane and step at 16 rows: 16 words of 8 weights, 7 + 4 VALU each by masks (4 + 4 or 4 by gfx950's conversions), scales 3 per dword,
// 8 (gfx950: 4) MFMA per word; addresses are scalar.
#pragma once
#include "epilogue.hpp"

namespace petit {

template <Format F, Type T, int kMTiles_, Core C, bool kExact_>
struct DecodeConfig {
    static constexpr Format kFormat = F;
    static constexpr Type kType = T;
    static constexpr Core kCore = C;
    static constexpr bool kExact = kExact_;
    static constexpr int kMTiles = kMTiles_;  // 16-row tiles of activations
    static constexpr int kNTiles = 4;         // 16-row tiles of weights
    static constexpr int kWaves = 4;
    static constexpr int kThreads = kWaves * kWave;
    static constexpr int kBlocks = kMTiles * kNTiles;
    using W = Weights<F, C, kExact>;
};

/// Everything one step reads, in registers.
template <class Cfg>
struct Step {
    u32x4 w[Cfg::kNTiles];
    u32 scale[Cfg::W::kScaleDwords];
    u32x4 x[Cfg::kMTiles][4];
};

/// Where a tile's operands lie. The activation offsets are per lane because rows that do not exist, or that need fewer
/// planes than their neighbours, point outside the buffer and read as zero.
template <class Cfg>
struct Operands {
    const u8 *weight, *scale, *x;
    u32 k_tiles;
    u32 lane16, lane_scale;
    u32 x_lane[Cfg::kMTiles];

    /// Loads k-tile kt; past `end` the descriptors are empty, so nothing is fetched and the loop needs no second form.
    PETIT_DEVICE void load(Step<Cfg>& s, u32 kt, u32 end) const {
        kt = in_sgpr(kt);
        const u32 tiles = kt < end ? k_tiles : 0;
        constexpr u32 kScaleBytes = Cfg::W::kScaleDwords * 4;
        const Buffer w = make_buffer(weight, tiles * kStepBytes);
        const Buffer sc = make_buffer(scale, tiles * (kWave * kScaleBytes));
        const Buffer xs = make_buffer(x, tiles * (kFragmentBytes * Cfg::kMTiles));
#pragma unroll
        for (int j = 0; j < Cfg::kNTiles; ++j) s.w[j] = load16<kStream>(w, lane16, kt * kStepBytes + j * 1024);
        if constexpr (Cfg::W::kScaleDwords == 2) {
            const u32x2 d = load8<kStream>(sc, lane_scale, kt * (kWave * kScaleBytes));
            s.scale[0] = d[0];
            s.scale[1] = d[1];
        } else {
            s.scale[0] = load4<kStream>(sc, lane_scale, kt * (kWave * kScaleBytes));
        }
#pragma unroll
        for (int i = 0; i < Cfg::kMTiles; ++i)
#pragma unroll
            for (int t = 0; t < 4; ++t)
                s.x[i][t] = load16(xs, x_lane[i], (kt + i * k_tiles) * kFragmentBytes + t * 1024);
        pin_schedule();
    }
};

template <class Cfg>
PETIT_DEVICE void multiply(const Step<Cfg>& s, f32x4 (&acc)[Cfg::kMTiles][Cfg::kNTiles], int pass, bool& more) {
    typename Cfg::W scales;
    scales.decode(s.scale, pass, more);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int j = 0; j < Cfg::kNTiles; ++j) {
            const u32x4 w = scales.word(s.w[j][t], j, t);
#pragma unroll
            for (int i = 0; i < Cfg::kMTiles; ++i) acc[i][j] = mma<Cfg::kCore>(w, s.x[i][t], acc[i][j]);
        }
        pin_schedule();  // else the scheduler expands every word first and runs out of registers
    }
}

/// The hot loop: k-tiles kt, kt + waves, ... below end, the next one always in flight.
template <class Cfg>
PETIT_DEVICE void accumulate(const Operands<Cfg>& op, u32 kt, u32 end, f32x4 (&acc)[Cfg::kMTiles][Cfg::kNTiles],
                             int pass, bool& more) {
    Step<Cfg> even, odd;
    op.load(even, kt, end);  // a wave without work multiplies zeros once
    while (true) {
        op.load(odd, kt + Cfg::kWaves, end);
        multiply<Cfg>(even, acc, pass, more);
        if ((kt += Cfg::kWaves) >= end) return;
        op.load(even, kt + Cfg::kWaves, end);
        multiply<Cfg>(odd, acc, pass, more);
        if ((kt += Cfg::kWaves) >= end) return;
    }
}

template <class Cfg>
PETIT_DEVICE void decode_gemm(const GemmArgs& a) {
    PETIT_SHARED static f32x4 meet[Cfg::kWaves][Cfg::kBlocks][kWave];
    u32& shared_last = reinterpret_cast<u32&>(meet);  // used between barriers, when the sums have been read
    const u32 lane = lane_id(), wave = wave_id();
    const Partition part{a.units_q, a.units_r};
    const u32 wg = workgroup_number(a);
    const u32 end_unit = part.begin(wg + 1);

    for (u32 unit = part.begin(wg); unit < end_unit;) {
        const u32 tile = unit / a.k_tiles;
        const u32 kt_begin = unit - tile * a.k_tiles;
        const u32 kt_end = min(a.k_tiles, kt_begin + (end_unit - unit));
        const u32 row_group = a.m_blocks == 1 ? tile : tile / a.m_blocks,
                  m_tile = (tile - row_group * a.m_blocks) * Cfg::kMTiles;

        Operands<Cfg> op;
        const u64 steps = static_cast<u64>(row_group) * a.k_tiles;
        op.weight = a.weight + steps * kStepBytes;
        op.scale = a.scale + steps * (Cfg::W::kScaleDwords * 4 * kWave);
        op.k_tiles = a.k_tiles;
        op.lane16 = in_vgpr(lane * 16);
        op.lane_scale = in_vgpr(lane * (Cfg::W::kScaleDwords * 4));
        i32 planes[Cfg::kMTiles];
#pragma unroll
        for (int i = 0; i < Cfg::kMTiles; ++i) planes[i] = planes_of(a, (m_tile + i) * 16 + lane % 16);

        bool several = Cfg::W::kWindowed;  // parts to add: planes of the activations or windows of the scales
#pragma unroll
        for (int i = 0; i < Cfg::kMTiles; ++i) several |= planes[i] > 1;
        const int sum_shift = __builtin_amdgcn_ballot_w64(several) != 0 ? kSumShift : 0;
        op.x = a.x + static_cast<u64>(m_tile) * a.k_tiles * kFragmentBytes;
        for (int plane = 0;; ++plane, op.x += a.plane_bytes) {
            bool wanted = false;
#pragma unroll
            for (int i = 0; i < Cfg::kMTiles; ++i) {
                wanted |= plane < planes[i];
                op.x_lane[i] = in_vgpr(plane < planes[i] ? lane * 16 : kOutOfRange);
            }
            if (__builtin_amdgcn_ballot_w64(wanted) == 0) break;
            bool more = true;
            for (int pass = 0; __builtin_amdgcn_ballot_w64(more) != 0; ++pass) {
                f32x4 acc[Cfg::kMTiles][Cfg::kNTiles] = {};
                more = false;
                accumulate<Cfg>(op, kt_begin + wave, kt_end, acc, pass, more);
                // The wave's sums meet the others' in LDS; almost always there is one part, which goes there as it is.
                const int shift = sum_shift - plane_octaves<Cfg::kCore> * plane - arch::kWindowOctaves * pass;
                if (sum_shift == 0) {
#pragma unroll
                    for (int b = 0; b < Cfg::kBlocks; ++b)
                        meet[wave][b][lane] = acc[b / Cfg::kNTiles][b % Cfg::kNTiles];
                } else {
                    never_speculate();
#pragma unroll
                    for (int b = 0; b < Cfg::kBlocks; ++b) {
                        f32x4 v = shifted(acc[b / Cfg::kNTiles][b % Cfg::kNTiles], shift);
                        if (plane + pass != 0) v += meet[wave][b][lane];
                        meet[wave][b][lane] = v;
                    }
                }
            }
        }

        // Wave w goes on with blocks w, w + 4, ...
        constexpr int kOwned = Cfg::kBlocks / Cfg::kWaves;
        barrier();
        f32x4 sum[kOwned];
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            sum[i] = meet[0][wave + i * Cfg::kWaves][lane];
#pragma unroll
            for (int w = 1; w < Cfg::kWaves; ++w) sum[i] += meet[w][wave + i * Cfg::kWaves][lane];
        }
        auto block = [&](int i) { return wave + i * Cfg::kWaves; };
        if (reduce_across_workgroups<Cfg::kBlocks>(a, part, wg, tile, kt_end - kt_begin, sum, block, shared_last)) {
#pragma unroll
            for (int i = 0; i < kOwned; ++i) {
                const u32 n = row_group * kRowsPerGroup + block(i) % Cfg::kNTiles * 16 + lane / 16 * 4;
                const u32 m = (m_tile + block(i) / Cfg::kNTiles) * 16 + lane % 16;
                store_outputs<Cfg::kType>(a, load_columns<Cfg::kType>(a, n, sum_shift), sum[i], n, m);
            }
        }
        unit += kt_end - kt_begin;
        if (unit < end_unit) barrier();  // `meet` is used again
    }
}

}  // namespace petit
