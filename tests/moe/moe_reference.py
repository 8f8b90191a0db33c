"""Float64 fused MoE written from the formulas, and the error it allows the float32 kernels, stage by stage.

NumPy only: nothing here comes from the package under test. Gate and up rows are picked from the checkpoint's layout,
not from the packed one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erfc, inf, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
# Stored mantissa bits (without the leading one) and the exponent of the smallest normal number.
FLOATS = {"bfloat16": (7, -126), "float16": (10, -14), "float32": (23, -126)}
FLOOR = 1e-36  # where exp(-g) overflows in float32, silu is zero instead of this or less


def half_ulp(value: F64, dtype: str) -> F64:
    """Half the distance between neighbours of `value` in dtype."""
    mantissa, smallest = FLOATS[dtype]
    exponent = np.frexp(np.abs(value))[1] - 1
    exponent = np.where(value == 0, smallest, np.maximum(exponent, smallest))
    return np.ldexp(0.5, exponent - mantissa)


def sum_tolerance(dtype: str) -> float:
    """Allowed error of a dot product, relative to the sum of its terms' magnitudes (the numerics contract)."""
    return 4e-6 if dtype == "float32" else 2e-6


def halves(rows: NDArray[Any], layout: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Gate and up rows (axis 0) of one expert's w13, scales, bias or global scales."""
    half = rows.shape[0] // 2
    if layout == "ungated":
        return rows, None
    if layout == "interleaved":
        return rows[0::2], rows[1::2]
    first, second = rows[:half], rows[half:]
    return (first, second) if layout == "gate_up" else (second, first)


def activation(kind: str, g: F64, alpha: float) -> F64:
    with np.errstate(over="ignore"):
        if kind == "silu":
            return g / (1 + np.exp(-alpha * g))
        if kind == "gelu":
            return 0.5 * g * np.vectorize(erfc, otypes=[np.float64])(-g / sqrt(2))
        if kind == "gelu_tanh":
            return g / (1 + np.exp(-2 * sqrt(2 / pi) * (g + 0.044715 * g**3)))  # (1 + tanh z) / 2 = sigmoid(2 z)
    assert kind == "relu2"
    return np.maximum(g, 0) ** 2


@dataclass
class Formula:
    """What the call under test asked for, in the reference's own terms."""

    kind: str = "silu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = inf
    router_on_input: bool = False
    routed_scale: float = 1.0


@dataclass
class Model:
    """Float64 weights of every local expert. up is None when ungated; biases are zero when the model has none."""

    gate: F64  # [E, I, H]
    up: F64 | None
    down: F64  # [E, H, I]
    gate_bias: F64  # [E, I]
    up_bias: F64 | None
    down_bias: F64  # [E, H]


@dataclass
class Stage:
    """A result and the largest error allowed for each of its elements."""

    value: F64
    allowed: F64 = field(repr=False)

    def check(self, got: F64, what: str) -> None:
        excess = np.abs(got - self.value) - self.allowed
        bad = ~(excess <= 0)
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise AssertionError(
                f"{what}: {int(bad.sum())} of {bad.size} elements off; at {at} got {got[at]!r}, "
                f"expected {self.value[at]!r} ± {self.allowed[at]:.3g}"
            )


def first_stage(
    model: Model, formula: Formula, x: F64, local_ids: NDArray[np.int64], weights: F64, dtype: str
) -> Stage:
    """[T, topk, I]: the second GEMM's input; zero, with no error allowed, where the id is -1."""
    tokens, topk = local_ids.shape
    value = np.zeros((tokens, topk, model.gate.shape[1]))
    allowed = np.zeros_like(value)
    tolerance = sum_tolerance(dtype)
    for expert in range(model.gate.shape[0]):
        at = np.nonzero(local_ids == expert)
        if not at[0].size:
            continue
        rows = x[at[0]]
        router = weights[at][:, None] if formula.router_on_input else 1.0
        g = router * (rows @ model.gate[expert].T) + model.gate_bias[expert]
        tg = tolerance * np.abs(router) * (np.abs(rows) @ np.abs(model.gate[expert].T)) + half_ulp(g, "float32")
        f, df = _value_and_spread(formula, np.minimum(g, formula.limit), tg)
        if model.up is None:
            result, error = f, df + FLOOR
        else:
            assert model.up_bias is not None
            u = router * (rows @ model.up[expert].T) + model.up_bias[expert]
            tu = tolerance * np.abs(router) * (np.abs(rows) @ np.abs(model.up[expert].T)) + half_ulp(u, "float32")
            u = np.clip(u, -formula.limit, formula.limit) + formula.beta
            result, error = f * u, (df + FLOOR) * (np.abs(u) + tu) + np.abs(f) * tu
        value[at] = result
        allowed[at] = error + 4e-6 * np.abs(result) + half_ulp(result, dtype)  # 4e-6: float32 exp, tanh, erf
    return Stage(value, allowed)


def _value_and_spread(formula: Formula, g: F64, error: F64) -> tuple[F64, F64]:
    """f(g) and how far f can move when g is off by `error`."""
    f = activation(formula.kind, g, formula.alpha)
    low, high = (activation(formula.kind, g + sign * error, formula.alpha) for sign in (-1, 1))
    return f, np.maximum(np.abs(low - f), np.abs(high - f))


def second_stage(
    model: Model,
    formula: Formula,
    first: F64,
    local_ids: NDArray[np.int64],
    weights: F64,
    dtype: str,
    out_dtype: str,
    reduce: bool = True,
) -> Stage:
    """[T, H] (or [T, topk, H]) from the first stage's own rounded result [T, topk, I] of `dtype`."""
    tokens, topk = local_ids.shape
    terms = np.zeros((tokens, topk, model.down.shape[1]))
    allowed = np.zeros_like(terms)
    tolerance = sum_tolerance(out_dtype if dtype != "float32" else dtype)
    for expert in range(model.down.shape[0]):
        at = np.nonzero(local_ids == expert)
        if not at[0].size:
            continue
        rows = first[at]
        factor = formula.routed_scale * (1.0 if formula.router_on_input else weights[at][:, None])
        bias = model.down_bias[expert]
        terms[at] = factor * (rows @ model.down[expert].T + bias)
        magnitude = np.abs(rows) @ np.abs(model.down[expert].T)
        # Router weight, sum over the top-k and routed scale are a few more float32 roundings.
        roundings = (topk + 3) * 2.0**-24
        allowed[at] = np.abs(factor) * (tolerance * magnitude + roundings * np.abs(bias))
    if reduce:
        terms, allowed = terms.sum(axis=1), allowed.sum(axis=1)
    return Stage(terms, allowed + half_ulp(terms, out_dtype))
