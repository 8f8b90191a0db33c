// Vector memory: loads, stores, global-to-LDS loads, cache control.
#include "address.hpp"
#include "valu.hpp"

namespace petit_emu {
namespace {

enum class Part : u8 { full, zext, sext, d16, d16_hi, sd16, sd16_hi };

void start(InFlight& f, Space space, u64 lanes) {
    f.vm = true, f.lanes = lanes;
    if (space == Space::flat) f.lgkm = true, f.order = InFlight::out_of_order;
}

// Global-to-LDS: lane l writes LDS at M0 + offset + l * Bytes (a dword a lane for the sub-dword forms).
template <Space S, u32 Bytes>
void load_to_lds(Wave& w, const Inst& in) {
    Addresses a;
    compute_addresses(w, in, S, 0, 1, a);
    const u32 m0 = w.read_s(kM0);
    InFlight f;
    start(f, S, a.lanes);
    f.lds_write = f.lds_dma = true;
    const Reader reader = scope(w, in);
    constexpr u32 slot = Bytes < 4 ? 4 : Bytes;
    for (int l = 0; l < kLanes; ++l) {
        if (!(a.lanes >> l & 1)) continue;
        u8 data[16] = {};
        for (u32 i = 0; i < slot; i += 4)
            if (a.limit[l] >= std::min<u64>(i + 4, Bytes))
                lane_read(w, a.at[l] + i, std::min<u32>(4, Bytes), data + i, reader, false, l, f);
        const u32 to = (m0 & 0xffffu) + u32(in.offset) + u32(l) * slot;
        w.group->lds.write(w, to, slot, data, true);
        f.lds_bytes.push_back(to), f.lds_bytes.push_back(slot);
        w.group->launch->counters.bytes_loaded += Bytes;
        w.group->launch->counters.lds_write_bytes += slot;
    }
    w.issue(std::move(f));
}

template <Space S, u32 Bytes, Part P>
void load(Wave& w, const Inst& in) {
    if (in.lds) {
        if constexpr (S == Space::buffer && P != Part::d16 && P != Part::d16_hi) return load_to_lds<S, Bytes>(w, in);
        w.die("this load to LDS is not modelled");
    }
    if (in.tfe) w.die("tfe is not modelled");
    constexpr u32 dwords = (Bytes + 3) / 4;
    Addresses a;
    compute_addresses(w, in, S, 1, 2, a);
    const unsigned d = in.ops[0].reg;
    InFlight f;
    start(f, S, a.lanes);
    f.first = static_cast<u16>(d), f.count = dwords;
    const Reader reader = scope(w, in);
    for (int l = 0; l < kLanes; ++l) {
        if (!(a.lanes >> l & 1)) continue;
        u32 x[4] = {};
        if (a.limit[l] >= Bytes)
            lane_read(w, a.at[l], Bytes, reinterpret_cast<u8*>(x), reader, a.private_memory, l, f);
        else
            for (u32 i = 0; i < Bytes && i < a.limit[l]; i += 4) {
                if (a.limit[l] < std::min<u64>(i + 4, Bytes)) w.die("a dword of a buffer load straddles num_records");
                lane_read(w, a.at[l] + i, 4, reinterpret_cast<u8*>(x + i / 4), reader, a.private_memory, l, f);
            }
        if constexpr (P == Part::sext || P == Part::sd16 || P == Part::sd16_hi)
            x[0] = Bytes == 1 ? u32(i32(i8(x[0]))) : u32(i32(i16(x[0])));
        if constexpr (P == Part::d16 || P == Part::sd16) x[0] = (w.v[d].l[l] & 0xffff0000u) | (x[0] & 0xffffu);
        if constexpr (P == Part::d16_hi || P == Part::sd16_hi) x[0] = (w.v[d].l[l] & 0xffffu) | x[0] << 16;
        for (u32 i = 0; i < dwords; ++i) w.v[d + i].l[l] = x[i];
    }
    if (!a.private_memory) w.group->launch->counters.bytes_loaded += u64(std::popcount(a.lanes)) * Bytes;
    w.issue(std::move(f));
}

// global/flat: address, data, saddr; scratch: address, data, saddr; buffer: data, address, resource, soffset
template <Space S, u32 Bytes, bool Hi = false>
void store(Wave& w, const Inst& in) {
    constexpr u32 dwords = (Bytes + 3) / 4;
    constexpr int data_at = S == Space::buffer ? 0 : 1;
    Addresses a;
    compute_addresses(w, in, S, S == Space::buffer ? 1 : 0, S == Space::flat ? -1 : 2, a);
    const u32* data[4];
    Row spare[4];
    for (u32 i = 0; i < dwords; ++i) data[i] = w.dword(in.ops[data_at], int(i), spare[i], a.lanes);
    InFlight f;
    start(f, S, a.lanes);
    const Reader writer = scope(w, in);
    const u64 serial = w.group->launch->coherence->tick();
    const bool through = w.group->launch->arch != Arch::gfx90a && in.sc1;
    for (int l = 0; l < kLanes; ++l) {
        if (!(a.lanes >> l & 1)) continue;
        u32 x[4];
        for (u32 i = 0; i < dwords; ++i) x[i] = data[i][l];
        if constexpr (Hi) x[0] >>= 16;
        const u8* p = reinterpret_cast<const u8*>(x);
        if (a.limit[l] >= Bytes)
            lane_write(w, a.at[l], Bytes, p, writer, serial, through, a.private_memory, l, f);
        else
            for (u32 i = 0; i < Bytes && i < a.limit[l]; i += 4) {
                if (a.limit[l] < std::min<u64>(i + 4, Bytes)) w.die("a dword of a buffer store straddles num_records");
                lane_write(w, a.at[l] + i, 4, p + i, writer, serial, through, a.private_memory, l, f);
            }
    }
    if (!a.private_memory) w.group->launch->counters.bytes_stored += u64(std::popcount(a.lanes)) * Bytes;
    w.issue(std::move(f));
}

// gfx940+: only an agent or system scope (sc1) reaches beyond this CU in the modelled (not split) execution mode.
void buffer_inv(Wave& w, const Inst& in) {
    if (in.sc1) w.group->launch->coherence->invalidate(w.group->cu, w.group->xcd, true);
}
void buffer_wbl2(Wave& w, const Inst& in) {
    InFlight f;
    f.vm = true;
    f.cache_op = w.group->launch->arch == Arch::gfx90a || in.sc1 ? 1 : 0;
    w.issue(std::move(f));
}
void buffer_wbinvl1(Wave& w, const Inst&) { w.group->launch->coherence->invalidate(w.group->cu, w.group->xcd, false); }
void buffer_invl2(Wave& w, const Inst&) { w.group->launch->coherence->invalidate(w.group->cu, w.group->xcd, true); }

template <Space S>
void family(OpTable& t, const std::string& p) {
    const auto add = [&](const char* name, Handler fn) { t.add(p + name, fn, Unit::vmem); };
    add("load_dword", load<S, 4, Part::full>), add("load_dwordx2", load<S, 8, Part::full>),
        add("load_dwordx3", load<S, 12, Part::full>);
    add("load_dwordx4", load<S, 16, Part::full>), add("load_ubyte", load<S, 1, Part::zext>),
        add("load_sbyte", load<S, 1, Part::sext>);
    add("load_ushort", load<S, 2, Part::zext>), add("load_sshort", load<S, 2, Part::sext>),
        add("load_short_d16", load<S, 2, Part::d16>);
    add("load_short_d16_hi", load<S, 2, Part::d16_hi>), add("load_ubyte_d16", load<S, 1, Part::d16>),
        add("load_ubyte_d16_hi", load<S, 1, Part::d16_hi>);
    add("load_sbyte_d16", load<S, 1, Part::sd16>), add("load_sbyte_d16_hi", load<S, 1, Part::sd16_hi>);
    add("store_dword", store<S, 4>), add("store_dwordx2", store<S, 8>), add("store_dwordx3", store<S, 12>),
        add("store_dwordx4", store<S, 16>);
    add("store_byte", store<S, 1>), add("store_short", store<S, 2>), add("store_byte_d16_hi", store<S, 1, true>),
        add("store_short_d16_hi", store<S, 2, true>);
}

}  // namespace

void add_vmem(OpTable& t, Arch arch) {
    family<Space::global>(t, "global_"), family<Space::flat>(t, "flat_"), family<Space::buffer>(t, "buffer_"),
        family<Space::scratch>(t, "scratch_");
    const auto add = [&](const char* name, Handler fn) { t.add(name, fn, Unit::vmem); };
    if (arch == Arch::gfx90a) {
        add("buffer_wbinvl1", buffer_wbinvl1), add("buffer_wbinvl1_vol", buffer_wbinvl1),
            add("buffer_invl2", buffer_invl2);
    } else {
        add("buffer_inv", buffer_inv);
        add("global_load_lds_dword", load_to_lds<Space::global, 4>),
            add("global_load_lds_ubyte", load_to_lds<Space::global, 1>);
        add("global_load_lds_ushort", load_to_lds<Space::global, 2>);
        if (arch == Arch::gfx950)
            add("global_load_lds_dwordx3", load_to_lds<Space::global, 12>),
                add("global_load_lds_dwordx4", load_to_lds<Space::global, 16>);
    }
    add("buffer_wbl2", buffer_wbl2);
}

}  // namespace petit_emu
