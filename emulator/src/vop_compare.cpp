// Vector comparisons: one bit a lane into an SGPR pair (and EXEC for v_cmpx).
#include "valu.hpp"

namespace petit_emu {
namespace {

void write_mask(Wave& w, const Inst& in, u64 bits, u64 lanes, bool also_exec) {
    bits &= lanes;
    w.write_s64(in.ops[0].reg, bits);
    if (also_exec) w.set_exec(bits);
}

template <auto F, bool X>
void cmp32(Wave& w, const Inst& in) {
    const u64 lanes = valu_lanes(w, in);
    Row t0, t1;
    const u32 *a = w.src(in, 1, t0, lanes), *b = w.src(in, 2, t1, lanes);
    alignas(64) u32 hit[kLanes];
    PETIT_EMU_LANES hit[l] = F(a[l], b[l]) ? 0x80000000u : 0u;
    u64 bits = 0;
    for (int l = 0; l < kLanes; l += 8)
        bits |= u64(u32(_mm256_movemask_ps(
                    _mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(hit + l))))))
                << l;
    write_mask(w, in, bits, lanes, X);
}
template <auto F, bool X>
void cmp64(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Wide a, b;
    read_wide(w, in, 1, a, lanes), read_wide(w, in, 2, b, lanes);
    u64 bits = 0;
    for (int l = 0; l < kLanes; ++l) bits |= u64(F(a.l[l], b.l[l])) << l;
    write_mask(w, in, bits, lanes, X);
}

// Class mask bits: sNaN qNaN -inf -normal -denorm -0 +0 +denorm +normal +inf
template <int Bits>
bool classify(u64 x, u32 mask) {
    constexpr int man = Bits == 16 ? 10 : Bits == 32 ? 23 : 52;
    const bool neg = x >> (Bits - 1) & 1;
    const u64 m = x & ((1ull << man) - 1), e = x >> man & ((1ull << (Bits - 1 - man)) - 1),
              top = (1ull << (Bits - 1 - man)) - 1;
    int bit;
    if (e == top)
        bit = m == 0 ? (neg ? 2 : 9) : (m >> (man - 1) ? 1 : 0);
    else if (e)
        bit = neg ? 3 : 8;
    else if (m)
        bit = neg ? 4 : 7;
    else
        bit = neg ? 5 : 6;
    return mask >> bit & 1;
}
template <bool X>
void class_f64(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Wide a;
    Row t;
    read_wide(w, in, 1, a, lanes);
    const u32* b = w.src(in, 2, t, lanes);
    u64 bits = 0;
    for (int l = 0; l < kLanes; ++l) bits |= u64(classify<64>(a.l[l], b[l])) << l;
    write_mask(w, in, bits, lanes, X);
}

template <auto F>
void add32(OpTable& t, const std::string& name, Ty ty) {
    t.add("v_cmp_" + name, cmp32<F, false>, Unit::valu, ty), t.add("v_cmpx_" + name, cmp32<F, true>, Unit::valu, ty);
}
template <auto F>
void add64(OpTable& t, const std::string& name, Ty ty) {
    t.add("v_cmp_" + name, cmp64<F, false>, Unit::valu, ty), t.add("v_cmpx_" + name, cmp64<F, true>, Unit::valu, ty);
}

// The sixteen float and eight integer predicates for a way of reading the operand.
template <auto Read, class U, bool Wide64>
void add_float(OpTable& t, const std::string& type, Ty ty) {
    const auto one = [&]<auto P>(const char* name) {
        constexpr auto f = [](U a, U b) -> bool { return P(Read(a), Read(b)); };
        if constexpr (Wide64)
            add64<f>(t, std::string(name) + "_" + type, ty);
        else
            add32<f>(t, std::string(name) + "_" + type, ty);
    };
#define PRED(name, expr) \
    one.template operator()<[](auto a, auto b) -> bool { return ((void)a, (void)b, (expr)); }>(name)
    PRED("f", false);
    PRED("lt", a < b);
    PRED("eq", a == b);
    PRED("le", a <= b);
    PRED("gt", a > b);
    PRED("lg", a < b || a > b);
    PRED("ge", a >= b);
    PRED("o", a == a && b == b);
    PRED("u", !(a == a && b == b));
    PRED("nge", !(a >= b));
    PRED("nlg", !(a < b || a > b));
    PRED("ngt", !(a > b));
    PRED("nle", !(a <= b));
    PRED("neq", !(a == b));
    PRED("nlt", !(a < b));
    PRED("tru", true);
}
template <auto Read, class U, bool Wide64>
void add_integer(OpTable& t, const std::string& type, Ty ty) {
    const auto one = [&]<auto P>(const char* name) {
        constexpr auto f = [](U a, U b) -> bool { return P(Read(a), Read(b)); };
        if constexpr (Wide64)
            add64<f>(t, std::string(name) + "_" + type, ty);
        else
            add32<f>(t, std::string(name) + "_" + type, ty);
    };
    PRED("f", false);
    PRED("lt", a < b);
    PRED("eq", a == b);
    PRED("le", a <= b);
    PRED("gt", a > b);
    PRED("ne", a != b);
    PRED("ge", a >= b);
    PRED("t", true);
}

}  // namespace

void add_vop_compare(OpTable& t) {
    add_float<[](u32 x) { return f32(x); }, u32, false>(t, "f32", Ty::f32);
    add_float<[](u32 x) { return h2f(x); }, u32, false>(t, "f16", Ty::f16);
    add_float<[](u64 x) { return f64(x); }, u64, true>(t, "f64", Ty::f64);
    add_integer<[](u32 x) { return x; }, u32, false>(t, "u32", Ty::b32);
    add_integer<[](u32 x) { return i32(x); }, u32, false>(t, "i32", Ty::b32);
    add_integer<[](u32 x) { return x & 0xffffu; }, u32, false>(t, "u16", Ty::i16);
    add_integer<[](u32 x) { return i32(i16(x)); }, u32, false>(t, "i16", Ty::i16);
    add_integer<[](u64 x) { return x; }, u64, true>(t, "u64", Ty::b64);
    add_integer<[](u64 x) { return i64(x); }, u64, true>(t, "i64", Ty::b64);
    add32<[](u32 a, u32 b) -> bool { return classify<32>(a, b); }>(t, "class_f32", Ty::f32);
    add32<[](u32 a, u32 b) -> bool { return classify<16>(a & 0xffffu, b); }>(t, "class_f16", Ty::f16);
    t.add("v_cmp_class_f64", class_f64<false>, Unit::valu, Ty::f64),
        t.add("v_cmpx_class_f64", class_f64<true>, Unit::valu, Ty::f64);
}

}  // namespace petit_emu
