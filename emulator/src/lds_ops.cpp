// DS instructions.
#include <algorithm>

#include "group.hpp"
#include "valu.hpp"

namespace petit_emu {
namespace {

enum class Part : u8 { full, zext, sext, d16, d16_hi };

void note(InFlight& f, u32 address, u32 n) {  // merges neighbours
    auto& v = f.lds_bytes;
    if (!v.empty() && v[v.size() - 2] + v.back() == address)
        v.back() += n;
    else
        v.push_back(address), v.push_back(n);
}

void count(Wave& w, const u32* address, u64 lanes, u32 bytes, bool write) {
    Counters& c = w.group->launch->counters;
    const LdsCycles cycles = lds_cycles(w.group->launch->arch, address, lanes, bytes, write);
    c.lds_cycles += cycles.total, c.lds_conflict_cycles += cycles.conflict;
    (write ? c.lds_write_bytes : c.lds_read_bytes) += u64(std::popcount(lanes)) * bytes;
}

InFlight in_flight(u64 lanes, bool write) {
    InFlight f;
    f.lgkm = true, f.lanes = lanes, f.lds_write = write;
    return f;
}

// Bytes `Bytes` at each of `Count` offsets (ds_read2: unit x offset0/1) into consecutive registers.
template <u32 Bytes, Part P, int Count = 1, u32 Unit_ = 1>
void ds_read(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Lds& lds = w.group->lds;
    Row t, at;
    const u32* base = w.dword(in.ops[1], 0, t, lanes);
    constexpr u32 dwords = (Bytes + 3) / 4;
    const unsigned d = in.ops[0].reg;
    InFlight f = in_flight(lanes, false);
    f.first = static_cast<u16>(d), f.count = static_cast<u16>(dwords * Count);
    for (int c = 0; c < Count; ++c) {
        const u32 offset = Count == 1 ? u32(in.offset) : Unit_ * u32(c ? in.offset1 : in.offset0);
        for (int l = 0; l < kLanes; ++l) at.l[l] = base[l] + offset;
        for (int l = 0; l < kLanes; ++l) {
            if (!(lanes >> l & 1)) continue;
            u32 x[4] = {};
            lds.read(w, at.l[l], Bytes, reinterpret_cast<u8*>(x));
            note(f, at.l[l], Bytes);
            if constexpr (P == Part::sext) x[0] = Bytes == 1 ? u32(i32(i8(x[0]))) : u32(i32(i16(x[0])));
            if constexpr (P == Part::d16) x[0] = (w.v[d].l[l] & 0xffff0000u) | (x[0] & 0xffffu);
            if constexpr (P == Part::d16_hi) x[0] = (w.v[d].l[l] & 0xffffu) | x[0] << 16;
            for (u32 i = 0; i < dwords; ++i) w.v[d + c * dwords + i].l[l] = x[i];
        }
        count(w, at.l, lanes, Bytes, false);
    }
    w.issue(std::move(f));
}

template <u32 Bytes, bool Hi = false, int Count = 1, u32 Unit_ = 1>
void ds_write(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Lds& lds = w.group->lds;
    Row t, at;
    const u32* base = w.dword(in.ops[0], 0, t, lanes);
    constexpr u32 dwords = (Bytes + 3) / 4;
    InFlight f = in_flight(lanes, true);
    for (int c = 0; c < Count; ++c) {
        const u32 offset = Count == 1 ? u32(in.offset) : Unit_ * u32(c ? in.offset1 : in.offset0);
        for (int l = 0; l < kLanes; ++l) at.l[l] = base[l] + offset;
        const u32* data[4];
        Row spare[4];
        for (u32 i = 0; i < dwords; ++i) data[i] = w.dword(in.ops[1 + c], int(i), spare[i], lanes);
        for (int l = 0; l < kLanes; ++l) {
            if (!(lanes >> l & 1)) continue;
            u32 x[4];
            for (u32 i = 0; i < dwords; ++i) x[i] = data[i][l];
            if constexpr (Hi) x[0] >>= 16;
            lds.write(w, at.l[l], Bytes, reinterpret_cast<const u8*>(x));
            note(f, at.l[l], Bytes);
        }
        count(w, at.l, lanes, Bytes, true);
    }
    w.issue(std::move(f));
}

template <class T, auto F, bool Return>
void ds_atomic(Wave& w, const Inst& in) {  // F(old, data) -> new
    const u64 lanes = w.exec();
    Lds& lds = w.group->lds;
    Row t, at, spare[2];
    constexpr int a = Return ? 1 : 0, dwords = sizeof(T) / 4;
    const u32* base = w.dword(in.ops[a], 0, t, lanes);
    const u32* data[2] = {w.dword(in.ops[a + 1], 0, spare[0], lanes),
                          dwords == 2 ? w.dword(in.ops[a + 1], 1, spare[1], lanes) : nullptr};
    InFlight f = in_flight(lanes, true);
    f.lds_write = false;
    if constexpr (Return) f.first = in.ops[0].reg, f.count = dwords;
    for (int l = 0; l < kLanes; ++l) {
        at.l[l] = base[l] + u32(in.offset);
        if (!(lanes >> l & 1)) continue;
        u8* p = lds.atomic(w, at.l[l], sizeof(T));
        T old, x;
        u32 words[2] = {data[0][l], dwords == 2 ? data[1][l] : 0};
        std::memcpy(&old, p, sizeof old);
        std::memcpy(&x, words, sizeof x);
        const T now = F(old, x);
        std::memcpy(p, &now, sizeof now);
        if constexpr (Return) {
            std::memcpy(words, &old, sizeof old);
            for (int i = 0; i < dwords; ++i) w.v[in.ops[0].reg + i].l[l] = words[i];
        }
    }
    count(w, at.l, lanes, sizeof(T), true);
    w.issue(std::move(f));
}

template <bool Backward>
void ds_permute(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    Row t0, t1, out{};
    const u32* at = w.dword(in.ops[1], 0, t0, lanes);
    u64 used = 0;
    if constexpr (Backward) {
        for (int l = 0; l < kLanes; ++l)
            if (lanes >> l & 1) used |= 1ull << ((at[l] + u32(in.offset)) / 4 & 63u);
        const u32* data = w.dword(in.ops[2], 0, t1, used & lanes);
        for (int l = 0; l < kLanes; ++l) {
            const u32 from = (at[l] + u32(in.offset)) / 4 & 63u;
            out.l[l] = (lanes >> from & 1) ? data[from] : 0;  // an inactive lane delivers zero
        }
    } else {
        const u32* data = w.dword(in.ops[2], 0, t1, lanes);
        for (int l = 0; l < kLanes; ++l)
            if (lanes >> l & 1) out.l[(at[l] + u32(in.offset)) / 4 & 63u] = data[l];
    }
    blend(w.v[in.ops[0].reg].l, out.l, lanes);
    InFlight f = in_flight(lanes, false);
    f.first = in.ops[0].reg, f.count = 1;
    w.issue(std::move(f));
}
void ds_swizzle(Wave& w, const Inst& in) {
    const u64 lanes = w.exec();
    // The offset is printed as a macro; the encoding is what counts, and only the numeric form is decoded.
    const auto at = in.text.find("offset:");
    if (at != std::string::npos && in.text.compare(at + 7, 7, "swizzle") == 0)
        w.die("ds_swizzle macros are not modelled");
    const u32 o = u32(in.offset);
    Row t, out;
    int from[kLanes];
    u64 used = 0;
    for (int l = 0; l < kLanes; ++l) {
        if (o & 0x8000u)
            from[l] = (l & ~3) | int(o >> (2 * (l & 3)) & 3u);
        else
            from[l] = (l & 32) | int(((u32(l) & 31u & (o & 31u)) | (o >> 5 & 31u)) ^ (o >> 10 & 31u));
        if ((lanes >> l & 1) && (lanes >> from[l] & 1)) used |= 1ull << from[l];
    }
    const u32* p = w.dword(in.ops[1], 0, t, used);
    for (int l = 0; l < kLanes; ++l) out.l[l] = (lanes >> from[l] & 1) ? p[from[l]] : 0;
    blend(w.v[in.ops[0].reg].l, out.l, lanes);
    InFlight f = in_flight(lanes, false);
    f.first = in.ops[0].reg, f.count = 1;
    w.issue(std::move(f));
}

template <class T, auto F>
void both(OpTable& t, const std::string& name, const std::string& type) {
    t.add("ds_" + name + "_" + type, ds_atomic<T, F, false>, Unit::lds);
    t.add("ds_" + name + "_rtn_" + type, ds_atomic<T, F, true>, Unit::lds);
}

u32 pk_add_f16(u32 a, u32 b) { return f2h(h2f(a) + h2f(b)) | f2h(h2f(a >> 16) + h2f(b >> 16)) << 16; }
u32 pk_add_bf16(u32 a, u32 b) {
    return f2bf(bf2f(a & 0xffffu) + bf2f(b & 0xffffu)) | f2bf(bf2f(a >> 16) + bf2f(b >> 16)) << 16;
}

}  // namespace

void add_lds(OpTable& t, Arch) {
    const auto add = [&](const char* name, Handler fn) { t.add(name, fn, Unit::lds); };
    add("ds_read_b32", ds_read<4, Part::full>), add("ds_read_b64", ds_read<8, Part::full>),
        add("ds_read_b96", ds_read<12, Part::full>);
    add("ds_read_b128", ds_read<16, Part::full>), add("ds_read_u8", ds_read<1, Part::zext>),
        add("ds_read_i8", ds_read<1, Part::sext>);
    add("ds_read_u16", ds_read<2, Part::zext>), add("ds_read_i16", ds_read<2, Part::sext>);
    add("ds_read_u16_d16", ds_read<2, Part::d16>), add("ds_read_u16_d16_hi", ds_read<2, Part::d16_hi>);
    add("ds_read_u8_d16", ds_read<1, Part::d16>), add("ds_read_u8_d16_hi", ds_read<1, Part::d16_hi>);
    add("ds_read2_b32", ds_read<4, Part::full, 2, 4>), add("ds_read2_b64", ds_read<8, Part::full, 2, 8>);
    add("ds_read2st64_b32", ds_read<4, Part::full, 2, 256>), add("ds_read2st64_b64", ds_read<8, Part::full, 2, 512>);
    add("ds_write_b8", ds_write<1>), add("ds_write_b16", ds_write<2>), add("ds_write_b32", ds_write<4>),
        add("ds_write_b64", ds_write<8>);
    add("ds_write_b96", ds_write<12>), add("ds_write_b128", ds_write<16>),
        add("ds_write_b16_d16_hi", ds_write<2, true>), add("ds_write_b8_d16_hi", ds_write<1, true>);
    add("ds_write2_b32", ds_write<4, false, 2, 4>), add("ds_write2_b64", ds_write<8, false, 2, 8>);
    add("ds_write2st64_b32", ds_write<4, false, 2, 256>), add("ds_write2st64_b64", ds_write<8, false, 2, 512>);
    add("ds_bpermute_b32", ds_permute<true>), add("ds_permute_b32", ds_permute<false>),
        add("ds_swizzle_b32", ds_swizzle);
    both<u32, [](u32 a, u32 b) { return a + b; }>(t, "add", "u32"),
        both<u64, [](u64 a, u64 b) { return a + b; }>(t, "add", "u64");
    both<u32, [](u32 a, u32 b) { return a - b; }>(t, "sub", "u32"),
        both<u32, [](u32 a, u32 b) { return a & b; }>(t, "and", "b32");
    both<u32, [](u32 a, u32 b) { return a | b; }>(t, "or", "b32"),
        both<u32, [](u32 a, u32 b) { return a ^ b; }>(t, "xor", "b32");
    both<u32, [](u32 a, u32 b) { return std::min(a, b); }>(t, "min", "u32"),
        both<u32, [](u32 a, u32 b) { return std::max(a, b); }>(t, "max", "u32");
    both<i32, [](i32 a, i32 b) { return std::min(a, b); }>(t, "min", "i32"),
        both<i32, [](i32 a, i32 b) { return std::max(a, b); }>(t, "max", "i32");
    both<float, [](float a, float b) { return a + b; }>(t, "add", "f32"),
        both<double, [](double a, double b) { return a + b; }>(t, "add", "f64");
    both<float, [](float a, float b) { return (b < a ? b : a); }>(t, "min", "f32"),
        both<float, [](float a, float b) { return (b > a ? b : a); }>(t, "max", "f32");
    both<u32, pk_add_f16>(t, "pk_add", "f16"), both<u32, pk_add_bf16>(t, "pk_add", "bf16");
    t.add("ds_wrxchg_rtn_b32", ds_atomic<u32, [](u32, u32 b) { return b; }, true>, Unit::lds);
    t.add("ds_wrxchg_rtn_b64", ds_atomic<u64, [](u64, u64 b) { return b; }, true>, Unit::lds);
}

}  // namespace petit_emu
