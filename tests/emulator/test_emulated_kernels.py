# ruff: noqa: E501  (kernel and assembly text)
"""Whole compiled HIP kernels: arithmetic libraries, atomics, grids, LDS, and what the counters say about them."""

from __future__ import annotations

import numpy as np
import pytest
from device_code import ARCHS, hip

import emulator


@pytest.mark.parametrize("arch", ARCHS)
def test_division_is_correctly_rounded(arch: str, rng: np.random.Generator) -> None:
    source = """
    extern "C" __global__ void div(const float* a, const float* b, float* c, const double* x, const double* y, double* z, int n) {
      int i = GROUP * 256 + LANE;
      if (i < n) c[i] = a[i] / b[i], z[i] = x[i] / y[i];
    }"""
    n = 1000
    a, b = ((rng.standard_normal(n) * 10.0 ** rng.integers(-37, 38, n)).astype(np.float32) for _ in range(2))
    x, y = (rng.standard_normal(n) * 10.0 ** rng.integers(-300, 300, n) for _ in range(2))
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, 1e-45, 3e38], np.float32)
    a[:64], b[:64] = np.repeat(special, 8), np.tile(special, 8)
    c, z = np.zeros(n, np.float32), np.zeros(n)
    with emulator.load(hip(source, arch), arch) as module:
        module.kernel("div").launch(4, 256, [a, b, c, x, y, z, n])
    with np.errstate(all="ignore"):
        assert np.array_equal(c, a / b, equal_nan=True)
        assert np.array_equal(z, x / y, equal_nan=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics_and_grids(arch: str, rng: np.random.Generator) -> None:
    source = """
    extern "C" __global__ void histogram(const unsigned char* x, unsigned* bins, float* total, unsigned long long* wide, int n) {
      extern __shared__ unsigned local[];
      unsigned t = __builtin_amdgcn_workitem_id_x() + 32 * __builtin_amdgcn_workitem_id_y();
      if (t < 64) local[t] = 0;
      barrier();
      unsigned i = (__builtin_amdgcn_workgroup_id_x() + 3 * __builtin_amdgcn_workgroup_id_y()) * 128 + t;
      if (i < n) {
        __hip_atomic_fetch_add(&local[x[i] & 63], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
        __hip_atomic_fetch_add(total, 0.5f, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        __hip_atomic_fetch_max(wide, (unsigned long long)x[i] << 40, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
      }
      barrier();
      if (t < 64) __hip_atomic_fetch_add(&bins[t], local[t], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }""".replace("extern __shared__ unsigned local[];", "__shared__ unsigned local[64];")
    n = 700
    x = rng.integers(0, 256, n).astype(np.uint8)
    bins, total, wide = np.zeros(64, np.uint32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    with emulator.load(hip(source, arch), arch) as module:
        counters = module.kernel("histogram").launch((3, 2), (32, 4), [x, bins, total, wide, n])
    assert (bins == np.bincount(x & 63, minlength=64)).all()
    assert total[0] == n / 2 and wide[0] == int(x.max()) << 40
    assert counters.workgroups == 6 and counters.waves == 12 and counters.bytes_atomic > 0


def test_struct_arguments_and_half_types(rng: np.random.Generator) -> None:
    source = """
    struct Args { const _Float16* x; float scale; int n; _Float16* y; };
    extern "C" __global__ void scale(Args a) {
      int i = GROUP * 64 + LANE;
      if (i < a.n) a.y[i] = (_Float16)((float)a.x[i] * a.scale);
    }"""
    n = 100
    x, y = rng.standard_normal(n).astype(np.float16), np.zeros(n, np.float16)
    with emulator.load(hip(source, "gfx942"), "gfx942") as module:
        kernel = module.kernel()
        block = np.array(
            [(x.ctypes.data, 1.5, n, y.ctypes.data)], dtype=[("x", "u8"), ("s", "f4"), ("n", "i4"), ("y", "u8")]
        )
        kernel.launch(2, 64, [block.tobytes()], extra=[x, y])
    assert (y == (x.astype(np.float32) * np.float32(1.5)).astype(np.float16)).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_counters_count(arch: str) -> None:
    source = """
    extern "C" __global__ void lds(const f4* x, f4* y, float* z) {
      __shared__ f4 tile[64];
      __shared__ float column[64 * 32];
      tile[LANE] = x[LANE];
      column[LANE * 32] = 1.0f;
      barrier();
      y[LANE] = tile[LANE ^ 1];
      z[LANE] = column[(LANE ^ 1) * 32];
    }"""
    x, y, z = np.arange(256, dtype=np.float32), np.zeros(256, np.float32), np.zeros(64, np.float32)
    with emulator.load(hip(source, arch), arch) as module:
        c = module.kernel().launch(1, 64, [x, y, z])
        counts = emulator.get().pc_counts()
    assert c.bytes_loaded == 1024 and c.bytes_stored == 1024 + 256
    assert c.lds_write_bytes == c.lds_read_bytes == 1024 + 256
    # A stride of 32 dwords: one bank of 32 (twice 32 lanes), two banks of 64; the 16-byte accesses are conflict free.
    assert c.lds_conflict_cycles == 2 * (31 if arch == "gfx950" else 62)
    assert sum(counts.values()) == c.instructions
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("arch", ARCHS)
def test_scratch(arch: str) -> None:
    source = """
    extern "C" __global__ void spill(const int* index, int* y) {
      int local[16];
      for (int i = 0; i < 16; ++i) local[i] = i * 3 + LANE;
      y[LANE] = local[index[LANE] & 15];
    }"""
    index, y = np.arange(64, dtype=np.int32) * 7, np.zeros(64, np.int32)
    with emulator.load(hip(source, arch, "-O1", "-mllvm", "-amdgpu-promote-alloca-to-vector-limit=1"), arch) as module:
        module.kernel().launch(1, 64, [index, y])
    assert (y == (index & 15) * 3 + np.arange(64)).all()


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how fast the emulator runs; no bound, machines differ."""
    source = """
    extern "C" __global__ void valu(float* y, int n) {
      float a = LANE, b = 1.5f;
      for (int i = 0; i < n; ++i) {
        _Pragma("unroll") for (int j = 0; j < 16; ++j) { a = a * b + 0.5f; b = b * 0.999f + a; }
      }
      y[LANE] = a + b;
    }
    extern "C" __global__ void matrix(const h4* x, f4* y, int n) {
      h4 a = x[LANE], b = x[LANE + 64];
      f4 c = {0, 0, 0, 0};
      for (int i = 0; i < n; ++i) {
        _Pragma("unroll") for (int j = 0; j < 16; ++j) c = __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
      }
      y[LANE] = c;
    }"""
    lines = []
    for arch in ARCHS:
        with emulator.load(hip(source, arch), arch) as module:
            c = module.kernel("valu").launch(1, 64, [np.zeros(64, np.float32), 2000])
            rate = c.valu / c.nanoseconds * 1e3
            x = np.random.default_rng(0).standard_normal(512).astype(np.float16)
            c = module.kernel("matrix").launch(1, 64, [x, np.zeros(256, np.float32), 200])
            lines.append(
                f"emulator on {arch}: {rate:.0f} M vector, {c.mfma / c.nanoseconds * 1e3:.2f} M 16x16x16 matrix wave instructions a second"
            )
            assert c.mfma == 3200
    with capsys.disabled():
        print("", *lines, sep="\n")
