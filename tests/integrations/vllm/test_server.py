"""`vllm serve --quantization petit` over HTTP, as users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_models
from vllm_engines import REPOSITORY, hugging_face_logits
from vllm_server import ServerError, VllmServer, free_port, port_is_free

pytestmark = [pytest.mark.slow, pytest.mark.server]

TEXTS = ("The capital of France is", "Water boils at", "Once upon a time there was")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_real_model_over_http(tmp_path: Path) -> None:
    """SmolLM2-135M in float32: the tokens that come over HTTP are transformers' own."""
    import smollm2
    from transformers import AutoTokenizer

    model = smollm2.fp4_checkpoint("nvfp4")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    port, log = free_port(), tmp_path / "server.log"
    flags = ("--quantization", "petit", "--dtype", "float32", "--served-model-name", "smol")
    # As a user has it: logging on, the engine in a process of its own, threads left to vLLM.
    env = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with VllmServer(model, port, log, flags, env) as server:
        tokens = []
        for prompt in prompts:
            body = {"model": "smol", "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            answer = post(f"{server.url}/completions", body | {"return_token_ids": True})
            tokens.append(answer["choices"][0]["token_ids"])
        chat = {"model": "smol", "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
        text = post(f"{server.url}/chat/completions", chat | {"temperature": 0, "max_tokens": 32})
        assert "Tokyo" in text["choices"][0]["message"]["content"]
    assert port_is_free(port)
    lines = log.read_text()
    assert "petit: 120 FP4 layers (120 nvfp4), 1 in 16 bit" in lines
    assert "quantization=petit" in lines
    reference = tiny_models.write_reference(model, tmp_path / "reference")
    for chosen, logits in zip(tokens, hugging_face_logits(reference, prompts, tokens), strict=True):
        assert len(chosen) == 32
        assert logits.argmax(dim=-1).tolist() == chosen


def test_a_broken_checkpoint_shows_its_error(checkpoint: Any, tmp_path: Path) -> None:
    """The failing server's log reaches the user, and nothing is left running."""
    port = free_port()
    flags = ("--quantization", "petit_mxfp4", "--max-model-len", "256")
    with (
        pytest.raises(ServerError, match="petit_mxfp4 was asked for, but the checkpoint holds nvfp4"),
        VllmServer(checkpoint(fmt="nvfp4"), port, tmp_path / "log", flags),
    ):
        pass
    assert port_is_free(port)


def test_a_taken_port_is_said_at_once(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(ServerError, match=f"port {port} is in use"), VllmServer(tmp_path, port, tmp_path / "log"):
            pass
        assert time.monotonic() - started < 2


def test_server_dies_with_the_program(tmp_path: Path) -> None:
    """SIGTERM to the program that started it: no process of the group survives."""
    # Stands in for `vllm serve`: ignores polite signals, has a child that ignores them too, never answers.
    fake = tmp_path / "vllm"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import signal, subprocess, sys, time\n"
        "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    fake.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; import vllm_server\n"
        "vllm_server.PATIENCE = ((vllm_server.signal.SIGINT, 0.2), (vllm_server.signal.SIGKILL, 5.0))\n"
        f"server = vllm_server.VllmServer(Path('m'), {free_port()}, Path({str(tmp_path / 'log')!r}))\n"
        f"server.command[0] = {str(fake)!r}\n"
        "with server: pass\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "examples")}
    process = subprocess.Popen([sys.executable, "-c", program], env=env)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    child = int((tmp_path / "pids").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the server's child survived"
        time.sleep(0.1)
