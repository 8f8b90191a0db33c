"""Many independent tensors on all cores: one Python thread each, with torch's own threads off.

A tensor a thread needs no barrier in the middle of an operation, which matters on a machine that is busy with other
things: there a barrier waits for a thread that has no core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Stopped(Exception):
    """Another task failed, or the user interrupted the command."""


class Workers:
    """`map` runs a function over items. A task asks `check` now and then whether it should give up."""

    def __init__(self, pool: ThreadPoolExecutor, ahead: int):
        self._pool = pool
        self._ahead = ahead
        self._stop = threading.Event()

    def check(self) -> None:
        """Raise Stopped when the results are no longer wanted."""
        if self._stop.is_set():
            raise Stopped

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Results in the order of `items`. When one fails, or the consumer stops, every task has ended on return."""
        waiting: list[Future[R]] = []

        def oldest() -> R:
            result = waiting[0].result()  # it stays in the list while it may be interrupted here
            del waiting[0]
            return result

        try:
            for item in items:
                waiting.append(self._pool.submit(function, item))
                if len(waiting) > self._ahead:
                    yield oldest()
            while waiting:
                yield oldest()
        except BaseException:
            self._stop.set()
            for future in waiting:
                future.cancel()
            wait(waiting)
            raise


@contextmanager
def workers() -> Iterator[Workers]:
    """As many workers as torch has threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # new threads take this value over
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield Workers(pool, ahead=4 * threads)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)
