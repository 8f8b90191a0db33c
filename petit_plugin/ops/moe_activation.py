"""The activations `fused_moe` knows: names as models and frameworks spell them, and their parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

from petit_plugin._moe_call import KINDS
from petit_plugin.packing.validate import check_float32


class Activation(NamedTuple):
    """A resolved activation: f(g) * (u + beta) with g <= limit and |u| <= limit, or f(g) when there is no gate.

    kind "silu" is f(g) = g * sigmoid(alpha * g); "gelu" the exact one (erf); "gelu_tanh" its tanh approximation;
    "relu2" max(g, 0)^2. limit is infinity when nothing is clamped.
    """

    kind: str
    alpha: float
    beta: float
    limit: float


_ALIASES = {
    "swish": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu_squared": "relu2",
}
_UNINTERLEAVED = "swigluoai_uninterleave"
_NO_MUL = "_no_mul"
NAMES = (*KINDS, "swigluoai", _UNINTERLEAVED, *_ALIASES)


def resolve_activation(
    name: str, *, gated: bool, alpha: float | None = None, beta: float | None = None, limit: float | None = None
) -> Activation:
    """Give the activation that `name` and its parameters mean for gated or ungated experts.

    "swigluoai" is gpt-oss's: silu with alpha 1.702, beta 1, limit 7 unless given. "swigluoai_uninterleave" is the same
    formula but has no agreed defaults, so all three must be given. "silu" takes the parameters too (alpha 1, beta 0,
    no limit unless given: DeepSeek and MiniMax clamp it). A "_no_mul" suffix says that the experts are ungated.
    Ungated experts take neither beta nor limit.

    Raises TypeError or ValueError for an unknown name, numbers that float32 cannot hold, parameters the activation
    would have to ignore, and a gated name on ungated experts or the reverse.
    """
    if not isinstance(name, str):
        raise TypeError(f"activation must be a string, got {type(name).__name__}; there are {', '.join(NAMES)}")
    base = name.removesuffix(_NO_MUL)
    oai = base in ("swigluoai", _UNINTERLEAVED)
    kind = "silu" if oai else _ALIASES.get(base, base)
    if kind not in KINDS:
        raise ValueError(
            f"activation {name!r} is unknown; there are {', '.join(NAMES)} (also with {_NO_MUL!r} appended)"
        )
    if base != name and gated:
        raise ValueError(f"activation {name!r} is for ungated experts, but these were packed with gate and up rows")
    if (oai or base in ("swiglu", "geglu")) and not gated:
        raise ValueError(f"activation {name!r} needs gate and up rows, but these experts were packed 'ungated'")
    given = {key: value for key, value in (("alpha", alpha), ("beta", beta), ("limit", limit)) if value is not None}
    if kind != "silu" and given:
        raise ValueError(f"activation {name!r} takes no {', '.join(given)}; leave it None")
    if not gated and (beta is not None or limit is not None):
        raise ValueError(
            "beta and limit belong to gate and up rows, which ungated experts do not have; leave them None"
        )
    if base == _UNINTERLEAVED and len(given) < 3:
        raise ValueError(f"activation {name!r} has no defaults: pass alpha, beta and limit (gpt-oss: 1.702, 1, 7)")
    for key, value in given.items():
        if key == "limit":
            check_limit(value)
        else:
            check_float32(key, value)
    defaults = {"alpha": 1.702, "beta": 1.0, "limit": 7.0} if oai else {"alpha": 1.0, "beta": 0.0, "limit": math.inf}
    values = defaults | {key: float(value) for key, value in given.items()}
    return Activation(kind, values["alpha"], values["beta"], values["limit"])


def check_limit(limit: float) -> None:
    """Positive, and a number of float32 or infinity (no clamping)."""
    if limit == math.inf:
        return
    check_float32("limit", limit)
    if limit <= 0:
        raise ValueError(f"limit is {limit}: it must be positive (None for no clamping)")
