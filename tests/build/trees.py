"""Copies of the source tree and builds of it, for tests that must not touch the installation under test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Everything a build reads; the list is also a check that a build needs nothing else.
SOURCES = (
    "csrc",
    "petit_cli",
    "petit_plugin",
    "integrations",
    "CMakeLists.txt",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
)
TEXTS = ("README.md", "LICENSE", "CHANGELOG.md")


def copy_sources(target: Path) -> Path:
    """The tree as a clone has it: no compiled module, no caches."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "*.pyc")
    for name in (*SOURCES, *TEXTS):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.exists() or name in SOURCES:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def build_inplace(tree: Path, compiler: str | None = None, *cmake: str) -> subprocess.CompletedProcess[str]:
    """setup.py build_ext --inplace with this Python; afterwards the tree can be imported from."""
    options = [*cmake, *([f"-DCMAKE_CXX_COMPILER={compiler}"] if compiler else [])]
    environment = {
        **os.environ,
        "PETIT_CMAKE_ARGS": " ".join(options),
        "PETIT_BUILD_DIR": str(tree / "build" / "cmake"),
    }
    return run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, env=environment)


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run, with the output in the message when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done  # type: ignore[no-any-return]


def python(code: str, *, tree: Path | None = None, **environment: str) -> str:
    """Standard output of a fresh process that runs `code`, importing from `tree` first."""
    path = {"PYTHONPATH": str(tree)} if tree else {}
    # -P and a neutral directory: only what is installed, or `tree`, can be imported.
    where = tree or Path(sys.prefix)
    flags = [] if sys.version_info < (3, 11) else ["-P"]
    return run([sys.executable, *flags, "-c", code], cwd=where, env={**os.environ, **path, **environment}).stdout
