from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and a busy machine makes their barriers slow."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the commands that run in a process of their own
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
