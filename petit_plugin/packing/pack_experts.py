"""pack_experts: a layer's expert banks to PackedExperts, one expert at a time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from petit_plugin._types import GROUP_SIZE, CheckpointTensors
from petit_plugin.backends import Backend, backend_for, default_arch
from petit_plugin.packing.experts import LAYOUTS, PARTS, WEIGHT_TENSORS, PackedExperts, PackedExpertsMeta, packed_rows
from petit_plugin.packing.validate import check_checkpoint, check_float32, label

logger = logging.getLogger("petit_plugin.packing")


class _Bank(NamedTuple):
    """One of the two weight banks as the checkpoint has it, and what its rows become."""

    part: str
    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None  # [E, 1] or [E, N] in checkpoint row order
    bias: torch.Tensor | None
    layout: str  # of the rows; "ungated" where they stay
    name: str

    def expert(self, fmt: str, index: int) -> CheckpointTensors:
        """One expert, validated, rows in packed order."""
        factor = None if self.global_scale is None else self.global_scale[index]
        name = label(self.name, f"{self.part}[{index}]")
        source = check_checkpoint(fmt, self.weight[index], self.scale[index], factor, name)
        weight, scale, factor = source.weight, source.scale, source.global_scale
        if factor.numel() > 1:
            factor = packed_rows(factor[:, None], self.layout)[:, 0].contiguous()
        return source._replace(
            weight=packed_rows(weight, self.layout),
            scale=packed_rows(scale, self.layout),
            global_scale=factor,
            quiet=True,
        )


def pack_experts(
    fmt: str,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_global_scale: torch.Tensor | float | None = None,
    w2_global_scale: torch.Tensor | float | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    layout: str = "gate_up",
    arch: str | None = None,
    out: PackedExperts | None = None,
    name: str = "",
) -> PackedExperts:
    """Pack the routed experts of one layer for fused_moe.

    fmt: "nvfp4" (group g = 16) or "mxfp4" (g = 32). H, I: hidden and intermediate size, multiples of g.
    w13: uint8 [E, 2I, H/2], low nibble = even column ([E, I, H/2] for layout "ungated"); w13_scale [E, 2I, H/g].
    w2: uint8 [E, H, I/2]; w2_scale [E, H, I/g]. Scales are float8_e4m3fn / float8_e8m0fnu or their bytes (uint8).
    layout: the order of w13's rows, scales and bias in the checkpoint: "gate_up" [gate; up], "up_gate" [up; gate],
    "interleaved" [gate 0, up 0, gate 1, ...] (gpt-oss) or "ungated".
    w13_global_scale, w2_global_scale (NVFP4 only, and then needed): float32, they multiply. A scalar, [E], or one per
    row ([E, 2I], [E, H]); for w13 also [E, 2], one per half in the order of the layout (gate and up for "gate_up" and
    "interleaved", up and gate for "up_gate").
    w13_bias, w2_bias: [E, 2I] in checkpoint row order and [E, H], any float dtype; kept as float32.
    out: pack into the storage of these experts, which stay untouched if there is an error. name: the layer's, for
    messages.

    Extra memory is a few copies of one expert, whatever E is. Raises TypeError or ValueError naming the argument, its
    shape and the expert ids (NaN block scales over non-zero codes, non-finite global scales).
    """
    if fmt not in GROUP_SIZE:
        raise ValueError(f"fmt is {fmt!r}; expected one of {', '.join(GROUP_SIZE)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    experts, hidden, intermediate = _check_shapes(fmt, w13, w13_scale, w2, w2_scale, layout, name)
    if arch is None:
        arch = out.meta.arch if out is not None else default_arch(w13.device)
    meta = PackedExpertsMeta(fmt, arch, experts, hidden, intermediate, layout)
    banks = []
    for part, weight, scale, factor, bias in (
        ("w13", w13, w13_scale, w13_global_scale, w13_bias),
        ("w2", w2, w2_scale, w2_global_scale, w2_bias),
    ):
        rows = meta.part(part).n
        order = layout if part == "w13" else "ungated"
        factors = _check_global_scale(
            fmt, factor, label(name, f"{part}_global_scale"), experts, rows, order, w13.device
        )
        _check_bias(bias, label(name, f"{part}_bias"), experts, rows, w13.device)
        bank = _Bank(part, weight, scale, factors, bias, order, name)
        bank.expert(fmt, 0)  # dtypes, before anything is written
        _check_nan_scales(fmt, weight, scale, label(name, f"{part}_scale"))
        banks.append(bank)
    backend = backend_for(arch)
    if out is None:
        return _pack_new(meta, banks, backend)
    return _pack_into(out, meta, banks, backend)


def _pack_new(meta: PackedExpertsMeta, banks: list[_Bank], backend: Backend) -> PackedExperts:
    device = banks[0].weight.device
    layout = meta.tensor_layout()
    absent = {f"{bank.part}_bias" for bank in banks if bank.bias is None}
    if meta.format != "mxfp4":
        absent |= {f"{part}_row_exponent" for part in PARTS}
    if backend.shared_row_scale:
        for bank in banks:
            if bank.global_scale is None or bank.global_scale.shape[1] == 1:
                layout[f"{bank.part}_row_scale"] = (torch.Size((meta.num_experts, 1)), torch.float32)
    tensors = {
        key: torch.empty(shape, dtype=dtype, device=device)
        for key, (shape, dtype) in layout.items()
        if key not in absent
    }
    exact = _fill(meta, banks, backend, tensors)
    for part in PARTS:
        exponent = tensors.get(f"{part}_row_exponent")
        if exponent is not None and not bool(exponent.any()):
            del tensors[f"{part}_row_exponent"]
    return PackedExperts(replace(meta, exact=exact), tensors)


def _pack_into(out: PackedExperts, meta: PackedExpertsMeta, banks: list[_Bank], backend: Backend) -> PackedExperts:
    want, have = meta, replace(out.meta, exact=False)
    if want != have or out.device != banks[0].weight.device:
        raise ValueError(
            f"out is {have} on {out.device}, but the experts to pack are {want} on {banks[0].weight.device}; "
            f"pack without out= to get new storage"
        )
    tensors = out.tensors()
    for bank in banks:
        key = f"{bank.part}_bias"
        if (bank.bias is None) != (key not in tensors):
            raise ValueError(
                f"out was packed {'with' if key in tensors else 'without'} {key}; pack without out= to get new storage"
            )
        if meta.format == "mxfp4" and f"{bank.part}_row_exponent" not in tensors:
            _check_no_exponents(meta, bank, backend)
        if bank.global_scale is not None and tensors[f"{bank.part}_row_scale"].shape[1] == 1:
            _check_one_scale(bank, bank.global_scale)
    out.meta = replace(meta, exact=_fill(meta, banks, backend, tensors))
    return out


def _fill(meta: PackedExpertsMeta, banks: list[_Bank], backend: Backend, tensors: dict[str, torch.Tensor]) -> bool:
    """Pack every expert into its slices. Returns whether any needs the exact kernel, with one log line if so."""
    exact: list[str] = []
    affected = set()
    for bank in banks:
        slices = {name: tensors[key] for name in WEIGHT_TENSORS if (key := f"{bank.part}_{name}") in tensors}
        for index in range(meta.num_experts):
            target = {name: tensor[index] for name, tensor in slices.items()}
            source = bank.expert(meta.format, index)
            packed, _ = backend.pack(source, meta.arch, target)
            if packed.exact:
                exact.append(source.name)
                affected.add(index)
        if bank.bias is not None:
            rows = packed_rows(bank.bias.detach()[..., None], bank.layout)[..., 0]
            tensors[f"{bank.part}_bias"].copy_(rows)
    if exact:
        logger.warning(
            "%s: %d of %d experts have a row whose scales span more than the fast kernels hold (the first is %s); "
            "all experts of this layer run the exact kernel, which is slow",
            *(banks[0].name or "experts", len(affected), meta.num_experts, exact[0]),
        )
    return bool(exact)


def _check_one_scale(bank: _Bank, global_scale: torch.Tensor) -> None:
    """`out` has room for one global scale per expert and must not be half written."""
    bits = global_scale.contiguous().view(torch.int32)  # so that 0 and -0 differ
    needing = (bits != bits[:, :1]).any(1).nonzero()[:, 0].tolist()
    if needing:
        raise ValueError(
            f"{label(bank.name, f'{bank.part}_global_scale')} differs from row to row in experts {needing}, but the "
            f"experts given as out= have room for one each; pack without out= to get new storage"
        )


def _check_no_exponents(meta: PackedExpertsMeta, bank: _Bank, backend: Backend) -> None:
    """A trial run, one expert at a time: `out` has no room for row exponents and must not be half written."""
    needing = [
        index
        for index in range(meta.num_experts)
        if "row_exponent" in backend.pack(bank.expert(meta.format, index), meta.arch, None)[1]
    ]
    if needing:
        raise ValueError(
            f"{label(bank.name, f'{bank.part}_scale')} needs row exponents in experts {needing}, which the experts "
            f"given as out= were packed without; pack without out= to get new storage"
        )


def _check_shapes(
    fmt: str, w13: object, w13_scale: object, w2: object, w2_scale: object, layout: str, name: str
) -> tuple[int, int, int]:
    """E, H, I from four 3-D tensors that agree on them."""
    given = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    shapes: dict[str, list[int]] = {}
    for key, value in given.items():
        what = label(name, key)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what} must be a torch.Tensor, got {type(value).__name__}")
        if value.dim() != 3:
            raise ValueError(f"{what} has shape {list(value.shape)}; expected [experts, rows, columns]")
        if isinstance(w13, torch.Tensor) and value.device != w13.device:
            raise ValueError(f"{what} is on {value.device} but {label(name, 'w13')} on {w13.device}; move it there")
        shapes[key] = list(value.shape)
    group = GROUP_SIZE[fmt]
    experts, rows, columns = shapes["w13"]
    hidden, per_row = 2 * columns, 1 if layout == "ungated" else 2
    if min(experts, rows, columns) == 0:
        raise ValueError(f"{label(name, 'w13')} has shape {shapes['w13']}; there is nothing to pack")
    if rows % per_row:
        raise ValueError(
            f"{label(name, 'w13')} has shape {shapes['w13']}: {rows} rows cannot be gate and up halves of layout "
            f"{layout!r}; use layout='ungated' if there is no gate"
        )
    intermediate = rows // per_row
    for size, what in ((hidden, "hidden"), (intermediate, "intermediate")):
        if size % group:
            raise ValueError(
                f"{label(name, 'w13')} has shape {shapes['w13']}, so the {what} size is {size}, which is no multiple "
                f"of the {fmt} group {group}; shard on group boundaries or zero-pad the checkpoint tensors"
            )
    expected = {
        "w13_scale": [experts, rows, hidden // group],
        "w2": [experts, hidden, intermediate // 2],
        "w2_scale": [experts, hidden, intermediate // group],
    }
    for key, shape in expected.items():
        if shapes[key] != shape:
            raise ValueError(
                f"{label(name, key)} has shape {shapes[key]}; {label(name, 'w13')} with shape {shapes['w13']}, "
                f"{fmt}, layout {layout!r} needs {shape}"
            )
    return experts, hidden, intermediate


def _check_global_scale(
    fmt: str, value: object, what: str, experts: int, rows: int, layout: str, device: torch.device
) -> torch.Tensor | None:
    """None for MXFP4; else float32 [E, 1] or [E, rows] in checkpoint row order, a view where it can be."""
    if fmt == "mxfp4":
        if value is not None:
            raise ValueError(f"{what} was given, but MXFP4 has no global scales; leave it None")
        return None
    if value is None:
        raise ValueError(f"{what} is missing: NVFP4 needs it (weight_scale_2; pass 1.0 if the checkpoint has none)")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        check_float32(what, value)
        value = torch.tensor(value, dtype=torch.float32, device=device)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor or a number, got {type(value).__name__}")
    if value.dtype != torch.float32:
        raise TypeError(f"{what} is {value.dtype}; keep it in float32, which the checkpoint stores")
    if value.device != device:
        raise ValueError(f"{what} is on {value.device} but the weights on {device}; move it there")
    scale = value.detach()
    halves = layout != "ungated"
    if scale.dim() == 0:
        scale = scale.expand(experts, 1)
    elif scale.dim() == 1 and scale.shape[0] in (1, experts):
        scale = scale.expand(experts)[:, None]
    elif scale.dim() != 2 or scale.shape[0] != experts or scale.shape[1] not in (1, rows, *([2] if halves else [])):
        per_half = f", [{experts}, 2] (one per half)" if halves else ""
        raise ValueError(
            f"{what} has shape {list(value.shape)}; expected a scalar, [{experts}]{per_half} or one per row, "
            f"[{experts}, {rows}]"
        )
    bad = (~torch.isfinite(scale)).any(1).nonzero()[:, 0].tolist()
    if bad:
        raise ValueError(f"{what} is not finite in experts {bad}; the checkpoint is damaged or was not calibrated")
    if halves and scale.shape[1] == 2 and rows != 2:
        half = rows // 2
        if layout == "interleaved":
            return scale.repeat(1, half)
        return scale.repeat_interleave(half, dim=1)
    return scale


def _check_bias(value: object, what: str, experts: int, rows: int, device: torch.device) -> None:
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{what} is {value.dtype}; expected float32, bfloat16 or float16")
    if value.shape != (experts, rows):
        raise ValueError(f"{what} has shape {list(value.shape)}; expected [{experts}, {rows}]")
    if value.device != device:
        raise ValueError(f"{what} is on {value.device} but the weights on {device}; move it there")


def _check_nan_scales(fmt: str, weight: torch.Tensor, scale: torch.Tensor, what: str) -> None:
    """All damaged experts in one message. A NaN scale over a block of zeros is harmless (packing makes it neutral)."""
    bad: list[int] = []
    first = ""
    for index in range(weight.shape[0]):
        codes, scales = weight[index].detach().view(torch.uint8), scale[index].detach().view(torch.uint8)
        nan = (scales & 0x7F) == 0x7F if fmt == "nvfp4" else scales == 255
        if not bool(nan.any()):
            continue
        damaged = nan & (codes.reshape(*scales.shape, -1) & 0x77).any(-1)
        if bool(damaged.any()):
            first = first or f"[{index}, {', '.join(str(i) for i in damaged.nonzero()[0].tolist())}]"
            bad.append(index)
    if bad:
        raise ValueError(
            f"{what}: NaN scale in experts {bad} (the first is {what}{first}) over blocks that are not all zero; "
            f"the checkpoint is damaged"
        )
