"""The command line itself: help, wrong arguments (exit code 2), names of models, and signs of life as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.runner import MODELOPT, petit

COMMANDS = ("doctor", "inspect", "quantize", "verify", "bench", "tune", "isa")


def test_help_lists_what_there_is() -> None:
    result = petit("--help")
    assert result.code == 0
    assert [c for c in COMMANDS if f" {c} " not in result.out] == []
    for command in COMMANDS:
        assert petit(command, "--help").code == 0


def test_version() -> None:
    import petit_plugin

    assert petit("--version").out.strip() == f"petit {petit_plugin.__version__}"


@pytest.mark.parametrize(
    "args", [("nosuch",), ("inspect",), ("inspect", "a", "b"), ("quantize", "a", "b"), ("doctor", "--nosuch")]
)
def test_wrong_arguments(args: tuple[str, ...]) -> None:
    assert petit(*args).code == 2


def test_unknown_format(tmp_path: Path) -> None:
    result = petit("quantize", MODELOPT / "llama-mxfp4", tmp_path / "out", "--format", "fp5")
    assert result.code == 2 and "nvfp4" in result.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("quantize", "out", "-f", "nvfp4")])
def test_model_that_is_not_there(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    name, *rest = command
    missing = petit(name, "no-such-dir", *rest)
    assert missing.code == 2 and missing.err.strip() == "error: no-such-dir: no such directory"
    hub = petit(name, "acme/Tiny-NVFP4", *rest)
    assert hub.code == 2 and "hf download acme/Tiny-NVFP4" in hub.err
    (tmp_path / "file").write_text("x")
    assert petit(name, "file", *rest).code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_model_name_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--acme--Tiny-NVFP4"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc123").symlink_to(MODELOPT / "llama-w4a16-nvfp4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    result = petit("inspect", "acme/Tiny-NVFP4")
    assert result.code == 0 and "14 FP4 layers" in result.out


def test_16_bit_model_is_no_fp4_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for command in ("inspect", "verify"):
        result = petit(command, tmp_path)
        assert result.code == 1 and "not a quantized checkpoint" in result.err


def test_as_a_process() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "petit_cli", "inspect", str(MODELOPT / "llama-mxfp4"), "--quick"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "40"},
    )
    assert run.returncode == 0 and run.stderr == ""
    assert "model.layers.{0-1}.mlp.down_proj" in run.stdout  # a narrow terminal does not cut a pipe's lines


def test_a_reader_that_goes_away_is_no_crash() -> None:
    command = f"{sys.executable} -m petit_cli inspect {MODELOPT / 'qwen3-moe-nvfp4'} --json | head -c 1"
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert run.stdout == "{" and "Traceback" not in run.stderr
