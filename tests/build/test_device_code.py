"""GPU code objects as part of an installation: which compiler, what happens without one, what is asked for."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("gfx90a", "gfx942", "gfx950")
MACHINE = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}  # EF_AMDGPU_MACH_AMDGCN_*


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "csrc"))
    sys.modules.pop("build_backend", None)
    yield importlib.import_module("build_backend")
    sys.modules.pop("build_backend", None)


@pytest.fixture
def no_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with neither clang nor ROCm nor ziglang."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.delenv("PETIT_CLANG", raising=False)
    monkeypatch.delenv("PETIT_DEVICE_ARCHS", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ziglang" else find(name, *a))


def machine_of(code_object: Path) -> int:
    """The architecture in an AMDGPU ELF's flags."""
    header = code_object.read_bytes()[:64]
    assert header[:4] == b"\x7fELF" and struct.unpack_from("<H", header, 18)[0] == 224
    return int(struct.unpack_from("<I", header, 48)[0]) & 0xFF


@pytest.mark.usefixtures("no_compilers")
def test_without_a_compiler_the_build_goes_on_and_says_so(
    backend: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.build_device_code(tmp_path / "out", 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and not list(tmp_path.glob("out/*"))
    for arch, line in zip(ARCHS, lines, strict=True):
        assert line.startswith(
            f"petit: this build has no GPU kernels for {arch}: no compiler for {arch}: install clang"
        )
    assert backend.device_requirements() == [backend.ZIGLANG]
    assert backend.ZIGLANG in backend.get_requires_for_build_wheel()
    assert backend.ZIGLANG in backend.get_requires_for_build_editable()


@pytest.mark.usefixtures("no_compilers")
def test_targets_can_be_chosen(backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = backend.device_build()
    assert backend.device_archs(build) == ARCHS
    monkeypatch.setenv("PETIT_DEVICE_ARCHS", "gfx950,gfx90a")
    assert backend.device_archs(build) == ("gfx950", "gfx90a")
    monkeypatch.setenv("PETIT_DEVICE_ARCHS", "")
    assert backend.device_requirements() == []
    monkeypatch.setenv("PETIT_DEVICE_ARCHS", "gfx1100")
    with pytest.raises(ValueError, match="gfx1100 is none of gfx90a, gfx942, gfx950"):
        backend.build_device_code(tmp_path, 1)


@pytest.mark.usefixtures("no_compilers")
def test_a_chosen_compiler_that_does_not_run_is_an_error(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIT_CLANG", str(tmp_path / "clang"))
    with pytest.raises(RuntimeError, match=r"PETIT_CLANG=.*does not run"):
        backend.build_device_code(tmp_path, 1)


def test_this_machines_compiler_is_enough(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PETIT_DEVICE_ARCHS", raising=False)
    build = backend.device_build()
    found = [c for c, _ in build.candidates() if build._version(c)]
    assert (backend.device_requirements() == []) == bool(found)


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the ziglang package is not installed")
def test_ziglang_compiles_every_target(backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole kernel file for one target, a small kernel for the others."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.delenv("PETIT_CLANG", raising=False)
    build = backend.device_build()
    source = tmp_path / "small.hip"
    source.write_text("__attribute__((global)) void small(int* p) { *p = 1; }\n")
    for arch in ARCHS:
        compiler = build.find_compiler(arch)
        assert compiler.zig
        compiler.compile(arch, build.SOURCE / "kernels.hip" if arch == "gfx942" else source, tmp_path / f"{arch}.co")
        assert machine_of(tmp_path / f"{arch}.co") == MACHINE[arch]
