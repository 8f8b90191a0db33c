"""petit_plugin and torch, with one sentence for each way they can be missing or broken."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path


class EnvironmentBroken(Exception):
    """Something that every FP4 layer needs cannot be loaded. The message is one sentence with the remedy."""


def package() -> Path | None:
    """The directory of petit_plugin, which is not imported; None if there is none."""
    spec = importlib.util.find_spec("petit_plugin")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def version() -> str:
    """petit_plugin's, from its source: neither an import, which needs torch, nor an old installation's metadata."""
    where = package()
    found = where and re.search(r'__version__ = "([^"]+)"', (where / "_version.py").read_text())
    return found[1] if found else "unknown"


def load_torch() -> None:
    """Import torch. EnvironmentBroken says whether it is missing or what is wrong with it."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentBroken(
            "torch is not installed in this Python; run `pip install torch` (any version from 2.5 on, CPU or ROCm)"
        )
    try:
        import torch  # noqa: F401
    except Exception as error:  # whatever its own libraries raise
        try:
            installed = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            installed = "of unknown version"
        raise EnvironmentBroken(f"torch {installed} cannot be imported ({_sentence(error)}); reinstall it") from error


def load() -> None:
    """Import torch and petit_plugin with its native module, or EnvironmentBroken."""
    load_torch()
    try:
        import petit_plugin  # noqa: F401
    except ImportError as error:
        text = _sentence(error)
        if "pip install" not in text:  # an ImportError of the dynamic loader, or of a dependency
            text += "; run `pip install -e .` in the source tree, or `pip install .` and start Python outside it"
        raise EnvironmentBroken(text) from error


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).removesuffix(".") or type(error).__name__
