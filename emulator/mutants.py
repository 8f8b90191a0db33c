"""Patches single instructions of a code object, to prove that the emulator catches what the change breaks."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

S_NOP = 0xBF800000


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly: address in the image, size in bytes, text, encoding, enclosing symbol."""

    pc: int
    size: int
    mnemonic: str
    operands: str
    words: tuple[int, ...]
    symbol: str

    @property
    def name(self) -> str:
        for suffix in ("_e32", "_e64", "_sdwa", "_dpp"):
            if self.mnemonic.endswith(suffix):
                return self.mnemonic[: -len(suffix)]
        return self.mnemonic

    def __str__(self) -> str:
        return f"{self.pc:#x}: {self.mnemonic} {self.operands}".rstrip()


@dataclass(frozen=True)
class Mutant:
    """A changed code object and what was changed."""

    elf: bytes
    change: str
    instruction: Instruction


def find_objdump() -> str:
    """llvm-objdump-22, $PETIT_LLVM_OBJDUMP, ROCm's, or any llvm-objdump >= 20 on PATH."""
    forced = os.environ.get("PETIT_LLVM_OBJDUMP")
    if forced:
        if not os.access(forced, os.X_OK):
            raise RuntimeError(f"PETIT_LLVM_OBJDUMP={forced} is not an executable file")
        return forced
    exact = shutil.which("llvm-objdump-22")
    if exact:
        return exact
    rocm = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm", "bin", "llvm-objdump")
    for path in (rocm, *map(shutil.which, ("llvm-objdump", "llvm-objdump-21", "llvm-objdump-20"))):
        if not path or not os.access(path, os.X_OK):
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        at = text.find("version ")
        digits = text[at + 8 :].split(".", 1)[0] if at >= 0 else ""
        if digits.isdigit() and int(digits) >= 20:
            return path
    raise RuntimeError(
        "no AMDGPU disassembler: llvm-objdump >= 20 is needed (llvm-objdump-22, ROCm's, or PETIT_LLVM_OBJDUMP)"
    )


def disassemble(elf: bytes) -> list[Instruction]:
    with tempfile.NamedTemporaryFile(suffix=".co") as f:
        f.write(elf)
        f.flush()
        text = subprocess.run([find_objdump(), "-d", f.name], capture_output=True, text=True, check=True).stdout
    out: list[Instruction] = []
    symbol = ""
    for line in text.splitlines():
        if line.endswith(">:"):
            symbol = line[line.index("<") + 1 : -2]
        if not line.startswith("\t") or "// " not in line:
            continue
        body, comment = line.rsplit("// ", 1)
        pc, words = comment.split(":", 1)
        codes = tuple(int(w, 16) for w in words.split("<")[0].split())
        mnemonic, _, operands = body.strip().partition(" ")
        out.append(Instruction(int(pc, 16), 4 * len(codes), mnemonic, operands.strip(), codes, symbol))
    return out


def file_offset(elf: bytes, address: int) -> int:
    """Offset in the file of an address in a PT_LOAD segment."""
    phoff = struct.unpack_from("<Q", elf, 32)[0]
    size, count = struct.unpack_from("<HH", elf, 54)
    for i in range(count):
        kind, _, offset, vaddr, _, filesz, _, _ = struct.unpack_from("<IIQQQQQQ", elf, phoff + i * size)
        if kind == 1 and vaddr <= address < vaddr + filesz:
            return offset + address - vaddr
    raise ValueError(f"address {address:#x} is in no segment")


def patch(elf: bytes, inst: Instruction, words: tuple[int, ...], change: str) -> Mutant:
    if len(words) != len(inst.words):
        raise ValueError("a patch must keep the size of the instruction")
    at = file_offset(elf, inst.pc)
    if elf[at : at + inst.size] != struct.pack(f"<{len(inst.words)}I", *inst.words):
        raise ValueError(f"the file does not hold {inst} where expected")
    return Mutant(elf[:at] + struct.pack(f"<{len(words)}I", *words) + elf[at + inst.size :], change, inst)


def mutate(elf: bytes, select: str | Callable[[Instruction], bool], symbol: str | None = None) -> Iterator[Mutant]:
    """One mutant for each matching instruction, replaced by s_nop. `select`: a mnemonic or a predicate."""
    for inst in disassemble(elf):
        if symbol is not None and inst.symbol != symbol:
            continue
        if inst.name == select if isinstance(select, str) else select(inst):
            yield patch(elf, inst, (S_NOP,) * len(inst.words), f"dropped {inst}")


def replace_operand(elf: bytes, inst: Instruction, source: int, delta: int = 1) -> Mutant:
    """Changes the register number of source 0, 1 or 2 of a VOP3P instruction (an MFMA) by `delta`."""
    if len(inst.words) != 2:
        raise ValueError("only 8-byte VOP3P instructions can be changed")
    shift = 9 * source
    field = inst.words[1] >> shift & 0x1FF
    if field < 256:
        raise ValueError(f"source {source} of {inst} is not a vector register")
    changed = 256 + (field - 256 + delta) % 256
    second = inst.words[1] & ~(0x1FF << shift) | changed << shift
    return replace(patch(elf, inst, (inst.words[0], second), ""), change=f"source {source} of {inst} moved by {delta}")
