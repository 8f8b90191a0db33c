# ruff: noqa: E501  (kernel and assembly text)
"""Each rule the emulator enforces, with the smallest program that breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from device_code import ARCHS, assemble, hip

import emulator

ARGS = "s_load_dwordx4 s[4:7], s[0:1], 0x0\n s_load_dwordx2 s[8:9], s[0:1], 0x10\n s_waitcnt lgkmcnt(0)\n v_lshlrev_b32_e32 v1, 2, v0\n"


def run(
    body: str, arch: str = "gfx942", *, lds: int = 0, block: int = 64, grid: int = 1, args: Sequence[Any] | None = None
) -> np.ndarray:
    """Runs ARGS + body: s[4:5] input of 64 floats, s[6:7] output of 64 dwords, v1 = 4 * lane."""
    x, y, z = np.arange(64, dtype=np.float32), np.zeros(64, np.uint32), np.zeros(4, np.uint32)
    with emulator.load(assemble({"k": ARGS + body}, arch, lds=lds), arch) as module:
        module.kernel("k").launch(grid, block, list(args or [x, y, z]))
    return y


def broken(body: str, message: str, arch: str = "gfx942", **kw: Any) -> None:
    with pytest.raises(emulator.EmulatorError, match=message):
        run(body, arch, **kw)


@pytest.mark.parametrize("arch", ARCHS)
def test_register_read_before_its_wait(arch: str) -> None:
    load = "global_load_dword v2, v1, s[4:5]\n"
    broken(load + "v_add_f32_e32 v3, v2, v2", r"reads v2 before the s_waitcnt .*pc 0x", arch)
    broken(load + "v_mov_b32_e32 v2, 0", "overwrites v2 while a load", arch)
    two = load + "global_load_dword v3, v1, s[4:5]\n"
    run(two + "s_waitcnt vmcnt(1)\n v_mov_b32_e32 v4, v2", arch)
    broken(two + "s_waitcnt vmcnt(1)\n v_add_u32_e32 v4, v3, v3", "reads v3 before", arch)


def test_scalar_load_needs_lgkmcnt_zero() -> None:
    broken("s_load_dword s12, s[4:5], 0x0\n s_add_u32 s13, s12, 1", "reads s12 before")
    # Scalar loads return out of order: one remaining may be this one.
    broken(
        "s_load_dword s12, s[4:5], 0x0\n s_load_dword s13, s[4:5], 0x4\n s_waitcnt lgkmcnt(1)\n s_add_u32 s14, s12, 1",
        "reads s12 before",
    )
    run("s_load_dword s12, s[4:5], 0x0\n s_waitcnt lgkmcnt(0)\n s_add_u32 s13, s12, 1")


def test_uninitialised_registers() -> None:
    broken("v_add_u32_e32 v3, v40, v0", "reads v40, which is not initialised in lane 0")
    broken("s_add_u32 s40, s41, s42", "reads s4[12], which is not initialised")
    broken("v_accvgpr_read_b32 v3, a5\n v_add_u32_e32 v3, 1, v3", "reads v3, which is not initialised")
    half = "s_mov_b64 exec, 0xff\n v_mov_b32_e32 v3, 1\n s_mov_b64 exec, -1\n"
    broken(half + "v_add_u32_e32 v4, 1, v3", "reads v3, which is not initialised in lane 8")
    broken("v_mfma_f32_16x16x16_f16 v[4:7], v[8:9], v[10:11], 0", "reads v8")


def test_lds_rules() -> None:
    broken("ds_read_b32 v2, v1", "reads LDS address 0, which nothing has written", lds=256)
    broken("v_mov_b32_e32 v2, 1\n ds_write_b32 v1, v2 offset:4", "LDS access of 4 bytes at 256 is outside", lds=256)
    write = "v_mov_b32_e32 v2, 1\n v_lshlrev_b32_e32 v1, 2, v0\n ds_write_b32 v1, v2\n"
    cross = "v_xor_b32_e32 v3, 0x100, v1\n ds_read_b32 v4, v3\n s_waitcnt lgkmcnt(0)\n"
    run(write + "s_waitcnt lgkmcnt(0)\n s_barrier\n" + cross, lds=512, block=128)
    broken(write + "s_waitcnt lgkmcnt(0)\n" + cross, "LDS race|which nothing has written", lds=512, block=128)
    # The write was still in flight when the wave reached the barrier.
    broken(write + "s_barrier\n" + cross, "LDS race", lds=512, block=128)
    # Reading is not finished when another wave overwrites after the barrier.
    late = (
        write
        + "s_waitcnt lgkmcnt(0)\n s_barrier\n v_xor_b32_e32 v3, 0x100, v1\n ds_read_b32 v4, v3\n s_barrier\n ds_write_b32 v1, v2\n s_waitcnt lgkmcnt(0)"
    )
    broken(late, "LDS race", lds=512, block=128)


def test_global_to_lds_poisons_until_vmcnt() -> None:
    load = "s_mov_b32 m0, 0\n global_load_lds_dword v1, s[4:5]\n"
    broken(load + "ds_read_b32 v2, v1", "before the s_waitcnt vmcnt", lds=256)
    y = run(
        load + "s_waitcnt vmcnt(0)\n ds_read_b32 v2, v1\n s_waitcnt lgkmcnt(0)\n global_store_dword v1, v2, s[6:7]",
        lds=256,
    )
    assert (y.view(np.float32) == np.arange(64)).all()
    wide = "s_mov_b32 m0, 0\n v_mov_b32_e32 v2, 0\n s_mov_b64 exec, 0xffff\n v_lshlrev_b32_e32 v3, 4, v0\n global_load_lds_dwordx4 v3, s[4:5]\n s_waitcnt vmcnt(0)\n"
    y = run(wide + "ds_read_b32 v2, v1\n s_waitcnt lgkmcnt(0)\n global_store_dword v1, v2, s[6:7]", "gfx950", lds=256)
    assert (y[:16].view(np.float32) == np.arange(16)).all()


def test_global_bounds() -> None:
    broken("global_load_dword v2, v1, s[4:5] offset:4", "outside every registered range .lane 63")
    broken(
        "v_mov_b32_e32 v2, 0\n global_store_dword v1, v2, s[6:7] offset:-4",
        "store of 4 bytes .* outside every registered range .lane 0",
    )
    broken("v_mov_b32_e32 v2, 0\n v_mov_b32_e32 v3, 0\n global_store_dword v3, v2, s[0:1]", "read-only")


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_range_check(arch: str) -> None:
    rsrc = "s_mov_b64 s[12:13], s[4:5]\n s_movk_i32 s14, 0x40\n s_mov_b32 s15, 0x27000\n"
    y = run(
        rsrc + "buffer_load_dword v2, v1, s[12:15], 0 offen\n s_waitcnt vmcnt(0)\n global_store_dword v1, v2, s[6:7]",
        arch,
    )
    assert (y.view(np.float32) == np.where(np.arange(64) < 16, np.arange(64), 0)).all()
    out = rsrc.replace("s[4:5]", "s[6:7]") + "v_mov_b32_e32 v2, 7\n buffer_store_dword v2, v1, s[12:15], 0 offen"
    assert (run(out, arch) == np.where(np.arange(64) < 16, 7, 0)).all()
    # A wide load: each dword by itself.
    wide = (
        rsrc
        + "v_lshlrev_b32_e32 v3, 3, v0\n buffer_load_dwordx4 v[4:7], v3, s[12:15], 0 offen\n s_waitcnt vmcnt(0)\n global_store_dword v1, v7, s[6:7]"
    )
    lane = np.arange(64)
    assert (run(wide, arch).view(np.float32) == np.where(2 * lane + 3 < 16, 2 * lane + 3, 0)).all()
    broken(rsrc.replace("0x40", "0x42") + "buffer_load_dword v2, v1, s[12:15], 0 offen", "straddles num_records", arch)


def test_scalar_cache_is_not_coherent() -> None:
    body = "v_mov_b32_e32 v2, 5\n global_store_dword v1, v2, s[6:7]\n s_waitcnt vmcnt(0)\n s_load_dword s12, s[6:7], 0x0\n s_waitcnt lgkmcnt(0)\n"
    y = run(body + "v_mov_b32_e32 v3, s12\n global_store_dword v1, v3, s[6:7]")
    assert (y == 0).all()


def test_unknown_instruction_is_named() -> None:
    broken("v_mqsad_u32_u8 v[4:7], v[8:9], v10, v[12:15]", r"unknown instruction \[.*pc 0x[0-9a-f]+: v_mqsad_u32_u8")


def test_registers_beyond_the_allocation() -> None:
    broken("v_mov_b32_e32 v100, 0", "names v100, but the kernel descriptor allocates 64")


def test_arguments_are_checked() -> None:
    x = np.zeros(4, np.float32)
    with emulator.load(
        hip('extern "C" __global__ void k(float* x, int n) { x[0] = n; }', "gfx942"), "gfx942"
    ) as module:
        kernel = module.kernel("k")
        with pytest.raises(TypeError, match="takes 2 arguments"):
            kernel.launch(1, 64, [x])
        with pytest.raises(emulator.EmulatorError, match="empty grid"):
            kernel.launch(0, 64, [x, 1])
        with pytest.raises(emulator.EmulatorError, match="2048 work items"):
            kernel.launch(1, 2048, [x, 1])
        kernel.launch(1, 64, [x, 3])
    assert x[0] == 3
    with pytest.raises(emulator.EmulatorError, match=r"is for gfx942"):
        emulator.get().set_arch("gfx950")
        emulator.load(hip('extern "C" __global__ void k(float* x, int n) { x[0] = n; }', "gfx942"))


def test_workgroups_that_wait_for_each_other() -> None:
    """Spinning on a flag that a later workgroup sets must make progress."""
    source = """
    extern "C" __global__ void spin(unsigned* flag, unsigned* out) {
      if (GROUP == 0) {
        while (__hip_atomic_load(flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) == 0) {}
        out[LANE] = 7;
      } else if (LANE == 0) {
        __hip_atomic_store(flag, 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
      }
    }"""
    emulator.get().set_option("quantum", 1000)
    try:
        for arch in ARCHS:
            flag, out = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
            with emulator.load(hip(source, arch), arch) as module:
                module.kernel("spin").launch(2, 64, [flag, out])
            assert (out == 7).all()
    finally:
        emulator.get().set_option("quantum", 200000)
