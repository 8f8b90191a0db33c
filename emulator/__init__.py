"""Runs the real CDNA machine code (gfx90a, gfx942, gfx950) on the CPU. A development tool; see README.md."""

from emulator.mutants import Mutant, disassemble, mutate, replace_operand
from emulator.runtime import Counters, Emulator, EmulatorError, Kernel, Module, get, library_path, load

__all__ = [
    "Counters",
    "Emulator",
    "EmulatorError",
    "Kernel",
    "Module",
    "Mutant",
    "disassemble",
    "get",
    "library_path",
    "load",
    "mutate",
    "replace_operand",
]
