"""Say what this machine lacks to build, test or demonstrate petit_plugin, and the one command that installs it.

Standard library only: it runs before any virtual environment exists. Exit code 0: nothing missing, 1: something is.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

# what is missing -> package name for each package manager
PACKAGES = {
    "venv": {"apt-get": "python3-venv", "dnf": "python3", "zypper": "python3-venv", "pacman": "python"},
    "headers": {"apt-get": "python3-dev", "dnf": "python3-devel", "zypper": "python3-devel", "pacman": "python"},
    "compiler": {"apt-get": "g++", "dnf": "gcc-c++", "zypper": "gcc-c++", "pacman": "gcc"},
    "numa": {"apt-get": "libnuma1", "dnf": "numactl-libs", "zypper": "libnuma1", "pacman": "numactl"},
}
INSTALL = {
    "apt-get": "sudo apt-get update && sudo apt-get install -y",
    "dnf": "sudo dnf install -y",
    "zypper": "sudo zypper install -y",
    "pacman": "sudo pacman -S --needed",
}
MIN_MEMORY_GIB = {"build": 4.0, "test": 8.0, "demo": 6.0}
MIN_DISK_GIB = {"build": 3.0, "test": 10.0, "demo": 8.0}
CXX20_PROBE = "#include <bit>\n#include <span>\nint main() { return std::popcount(0u); }\n"


def find_compiler() -> str | None:
    """The first of $CXX, c++, g++ and clang++ that compiles a C++20 file, or None."""
    for name in [os.environ.get("CXX"), "c++", "g++", "clang++"]:
        path = shutil.which(name) if name else None
        if path is None:
            continue
        with tempfile.TemporaryDirectory() as tmp:
            source = Path(tmp) / "probe.cpp"
            source.write_text(CXX20_PROBE)
            command = [path, "-std=c++20", "-c", str(source), "-o", str(source.with_suffix(".o"))]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return path
    return None


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def memory_gib() -> float:
    """Memory that a new process may use: MemAvailable, or a container's lower limit (GiB)."""
    available = 0.0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) / 2**20
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        available = min(available, int(limit.read_text()) / 2**30)
    return available


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check(purpose: str, port: int) -> tuple[list[str], list[str]]:
    """Return (keys of PACKAGES to install, other complaints) for ``purpose`` "build", "test" or "demo"."""
    packages: list[str] = []
    complaints: list[str] = []
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        complaints.append(f"{sys.platform} on {os.uname().machine}: petit_plugin needs Linux on x86-64")
    oldest = (3, 10) if purpose == "build" else (3, 11)
    if not oldest <= sys.version_info[:2] <= (3, 13):
        found = ".".join(map(str, sys.version_info[:2]))
        complaints.append(
            f"{sys.executable} is Python {found}; this step needs {oldest[0]}.{oldest[1]} to 3.13: "
            "run make with PYTHON=python3.11 (or another in that range)"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        packages.append("venv")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        packages.append("headers")
    if find_compiler() is None:
        packages.append("compiler")
    if purpose != "build" and not has_library("libnuma.so.1"):
        packages.append("numa")
    if memory_gib() < MIN_MEMORY_GIB[purpose]:
        complaints.append(
            f"{memory_gib():.1f} GiB of memory is available and this step needs {MIN_MEMORY_GIB[purpose]:.0f}: "
            "close other programs or use a larger machine"
        )
    free = shutil.disk_usage(".").free / 2**30
    if free < MIN_DISK_GIB[purpose]:
        complaints.append(
            f"{free:.1f} GiB of disk is free in {Path.cwd()} and this step needs {MIN_DISK_GIB[purpose]:.0f}: free some"
        )
    if purpose == "demo" and not port_is_free(port):
        complaints.append(f"port {port} is in use: run `make demo PORT=N` with a free one")
    return packages, complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("purpose", choices=sorted(MIN_DISK_GIB), nargs="?", default="build")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    packages, complaints = check(args.purpose, args.port)
    for text in complaints:
        print(f"missing: {text}", file=sys.stderr)
    if packages:
        manager = next((m for m in INSTALL if shutil.which(m)), "apt-get")
        names = " ".join(PACKAGES[p][manager] for p in packages)
        print(f"missing: {', '.join(packages)}. Install with:\n  {INSTALL[manager]} {names}", file=sys.stderr)
    return 1 if packages or complaints else 0


if __name__ == "__main__":
    sys.exit(main())
