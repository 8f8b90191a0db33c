#include "device.hpp"

#include <algorithm>
#include <cstdlib>

namespace petit_emu {
namespace {

thread_local std::string g_error;

constexpr u64 kAlign = 256, kGuard = 4096;  // between allocations, so that running over one cannot land in another

void put(std::vector<u8>& segment, const KernelArg& a, u64 value) {
    if (a.offset + a.size <= segment.size()) std::memcpy(&segment[a.offset], &value, std::min<u32>(a.size, 8));
}

void fill_hidden(std::vector<u8>& segment, const Kernel& k, const LaunchConfig& c) {
    for (const KernelArg& a : k.args) {
        if (a.kind.rfind("hidden_", 0) != 0) continue;
        const char axis = a.kind.back();
        const int i = axis == 'y' ? 1 : axis == 'z' ? 2 : 0;
        if (a.kind.rfind("hidden_block_count_", 0) == 0)
            put(segment, a, c.grid[i]);
        else if (a.kind.rfind("hidden_group_size_", 0) == 0)
            put(segment, a, c.block[i]);
        else if (a.kind == "hidden_grid_dims")
            put(segment, a, c.grid[2] > 1 || c.block[2] > 1 ? 3 : c.grid[1] > 1 || c.block[1] > 1 ? 2 : 1);
        else if (a.kind == "hidden_dynamic_lds_size")
            put(segment, a, c.dynamic_lds);
        // remainders and global offsets are zero: the grid is whole workgroups from the origin
    }
}

}  // namespace

void set_last_error(const std::string& text) { g_error = text; }
const std::string& last_error() { return g_error; }

Device& Device::get() {
    static Device* d = [] {
        auto* fresh = new Device;  // never destroyed: the library may be used during interpreter shutdown
        if (const char* name = std::getenv("PETIT_EMULATOR_ARCH"); name && *name)
            fresh->arch = arch_from_name(name), fresh->arch_chosen = true;
        return fresh;
    }();
    return *d;
}

LoadedModule* Device::load(const u8* elf, std::size_t bytes) {
    auto loaded = std::make_unique<LoadedModule>();
    loaded->module = Module::load(elf, bytes);
    if (loaded->module->object.target != arch_name(arch))
        fail("the code object is for %s, the emulated device is %s", loaded->module->object.target.c_str(),
             arch_name(arch));
    memory.add(loaded->module->base, loaded->module->object.image.size(), "code object image", true);
    LoadedModule* p = loaded.get();
    modules[p] = std::move(loaded);
    return p;
}

void Device::unload(LoadedModule* m) {
    auto it = modules.find(m);
    if (it == modules.end()) fail("hipModuleUnload: not a loaded module");
    memory.remove(m->module->base);
    modules.erase(it);
}

Function* Device::function(LoadedModule* m, const std::string& name) {
    if (!modules.count(m)) fail("hipModuleGetFunction: not a loaded module");
    auto& slot = m->functions[name];
    if (!slot) {
        auto it = m->module->object.kernels.find(name);
        if (it == m->module->object.kernels.end()) return nullptr;
        slot = std::make_unique<Function>(Function{m->module.get(), &it->second});
    }
    return slot.get();
}

std::vector<u8> pack_arguments(const Kernel& k, void** params) {
    std::vector<u8> out(k.kernarg_bytes, 0);
    int i = 0;
    for (const KernelArg& a : k.args) {
        if (a.kind.rfind("hidden_", 0) == 0) continue;
        if (!params[i]) fail("%s: argument %d has no value", k.name.c_str(), i);
        if (a.offset + a.size > out.size())
            fail("%s: argument %d lies outside the argument segment", k.name.c_str(), i);
        std::memcpy(&out[a.offset], params[i++], a.size);
    }
    return out;
}

void Device::launch(Function* f, const u32 grid[3], const u32 block[3], u32 dynamic_lds,
                    const std::vector<u8>& explicit_args) {
    const Kernel& k = *f->kernel;
    f->module->prepare(k);
    const Arch a = f->module->program->arch;
    Launch l;
    l.config = defaults;
    std::copy_n(grid, 3, l.config.grid), std::copy_n(block, 3, l.config.block);
    l.config.dynamic_lds = dynamic_lds;
    const u64 items = u64(block[0]) * block[1] * block[2], groups = u64(grid[0]) * grid[1] * grid[2];
    if (!items || !groups) fail("%s: empty grid or block", k.name.c_str());
    if (groups > 0xffffffffull) fail("%s: grid too large", k.name.c_str());
    if (items > k.max_workgroup || items > 1024)
        fail("%s: %llu work items a group, the kernel allows %u", k.name.c_str(),
             static_cast<unsigned long long>(items), k.max_workgroup);
    const u32 lds = k.group_bytes + dynamic_lds, lds_limit = a == Arch::gfx950 ? 160 * 1024 : 64 * 1024;
    if (lds > lds_limit)
        fail("%s: %u bytes of LDS, a workgroup of %s has %u", k.name.c_str(), lds, arch_name(a), lds_limit);
    u32 implicit_end = 0;
    for (const KernelArg& a : k.args) implicit_end = std::max(implicit_end, a.offset + a.size);
    std::vector<u8> segment(std::max<std::size_t>({k.kernarg_bytes, implicit_end, explicit_args.size(), 8}), 0);
    u32 expected = 0;
    for (const KernelArg& a : k.args)
        if (a.kind.rfind("hidden_", 0) != 0) expected = std::max(expected, a.offset + a.size);
    if (explicit_args.size() < expected)
        fail("%s: %zu bytes of arguments, the kernel takes %u", k.name.c_str(), explicit_args.size(), expected);
    std::copy(explicit_args.begin(), explicit_args.end(), segment.begin());
    fill_hidden(segment, k, l.config);
    // The dispatch packet (what a kernel may ask of it: block and grid sizes) stands 64 bytes before the arguments.
    const u64 bytes = 64 + segment.size();
    std::vector<Row> aligned((bytes + sizeof(Row) - 1) / sizeof(Row));
    u8* const packet = reinterpret_cast<u8*>(aligned.data());
    for (int i = 0; i < 3; ++i) {
        const u16 group = static_cast<u16>(block[i]);
        const u32 total_items = grid[i] * block[i];
        std::memcpy(packet + 4 + 2 * i, &group, 2), std::memcpy(packet + 12 + 4 * i, &total_items, 4);
    }
    std::memcpy(packet + 64, segment.data(), segment.size());

    l.program = f->module->program.get(), l.kernel = &k, l.module = f->module, l.memory = &memory, l.arch = a;
    l.kernarg = reinterpret_cast<u64>(packet) + 64, l.serial = ++launches,
    l.xcds = xcds                ? xcds
             : a == Arch::gfx90a ? 1u
                                 : 8u;
    memory.add(aligned.data(), bytes, "kernel arguments of " + k.name, false);
    struct Guard {
        Memory& m;
        const void* p;
        ~Guard() { m.remove(p); }
    } guard{memory, aligned.data()};
    l.run();
    last = l.counters;
    last_pcs.clear(), last_counts.clear();
    for (std::size_t i = 0; i < l.pc_counts.size(); ++i)
        if (l.pc_counts[i]) last_pcs.push_back(l.program->code[i].pc), last_counts.push_back(l.pc_counts[i]);
    u64* sum = reinterpret_cast<u64*>(&total);
    const u64* add = reinterpret_cast<const u64*>(&last);
    for (std::size_t i = 0; i < sizeof(Counters) / 8; ++i) sum[i] += add[i];
}

void* Device::allocate(u64 bytes, const std::string& name) {
    auto raw = std::make_unique<u8[]>(bytes + kAlign + 2 * kGuard);
    const u64 at = (reinterpret_cast<u64>(raw.get()) + kGuard + kAlign - 1) & ~(kAlign - 1);
    std::memset(reinterpret_cast<void*>(at), 0xcd, bytes);
    memory.add(reinterpret_cast<void*>(at), bytes, name, true);
    allocations[at] = Allocation{std::move(raw), bytes};
    return reinterpret_cast<void*>(at);
}

bool Device::release(void* p) {
    auto it = allocations.find(reinterpret_cast<u64>(p));
    if (it == allocations.end()) return false;
    memory.remove(p);
    allocations.erase(it);
    return true;
}

}  // namespace petit_emu
