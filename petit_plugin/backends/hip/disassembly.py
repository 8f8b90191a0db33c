"""Reads a code object through LLVM's tools: instructions, loops and the resources each kernel asks for.

Standard library only; llvm-objdump and llvm-readelf (any LLVM that knows the target) do the decoding.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

MINIMUM_LLVM = 20
_REGISTERS = re.compile(r"\b([av])(?:(\d+)\b|\[(\d+):(\d+)\])")
_METADATA = {
    "vgpr_count": "vgpr",
    "agpr_count": "agpr",
    "sgpr_count": "sgpr",
    "group_segment_fixed_size": "lds_bytes",
    "private_segment_fixed_size": "scratch_bytes",
    "max_flat_workgroup_size": "threads",
}


def registers(text: str) -> set[str]:
    """The vector registers named in an operand list, one by one: "v[2:3]" is {"v2", "v3"}."""
    found = set()
    for kind, single, first, last in _REGISTERS.findall(text):
        if single:
            found.add(f"{kind}{single}")
        else:
            found.update(f"{kind}{i}" for i in range(int(first), int(last) + 1))
    return found


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def is_mfma(self) -> bool:
        return self.name.startswith(("v_mfma", "v_smfma"))

    @property
    def is_valu(self) -> bool:
        """Occupies the vector ALU. AccVGPR moves count: they take its slots too."""
        return self.name.startswith("v_") and not self.is_mfma

    @property
    def is_vmem(self) -> bool:
        return self.name.startswith(("buffer_load", "global_load", "buffer_store", "global_store", "scratch_", "flat_"))

    @property
    def load_bytes(self) -> int:
        """Bytes a lane loads from global memory, 0 for anything else."""
        match = re.fullmatch(r"(?:buffer|global)_load_(ubyte|ushort|short_d16|dword)(?:x(\d))?(?:_d16)?", self.name)
        if not match:
            return 0
        return {"ubyte": 1, "ushort": 2, "short_d16": 2, "dword": 4}[match[1]] * int(match[2] or 1)

    @property
    def writes(self) -> set[str]:
        if self.name.startswith(("ds_write", "buffer_store", "global_store", "scratch_store", "v_cmp", "s_")):
            return set()
        return registers(self.operands.split(",", 1)[0])

    @property
    def reads(self) -> set[str]:
        first, _, rest = self.operands.partition(",")
        return registers(rest) if self.writes else registers(first + "," + rest)

    @property
    def branch_target(self) -> int | None:
        if not self.name.startswith(("s_branch", "s_cbranch")):
            return None
        offset = int(self.operands.split()[0])
        return self.address + 4 + 4 * (offset - 0x10000 if offset > 0x7FFF else offset)


@dataclass
class Kernel:
    name: str
    instructions: list[Instruction]
    resources: dict[str, int] = field(default_factory=dict)

    def loops(self) -> list[list[Instruction]]:
        """Bodies of backward branches, shortest first."""
        index = {instruction.address: i for i, instruction in enumerate(self.instructions)}
        bodies = []
        for i, instruction in enumerate(self.instructions):
            target = instruction.branch_target
            if target is not None and target <= instruction.address and target in index:
                bodies.append(self.instructions[index[target] : i + 1])
        return sorted(bodies, key=len)

    def hot_loop(self) -> list[Instruction]:
        """The innermost loop with MFMA (the one with most of them, if several); empty if there is none."""
        inner: list[list[Instruction]] = []
        for body in self.loops():
            if not any(i.is_mfma for i in body):
                continue
            if not any(
                body[0].address <= other[0].address and other[-1].address <= body[-1].address for other in inner
            ):
                inner.append(body)
        return max(inner, key=lambda body: sum(i.is_mfma for i in body), default=[])


@cache
def find_tool(name: str) -> str:
    """llvm-objdump or llvm-readelf of LLVM >= 20. RuntimeError with the remedy if there is none."""
    places = []
    if clang := os.environ.get("PETIT_CLANG"):
        places.append(str(Path(shutil.which(clang) or clang).resolve().parent / name))
    places.append(f"{os.environ.get('ROCM_PATH', '/opt/rocm')}/llvm/bin/{name}")
    places += [name, *(f"{name}-{version}" for version in range(40, MINIMUM_LLVM - 1, -1))]
    for place in places:
        if found := shutil.which(place):
            version = re.search(r"version (\d+)", _run(found, "--version"))
            if version and int(version[1]) >= MINIMUM_LLVM:
                return found
    raise RuntimeError(f"no {name} of LLVM >= {MINIMUM_LLVM}; install it (Debian: llvm-22) or ROCm's llvm")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_kernels(path: Path) -> dict[str, Kernel]:
    """The kernels of a code object by name, in file order."""
    kernels: dict[str, Kernel] = {}
    current: Kernel | None = None
    for line in _run(find_tool("llvm-objdump"), "-d", "--no-show-raw-insn", str(path)).splitlines():
        if header := re.match(r"[0-9a-f]+ <(\w+)>:", line):
            current = kernels.setdefault(header[1], Kernel(header[1], []))
        elif current and (found := re.match(r"\s+(\S+)\s*(.*?)\s*// ([0-9A-F]+)", line)):
            current.instructions.append(Instruction(int(found[3], 16), found[1], found[2]))
    notes = _run(find_tool("llvm-readelf"), "--notes", str(path))
    for block in re.split(r"\n\s+- \.agpr_count", notes)[1:]:
        values = dict(re.findall(r"\.(\w+):\s+(\S+)", ".agpr_count" + block.split("\n\n")[0]))
        if values.get("name") in kernels:
            kernels[values["name"]].resources = {to: int(values.get(key, 0)) for key, to in _METADATA.items()}
    return kernels
