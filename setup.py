"""Builds the native module with CMake and the GPU code objects, and puts the import packages into one distribution.

Everything static is in pyproject.toml. Environment: PETIT_BUILD_DIR (where CMake works; default build/cmake-<python>),
PETIT_CMAKE_ARGS (extra arguments, e.g. "-DCMAKE_CXX_COMPILER=clang++"), PETIT_BUILD_JOBS (default: all cores),
PETIT_DEVICE_ARCHS (targets to build GPU code for, comma separated; default: all), PETIT_CLANG (the compiler for them),
PETIT_DEVICE_CACHE (where compiled GPU code is kept between builds; default ~/.cache/petit_plugin/device).
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
from build_backend import build_device_code  # noqa: E402

CODE_OBJECTS = Path("backends", "hip", "code_objects")  # in petit_plugin
# The native module contains code of these projects, whose licences ask for their notice in binary distributions.
BUNDLED = ("pybind11",)


def version() -> str:
    text = (ROOT / "petit_plugin" / "_version.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    if found is None:
        raise RuntimeError("petit_plugin/_version.py holds no version")
    return found[1]


def tool(name: str) -> str:
    """The program from this Python's own environment (a build requirement), else from PATH."""
    for directory in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent)):
        if found := shutil.which(name, path=directory):
            return found
    if found := shutil.which(name):
        return found
    raise RuntimeError(f"{name} not found; run: {sys.executable} -m pip install {name}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One build at a time in a build directory: neither CMake nor ninja guards it."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def replace(source: Path, target: Path) -> None:
    """Copy in one step, so that a process which has the old module mapped keeps it intact."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, temporary)
    temporary.replace(target)


def write_licences() -> None:
    """Put the notices of BUNDLED where `license-files` in pyproject.toml finds them."""
    target = ROOT / "build" / "licences"
    target.mkdir(parents=True, exist_ok=True)
    for name in BUNDLED:
        for file in importlib.metadata.files(name) or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                replace(Path(str(file.locate())), target / f"{name}-{file.name}")
                break
        else:
            raise RuntimeError(f"{name} was installed without its licence file, which the wheel must carry")


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()  # CMake gives the module the same file name
        tag = f"cmake-{sys.implementation.cache_tag}"
        build = Path(os.environ.get("PETIT_BUILD_DIR", ROOT / "build" / tag)).resolve()
        cmake = tool("cmake")
        configure = [
            *(cmake, "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            # What an earlier run found may be gone (pip's build environments are temporary) or another Python's.
            *("-U", "Python*", "-U", "_Python*", "-U", "pybind11*"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPETIT_VERSION={version()}",
            *shlex.split(os.environ.get("PETIT_CMAKE_ARGS", "")),
        ]
        jobs = os.environ.get("PETIT_BUILD_JOBS", str(len(os.sched_getaffinity(0))))
        with locked(build):
            for command in (configure, [cmake, "--build", str(build), "--target", "_native", "-j", jobs]):
                print("+", shlex.join(command), flush=True)
                subprocess.run(command, check=True)
            replace(build / target.name, target)
        build_device_code(target.parent / CODE_OBJECTS, int(jobs))

    def copy_extensions_to_source(self) -> None:
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            inplace, built = self._get_inplace_equivalent(build_py, ext)
            replace(Path(built), ROOT / inplace)
            for code in (Path(built).parent / CODE_OBJECTS).glob("*.co"):
                replace(code, ROOT / Path(inplace).parent / CODE_OBJECTS / code.name)


write_licences()
setup(
    ext_modules=[Extension("petit_plugin._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
