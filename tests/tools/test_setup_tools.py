"""What `make` asks of a machine, and how it recognises a CPU build of torch."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_system, install_torch = load("check_system"), load("install_torch")


@pytest.mark.parametrize(
    ("requirements", "gpu"),
    [
        (["filelock", "sympy>=1.13.3", 'opt-einsum>=3.3; extra == "opt-einsum"'], False),
        (["filelock", 'nvidia-cublas==13.1.0; platform_system == "Linux"'], True),
        (["filelock", "cuda-bindings==13.0.3"], True),
        (["pytorch-triton-rocm==3.5"], True),
        (['triton>=3; extra == "triton"'], False),
        ([], False),
        (None, False),
    ],
)
def test_a_gpu_build_is_known_by_its_requirements(requirements: list[str] | None, gpu: bool) -> None:
    assert install_torch.is_gpu_build(requirements) is gpu


@pytest.mark.parametrize(
    ("offer", "index"),
    [
        (None, True),  # pip's index has no such release
        ({"version": "2.13.0", "requires_dist": ["nvidia-cublas==13"]}, True),
        ({"version": "2.13.0+cpu", "requires_dist": ["filelock"]}, False),
    ],
)
def test_torch_comes_from_the_cpu_index_unless_pip_offers_a_cpu_build(
    offer: dict[str, object] | None, index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        if "--report" in command:
            if offer is None:
                return subprocess.CompletedProcess(command, 1)
            report = Path(command[command.index("--report") + 1])
            report.write_text(json.dumps({"install": [{"metadata": offer}]}))
        else:
            ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(install_torch, "installed_cpu_build", lambda version: False)
    monkeypatch.setattr(install_torch.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["install_torch.py", "2.13.0", "--cpu-index", "https://cpu.example/whl"])
    assert install_torch.main() == 0
    (command,) = ran
    assert ("https://cpu.example/whl" in command) is index


def test_everything_missing_is_named_with_one_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_system, "find_compiler", lambda: None)
    monkeypatch.setattr(check_system, "has_library", lambda name: False)
    monkeypatch.setattr(check_system.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(check_system, "memory_gib", lambda: 0.5)
    monkeypatch.setattr(sys, "argv", ["check_system.py", "test"])
    assert check_system.main() == 1
    text = capsys.readouterr().err
    assert "0.5 GiB of memory" in text
    assert text.count("apt-get install") == 1 and "g++" in text and "libnuma1" in text


def test_a_port_in_use_is_a_complaint_of_the_demo_only() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert any(f"port {port}" in text and "PORT=N" in text for text in check_system.check("demo", port)[1])
        assert not any("port" in text for text in check_system.check("test", port)[1])
    assert check_system.port_is_free(port)


def test_a_compiler_that_knows_no_cxx20_is_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert check_system.find_compiler() is None
