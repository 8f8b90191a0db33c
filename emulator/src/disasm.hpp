// Text of a code object, from llvm-objdump.
#pragma once
#include <string>
#include <vector>

#include "bits.hpp"

namespace petit_emu {

struct Line {
    u64 pc;
    u32 size;
    std::string mnemonic, operands;
};

// The disassembler: $PETIT_LLVM_OBJDUMP, llvm-objdump-22, ROCm's, or any llvm-objdump >= 20 on PATH. Throws when there is none.
std::string find_objdump();
std::vector<Line> disassemble(const u8* elf, std::size_t bytes);

struct CodeObject;
struct Program;
void decode(Program& out, const std::vector<Line>& lines, const CodeObject& object);

}  // namespace petit_emu
