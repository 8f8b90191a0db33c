"""What the commands print and how they end: results on stdout, everything else on stderr.

Exit codes: 0 fine, 1 the check failed (or the checkpoint is broken), 2 the command line is wrong.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console

from petit_cli.environment import EnvironmentBroken

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UsageError(Exception):
    """The command line asks for something that cannot be done as asked."""


class CheckFailed(Exception):
    """The thing that was to be checked is not right."""


def console() -> Console:
    """stdout. A pipe or a file gets wide lines without colours, so that names are not cut."""
    return Console() if sys.stdout.isatty() else Console(width=200, no_color=True, highlight=False)


def error_console() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False)


def say(text: str) -> None:
    """One line on stderr."""
    error_console().print(text, markup=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end the command wait until the block is left. For steps that belong together."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers in the main thread only
        return
    # Masks would not do: another thread would take the signal, and its handler would still run in this one.
    came: list[int] = []
    previous = {s: signal.getsignal(s) for s in SIGNALS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda signum, frame: came.append(signum))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _refusals() -> tuple[type[Exception], ...]:
    """Errors that are an answer. Those of checkpoints exist once the code that reads them has been loaded."""
    ours = (CheckFailed, EnvironmentBroken)
    errors = sys.modules.get("petit_plugin.checkpoints.errors")
    return ours if errors is None else (*ours, errors.BrokenCheckpointError, errors.UnsupportedCheckpointError)


@contextmanager
def reported() -> Iterator[None]:
    """Turn expected errors into one sentence and an exit code; a signal ends the command cleanly."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    # What is ignored stays ignored (nohup); SIGINT is KeyboardInterrupt already.
    previous = {s: h for s in (signal.SIGTERM, signal.SIGHUP) if (h := signal.getsignal(s)) is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    except UsageError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
    except _refusals() as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        with suppress(OSError):  # after SIGHUP the terminal is gone
            say("interrupted")
        raise typer.Exit(1) from None
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:
        say(f"error: {error.filename or 'file system'}: {error.strerror or error}")
        raise typer.Exit(1) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def size(nbytes: float) -> str:
    """Bytes for people: 1.5 GB (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def collapse(names: list[str], expert_only: bool = False) -> list[tuple[str, list[str]]]:
    """Names that differ only in their numbers, folded: [("model.layers.{0-3}.mlp.up_proj", [names...]), ...].

    expert_only: fold the numbers of experts, but keep layers apart.
    """
    number = re.compile(r"(?<=\.experts\.)\d+|(?<=\[)\d+(?=\])" if expert_only else r"(?<![A-Za-z0-9_])\d+(?=\.|\]|$)")
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(number.sub("{}", name), []).append(name)
    out = []
    for shape, members in groups.items():
        columns = list(zip(*(map(int, number.findall(m)) for m in members), strict=True))
        label = shape
        for column in columns:
            label = label.replace("{}", _ranges(sorted(set(column))), 1)
        out.append((label, members))
    return out


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else "{" + text + "}"
