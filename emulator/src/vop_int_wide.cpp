// 64-bit integers, carries, v_cndmask.
#include "valu.hpp"

namespace petit_emu {
namespace {

void no_sub_dword(const Wave& w, const Inst& in) {
    if (in.sdwa.on || in.dpp.ctrl) w.die("SDWA or DPP on this instruction is not supported");
}

// v_add_co_u32 d, carry_out, a, b [, carry_in]
template <auto F>  // F(a, b, carry_in) -> 64 bits: result and, in bit 32, the carry
void carry(Wave& w, const Inst& in) {
    no_sub_dword(w, in);
    const u64 lanes = w.exec();
    Row t0, t1, out;
    const u32 *a = w.src(in, 2, t0, lanes), *b = w.src(in, 3, t1, lanes);
    const u64 cin = in.nops > 4 ? w.read_s64(in.ops[4].reg) : 0;
    u64 cout = 0;
    for (int l = 0; l < kLanes; ++l) {
        const u64 r = F(u64(a[l]), u64(b[l]), cin >> l & 1);
        out.l[l] = static_cast<u32>(r);
        cout |= (r >> 32 & 1) << l;
    }
    w.may_write(in.ops[0].reg);
    blend(w.v[in.ops[0].reg].l, out.l, lanes);
    w.mark(in.ops[0].reg, lanes);
    w.write_s64(in.ops[1].reg, cout & lanes);
}

template <bool Signed>
void v_mad_64_32(Wave& w, const Inst& in) {  // d64, carry, a32, b32, c64
    const u64 lanes = w.exec();
    Row t0, t1;
    Wide c, out;
    const u32 *a = w.src(in, 2, t0, lanes), *b = w.src(in, 3, t1, lanes);
    read_wide(w, in, 4, c, lanes);
    u64 carry_out = 0;
    for (int l = 0; l < kLanes; ++l) {
        const u64 p = Signed ? u64(i64(i32(a[l])) * i32(b[l])) : u64(a[l]) * b[l];
        out.l[l] = p + c.l[l];
        const bool overflow = Signed ? (i64((p ^ out.l[l]) & (c.l[l] ^ out.l[l])) < 0) : out.l[l] < p;
        carry_out |= u64(overflow) << l;
    }
    write_wide(w, in, out, lanes);
    if (in.ops[1].kind == Operand::sgpr) w.write_s64(in.ops[1].reg, carry_out & lanes);
}

void v_cndmask(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Row t0, t1, out;
    const u64 mask = in.nops > 3 ? w.read_s64(in.ops[3].reg) : w.read_s64(kVcc);
    // Only the chosen side must be initialised.
    const u32 *a = w.src(in, 1, t0, lanes & ~mask), *b = w.src(in, 2, t1, lanes & mask);
    for (int l = 0; l < kLanes; ++l) out.l[l] = (mask >> l & 1) ? b[l] : a[l];
    if (in.post)
        finish_valu(w, in, out, lanes);
    else
        store_row(w, in, out, lanes);
}

void v_mov_b64(Wave& w, const Inst& in) {
    vopw<[](u64 a) { return a; }, 1, 1, true>(w, in);
}

}  // namespace

void add_vop_int_wide(OpTable& t) {
    const auto add = [&](const char* name, Handler fn, Ty ty = Ty::b32) { t.add(name, fn, Unit::valu, ty); };
    const auto adc = carry<[](u64 a, u64 b, u64 c) -> u64 { return a + b + c; }>;
    const auto sbc = carry<[](u64 a, u64 b, u64 c) -> u64 { return a - b - c; }>;
    const auto sbr = carry<[](u64 a, u64 b, u64 c) -> u64 { return b - a - c; }>;
    add("v_add_co_u32", adc), add("v_addc_co_u32", adc), add("v_sub_co_u32", sbc), add("v_subb_co_u32", sbc);
    add("v_subrev_co_u32", sbr), add("v_subbrev_co_u32", sbr);
    add("v_mad_u64_u32", v_mad_64_32<false>, Ty::b64), add("v_mad_i64_i32", v_mad_64_32<true>, Ty::b64);
    add("v_cndmask_b32", v_cndmask), add("v_mov_b64", v_mov_b64, Ty::b64);
    add("v_lshlrev_b64", vopw<[](u64 a, u64 b) { return b << (a & 63); }, 2, 2, true>, Ty::b64);
    add("v_lshrrev_b64", vopw<[](u64 a, u64 b) { return (b >> (a & 63)); }, 2, 2, true>, Ty::b64);
    add("v_ashrrev_i64", vopw<[](u64 a, u64 b) { return (u64(i64(b) >> (a & 63))); }, 2, 2, true>, Ty::b64);
    add("v_lshl_add_u64", vopw<[](u64 a, u64 b, u64 c) { return (a << (b & 7)) + c; }, 3, 5, true>, Ty::b64);
}

}  // namespace petit_emu
