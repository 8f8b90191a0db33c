"""The numerics contract, in float64 NumPy and independent of the package: what a result may be, given the exact weight.

    y[m, n] = round( (sum_k x[m, k] * w[n, k]) * g[n] + bias[n] )
    |y - ref| <= 1/2 ulp(ref) + 2e-6 * sum_k |x * w| * |g|       (4e-6 for float32 results)
    and, for 1024 outputs or more, ||y - ref|| / ||ref|| <= 2e-3 (bfloat16), 3e-4 (float16)

Weights in float64 come from fixtures.oracle, with g multiplied in (exact: 2 + 4 + 24 significant bits).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from fixtures import oracle
from numpy.typing import NDArray

F64 = NDArray[np.float64]

# Stored mantissa bits and the exponents of the smallest normal and of the largest finite number.
_FLOATS = {torch.bfloat16: (7, -126, 127), torch.float16: (10, -14, 15), torch.float32: (23, -126, 127)}
_NORM = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 4e-6}
DTYPES = tuple(_FLOATS)
GROUP = {"nvfp4": 16, "mxfp4": 32}


class Reference(NamedTuple):
    """The exact result [M, N] and sum_k |x * w * g|, which scales the accumulation error that is allowed."""

    value: F64
    magnitude: F64


class Checkpoint(NamedTuple):
    """One layer's checkpoint tensors as NumPy bytes, and its exact values [N, K]."""

    fmt: str
    weight: NDArray[np.uint8]
    scale: NDArray[np.uint8]
    global_scale: NDArray[np.float32] | None
    values: F64

    def torch_arguments(self) -> tuple[torch.Tensor, ...]:
        """What pack_nvfp4 or pack_mxfp4 takes."""
        weight, scale = torch.from_numpy(self.weight.copy()), torch.from_numpy(self.scale.copy())
        if self.global_scale is None:
            return weight, scale
        return weight, scale.view(torch.float8_e4m3fn), torch.from_numpy(np.array(self.global_scale, np.float32))


def half_ulp(value: F64, dtype: torch.dtype) -> F64:
    """Half the distance between `value`'s neighbours in dtype."""
    mantissa, smallest, _ = _FLOATS[dtype]
    exponent = np.frexp(np.where(np.isfinite(value), value, 1.0))[1] - 1
    exponent = np.where(value == 0, smallest, np.maximum(exponent, smallest))
    return np.ldexp(0.5, exponent - mantissa)


def as_f64(tensor: torch.Tensor) -> F64:
    return tensor.detach().cpu().to(torch.float64).numpy()


def reference(x: torch.Tensor, values: F64, bias: torch.Tensor | None = None) -> Reference:
    """x [..., K] against w [N, K] in float64. The magnitude does not count the bias: adding it is the one rounding."""
    activations = as_f64(x).reshape(-1, values.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        value = activations @ values.T
        magnitude = np.abs(activations) @ np.abs(values).T
    if bias is not None:
        value = value + as_f64(bias)
    return Reference(value, magnitude)


def assert_close(y: torch.Tensor, ref: Reference, *, norm: bool = True) -> None:
    """The contract, element by element; `norm=False` for inputs built to cancel, whose relative norm means nothing.

    A reference beyond the type's range must give an infinity of its sign, NaN must give NaN and infinity itself.
    """
    got = as_f64(y).reshape(ref.value.shape)
    mantissa, _, largest = _FLOATS[y.dtype]
    relative = 4e-6 if y.dtype == torch.float32 else 2e-6
    with np.errstate(invalid="ignore", over="ignore"):
        allowed = half_ulp(ref.value, y.dtype) + relative * ref.magnitude
        limit = np.ldexp(2.0 - 0.5 ** (mantissa + 1), largest)  # from here on, round to nearest gives infinity
        close = np.abs(got - ref.value) <= allowed
        overflow = np.isinf(got) & (np.sign(got) == np.sign(ref.value)) & (np.abs(ref.value) + allowed >= limit)
    special = ~np.isfinite(ref.value)
    right = np.where(special, (np.isnan(got) & np.isnan(ref.value)) | (got == ref.value), close | overflow)
    if not right.all():
        bad = np.argwhere(~right)
        at = tuple(int(i) for i in bad[0])
        raise AssertionError(
            f"{len(bad)} of {right.size} elements off; at {at} got {got[at]!r}, expected {ref.value[at]!r} "
            f"± {allowed[at]:.3g} in {y.dtype}"
        )
    if norm and right.size >= 1024 and np.isfinite(ref.value).all() and np.isfinite(got).all():
        error = np.linalg.norm(got - ref.value) / max(np.linalg.norm(ref.value), np.finfo(np.float64).tiny)
        assert error <= _NORM[y.dtype], f"relative norm of the error is {error:.3g} in {y.dtype}"


def random_checkpoint(
    rng: np.random.Generator, fmt: str, n: int, k: int, *, per_row: bool = True, scales: Any = None
) -> Checkpoint:
    """Random codes and scales, every code among them. `scales`: bytes to draw block scales from."""
    weight = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    shape = (n, k // GROUP[fmt])
    if fmt == "nvfp4":
        scale = rng.choice(np.arange(0, 0x7F) if scales is None else np.asarray(scales), shape).astype(np.uint8)
        factor = np.exp2(rng.uniform(-14, -6, n if per_row else 1)).astype(np.float32)
        return Checkpoint(fmt, weight, scale, factor, oracle.dequantize_nvfp4(weight, scale, factor))
    scale = rng.choice(np.arange(110, 130) if scales is None else np.asarray(scales), shape).astype(np.uint8)
    return Checkpoint(fmt, weight, scale, None, oracle.dequantize_mxfp4(weight, scale))


def random_activations(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)
