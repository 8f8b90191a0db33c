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
        add_salu(t), add_control(t), add_vop_int(t), add_vop_int_wide(t), add_vop_float(t), add_vop_f16(t), add_vop_f64(t);
        add_vop_convert(t, a), add_vop_packed(t), add_vop_compare(t), add_vop_lane(t), add_mfma(t, a), add_lds(t, a), add_vmem(t, a);
        add_atomics(t, a), add_smem(t);
        if (a == Arch::gfx950) add_vop_scale_convert(t);
        return t;
    };
    static const OpTable tables[3] = {build(Arch::gfx90a), build(Arch::gfx942), build(Arch::gfx950)};
    return tables[static_cast<int>(arch)];
}

namespace {

// A kernel may only name registers that its descriptor allocates.
void check_allocation(const Program& program, const CodeObject& object) {
    std::vector<const Kernel*> kernels;
    for (const auto& [name, k] : object.kernels) kernels.push_back(&k);
    std::sort(kernels.begin(), kernels.end(), [](auto* a, auto* b) { return a->entry < b->entry; });
    for (std::size_t i = 0; i < kernels.size(); ++i) {
        const Kernel& k = *kernels[i];
        const u64 end = i + 1 < kernels.size() ? kernels[i + 1]->entry : object.text_end;
        const u32 vgprs = k.accum_offset(), agprs = k.total_vgprs() > vgprs ? k.total_vgprs() - vgprs : 0;
        for (const Inst& in : program.code) {
            if (in.pc < k.entry || in.pc >= end || !in.fn) continue;
            for (int o = 0; o < in.nops; ++o) {
                const Operand& op = in.ops[o];
                if (op.kind != Operand::vgpr) continue;
                const bool acc = op.reg >= kAgprBase;
                const u32 last = op.reg % kAgprBase + op.dwords - 1u, limit = acc ? agprs : vgprs;
                if (last >= limit)
                    fail("%s: pc 0x%llx '%s' names %c%u, but the kernel descriptor allocates %u", k.name.c_str(),
                         static_cast<unsigned long long>(in.pc), in.text.c_str(), acc ? 'a' : 'v', last, limit);
            }
        }
    }
}

}  // namespace

std::unique_ptr<Module> Module::load(const u8* elf, std::size_t bytes) {
    static std::mutex lock;
    static std::unordered_map<std::string, std::weak_ptr<const Program>> seen;  // same bytes, same program
    static std::vector<std::shared_ptr<const Program>> recent;
    auto m = std::make_unique<Module>();
    m->object = CodeObject::parse(elf, bytes);
    const std::string key(reinterpret_cast<const char*>(elf), bytes);
    std::lock_guard guard(lock);
    if (auto it = seen.find(key); it != seen.end()) m->program = it->second.lock();
    if (!m->program) {
        auto program = std::make_shared<Program>();
        program->arch = arch_from_name(m->object.target);
        decode(*program, disassemble(elf, bytes), m->object);
        check_allocation(*program, m->object);
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
