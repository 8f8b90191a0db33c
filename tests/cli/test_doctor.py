"""`petit doctor`: facts of this machine against other ways to find them, and made-up machines."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest
import torch
from cli.runner import petit

import petit_plugin
from petit_cli import doctor, machine


def test_this_machine() -> None:
    result = petit("doctor", "--json")
    assert result.code == 0, result.out + result.err
    found = json.loads(result.out)
    assert found["ok"] and found["versions"]["petit"] == petit_plugin.__version__
    assert found["torch"]["version"] == torch.__version__
    assert found["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert found["cpu"]["architecture"] == platform.machine()
    runs = [k for k in found["native"]["kernels"] if k["runs"]]
    assert len(runs) == 1 and runs[0]["built"] and runs[0]["supported"]
    assert len(found["openmp"]["runtimes"]) <= 1
    assert {k["name"] for k in found["native"]["kernels"]} >= {"portable", "avx2", "avx512"}


def test_text_gives_a_reason_for_everything_that_does_not_work() -> None:
    result = petit("doctor")
    assert result.code == 0 and result.err == ""
    for line in result.out.splitlines():
        mark, _, rest = line.partition(" ")
        assert mark in ("ok", "no"), line
        assert len(rest.split()) >= 2, line
    assert f"torch     {torch.__version__}" in result.out


def test_forced_kernels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIT_CPU_ISA", "portable")
    assert "the portable kernels run" in petit("doctor").out
    monkeypatch.setenv("PETIT_CPU_ISA", "sse9")
    result = petit("doctor")
    assert result.code == 1 and "sse9" in result.out


def _node(root: Path, name: str, text: str, banks: tuple[int, ...] = ()) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "properties").write_text(text)
    for i, size in enumerate(banks):
        (root / name / "mem_banks" / str(i)).mkdir(parents=True)
        (root / name / "mem_banks" / str(i) / "properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")


def test_gpus_from_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _node(tmp_path, "0", "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n")
    _node(tmp_path, "1", "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\n", (206_141_652_992,))
    _node(tmp_path, "2", "simd_count 440\nsimd_per_cu 4\ngfx_target_version 90010\n")
    _node(tmp_path, "10", "simd_count 1024\nsimd_per_cu 4\ngfx_target_version 90500\n")
    monkeypatch.setattr(machine, "_KFD", tmp_path)
    gpus = machine.amd_gpus()
    assert [(g["arch"], g["compute_units"]) for g in gpus] == [("gfx942", 304), ("gfx90a", 110), ("gfx950", 256)]
    assert gpus[0]["memory_bytes"] == 206_141_652_992
    monkeypatch.setattr(doctor, "_device_code", lambda: {"ok": False, "built": ["gfx942"], "reason": "no gfx950"})
    text = petit("doctor").out
    assert "gfx942; no gfx950" in text
    assert "gfx942, 304 CUs, 206.1 GB: torch is no ROCm build" in text
    assert "gfx90a, 110 CUs, 0 B: this build has no kernels for it" in text


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_KFD", tmp_path / "absent")
    assert "no AMD GPU is visible in /sys/class/kfd" in petit("doctor").out


@pytest.mark.parametrize(
    ("version", "points", "allowed", "ok", "reason"),
    [
        (None, [], None, False, "not installed"),
        ("0.32.0+cpu", ["petit = petit_vllm:register"], None, True, ""),
        ("0.33.1", ["petit = petit_vllm:register"], None, True, ""),
        ("0.32.0", [], None, False, "no entry point in vllm.general_plugins"),
        ("0.32.0", ["petit = petit_vllm:register"], "other", False, "VLLM_PLUGINS=other keeps the plugin out"),
        ("0.32.0", ["petit = petit_vllm:register"], "other,petit", True, ""),
        ("0.11.2", ["petit = petit_vllm:register"], None, False, "outside the tested range 0.32 to 0.33"),
        ("dev", ["petit = petit_vllm:register"], None, False, "outside the tested range"),
    ],
)
def test_vllm(
    version: str | None, points: list[str], allowed: str | None, ok: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed", lambda *names: (names[0], version) if version else None)
    monkeypatch.setattr(machine, "entry_points", lambda group: points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    state = doctor.report()["frameworks"]["vllm"]
    assert state["ok"] is ok and reason in state["reason"] and bool(state["reason"]) is not ok


def test_two_openmp_runtimes_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "openmp_runtimes", lambda: ["/a/libgomp.so.1", "/b/libomp.so"])
    result = petit("doctor")
    assert result.code == 1 and "several OpenMP runtimes" in result.out
