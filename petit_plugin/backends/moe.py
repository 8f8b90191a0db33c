"""What a backend needs to run fused_moe, and which one does."""

from __future__ import annotations

from typing import Protocol

import torch

from petit_plugin._moe_call import MoeCall
from petit_plugin.backends.cpu_moe import CpuMoe


class MoeBackend(Protocol):
    """fused_moe for the archs of one backend. Arguments have been checked by ops/moe.py."""

    def fused_moe(self, call: MoeCall, out: torch.Tensor, intermediate: torch.Tensor | None = None) -> None:
        """Fill out, [T, H] or [T, topk, H], contiguous, any of the activation dtypes.

        intermediate: for tests; [T, topk, I] in x's dtype, gets the second GEMM's input where there is an expert.
        """


_BACKENDS: dict[str, MoeBackend] = {"cpu": CpuMoe()}


def moe_backend_for(arch: str) -> MoeBackend:
    """The backend that runs experts packed for `arch`. ValueError if there is none here."""
    backend = _BACKENDS.get(arch)
    if backend is None:
        raise ValueError(f"experts packed for {arch!r} cannot run here; available: {', '.join(sorted(_BACKENDS))}")
    return backend
