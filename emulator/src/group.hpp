// A workgroup and the launch it belongs to.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "elf.hpp"
#include "lds.hpp"
#include "memory.hpp"
#include "wave.hpp"

namespace petit_emu {

// Flat addresses of LDS and scratch; above every host pointer.
constexpr u64 kSharedAperture = 0x0001000000000000ull, kPrivateAperture = 0x0002000000000000ull;

struct Counters {
    u64 by_unit[static_cast<int>(Unit::count)] = {};
    u64 bytes_loaded = 0, bytes_stored = 0, bytes_atomic = 0, scalar_bytes = 0;
    u64 lds_read_bytes = 0, lds_write_bytes = 0, lds_cycles = 0, lds_conflict_cycles = 0;
    u64 mfma_cycles = 0, waves = 0, workgroups = 0, launches = 0;
    u64 nanoseconds = 0;  // host time spent executing
};

struct LaunchConfig {
    u32 grid[3] = {1, 1, 1};   // workgroups
    u32 block[3] = {1, 1, 1};  // work items of a workgroup
    u32 dynamic_lds = 0;
    u32 resident = 4;           // workgroups that make progress at the same time
    u64 quantum = 200000;       // instructions a wave may run before the others get their turn
    u64 limit = 4000000000ull;  // instructions of a launch before it counts as endless
    u64 seed = 0;               // 0: workgroups and waves in order; otherwise a shuffled order
};

struct Module;

struct Launch {
    const Program* program = nullptr;
    const Kernel* kernel = nullptr;
    const Module* module = nullptr;
    Memory* memory = nullptr;
    Arch arch = Arch::gfx942;
    LaunchConfig config;
    u64 kernarg = 0;
    u64 serial = 0;
    u32 xcds = 1;
    std::unique_ptr<Coherence> coherence;
    Counters counters;
    std::vector<u64> pc_counts;

    void run();
};

struct Group {
    Launch* launch = nullptr;
    u32 id[3] = {0, 0, 0};
    u32 linear = 0, xcd = 0;  // every workgroup is given a CU of its own: the strictest placement
    Coherence::Cu cu;
    Lds lds;
    std::vector<std::unique_ptr<Wave>> waves;
    std::unique_ptr<Row[]> registers;
    Range* hint = nullptr;

    Group(Launch& l, u32 linear_id);
    // Runs every wave to a barrier, its end or the quantum. `spent`: a wave used its quantum (it may wait for another
    // workgroup).
    enum class Step { again, spent, done };
    Step step(u64 quantum);
    void retired(Wave& w, InFlight& f);
    const char* kernel_name() const { return launch->kernel->name.c_str(); }
    Reader reader(const Wave& w) const { return {w.uid, linear, xcd}; }

  private:
    void start_wave(Wave& w, u32 first_item, u32 items);
    void barrier();
};

}  // namespace petit_emu
