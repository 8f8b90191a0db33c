"""Names and parameters of the activations, and their values through the real operator on single numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import petit_plugin as pp
from petit_plugin.ops.moe_activation import Activation, resolve_activation

OAI = Activation("silu", 1.702, 1.0, 7.0)
PLAIN = (1.0, 0.0, math.inf)


@pytest.mark.parametrize(
    ("name", "gated", "parameters", "expected"),
    [
        ("silu", True, {}, Activation("silu", *PLAIN)),
        ("swish", False, {}, Activation("silu", *PLAIN)),
        ("silu_no_mul", False, {}, Activation("silu", *PLAIN)),
        ("silu", True, {"limit": 10}, Activation("silu", 1.0, 0.0, 10.0)),
        ("gelu", True, {}, Activation("gelu", *PLAIN)),
        ("gelu_tanh", True, {}, Activation("gelu_tanh", *PLAIN)),
        ("gelu_pytorch_tanh", True, {}, Activation("gelu_tanh", *PLAIN)),
        ("relu2", True, {}, Activation("relu2", *PLAIN)),
        ("relu2_no_mul", False, {}, Activation("relu2", *PLAIN)),
        ("swigluoai", True, {}, OAI),
        ("swigluoai", True, {"limit": 5.0}, OAI._replace(limit=5.0)),
        ("swigluoai", True, {"limit": math.inf}, OAI._replace(limit=math.inf)),
        ("swigluoai_uninterleave", True, {"alpha": 1.702, "beta": 1, "limit": 7}, OAI),
    ],
)
def test_names(name: str, gated: bool, parameters: dict[str, float], expected: Activation) -> None:
    assert resolve_activation(name, gated=gated, **parameters) == expected


@pytest.mark.parametrize(
    ("name", "gated", "parameters", "message"),
    [
        ("situ", True, {}, "activation 'situ' is unknown; there are silu, gelu, gelu_tanh, relu2, swigluoai"),
        ("relu2_no_mul", True, {}, "'relu2_no_mul' is for ungated experts"),
        ("swigluoai", False, {}, "'swigluoai' needs gate and up rows"),
        ("gelu", True, {"limit": 7.0}, "'gelu' takes no limit"),
        ("relu2", True, {"alpha": 1.0, "beta": 0.0}, "'relu2' takes no alpha, beta"),
        ("silu", False, {"beta": 1.0}, "beta and limit belong to gate and up rows"),
        ("silu", False, {"limit": 1.0}, "beta and limit belong to gate and up rows"),
        ("swigluoai_uninterleave", True, {"limit": 7.0}, "pass alpha, beta and limit"),
        ("silu", True, {"limit": 0.0}, "limit is 0.0: it must be positive"),
        ("silu", True, {"limit": math.nan}, "limit is nan"),
        ("silu", True, {"limit": 1e-60}, "limit is 1e-60, which is zero in float32"),
        ("silu", True, {"limit": -math.inf}, "limit is -inf"),
        ("silu", True, {"beta": 1e39}, "beta is 1e+39; it must be a finite number in the range of float32"),
        ("silu", True, {"alpha": math.inf}, "alpha is inf"),
    ],
)
def test_refused(name: str, gated: bool, parameters: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_activation(name, gated=gated, **parameters)
    assert message in str(error.value)


def through_the_operator(
    gates: list[float], ups: list[float] | None, x: float = 1.0, w2_codes: int | None = None, **options: object
) -> np.ndarray:
    """act(g * x, u * x) for up to 16 pairs: one non-zero column in w13, w2 the identity (or one code byte)."""
    count = len(gates)
    gate, up = np.zeros(16, np.float32), np.zeros(16, np.float32)
    gate[:count] = gates
    up[:count] = ups or 0
    rows = gate if ups is None else np.concatenate([gate, up])
    w13 = torch.zeros(1, len(rows), 8, dtype=torch.uint8)
    w13[0, :, 0] = 0x02  # code 2 is 1.0
    identity = torch.zeros(1, 16, 8, dtype=torch.uint8)
    for i in range(16):
        identity[0, i, i // 2] = 0x02 << (4 * (i % 2))
    if w2_codes is not None:
        identity.fill_(w2_codes)
    one = torch.full((1, 16, 1), 0x38, dtype=torch.uint8)  # E4M3 1.0
    experts = pp.pack_experts(
        *("nvfp4", w13, torch.full((1, len(rows), 1), 0x38, dtype=torch.uint8), identity, one),
        w13_global_scale=torch.from_numpy(rows)[None],
        w2_global_scale=1.0,
        layout="ungated" if ups is None else "gate_up",
    )
    row = torch.zeros(1, 16)
    row[0, 0] = x
    y = pp.fused_moe(row, experts, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), reduce=False, **options)
    return y[0, 0, :count].numpy()


def test_swigluoai_clamps_as_gpt_oss_does() -> None:
    """g = 10, u = -9 is clamped on both sides; g = -10, u = 9 only above: the gate has no lower limit."""
    gates, ups = [10.0, -10.0, 7.0, 7.5, 0.0, 3.0], [-9.0, 9.0, 7.0, 7.5, 1.0, -7.5]
    got = through_the_operator(gates, ups, activation="swigluoai")
    expected = []
    for g, u in zip(gates, ups, strict=True):
        g, u = min(g, 7.0), max(-7.0, min(u, 7.0))
        expected.append(g / (1 + math.exp(-1.702 * g)) * (u + 1))
    np.testing.assert_allclose(got, expected, rtol=5e-7)
    assert expected[0] == pytest.approx(-42.0, rel=1e-4) and expected[1] == pytest.approx(-3.25e-6, rel=1e-2)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_ungated_values_match_torch(activation: str) -> None:
    values = [-90.0, -30.0, -9.0, -5.5, -3.0, -1.0, -0.25, -1e-3, 0.0, 1e-6, 0.5, 2.0, 5.5, 30.0, 1e3, 1e4]
    x = torch.tensor(values, dtype=torch.float32).double()
    expected = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu2": lambda v: torch.relu(v) ** 2,
    }[activation](x)
    got = through_the_operator(values, None, activation=activation)
    np.testing.assert_allclose(got, expected.numpy(), rtol=4e-6, atol=1e-6)
    np.testing.assert_allclose(got[6:], expected.numpy()[6:], rtol=5e-7)


@pytest.mark.parametrize(
    ("activation", "x", "expected"),
    [
        ("silu", math.inf, math.inf),
        ("silu", -math.inf, math.nan),  # -inf * sigmoid(-inf) = -inf * 0
        ("gelu", math.inf, math.inf),
        ("gelu_tanh", math.inf, math.inf),
        ("relu2", math.inf, math.inf),
        ("relu2", -math.inf, 0.0),
        *((name, math.nan, math.nan) for name in ("silu", "gelu", "gelu_tanh", "relu2")),
    ],
)
def test_special_values_are_what_float32_gives(activation: str, x: float, expected: float) -> None:
    """16 rows of w13 see x, w2 adds the 16 results up: no zero weight meets an infinity."""
    got = through_the_operator([1.0] * 16, None, x=x, w2_codes=0x22, activation=activation)
    np.testing.assert_array_equal(got, np.full(16, expected, np.float32))


def test_swigluoai_of_special_values() -> None:
    at_limit = 16 * 7 / (1 + math.exp(-1.702 * 7)) * 8
    got = through_the_operator([1.0] * 16, [1.0] * 16, x=math.inf, w2_codes=0x22, activation="swigluoai")
    np.testing.assert_allclose(got, at_limit, rtol=1e-6)
    got = through_the_operator([1.0] * 16, [1.0] * 16, x=math.nan, w2_codes=0x22, activation="swigluoai")
    assert np.isnan(got).all()  # a clamp must not turn NaN into a number
