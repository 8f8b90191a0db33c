// Registered memory ranges (device pointers are host pointers) and the non-coherent view of them that a launch has.
#pragma once
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "bits.hpp"
#include "inst.hpp"

namespace petit_emu {

constexpr u64 kLine = 128;

struct Range {
    u64 begin = 0, bytes = 0;
    std::string name;
    bool writable = true;
    std::vector<u8> touched;  // per line: written in the running launch
};

class Memory {
  public:
    void add(const void* p, u64 bytes, const std::string& name, bool writable);
    bool remove(const void* p);
    const Range* covering(u64 address) const;
    // The range holding [address, address + bytes), or null. `hint` makes the common case one comparison.
    Range* find(u64 address, u64 bytes, Range*& hint) {
        if (hint && address - hint->begin < hint->bytes && bytes <= hint->bytes - (address - hint->begin)) return hint;
        return find_slow(address, bytes, hint);
    }
    std::string describe(u64 address) const;

  private:
    Range* find_slow(u64 address, u64 bytes, Range*& hint);
    std::map<u64, Range> ranges_;
};

// Who reads, and how far the instruction's scope bits make it look.
struct Reader {
    u64 wave;
    u32 cu, xcd;
    bool bypass_l1 = false, device = false;
};

// Caches of one launch, adversarial: a vector L1 (one per CU) and an L2 (one per XCD) hold, for every line, what memory
// held at their last invalidation, however old, plus what was written through them. Kept as a log of the writes per
// line, so that a line nobody writes during the launch costs nothing. Times are ticks of one clock.
class Coherence {
  public:
    struct Event {
        u64 line = 0, wave = 0;
        u32 cu = 0, xcd = 0;
        u64 serial = 0;                     // of the storing instruction
        u64 arrived = 0, written_back = 0;  // 0: not yet
        bool write_through = false;
        u8 mask[kLine / 8] = {};
        u8 data[kLine] = {};
    };
    struct Cu {
        u64 l1_inv = 0, l2_seen = 0;
    };

    explicit Coherence(u32 xcds) : l2_inv_(xcds, 0), dirty_(xcds) {}
    ~Coherence();

    u64 tick() { return ++now_; }
    void read(Range& r, u64 address, u64 bytes, u8* out, const Reader& reader, const Cu& cu) const;
    // Records the write and updates host memory. Returns through `ids` the events that the instruction's retirement
    // completes.
    void write(Range& r, u64 address, u64 bytes, const u8* in, const Reader& writer, u64 serial, bool write_through,
               std::vector<u32>& ids);
    void arrive(const std::vector<u32>& ids);
    void arrive_all();  // stores do not stay in flight for ever
    void write_back(u32 xcd);
    void invalidate(Cu& cu, u32 xcd, bool l2);
    bool touched(const Range& r, u64 address, u64 bytes) const;

  private:
    struct Log {
        u8 base[kLine];
        Range* range;
        std::vector<u32> events;
    };
    bool visible(const Event& e, const Reader& r, const Cu& cu) const;
    Log& log_for(Range& r, u64 line);

    std::unordered_map<u64, Log> logs_;
    std::vector<Event> events_;
    std::vector<u64> l2_inv_;
    std::vector<std::vector<u32>> dirty_;
    u64 now_ = 1;
    u32 all_arrived_ = 0;  // events before this one
    u64 last_line_ = ~0ull;
    Log* last_log_ = nullptr;
};

}  // namespace petit_emu
