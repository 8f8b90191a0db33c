"""Serve a real FP4 model on this machine's CPU and ask it three questions.

    python examples/demo.py [--port 8000] [--format nvfp4]

SmolLM2-135M is converted, quantised with `petit quantize`, served by `vllm serve --quantization petit` and asked
through the OpenAI API. Everything is kept in `.demo/`, so that a second run starts with the server.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import smollm2
from vllm_server import ServerError, VllmServer

QUESTIONS = (
    "What is the capital of Japan?",
    "What is gravity? Answer in one sentence.",
    "What is photosynthesis? Answer in one sentence.",
)
NAME = "smollm2-135m-fp4"


def timed(what: str, step: Callable[[], Path]) -> Path:
    """Run one preparation step and say how long it took."""
    started = time.monotonic()
    result = step()
    print(f"[{time.monotonic() - started:6.1f} s] {what}: {result}", flush=True)
    return result


def ask(url: str, question: str, max_tokens: int = 64, full_length: bool = False) -> tuple[str, list[float]]:
    """One chat completion, streamed: the answer and the seconds between its pieces.

    full_length: go on to `max_tokens` whatever the model says.
    """
    import httpx
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", http_client=httpx.Client(trust_env=False, timeout=120))
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": full_length},
    )
    pieces, times = [], []
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
            times.append(time.monotonic())
    return "".join(pieces).strip(), [later - earlier for earlier, later in itertools.pairwise(times)]


def summary_line(log: Path) -> str | None:
    """The line in which petit says what it loaded."""
    found = re.findall(r"petit: (\d+ FP4 layers.*)", log.read_text(errors="replace"))
    return found[-1] if found else None


def main() -> int:
    """Exit code 0 when the model was served and every question got an answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--format", choices=("nvfp4", "mxfp4"), default="nvfp4")
    args = parser.parse_args()

    log = smollm2.DIRECTORY / "server.log"
    try:
        timed("model", smollm2.gguf_file)
        bf16 = timed("as a BF16 checkpoint", smollm2.bf16_checkpoint)
        fp4 = timed(f"petit quantize --format {args.format}", lambda: smollm2.fp4_checkpoint(args.format))
        flags = ("--quantization", "petit", "--served-model-name", NAME)
        print(f"starting vllm serve {fp4} {' '.join(flags)} --enforce-eager (log: {log})", flush=True)
        with VllmServer(fp4, args.port, log, flags) as server:
            print(f"[{server.seconds_to_ready:6.1f} s] ready at {server.url}", flush=True)
            ask(server.url, "Hello!", max_tokens=8)  # the first request warms caches up
            for question in QUESTIONS:
                answer, _ = ask(server.url, question)
                print(f"\nQ: {question}\nA: {answer}", flush=True)
                if not answer:
                    raise ServerError(f"the server gave no answer\n{server.tail()}")
            _, gaps = ask(server.url, "Tell me a long story.", max_tokens=128, full_length=True)
            loaded = summary_line(log)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if loaded is None:
        print(f"demo: the server did not load the model through petit, see {log}", file=sys.stderr)
        return 1
    sizes = [smollm2.weight_bytes(checkpoint) / 1e6 for checkpoint in (fp4, bf16)]
    print(f"\n{1e3 * statistics.median(gaps):.1f} ms per token (median of {len(gaps)}, batch 1)")
    print(
        f"all weights: {sizes[0]:.1f} MB, {sizes[1]:.1f} MB in BF16 ({sizes[1] / sizes[0]:.2f}x; embeddings stay BF16)"
    )
    print(f"petit: {loaded}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
