"""Replacing OUT: signals and errors between its renames leave a complete checkpoint under its name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cli.runner import listing

from petit_cli import output
from petit_cli.output import CheckFailed
from petit_plugin.cli import quantize

FILES = ("config.json", "model.safetensors")


def _fill(directory: Path, text: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in FILES:
        (directory / name).write_text(text)


def _content(directory: Path) -> str:
    assert listing(directory) == sorted(FILES)
    found = {(directory / name).read_text() for name in FILES}
    assert len(found) == 1, "a mixture of two checkpoints"
    return found.pop()


@pytest.fixture(autouse=True)
def _python_sigint() -> Iterator[None]:
    """A run in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _replace(tmp_path: Path) -> None:
    with quantize.atomic_directory(tmp_path / "out", force=True) as temporary:
        _fill(temporary, "new")


@pytest.mark.parametrize("number", output.SIGNALS)
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_signals_between_the_renames(
    number: signal.Signals, step: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path / "out", "old")
    rename, calls = os.rename, 0

    def signalled(*args: str) -> None:
        nonlocal calls
        calls += 1
        if calls == step and when == "before":
            signal.raise_signal(number)
        rename(*args)
        if calls == step and when == "after":
            signal.raise_signal(number)

    monkeypatch.setattr(os, "rename", signalled)

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {s: signal.signal(s, stop) for s in output.SIGNALS}
    try:
        with pytest.raises(KeyboardInterrupt):
            _replace(tmp_path)
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
    assert _content(tmp_path / "out") == "new"  # the step was finished first
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_exceptions_from_the_renames(
    error: BaseException, step: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path / "out", "old")
    rename, calls = os.rename, 0

    def failing(*args: str) -> None:
        nonlocal calls
        calls += 1
        if calls == step and when == "before":
            raise error
        rename(*args)
        if calls == step and when == "after":
            raise error

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(BaseException) as caught:
        _replace(tmp_path)
    assert caught.type is (error if isinstance(error, type) else type(error))
    assert _content(tmp_path / "out") == ("new" if (step, when) == (2, "after") else "old")
    assert listing(tmp_path) == ["out"]


def test_an_old_checkpoint_that_cannot_be_put_back_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path / "out", "old")
    rename, calls = os.rename, 0

    def failing(*args: str) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise PermissionError(13, "Permission denied")
        rename(*args)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckFailed, match="could not be put back") as caught:
        _replace(tmp_path)
    (aside,) = tmp_path.iterdir()
    assert _content(aside / "out") == "old" and str(aside / "out") in str(caught.value)


def test_a_held_signal_comes_when_the_block_ends() -> None:
    reached = False
    with suppress(KeyboardInterrupt), output.signals_held():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
