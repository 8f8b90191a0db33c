"""`petit` in environments where something is missing or broken: quick where it can be, one sentence where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from build.trees import copy_sources
from cli.runner import MODELOPT

import petit_plugin as pp

MAIN = "import sys; from petit_cli import main\n"


def start(*args: object, before: str = "", path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A fresh process that runs `before` and then the command; `path` is searched for packages first."""
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-c", f"{before}\n{MAIN}main()", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=path or "/", timeout=300)


@pytest.mark.parametrize(
    "args", [("--help",), ("--version",), ("doctor", "--help"), ("quantize", "--help"), ("nosuch",)]
)
def test_the_command_line_itself_needs_no_torch(args: tuple[str, ...]) -> None:
    report = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, 'petit_plugin' in sys.modules))"
    run = start(*args, before=report)
    assert run.stdout.splitlines()[-1] == "False False", run.stdout + run.stderr
    assert run.returncode == (2 if args == ("nosuch",) else 0)


def one_sentence(text: str) -> None:
    assert len(text.strip().splitlines()) == 1 and "Traceback" not in text, text


def _refused(run: subprocess.CompletedProcess[str], *words: str) -> None:
    assert run.returncode == 1, run.stdout + run.stderr
    one_sentence(run.stderr)
    assert all(word in run.stderr for word in words), run.stderr


def _diagnosed(run: subprocess.CompletedProcess[str], line: str, *words: str) -> None:
    """`petit doctor` ends normally, with exit code 1 and one line that says what is wrong."""
    assert run.returncode == 1 and run.stderr == "", run.stdout + run.stderr
    (found,) = (text for text in run.stdout.splitlines() if text.startswith(f"no   {line}"))
    assert all(word in found for word in words), found


NO_TORCH = "import sys; sys.modules['torch'] = None"


def test_without_torch() -> None:
    _diagnosed(start("doctor", before=NO_TORCH), "torch", "torch is not installed", "pip install torch")
    _refused(start("verify", MODELOPT / "llama-mxfp4", before=NO_TORCH), "torch is not installed")
    found = json.loads(start("doctor", "--json", before=NO_TORCH).stdout)
    assert not found["ok"] and not found["torch"]["ok"] and not found["native"]["ok"]


def test_with_a_torch_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    message = "libtorch_cpu.so: cannot open\\nshared object file"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise OSError('{message}')\n")
    words = ("cannot be imported", "cannot open shared object file", "reinstall")
    _diagnosed(start("doctor", path=tmp_path), "torch", *words)
    _refused(start("inspect", MODELOPT / "llama-mxfp4", path=tmp_path), *words)


def test_without_the_native_module(tmp_path: Path) -> None:
    tree = copy_sources(tmp_path / "tree")
    words = ("has no native module for this Python", str(tree), "pip install -e .")
    _diagnosed(start("doctor", path=tree), "native", *words)
    _refused(start("inspect", MODELOPT / "llama-mxfp4", path=tree), *words)


@pytest.mark.parametrize("damage", ["truncated", "empty", "another version"])
def test_with_a_broken_native_module(tmp_path: Path, damage: str) -> None:
    tree = copy_sources(tmp_path / "tree")
    source = Path(pp._native.__file__)
    content = source.read_bytes()
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = b""
    else:
        (tree / "petit_plugin" / "_version.py").write_text('__version__ = "99.0"\n')
    (tree / "petit_plugin" / source.name).write_bytes(content)
    word = "is version 99.0 but its native module is" if damage == "another version" else source.name
    _diagnosed(start("doctor", path=tree), "native", word, "pip install -e .")
    _refused(start("verify", MODELOPT / "llama-mxfp4", path=tree), word, "pip install -e .")
