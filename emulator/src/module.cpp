#include "module.hpp"

#include <algorithm>
#include <mutex>
#include <string_view>

#include "error.hpp"

namespace petit_emu {

Arch arch_from_name(const std::string& name) {
    if (name == "gfx90a") return Arch::gfx90a;
    if (name == "gfx942") return Arch::gfx942;
    if (name == "gfx950") return Arch::gfx950;
    fail("the emulator knows gfx90a, gfx942 and gfx950, not '%s'", name.c_str());
}
const char* arch_name(Arch a) { return a == Arch::gfx90a ? "gfx90a" : a == Arch::gfx942 ? "gfx942" : "gfx950"; }

const char* unit_name(Unit u) {
    static const char* names[] = {"salu", "valu", "mfma", "vmem", "lds", "smem", "branch", "wait", "barrier", "other"};
    return names[static_cast<int>(u)];
}

const OpTable& op_table(Arch arch) {
    static const auto build = [](Arch a) {
        OpTable t;
        add_salu(t), add_control(t), add_vop_int(t), add_vop_int_wide(t), add_vop_float(t), add_vop_f16(t),
            add_vop_f64(t);
        add_vop_convert(t, a), add_vop_packed(t), add_vop_compare(t), add_vop_lane(t), add_mfma(t, a), add_lds(t, a),
            add_vmem(t, a);
        add_atomics(t, a), add_smem(t);
        if (a == Arch::gfx950) add_vop_scale_convert(t);
        return t;
    };
    static const OpTable tables[3] = {build(Arch::gfx90a), build(Arch::gfx942), build(Arch::gfx950)};
    return tables[static_cast<int>(arch)];
}

void Module::prepare(const Kernel& k) const {
    u64 end = object.text_end;
    for (const auto& [name, other] : object.kernels)
        if (other.entry > k.entry) end = std::min(end, other.entry);
    program->prepare(k, end);
}

std::unique_ptr<Module> Module::load(const u8* elf, std::size_t bytes) {
    static std::mutex lock;
    static std::unordered_map<std::string, std::weak_ptr<Program>> seen;  // same bytes, same program
    static std::vector<std::shared_ptr<Program>> recent;
    auto m = std::make_unique<Module>();
    m->object = CodeObject::parse(elf, bytes);
    const std::string key(reinterpret_cast<const char*>(elf), bytes);
    std::lock_guard guard(lock);
    if (auto it = seen.find(key); it != seen.end()) m->program = it->second.lock();
    if (!m->program) {
        auto program = std::make_shared<Program>(arch_from_name(m->object.target), disassemble(elf, bytes));
        m->program = program;
        seen[key] = program;
        recent.push_back(program);
        if (recent.size() > 16) recent.erase(recent.begin());
    }
    m->storage = std::make_unique<Row[]>((m->object.image.size() + sizeof(Row) - 1) / sizeof(Row) + 1);
    m->base = reinterpret_cast<u8*>(m->storage.get());
    std::memcpy(m->base, m->object.image.data(), m->object.image.size());
    return m;
}

}  // namespace petit_emu
