"""Packed layers written straight into the layout of csrc/cpu/gemm.hpp, their exact values, and one call of a kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import kernel_library
import numpy as np
import torch
from numerics import F64, GROUP
from numpy.typing import NDArray

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NUMBER = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_SURROUNDINGS = 256  # poisoned bytes or elements before and after everything a kernel is given


@dataclass
class Layer:
    """One weight: what the kernel reads, poisoned all around, and the exact values [n, k] with row factors in."""

    fmt: str
    n: int
    k: int
    weight: NDArray[Any]
    scale: NDArray[Any]
    row_scale: NDArray[Any]
    row_exponent: NDArray[Any] | None
    values: F64

    def view(self) -> kernel_library.WeightView:
        def at(array: NDArray[Any] | None) -> int | None:
            return None if array is None else array.ctypes.data

        return kernel_library.WeightView(
            0 if self.fmt == "nvfp4" else 1, self.n, self.k, at(self.weight), at(self.scale), at(self.row_scale),
            1, at(self.row_exponent), False,
        )  # fmt: skip


def _surround(array: NDArray[Any], poison: Any) -> NDArray[Any]:
    """A copy of `array` (64-byte aligned, as packing promises) with poison before and after it."""
    bytes_around = 4096
    room = np.empty(array.nbytes + 3 * bytes_around, np.uint8)
    start = bytes_around + -room.ctypes.data % 64
    room[:] = np.resize(np.array([poison], array.dtype).view(np.uint8), room.size)
    inside = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    inside[...] = array
    return inside


def scale_values(fmt: str, byte: NDArray[np.uint8]) -> F64:
    c = byte.astype(np.int64)
    if fmt == "mxfp4":
        return np.ldexp(1.0, c - 127)
    return np.where(c == 0, 0.0, np.ldexp(1 + (c & 7) / 8, (c >> 3) - 16))


def make_layer(
    rng: np.random.Generator, fmt: str, n: int, k: int, *, scales: Any = None, exponents: int = 0, codes: Any = None
) -> Layer:
    """Random codes; block scale bytes drawn from `scales`; row exponents (MXFP4) up to +-`exponents`, 0 for none."""
    if scales is None:
        scales = np.r_[0, 60:140] if fmt == "nvfp4" else np.arange(117, 130)
    code = rng.integers(0, 16, (n, k)) if codes is None else np.broadcast_to(codes, (n, k))
    byte = rng.choice(np.asarray(scales), (n, k // GROUP[fmt])).astype(np.uint8)
    row_scale = np.exp2(rng.uniform(-2, 0, n)).astype(np.float32)
    row_exponent = rng.integers(-exponents, exponents + 1, n).astype(np.int8) if exponents else None

    rows = -(-n // 16) * 16
    padded = np.zeros((rows, k), np.uint32)
    padded[:n] = code
    shift = np.array([4 * (j // 2) + 16 * (j % 2) for j in range(8)], np.uint32)
    dwords = np.bitwise_or.reduce(padded.reshape(rows // 16, 16, k // 8, 8) << shift, axis=-1).astype("<u4")
    neutral = np.full((rows, byte.shape[1]), 0 if fmt == "nvfp4" else 127, np.uint8)
    neutral[:n] = byte
    factors = np.zeros(rows, np.float32)
    factors[:n] = row_scale
    powers = None
    if row_exponent is not None:
        powers = np.zeros(rows, np.int8)
        powers[:n] = row_exponent
    values = (
        _E2M1[code] * np.repeat(scale_values(fmt, byte), GROUP[fmt], axis=1) * row_scale.astype(np.float64)[:, None]
    )
    if row_exponent is not None:
        values = np.ldexp(values, row_exponent[:, None])
    return Layer(
        fmt, n, k,
        _surround(np.ascontiguousarray(dwords.transpose(0, 2, 1)), 0xFFFFFFFF),
        _surround(np.ascontiguousarray(neutral.reshape(rows // 16, 16, -1).transpose(0, 2, 1)), 0xFF),
        _surround(factors, np.nan),
        None if powers is None else _surround(powers, 120),
        values,
    )  # fmt: skip


class Call:
    """One problem: activations between poisoned rows, bias between NaN, and a y that must come back fully written."""

    def __init__(self, layer: Layer, x: torch.Tensor, *, bias: torch.Tensor | None = None, y_dtype: Any = None) -> None:
        self.layer, self.x, self.bias = layer, x, bias
        self.y_dtype = x.dtype if y_dtype is None else y_dtype
        m, k = x.shape
        self.x_stride, self.y_stride = k + 24, layer.n + 5
        self._x = torch.full((m + 2, self.x_stride), float("nan"), dtype=x.dtype)
        self._x[1 : m + 1, :k] = x
        self._y = torch.full((m + 2, self.y_stride), -7.0, dtype=self.y_dtype)
        self._bias = None
        if bias is not None:
            self._bias = torch.full((layer.n + 32,), float("nan"), dtype=bias.dtype)
            self._bias[16 : 16 + layer.n] = bias
        self._rows: torch.Tensor | None = None

    def gather(self, rows: torch.Tensor) -> Call:
        """Problem row i reads row rows[i] of x."""
        self._rows = rows.to(torch.int32)
        self._y = torch.full((len(rows) + 2, self.y_stride), -7.0, dtype=self.y_dtype)
        return self

    def problem(self) -> kernel_library.GemmProblem:
        def inside(room: torch.Tensor, offset: int) -> int:
            return room.data_ptr() + offset * room.element_size()

        return kernel_library.GemmProblem(
            inside(self._x, self.x_stride), self.x_stride, None if self._rows is None else self._rows.data_ptr(),
            self._y.shape[0] - 2, self.layer.view(), None if self._bias is None else inside(self._bias, 16),
            0 if self._bias is None else _NUMBER[self._bias.dtype], inside(self._y, self.y_stride), self.y_stride,
        )  # fmt: skip

    def result(self) -> torch.Tensor:
        """y [m, n], after checking that nothing else was written."""
        n = self.layer.n
        assert bool((self._y[0] == -7).all()) and bool((self._y[-1] == -7).all()) and bool((self._y[:, n:] == -7).all())
        return self._y[1:-1, :n].clone()


def run(kernel: str, calls: list[Call], threads: int = 2) -> list[torch.Tensor]:
    """All calls as one grouped GEMM; they share dtypes."""
    problems = [call.problem() for call in calls]
    kernel_library.grouped_gemm(kernel, problems, _NUMBER[calls[0].x.dtype], _NUMBER[calls[0].y_dtype], threads)
    return [call.result() for call in calls]


def cycle(*lists: Any) -> Any:
    """Endless tuples that walk through lists of coprime lengths, so that few cases meet many combinations."""
    return zip(*(itertools.cycle(values) for values in lists), strict=True)
