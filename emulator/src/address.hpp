// Per-lane addresses of a vector memory instruction.
#pragma once
#include "group.hpp"

namespace petit_emu {

enum class Space : u8 { global, flat, buffer, scratch };

struct Addresses {
    u64 at[kLanes];
    u64 lanes = 0;      // active
    u64 limit[kLanes];  // buffer: bytes from `at` that are in range (0: none); ~0 elsewhere
    bool private_memory = false;
};

// `vaddr`, `saddr` are operand positions (global/flat/scratch); buffer uses vaddr, vaddr+1 (resource), vaddr+2
// (soffset).
void compute_addresses(const Wave& w, const Inst& in, Space space, int vaddr, int saddr, Addresses& out);

inline Reader scope(const Wave& w, const Inst& in) {
    Reader r = w.group->reader(w);
    const Arch a = w.group->launch->arch;
    r.bypass_l1 = a == Arch::gfx90a ? in.glc : in.sc1;
    r.device = a == Arch::gfx90a ? true : in.sc1;
    return r;
}

// Reads or writes one lane's bytes, wherever the address points (global ranges, LDS or scratch through FLAT).
void lane_read(Wave& w, u64 address, u32 n, u8* out, const Reader& scope, bool private_memory, int lane, InFlight& f);
void lane_write(Wave& w, u64 address, u32 n, const u8* in, const Reader& scope, u64 serial, bool write_through,
                bool private_memory, int lane, InFlight& f);

}  // namespace petit_emu
