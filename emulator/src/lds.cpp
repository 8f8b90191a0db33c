#include "lds.hpp"

#include <algorithm>
#include <array>

#include "group.hpp"

namespace petit_emu {

void Lds::bounds(const Wave& w, u32 address, u32 n) const {
    if (address > data_.size() || n > data_.size() - address)
        w.die(format("LDS access of %u bytes at %u is outside the workgroup's %zu bytes", n, address, data_.size()));
}

static u8 byte_mask(u32 address, u32 end, u32 cell) {  // bytes of dword `cell` inside [address, end)
    const u32 lo = std::max(address, cell * 4) - cell * 4, hi = std::min(end, cell * 4 + 4) - cell * 4;
    return static_cast<u8>(((1u << hi) - 1u) & ~((1u << lo) - 1u));
}

void Lds::stamp_read(const Wave& w, u32 address, u32 n, u64 pc) {
    for (u32 c = address / 4; c * 4 < address + n; ++c) {
        Cell& cell = cells_[c];
        const u8 m = byte_mask(address, address + n, c);
        if (cell.write_epoch == epoch_ && (cell.written & m))
            for (int i = 0; i < 4; ++i)
                if ((cell.written & m) >> i & 1 && cell.writer[i] != w.id)
                    w.die(format("LDS race: reads address %u, written by wave %d at pc 0x%x with no barrier in between",
                                 c * 4 + i, cell.writer[i] == kAtomic ? -1 : int(cell.writer[i]), cell.write_pc));
        if (cell.read_epoch != epoch_) cell.read_epoch = epoch_, cell.readers = 0, cell.read_bytes = 0;
        cell.readers |= static_cast<u16>(1u << w.id);
        cell.read_bytes |= m;
        cell.read_pc = static_cast<u32>(pc);
    }
}

void Lds::stamp_write(const Wave& w, u32 address, u32 n, u64 pc, u8 writer) {
    for (u32 c = address / 4; c * 4 < address + n; ++c) {
        Cell& cell = cells_[c];
        const u8 m = byte_mask(address, address + n, c);
        if (cell.read_epoch == epoch_ && (cell.readers & ~(1u << w.id)) && (cell.read_bytes & m))
            w.die(format("LDS race: writes address %u, read by wave %d at pc 0x%x with no barrier in between", c * 4,
                         std::countr_zero(unsigned(cell.readers & ~(1u << w.id))), cell.read_pc));
        if (cell.write_epoch != epoch_) cell.write_epoch = epoch_, cell.written = 0;
        for (int i = 0; i < 4; ++i) {
            if (!(m >> i & 1)) continue;
            if ((cell.written >> i & 1) && cell.writer[i] != writer)
                w.die(format("LDS race: writes address %u, written by wave %d at pc 0x%x with no barrier in between",
                             c * 4 + i, cell.writer[i] == kAtomic ? -1 : int(cell.writer[i]), cell.write_pc));
            cell.writer[i] = writer;
        }
        cell.written |= m;
        cell.write_pc = static_cast<u32>(pc);
    }
}

void Lds::read(const Wave& w, u32 address, u32 n, u8* out) {
    bounds(w, address, n);
    for (u32 c = address / 4; c * 4 < address + n; ++c) {
        const u8 m = byte_mask(address, address + n, c);
        if (cells_[c].dma & m)
            w.die(format("reads LDS address %u before the s_waitcnt vmcnt that its global-to-LDS load needs", c * 4));
        if (m & ~cells_[c].valid) w.die(format("reads LDS address %u, which nothing has written", c * 4));
    }
    stamp_read(w, address, n, w.now->pc);
    std::memcpy(out, &data_[address], n);
}

void Lds::write(const Wave& w, u32 address, u32 n, const u8* in, bool dma) {
    bounds(w, address, n);
    stamp_write(w, address, n, w.now->pc, w.id);
    for (u32 c = address / 4; c * 4 < address + n; ++c) {
        Cell& cell = cells_[c];
        const u8 m = byte_mask(address, address + n, c);
        if (!dma && (cell.dma & m))
            w.die(format("overwrites LDS address %u while a global-to-LDS load to it is in flight", c * 4));
        cell.valid |= m;
        if (dma) cell.dma |= m;
    }
    std::memcpy(&data_[address], in, n);
}

u8* Lds::atomic(const Wave& w, u32 address, u32 n) {
    bounds(w, address, n);
    for (u32 c = address / 4; c * 4 < address + n; ++c) {
        Cell& cell = cells_[c];
        const u8 m = byte_mask(address, address + n, c);
        if (m & ~cell.valid) w.die(format("atomic on LDS address %u, which nothing has written", c * 4));
        // The wave's own plain write earlier in the epoch orders before its atomic.
        if (cell.write_epoch == epoch_)
            for (int i = 0; i < 4; ++i)
                if ((m >> i & 1) && cell.writer[i] == w.id) cell.writer[i] = kAtomic;
    }
    stamp_write(w, address, n, w.now->pc, kAtomic);
    return &data_[address];
}

void Lds::dma_done(u32 address, u32 n) {
    for (u32 c = address / 4; c * 4 < address + n; ++c)
        cells_[c].dma &= static_cast<u8>(~byte_mask(address, address + n, c));
}

void Lds::restamp(const Wave& w, const InFlight& f) {
    for (std::size_t i = 0; i + 1 < f.lds_bytes.size(); i += 2) {
        if (f.lds_write)
            stamp_write(w, f.lds_bytes[i], f.lds_bytes[i + 1], f.pc, w.id);
        else
            stamp_read(w, f.lds_bytes[i], f.lds_bytes[i + 1], f.pc);
    }
}

namespace {

// Lanes served together. 128-bit reads of gfx90a/gfx942 pair up quarter groups of two 16-lane rows; everything else
// goes in lane order.
constexpr std::array<u8, 64> kRead128Order = [] {
    std::array<u8, 64> order{};
    constexpr int first[8] = {0, 4, 8, 12, 32, 36, 40, 44}, second[8] = {20, 16, 28, 24, 52, 48, 60, 56};
    for (int g = 0; g < 8; ++g)
        for (int i = 0; i < 4; ++i)
            order[g * 8 + i] = static_cast<u8>(first[g] + i), order[g * 8 + 4 + i] = static_cast<u8>(second[g] + i);
    return order;
}();

}  // namespace

LdsCycles lds_cycles(Arch arch, const u32* address, u64 lanes, u32 bytes, bool write) {
    const u32 banks = arch == Arch::gfx950 ? 64 : 32;
    const u32 words = std::max<u32>(1, bytes / 4);
    const u32 group = std::min<u32>(kLanes, banks / words);  // lanes whose data fill the banks once
    const bool paired = words == 4 && !write && arch != Arch::gfx950;
    u32 total = 0, best = 0;
    for (u32 g = 0; g < kLanes; g += group) {
        std::array<std::array<u32, 8>, 64> seen;  // distinct dwords per bank (a bank rarely holds more)
        std::array<u8, 64> count{};
        u32 worst = 0;
        for (u32 i = g; i < g + group; ++i) {
            const u32 l = paired ? kRead128Order[i] : i;
            if (!(lanes >> l & 1)) continue;
            for (u32 k = 0; k < words; ++k) {
                const u32 dword = address[l] / 4 + k, bank = dword % banks;
                bool known = false;
                for (u32 j = 0; j < std::min<u32>(count[bank], 8); ++j) known |= seen[bank][j] == dword;
                if (known) continue;
                if (count[bank] < 8) seen[bank][count[bank]] = dword;
                worst = std::max<u32>(worst, ++count[bank]);
            }
        }
        total += worst;
        best += worst ? 1 : 0;
    }
    return {total, total - best};
}

}  // namespace petit_emu
