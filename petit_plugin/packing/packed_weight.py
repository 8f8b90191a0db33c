"""A packed weight: plain tensors and the numbers that describe them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from petit_plugin._types import PackedMeta, UnpackedWeight
from petit_plugin.backends import Backend, backend_for

_OPTIONAL = frozenset({"row_exponent"})


class PackedWeight:
    """One FP4 weight [N, K] in the layout of meta.arch: a view of plain tensors, which the ops take as they are.

    Attributes: meta; weight (codes) and scale (block scales), uint8; row_scale float32 [N padded],
    or [1] when the checkpoint has one for all rows and the backend can share it; row_exponent int8 (CPU) or int32
    [N padded] or None. w[n, k] = code * block scale * row_scale[n] * 2^row_exponent[n].
    """

    __slots__ = ("meta", "row_exponent", "row_scale", "scale", "weight")

    def __init__(
        self,
        meta: PackedMeta,
        weight: torch.Tensor,
        scale: torch.Tensor,
        row_scale: torch.Tensor,
        row_exponent: torch.Tensor | None = None,
    ) -> None:
        self.meta = meta
        self.weight = weight
        self.scale = scale
        self.row_scale = row_scale
        self.row_exponent = row_exponent

    @classmethod
    def from_tensors(cls, meta: PackedMeta, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
        """The weight over these tensors (names as in tensors()), without a copy.

        Raises TypeError or ValueError for missing or unknown names, numbers in meta that no weight can have, and a
        shape, dtype or device that does not fit meta. Values are not read (this may run in a captured graph): row
        exponents outside [-254, 254], which packing never makes, give wrong results but no wrong access.
        """
        check_tensors(meta, tensors)
        return cls(meta, tensors["weight"], tensors["scale"], tensors["row_scale"], tensors.get("row_exponent"))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name to tensor, no copies; `row_exponent` only if there is one."""
        named = {"weight": self.weight, "scale": self.scale, "row_scale": self.row_scale}
        if self.row_exponent is not None:
            named["row_exponent"] = self.row_exponent
        return named

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K]: exactly what the kernels multiply by, row scales included, rounded once to dtype.

        dtype: float64 (exact), float32, bfloat16 or float16.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
        m = self.meta
        result: torch.Tensor = torch.ops.petit.dequantize(
            self.weight, self.scale, self.row_scale, self.row_exponent, m.format, m.arch, m.n, m.k, m.exact, dtype
        )
        return result

    def unpack(self) -> UnpackedWeight:
        """The checkpoint's tensors again, bit for bit.

        Except for what packing made canonical: the sign of a negative block scale is in the codes, and the scale of an
        all-zero block that was NaN is 0 (NVFP4) or 1 (MXFP4).
        """
        check_tensors(self.meta, self.tensors())
        codes, scales = backend_for(self.meta.arch).unpack(self.meta, self.tensors())
        if self.meta.format == "nvfp4":
            return UnpackedWeight(codes, scales.view(torch.float8_e4m3fn), self._global_scale())
        return UnpackedWeight(codes, scales, None)

    def _global_scale(self) -> torch.Tensor:
        """float32 [N], a copy."""
        n = self.meta.n
        return self.row_scale.repeat(n) if self.row_scale.numel() == 1 else self.row_scale[:n].clone()

    @property
    def shape(self) -> tuple[int, int]:
        return (self.meta.n, self.meta.k)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def __repr__(self) -> str:
        m = self.meta
        exact = ", exact" if m.exact else ""
        return f"PackedWeight({m.format} [{m.n}, {m.k}] for {m.arch}, {self.nbytes} bytes on {self.device}{exact})"


def check_tensors(meta: PackedMeta, tensors: Mapping[str, torch.Tensor]) -> None:
    """The numbers of meta, and names, shapes, dtypes, contiguity and device of its tensors."""
    meta.check()
    backend = backend_for(meta.arch)
    layout = backend.layout(meta)
    missing = [name for name in layout if name not in tensors and name not in _OPTIONAL]
    unknown = [name for name in tensors if name not in layout]
    if missing or unknown:
        raise ValueError(f"packed weight {meta}: missing tensors {missing}, unknown tensors {unknown}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} of packed weight {meta} must be a torch.Tensor, got {type(tensor).__name__}")
    device = tensors["weight"].device
    for name, tensor in tensors.items():
        shape, dtype = layout[name]
        fit = fits(tensor, shape, dtype) or fits_shared(name, tensor, shape, backend)
        if not fit or tensor.device != device:
            raise ValueError(
                f"{name} of packed weight {meta} must be contiguous {dtype} {list(shape)} on {device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )


def fits(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a kernel may take the tensor's address as that of a plain array of this shape and dtype."""
    return tensor.shape == shape and tensor.dtype is dtype and tensor.layout is torch.strided and tensor.is_contiguous()


def fits_shared(name: str, tensor: torch.Tensor, shape: tuple[int, ...], backend: Backend) -> bool:
    """Whether this is a row_scale of one for all rows ([1], or [E, 1] of experts) where `shape` has one each."""
    return backend.shared_row_scale and name.endswith("row_scale") and fits(tensor, (*shape[:-1], 1), torch.float32)


def padded_rows(meta: PackedMeta) -> int:
    """N as the layout of meta.arch rounds it up."""
    return backend_for(meta.arch).layout(meta)["row_scale"][0][0]
