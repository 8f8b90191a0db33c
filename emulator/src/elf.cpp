#include "elf.hpp"

#include <elf.h>

#include <algorithm>

#include "error.hpp"
#include "msgpack.hpp"

namespace petit_emu {
namespace {

constexpr u32 kNoteMetadata = 32;  // NT_AMDGPU_METADATA
constexpr u16 kMachineAmdgpu = 224;

template <class T>
const T* at(const u8* data, std::size_t bytes, u64 offset, u64 count = 1) {
    if (offset > bytes || count * sizeof(T) > bytes - offset) fail("code object: truncated ELF");
    return reinterpret_cast<const T*>(data + offset);
}

std::string target_of(u32 flags) {
    switch (flags & 0xffu) {
        case 0x3f:
            return "gfx90a";
        case 0x4c:
            return "gfx942";
        case 0x4f:
            return "gfx950";
        default:
            fail("code object: machine 0x%02x is none of gfx90a, gfx942, gfx950", flags & 0xffu);
    }
}

void read_metadata(CodeObject& out, const u8* note, std::size_t bytes) {
    const Msg root = MsgReader(note, note + bytes).read();
    for (const Msg& k : root.list("amdhsa.kernels")) {
        Kernel kernel;
        kernel.name = k.str(".name");
        kernel.group_bytes = static_cast<u32>(k.get(".group_segment_fixed_size"));
        kernel.private_bytes = static_cast<u32>(k.get(".private_segment_fixed_size"));
        kernel.kernarg_bytes = static_cast<u32>(k.get(".kernarg_segment_size"));
        kernel.max_workgroup = static_cast<u32>(k.get(".max_flat_workgroup_size", 1024));
        kernel.vgpr_count = static_cast<u32>(k.get(".vgpr_count"));
        kernel.agpr_count = static_cast<u32>(k.get(".agpr_count"));
        kernel.sgpr_count = static_cast<u32>(k.get(".sgpr_count"));
        kernel.vgpr_spills = static_cast<u32>(k.get(".vgpr_spill_count"));
        for (const Msg& a : k.list(".args"))
            kernel.args.push_back(
                {static_cast<u32>(a.get(".offset")), static_cast<u32>(a.get(".size")), a.str(".value_kind")});
        out.kernels[k.str(".symbol")] = kernel;
    }
}

void read_descriptor(Kernel& k, const std::vector<u8>& image, u64 address) {
    if (address + 64 > image.size()) fail("code object: descriptor of %s lies outside the image", k.name.c_str());
    auto word = [&](int offset) {
        u32 v;
        std::memcpy(&v, &image[address + offset], 4);
        return v;
    };
    i64 entry;
    std::memcpy(&entry, &image[address + 16], 8);
    k.entry = address + static_cast<u64>(entry);
    k.rsrc3 = word(44);
    k.rsrc1 = word(48);
    k.rsrc2 = word(52);
    k.properties = word(56) & 0xffffu;
    k.kernarg_preload = word(56) >> 16;
}

}  // namespace

std::size_t elf_size(const u8* data) {
    const auto* h = reinterpret_cast<const Elf64_Ehdr*>(data);
    if (std::memcmp(h->e_ident, ELFMAG, SELFMAG) != 0) fail("hipModuleLoadData: the image is not an ELF code object");
    u64 end =
        std::max<u64>(h->e_shoff + u64(h->e_shnum) * h->e_shentsize, h->e_phoff + u64(h->e_phnum) * h->e_phentsize);
    const auto* s = reinterpret_cast<const Elf64_Shdr*>(data + h->e_shoff);
    for (int i = 0; i < h->e_shnum; ++i)
        if (s[i].sh_type != SHT_NOBITS) end = std::max<u64>(end, s[i].sh_offset + s[i].sh_size);
    return end;
}

CodeObject CodeObject::parse(const u8* data, std::size_t bytes) {
    const auto* h = at<Elf64_Ehdr>(data, bytes, 0);
    if (std::memcmp(h->e_ident, ELFMAG, SELFMAG) != 0)
        fail("code object: not an ELF file (an offload bundle must be unbundled first)");
    if (h->e_machine != kMachineAmdgpu) fail("code object: ELF machine %u is not AMDGPU", unsigned(h->e_machine));
    CodeObject out;
    out.target = target_of(h->e_flags);
    const auto* ph = at<Elf64_Phdr>(data, bytes, h->e_phoff, h->e_phnum);
    u64 top = 0;
    for (int i = 0; i < h->e_phnum; ++i)
        if (ph[i].p_type == PT_LOAD) top = std::max<u64>(top, ph[i].p_vaddr + ph[i].p_memsz);
    out.image.assign(top, 0);
    for (int i = 0; i < h->e_phnum; ++i) {
        if (ph[i].p_type != PT_LOAD) continue;
        std::memcpy(out.image.data() + ph[i].p_vaddr, at<u8>(data, bytes, ph[i].p_offset, ph[i].p_filesz),
                    ph[i].p_filesz);
        if (ph[i].p_flags & PF_X) out.text_begin = ph[i].p_vaddr, out.text_end = ph[i].p_vaddr + ph[i].p_filesz;
    }
    for (int i = 0; i < h->e_phnum; ++i) {
        if (ph[i].p_type != PT_NOTE) continue;
        for (u64 o = ph[i].p_offset, end = o + ph[i].p_filesz; o + sizeof(Elf64_Nhdr) <= end;) {
            const auto* n = at<Elf64_Nhdr>(data, bytes, o);
            const u64 desc = o + sizeof(Elf64_Nhdr) + ((n->n_namesz + 3u) & ~3u);
            if (n->n_type == kNoteMetadata) read_metadata(out, at<u8>(data, bytes, desc, n->n_descsz), n->n_descsz);
            o = desc + ((n->n_descsz + 3u) & ~3u);
        }
    }
    const auto* sh = at<Elf64_Shdr>(data, bytes, h->e_shoff, h->e_shnum);
    std::map<std::string, Kernel> by_name;
    for (int i = 0; i < h->e_shnum; ++i) {
        if (sh[i].sh_type == SHT_RELA && sh[i].sh_size) fail("code object: dynamic relocations are not supported");
        if (sh[i].sh_type != SHT_DYNSYM) continue;
        const auto* sym = at<Elf64_Sym>(data, bytes, sh[i].sh_offset, sh[i].sh_size / sizeof(Elf64_Sym));
        const char* names = reinterpret_cast<const char*>(at<u8>(data, bytes, sh[sh[i].sh_link].sh_offset));
        for (u64 j = 0; j < sh[i].sh_size / sizeof(Elf64_Sym); ++j) {
            auto it = out.kernels.find(names + sym[j].st_name);
            if (it == out.kernels.end()) continue;
            read_descriptor(it->second, out.image, sym[j].st_value);
            by_name[it->second.name] = it->second;
        }
    }
    out.kernels = std::move(by_name);
    return out;
}

}  // namespace petit_emu
