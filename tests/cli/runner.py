"""Running `petit` in this process, and small 16-bit models for it to quantize."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from fixtures import tiny_models
from safetensors.torch import save_file
from typer.testing import CliRunner

from petit_cli.app import app

MODELOPT = Path(__file__).parents[1] / "fixtures" / "modelopt"
FIXTURES = sorted(p.name for p in MODELOPT.iterdir() if p.is_dir())
EXPORTS = Path(__file__).parents[1] / "checkpoints" / "exports"  # of other tools
OTHERS = sorted(p.name for p in EXPORTS.iterdir() if p.is_dir())


@dataclass
class Result:
    code: int
    out: str
    err: str


def petit(*args: object) -> Result:
    """Exit code, stdout and stderr of one command. An exception that the command does not handle is raised."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def write_model(
    path: Path, arch: str = "llama", shards: int = 1, tied: bool = False, **sizes: int
) -> dict[str, torch.Tensor]:
    """A BF16 checkpoint with tokenizer; returns its tensors."""
    shape = tiny_models.shape(arch, **sizes)
    tensors = tiny_models.random_weights(shape)
    config = tiny_models.model_config(shape)
    if tied:
        del tensors["lm_head.weight"]
        config["tie_word_embeddings"] = True
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    write_tensors(path, tensors, shards)
    tiny_models.write_tokenizer(path, shape.vocab)
    return tensors


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """The tensors in one file, or dealt out over several (so that q, k and v of a layer are in different files)."""
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return
    files = {n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def listing(path: Path) -> list[str]:
    """Everything in `path`, hidden files included: nothing half-written may be left."""
    return sorted(p.name for p in path.iterdir())
