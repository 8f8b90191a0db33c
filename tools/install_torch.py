"""Install a CPU build of torch into the running interpreter's environment; never a CUDA build.

Takes what pip is configured to offer when that is a CPU build, else the same version from the index given with
``--cpu-index``. A CUDA build is recognised by its requirements before anything is downloaded into the environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

GPU_REQUIREMENTS = ("nvidia-", "cuda-", "triton", "pytorch-triton", "rocm")


def is_gpu_build(requirements: list[str] | None) -> bool:
    """Whether a torch distribution's Requires-Dist lines name GPU libraries outside of extras."""
    return any(
        line.lower().startswith(GPU_REQUIREMENTS) and "extra ==" not in line.lower() for line in requirements or []
    )


def offered(requirement: str) -> dict[str, Any] | None:
    """Metadata of the distribution that pip would install for ``requirement``, or None when it finds none."""
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        result = subprocess.run([*command, "--report", str(report), requirement], capture_output=True, check=False)
        if result.returncode != 0:
            return None
        found: dict[str, Any] = json.loads(report.read_text())["install"][0]["metadata"]
        return found


def installed_cpu_build(version: str) -> bool:
    try:
        found = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return False
    return found.version.split("+")[0] == version and not is_gpu_build(found.requires)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="torch version, e.g. 2.13.0")
    parser.add_argument("--cpu-index", required=True, help="index that offers CPU builds, used when pip's does not")
    args = parser.parse_args()
    if installed_cpu_build(args.version):
        return 0
    requirement = f"torch=={args.version}"
    found = offered(requirement)
    command = [sys.executable, "-m", "pip", "install", "--quiet", requirement]
    if found is None or is_gpu_build(found.get("requires_dist")):
        why = "pip's index has no such release" if found is None else "pip's index offers a CUDA build"
        print(f"{requirement}: {why}; taking it from {args.cpu_index}")
        command += ["--index-url", args.cpu_index]
    result = subprocess.run(command, check=False)
    if result.returncode != 0:
        print(
            f"Could not install a CPU build of {requirement} for Python {sys.version_info[0]}.{sys.version_info[1]}. "
            "Name an index that has one: make TORCH_CPU_INDEX=URL",
            file=sys.stderr,
        )
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
