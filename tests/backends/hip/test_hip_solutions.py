"""Solutions: every kernel they can name exists, every grid covers the work once, user files are checked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numerics import assert_close, random_activations, random_checkpoint, reference

import petit_plugin as pp
from petit_plugin.backends.hip import solutions
from petit_plugin.backends.hip.solutions import Solution

KEY = ["gfx942", 304, "nvfp4", "bf16", 8192, 8192, 16]


@pytest.fixture(autouse=True)
def fresh_tables() -> None:
    solutions.table.cache_clear()
    solutions.select.cache_clear()


def kernels_of(code_objects: Path, arch: str) -> set[str]:
    """Kernel descriptors in the symbol names of a code object."""
    text = (code_objects / f"petit_{arch}.co").read_bytes()
    return {name.decode() for name in text.split(b"\0") if name.startswith(b"petit_") and not name.endswith(b".kd")}


def test_every_kernel_that_can_be_selected_is_compiled(code_objects: Path) -> None:
    for arch in solutions.ARCHS:
        compiled = kernels_of(code_objects, arch)
        assert len(compiled) > 20
        for (role, rows), fmt, dtype, mask in itertools.product(
            solutions.SHAPES, ("nvfp4", "mxfp4"), ("bf16", "f16"), (False, True) if arch == "gfx950" else (False,)
        ):
            assert solutions.conversion_kernel(arch, fmt, dtype, False, mask) in compiled
            if role == "dense":
                assert f"petit_dequantize_{fmt}_{dtype}{'_mask' if mask else ''}" in compiled
                assert f"petit_finish_{dtype}" in compiled
                continue
            assert solutions.kernel_name(role, fmt, dtype, rows, False, mask) in compiled
            if rows != 128 and (fmt == "mxfp4" or arch == "gfx90a"):
                assert solutions.kernel_name(role, fmt, dtype, rows, True, mask) in compiled
                assert solutions.conversion_kernel(arch, fmt, dtype, True, mask) in compiled


def test_grids_cover_the_work_once(rng: np.random.Generator) -> None:
    for arch in solutions.ARCHS:
        cus = solutions.DEFAULT_CUS[arch]
        for n, k, m in [
            *solutions.REFERENCE_SHAPES,
            *(tuple(int(v) for v in rng.integers(1, 3000, 3)) for _ in range(99)),
        ]:
            k = -(-k // 32) * 32
            m = min(m, solutions.DENSE_ABOVE)
            s = solutions.select(arch, cus, "nvfp4", "bf16", n, k, solutions.bucket(m), False)
            launch = solutions.plan(s, arch, cus, "nvfp4", "bf16", n, k, m, False)
            shape = solutions.SHAPES[(s.role, s.rows)]
            units = -(-n // shape.columns) * -(-m // s.rows) * -(-k // 128)
            assert launch.workgroups * launch.units_q + launch.units_r == units
            assert 0 <= launch.units_r < launch.workgroups and launch.units_q >= 1
            assert launch.workgroups % launch.xcds == 0 and launch.m_blocks * s.rows >= m
            if (n, k, m) in solutions.REFERENCE_SHAPES:
                assert solutions.tail_efficiency(launch, cus) >= 0.9, (arch, n, k, m)


def test_the_shipped_table_is_well_formed() -> None:
    for key, solution in solutions.TABLE.items():
        solutions.check_key(key)
        assert (solution.role, solution.rows) in solutions.SHAPES
    assert solutions.parse(solutions.dump(solutions.TABLE)) == solutions.TABLE
    printed = solutions.as_text(solutions.TABLE)
    assert len(printed.splitlines()) == len(solutions.TABLE) + len(solutions.HEURISTIC) + 3


def write(path: Path, monkeypatch: pytest.MonkeyPatch, *entries: dict[str, object]) -> None:
    path.write_text(json.dumps(entries))
    monkeypatch.setenv("PETIT_SOLUTIONS", str(path))


BAD = [
    ({"key": KEY[:-1], "solution": {"role": "decode", "rows": 16}}, "6 parts"),
    ({"key": ["gfx1100", *KEY[1:]], "solution": {"role": "decode", "rows": 16}}, "'gfx1100' is none of"),
    ({"key": [*KEY[:-1], 17], "solution": {"role": "decode", "rows": 16}}, "power of two"),
    ({"key": [*KEY[:4], -8192, *KEY[5:]], "solution": {"role": "decode", "rows": 16}}, "whole numbers"),
    ({"key": KEY, "solution": {"role": "decode", "rows": 64}}, "no kernel decode with 64 rows"),
    ({"key": KEY, "solution": {"role": "decode", "rows": 16, "workgroups_per_cu": 0}}, "workgroups_per_cu is 0"),
    ({"key": KEY, "solution": {"role": "decode", "rows": 16, "waves": 4}}, "waves"),
    ({"key": KEY}, "solution"),
]


@pytest.mark.parametrize(("entry", "message"), BAD)
def test_bad_user_files_are_refused(
    entry: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    write(path, monkeypatch, {"key": KEY, "solution": {"role": "decode", "rows": 16}}, entry)
    with pytest.raises(ValueError, match=message) as caught:
        solutions.select(*KEY, False)  # type: ignore[arg-type]
    assert str(path) in str(caught.value) and "entry 1" in str(caught.value)


def test_a_user_file_is_merged_over_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = next(iter(solutions.TABLE))
    write(
        tmp_path / "mine.json",
        monkeypatch,
        {"key": KEY, "solution": {"role": "tile", "rows": 64, "workgroups_per_cu": 1}},
        {"key": list(shipped), "solution": {"role": "decode", "rows": 32}},
    )
    assert solutions.select(*KEY, False) == Solution("tile", 64, workgroups_per_cu=1)  # type: ignore[arg-type]
    assert solutions.select(*shipped, False) == Solution("decode", 32)
    assert set(solutions.table()) == {*solutions.TABLE, tuple(KEY)}


def test_an_untuned_shape_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "petit_plugin"):
        for _ in range(3):
            assert solutions.select("gfx942", 304, "mxfp4", "f16", 100, 640, 32, False) == Solution("decode", 32)
    (record,) = caplog.records
    assert "N=100 K=640 M<=32" in record.message


def test_a_chosen_solution_is_what_runs(
    code_objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The same layer through every kernel shape and several grids: all within the contract."""
    c = random_checkpoint(rng, "nvfp4", 130, 640)
    x = random_activations(rng, (20, 640), torch.bfloat16)
    for role, rows in solutions.SHAPES:
        for workgroups, least in ((1, 1), (3, 64)):
            key = ["gfx942", 304, "nvfp4", "bf16", 130, 640, 32]
            solution = {"role": role, "rows": rows, "workgroups_per_cu": workgroups, "min_units": least}
            write(tmp_path / "mine.json", monkeypatch, {"key": key, "solution": solution})
            solutions.table.cache_clear()
            solutions.select.cache_clear()
            with pp.emulated("gfx942") as device:
                w = pp.pack_nvfp4(*c.torch_arguments())
                if role != "dense":
                    assert f"_{role}_" in device.launch(w.meta, "bf16", 20).kernel
                assert_close(pp.linear(x, w), reference(x, c.values))
