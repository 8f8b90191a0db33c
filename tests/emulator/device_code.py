# ruff: noqa: E501  (kernel and assembly text)
"""Small kernels for the tests: HIP source or assembly text to a code object, cached by content."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emulator import build

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx950")

PRELUDE = """
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define LANE __builtin_amdgcn_workitem_id_x()
#define GROUP __builtin_amdgcn_workgroup_id_x()
typedef float f4 __attribute__((ext_vector_type(4)));
typedef _Float16 h2 __attribute__((ext_vector_type(2)));
typedef _Float16 h4 __attribute__((ext_vector_type(4)));
typedef _Float16 h8 __attribute__((ext_vector_type(8)));
typedef short s4 __attribute__((ext_vector_type(4)));
typedef unsigned u2 __attribute__((ext_vector_type(2)));
typedef unsigned u4 __attribute__((ext_vector_type(4)));
__device__ inline void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
"""


@functools.cache
def clang() -> str:
    for name in (
        os.environ.get("PETIT_CLANG"),
        "clang-22",
        os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm/bin/clang"),
        "clang",
    ):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise RuntimeError("the emulator's tests compile kernels: clang >= 20 is needed (clang-22 on PATH, or PETIT_CLANG)")


def _compile(text: str, suffix: str, flags: Sequence[str]) -> bytes:
    key = hashlib.sha256("\0".join([clang(), text, suffix, *flags]).encode()).hexdigest()[:24]
    home = build.cache_dir() / "test_kernels"
    home.mkdir(exist_ok=True)
    target = home / f"{key}.co"
    if not target.exists():
        with tempfile.TemporaryDirectory() as tmp:
            source, out = Path(tmp) / f"kernel{suffix}", Path(tmp) / "kernel.co"
            source.write_text(text)
            done = subprocess.run([clang(), *flags, str(source), "-o", str(out)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            part = target.with_suffix(f".{os.getpid()}")
            shutil.copy(out, part)
            part.replace(target)
    return target.read_bytes()


def hip(source: str, arch: str, *flags: str) -> bytes:
    """Code object of HIP source; PRELUDE stands before it."""
    fixed = [
        "-x",
        "hip",
        "--cuda-device-only",
        "--no-gpu-bundle-output",
        f"--offload-arch={arch}",
        "-nogpulib",
        "-nogpuinc",
        "-O3",
        "-std=c++20",
    ]
    return _compile(PRELUDE + source, ".hip", [*fixed, *flags])


def assemble(kernels: dict[str, str], arch: str, lds: int = 0, arg_bytes: Sequence[int] = (8, 8, 8)) -> bytes:
    """Code object of assembly bodies. s[0:1]: kernel arguments, s2: workgroup, v0: work item; 64 VGPRs and 64 AccVGPRs."""
    text, notes = (
        [f'.amdgcn_target "amdgcn-amd-amdhsa--{arch}"'],
        ["amdhsa.version: [1, 2]", f"amdhsa.target: amdgcn-amd-amdhsa--{arch}", "amdhsa.kernels:"],
    )
    for name, body in kernels.items():
        text += [
            ".text",
            f".globl {name}",
            ".p2align 8",
            f".type {name},@function",
            f"{name}:",
            body,
            "s_endpgm",
            f".size {name}, .-{name}",
        ]
        text += [".rodata", ".p2align 6", f".amdhsa_kernel {name}"]
        text += [
            ".amdhsa_user_sgpr_kernarg_segment_ptr 1",
            ".amdhsa_system_sgpr_workgroup_id_x 1",
            ".amdhsa_next_free_vgpr 128",
        ]
        text += [
            ".amdhsa_next_free_sgpr 64",
            ".amdhsa_accum_offset 64",
            ".amdhsa_float_denorm_mode_32 3",
            f".amdhsa_group_segment_fixed_size {lds}",
            ".end_amdhsa_kernel",
        ]
        total = sum(arg_bytes)
        notes += [
            f"  - .name: {name}",
            f"    .symbol: {name}.kd",
            f"    .kernarg_segment_size: {total}",
            f"    .group_segment_fixed_size: {lds}",
        ]
        notes += [
            "    .private_segment_fixed_size: 0",
            "    .kernarg_segment_align: 8",
            "    .wavefront_size: 64",
            "    .sgpr_count: 64",
        ]
        notes += ["    .vgpr_count: 64", "    .max_flat_workgroup_size: 1024", "    .args:"]
        offset = 0
        for size in arg_bytes:
            notes += [
                f"      - {{.offset: {offset}, .size: {size}, .value_kind: {'global_buffer' if size == 8 else 'by_value'}, .address_space: global}}"
            ]
            offset += size
    text += [".amdgpu_metadata", "---", *notes, "...", ".end_amdgpu_metadata", ""]
    return _compile("\n".join(text), ".s", ["-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}"])
