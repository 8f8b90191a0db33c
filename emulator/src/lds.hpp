// The LDS of one workgroup: data, validity, races between waves within one barrier epoch, bank conflicts.
#pragma once
#include <vector>

#include "bits.hpp"
#include "wave.hpp"

namespace petit_emu {

class Lds {
  public:
    explicit Lds(u32 bytes) : data_(bytes, 0xcc), cells_((bytes + 3) / 4) {}

    u32 bytes() const { return static_cast<u32>(data_.size()); }
    void read(const Wave& w, u32 address, u32 n, u8* out);
    void write(const Wave& w, u32 address, u32 n, const u8* in, bool dma = false);
    // Atomics of several waves on one word do not race with each other.
    u8* atomic(const Wave& w, u32 address, u32 n);
    void dma_done(u32 address, u32 n);
    // Accesses of an instruction still in flight at a barrier belong to the next epoch as well.
    void restamp(const Wave& w, const InFlight& f);
    void next_epoch() { ++epoch_; }

  private:
    static constexpr u8 kAtomic = 254;
    struct Cell {  // one dword
        u8 valid = 0, dma = 0, read_bytes = 0;
        u8 writer[4] = {};
        u16 readers = 0;
        u32 write_epoch = 0, read_epoch = 0;
        u32 write_pc = 0, read_pc = 0;
        u8 written = 0;  // bytes written in write_epoch
    };
    void bounds(const Wave& w, u32 address, u32 n) const;
    void stamp_read(const Wave& w, u32 address, u32 n, u64 pc);
    void stamp_write(const Wave& w, u32 address, u32 n, u64 pc, u8 writer);

    std::vector<u8> data_;
    std::vector<Cell> cells_;
    u32 epoch_ = 1;
};

// Cycles the LDS needs for one wave instruction, and how many of them are bank conflicts.
struct LdsCycles {
    u32 total, conflict;
};
LdsCycles lds_cycles(Arch arch, const u32* address, u64 lanes, u32 bytes, bool write);

}  // namespace petit_emu
