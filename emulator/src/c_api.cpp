// petit_emu_*: what the Python package and the tests use beside the HIP calls. Every function returns 0, or -1 with
// petit_emu_last_error().
#include <sstream>

#include "device.hpp"

using namespace petit_emu;

#define PETIT_EMU_API extern "C" __attribute__((visibility("default")))

namespace {
template <class F>
int guarded(F f) {
    Device& d = Device::get();
    std::lock_guard guard(d.lock);
    try {
        f(d);
        return 0;
    } catch (const std::exception& e) {
        set_last_error(e.what());
        return -1;
    }
}

constexpr const char* kExtraNames[] = {"bytes_loaded",   "bytes_stored",    "bytes_atomic", "scalar_bytes",
                                       "lds_read_bytes", "lds_write_bytes", "lds_cycles",   "lds_conflict_cycles",
                                       "mfma_cycles",    "waves",           "workgroups",   "launches",
                                       "nanoseconds"};
constexpr int kUnits = static_cast<int>(Unit::count);
static_assert(sizeof(Counters) / 8 == kUnits + std::size(kExtraNames));
}  // namespace

PETIT_EMU_API const char* petit_emu_last_error() { return last_error().c_str(); }

// What the device says it is: "gfx90a", "gfx942" or "gfx950". Modules of another architecture stay usable.
PETIT_EMU_API int petit_emu_set_arch(const char* name) {
    return guarded([&](Device& d) { d.arch = arch_from_name(name), d.arch_chosen = true; });
}
PETIT_EMU_API const char* petit_emu_arch() { return arch_name(Device::get().arch); }

// Host memory that kernels may touch: [p, p + bytes). `writable` 0 makes stores to it an error.
PETIT_EMU_API int petit_emu_register(const void* p, u64 bytes, const char* name, int writable) {
    return guarded([&](Device& d) { d.memory.add(p, bytes, name ? name : "registered memory", writable != 0); });
}
PETIT_EMU_API int petit_emu_unregister(const void* p) {
    return guarded([&](Device& d) {
        if (!d.memory.remove(p))
            fail("petit_emu_unregister: 0x%llx is not the start of a registered range",
                 reinterpret_cast<unsigned long long>(p));
    });
}

PETIT_EMU_API int petit_emu_load(const void* elf, u64 bytes, void** module) {
    return guarded([&](Device& d) { *module = d.load(static_cast<const u8*>(elf), bytes); });
}
PETIT_EMU_API int petit_emu_unload(void* module) {
    return guarded([&](Device& d) { d.unload(static_cast<LoadedModule*>(module)); });
}
PETIT_EMU_API int petit_emu_function(void* module, const char* name, void** function) {
    return guarded([&](Device& d) {
        *function = d.function(static_cast<LoadedModule*>(module), name);
        if (!*function) {
            std::string all;
            for (const auto& [k, v] : static_cast<LoadedModule*>(module)->module->object.kernels) all += " " + k;
            fail("no kernel '%s'; the code object has:%s", name, all.c_str());
        }
    });
}
// One line per kernel argument: "offset size kind"; then "lds private kernarg vgpr agpr sgpr spills".
PETIT_EMU_API const char* petit_emu_describe(void* function) {
    static thread_local std::string text;
    const Kernel& k = *static_cast<Function*>(function)->kernel;
    std::ostringstream out;
    out << k.group_bytes << ' ' << k.private_bytes << ' ' << k.kernarg_bytes << ' ' << k.vgpr_count << ' '
        << k.agpr_count << ' ' << k.sgpr_count << ' ' << k.vgpr_spills << '\n';
    for (const KernelArg& a : k.args) out << a.offset << ' ' << a.size << ' ' << a.kind << '\n';
    text = out.str();
    return text.c_str();
}
PETIT_EMU_API const char* petit_emu_kernels(void* module) {
    static thread_local std::string text;
    text.clear();
    for (const auto& [k, v] : static_cast<LoadedModule*>(module)->module->object.kernels) text += k + "\n";
    return text.c_str();
}
PETIT_EMU_API int petit_emu_launch(void* function, const u32* grid, const u32* block, u32 dynamic_lds, const void* args,
                                   u64 bytes) {
    return guarded([&](Device& d) {
        const u8* p = static_cast<const u8*>(args);
        d.launch(static_cast<Function*>(function), grid, block, dynamic_lds, std::vector<u8>(p, p + bytes));
    });
}

// resident: workgroups in progress at a time; quantum: instructions of a wave before others get their turn; seed: order
// of workgroups and waves (0: in order); limit: instructions of a launch before it counts as endless; xcds: number of
// L2 caches (0: 1 on gfx90a, 8 elsewhere); cus: what the device reports.
PETIT_EMU_API int petit_emu_set_option(const char* name, u64 value) {
    return guarded([&](Device& d) {
        const std::string n = name;
        if (n == "resident")
            d.defaults.resident = static_cast<u32>(value);
        else if (n == "quantum")
            d.defaults.quantum = value;
        else if (n == "limit")
            d.defaults.limit = value;
        else if (n == "seed")
            d.defaults.seed = value;
        else if (n == "xcds")
            d.xcds = static_cast<u32>(value);
        else if (n == "cus")
            d.compute_units = value;
        else
            fail("no option '%s'", name);
    });
}

PETIT_EMU_API int petit_emu_counter_count() { return static_cast<int>(sizeof(Counters) / 8); }
PETIT_EMU_API const char* petit_emu_counter_name(int i) {
    return i < kUnits ? unit_name(static_cast<Unit>(i)) : kExtraNames[i - kUnits];
}
// which 0: since the last reset; 1: of the last launch.
PETIT_EMU_API void petit_emu_counters(int which, u64* out) {
    Device& d = Device::get();
    std::lock_guard guard(d.lock);
    std::memcpy(out, which ? &d.last : &d.total, sizeof(Counters));
}
PETIT_EMU_API void petit_emu_reset_counters() {
    Device& d = Device::get();
    std::lock_guard guard(d.lock);
    d.total = Counters{};
}
// Executed instructions of the last launch, per pc; returns how many there are, fills at most n.
PETIT_EMU_API u64 petit_emu_pc_counts(u64* pcs, u64* counts, u64 n) {
    Device& d = Device::get();
    std::lock_guard guard(d.lock);
    for (u64 i = 0; i < n && i < d.last_pcs.size(); ++i) pcs[i] = d.last_pcs[i], counts[i] = d.last_counts[i];
    return d.last_pcs.size();
}
// Unit of a mnemonic ("v_add_u32" -> "valu"), or "" when the emulator does not know it.
PETIT_EMU_API const char* petit_emu_unit(const char* arch, const char* mnemonic) {
    try {
        const OpTable& t = op_table(arch_from_name(arch));
        auto it = t.ops.find(mnemonic);
        return it == t.ops.end() ? "" : unit_name(it->second.unit);
    } catch (const std::exception&) {
        return "";
    }
}
