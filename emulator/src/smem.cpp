// Scalar memory. The scalar cache is not coherent with stores: it shows memory as it was when the launch began.
#include "group.hpp"

namespace petit_emu {
namespace {

void scalar_load(Wave& w, const Inst& in, u64 address, u32 dwords, u64 limit) {
    if (address & 3) w.die("misaligned scalar load");
    Launch& launch = *w.group->launch;
    const unsigned d = in.ops[0].reg;
    for (u32 i = 0; i < dwords; ++i) {
        u32 x = 0;
        if (limit >= 4 * (i + 1)) {
            const u64 at = address + 4 * i;
            Range* r = launch.memory->find(at, 4, w.group->hint);
            if (!r)
                w.die(format("scalar load of %u dwords at 0x%llx is outside every registered range (%s)", dwords,
                             static_cast<unsigned long long>(address), launch.memory->describe(at).c_str()));
            launch.coherence->read(*r, at, 4, reinterpret_cast<u8*>(&x), Reader{~0ull, ~0u, ~0u}, Coherence::Cu{});
        }
        w.write_s(d + i, x);
    }
    launch.counters.scalar_bytes += 4 * dwords;
    InFlight f;
    f.lgkm = true, f.order = InFlight::out_of_order;
    f.sfirst = static_cast<u16>(d), f.scount = static_cast<u16>(dwords);
    w.issue(std::move(f));
}

u64 offset_of(const Wave& w, const Inst& in) {
    const Operand& o = in.ops[2];
    i64 x = in.offset;
    if (o.kind == Operand::imm)
        x += static_cast<i64>(o.bits);
    else if (o.kind == Operand::sgpr)
        x += w.read_s(o.reg);
    return static_cast<u64>(x);
}
template <u32 Dwords>
void s_load(Wave& w, const Inst& in) {
    scalar_load(w, in, w.read_s64(in.ops[1].reg) + offset_of(w, in), Dwords, ~0ull);
}
template <u32 Dwords>
void s_buffer_load(Wave& w, const Inst& in) {
    const unsigned r = in.ops[1].reg;
    const u64 base = w.read_s(r) | u64(w.read_s(r + 1) & 0xffffu) << 32, records = w.read_s(r + 2),
              offset = offset_of(w, in);
    w.need_s(r + 3);
    scalar_load(w, in, base + offset, Dwords, offset < records ? records - offset : 0);
}
void nothing(Wave&, const Inst&) {}

}  // namespace

void add_smem(OpTable& t) {
    const auto add = [&](const char* name, Handler fn) { t.add(name, fn, Unit::smem); };
    add("s_load_dword", s_load<1>), add("s_load_dwordx2", s_load<2>), add("s_load_dwordx4", s_load<4>),
        add("s_load_dwordx8", s_load<8>), add("s_load_dwordx16", s_load<16>);
    add("s_buffer_load_dword", s_buffer_load<1>), add("s_buffer_load_dwordx2", s_buffer_load<2>),
        add("s_buffer_load_dwordx4", s_buffer_load<4>);
    add("s_buffer_load_dwordx8", s_buffer_load<8>), add("s_buffer_load_dwordx16", s_buffer_load<16>);
    for (const char* n : {"s_dcache_inv", "s_dcache_wb", "s_dcache_inv_vol", "s_dcache_wb_vol"}) add(n, nothing);
}

}  // namespace petit_emu
