"""The CPU backend: packing and kernels of petit_plugin._native. Layout: csrc/cpu/gemm.hpp."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from petit_plugin import _native
from petit_plugin._types import CheckpointTensors, PackedMeta

logger = logging.getLogger("petit_plugin.backends.cpu")

ROW_BLOCK = 16
FORMATS = {"nvfp4": 0, "mxfp4": 1}
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
OUT_TYPES = {**DTYPES, torch.float64: 3}


def padded_rows(n: int) -> int:
    return -(-n // ROW_BLOCK) * ROW_BLOCK


def row_scale_at(row_scale: torch.Tensor) -> tuple[int, int]:
    """Address of the last dimension's scales and their stride: 0 when one serves all rows."""
    return row_scale.data_ptr(), 0 if row_scale.shape[-1] == 1 else 1


def pointer(tensor: torch.Tensor | None) -> int:
    """Address, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def same_bits(scale: torch.Tensor) -> bool:
    """Whether all float32 numbers are one; by bits, so that 0 and -0 differ."""
    bits = scale.view(torch.int32)
    return bool((bits == bits[0]).all())


class KernelReport:
    """One line per process about what runs, dense layers or experts; a warning if it is slower than it could be."""

    def __init__(self) -> None:
        self._done = False
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._done = False

    def __call__(self, isa: int) -> None:
        if self._done:
            return
        self._done = True
        note = " (the slow one: no AVX2 here, or PETIT_CPU_ISA asks for it)" if isa == 0 else ""
        runtime = _native.openmp_runtime()
        threads = runtime or "none here, or lost in a fork after the parent had used it, so one thread"
        slow = isa == 0 or not runtime
        level = logging.WARNING if slow else logging.INFO
        logger.log(level, "CPU kernels: %s%s; OpenMP runtime: %s", _native.isa_name(isa), note, threads)


report_kernels = KernelReport()


class CpuBackend:
    shared_row_scale = True

    def layout(self, meta: PackedMeta) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        rows = padded_rows(meta.n)
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((rows // ROW_BLOCK, meta.k // 8, 64), torch.uint8),
            "scale": ((rows // ROW_BLOCK, meta.k // meta.group_size, ROW_BLOCK), torch.uint8),
            "row_scale": ((rows,), torch.float32),
        }
        if meta.format == "mxfp4":
            layout["row_exponent"] = ((rows,), torch.int8)  # within 67 either way
        elif meta.exact:
            raise ValueError(f"exact is set, but the CPU packs no {meta.format} weight that way; leave it False")
        return layout

    def pack(
        self, source: CheckpointTensors, arch: str, out: Mapping[str, torch.Tensor] | None
    ) -> tuple[PackedMeta, dict[str, torch.Tensor]]:
        if source.weight.device.type != "cpu":
            raise ValueError(
                f"{source.name or 'weight'} is on {source.weight.device}; move it to the CPU to pack for arch 'cpu'"
            )
        n, k, fmt, threads = source.n, source.k, FORMATS[source.format], torch.get_num_threads()
        exponent = torch.empty(padded_rows(n), dtype=torch.int8) if source.format == "mxfp4" else None
        checkpoint = (
            *(fmt, n, k, source.weight.data_ptr(), source.weight.stride(0)),
            *(source.scale.data_ptr(), source.scale.stride(0)),
        )
        nan_row, nan_group, shifted, exact = _native.plan_packing(*checkpoint, pointer(exponent), threads)
        scale_name = f"{source.name}.weight_scale" if source.name else "weight_scale"
        if nan_row >= 0:
            raise ValueError(
                f"{scale_name}[{nan_row}, {nan_group}] is NaN and its block is not all zero; the checkpoint is damaged"
            )
        meta = PackedMeta(source.format, arch, n, k, exact)
        if exact and not source.quiet:
            logger.warning(
                "%s spans more than 120 octaves in one row; this layer runs the float64 kernel, which is slow",
                scale_name,
            )
        if out is None:
            layout = self.layout(meta)
            tensors = {name: torch.empty(layout[name][0], dtype=layout[name][1]) for name in ("weight", "scale")}
            one_scale = source.global_scale.numel() == 1
            tensors["row_scale"] = torch.empty(1 if one_scale else padded_rows(n), dtype=torch.float32)
            if shifted:
                assert exponent is not None
                tensors["row_exponent"] = exponent
        else:
            tensors = dict(out)
            if shifted and "row_exponent" not in tensors:
                raise ValueError(
                    f"{scale_name} needs row exponents, which the weight given as out= was packed without; "
                    f"pack without out= to get new storage"
                )
            if tensors["row_scale"].numel() == 1 and not same_bits(source.global_scale):
                raise ValueError(
                    f"{source.name + '.' if source.name else ''}global_scale differs from row to row, but the weight "
                    f"given as out= has room for one; pack without out= to get new storage"
                )
            if "row_exponent" in tensors:
                assert exponent is not None
                tensors["row_exponent"].copy_(exponent)
        _native.pack(
            *(*checkpoint, tensors["weight"].data_ptr(), tensors["scale"].data_ptr()),
            *(pointer(exponent) if shifted else 0, threads),
        )
        if tensors["row_scale"].numel() == 1:
            tensors["row_scale"].copy_(source.global_scale[:1])
        else:
            tensors["row_scale"][:n] = source.global_scale
            tensors["row_scale"][n:] = 0
        return meta, tensors

    def unpack(self, meta: PackedMeta, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty(meta.n, meta.k // 2, dtype=torch.uint8)
        scales = torch.empty(meta.n, meta.k // meta.group_size, dtype=torch.uint8)
        _native.unpack(
            *(FORMATS[meta.format], meta.n, meta.k, tensors["weight"].data_ptr(), tensors["scale"].data_ptr()),
            *(pointer(tensors.get("row_exponent")), codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()),
        )
        return codes, scales

    def dequantize(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        row_scale: torch.Tensor,
        row_exponent: torch.Tensor | None,
        meta: PackedMeta,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        out = torch.empty(meta.n, meta.k, dtype=dtype)
        _native.dequantize(
            *(FORMATS[meta.format], meta.n, meta.k, weight.data_ptr(), scale.data_ptr()),
            *(
                *row_scale_at(row_scale),
                pointer(row_exponent),
                out.data_ptr(),
                OUT_TYPES[dtype],
                torch.get_num_threads(),
            ),
        )
        return out

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
        n, k = meta.n, meta.k
        y = x.new_empty((*x.shape[:-1], n))
        if y.numel() == 0:
            return y
        rows = x if x.dim() == 2 else x.reshape(-1, k)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        isa = _native.best_isa()
        report_kernels(isa)
        if bias is not None:
            bias = bias.contiguous()
        _native.linear(
            *(rows.data_ptr(), rows.stride(0), rows.shape[0], DTYPES[x.dtype], FORMATS[meta.format], n, k),
            *(weight.data_ptr(), scale.data_ptr(), *row_scale_at(row_scale), pointer(row_exponent), meta.exact),
            *(pointer(bias), 2 if bias is None else DTYPES[bias.dtype], y.data_ptr(), torch.get_num_threads(), isa),
        )
        return y
