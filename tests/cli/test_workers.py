"""Workers: whatever ends `map`, no task is still running afterwards."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from petit_plugin.cli.workers import Stopped, Workers


def test_results_keep_their_order() -> None:
    with ThreadPoolExecutor(3) as executor:
        assert list(Workers(executor, ahead=2).map(lambda i: i * i, range(20))) == [i * i for i in range(20)]


@pytest.mark.parametrize("items", [1, 5])  # fewer and more than are submitted ahead
def test_an_interrupt_waits_for_the_task_it_was_waiting_for(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()
    result = Future.result

    def interrupted(self: Future[int], timeout: float | None = None) -> int:
        monkeypatch.setattr(Future, "result", result)
        started.wait()
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as executor:
        workers = Workers(executor, ahead=2)

        def task(item: int) -> int:
            started.set()
            try:
                for _ in range(500):
                    workers.check()
                    time.sleep(0.01)
            except Stopped:
                time.sleep(0.2)  # its last piece of work
                ended.set()
                raise
            return item

        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(workers.map(task, range(items)))
        assert ended.is_set(), "map came back while a task was running"


def test_a_failure_stops_the_others() -> None:
    with ThreadPoolExecutor(2) as executor:
        workers = Workers(executor, ahead=8)

        def task(item: int) -> None:
            if item == 0:
                raise ValueError("task 0")
            while True:
                workers.check()
                time.sleep(0.001)

        with pytest.raises(ValueError, match="task 0"):
            list(workers.map(task, range(50)))
