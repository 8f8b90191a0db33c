"""Where a packed weight lives and what runs it.

A backend serves one or more archs ("cpu", "gfx90a", ...). Its layouts are its own: everything outside this package
knows only the names of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from petit_plugin._types import CheckpointTensors, PackedMeta
from petit_plugin.backends.cpu import CpuBackend
from petit_plugin.backends.hip import device as hip_device
from petit_plugin.backends.hip import emulation
from petit_plugin.backends.hip.backend import ARCHS as HIP_ARCHS
from petit_plugin.backends.hip.backend import HipBackend

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Backend(Protocol):
    """What packing/ and ops/ need. Tensors are given by name; arguments have been checked by the caller."""

    shared_row_scale: bool  # whether row_scale may be [1], for all rows, instead of what layout() says

    def layout(self, meta: PackedMeta) -> Layout:
        """Shape and dtype of every packed tensor; `row_exponent` is optional in a weight."""

    def pack(
        self, source: CheckpointTensors, arch: str, out: Mapping[str, torch.Tensor] | None
    ) -> tuple[PackedMeta, dict[str, torch.Tensor]]:
        """Pack into `out` (same storage) or new tensors. Nothing is written to `out` if an error is raised."""

    def unpack(self, meta: PackedMeta, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Checkpoint codes uint8 [n, k/2] and scale bytes uint8 [n, k/group]."""

    def dequantize(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        row_scale: torch.Tensor,
        row_exponent: torch.Tensor | None,
        meta: PackedMeta,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """[n, k] in dtype, rounded once."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        row_scale: torch.Tensor,
        row_exponent: torch.Tensor | None,
        bias: torch.Tensor | None,
        meta: PackedMeta,
    ) -> torch.Tensor:
        """x [..., k] -> [..., n], contiguous."""


_HIP = HipBackend()
_BACKENDS: dict[str, Backend] = {"cpu": CpuBackend(), **dict.fromkeys(HIP_ARCHS, _HIP)}


def backend_for(arch: str) -> Backend:
    """The backend that serves `arch`. ValueError if there is none here."""
    backend = _BACKENDS.get(arch)
    if backend is None:
        raise ValueError(f"arch {arch!r} has no backend here; available: {', '.join(sorted(_BACKENDS))}")
    return backend


def default_arch(device: torch.device) -> str:
    """The arch a weight on `device` is packed for when none is given."""
    if device.type == "cpu":
        emulator = emulation.current()
        return hip_device.variant(emulator.arch) if emulator else "cpu"
    if device.type == "cuda":
        return hip_device.arch_name(device)
    raise ValueError(f"no backend for tensors on {device}; move them to the CPU or pass arch=")
