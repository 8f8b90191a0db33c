// Global, flat and buffer atomics. They are performed at the point all CUs of the device agree on.
#include <algorithm>

#include "address.hpp"
#include "valu.hpp"

namespace petit_emu {
namespace {

// S tells the operand order; F(old, data[]) -> new.
template <Space S, class T, auto F, int DataCount>
void atomic(Wave& w, const Inst& in) {
    constexpr int dwords = sizeof(T) / 4;
    const bool returns = S == Space::buffer ? (in.glc || in.sc0) : S == Space::global ? in.nops == 4 : in.nops == 3;
    const int vaddr = S == Space::buffer ? 1 : returns ? 1 : 0;
    const int data_at = S == Space::buffer ? 0 : vaddr + 1;
    Addresses a;
    compute_addresses(w, in, S, vaddr, S == Space::global ? vaddr + 2 : -1, a);
    const u32* data[4];
    Row spare[4];
    for (int i = 0; i < dwords * DataCount; ++i) {
        data[i] = w.dword(in.ops[data_at], i, spare[i], a.lanes);
        if (S == Space::buffer && returns) std::memcpy(spare[i].l, data[i], sizeof spare[i].l), data[i] = spare[i].l;
    }
    InFlight f;
    f.vm = true, f.lanes = a.lanes;
    if (S == Space::flat) f.lgkm = true, f.order = InFlight::out_of_order;
    if (returns) f.first = in.ops[0].reg, f.count = dwords;
    Launch& launch = *w.group->launch;
    Reader reader = w.group->reader(w);
    reader.bypass_l1 = reader.device = true;
    std::vector<u32> events;
    for (int l = 0; l < kLanes; ++l) {
        if (!(a.lanes >> l & 1)) continue;
        if (a.at[l] % sizeof(T))
            w.die(format("misaligned atomic at 0x%llx (lane %d)", static_cast<unsigned long long>(a.at[l]), l));
        T old{};
        if (a.limit[l] >= sizeof(T)) {
            u32 words[4];
            T x[DataCount];
            for (int i = 0; i < dwords * DataCount; ++i) words[i] = data[i][l];
            std::memcpy(x, words, sizeof x);
            lane_read(w, a.at[l], sizeof(T), reinterpret_cast<u8*>(&old), reader, false, l, f);
            const T now = F(old, x);
            InFlight done;
            // Each lane is a write of its own: later lanes and waves see it at once.
            lane_write(w, a.at[l], sizeof(T), reinterpret_cast<const u8*>(&now), reader, launch.coherence->tick(), true,
                       false, l, done);
            launch.coherence->arrive(done.store_events);
        }
        if (returns) {
            u32 words[2];
            std::memcpy(words, &old, sizeof old);
            for (int i = 0; i < dwords; ++i) w.v[in.ops[0].reg + i].l[l] = words[i];
        }
    }
    launch.counters.bytes_atomic += u64(std::popcount(a.lanes)) * sizeof(T);
    w.issue(std::move(f));
}

template <class T, auto F, int N = 1>
void all(OpTable& t, const std::string& name) {
    t.add("global_atomic_" + name, atomic<Space::global, T, F, N>, Unit::vmem);
    t.add("flat_atomic_" + name, atomic<Space::flat, T, F, N>, Unit::vmem);
    t.add("buffer_atomic_" + name, atomic<Space::buffer, T, F, N>, Unit::vmem);
}

template <class U, class I>
void integers(OpTable& t, const std::string& suffix) {
    all<U, [](U o, const U* d) -> U { return (o + d[0]); }>(t, "add" + suffix);
    all<U, [](U o, const U* d) -> U { return (o - d[0]); }>(t, "sub" + suffix);
    all<U, [](U o, const U* d) -> U { return (o & d[0]); }>(t, "and" + suffix);
    all<U, [](U o, const U* d) -> U { return (o | d[0]); }>(t, "or" + suffix);
    all<U, [](U o, const U* d) -> U { return (o ^ d[0]); }>(t, "xor" + suffix);
    all<U, [](U o, const U* d) -> U { return (std::min(o, d[0])); }>(t, "umin" + suffix);
    all<U, [](U o, const U* d) -> U { return (std::max(o, d[0])); }>(t, "umax" + suffix);
    all<I, [](I o, const I* d) -> I { return (std::min(o, d[0])); }>(t, "smin" + suffix);
    all<I, [](I o, const I* d) -> I { return (std::max(o, d[0])); }>(t, "smax" + suffix);
    all<U, [](U o, const U* d) -> U { return (o >= d[0] ? U(0) : U(o + 1)); }>(t, "inc" + suffix);
    all<U, [](U o, const U* d) -> U { return (o == 0 || o > d[0] ? d[0] : U(o - 1)); }>(t, "dec" + suffix);
    all<U, [](U, const U* d) -> U { return (d[0]); }>(t, "swap" + suffix);
    all<U, [](U o, const U* d) -> U { return (o == d[1] ? d[0] : o); }, 2>(t, "cmpswap" + suffix);
}

}  // namespace

void add_atomics(OpTable& t, Arch) {
    integers<u32, i32>(t, ""), integers<u64, i64>(t, "_x2");
    all<float, [](float o, const float* d) -> float { return (o + d[0]); }>(t, "add_f32");
    all<double, [](double o, const double* d) -> double { return (o + d[0]); }>(t, "add_f64");
    all<double, [](double o, const double* d) -> double { return (std::fmin(o, d[0])); }>(t, "min_f64");
    all<double, [](double o, const double* d) -> double { return (std::fmax(o, d[0])); }>(t, "max_f64");
    all<u32, [](u32 o, const u32* d) -> u32 {
        return (f2h(h2f(o) + h2f(d[0])) | f2h(h2f(o >> 16) + h2f(d[0] >> 16)) << 16);
    }>(t, "pk_add_f16");
    all<u32, [](u32 o, const u32* d) -> u32 {
        return (f2bf(bf2f(o & 0xffffu) + bf2f(d[0] & 0xffffu)) | f2bf(bf2f(o >> 16) + bf2f(d[0] >> 16)) << 16);
    }>(t, "pk_add_bf16");
}

}  // namespace petit_emu
