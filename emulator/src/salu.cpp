// Scalar ALU.
#include <algorithm>

#include "wave.hpp"

namespace petit_emu {
namespace {

template <auto F, bool NonZero>
void sop2(Wave& w, const Inst& in) {
    const u32 r = F(w.sop(in.ops[1]), w.sop(in.ops[2]));
    w.write_s(in.ops[0].reg, r);
    if constexpr (NonZero) w.set_scc(r != 0);
}
template <auto F>  // F(a, b, &scc)
void sop2_carry(Wave& w, const Inst& in) {
    bool scc = w.scc;
    const u32 r = F(w.sop(in.ops[1]), w.sop(in.ops[2]), scc);
    w.write_s(in.ops[0].reg, r);
    w.set_scc(scc);
}
template <auto F, bool NonZero>
void sop2_64(Wave& w, const Inst& in) {
    const u64 r = F(w.sop64(in.ops[1]), w.sop64(in.ops[2]));
    w.write_s64(in.ops[0].reg, r);
    if constexpr (NonZero) w.set_scc(r != 0);
}
template <auto F, bool NonZero>
void sop2_64_32(Wave& w, const Inst& in) {
    const u64 r = F(w.sop64(in.ops[1]), w.sop(in.ops[2]));
    w.write_s64(in.ops[0].reg, r);
    if constexpr (NonZero) w.set_scc(r != 0);
}
template <auto F, bool NonZero>
void sop1(Wave& w, const Inst& in) {
    const u32 r = F(w.sop(in.ops[1]));
    w.write_s(in.ops[0].reg, r);
    if constexpr (NonZero) w.set_scc(r != 0);
}
template <auto F, bool NonZero>
void sop1_64(Wave& w, const Inst& in) {
    const u64 r = F(w.sop64(in.ops[1]));
    w.write_s64(in.ops[0].reg, r);
    if constexpr (NonZero) w.set_scc(r != 0);
}
template <auto F, bool NonZero>
void sop1_64_to_32(Wave& w, const Inst& in) {
    const u32 r = F(w.sop64(in.ops[1]));
    w.write_s(in.ops[0].reg, r);
    if constexpr (NonZero) w.set_scc(r != 0);
}
template <auto F>
void sopc(Wave& w, const Inst& in) {
    w.set_scc(F(w.sop(in.ops[0]), w.sop(in.ops[1])));
}
template <auto F>
void sopc64(Wave& w, const Inst& in) {
    w.set_scc(F(w.sop64(in.ops[0]), w.sop64(in.ops[1])));
}

u32 simm(const Inst& in, int k) { return static_cast<u32>(static_cast<i32>(static_cast<i16>(in.ops[k].bits))); }
template <auto F>
void sopk_cmp(Wave& w, const Inst& in) {
    w.set_scc(F(w.read_s(in.ops[0].reg), in.ops[1].bits));
}

template <auto F>
void saveexec(Wave& w, const Inst& in) {
    const u64 s = w.sop64(in.ops[1]), old = w.exec(), r = F(s, old);
    w.write_s64(in.ops[0].reg, old);
    w.set_exec(r);
    w.set_scc(r != 0);
}
template <auto F>
void wrexec(Wave& w, const Inst& in) {
    const u64 r = F(w.sop64(in.ops[1]), w.exec());
    w.write_s64(in.ops[0].reg, r);
    w.set_exec(r);
    w.set_scc(r != 0);
}

template <class T>
T bfe(T x, u32 control, bool is_signed, int bits) {
    const u32 offset = control & static_cast<u32>(bits - 1),
              width = std::min<u32>(control >> 16 & 127u, static_cast<u32>(bits));
    if (width == 0) return 0;
    T v = x >> offset;
    const u32 left = static_cast<u32>(bits) - std::min<u32>(width, static_cast<u32>(bits));
    using S = std::make_signed_t<T>;
    if (offset + width > static_cast<u32>(bits)) return is_signed ? static_cast<T>(static_cast<S>(x) >> offset) : v;
    v <<= left;
    return is_signed ? static_cast<T>(static_cast<S>(v) >> left) : static_cast<T>(v >> left);
}

u32 bitreverse(u32 x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
template <class T>
T wqm(T x) {
    T r = 0;
    for (unsigned i = 0; i < sizeof(T) * 8; i += 4)
        if (x >> i & 15) r |= T(15) << i;
    return r;
}

void s_mov_b32(Wave& w, const Inst& in) { w.write_s(in.ops[0].reg, w.sop(in.ops[1])); }
void s_mov_b64(Wave& w, const Inst& in) { w.write_s64(in.ops[0].reg, w.sop64(in.ops[1])); }
void s_cmov_b32(Wave& w, const Inst& in) {
    if (w.get_scc()) s_mov_b32(w, in);
}
void s_cmov_b64(Wave& w, const Inst& in) {
    if (w.get_scc()) s_mov_b64(w, in);
}
void s_cselect_b32(Wave& w, const Inst& in) { w.write_s(in.ops[0].reg, w.sop(in.ops[w.get_scc() ? 1 : 2])); }
void s_cselect_b64(Wave& w, const Inst& in) { w.write_s64(in.ops[0].reg, w.sop64(in.ops[w.get_scc() ? 1 : 2])); }
void s_movk(Wave& w, const Inst& in) { w.write_s(in.ops[0].reg, simm(in, 1)); }
void s_cmovk(Wave& w, const Inst& in) {
    if (w.get_scc()) s_movk(w, in);
}
void s_addk(Wave& w, const Inst& in) {
    const u32 a = w.read_s(in.ops[0].reg), b = simm(in, 1), r = a + b;
    w.write_s(in.ops[0].reg, r);
    w.set_scc((~(a ^ b) & (a ^ r)) >> 31);
}
void s_mulk(Wave& w, const Inst& in) { w.write_s(in.ops[0].reg, w.read_s(in.ops[0].reg) * simm(in, 1)); }
template <bool One, bool Wide>
void s_bitset(Wave& w, const Inst& in) {
    const u32 at = w.sop(in.ops[1]);
    if constexpr (Wide) {
        const u64 m = 1ull << (at & 63), x = w.read_s64(in.ops[0].reg);
        w.write_s64(in.ops[0].reg, One ? x | m : x & ~m);
    } else {
        const u32 m = 1u << (at & 31), x = w.read_s(in.ops[0].reg);
        w.write_s(in.ops[0].reg, One ? x | m : x & ~m);
    }
}
template <bool One>
void s_bitcmp(Wave& w, const Inst& in) {
    w.set_scc((w.sop(in.ops[0]) >> (w.sop(in.ops[1]) & 31) & 1) == One);
}
template <bool One>
void s_bitcmp64(Wave& w, const Inst& in) {
    w.set_scc((w.sop64(in.ops[0]) >> (w.sop(in.ops[1]) & 63) & 1) == One);
}

template <int Shift>
u32 lshl_add(u32 a, u32 b, bool& scc) {
    const u64 r = (u64(a) << Shift) + b;
    scc = r >> 32 != 0;
    return static_cast<u32>(r);
}

}  // namespace

void add_salu(OpTable& t) {
    const auto add = [&](const char* name, Handler fn, Ty ty = Ty::b32) { t.add(name, fn, Unit::salu, ty); };
#define S2(name, nz, expr) add(name, sop2<[](u32 a, u32 b) -> u32 { return ((void)a, (void)b, (expr)); }, nz>)
#define S2W(name, nz, expr) add(name, sop2_64<[](u64 a, u64 b) -> u64 { return (expr); }, nz>, Ty::b64)
#define S2H(name, nz, expr) add(name, sop2_64_32<[](u64 a, u32 b) -> u64 { return (expr); }, nz>, Ty::b64)
#define SC(name, ...)                                                           \
    {                                                                           \
        static constexpr auto f = [](u32 a, u32 b, bool& scc)->u32 __VA_ARGS__; \
        add(name, sop2_carry<f>);                                               \
    }
    SC("s_add_u32", {
        const u64 r = u64(a) + b;
        scc = r >> 32;
        return u32(r);
    })
    SC("s_sub_u32", {
        scc = b > a;
        return a - b;
    })
    SC("s_add_i32", {
        const u32 r = a + b;
        scc = (~(a ^ b) & (a ^ r)) >> 31;
        return r;
    })
    SC("s_sub_i32", {
        const u32 r = a - b;
        scc = ((a ^ b) & (a ^ r)) >> 31;
        return r;
    })
    SC("s_addc_u32", {
        const u64 r = u64(a) + b + scc;
        scc = r >> 32;
        return u32(r);
    })
    SC("s_subb_u32", {
        const u64 r = u64(a) - b - scc;
        scc = r >> 63;
        return u32(r);
    })
    SC("s_min_i32", {
        scc = i32(a) < i32(b);
        return scc ? a : b;
    })
    SC("s_min_u32", {
        scc = a < b;
        return scc ? a : b;
    })
    SC("s_max_i32", {
        scc = i32(a) > i32(b);
        return scc ? a : b;
    })
    SC("s_max_u32", {
        scc = a > b;
        return scc ? a : b;
    })
    SC("s_absdiff_i32", {
        const u32 d = a - b, r = i32(d) < 0 ? 0u - d : d;
        scc = r != 0;
        return r;
    })
    add("s_lshl1_add_u32", sop2_carry<lshl_add<1>>), add("s_lshl2_add_u32", sop2_carry<lshl_add<2>>);
    add("s_lshl3_add_u32", sop2_carry<lshl_add<3>>), add("s_lshl4_add_u32", sop2_carry<lshl_add<4>>);
    S2("s_and_b32", true, a & b);
    S2("s_or_b32", true, a | b);
    S2("s_xor_b32", true, a ^ b);
    S2("s_andn2_b32", true, a & ~b);
    S2("s_orn2_b32", true, a | ~b);
    S2("s_nand_b32", true, ~(a & b));
    S2("s_nor_b32", true, ~(a | b));
    S2("s_xnor_b32", true, ~(a ^ b));
    S2W("s_and_b64", true, a & b);
    S2W("s_or_b64", true, a | b);
    S2W("s_xor_b64", true, a ^ b);
    S2W("s_andn2_b64", true, a & ~b);
    S2W("s_orn2_b64", true, a | ~b);
    S2W("s_nand_b64", true, ~(a & b));
    S2W("s_nor_b64", true, ~(a | b));
    S2W("s_xnor_b64", true, ~(a ^ b));
    S2("s_lshl_b32", true, a << (b & 31));
    S2("s_lshr_b32", true, a >> (b & 31));
    S2("s_ashr_i32", true, u32(i32(a) >> (b & 31)));
    S2H("s_lshl_b64", true, a << (b & 63));
    S2H("s_lshr_b64", true, a >> (b & 63));
    S2H("s_ashr_i64", true, u64(i64(a) >> (b & 63)));
    S2("s_bfe_u32", true, bfe<u32>(a, b, false, 32));
    S2("s_bfe_i32", true, bfe<u32>(a, b, true, 32));
    S2H("s_bfe_u64", true, bfe<u64>(a, b, false, 64));
    S2H("s_bfe_i64", true, bfe<u64>(a, b, true, 64));
    S2("s_bfm_b32", false, ((1u << (a & 31)) - 1u) << (b & 31));
    add("s_bfm_b64", [](Wave& w, const Inst& in) {
        w.write_s64(in.ops[0].reg, ((1ull << (w.sop(in.ops[1]) & 63)) - 1ull) << (w.sop(in.ops[2]) & 63));
    });
    S2("s_mul_i32", false, a * b);
    S2("s_mul_hi_u32", false, u32(u64(a) * b >> 32));
    S2("s_mul_hi_i32", false, u32(u64(i64(i32(a)) * i32(b)) >> 32));
    S2("s_pack_ll_b32_b16", false, (a & 0xffffu) | b << 16);
    S2("s_pack_lh_b32_b16", false, (a & 0xffffu) | (b & 0xffff0000u));
    S2("s_pack_hh_b32_b16", false, a >> 16 | (b & 0xffff0000u));
    add("s_cselect_b32", s_cselect_b32), add("s_cselect_b64", s_cselect_b64, Ty::b64);

#define S1(name, nz, expr) add(name, sop1<[](u32 a) -> u32 { return (expr); }, nz>)
#define S1W(name, nz, expr) add(name, sop1_64<[](u64 a) -> u64 { return (expr); }, nz>, Ty::b64)
#define S1N(name, nz, expr) add(name, sop1_64_to_32<[](u64 a) -> u32 { return (expr); }, nz>, Ty::b64)
    add("s_mov_b32", s_mov_b32), add("s_mov_b64", s_mov_b64, Ty::b64), add("s_cmov_b32", s_cmov_b32),
        add("s_cmov_b64", s_cmov_b64, Ty::b64);
    S1("s_not_b32", true, ~a);
    S1W("s_not_b64", true, ~a);
    S1("s_wqm_b32", true, wqm(a));
    S1W("s_wqm_b64", true, wqm(a));
    S1("s_brev_b32", false, bitreverse(a));
    S1W("s_brev_b64", false, u64(bitreverse(u32(a))) << 32 | bitreverse(u32(a >> 32)));
    S1("s_bcnt0_i32_b32", true, u32(32 - std::popcount(a)));
    S1("s_bcnt1_i32_b32", true, u32(std::popcount(a)));
    S1N("s_bcnt0_i32_b64", true, u32(64 - std::popcount(a)));
    S1N("s_bcnt1_i32_b64", true, u32(std::popcount(a)));
    S1("s_ff0_i32_b32", false, ~a ? u32(std::countr_one(a)) : ~0u);
    S1("s_ff1_i32_b32", false, a ? u32(std::countr_zero(a)) : ~0u);
    S1N("s_ff0_i32_b64", false, ~a ? u32(std::countr_one(a)) : ~0u);
    S1N("s_ff1_i32_b64", false, a ? u32(std::countr_zero(a)) : ~0u);
    S1("s_flbit_i32_b32", false, a ? u32(std::countl_zero(a)) : ~0u);
    S1N("s_flbit_i32_b64", false, a ? u32(std::countl_zero(a)) : ~0u);
    S1("s_flbit_i32", false, (i32(a) < 0 ? ~a : a) ? u32(std::countl_zero(i32(a) < 0 ? ~a : a)) : ~0u);
    S1N("s_flbit_i32_i64", false, (i64(a) < 0 ? ~a : a) ? u32(std::countl_zero(i64(a) < 0 ? ~a : a)) : ~0u);
    S1("s_sext_i32_i8", false, u32(i32(i8(a))));
    S1("s_sext_i32_i16", false, u32(i32(i16(a))));
    S1("s_abs_i32", true, i32(a) < 0 ? 0u - a : a);
    add("s_bitset0_b32", s_bitset<false, false>), add("s_bitset1_b32", s_bitset<true, false>);
    add("s_bitset0_b64", s_bitset<false, true>), add("s_bitset1_b64", s_bitset<true, true>);
#define SAVE(name, expr) add("s_" name "_saveexec_b64", saveexec<[](u64 s, u64 e) -> u64 { return (expr); }>, Ty::b64)
    SAVE("and", s & e);
    SAVE("or", s | e);
    SAVE("xor", s ^ e);
    SAVE("andn2", s & ~e);
    SAVE("orn2", s | ~e);
    SAVE("nand", ~(s & e));
    SAVE("nor", ~(s | e));
    SAVE("xnor", ~(s ^ e));
    SAVE("andn1", ~s & e);
    SAVE("orn1", ~s | e);
    add("s_andn1_wrexec_b64", wrexec<[](u64 s, u64 e) -> u64 { return ~s & e; }>, Ty::b64);
    add("s_andn2_wrexec_b64", wrexec<[](u64 s, u64 e) -> u64 { return s & ~e; }>, Ty::b64);

#define CMP(name, expr) add("s_cmp_" name, sopc<[](u32 a, u32 b) -> bool { return (expr); }>)
    CMP("eq_i32", a == b);
    CMP("lg_i32", a != b);
    CMP("gt_i32", i32(a) > i32(b));
    CMP("ge_i32", i32(a) >= i32(b));
    CMP("lt_i32", i32(a) < i32(b));
    CMP("le_i32", i32(a) <= i32(b));
    CMP("eq_u32", a == b);
    CMP("lg_u32", a != b);
    CMP("gt_u32", a > b);
    CMP("ge_u32", a >= b);
    CMP("lt_u32", a < b);
    CMP("le_u32", a <= b);
    add("s_cmp_eq_u64", sopc64<[](u64 a, u64 b) -> bool { return a == b; }>, Ty::b64);
    add("s_cmp_lg_u64", sopc64<[](u64 a, u64 b) -> bool { return a != b; }>, Ty::b64);
    add("s_bitcmp0_b32", s_bitcmp<false>), add("s_bitcmp1_b32", s_bitcmp<true>);
    add("s_bitcmp0_b64", s_bitcmp64<false>, Ty::b64), add("s_bitcmp1_b64", s_bitcmp64<true>, Ty::b64);

#define CMPK_I(name, op) \
    add("s_cmpk_" name "_i32", sopk_cmp<[](u32 a, u64 b) -> bool { return (i32(a) op i32(i16(b))); }>)
#define CMPK_U(name, op) add("s_cmpk_" name "_u32", sopk_cmp<[](u32 a, u64 b) -> bool { return (a op u32(u16(b))); }>)
    CMPK_I("eq", ==);
    CMPK_I("lg", !=);
    CMPK_I("gt", >);
    CMPK_I("ge", >=);
    CMPK_I("lt", <);
    CMPK_I("le", <=);
    CMPK_U("eq", ==);
    CMPK_U("lg", !=);
    CMPK_U("gt", >);
    CMPK_U("ge", >=);
    CMPK_U("lt", <);
    CMPK_U("le", <=);
    add("s_movk_i32", s_movk), add("s_cmovk_i32", s_cmovk), add("s_addk_i32", s_addk), add("s_mulk_i32", s_mulk);
}

}  // namespace petit_emu
