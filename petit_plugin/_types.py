"""Plain data that packing, backends and ops share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

GROUP_SIZE = {"nvfp4": 16, "mxfp4": 32}


def group_size(fmt: str) -> int:
    """Values per block scale; ValueError for an unknown format."""
    group = GROUP_SIZE.get(fmt)
    if group is None:
        raise ValueError(f"format is {fmt!r}; expected one of {', '.join(GROUP_SIZE)}")
    return group


@dataclass(frozen=True)
class PackedMeta:
    """The numbers that go with the tensors of a packed weight.

    format: "nvfp4" | "mxfp4"; arch: what it was packed for; n, k: rows and columns of the layer.
    exact: the weight's range does not fit the fast kernels, so the float64 one runs (MXFP4 only).
    """

    format: str
    arch: str
    n: int
    k: int
    exact: bool = False

    def check(self) -> None:
        """ValueError unless the format is known, n >= 1 and k is a positive multiple of its group.

        Kernels derive addresses from these numbers, so nothing may run before they have been checked.
        """
        group = group_size(self.format)
        if self.n < 1:
            raise ValueError(f"n is {self.n}; a packed weight has at least one row")
        if self.k < 1 or self.k % group:
            raise ValueError(f"k is {self.k}; a packed {self.format} weight needs a positive multiple of {group}")

    @property
    def group_size(self) -> int:
        return GROUP_SIZE[self.format]


class CheckpointTensors(NamedTuple):
    """One layer as the checkpoint has it, validated: bytes, rows of unit stride.

    weight uint8 [n, k/2], low nibble = even k; scale uint8 [n, k/group] (E4M3FN or E8M0 bytes); global_scale float32
    [1] or [n], contiguous (ones for MXFP4). `name` is the layer's, for messages. `quiet`: the caller logs that a layer
    is exact, since it packs many of them.
    """

    format: str
    name: str
    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    quiet: bool = False

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return 2 * self.weight.shape[1]


class UnpackedWeight(NamedTuple):
    """Checkpoint tensors again. weight uint8 [n, k/2]; weight_scale float8_e4m3fn [n, k/16] or uint8 E8M0 [n, k/32];
    global_scale float32 [n] (it multiplies), None for MXFP4."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    global_scale: torch.Tensor | None
