"""The build backend: setuptools', which also asks for a device compiler when this machine has none.

`ziglang` (100 MB to download) contains a clang that knows every target. It is required only where csrc/device/build.py
finds no other compiler for one of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

ZIGLANG = "ziglang==0.17.1"  # clang 22


def device_build() -> ModuleType:
    """csrc/device/build.py, which is a script and no part of a package."""
    spec = importlib.util.spec_from_file_location("petit_device_build", Path(__file__).parent / "device" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def device_archs(build: ModuleType) -> tuple[str, ...]:
    """The targets to build: PETIT_DEVICE_ARCHS, comma separated ("" for none), else all. ValueError if unknown."""
    chosen = os.environ.get("PETIT_DEVICE_ARCHS")
    if chosen is None:
        return tuple(build.ARCHS)
    archs = tuple(name for name in chosen.split(",") if name)
    unknown = [name for name in archs if name not in build.ARCHS]
    if unknown:
        raise ValueError(f"PETIT_DEVICE_ARCHS={chosen}: {unknown[0]} is none of {', '.join(build.ARCHS)}")
    return archs


def device_requirements() -> list[str]:
    build = device_build()
    for arch in device_archs(build):
        try:
            build.find_compiler(arch)
        except RuntimeError:
            return [ZIGLANG]
    return []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *device_requirements()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *device_requirements()]


def build_device_code(out: Path, jobs: int) -> None:
    """GPU code objects into `out`: those this machine has a compiler for, with one line for each target it has not.

    Without them the package still serves on CPUs. A compiler that is found but fails ends the build.
    """
    build = device_build()
    archs = []
    for arch in device_archs(build):
        try:
            build.find_compiler(arch)
            archs.append(arch)
        except RuntimeError as error:
            if "PETIT_CLANG" in os.environ:
                raise
            print(f"petit: this build has no GPU kernels for {arch}: {error}", flush=True)
    if archs:
        build.build(out, tuple(archs), jobs)


if __name__ == "__main__":  # what `make setup` installs before it builds without isolation
    print(*device_requirements())
