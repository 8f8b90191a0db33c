"""The environment and fixtures of the vLLM plugin's tests.

They need vLLM's CPU build in the running environment (`make test` makes one).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_models
from vllm_engines import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

# One process, quiet, one thread (a busy machine makes threads wait for each other), no network.
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """checkpoint(arch, **options of tiny_models.build): built once for each set of options."""
    made: dict[Any, Path] = {}

    def build(arch: str = "llama", **options: Any) -> Path:
        key = (arch, *sorted((k, str(v)) for k, v in options.items()))
        if key not in made:
            path = tmp_path_factory.mktemp(arch) / "model"
            made[key] = tiny_models.build(path, arch, **options).path
        return made[key]

    return build


@pytest.fixture
def single_rank() -> Iterator[None]:
    """vLLM's layers can be built on their own: default config, a world of one rank, default dtype bfloat16."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.utils.network_utils import get_open_port

    old = torch.get_default_dtype()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(old)
            cleanup_dist_env_and_memory()
