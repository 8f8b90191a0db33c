// A loaded code object: image, decoded program, kernels.
#pragma once
#include <memory>

#include "disasm.hpp"
#include "elf.hpp"
#include "inst.hpp"

namespace petit_emu {

struct Module {
    CodeObject object;
    std::shared_ptr<Program> program;
    std::unique_ptr<Row[]> storage;  // the image, aligned
    u8* base = nullptr;

    void prepare(const Kernel& k) const;  // decodes a kernel before its first launch
    static std::unique_ptr<Module> load(const u8* elf, std::size_t bytes);
};

Arch arch_from_name(const std::string& name);
const char* arch_name(Arch a);

}  // namespace petit_emu
