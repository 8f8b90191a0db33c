#include "address.hpp"

namespace petit_emu {
namespace {

// A buffer resource: base, stride, num_records. Out-of-range dwords read as zero and are not written.
void buffer_addresses(const Wave& w, const Inst& in, int vaddr, Addresses& out) {
    const Operand& r = in.ops[vaddr + 1];
    const u32 w0 = w.read_s(r.reg), w1 = w.read_s(r.reg + 1), records = w.read_s(r.reg + 2), w3 = w.read_s(r.reg + 3);
    const u32 soffset = w.sop(in.ops[vaddr + 2]);
    const u64 base = w0 | u64(w1 & 0xffffu) << 32;
    if (w1 >> 31 && (w0 | u64(w1 & 0x7fffffffu) << 32) == kPrivateAperture) {
        out.private_memory = true;
        Row t;
        const u32* v = in.offen ? w.dword(in.ops[vaddr], 0, t, out.lanes) : nullptr;
        for (int l = 0; l < kLanes; ++l)
            out.at[l] = u64(soffset) + u32(in.offset) + (v ? v[l] : 0), out.limit[l] = ~0ull;
        return;
    }
    const u32 stride = w1 >> 16 & 0x3fffu;
    if (w1 >> 31) w.die("swizzled buffers are not modelled");
    if (w3 >> 23 & 1) w.die("add_tid_enable buffers are not modelled");
    if (in.idxen && !stride) w.die("an indexed access through a buffer with stride 0");
    Row t0, t1;
    const u32* index = in.idxen ? w.dword(in.ops[vaddr], 0, t0, out.lanes) : nullptr;
    const u32* voffset = in.offen ? w.dword(in.ops[vaddr], in.idxen ? 1 : 0, t1, out.lanes) : nullptr;
    for (int l = 0; l < kLanes; ++l) {
        const u64 offset = u64(u32(in.offset)) + (voffset ? voffset[l] : 0);
        out.at[l] = base + soffset + offset + (index ? u64(index[l]) * stride : 0);
        if (stride && in.idxen)
            out.limit[l] = index[l] < records && offset < stride ? stride - offset : 0;
        else {
            const u64 end = stride ? u64(records) * stride : records, reach = offset + soffset;
            out.limit[l] = reach < end ? end - reach : 0;
        }
    }
}

}  // namespace

void compute_addresses(const Wave& w, const Inst& in, Space space, int vaddr, int saddr, Addresses& out) {
    out.lanes = w.exec();
    if (space == Space::buffer) {
        buffer_addresses(w, in, vaddr, out);
        return;
    }
    for (u64& x : out.limit) x = ~0ull;
    const Operand& v = in.ops[vaddr];
    const bool has_saddr = saddr >= 0 && in.ops[saddr].kind == Operand::sgpr;
    Row t0, t1;
    if (space == Space::scratch) {
        out.private_memory = true;
        const u32 s = has_saddr ? w.read_s(in.ops[saddr].reg) : 0;
        const u32* p = v.kind == Operand::vgpr ? w.dword(v, 0, t0, out.lanes) : nullptr;
        for (int l = 0; l < kLanes; ++l) out.at[l] = u64(i64(in.offset) + s + (p ? p[l] : 0));
        return;
    }
    if (has_saddr) {
        const u64 base = w.read_s64(in.ops[saddr].reg);
        const u32* p = w.dword(v, 0, t0, out.lanes);
        for (int l = 0; l < kLanes; ++l) out.at[l] = base + p[l] + u64(i64(in.offset));
    } else {
        const u32 *lo = w.dword(v, 0, t0, out.lanes), *hi = w.dword(v, 1, t1, out.lanes);
        for (int l = 0; l < kLanes; ++l) out.at[l] = (lo[l] | u64(hi[l]) << 32) + u64(i64(in.offset));
    }
}

static u8* scratch_at(Wave& w, u64 address, u32 n, int lane) {
    if (address + n > w.scratch_bytes)
        w.die(format("scratch access of %u bytes at %llu, but a lane has %u bytes", n,
                     static_cast<unsigned long long>(address), w.scratch_bytes));
    return &w.scratch[std::size_t(lane) * w.scratch_bytes + address];
}

static Range& range_of(Wave& w, u64 address, u32 n, bool write, int lane) {
    Memory& m = *w.group->launch->memory;
    Range* r = m.find(address, n, w.group->hint);
    if (!r)
        w.die(format("%s of %u bytes at 0x%llx is outside every registered range (lane %d; %s)",
                     write ? "store" : "load", n, static_cast<unsigned long long>(address), lane,
                     m.describe(address).c_str()));
    if (write && !r->writable) w.die(format("store to %s, which is read-only (lane %d)", r->name.c_str(), lane));
    return *r;
}

void lane_read(Wave& w, u64 address, u32 n, u8* out, const Reader& reader, bool private_memory, int lane, InFlight& f) {
    if (private_memory || address >> 32 == kPrivateAperture >> 32) {
        std::memcpy(out, scratch_at(w, private_memory ? address : address - kPrivateAperture, n, lane), n);
    } else if (address >> 32 == kSharedAperture >> 32) {
        w.group->lds.read(w, static_cast<u32>(address), n, out);
        f.lds_bytes.push_back(static_cast<u32>(address)), f.lds_bytes.push_back(n);
    } else {
        Range& r = range_of(w, address, n, false, lane);
        w.group->launch->coherence->read(r, address, n, out, reader, w.group->cu);
    }
}

void lane_write(Wave& w, u64 address, u32 n, const u8* in, const Reader& writer, u64 serial, bool write_through,
                bool private_memory, int lane, InFlight& f) {
    if (private_memory || address >> 32 == kPrivateAperture >> 32) {
        std::memcpy(scratch_at(w, private_memory ? address : address - kPrivateAperture, n, lane), in, n);
    } else if (address >> 32 == kSharedAperture >> 32) {
        w.group->lds.write(w, static_cast<u32>(address), n, in);
        f.lds_bytes.push_back(static_cast<u32>(address)), f.lds_bytes.push_back(n), f.lds_write = true;
    } else {
        Range& r = range_of(w, address, n, true, lane);
        w.group->launch->coherence->write(r, address, n, in, writer, serial, write_through, f.store_events);
    }
}

}  // namespace petit_emu
