"""The HIP backend on the emulator. Code objects are brought up to date first (cached when sources are unchanged)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import petit_plugin as pp
from petit_plugin.backends.hip import device as hip_device
from petit_plugin.backends.hip import solutions
from petit_plugin.backends.hip.emulation import EmulatedDevice

ROOT = Path(__file__).resolve().parents[3]


def _device_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("petit_device_build", ROOT / "csrc" / "device" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def code_objects() -> Path:
    build = _device_build()
    try:
        for arch in build.ARCHS:
            build.find_compiler(arch)
    except RuntimeError as error:
        pytest.skip(str(error))
    build.build(hip_device.CODE_OBJECTS, jobs=2)
    return hip_device.CODE_OBJECTS


@pytest.fixture(scope="module", params=solutions.ARCHS)
def emulated(request: pytest.FixtureRequest, code_objects: Path) -> Iterator[EmulatedDevice]:
    """Every arch in turn, CPU tensors running on its emulated device."""
    with pp.emulated(request.param) as device:
        yield device


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are allocated full of NaN: an element nobody writes shows."""
    allocate = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = allocate(self, *args, **kwargs)  # type: ignore[arg-type]
        out.untyped_storage().fill_(0xFF)
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
