"""The HIP backend: packing by csrc/host, kernels of csrc/device launched through csrc/host."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from petit_plugin._types import CheckpointTensors, PackedMeta
from petit_plugin.backends.hip import emulation, layout, packing, solutions
from petit_plugin.backends.hip.device import DTYPE_NAMES, Device

logger = logging.getLogger("petit_plugin.backends.hip")

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # weight, scale, row_scale, row_exponent
ARCHS = (*solutions.ARCHS, "gfx950-mask")  # "-mask": gfx950 weights for the bit-mask core, should conversions be slow
DENSE_CHUNK = 64 << 20  # bytes of dequantised weights at a time: they stay in the last-level cache


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(x: torch.Tensor, k: int) -> torch.Tensor:
    """x as [m, k] whose rows start on 16 bytes, copied only if they do not."""
    rows = x.reshape(-1, k)
    if rows.stride(1) != 1 or (rows.stride(0) % 8 and rows.shape[0] > 1) or rows.data_ptr() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows


class HipBackend:
    shared_row_scale = False

    def __init__(self) -> None:
        self._devices: dict[tuple[int, str], Device] = {}

    def device(self, device: torch.device, arch: str) -> Device:
        """The device that runs weights packed for `arch`. ValueError saying what is missing."""
        base = arch.partition("-")[0]
        if device.type == "cpu":
            emulator = emulation.current()
            if emulator is None or emulator.arch != base:
                where = f"the emulator is running {emulator.arch}" if emulator else "no emulator is active"
                raise ValueError(
                    f"the weight is packed for {arch} but its tensors are on the CPU and {where}; "
                    f"move it to a {base} GPU or use `with petit_plugin.emulated({base!r}):`"
                )
            return emulator
        key = (device.index if device.index is not None else torch.cuda.current_device(), base)
        if key not in self._devices:
            self._devices[key] = Device(*key)
        return self._devices[key]

    def layout(self, meta: PackedMeta) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return layout.shapes(meta)

    def pack(
        self, source: CheckpointTensors, arch: str, out: Mapping[str, torch.Tensor] | None
    ) -> tuple[PackedMeta, dict[str, torch.Tensor]]:
        meta, tensors = packing.pack(source, arch, out)
        if source.weight.device.type == "cuda":
            self.device(source.weight.device, arch).reserve(meta)  # loads the code object now, not in a capture
        return meta, tensors

    def unpack(self, meta: PackedMeta, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return packing.unpack(meta, tensors)

    def dequantize(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        row_scale: torch.Tensor,
        row_exponent: torch.Tensor | None,
        meta: PackedMeta,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        tensors = (weight, scale, row_scale, _required(row_exponent, meta))
        return packing.dequantize(dict(zip(packing.NAMES, tensors, strict=True)), meta, dtype)

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
        if x.dtype not in DTYPE_NAMES:
            raise TypeError(f"x is {x.dtype}; the {meta.arch} kernels take bfloat16 or float16")
        y = x.new_empty((*x.shape[:-1], meta.n))
        if y.numel() == 0:
            return y
        device = self.device(x.device, meta.arch)
        rows, out = _rows(x, meta.k), y.view(-1, meta.n)
        bias = None if bias is None else bias.contiguous()
        tensors = (weight, scale, row_scale, _required(row_exponent, meta))
        dtype = DTYPE_NAMES[x.dtype]
        if device.solution(meta, dtype, rows.shape[0]).role == "dense":
            self._dense(device, rows, tensors, bias, meta, out)
        else:
            for first in range(0, rows.shape[0], solutions.DENSE_ABOVE):
                last = first + solutions.DENSE_ABOVE
                self._launch(device, rows[first:last], tensors, bias, meta, out[first:last])
        return y

    def _launch(
        self,
        device: Device,
        x: torch.Tensor,
        tensors: Packed,
        bias: torch.Tensor | None,
        meta: PackedMeta,
        y: torch.Tensor,
    ) -> None:
        weight, scale, row_scale, row_exponent = tensors
        prepared = device.prepare(meta, DTYPE_NAMES[x.dtype], x.shape[0])
        stream = device.stream()
        workspace = device.workspace(prepared.nbytes, stream)
        with device.visible((x, *tensors, bias), (y, workspace)):
            prepared.plan.run(
                *(x.data_ptr(), x.stride(0) * 2, weight.data_ptr(), scale.data_ptr()),
                *(row_scale.data_ptr(), row_exponent.data_ptr()),
                *(_pointer(bias), bias is not None and bias.dtype == torch.float32),
                *(y.data_ptr(), y.stride(0), workspace.data_ptr(), stream),
            )

    def _dense(
        self,
        device: Device,
        x: torch.Tensor,
        tensors: Packed,
        bias: torch.Tensor | None,
        meta: PackedMeta,
        y: torch.Tensor,
    ) -> None:
        """Many rows: weights back to 16 bits a chunk of rows at a time, vendor GEMM in float32, one rounding."""
        weight, scale, row_scale, row_exponent = tensors
        dtype, stream = DTYPE_NAMES[x.dtype], device.stream()
        mask = "_mask" if meta.arch.endswith("-mask") else ""
        chunk = max(layout.ROW_GROUP, DENSE_CHUNK // (2 * meta.k) // layout.ROW_GROUP * layout.ROW_GROUP)
        for first in range(0, meta.n, chunk):
            count = min(chunk, meta.n - first)
            w = torch.empty(count, meta.k, dtype=x.dtype, device=x.device)
            with device.visible((weight, scale), (w,)):
                device.code.dequantize(
                    *(
                        f"petit_dequantize_{meta.format}_{dtype}{mask}",
                        weight.data_ptr(),
                        scale.data_ptr(),
                        w.data_ptr(),
                    ),
                    *(first, count, meta.k, stream),
                )
            total = device.matmul_f32(x, w)
            part = None if bias is None else bias[first : first + count]
            scales, exponents, out = row_scale[first:], row_exponent[first:], y[:, first : first + count]
            with device.visible((total, scales, exponents, part), (out,)):
                device.code.finish(
                    *(
                        f"petit_finish_{dtype}",
                        total.data_ptr(),
                        scales.data_ptr(),
                        exponents.data_ptr(),
                        _pointer(part),
                    ),
                    *(part is not None and part.dtype == torch.float32, out.data_ptr(), y.stride(0)),
                    *(count, x.shape[0], stream),
                )


def _required(row_exponent: torch.Tensor | None, meta: PackedMeta) -> torch.Tensor:
    if row_exponent is None:
        raise ValueError(f"row_exponent is missing; weights packed for {meta.arch} always have it")
    return row_exponent
