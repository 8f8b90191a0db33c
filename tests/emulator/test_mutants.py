"""Breaks correct kernels, one instruction at a time; the emulator must notice every one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from device_code import ARCHS, hip

import emulator

STAGED = """
extern "C" __global__ void staged(const float* x, float* y, int rounds) {
  __shared__ float tile[2][256];
  float sum = 0;
  tile[0][LANE] = x[GROUP * 256 + LANE];
  tile[1][LANE] = 0.0f;
  barrier();
  for (int i = 0; i < rounds; ++i) {
    sum += tile[i & 1][(LANE + 65) & 255] * 2.0f;
    tile[(i + 1) & 1][LANE] = tile[i & 1][(LANE + 128) & 255] + 1.0f;
    barrier();
  }
  y[GROUP * 256 + LANE] = sum;
}
"""
SPLIT_K = """
// Every workgroup writes a partial sum; the last one to arrive adds them in a fixed order.
extern "C" __global__ void split_k(const float* x, float* partial, unsigned* counter, float* y, int splits) {
  __shared__ unsigned ticket;
  partial[GROUP * 256 + LANE] = x[GROUP * 256 + LANE] * 0.5f;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  barrier();
  if (LANE == 0) ticket = __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  barrier();
  if (ticket != splits - 1) return;
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  float sum = 0;
  for (int i = 0; i < splits; ++i) sum += partial[i * 256 + LANE];
  y[LANE] = sum;
  if (LANE == 0) *counter = 0;
}
"""
GEMM = """
#if defined(__gfx90a__)
#define MFMA __builtin_amdgcn_mfma_f32_16x16x16f16
#else
#define MFMA __builtin_amdgcn_mfma_f32_16x16x16f16
#endif
// One wave: c[16][16] = a[16][k] b[16][k]^T, prefetched one step ahead.
extern "C" __global__ void gemm(const h4* a, const h4* b, f4* c, int steps) {
  f4 acc = {0, 0, 0, 0};
  h4 pa = a[LANE], pb = b[LANE];
  for (int i = 1; i < steps; ++i) {
    h4 na = a[i * 64 + LANE], nb = b[i * 64 + LANE];
    acc = MFMA(pa, pb, acc, 0, 0, 0);
    pa = na, pb = nb;
  }
  c[LANE] = MFMA(pa, pb, acc, 0, 0, 0);
}
"""


def run_staged(elf: bytes, arch: str, groups: int = 2, data_groups: int = 2) -> bool:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(256 * data_groups).astype(np.float32)
    y = np.full(256 * data_groups, np.nan, np.float32)
    with emulator.load(elf, arch) as module:
        module.kernel("staged").launch(groups, 256, [x, y, 5])
    want = np.zeros((data_groups, 256), np.float32)
    tile = x.reshape(data_groups, 256).copy()
    lane = np.arange(256)
    for _ in range(5):
        want += tile[:, (lane + 65) & 255] * np.float32(2)
        tile = tile[:, (lane + 128) & 255] + np.float32(1)
    return bool((y.reshape(data_groups, 256) == want).all())


def run_split_k(elf: bytes, arch: str, splits: int = 12, grid: int | None = None) -> bool:
    rng = np.random.default_rng(2)
    x = rng.standard_normal(256 * splits).astype(np.float32)
    partial, y = np.full(256 * splits, np.nan, np.float32), np.full(256, np.nan, np.float32)
    counter = np.zeros(1, np.uint32)
    with emulator.load(elf, arch) as module:
        module.kernel("split_k").launch(grid or splits, 256, [x, partial, counter, y, splits])
    want = np.zeros(256, np.float32)
    for row in x.reshape(splits, 256):
        want += row * np.float32(0.5)
    return bool((y == want).all()) and counter[0] == 0


def run_gemm(elf: bytes, arch: str) -> bool:
    rng = np.random.default_rng(3)
    steps = 5
    a, b = (rng.integers(-8, 9, (steps, 64, 4)).astype(np.float16) for _ in range(2))
    c = np.full((64, 4), np.nan, np.float32)
    with emulator.load(elf, arch) as module:
        module.kernel("gemm").launch(1, 64, [a, b, c, steps])
    rows = [x.astype(np.float64).reshape(steps, 4, 16, 4).transpose(2, 0, 1, 3).reshape(16, -1) for x in (a, b)]
    want = rows[0] @ rows[1].T
    lane, reg = np.arange(64)[:, None], np.arange(4)[None, :]
    return bool((c == want[4 * (lane // 16) + reg, lane % 16]).all())


CASES: dict[str, tuple[str, Callable[[bytes, str], bool]]] = {
    "staged": (STAGED, run_staged),
    "split_k": (SPLIT_K, run_split_k),
    "gemm": (GEMM, run_gemm),
}


@functools.cache
def elf(case: str, arch: str) -> bytes:
    return hip(CASES[case][0], arch)


# Workgroups one after another (strictest about what is in flight), then finely and unfairly interleaved.
SCHEDULES = (
    {"quantum": 200000, "resident": 4, "seed": 0},
    *({"quantum": 5, "resident": 16, "seed": seed} for seed in (1, 2, 3, 4)),
)


@contextlib.contextmanager
def schedule(options: dict[str, int]) -> Iterator[None]:
    device = emulator.get()
    try:
        for name, value in options.items():
            device.set_option(name, value)
        yield
    finally:
        for name, value in SCHEDULES[0].items():
            device.set_option(name, value)


def caught(run: Callable[[], bool]) -> str | None:
    for options in SCHEDULES:
        with schedule(options):
            try:
                if not run():
                    return "wrong result"
            except emulator.EmulatorError as e:
                return str(e)
    return None


def check_all(case: str, arch: str, mutants: list[emulator.Mutant], at_least: int = 1) -> list[str]:
    assert len(mutants) >= at_least, f"{case} on {arch} has only {len(mutants)} such instructions"
    run = CASES[case][1]
    reports = {m.change: caught(functools.partial(run, m.elf, arch)) for m in mutants}
    missed = [change for change, report in reports.items() if report is None]
    assert not missed, f"not caught on {arch}: {missed}"
    return [r for r in reports.values() if r]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_the_unchanged_kernels_are_right(case: str, arch: str) -> None:
    for options in SCHEDULES:
        with schedule(options):
            assert CASES[case][1](elf(case, arch), arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_every_dropped_waitcnt_is_caught(case: str, arch: str) -> None:
    check_all(case, arch, list(emulator.mutate(elf(case, arch), "s_waitcnt")), at_least=3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", ["staged", "split_k"])
def test_every_dropped_barrier_is_caught(case: str, arch: str) -> None:
    reports = check_all(case, arch, list(emulator.mutate(elf(case, arch), "s_barrier")), at_least=2)
    if case == "staged":
        assert all("LDS" in r and "pc 0x" in r for r in reports)
        assert any("LDS race" in r for r in reports)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_dropped_cache_write_back_is_caught(arch: str) -> None:
    check_all("split_k", arch, list(emulator.mutate(elf("split_k", arch), "buffer_wbl2")))


@pytest.mark.parametrize("arch", ARCHS)
def test_dropped_invalidates_are_caught(arch: str) -> None:
    # One of two invalidates in a row is enough, so they go together.
    name = "buffer_wbinvl1_vol" if arch == "gfx90a" else "buffer_inv"
    code, count = elf("split_k", arch), 0
    for inst in emulator.disassemble(code):
        if inst.name == name:
            code, count = (
                emulator.mutants.patch(code, inst, (emulator.mutants.S_NOP,) * len(inst.words), "").elf,
                count + 1,
            )
    assert count
    assert caught(lambda: run_split_k(code, arch)) == "wrong result"


@pytest.mark.parametrize("arch", ARCHS)
def test_an_oversized_grid_is_caught(arch: str) -> None:
    report = caught(lambda: run_staged(elf("staged", arch), arch, groups=3))
    assert report and "outside every registered range" in report


@pytest.mark.parametrize("arch", ARCHS)
def test_wrong_mfma_operands_are_caught(arch: str) -> None:
    code = elf("gemm", arch)
    matrix = [i for i in emulator.disassemble(code) if i.name.startswith("v_mfma")]
    assert matrix
    mutants = []
    for inst in matrix:
        for source in (0, 1, 2):
            try:
                mutants.append(emulator.replace_operand(code, inst, source, delta=2))
            except ValueError:
                continue  # an inline constant
    check_all("gemm", arch, mutants, at_least=3)


@pytest.mark.parametrize("arch", ARCHS)
def test_results_do_not_depend_on_the_order_of_waves(arch: str, rng: np.random.Generator) -> None:
    for seed in rng.integers(1, 1 << 30, 3):
        for options in SCHEDULES:
            with schedule({**options, "seed": int(seed)}):
                assert run_staged(elf("staged", arch), arch)
                assert run_split_k(elf("split_k", arch), arch)
