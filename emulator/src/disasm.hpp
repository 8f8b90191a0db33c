// Text of a code object, from llvm-objdump.
#pragma once
#include <string>
#include <vector>

#include "inst.hpp"

namespace petit_emu {

// The disassembler: $PETIT_LLVM_OBJDUMP, llvm-objdump-22, ROCm's, or any llvm-objdump >= 20 on PATH. Throws when there
// is none.
std::string find_objdump();
std::vector<Line> disassemble(const u8* elf, std::size_t bytes);

}  // namespace petit_emu
