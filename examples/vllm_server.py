"""Start `vllm serve` on this machine's CPU, wait until it answers, and always stop it again."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

LOG_TAIL = 40

# Local files only, no usage statistics, a KV cache of 1 GiB. `--gpu-memory-utilization` is, on the CPU, the share of
# RAM that must be free at start; the default of 0.92 refuses most machines.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
FLAGS = ("--enforce-eager", "--gpu-memory-utilization", "0.1", "--max-model-len", "2048", "--max-num-seqs", "4")


class ServerError(RuntimeError):
    """The server could not be started; the text ends with the last lines of its log."""


def port_is_free(port: int) -> bool:
    """Whether nothing listens on localhost:`port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """`with VllmServer(model, port, log, flags) as server: ...`; `server.url` is the base of the OpenAI API.

    The process group is killed when the block ends, when this process gets SIGTERM or SIGINT, and when starting fails.
    """

    def __init__(
        self,
        model: Path,
        port: int,
        log: Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 420.0,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.log = log
        self.timeout = timeout
        self.seconds_to_ready = 0.0
        self._port = port
        vllm = Path(sys.executable).with_name("vllm")
        where = ("--host", "127.0.0.1", "--port", str(port))
        self.command = [str(vllm), "serve", str(model), *where, *FLAGS, *flags]
        self._env = {**os.environ, **ENVIRONMENT, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._old_handler: signal.Handlers | int | object | None = None

    def __enter__(self) -> VllmServer:
        if not port_is_free(self._port):
            raise ServerError(f"port {self._port} is in use; choose another one, e.g. PORT={self._port + 1}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with self.log.open("wb") as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )
        self._old_handler = signal.signal(signal.SIGTERM, _raise_exit)
        try:
            self._wait(started)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait(self, started: float) -> None:
        assert self._process is not None
        health = f"http://127.0.0.1:{self._port}/health"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"vllm serve ended with exit code {code}\n{self.tail()}")
            self.seconds_to_ready = time.monotonic() - started
            if self.seconds_to_ready > self.timeout:
                raise ServerError(f"vllm serve was not ready after {self.timeout:.0f} s\n{self.tail()}")
            try:
                with opener.open(health, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def tail(self) -> str:
        """The last lines of the server's log, and where the rest is."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        return "\n".join(["--- last lines of the server log", *lines, f"--- all of it: {self.log}"])

    def stop(self) -> None:
        """Interrupt the server, then kill whatever is left of its process group."""
        if isinstance(self._old_handler, (int, signal.Handlers)) or callable(self._old_handler):
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None
        process, self._process = self._process, None
        if process is None:
            return
        # SIGKILL last, also after a clean exit: workers may outlive their parent.
        for number, patience in ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience if process.returncode is None else 0)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
