"""Packed experts: plain tensors with the expert dimension first, and the numbers that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from petit_plugin._types import GROUP_SIZE, PackedMeta, group_size
from petit_plugin.backends import backend_for
from petit_plugin.packing.packed_weight import PackedWeight, fits, fits_shared

LAYOUTS = ("gate_up", "up_gate", "interleaved", "ungated")
PARTS = ("w13", "w2")
WEIGHT_TENSORS = ("weight", "scale", "row_scale", "row_exponent")  # of each part; "bias" comes on top
ExpertLayout = dict[str, tuple[torch.Size, torch.dtype]]
_OPTIONAL = ("row_exponent", "bias")


@dataclass(frozen=True)
class PackedExpertsMeta:
    """The numbers that go with the tensors of packed experts.

    format: "nvfp4" | "mxfp4"; arch: what they were packed for; hidden (H) and intermediate (I) sizes.
    layout: how the checkpoint ordered w13's rows: "gate_up" [gate; up], "up_gate" [up; gate], "interleaved"
    [gate 0, up 0, gate 1, ...] or "ungated" (I rows). Packed rows are always gate, then up.
    exact: some row's range does not fit the fast kernels, so the float64 one runs (MXFP4 only).
    """

    format: str
    arch: str
    num_experts: int
    hidden: int
    intermediate: int
    layout: str = "gate_up"
    exact: bool = False

    @property
    def gated(self) -> bool:
        return self.layout != "ungated"

    @property
    def group_size(self) -> int:
        return GROUP_SIZE[self.format]

    def check(self) -> None:
        """ValueError unless format and layout are known, there is an expert and both sizes are multiples of the group.

        Kernels derive addresses from these numbers, so nothing may run before they have been checked.
        """
        group = group_size(self.format)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; expected one of {', '.join(LAYOUTS)}")
        if self.num_experts < 1:
            raise ValueError(f"num_experts is {self.num_experts}; there must be at least one")
        for what, size in (("hidden", self.hidden), ("intermediate", self.intermediate)):
            if size < 1 or size % group:
                raise ValueError(f"{what} is {size}; packed {self.format} experts need a positive multiple of {group}")

    def part(self, part: str) -> PackedMeta:
        """Of one expert's "w13" [2I or I, H] or "w2" [H, I]."""
        first = part == "w13"
        n = (2 if self.gated else 1) * self.intermediate if first else self.hidden
        return PackedMeta(self.format, self.arch, n, self.hidden if first else self.intermediate, self.exact)

    def tensor_layout(self) -> ExpertLayout:
        """Shape and dtype of every tensor; the row_exponents and biases are optional. ValueError as check()."""
        self.check()
        layout: ExpertLayout = {}
        for part in PARTS:
            meta = self.part(part)
            for name, (shape, dtype) in backend_for(self.arch).layout(meta).items():
                layout[f"{part}_{name}"] = (torch.Size((self.num_experts, *shape)), dtype)
            layout[f"{part}_bias"] = (torch.Size((self.num_experts, meta.n)), torch.float32)
        return layout


def checkpoint_rows(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """Packed row order (gate, then up) to the checkpoint's, along dimension -2 of [..., rows, columns]."""
    half = rows.shape[-2] // 2
    if layout == "up_gate":
        return torch.cat([rows[..., half:, :], rows[..., :half, :]], -2)
    if layout == "interleaved":
        return torch.stack([rows[..., :half, :], rows[..., half:, :]], -2).flatten(-3, -2)
    return rows


def packed_rows(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of checkpoint_rows; a copy only where rows move."""
    if layout == "interleaved":
        return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], -2)
    return checkpoint_rows(rows, layout)  # swapping halves is its own inverse


class PackedExperts:
    """The FP4 experts of one layer in the layout of meta.arch: a view of plain tensors, which the op takes as they are.

    Attributes: meta, and for part w13 and w2: {part}_weight, {part}_scale (uint8), {part}_row_scale (float32),
    {part}_row_exponent (int8, int32 or None), {part}_bias (float32 [E, N] in packed row order, or None). Every
    expert's slice has the layout of a PackedWeight.
    """

    __slots__ = ("meta", *(f"{part}_{name}" for part in PARTS for name in (*WEIGHT_TENSORS, "bias")))

    meta: PackedExpertsMeta
    w13_weight: torch.Tensor
    w13_scale: torch.Tensor
    w13_row_scale: torch.Tensor
    w13_row_exponent: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_weight: torch.Tensor
    w2_scale: torch.Tensor
    w2_row_scale: torch.Tensor
    w2_row_exponent: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __init__(self, meta: PackedExpertsMeta, tensors: Mapping[str, torch.Tensor]) -> None:
        """Unchecked; see from_tensors."""
        self.meta = meta
        for name in self.__slots__[1:]:
            setattr(self, name, tensors.get(name))

    @classmethod
    def from_tensors(cls, meta: PackedExpertsMeta, tensors: Mapping[str, torch.Tensor]) -> PackedExperts:
        """The experts over these tensors (names as in tensors()), without a copy.

        Raises TypeError or ValueError for missing or unknown names, numbers in meta that no experts can have, and a
        shape, dtype or device that does not fit meta. Values are not read, as in PackedWeight.from_tensors.
        """
        check_expert_tensors(meta, tensors)
        return cls(meta, tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name to tensor, no copies; optional ones only if they are there."""
        named = {name: getattr(self, name) for name in self.__slots__[1:]}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def expert(self, index: int, part: str) -> PackedWeight:
        """One expert's "w13" (gate rows, then up rows) or "w2" as a PackedWeight over the same storage."""
        if not 0 <= index < self.meta.num_experts:
            raise IndexError(f"expert {index} of {self.meta.num_experts}")
        weight, scale, row_scale, row_exponent = (getattr(self, f"{part}_{name}") for name in WEIGHT_TENSORS)
        exponent = None if row_exponent is None else row_exponent[index]
        return PackedWeight(self.meta.part(part), weight[index], scale[index], row_scale[index], exponent)

    def dequantize(
        self, dtype: torch.dtype = torch.float32, *, checkpoint_order: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 [E, 2I or I, H] and w2 [E, H, I]: exactly what the kernels multiply by, rounded once to dtype.

        w13's rows are gate, then up, or the checkpoint's order if asked for. All experts at once: that is four to
        fourteen times the packed bytes; expert(i, part).dequantize() takes one.
        """
        w13, w2 = (
            torch.stack([self.expert(e, part).dequantize(dtype) for e in range(self.meta.num_experts)])
            for part in PARTS
        )
        return checkpoint_rows(w13, self.meta.layout) if checkpoint_order else w13, w2

    @property
    def device(self) -> torch.device:
        return self.w13_weight.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def __repr__(self) -> str:
        m = self.meta
        return (
            f"PackedExperts({m.num_experts} x {m.format} hidden {m.hidden}, intermediate {m.intermediate}, {m.layout}, "
            f"for {m.arch}, {self.nbytes} bytes on {self.device}{', exact' if m.exact else ''})"
        )


def check_expert_tensors(meta: PackedExpertsMeta, tensors: Mapping[str, torch.Tensor]) -> None:
    """Names, shapes, dtypes, contiguity and device of packed tensors; an error naming the first that does not fit."""
    layout = meta.tensor_layout()
    missing = [name for name in layout if name not in tensors and not name.endswith(_OPTIONAL)]
    unknown = [name for name in tensors if name not in layout]
    if missing or unknown:
        raise ValueError(f"packed experts {meta}: missing tensors {missing}, unknown tensors {unknown}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} of packed experts must be a torch.Tensor, got {type(tensor).__name__}")
    device = tensors["w13_weight"].device
    for name, tensor in tensors.items():
        check_expert_tensor(name, tensor, meta, layout, device)


def check_expert_tensor(
    name: str, tensor: torch.Tensor, meta: PackedExpertsMeta, layout: ExpertLayout, device: torch.device
) -> None:
    """One tensor against meta.tensor_layout(); ValueError if it does not fit."""
    if name not in layout:
        raise ValueError(f"{name} was given, but {meta.format} experts packed for {meta.arch} have none; leave it None")
    shape, dtype = layout[name]
    fit = fits(tensor, shape, dtype) or fits_shared(name, tensor, shape, backend_for(meta.arch))
    if not fit or tensor.device != device:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; {meta.num_experts} {meta.format} "
            f"experts of hidden {meta.hidden}, intermediate {meta.intermediate}, {meta.layout}, packed for "
            f"{meta.arch}, have contiguous {dtype} {list(shape)} on {device}"
        )
