"""Registration: every vLLM process does it, so it must be harmless, repeatable and loud when it cannot work."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import petit_vllm
import pytest
from petit_vllm import compat, modelopt_json

# Runs as a program of its own and as a spawned worker inside it; prints what it sees.
PROBE = """
import json, multiprocessing, os, sys


def probe(_=0):
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    threads = len(os.listdir("/proc/self/task"))
    import torch
    from vllm.model_executor.layers import quantization as q
    found = {}
    if "petit_vllm" in sys.modules:
        import petit_vllm
        methods = [m for m in q.QUANTIZATION_METHODS if m.startswith("petit")]
        before = list(q.QUANTIZATION_METHODS)
        petit_vllm.register()
        assert q.QUANTIZATION_METHODS == before
        found = {m: q.get_quantization_config(m).__name__ for m in methods}
    return {"found": found, "cuda": torch.cuda.is_initialized(), "threads": threads}


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        worker = pool.map(probe, [0])[0]
    main = probe()
    from vllm.engine.arg_utils import EngineArgs
    config = EngineArgs(sys.argv[1], quantization="petit", dtype="bfloat16").create_engine_config()
    print(json.dumps({"worker": worker, "main": main, "config": type(config.quant_config).__name__}))
"""


def run_probe(model: Path, tmp_path: Path, **env: str) -> dict[str, Any]:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    result = subprocess.run(
        [sys.executable, str(script), str(model)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_entry_point() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "petit"]
    assert entry.load() is petit_vllm.register


@pytest.mark.slow
def test_registered_in_main_process_and_spawned_worker(checkpoint: Any, tmp_path: Path) -> None:
    seen = run_probe(checkpoint(), tmp_path)
    classes = {"petit": "PetitConfig", "petit_nvfp4": "PetitNvfp4Config", "petit_mxfp4": "PetitMxfp4Config"}
    for process in ("worker", "main"):
        assert seen[process]["found"] == classes
        assert not seen[process]["cuda"], "no device may be touched"
    assert seen["config"] == "PetitConfig"


@pytest.mark.slow
def test_without_the_plugin_vllm_takes_its_own_method(checkpoint: Any, tmp_path: Path) -> None:
    """Why everything else here asserts the class: vLLM does not complain that `petit` does not exist."""
    seen = run_probe(checkpoint(), tmp_path, VLLM_PLUGINS="none_such")
    assert seen["main"]["found"] == {}
    assert seen["config"] == "ModelOptNvFp4Config"


def test_again_is_harmless() -> None:
    petit_vllm.register()
    from vllm.model_executor.layers import quantization
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase as Convertor

    methods, wrapped = list(quantization.QUANTIZATION_METHODS), Convertor._normalize_quantization_config
    handlers = list(logging.getLogger("petit_plugin").handlers)
    petit_vllm.register()
    assert methods == quantization.QUANTIZATION_METHODS
    assert {m for m in methods if m.startswith("petit")} == set(petit_vllm.METHODS)
    assert Convertor._normalize_quantization_config is wrapped
    assert logging.getLogger("petit_plugin").handlers == handlers


def test_registration_starts_no_thread_and_no_parallel_region() -> None:
    """Threads started in register() would not survive the fork of a worker."""
    program = (
        "import os, torch, vllm.config, vllm.model_executor.layers.quantization; "
        "before = len(os.listdir('/proc/self/task')); "
        "import petit_vllm; petit_vllm.register(); "
        "assert len(os.listdir('/proc/self/task')) == before; assert not torch.cuda.is_initialized()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_missing_interface_is_an_error_not_a_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM swallows what a plugin raises while it is imported, but not what register() raises."""

    def broken() -> None:
        raise ImportError("cannot import name 'X' from 'vllm.y'", name="vllm.y")

    monkeypatch.setattr(modelopt_json, "accept_more_algorithms", broken)
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.40.1")
    with pytest.raises(RuntimeError, match=r"written for vLLM 0\.32 to 0\.33; this is vLLM 0\.40\.1.*VLLM_PLUGINS"):
        petit_vllm.register()


@pytest.mark.parametrize(
    ("version", "fine"),
    [("0.32.0", True), ("0.32.0+cpu", True), ("0.33.1", True), ("0.31.9", False), ("0.34.0", False), ("dev", False)],
)
def test_versions(version: str, fine: bool) -> None:
    assert (compat.version_problem(version) is None) == fine


def test_log_lines_come_out_with_vllms(caplog: pytest.LogCaptureFixture) -> None:
    petit_vllm.register()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    theirs = logging.getLogger("vllm")
    theirs.addHandler(handler)
    old = theirs.level
    try:
        theirs.setLevel(logging.INFO)
        logging.getLogger("petit_plugin.vllm").info("seen")
        theirs.setLevel(logging.ERROR)
        logging.getLogger("petit_plugin.vllm").info("not seen")
    finally:
        theirs.setLevel(old)
        theirs.removeHandler(handler)
    assert [record.getMessage() for record in records] == ["seen"]
