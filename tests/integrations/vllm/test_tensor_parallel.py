"""Two ranks: every layer cut in two, and experts divided between the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_models
from vllm_engines import hugging_face_logits

# vLLM starts its workers with spawn, so this is a program with a main guard.
PROGRAM = """
import json, sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    model, prompts, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(
        model, tensor_parallel_size=2, enforce_eager=True, dtype="float32", gpu_memory_utilization=0.1,
        max_model_len=256, **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    print(json.dumps({
        "config": type(llm.llm_engine.vllm_config.quant_config).__name__,
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
    }))
"""


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize(
    ("fmt", "options"),
    [("nvfp4", {}), ("mxfp4", {"enable_expert_parallel": True})],
    ids=["tensor-parallel", "expert-parallel"],
)
def test_two_ranks(checkpoint: Any, tmp_path: Path, fmt: str, options: dict[str, Any]) -> None:
    """Greedy tokens equal transformers' (one process there, so sums are taken in another order)."""
    model = checkpoint("qwen3_moe", fmt=fmt, dialect="nested")
    prompts = tiny_models.prompts()
    program = tmp_path / "two_ranks.py"
    program.write_text(PROGRAM)
    # "nobind": vLLM would otherwise ask for one NUMA node a rank.
    env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(program), str(model), json.dumps(prompts), json.dumps(options)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    seen = json.loads(next(line for line in reversed(result.stdout.splitlines()) if line.startswith("{")))
    assert seen["config"] == "PetitConfig"
    reference = tiny_models.write_reference(model, tmp_path / "reference")
    for chosen, logits in zip(seen["tokens"], hugging_face_logits(reference, prompts, seen["tokens"]), strict=True):
        assert logits.argmax(dim=-1).tolist() == chosen
