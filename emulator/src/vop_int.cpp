// 32-bit and 16-bit integer vector instructions.
#include <algorithm>

#include "valu.hpp"

namespace petit_emu {
namespace {

// F is the plain result, S the saturated one; which of them is a bit of the encoding.
template <auto F, auto S>
void vop2_sat(Wave& w, const Inst& in) {
    if (in.clamp)
        vop2<S>(w, in);
    else
        vop2<F>(w, in);
}

constexpr u32 sat_add_u32(u32 a, u32 b) { return a + b < a ? ~0u : a + b; }
constexpr u32 sat_sub_u32(u32 a, u32 b) { return a > b ? a - b : 0u; }
constexpr i32 clamp_i32(i64 x) {
    return x > 0x7fffffff ? 0x7fffffff : x < -0x80000000ll ? i32(-0x7fffffff - 1) : i32(x);
}
constexpr u32 sat_add_i32(u32 a, u32 b) { return u32(clamp_i32(i64(i32(a)) + i32(b))); }
constexpr u32 sat_sub_i32(u32 a, u32 b) { return u32(clamp_i32(i64(i32(a)) - i32(b))); }
constexpr u32 lo(u32 x) { return x & 0xffffu; }
constexpr i32 slo(u32 x) { return i32(i16(x)); }
constexpr u32 u24(u32 x) { return x & 0xffffffu; }
constexpr i32 i24(u32 x) { return i32(x << 8) >> 8; }

u32 byte_permute(u32 a, u32 b, u32 selector) {
    const u64 data = u64(a) << 32 | b;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 s = selector >> (8 * i) & 0xffu;
        const u32 sign = u32(data >> ((s & 3u) * 16 + 15)) & 1u ? 0xffu : 0u;
        const u32 x = s < 8 ? u32(data >> (8 * (s & 7u))) & 0xffu : s < 12 ? sign : s == 12 ? 0u : 0xffu;
        r |= x << (8 * i);
    }
    return r;
}
void v_perm(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row t0, t1, t2, out;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes), *c = w.src(in, 3, t2, lanes);
    if (in.ops[3].kind != Operand::vgpr && [&] {
            for (int i = 0; i < 4; ++i)
                if ((c[0] >> (8 * i) & 0xffu) > 7) return false;
            return true;
        }()) {
        const u32 s = c[0];  // one selector for all lanes, only plain bytes
        PETIT_EMU_LANES {
            const u64 data = u64(a[l]) << 32 | b[l];
            out.l[l] = (u32(data >> (8 * (s & 7))) & 0xffu) | (u32(data >> (8 * (s >> 8 & 7))) & 0xffu) << 8 |
                       (u32(data >> (8 * (s >> 16 & 7))) & 0xffu) << 16 |
                       (u32(data >> (8 * (s >> 24 & 7))) & 0xffu) << 24;
        }
    } else {
        for (int l = 0; l < kLanes; ++l) out.l[l] = byte_permute(a[l], b[l], c[l]);
    }
    store_row(w, in, out, lanes);
}

u32 sad_u8(u32 a, u32 b, u32 c, bool masked) {
    for (int i = 0; i < 4; ++i) {
        const i32 x = i32(a >> (8 * i) & 0xffu), y = i32(b >> (8 * i) & 0xffu);
        if (!masked || y) c += u32(std::abs(x - y));
    }
    return c;
}
u32 lerp_u8(u32 a, u32 b, u32 c) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 8) r |= ((((a >> i & 0xffu) + (b >> i & 0xffu) + (c >> i & 1u)) >> 1) & 0xffu) << i;
    return r;
}
u32 dot4_i8(u32 x, u32 y, u32 z) {
    for (int i = 0; i < 32; i += 8) z += u32(i32(i8(x >> i)) * i32(i8(y >> i)));
    return z;
}
template <class T>
constexpr T med3(T a, T b, T c) {
    return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

void v_bitop3(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row t0, t1, t2, out;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes), *c = w.src(in, 3, t2, lanes);
    const u32 table = in.bitop3;
    const u32 m[8] = {0u - (table & 1),      0u - (table >> 1 & 1), 0u - (table >> 2 & 1), 0u - (table >> 3 & 1),
                      0u - (table >> 4 & 1), 0u - (table >> 5 & 1), 0u - (table >> 6 & 1), 0u - (table >> 7 & 1)};
    PETIT_EMU_LANES {
        const u32 x = a[l], y = b[l], z = c[l];
        const u32 r = (m[0] & ~x & ~y & ~z) | (m[1] & ~x & ~y & z) | (m[2] & ~x & y & ~z) | (m[3] & ~x & y & z) |
                      (m[4] & x & ~y & ~z) | (m[5] & x & ~y & z) | (m[6] & x & y & ~z) | (m[7] & x & y & z);
        out.l[l] = in.def->ty == Ty::i16 ? r & 0xffffu : r;
    }
    if (in.post)
        finish_valu(w, in, out, lanes);
    else
        store_row(w, in, out, lanes);
}

// Moves carry "not initialised" along instead of failing: compilers copy undefined registers.
void v_mov(Wave& w, const Inst& in) {
    const Operand& s = in.ops[1];
    const unsigned d = in.ops[0].reg;
    if (s.kind == Operand::vgpr && !in.post && !in.src_mods && !in.dpp.ctrl && !w.pending[s.reg]) {
        const u64 lanes = w.exec();
        w.may_write(d);
        blend(w.v[d].l, w.v[s.reg].l, lanes);
        w.ready[d] = (w.ready[d] & ~lanes) | (w.ready[s.reg] & lanes);
        return;
    }
    vop1<[](u32 a) { return a; }>(w, in);
}

}  // namespace

void add_vop_int(OpTable& t) {
    const auto add = [&](const char* name, Handler fn, Ty ty = Ty::b32) -> OpDef& {
        return t.add(name, fn, Unit::valu, ty);
    };
#define V1(name, expr) add(name, vop1<[](u32 a) -> u32 { return (expr); }>)
#define V2(name, expr) add(name, vop2<[](u32 a, u32 b) -> u32 { return (expr); }>)
#define V3(name, expr) add(name, vop3<[](u32 a, u32 b, u32 c) -> u32 { return (expr); }>)
#define H2(name, expr) add(name, vop2<[](u32 a, u32 b) -> u32 { return ((expr) & 0xffffu); }>, Ty::i16)
#define SAT2(name, expr, sat, ty)                                                                                  \
    add(name, vop2_sat<[](u32 a, u32 b) -> u32 { return (expr); }, [](u32 a, u32 b) -> u32 { return (sat); }>, ty) \
        .int_clamp = true
    for (const char* n : {"v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32",
                          "v_accvgpr_read", "v_accvgpr_write"})
        add(n, v_mov);
    V1("v_not_b32", ~a);
    V1("v_bfrev_b32", [](u32 x) {
        x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
        x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
        x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
        x = (x >> 8 & 0x00ff00ffu) | (x & 0x00ff00ffu) << 8;
        return x >> 16 | x << 16;
    }(a));
    V1("v_ffbh_u32", a ? u32(std::countl_zero(a)) : ~0u);
    V1("v_ffbl_b32", a ? u32(std::countr_zero(a)) : ~0u);
    V1("v_ffbh_i32", (i32(a) < 0 ? ~a : a) ? u32(std::countl_zero(i32(a) < 0 ? ~a : a)) : ~0u);
    V1("v_prng_b32", a << 1 ^ (a >> 31 ? 197u : 0u));
    SAT2("v_add_u32", a + b, sat_add_u32(a, b), Ty::b32);
    SAT2("v_sub_u32", a - b, sat_sub_u32(a, b), Ty::b32);
    SAT2("v_subrev_u32", b - a, sat_sub_u32(b, a), Ty::b32);
    SAT2("v_add_i32", a + b, sat_add_i32(a, b), Ty::b32);
    SAT2("v_sub_i32", a - b, sat_sub_i32(a, b), Ty::b32);
    V2("v_and_b32", a & b);
    V2("v_or_b32", a | b);
    V2("v_xor_b32", a ^ b);
    V2("v_xnor_b32", ~(a ^ b));
    V2("v_lshlrev_b32", b << (a & 31));
    V2("v_lshrrev_b32", b >> (a & 31));
    V2("v_ashrrev_i32", u32(i32(b) >> (a & 31)));
    V2("v_min_u32", std::min(a, b));
    V2("v_max_u32", std::max(a, b));
    V2("v_min_i32", u32(std::min(i32(a), i32(b))));
    V2("v_max_i32", u32(std::max(i32(a), i32(b))));
    V2("v_mul_lo_u32", a * b);
    V2("v_mul_hi_u32", u32(u64(a) * b >> 32));
    V2("v_mul_hi_i32", u32(u64(i64(i32(a)) * i32(b)) >> 32));
    V2("v_mul_u32_u24", u24(a) * u24(b));
    V2("v_mul_hi_u32_u24", u32(u64(u24(a)) * u24(b) >> 32));
    V2("v_mul_i32_i24", u32(i24(a) * i24(b)));
    V2("v_mul_hi_i32_i24", u32(u64(i64(i24(a)) * i24(b)) >> 32));
    V2("v_bfm_b32", ((1u << (a & 31)) - 1u) << (b & 31));
    V2("v_bcnt_u32_b32", u32(std::popcount(a)) + b);
    V3("v_bfe_u32", (a >> (b & 31)) & ((1u << (c & 31)) - 1u));
    V3("v_bfe_i32", [](u32 x, u32 o, u32 n) {
        return n == 0 ? 0u : o + n < 32 ? u32(i32(x << (32 - o - n)) >> (32 - n)) : u32(i32(x) >> o);
    }(a, b & 31, c & 31));
    V3("v_bfi_b32", (a & b) | (~a & c));
    V3("v_alignbit_b32", u32((u64(a) << 32 | b) >> (c & 31)));
    V3("v_alignbyte_b32", u32((u64(a) << 32 | b) >> (8 * (c & 3))));
    V3("v_add3_u32", a + b + c);
    V3("v_lshl_add_u32", (a << (b & 31)) + c);
    V3("v_add_lshl_u32", (a + b) << (c & 31));
    V3("v_lshl_or_b32", (a << (b & 31)) | c);
    V3("v_and_or_b32", (a & b) | c);
    V3("v_or3_b32", a | b | c);
    V3("v_xad_u32", (a ^ b) + c);
    V3("v_mad_u32_u24", u24(a) * u24(b) + c);
    V3("v_mad_i32_i24", u32(i24(a) * i24(b)) + c);
    V3("v_min3_u32", std::min(a, std::min(b, c)));
    V3("v_max3_u32", std::max(a, std::max(b, c)));
    V3("v_med3_u32", med3(a, b, c));
    V3("v_min3_i32", u32(std::min(i32(a), std::min(i32(b), i32(c)))));
    V3("v_max3_i32", u32(std::max(i32(a), std::max(i32(b), i32(c)))));
    V3("v_med3_i32", u32(med3(i32(a), i32(b), i32(c))));
    V3("v_sad_u32", (a > b ? a - b : b - a) + c);
    V3("v_sad_u8", sad_u8(a, b, c, false));
    V3("v_msad_u8", sad_u8(a, b, c, true));
    V3("v_sad_hi_u8", (sad_u8(a, b, 0, false) << 16) + c);
    V3("v_sad_u16", u32(std::abs(i32(lo(a)) - i32(lo(b)))) + u32(std::abs(i32(a >> 16) - i32(b >> 16))) + c);
    V3("v_lerp_u8", lerp_u8(a, b, c));
    add("v_perm_b32", v_perm);
    add("v_bitop3_b32", v_bitop3);
    add("v_bitop3_b16", v_bitop3, Ty::i16);
    // 16 bit: the high half of the result is zero.
    SAT2("v_add_u16", lo(a + b), std::min(lo(a) + lo(b), 0xffffu), Ty::i16);
    SAT2("v_sub_u16", lo(a - b), sat_sub_u32(lo(a), lo(b)), Ty::i16);
    SAT2("v_subrev_u16", lo(b - a), sat_sub_u32(lo(b), lo(a)), Ty::i16);
    SAT2("v_add_i16", lo(a + b), lo(u32(std::clamp(slo(a) + slo(b), -32768, 32767))), Ty::i16);
    SAT2("v_sub_i16", lo(a - b), lo(u32(std::clamp(slo(a) - slo(b), -32768, 32767))), Ty::i16);
    H2("v_mul_lo_u16", lo(a) * lo(b));
    H2("v_lshlrev_b16", lo(b) << (a & 15));
    H2("v_lshrrev_b16", lo(b) >> (a & 15));
    H2("v_ashrrev_i16", u32(slo(b) >> (a & 15)));
    H2("v_min_u16", std::min(lo(a), lo(b)));
    H2("v_max_u16", std::max(lo(a), lo(b)));
    H2("v_min_i16", u32(std::min(slo(a), slo(b))));
    H2("v_max_i16", u32(std::max(slo(a), slo(b))));
#define H3(name, expr)                                                                                    \
    t.add(name, vop3<[](u32 a, u32 b, u32 c) -> u32 { return ((expr) & 0xffffu); }>, Unit::valu, Ty::i16, \
          Dst::keep_high)
    H3("v_mad_u16", lo(a) * lo(b) + c);
    H3("v_mad_i16", u32(slo(a) * slo(b)) + c);
    H3("v_mad_legacy_u16", lo(a) * lo(b) + c).dst = Dst::full;
    H3("v_min3_u16", std::min(lo(a), std::min(lo(b), lo(c))));
    H3("v_max3_u16", std::max(lo(a), std::max(lo(b), lo(c))));
    H3("v_med3_u16", med3(lo(a), lo(b), lo(c)));
    H3("v_min3_i16", u32(std::min(slo(a), std::min(slo(b), slo(c)))));
    H3("v_max3_i16", u32(std::max(slo(a), std::max(slo(b), slo(c)))));
    H3("v_med3_i16", u32(med3(slo(a), slo(b), slo(c))));
    t.add("v_mad_u32_u16", vop3<[](u32 a, u32 b, u32 c) -> u32 { return lo(a) * lo(b) + c; }>, Unit::valu, Ty::b32);
    t.add("v_mad_i32_i16", vop3<[](u32 a, u32 b, u32 c) -> u32 { return u32(slo(a) * slo(b)) + c; }>, Unit::valu,
          Ty::b32);
    add("v_pack_b32_f16", vop2<[](u32 a, u32 b) -> u32 { return (lo(a) | b << 16); }>, Ty::f16);
    V3("v_dot4_i32_i8", dot4_i8(a, b, c));
    V3("v_dot4_u32_u8", [](u32 x, u32 y, u32 z) {
        for (int i = 0; i < 32; i += 8) z += (x >> i & 0xffu) * (y >> i & 0xffu);
        return z;
    }(a, b, c));
    V3("v_dot8_i32_i4", [](u32 x, u32 y, u32 z) {
        for (int i = 0; i < 32; i += 4) z += u32((i32(x << (28 - i)) >> 28) * (i32(y << (28 - i)) >> 28));
        return z;
    }(a, b, c));
    V3("v_dot8_u32_u4", [](u32 x, u32 y, u32 z) {
        for (int i = 0; i < 32; i += 4) z += (x >> i & 15u) * (y >> i & 15u);
        return z;
    }(a, b, c));
    V3("v_dot2_i32_i16", u32(slo(a) * slo(b) + slo(a >> 16) * slo(b >> 16)) + c);
    V3("v_dot2_u32_u16", lo(a) * lo(b) + (a >> 16) * (b >> 16) + c);
    add("v_dot4c_i32_i8", vop2_acc<dot4_i8>);
    add("v_dot2c_i32_i16",
        vop2_acc<[](u32 a, u32 b, u32 c) -> u32 { return (u32(slo(a) * slo(b) + slo(a >> 16) * slo(b >> 16)) + c); }>);
    t.add("v_nop", [](Wave&, const Inst&) {}, Unit::valu);
}

}  // namespace petit_emu
