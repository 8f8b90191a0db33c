// Templates that turn a lane function into an instruction: read sources, compute 64 lanes (vectorised), blend by EXEC.
#pragma once
#include "wave.hpp"

namespace petit_emu {

// Clamp, output multiplier, SDWA or op_sel placement of a 32-bit result; then the write.
void finish_valu(Wave& w, const Inst& in, Row& result, u64 lanes);

inline u64 valu_lanes(const Wave& w, const Inst& in) { return in.dpp.ctrl ? w.dpp_lanes(in) : w.exec(); }

inline void store_row(Wave& w, const Inst& in, Row& out, u64 lanes) {
    const unsigned d = in.ops[0].reg;
    w.may_write(d);
    if (lanes == ~0ull)
        w.v[d] = out;
    else
        blend(w.v[d].l, out.l, lanes);
    w.mark(d, lanes);
}

#define PETIT_EMU_LANES _Pragma("GCC ivdep") for (int l = 0; l < kLanes; ++l)

template <auto F>
void vop1(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Row t0, out;
    const u32* a = w.src(in, 1, t0, lanes);
    PETIT_EMU_LANES out.l[l] = F(a[l]);
    if (in.post)
        finish_valu(w, in, out, lanes);
    else
        store_row(w, in, out, lanes);
}

template <auto F>
void vop2(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Row t0, t1, out;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes);
    PETIT_EMU_LANES out.l[l] = F(a[l], b[l]);
    if (in.post)
        finish_valu(w, in, out, lanes);
    else
        store_row(w, in, out, lanes);
}

template <auto F>
void vop3(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Row t0, t1, t2, out;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes), *c = w.src(in, 3, t2, lanes);
    PETIT_EMU_LANES out.l[l] = F(a[l], b[l], c[l]);
    if (in.post)
        finish_valu(w, in, out, lanes);
    else
        store_row(w, in, out, lanes);
}

// d = F(a, b, d): multiply-accumulate forms whose third source is the destination.
template <auto F>
void vop2_acc(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Row t0, t1, out;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes);
    w.need(in.ops[0].reg, lanes);
    const u32* d = w.v[in.ops[0].reg].l;
    PETIT_EMU_LANES out.l[l] = F(a[l], b[l], d[l]);
    if (in.post)
        finish_valu(w, in, out, lanes);
    else
        store_row(w, in, out, lanes);
}

// 64 lanes of a 64-bit operand (neg/abs on doubles included).
struct Wide {
    u64 l[kLanes];
};
void read_wide(const Wave& w, const Inst& in, int k, Wide& out, u64 lanes);
void write_wide(Wave& w, const Inst& in, const Wide& x, u64 lanes);

// Any number of sources, each 32 or 64 bits wide by the mask (bit i: source i is 64 bits), 64-bit result.
template <auto F, int N, unsigned WideMask, bool WideDst>
void vopw(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Wide s[3];
    for (int k = 0; k < N; ++k) {
        if (WideMask >> k & 1)
            read_wide(w, in, k + 1, s[k], lanes);
        else {
            Row t;
            const u32* p = w.src(in, k + 1, t, lanes);
            PETIT_EMU_LANES s[k].l[l] = p[l];
        }
    }
    if constexpr (WideDst) {
        Wide out;
        PETIT_EMU_LANES {
            if constexpr (N == 1)
                out.l[l] = F(s[0].l[l]);
            else if constexpr (N == 2)
                out.l[l] = F(s[0].l[l], s[1].l[l]);
            else
                out.l[l] = F(s[0].l[l], s[1].l[l], s[2].l[l]);
        }
        write_wide(w, in, out, lanes);
    } else {
        Row out;
        PETIT_EMU_LANES {
            if constexpr (N == 1)
                out.l[l] = static_cast<u32>(F(s[0].l[l]));
            else if constexpr (N == 2)
                out.l[l] = static_cast<u32>(F(s[0].l[l], s[1].l[l]));
            else
                out.l[l] = static_cast<u32>(F(s[0].l[l], s[1].l[l], s[2].l[l]));
        }
        if (in.post)
            finish_valu(w, in, out, lanes);
        else
            store_row(w, in, out, lanes);
    }
}

}  // namespace petit_emu
