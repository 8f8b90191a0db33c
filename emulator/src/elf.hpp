// An AMDGPU code object: its memory image, its kernels (descriptor + metadata) and its text range.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "bits.hpp"

namespace petit_emu {

struct KernelArg {
    u32 offset = 0, size = 0;
    std::string kind;  // value_kind of the metadata
};

struct Kernel {
    std::string name;
    u64 entry = 0;  // address in the image
    u32 rsrc1 = 0, rsrc2 = 0, rsrc3 = 0, properties = 0, kernarg_preload = 0;
    u32 group_bytes = 0, private_bytes = 0, kernarg_bytes = 0, max_workgroup = 1024;
    u32 vgpr_count = 0, agpr_count = 0, sgpr_count = 0, vgpr_spills = 0;
    std::vector<KernelArg> args;

    u32 accum_offset() const { return ((rsrc3 & 63u) + 1u) * 4u; }
    u32 total_vgprs() const { return ((rsrc1 & 63u) + 1u) * 8u; }
};

struct CodeObject {
    std::string target;     // "gfx942"
    std::vector<u8> image;  // loaded segments, at address 0 of the object
    u64 text_begin = 0, text_end = 0;
    std::map<std::string, Kernel> kernels;

    static CodeObject parse(const u8* data, std::size_t bytes);
};

// Size of the ELF that starts at `data`, from its own section header table (hipModuleLoadData gets no size).
std::size_t elf_size(const u8* data);

}  // namespace petit_emu
