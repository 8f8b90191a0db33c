// Tile GEMM: y = x W^T for more rows (64 or 128 at a time), where the matrix units become the limit.
//
// A workgroup computes 64 or 128 rows of y x 256 columns: each wave owns a group of 64 weight rows (or half of one), so
// weights still go straight to registers, once per workgroup; the activations, already in fragment order, are copied to
// LDS by all waves (double-buffered, one barrier a stage) and read from there by each. Every LDS access is
// 64 lanes x 16 consecutive bytes, free of bank conflicts.
//
// Cost per wave and k-tile at 64 rows: 16 words of 8 weights as in decode.hpp, each feeding four MFMA row tiles; LDS
// reads 16 KB, a quarter of that written.
#pragma once
#include "epilogue.hpp"

namespace petit {

template <Format F, Type T, int kMTiles_, int kNTiles_, int kWaves_, Core C, bool kExact_>
struct TileConfig {
    static constexpr Format kFormat = F;
    static constexpr Type kType = T;
    static constexpr Core kCore = C;
    static constexpr bool kExact = kExact_;
    static constexpr int kMTiles = kMTiles_;
    static constexpr int kNTiles = kNTiles_;  // 16-row tiles of weights a wave: a row group (4) or half of one (2)
    static constexpr int kWaves = kWaves_;
    static constexpr int kThreads = kWaves * kWave;
    static constexpr int kBlocks = kMTiles * kNTiles * kWaves;
    static constexpr int kPieces = kMTiles <= 4 ? 4 : 2;        // eighths of k per stage: LDS stays at 2 x 16 KB
    static constexpr int kStages = 4 / kPieces;                 // stages a k-tile
    static constexpr int kCopies = kMTiles * kPieces / kWaves;  // 16-byte pieces a thread copies per stage
    using W = Weights<F, C, kExact>;
};

template <class Cfg>
using Accumulators = f32x4[Cfg::kMTiles][Cfg::kNTiles];

/// One wave's weights of one k-tile.
template <class Cfg>
struct WeightStep {
    u32x4 w[Cfg::kNTiles];
    u32 scale[Cfg::W::kScaleDwords];
};

template <class Cfg>
struct TileOperands {
    const u8 *weight, *scale, *x;
    u32 k_tiles, weight_tiles;  // weight_tiles is 0 for a wave beyond the last row group
    u32 first_tile;             // the wave's first n-tile in its row group
    u32 lane16, lane_scale;
    u32 x_lane[Cfg::kCopies];

    PETIT_DEVICE void load_weights(WeightStep<Cfg>& s, u32 kt, u32 end) const {
        kt = in_sgpr(kt);
        const u32 tiles = kt < end ? weight_tiles : 0;
        constexpr u32 kScaleBytes = Cfg::W::kScaleDwords * 4;
        const Buffer w = make_buffer(weight, tiles * kStepBytes);
        const Buffer sc = make_buffer(scale, tiles * (kWave * kScaleBytes));
#pragma unroll
        for (int j = 0; j < Cfg::kNTiles; ++j) s.w[j] = load16(w, lane16, kt * kStepBytes + (first_tile + j) * 1024);
        if constexpr (Cfg::W::kScaleDwords == 2) {
            const u32x2 d = load8(sc, lane_scale, kt * (kWave * kScaleBytes));
            s.scale[0] = d[0];
            s.scale[1] = d[1];
        } else {
            s.scale[0] = load4(sc, lane_scale, kt * (kWave * kScaleBytes));
        }
    }

    /// This thread's share of stage `stage` of k-tile kt. Copy c is piece (wave + 4 c): row tile piece / kPieces.
    PETIT_DEVICE void load_x(u32x4 (&to)[Cfg::kCopies], u32 wave, u32 kt, u32 stage, u32 end) const {
        kt = in_sgpr(kt);
        const Buffer xs = make_buffer(x, kt < end ? k_tiles * (kFragmentBytes * Cfg::kMTiles) : 0);
#pragma unroll
        for (int c = 0; c < Cfg::kCopies; ++c) {
            const u32 piece = wave + c * Cfg::kWaves, row_tile = piece / Cfg::kPieces;
            const u32 t = stage * Cfg::kPieces + piece % Cfg::kPieces;
            to[c] = load16(xs, x_lane[c], (kt + row_tile * k_tiles) * kFragmentBytes + t * 1024);
        }
    }
};

template <class Cfg>
using Stage = u32x4[Cfg::kMTiles * Cfg::kPieces][kWave];

/// All stages of one k-tile: multiply stage by stage while the next one's activations and the next k-tile's weights
/// are on their way. `parity` is the LDS buffer of the first stage; the other one is filled meanwhile.
template <class Cfg, int kParity>
PETIT_DEVICE void tile_step(const TileOperands<Cfg>& op, const WeightStep<Cfg>& now, WeightStep<Cfg>& next,
                            Stage<Cfg> (&lds)[2], Accumulators<Cfg>& acc, u32 wave, u32 lane, u32 kt, u32 end, int pass,
                            bool& more) {
    typename Cfg::W scales;
#pragma unroll
    for (int h = 0; h < Cfg::kStages; ++h) {
        const int buffer = (kParity * Cfg::kStages + h) % 2;
        const bool last = h + 1 == Cfg::kStages;
        u32x4 copy[Cfg::kCopies];
        op.load_x(copy, wave, last ? kt + 1 : kt, last ? 0 : h + 1, end);
        if (h == 0) op.load_weights(next, kt + 1, end);
        pin_schedule();
        if (h == 0) {
            u32 raw[Cfg::W::kScaleDwords];
#pragma unroll
            for (int d = 0; d < Cfg::W::kScaleDwords; ++d)
                raw[d] = Cfg::kNTiles == 4 ? now.scale[d] : Cfg::W::from_tile(now.scale[d], op.first_tile);
            scales.template decode<Cfg::kNTiles>(raw, pass, more);
        }
#pragma unroll
        for (int piece = 0; piece < Cfg::kPieces; ++piece) {
            const int t = h * Cfg::kPieces + piece;
            u32x4 x[Cfg::kMTiles];
#pragma unroll
            for (int i = 0; i < Cfg::kMTiles; ++i) x[i] = lds[buffer][i * Cfg::kPieces + piece][lane];
#pragma unroll
            for (int j = 0; j < Cfg::kNTiles; ++j) {
                const u32x4 w = scales.word(now.w[j][t], j, t);
#pragma unroll
                for (int i = 0; i < Cfg::kMTiles; ++i) acc[i][j] = mma<Cfg::kCore>(w, x[i], acc[i][j]);
            }
            pin_schedule();
        }
#pragma unroll
        for (int c = 0; c < Cfg::kCopies; ++c) lds[buffer ^ 1][wave + c * Cfg::kWaves][lane] = copy[c];
        lds_barrier();
    }
}

template <class Cfg>
PETIT_DEVICE void tile_accumulate(const TileOperands<Cfg>& op, Stage<Cfg> (&lds)[2], Accumulators<Cfg>& acc, u32 wave,
                                  u32 lane, u32 kt, u32 end, int pass, bool& more) {
    WeightStep<Cfg> even, odd;
    u32x4 copy[Cfg::kCopies];
    op.load_x(copy, wave, kt, 0, end);
    op.load_weights(even, kt, end);
    lds_barrier();  // the previous loop's last stage may still be read
#pragma unroll
    for (int c = 0; c < Cfg::kCopies; ++c) lds[0][wave + c * Cfg::kWaves][lane] = copy[c];
    lds_barrier();
    while (true) {
        tile_step<Cfg, 0>(op, even, odd, lds, acc, wave, lane, kt, end, pass, more);
        if (++kt >= end) return;
        tile_step<Cfg, 1>(op, odd, even, lds, acc, wave, lane, kt, end, pass, more);
        if (++kt >= end) return;
    }
}

template <class Cfg>
PETIT_DEVICE void tile_gemm(const GemmArgs& a) {
    PETIT_SHARED static Stage<Cfg> lds[2];
    u32& shared_word = reinterpret_cast<u32&>(lds);
    const u32 lane = lane_id(), wave = wave_id();
    const Partition part{a.units_q, a.units_r};
    const u32 wg = workgroup_number(a);
    const u32 begin_unit = part.begin(wg), end_unit = part.begin(wg + 1);

    for (u32 unit = begin_unit; unit < end_unit;) {
        const u32 tile = unit / a.k_tiles;
        const u32 kt_begin = unit - tile * a.k_tiles;
        const u32 kt_end = min(a.k_tiles, kt_begin + (end_unit - unit));
        const u32 block_row = a.m_blocks == 1 ? tile : tile / a.m_blocks,
                  m_base = (tile - block_row * a.m_blocks) * (Cfg::kMTiles * 16);
        const u32 first_n_tile = (block_row * Cfg::kWaves + wave) * Cfg::kNTiles, row_group = first_n_tile / 4;

        TileOperands<Cfg> op;
        const u64 steps = static_cast<u64>(row_group) * a.k_tiles;
        op.weight = a.weight + steps * kStepBytes;
        op.scale = a.scale + steps * (Cfg::W::kScaleDwords * 4 * kWave);
        op.k_tiles = a.k_tiles;
        op.weight_tiles = row_group < a.row_groups ? a.k_tiles : 0;
        op.first_tile = first_n_tile % 4;
        op.lane16 = in_vgpr(lane * 16);
        op.lane_scale = in_vgpr(lane * (Cfg::W::kScaleDwords * 4));
        op.x = a.x + static_cast<u64>(m_base / 16) * a.k_tiles * kFragmentBytes;

        constexpr int kOwned = Cfg::kBlocks / Cfg::kWaves;
        const u32 first_block = wave * kOwned;
        const Buffer scratch = partial_slot(a, wg, unit == begin_unit ? 0 : 1, Cfg::kBlocks);
        // All waves must agree on planes (they share barriers), so each looks at every row.
        i32 planes[Cfg::kMTiles / 4];
        bool several = Cfg::W::kWindowed;
#pragma unroll
        for (int i = 0; i < Cfg::kMTiles / 4; ++i) {
            planes[i] = planes_of(a, m_base + i * 64 + lane);
            several |= planes[i] > 1;
        }
        const int sum_shift = __builtin_amdgcn_ballot_w64(several) != 0 ? kSumShift : 0;
        Accumulators<Cfg> acc;
        for (int plane = 0, parts = 0;; ++plane, op.x += a.plane_bytes) {
            bool wanted = false;
#pragma unroll
            for (int i = 0; i < Cfg::kMTiles / 4; ++i) wanted |= plane < planes[i];
            if (__builtin_amdgcn_ballot_w64(wanted) == 0) break;
#pragma unroll
            for (int c = 0; c < Cfg::kCopies; ++c) {
                const u32 m = m_base + (wave + c * Cfg::kWaves) / Cfg::kPieces * 16 + lane % 16;
                op.x_lane[c] = in_vgpr(plane < planes_of(a, m) ? lane * 16 : kOutOfRange);
            }
            bool more = true;
            for (int pass = 0; more; ++pass, ++parts) {
                if (parts != 0) {  // more than one plane or pass, rarely: the total waits in this workgroup's slot
#pragma unroll
                    for (int b = 0; b < kOwned; ++b)
                        store16(scratch, op.lane16, (first_block + b) * kBlockBytes,
                                as<u32x4>(acc[b / Cfg::kNTiles][b % Cfg::kNTiles]));
                }
#pragma unroll
                for (int b = 0; b < kOwned; ++b) acc[b / Cfg::kNTiles][b % Cfg::kNTiles] = f32x4{0, 0, 0, 0};
                more = false;
                tile_accumulate<Cfg>(op, lds, acc, wave, lane, kt_begin, kt_end, pass, more);
                if constexpr (Cfg::W::kWindowed) {
                    more = any_wave<Cfg::kWaves>(more, &shared_word);
                }
                if (sum_shift == 0) break;  // one plane, one pass
                const int shift = sum_shift - plane_octaves<Cfg::kCore> * plane - arch::kWindowOctaves * pass;
#pragma unroll
                for (int b = 0; b < kOwned; ++b) {
                    f32x4& v = acc[b / Cfg::kNTiles][b % Cfg::kNTiles];
                    v = shifted(v, shift);
                    if (parts != 0) v += as<f32x4>(load16(scratch, op.lane16, (first_block + b) * kBlockBytes));
                    if (b % 4 == 3) pin_schedule();
                }
            }
        }

        auto& sum = reinterpret_cast<f32x4(&)[kOwned]>(acc);
        auto block = [&](int i) { return first_block + i; };
        if (reduce_across_workgroups<Cfg::kBlocks>(a, part, wg, tile, kt_end - kt_begin, sum, block, shared_word)) {
#pragma unroll
            for (int j = 0; j < Cfg::kNTiles; ++j) {
                const u32 n = (first_n_tile + j) * 16 + lane / 16 * 4;
                if (n >= a.n) continue;
                const Columns columns = load_columns<Cfg::kType>(a, n, sum_shift);
#pragma unroll
                for (int i = 0; i < Cfg::kMTiles; ++i)
                    store_outputs<Cfg::kType>(a, columns, acc[i][j], n, m_base + i * 16 + lane % 16);
                pin_schedule();
            }
        }
        unit += kt_end - kt_begin;
    }
}

}  // namespace petit
