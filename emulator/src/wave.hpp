// The state of one wavefront, and how an instruction reads and writes its registers.
//
// Every register knows whether it may be read: `ready` holds one bit a lane (written, and no load in flight), `pending`
// counts the loads that will still write the register. Reading anything else, or overwriting the target of a load, is
// an error with the pc.
#pragma once
#include <deque>
#include <vector>

#include "error.hpp"
#include "inst.hpp"

namespace petit_emu {

struct Group;

// One outstanding memory instruction, retired by s_waitcnt.
struct InFlight {
    enum Kind : u8 { in_order, out_of_order } order = in_order;
    bool vm = false, lgkm = false;
    u16 first = 0, count = 0;  // vector registers being loaded
    u64 lanes = 0;
    u16 sfirst = 0, scount = 0;  // scalar registers being loaded
    u64 pc = 0;
    std::vector<u32> store_events;  // global memory events that become visible when this retires
    std::vector<u32> lds_bytes;     // (address, bytes) pairs of the LDS accesses
    bool lds_write = false, lds_dma = false;
    u8 cache_op = 0;  // 1: L2 write-back
};

enum class WaveStop : u8 { running, barrier, done, yield };

struct Wave {
    Row* v = nullptr;  // 512 rows
    u64 ready[512] = {};
    u64 loaded[512] = {};  // lanes of loads in flight
    u8 pending[512] = {};
    u32 s[128] = {};
    u64 sready[2] = {}, spending[2] = {};
    bool scc = false, scc_ready = false;
    u32 pc = 0;  // instruction index
    u32 mode = 0;
    u8 id = 0;  // in the workgroup
    WaveStop stop = WaveStop::running;
    std::deque<InFlight> vm, lgkm;
    Group* group = nullptr;
    const Program* program = nullptr;
    const Inst* now = nullptr;
    u64 uid = 0;  // in the launch
    std::vector<u8> scratch;
    u32 scratch_bytes = 0;  // per lane

    u64 exec() const { return *reinterpret_cast<const u64*>(&s[kExec]); }
    void set_exec(u64 x) { std::memcpy(&s[kExec], &x, 8); }

    [[noreturn]] void die(const std::string& what) const;

    // --- vector registers
    void need(unsigned reg, u64 lanes) const {
        if (lanes & ~ready[reg]) die_unready(reg, lanes);
    }
    void may_write(unsigned reg) const {
        if (pending[reg]) die_overwrite(reg);
    }
    void mark(unsigned reg, u64 lanes) { ready[reg] |= lanes; }
    [[noreturn]] void die_unready(unsigned reg, u64 lanes) const;
    [[noreturn]] void die_overwrite(unsigned reg) const;

    // --- scalar registers
    void need_s(unsigned reg) const {
        if (reg < 128 && !(sready[reg >> 6] >> (reg & 63) & 1)) die_sgpr(reg);
    }
    [[noreturn]] void die_sgpr(unsigned reg) const;
    u32 read_s(unsigned reg) const {
        if (reg >= 128) return special(reg);
        need_s(reg);
        return s[reg];
    }
    u64 read_s64(unsigned reg) const {
        if (reg >= 128) return special64(reg);
        need_s(reg), need_s(reg + 1);
        u64 x;
        std::memcpy(&x, &s[reg], 8);
        return x;
    }
    void write_s(unsigned reg, u32 x) {
        if (spending[reg >> 6] >> (reg & 63) & 1) die_sgpr_overwrite(reg);
        s[reg] = x;
        sready[reg >> 6] |= 1ull << (reg & 63);
    }
    void write_s64(unsigned reg, u64 x) {
        write_s(reg, static_cast<u32>(x));
        write_s(reg + 1, static_cast<u32>(x >> 32));
    }
    [[noreturn]] void die_sgpr_overwrite(unsigned reg) const;
    bool get_scc() const {
        if (!scc_ready) die("reads SCC, which nothing has written");
        return scc;
    }
    void set_scc(bool x) { scc = x, scc_ready = true; }
    u32 special(unsigned reg) const;
    u64 special64(unsigned reg) const;

    // --- scalar operands
    u32 sop(const Operand& o) const { return o.kind == Operand::imm ? static_cast<u32>(o.bits) : read_s(o.reg); }
    u64 sop64(const Operand& o) const { return o.kind == Operand::imm ? o.bits : read_s64(o.reg); }

    // --- vector operands: a pointer to 64 lanes of one dword
    const u32* dword(const Operand& o, int part, Row& tmp, u64 lanes) const {
        if (o.kind == Operand::vgpr) {
            need(o.reg + part, lanes);
            return v[o.reg + part].l;
        }
        if (o.kind == Operand::imm) return o.rows[part].l;
        const u32 x = part || o.dwords > 1 ? static_cast<u32>(read_s64(o.reg) >> (32 * part)) : read_s(o.reg);
        for (int l = 0; l < kLanes; ++l) tmp.l[l] = x;
        return tmp.l;
    }
    // 32-bit source operand k of a VALU instruction with everything the encoding may ask of it.
    const u32* src(const Inst& in, int k, Row& tmp, u64 lanes) const {
        if (in.src_mods >> k & 1) return src_modified(in, k, tmp, lanes);
        return dword(in.ops[k], 0, tmp, lanes);
    }
    const u32* src_modified(const Inst& in, int k, Row& tmp, u64 lanes) const;
    u64 dpp_lanes(const Inst& in) const;  // lanes that a DPP instruction writes

    // --- s_waitcnt
    void wait(std::deque<InFlight>& queue, int n);
    void retire(InFlight& f, bool from_vm);
    void issue(InFlight f);
};

void apply_float_mode(const Wave& w);

inline void blend(u32* dst, const u32* from, u64 lanes) {
    for (int l = 0; l < kLanes; ++l) dst[l] = (lanes >> l & 1) ? from[l] : dst[l];
}

}  // namespace petit_emu
