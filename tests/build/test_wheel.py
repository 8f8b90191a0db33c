"""Wheels for every supported Python, and an editable install, each in a bare environment without torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from trees import copy_sources, run

pytestmark = pytest.mark.slow

VERSIONS = ["3.10", "3.11", "3.12", "3.13"]

# The native module alone, with buffers from ctypes: packs one block, unpacks it, multiplies by it.
NATIVE = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
assert "torch" not in sys.modules
address = ctypes.addressof
weight = (ctypes.c_uint8 * 16)(*([0x42] * 16))  # 1, 2, 1, 2, ...
scale = (ctypes.c_uint8 * 1)(128)
packed, scales = (ctypes.c_uint8 * 256)(), (ctypes.c_uint8 * 16)()
rows = (ctypes.c_float * 16)(0.5)
source = (1, 1, 32, address(weight), 16, address(scale), 1)
exponent = (ctypes.c_int8 * 16)()
assert native.plan_packing(*source, address(exponent), 2) == (-1, -1, False, False)
native.pack(*source, address(packed), address(scales), 0, 2)
back, back_scale = (ctypes.c_uint8 * 16)(), (ctypes.c_uint8 * 1)()
native.unpack(1, 1, 32, address(packed), address(scales), 0, address(back), address(back_scale), 2)
assert bytes(back) == bytes(weight) and bytes(back_scale) == bytes(scale)
x, y = (ctypes.c_float * 32)(*([1.0] * 32)), (ctypes.c_float * 1)()
native.linear(address(x), 32, 1, 2, 1, 1, 32, address(packed), address(scales), address(rows), 1, 0, False, 0, 2,
              address(y), 2, native.best_isa())
assert y[0] == 48.0, y[0]
print(native.__version__)
"""


def interpreter(version: str) -> str | None:
    """A Python of this version that can build extension modules, or None."""
    candidates = [sys.executable if sysconfig.get_python_version() == version else None]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(p) for p in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    candidates += [shutil.which(f"python{version}")]
    check = (
        "import sys, sysconfig, os, venv, ensurepip; assert sysconfig.get_python_version() == sys.argv[1]; "
        "assert os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'))"
    )
    for candidate in filter(None, candidates):
        try:
            run([candidate, "-c", check, version])
        except (AssertionError, OSError):
            continue
        return candidate
    return None


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked: wheels are built from what it holds and nothing else."""
    clone = copy_sources(tmp_path_factory.mktemp("clone"))
    build = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    name = run([sys.executable, "-c", build], cwd=clone).stdout.split()[-1]
    target = tmp_path_factory.mktemp("sdist")
    shutil.unpack_archive(clone / "dist" / name, target)
    (unpacked,) = target.iterdir()
    return unpacked


def environment(tree: Path, python: str, target: Path) -> tuple[str, dict[str, str]]:
    """A bare virtual environment's Python. All builds share a CMake directory: the kernels do not depend on Python."""
    run([python, "-m", "venv", str(target)])
    return str(target / "bin" / "python"), {**os.environ, "PETIT_BUILD_DIR": str(tree.parent / "cmake")}


@pytest.mark.parametrize("version", VERSIONS)
def test_wheel(tree: Path, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} with Python.h and venv here")
    bare, variables = environment(tree, python, tmp_path / "venv")
    run([bare, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tree)], env=variables)
    (wheel,) = tmp_path.glob("*.whl")
    tag = "cp" + version.replace(".", "")
    assert wheel.name.startswith("petit_plugin-") and f"-{tag}-{tag}-linux_" in wheel.name
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    check_contents(site)
    (native,) = (site / "petit_plugin").glob("_native*.so")
    (metadata,) = site.glob("*.dist-info")
    assert run([bare, "-c", NATIVE, str(native)]).stdout.strip() == metadata.name.split("-")[1].removesuffix(".dist")
    assert "No module named 'torch'" in missing_torch(bare, site)


def missing_torch(python: str, site: Path) -> str:
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\ntry:\n import petit_plugin\nexcept ImportError as e: print(e)"
    )
    return run([python, "-c", code]).stdout


def check_contents(site: Path) -> None:
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    top = {name.split("/")[0] for name in files}
    (info,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"petit_cli", "petit_plugin", "petit_vllm", info}
    assert {"petit_plugin/py.typed", "petit_plugin/_native.pyi", "petit_vllm/__init__.py"} <= files
    unwanted = (".cpp", ".hpp", ".pyc", ".txt.in", ".o")
    assert [name for name in files if name.endswith(unwanted)] == []
    assert [name for name in files if "test" in name.lower() or "emulator" in name or "benchmark" in name] == []
    licences = {Path(name).name: (site / name).read_text() for name in files if "/licenses/" in name}
    assert "Apache License" in licences["LICENSE"]
    # pybind11 is compiled in; its licence wants the notice, the conditions and the disclaimer with the binary.
    notice = licences["pybind11-LICENSE"]
    assert "Wenzel Jakob" in notice and "Redistributions in binary form" in notice and "AS IS" in notice
    entry_points = (site / info / "entry_points.txt").read_text()
    assert "[vllm.general_plugins]\npetit = petit_vllm:register" in entry_points
    assert "petit = petit_cli:main" in entry_points
    metadata = (site / info / "METADATA").read_text()
    assert "Requires-Python: >=3.10" in metadata and "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch>=2.5" in metadata and "Requires-Dist: vllm" not in metadata


def test_editable_install(tree: Path, tmp_path: Path) -> None:
    """`pip install -e .`: both packages import from the tree, from anywhere, and new modules are seen at once."""
    bare, variables = environment(tree, sys.executable, tmp_path / "venv")
    run([bare, "-m", "pip", "install", "-q", "--no-deps", "-e", str(tree)], env=variables)
    (tree / "petit_plugin" / "late.py").write_text("value = 7\n")
    code = (
        "from importlib.util import find_spec\nfrom importlib.metadata import entry_points\n"
        "print(find_spec('petit_plugin').origin)\nprint(find_spec('petit_vllm').origin)\n"
        "print([e.value for e in entry_points(group='vllm.general_plugins')])"
    )
    where, vllm, plugins = run([bare, "-c", code], cwd=tmp_path).stdout.splitlines()
    assert Path(where) == tree / "petit_plugin" / "__init__.py"
    assert Path(vllm) == tree / "integrations" / "vllm" / "petit_vllm" / "__init__.py"
    assert plugins == "['petit_vllm:register']"
    (native,) = (tree / "petit_plugin").glob("_native*.so")
    run([bare, "-c", NATIVE, str(native)])
    # With torch (this environment's), from another directory.
    torch_too = f"import sys; sys.path += {[p for p in sys.path if p.endswith('site-packages')]!r}\n"
    check = torch_too + "import petit_plugin, petit_plugin.late; print(petit_plugin.__file__, petit_plugin.late.value)"
    assert run([bare, "-c", check], cwd=tmp_path).stdout.split() == [where, "7"]
