"""The MODEL argument: a directory, or the name of a model that is already in the local Hugging Face cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from petit_cli.output import UsageError


def _hub_cache() -> Path:
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _cached(model: str) -> Path | None:
    repository = _hub_cache() / ("models--" + model.replace("/", "--"))
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def resolve(model: str) -> Path:
    """The checkpoint directory that `model` means. Raises UsageError with the remedy."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise UsageError(f"{path}: no permission to read this directory")
        return path
    if path.exists():
        raise UsageError(f"{path} is a file: give the directory of a checkpoint (config.json and *.safetensors)")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        snapshot = _cached(model)
        if snapshot is not None:
            return snapshot
        raise UsageError(
            f"{model}: no such directory, and not in the Hugging Face cache {_hub_cache()}: "
            f"download it first with `hf download {model}`"
        )
    raise UsageError(f"{model}: no such directory")
