"""Engines in this process, and the Hugging Face model they are compared with.

Needs vLLM's CPU build in the running environment (`make test` makes one). The environment variables below must be set
before vLLM is imported, so nothing here imports it at module level.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_models

REPOSITORY = Path(__file__).resolve().parents[3]
MODELOPT = REPOSITORY / "tests" / "fixtures" / "modelopt"
sys.path.insert(0, str(REPOSITORY / "examples"))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

# One process, quiet, one thread (a busy machine makes threads wait for each other), a KV cache of 1 GiB, no network.
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)

ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "distributed_executor_backend": "uni",
    "gpu_memory_utilization": 0.1,
    "max_model_len": 256,
    "enable_prefix_caching": False,
}


@contextlib.contextmanager
def engine(model: str | Path, **options: Any) -> Iterator[Any]:
    """A vLLM engine in this process, taken down completely at the end, also when it could not start."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(str(model), **{**ENGINE, **options})
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def engine_config(model: str | Path, **options: Any) -> Any:
    """The VllmConfig that vLLM would start an engine with."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(model), **{**ENGINE, **options}).create_engine_config()


def greedy(llm: Any, prompts: Sequence[Sequence[int]], steps: int = 32) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens of each prompt, one prompt at a time, and the logits [steps, vocab] that chose them."""
    import torch
    from vllm import SamplingParams

    rows: list[torch.Tensor] = []

    def record(model: Any) -> None:
        original = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = original(*args, **kwargs)
            rows.append(logits.float().clone())
            return logits

        model.compute_logits = compute_logits

    llm.apply_model(record)
    tokens, logits = [], []
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
    for prompt in prompts:
        rows.clear()
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
        logits.append(torch.cat(rows))
    return tokens, logits


def hugging_face_logits(
    reference: Path, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[Any]:
    """float32 logits of transformers for every position that chose one of `tokens`: [steps, vocab] for each prompt.

    One forward over prompt + tokens: tokens are transformers' own greedy ones exactly if every row's best logit is the
    token that follows.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, attn_implementation="eager").eval()
    out = []
    with torch.inference_mode():
        for prompt, chosen in zip(prompts, tokens, strict=True):
            ids = torch.tensor([[*prompt, *chosen[:-1]]])
            out.append(model(input_ids=ids).logits[0, len(prompt) - 1 :].float())
    return out


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
