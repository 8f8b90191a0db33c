// Instructions that move data between lanes or between vector and scalar registers.
#include "valu.hpp"

namespace petit_emu {
namespace {

void v_readfirstlane(Wave& w, const Inst& in) {
    const u64 e = w.exec();
    const int lane = e ? std::countr_zero(e) : 0;
    Row t;
    w.write_s(in.ops[0].reg, w.dword(in.ops[1], 0, t, 1ull << lane)[lane]);
}
void v_readlane(Wave& w, const Inst& in) {
    const u32 lane = w.sop(in.ops[2]) & 63u;
    Row t;
    w.write_s(in.ops[0].reg, w.dword(in.ops[1], 0, t, 1ull << lane)[lane]);
}
void v_writelane(Wave& w, const Inst& in) {
    const u32 lane = w.sop(in.ops[2]) & 63u;
    w.may_write(in.ops[0].reg);
    w.v[in.ops[0].reg].l[lane] = w.sop(in.ops[1]);
    w.mark(in.ops[0].reg, 1ull << lane);
}
template <bool High>
void v_mbcnt(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row t0, t1, out;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes);
    for (int l = 0; l < kLanes; ++l) {
        const u64 below = (1ull << l) - 1ull;
        out.l[l] = b[l] + u32(std::popcount(a[l] & u32(High ? below >> 32 : below)));
    }
    store_row(w, in, out, lanes);
}

// Exchanges rows of 16 (or halves of 32) lanes between two registers; EXEC must be full for a defined result.
template <int Half>
void v_permlane_swap(Wave& w, const Inst& in) {
    const unsigned d = in.ops[0].reg, s = in.ops[1].reg;
    const u64 lanes = w.exec();
    if (lanes != ~0ull) w.die("a permlane swap with a partial EXEC is not modelled");
    w.need(d, lanes), w.need(s, lanes), w.may_write(d), w.may_write(s);
    for (int base = 0; base < kLanes; base += 2 * Half)
        for (int i = 0; i < Half; ++i) std::swap(w.v[s].l[base + i], w.v[d].l[base + Half + i]);
}

void v_swap(Wave& w, const Inst& in) {
    const unsigned a = in.ops[0].reg, b = in.ops[1].reg;
    const u64 lanes = w.exec();
    w.need(a, lanes), w.need(b, lanes), w.may_write(a), w.may_write(b);
    Row old = w.v[a];
    blend(w.v[a].l, w.v[b].l, lanes), blend(w.v[b].l, old.l, lanes);
}

}  // namespace

void add_vop_lane(OpTable& t) {
    const auto add = [&](const char* name, Handler fn) { t.add(name, fn, Unit::valu); };
    add("v_readfirstlane_b32", v_readfirstlane), add("v_readlane_b32", v_readlane), add("v_writelane_b32", v_writelane);
    add("v_mbcnt_lo_u32_b32", v_mbcnt<false>), add("v_mbcnt_hi_u32_b32", v_mbcnt<true>);
    add("v_permlane16_swap_b32", v_permlane_swap<16>), add("v_permlane32_swap_b32", v_permlane_swap<32>),
        add("v_swap_b32", v_swap);
}

}  // namespace petit_emu
