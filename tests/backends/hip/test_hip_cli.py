"""petit isa, bench and tune where there is no GPU: what they print is counted, labelled as a model, and consistent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import petit_plugin as pp
from petit_cli.app import app
from petit_plugin.backends.hip import model, solutions

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these commands time a GPU when there is one")


def petit(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_isa_lists_every_kernel(code_objects: Path) -> None:
    code, out, _ = petit("isa", "--arch", "gfx942", "--json")
    assert code == 0
    rows = json.loads(out)
    keys = {"kernel", "arch", "format", "dtype", "role", "vgpr", "agpr", "lds_bytes", "scratch_bytes", "occupancy"}
    keys |= {"valu_per_8_weights", "mfma_per_8_weights", "weight_load_bytes", "bytes_in_flight_per_cu", "selected_for"}
    assert all(keys <= set(row) and row["arch"] == "gfx942" for row in rows)
    assert {row["role"] for row in rows} >= {"decode", "tile", "dequantize", "convert", "finish"}
    chosen = {tuple(shape) for row in rows for shape in row["selected_for"]}
    assert chosen == set(solutions.REFERENCE_SHAPES)
    code, out, _ = petit("isa", "--arch", "gfx942")
    assert code == 0 and all(row["kernel"] in out for row in rows)


@pytest.mark.parametrize("command", ["isa", "bench", "tune"])
def test_an_unknown_arch_is_a_usage_error(command: str, tmp_path: Path) -> None:
    more = ["--out", str(tmp_path / "out.json")] if command == "tune" else []
    code, _, err = petit(command, "--arch", "gfx1100", *more)
    assert code == 2 and "gfx1100" in err and "gfx942" in err


def test_bench_models_every_layer(code_objects: Path) -> None:
    code, out, _ = petit("bench", "--arch", "gfx942", "--format", "mxfp4", "--rows", "16", "--json")
    assert code == 0
    rows = json.loads(out)
    assert {row["kind"] for row in rows} == {"model"}
    assert [(r["chip"], r["layer"]) for r in rows] == [
        (chip, layer) for layer in ("qkv", "o", "gate_up", "down") for chip in ("MI300X", "MI325X")
    ]
    for row in rows:
        assert row["seconds"] == max(row["bounds"].values()) == row["bounds"][row["bound"]]
        weights = row["n"] * row["k"] * (1 / 2 + 1 / 32)
        least = weights / (5.3e12 if row["chip"] == "MI300X" else 6e12)
        assert least <= row["bounds"]["hbm"] <= 1.25 * least
        assert 0.8 <= row["hbm_roofline_share"] <= 1
        assert row["bf16_seconds"] == pytest.approx(2 * row["n"] * row["k"] * least / weights, rel=0.02)
    code, out, _ = petit("bench", "--arch", "gfx942", "--format", "mxfp4", "--rows", "16")
    assert code == 0 and "model, not a measurement" in out and len(out.splitlines()) == 2 + len(rows)


def test_counts_scale_to_a_whole_launch(code_objects: Path) -> None:
    """Costs of a unit, a tile and a cut add up to what the emulator counts for a launch that has several of each."""
    with pp.emulated("gfx942", cus=2) as device:
        counter = model.Counter(device)
        solution = solutions.Solution("decode", 16, workgroups_per_cu=2)
        cost = counter.costs("nvfp4", torch.bfloat16, solution, 16)
        n, k = 192, 20 * 128
        launch = solutions.plan(solution, "gfx942", 2, "nvfp4", "bf16", n, k, 16, False)
        cuts, parts = model.cut_parts(launch, 20)
        assert launch.workgroups == 4 and cuts == 3 and parts == 6
        w = pp.pack_nvfp4(
            torch.full((n, k // 2), 0x5A, dtype=torch.uint8), torch.full((n, k // 16), 0x38, dtype=torch.uint8), 1.0
        )
        device.forced = solution
        pp.linear(torch.ones(16, k, dtype=torch.bfloat16), w)
        found = device.counters()
        want = model.Counts().plus(cost.unit, 60).plus(cost.tile, 3).plus(cost.cut, cuts)
        assert found["valu"] == pytest.approx(want.valu, rel=0.05)
        assert found["mfma_cycles"] == pytest.approx(want.mfma, rel=1e-6)


def test_tune_writes_a_file_that_is_used(code_objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "tuned.json"
    code, text, err = petit(
        *("tune", "--arch", "gfx942", "--format", "nvfp4", "--shape", "4096,4096", "--rows", "16", "--out", str(out))
    )
    assert code == 0, err
    assert "model, not a measurement" in text and "1 solutions in" in text
    ((key, solution),) = solutions.parse(out.read_text()).items()
    assert key == ("gfx942", 304, "nvfp4", "bf16", 4096, 4096, 16)
    monkeypatch.setenv("PETIT_SOLUTIONS", str(out))
    solutions.table.cache_clear()
    solutions.select.cache_clear()
    try:
        assert solutions.select(*key, False) == solution
        code, text, _ = petit("tune", "--show")
        assert code == 0 and "4096" in text and "everything else" in text
    finally:
        solutions.table.cache_clear()
        solutions.select.cache_clear()
    assert petit("tune", "--shape", "12;7", "--out", str(out))[0] == 2
    assert petit("tune")[0] == 2
