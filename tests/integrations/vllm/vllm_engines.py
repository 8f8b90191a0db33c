"""Engines in this process, and the Hugging Face model they are compared with.

Nothing here imports vLLM at module level: conftest.py sets its environment first.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
MODELOPT = REPOSITORY / "tests" / "fixtures" / "modelopt"

ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "distributed_executor_backend": "uni",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 128 << 20,
    "max_model_len": 256,
    "enable_prefix_caching": False,
}


class Engine:
    """Stands for an LLM until it is closed: a name a test keeps bound must not keep vLLM's process groups open."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)


@contextlib.contextmanager
def engine(model: str | Path, **options: Any) -> Iterator[Any]:
    """A vLLM engine in this process, taken down completely at the end, also when it could not start."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.freeze()  # vLLM collects garbage often, and what is imported by now (most objects) never is garbage
    handle = None
    try:
        handle = Engine(LLM(str(model), **{**ENGINE, **options}))
        yield handle
    finally:
        if handle is not None:
            del handle.llm
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
