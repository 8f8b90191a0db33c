"""Gates on the compiled code: what the hot loops may cost, and what no kernel may contain."""

from __future__ import annotations

import functools

import pytest

from petit_plugin.backends.hip import isa

ARCHS = ("gfx90a", "gfx942", "gfx950")
# VALU instructions per 8 weights at 16 rows, BF16 activations, pre-pass included; bytes of weights in flight per CU.
BUDGET = {("gfx90a", "nvfp4"): 15, ("gfx90a", "mxfp4"): 15, ("gfx942", "nvfp4"): 14, ("gfx942", "mxfp4"): 14}
BUDGET |= {("gfx950", "nvfp4"): 10, ("gfx950", "mxfp4"): 6}
IN_FLIGHT = {"gfx90a": 12 << 10, "gfx942": 16 << 10, "gfx950": 28 << 10}


@functools.cache
def reports(arch):
    return tuple(isa.report(arch))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("arch", ARCHS)
def test_selected_decode_kernel_meets_its_budget(arch, fmt):
    for n, k in ((8192, 8192), (57344, 8192)):
        selected = [r for r in reports(arch) if [n, k, 16] in r.selected_for and r.format == fmt and r.dtype == "bf16"]
        assert len(selected) == 1
        (r,) = selected
        assert r.valu_per_8_weights <= BUDGET[arch, fmt]
        assert r.mfma_per_8_weights == {"gfx950": 1}.get(arch, 2)
        assert r.weight_load_bytes == 16
        assert r.occupancy >= 2
        assert r.bytes_in_flight_per_cu >= IN_FLIGHT[arch]


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_or_moves_accumulators(arch):
    assert len(reports(arch)) > 30
    for r in reports(arch):
        assert r.scratch_bytes == 0, r.kernel
        assert r.scratch_instructions == 0, r.kernel
        assert r.accvgpr_moves == 0, r.kernel
        assert r.agpr == 0, r.kernel
        assert r.occupancy >= 2, r.kernel


@pytest.mark.parametrize("arch", ARCHS)
def test_hot_loops_fit_the_instruction_cache_and_reload_no_scalars(arch):
    kernels = isa.read_kernels(isa.CODE_OBJECTS / f"petit_{arch}.co")
    for r in reports(arch):
        if r.role not in ("decode", "tile"):
            continue
        assert 0 < r.loop_bytes < 32 << 10
        assert r.weight_load_bytes == 16, r.kernel
        loop = kernels[r.kernel].hot_loop()
        assert not any(i.name.startswith(("s_load", "v_writelane", "global_", "flat_")) for i in loop), r.kernel


def test_every_reference_shape_selects_a_kernel_that_exists():
    from petit_plugin.backends.hip import solutions

    for arch in ARCHS:
        names = {r.kernel for r in reports(arch)}
        for n, k, m in solutions.REFERENCE_SHAPES:
            for fmt in ("nvfp4", "mxfp4"):
                for dtype in ("bf16", "f16"):
                    for exact in (False, True) if fmt == "mxfp4" or arch == "gfx90a" else (False,):
                        cus = solutions.DEFAULT_CUS[arch]
                        s = solutions.select(arch, cus, fmt, dtype, n, k, solutions.bucket(m), exact)
                        launch = solutions.plan(s, arch, cus, fmt, dtype, n, k, m, exact)
                        assert launch.kernel in names
                        assert solutions.tail_efficiency(launch, cus) >= 0.9
