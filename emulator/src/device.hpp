// The emulated device: memory, modules, options, what happened so far.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "group.hpp"
#include "module.hpp"

namespace petit_emu {

struct Function {
    Module* module;
    const Kernel* kernel;
};

struct LoadedModule {
    std::unique_ptr<Module> module;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Allocation {
    std::unique_ptr<u8[]> bytes;
    u64 size;
};

struct Device {
    std::recursive_mutex lock;
    Arch arch = Arch::gfx942;
    bool arch_chosen = false;
    Memory memory;
    std::map<u64, Allocation> allocations;
    std::map<LoadedModule*, std::unique_ptr<LoadedModule>> modules;
    Counters total, last;
    std::vector<u64> last_pcs, last_counts;
    LaunchConfig defaults;
    u32 xcds = 0;  // 0: by the architecture
    u64 launches = 0;
    u64 compute_units = 0;  // 0: by the architecture

    static Device& get();
    u32 xcd_count() const { return xcds ? xcds : arch == Arch::gfx90a ? 1u : 8u; }
    u64 cu_count() const {
        return compute_units ? compute_units : arch == Arch::gfx90a ? 110u : arch == Arch::gfx942 ? 304u : 256u;
    }

    LoadedModule* load(const u8* elf, std::size_t bytes);
    void unload(LoadedModule* m);
    Function* function(LoadedModule* m, const std::string& name);
    // `explicit_args`: the bytes of the kernel argument segment that the caller provides.
    void launch(Function* f, const u32 grid[3], const u32 block[3], u32 dynamic_lds,
                const std::vector<u8>& explicit_args);
    void* allocate(u64 bytes, const std::string& name);
    bool release(void* p);
};

// The kernel argument segment from an array of pointers to the arguments.
std::vector<u8> pack_arguments(const Kernel& k, void** params);

void set_last_error(const std::string& text);
const std::string& last_error();

}  // namespace petit_emu
