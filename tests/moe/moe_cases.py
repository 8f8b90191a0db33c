"""Random MoE problems: checkpoint tensors, routing, and the same problem for the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from fixtures.oracle import dequantize_mxfp4, dequantize_nvfp4
from moe_reference import Formula, Model, Stage, first_stage, halves, second_stage

import petit_plugin as pp
from petit_plugin.backends import cpu_moe
from petit_plugin.backends.moe import moe_backend_for
from petit_plugin.ops.moe import make_call
from petit_plugin.ops.moe_activation import resolve_activation

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
END_TO_END = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 5e-6}  # in norm, both stages
GROUPS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True)
class Case:
    fmt: str = "nvfp4"
    dtype: str = "bfloat16"
    experts: int = 4
    topk: int = 2
    tokens: int = 5
    hidden: int = 128
    intermediate: int = 64
    layout: str = "gate_up"
    activation: str = "silu"
    bias: bool = False
    seed: int = 0

    def __str__(self) -> str:
        bias = "-bias" if self.bias else ""
        return (
            f"{self.fmt}-{self.dtype}-E{self.experts}k{self.topk}T{self.tokens}-H{self.hidden}I{self.intermediate}-"
            f"{self.layout}-{self.activation}{bias}"
        )


@dataclass
class Checkpoint:
    """pack_experts' arguments, and the float64 weights they stand for."""

    case: Case
    tensors: dict[str, torch.Tensor]
    model: Model = field(repr=False)

    def pack(self, **options: Any) -> pp.PackedExperts:
        return pp.pack_experts(self.case.fmt, layout=self.case.layout, **{**self.tensors, **options})


def random_codes(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def random_scales(rng: np.random.Generator, fmt: str, *shape: int) -> torch.Tensor:
    """Bytes over the usual range, with zeros, E4M3 subnormals and a factor 2^12 between blocks."""
    if fmt == "mxfp4":
        return torch.from_numpy(rng.integers(113, 125, shape, dtype=np.uint8))
    scales = rng.integers(0x28, 0x58, shape, dtype=np.uint8)
    odd = rng.random(shape) < 0.1
    scales[odd] = rng.integers(0, 8, int(odd.sum()), dtype=np.uint8)
    return torch.from_numpy(scales)


def decode(fmt: str, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor | None) -> np.ndarray:
    """[E, N, K] float64; rows are the global scales, [E, N]."""
    if fmt == "mxfp4":
        return dequantize_mxfp4(codes.numpy(), scales.numpy())
    assert rows is not None
    return dequantize_nvfp4(codes.numpy(), scales.numpy(), rows.double().numpy())


def make_checkpoint(case: Case) -> Checkpoint:
    rng = np.random.default_rng([case.seed, 1])
    e, h, i, g = case.experts, case.hidden, case.intermediate, GROUPS[case.fmt]
    rows = i if case.layout == "ungated" else 2 * i
    tensors = {
        "w13": random_codes(rng, e, rows, h // 2),
        "w13_scale": random_scales(rng, case.fmt, e, rows, h // g),
        "w2": random_codes(rng, e, h, i // 2),
        "w2_scale": random_scales(rng, case.fmt, e, h, i // g),
    }
    factors: dict[str, torch.Tensor | None] = {"w13": None, "w2": None}
    if case.fmt == "nvfp4":
        # One per row, so that a permutation that forgets them shows; about 1 / sqrt(K) to keep values near 1.
        for part, n, k in (("w13", rows, h), ("w2", h, i)):
            factor = torch.from_numpy(rng.uniform(0.05, 0.2, (e, n)).astype(np.float32)) / k**0.5
            tensors[f"{part}_global_scale"] = factors[part] = factor
    if case.bias:
        tensors["w13_bias"] = torch.from_numpy(rng.standard_normal((e, rows)).astype(np.float32)).bfloat16()
        tensors["w2_bias"] = torch.from_numpy(rng.standard_normal((e, h)).astype(np.float32))
    return Checkpoint(case, tensors, model_of(case, tensors))


def model_of(case: Case, tensors: dict[str, torch.Tensor]) -> Model:
    """The float64 weights of checkpoint tensors whose global scales are per row."""
    w13, w2 = (
        decode(case.fmt, tensors[part], tensors[f"{part}_scale"], tensors.get(f"{part}_global_scale"))
        for part in ("w13", "w2")
    )
    e, rows = w13.shape[:2]
    bias13 = tensors.get("w13_bias", torch.zeros(e, rows)).double().numpy()
    bias2 = tensors.get("w2_bias", torch.zeros(e, case.hidden)).double().numpy()
    split = [halves(w, case.layout) for w in w13]
    split_bias = [halves(b, case.layout) for b in bias13]
    gated = case.layout != "ungated"
    return Model(
        gate=np.stack([gate for gate, _ in split]),
        up=np.stack([up for _, up in split]) if gated else None,
        down=w2,
        gate_bias=np.stack([gate for gate, _ in split_bias]),
        up_bias=np.stack([up for _, up in split_bias]) if gated else None,
        down_bias=bias2,
    )


def redecoded(checkpoint: Checkpoint) -> Checkpoint:
    """The same, with the float64 weights of tensors that a test has changed."""
    return replace(checkpoint, model=model_of(checkpoint.case, checkpoint.tensors))


@dataclass
class Tokens:
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def make_tokens(case: Case, *, drop: float = 0.0, ids_dtype: torch.dtype = torch.int64) -> Tokens:
    """Random tokens; every token's ids differ where there are enough experts; `drop` of them are -1."""
    rng = np.random.default_rng([case.seed, 2])
    x = torch.from_numpy(rng.standard_normal((case.tokens, case.hidden)).astype(np.float32)).to(DTYPES[case.dtype])
    if case.topk <= case.experts:
        ids = np.argsort(rng.random((case.tokens, case.experts)), axis=1)[:, : case.topk].copy()
    else:
        ids = rng.integers(0, case.experts, (case.tokens, case.topk))
    ids[rng.random(ids.shape) < drop] = -1
    weights = rng.random(ids.shape).astype(np.float32)
    return Tokens(x, torch.from_numpy(weights), torch.from_numpy(ids).to(ids_dtype))


def formula_of(activation: str, layout: str, **options: Any) -> Formula:
    parameters = {key: options.pop(key) for key in ("alpha", "beta", "limit") if key in options}
    act = resolve_activation(activation, gated=layout != "ungated", **parameters)
    return Formula(act.kind, act.alpha, act.beta, act.limit, **options)


def poisoned_workspace(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # float NaN, index -1


def run_stages(
    experts: pp.PackedExperts, tokens: Tokens, out_dtype: torch.dtype | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU backend's own intermediate [T, topk, I] and result, both poisoned first."""
    defaults = dict.fromkeys(("alpha", "beta", "limit", "expert_map", "activation_format"))
    defaults |= {"activation": "silu", "apply_router_weight_on_input": False, "reduce": True}
    call = make_call(
        *(tokens.x, experts, tokens.weights, tokens.ids),
        **{**defaults, "routed_scaling_factor": 1.0, "out_dtype": out_dtype or tokens.x.dtype, **options},
    )
    intermediate = torch.zeros(*tokens.ids.shape, experts.meta.intermediate, dtype=tokens.x.dtype)
    out = torch.full(call.out_shape, torch.nan, dtype=call.out_dtype)
    original, cpu_moe.allocate_workspace = cpu_moe.allocate_workspace, poisoned_workspace
    try:
        moe_backend_for("cpu").fused_moe(call, out, intermediate)
    finally:
        cpu_moe.allocate_workspace = original
    return intermediate, out


def check(
    checkpoint: Checkpoint,
    tokens: Tokens,
    local_ids: torch.Tensor | None = None,
    out_dtype: str | None = None,
    experts: pp.PackedExperts | None = None,
    **options: Any,
) -> torch.Tensor:
    """Run a problem and hold both stages to the numerics contract. Returns the result."""
    case = checkpoint.case
    out_dtype = out_dtype or case.dtype
    reduce = options.get("reduce", True)
    parameters = {key: options[key] for key in ("alpha", "beta", "limit") if key in options}
    formula = replace(
        formula_of(case.activation, case.layout, **parameters),
        router_on_input=options.get("apply_router_weight_on_input", False),
        routed_scale=options.get("routed_scaling_factor", 1.0),
    )
    ids = (tokens.ids if local_ids is None else local_ids).long().numpy()
    weights = tokens.weights.double().numpy()
    packed = experts if experts is not None else checkpoint.pack()
    intermediate, out = run_stages(packed, tokens, DTYPES[out_dtype], activation=case.activation, **options)
    first: Stage = first_stage(checkpoint.model, formula, tokens.x.double().numpy(), ids, weights, case.dtype)
    first.check(intermediate.double().numpy(), "first stage")
    own = intermediate.double().numpy()
    second: Stage = second_stage(checkpoint.model, formula, own, ids, weights, case.dtype, out_dtype, reduce)
    second.check(out.double().numpy(), "second stage")
    if reduce and out.numel() >= 1024:
        end = second_stage(checkpoint.model, formula, first.value, ids, weights, case.dtype, out_dtype)
        error = np.linalg.norm(out.double().numpy() - end.value) / np.linalg.norm(end.value)
        assert error <= max(END_TO_END[case.dtype], END_TO_END[out_dtype])
    return out
