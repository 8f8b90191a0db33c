"""torch.ops.petit.fused_moe and fused_moe_out: opcheck, torch.compile, fakes, strides, out=, and argument errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import Case, make_checkpoint, make_tokens, run_stages

import petit_plugin as pp
from petit_plugin.ops.moe import make_call


def arguments(case: Case, **options: Any) -> tuple[Any, ...]:
    tokens = make_tokens(case, drop=0.1)
    defaults = dict.fromkeys(("alpha", "beta", "limit", "expert_map", "activation_format"))
    defaults |= {"activation": "silu", "apply_router_weight_on_input": False, "reduce": True}
    return make_call(
        *(tokens.x, make_checkpoint(case).pack(), tokens.weights, tokens.ids),
        **{**defaults, "routed_scaling_factor": 1.0, "out_dtype": tokens.x.dtype, **options},
    )


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case("nvfp4", tokens=3), {}),
        (Case("mxfp4", "float32", tokens=0, bias=True), {"reduce": False}),
        (Case("nvfp4", "float16", layout="ungated"), {"activation": "relu2", "out_dtype": torch.float32}),
        (Case("mxfp4"), {"expert_map": torch.tensor([3, -1, 0, 2], dtype=torch.int32)}),
    ],
    ids=str,
)
def test_opcheck(case: Case, options: dict[str, Any]) -> None:
    call = arguments(case, **options)
    torch.library.opcheck(torch.ops.petit.fused_moe.default, tuple(call))
    out = torch.empty(call.out_shape, dtype=call.out_dtype)
    torch.library.opcheck(torch.ops.petit.fused_moe_out.default, (*call, out))


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks_for_any_number_of_tokens(backend: str, dynamo) -> None:
    case = Case("nvfp4", "float32", bias=True, seed=1)
    experts = make_checkpoint(case).pack()

    def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # As a framework does it: the tensors are parameters, the view is made on the fly.
        view = pp.PackedExperts.from_tensors(experts.meta, experts.tensors())
        return pp.fused_moe(x * 2, view, weights, ids, activation="swigluoai", routed_scaling_factor=1.5) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 7, 33, 1, 0):
        t = make_tokens(Case("nvfp4", "float32", tokens=tokens, seed=tokens))
        assert torch.equal(compiled(t.x, t.weights, t.ids), layer(t.x, t.weights, t.ids)), tokens


def test_compiles_with_out(dynamo) -> None:
    case = Case("nvfp4", "float32", seed=2)
    experts, t = make_checkpoint(case).pack(), make_tokens(case)

    def layer(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        pp.fused_moe(x, experts, t.weights, t.ids, out=out)
        return out * 2

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(t.x), layer(t.x))


def test_fake_tensors_carry_shapes_only() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = Case("nvfp4", tokens=6)
    call = arguments(case, reduce=False, out_dtype=torch.float32)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in call]
        y = torch.ops.petit.fused_moe(*fake)
    assert (y.shape, y.dtype, y.stride()) == ((6, 2, 128), torch.float32, (256, 128, 1))


def test_any_strides_of_the_inputs() -> None:
    case = Case("nvfp4", "bfloat16", tokens=9, seed=3)
    experts, t = make_checkpoint(case).pack(), make_tokens(case)
    expected = run_stages(experts, t)[1]
    padded = torch.full((9, 200), torch.nan, dtype=torch.bfloat16)
    padded[:, 40:168] = t.x
    columns = t.x.t().contiguous().t()
    weights, ids = t.weights.t().contiguous().t(), t.ids.t().contiguous().t()
    for x in (padded[:, 40:168], columns):
        assert not x.is_contiguous()
        assert torch.equal(pp.fused_moe(x, experts, weights, ids), expected)
    one = t.x[:1].expand(9, -1)
    assert torch.equal(
        pp.fused_moe(one, experts, t.weights, t.ids), pp.fused_moe(one.contiguous(), experts, t.weights, t.ids)
    )


@pytest.mark.parametrize("reduce", [True, False])
def test_out_is_filled_and_returned(reduce: bool) -> None:
    case = Case("nvfp4", "bfloat16", tokens=9, seed=4)
    experts, t = make_checkpoint(case).pack(), make_tokens(case)
    expected = pp.fused_moe(t.x, experts, t.weights, t.ids, reduce=reduce, out_dtype=torch.float32)
    out = torch.full_like(expected, torch.nan)
    assert pp.fused_moe(t.x, experts, t.weights, t.ids, reduce=reduce, out=out) is out  # its dtype is the out_dtype
    assert torch.equal(out, expected)


def test_out_may_be_x_but_not_a_part_of_it() -> None:
    case = Case("nvfp4", "bfloat16", tokens=9, seed=5)
    experts, t = make_checkpoint(case).pack(), make_tokens(case)
    expected = pp.fused_moe(t.x, experts, t.weights, t.ids)
    pool = torch.cat([t.x, torch.zeros(1, case.hidden, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="out overlaps x"):
        pp.fused_moe(pool[:9], experts, t.weights, t.ids, out=pool[1:])
    assert pp.fused_moe(t.x, experts, t.weights, t.ids, out=t.x) is t.x
    assert torch.equal(t.x, expected)


@pytest.mark.parametrize("reduce", [True, False])
def test_out_over_memory_that_is_read_is_refused(reduce: bool) -> None:
    """Also when torch sees different storages: slices of one NumPy array."""
    case = Case("nvfp4", "float32", tokens=4, topk=1)
    experts, t = make_checkpoint(case).pack(), make_tokens(case)
    expert_map = torch.arange(case.experts)
    expected = pp.fused_moe(t.x, experts, t.weights, t.ids, expert_map=expert_map, reduce=reduce)
    size = expected.numel()
    for name in ("x", "topk_weights", "topk_ids", "expert_map"):
        given = {"x": t.x, "topk_weights": t.weights, "topk_ids": t.ids, "expert_map": expert_map}
        pool = np.zeros(3 * size, np.float32)
        tensor = given[name]
        last = size - 1  # the first four bytes of the tensor are the last of out
        part = pool[last:].view(np.uint8)[: tensor.nbytes].view(tensor.numpy().dtype).reshape(tensor.shape)
        part[...] = tensor.numpy()
        given[name] = torch.from_numpy(part)
        out = torch.from_numpy(pool[:size]).view(expected.shape)
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            pp.fused_moe(**given, experts=experts, reduce=reduce, out=out)
        assert torch.equal(given[name], tensor), "nothing was written"
        beside = torch.from_numpy(pool[2 * size :]).view(expected.shape)
        assert torch.equal(pp.fused_moe(**given, experts=experts, reduce=reduce, out=beside), expected)


def test_gradients_are_refused_not_ignored() -> None:
    case = Case("nvfp4", "float32", tokens=3)
    experts, t = make_checkpoint(case).pack(), make_tokens(case)
    expected = pp.fused_moe(t.x, experts, t.weights, t.ids)
    for name in ("x", "topk_weights"):
        given = {"x": t.x, "topk_weights": t.weights}
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(ValueError, match=rf"{name} requires a gradient.*no_grad.*{name}\.detach"):
            pp.fused_moe(**given, experts=experts, topk_ids=t.ids)
        with torch.no_grad():
            y = pp.fused_moe(**given, experts=experts, topk_ids=t.ids)
        assert torch.equal(y, expected) and not y.requires_grad


def test_refused_arguments() -> None:
    case = Case("nvfp4", "bfloat16", tokens=4, topk=2)
    experts, t = make_checkpoint(case).pack(), make_tokens(case)
    good = {"x": t.x, "experts": experts, "topk_weights": t.weights, "topk_ids": t.ids}
    for change, error, message in (
        ({"experts": {}}, TypeError, "experts must be PackedExperts"),
        ({"x": t.x.double()}, TypeError, "x is torch.float64; expected bfloat16, float16 or float32"),
        ({"x": t.x[:, :64]}, ValueError, "x has shape [4, 64]; these experts need [tokens, 128]"),
        ({"x": t.x[None]}, ValueError, "x has shape [1, 4, 128]"),
        ({"topk_ids": t.ids.float()}, TypeError, "topk_ids is torch.float32; expected int32 or int64"),
        ({"topk_ids": t.ids[:3]}, ValueError, "topk_ids has shape [3, 2]; x with 4 tokens needs [4, topk]"),
        (
            {"topk_weights": t.weights.bfloat16()},
            TypeError,
            "topk_weights is torch.bfloat16; router weights are float32",
        ),
        ({"topk_weights": t.weights[:, :1]}, ValueError, "topk_weights has shape [4, 1] but topk_ids [4, 2]"),
        ({"expert_map": torch.ones(4)}, ValueError, "expert_map is torch.float32 [4]"),
        ({"apply_router_weight_on_input": True}, ValueError, "apply_router_weight_on_input needs topk = 1, got 2"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64"),
        ({"routed_scaling_factor": float("nan")}, ValueError, "routed_scaling_factor is nan"),
        ({"activation": "situ"}, ValueError, "activation 'situ' is unknown"),
        ({"activation_format": "mxfp4"}, ValueError, "activation_format is 'mxfp4'; the CPU multiplies"),
        ({"out": torch.empty(4, 127)}, ValueError, "out is torch.float32 [4, 127] on cpu"),
        ({"out": torch.empty(128, 4).t()}, ValueError, "expected contiguous torch.float32 [4, 128]"),
        ({"out": torch.empty(4, 128), "out_dtype": torch.float16}, ValueError, "expected contiguous torch.float16"),
        ({"x": t.x.float().numpy()}, TypeError, "x must be a torch.Tensor, got ndarray; convert it"),
        ({"x": t.x.to_sparse()}, TypeError, "x is a torch.sparse_coo tensor; pass a dense one"),
        ({"topk_weights": [[1.0]]}, TypeError, "topk_weights must be a torch.Tensor, got list"),
        ({"topk_ids": [[1]]}, TypeError, "topk_ids must be a torch.Tensor, got list"),
        ({"expert_map": [0, 1]}, TypeError, "expert_map must be a torch.Tensor, got list"),
        ({"expert_map": torch.zeros(0, dtype=torch.int64)}, ValueError, "expert_map is empty"),
        ({"out": 5}, TypeError, "out must be a torch.Tensor, got int"),
        ({"activation": None}, TypeError, "activation must be a string, got NoneType; there are silu"),
        ({"activation_format": 8}, TypeError, "activation_format must be a string or None, got int"),
        ({"out_dtype": "float32"}, TypeError, "out_dtype must be a torch.dtype or None, got str"),
        ({"routed_scaling_factor": None}, TypeError, "routed_scaling_factor must be a Python number, got NoneType"),
        ({"routed_scaling_factor": 1e39}, ValueError, "routed_scaling_factor is 1e+39; it must be a finite"),
        ({"routed_scaling_factor": -1e-60}, ValueError, "routed_scaling_factor is -1e-60, which is zero in float32"),
        ({"alpha": "1"}, TypeError, "alpha must be a Python number, got str"),
        ({"alpha": 3.5e38}, ValueError, "alpha is 3.5e+38"),
        ({"limit": 1e39}, ValueError, "limit is 1e+39; it must be a finite"),
        ({"topk_ids": t.ids.to("meta")}, ValueError, "topk_ids is on meta"),
    ):
        with pytest.raises(error) as raised:
            pp.fused_moe(**{**good, **change})
        assert message in str(raised.value), change


def test_the_operator_checks_packed_tensors_itself() -> None:
    """Frameworks call it with their own parameters; a wrong one must not reach a raw pointer."""
    call = arguments(Case("mxfp4", bias=True))
    for change, message in (
        ({"w2_weight": call.w2_weight[:3]}, "w2_weight is torch.uint8"),
        ({"w13_row_scale": call.w13_row_scale.double()}, "w13_row_scale is torch.float64"),
        ({"w2_bias": call.w2_bias[:, :-1]}, "w2_bias is torch.float32"),
        ({"num_experts": 5}, "w13_weight is torch.uint8"),
        ({"hidden": 256}, "have contiguous"),
        ({"arch": "gfx1100"}, "'gfx1100'"),
        ({"format": "fp8"}, "format is 'fp8'"),
        ({"limit": 0.0}, "limit is 0.0: it must be positive"),
        ({"limit": float("nan")}, "limit is nan"),
        ({"alpha": 1e39}, "alpha is 1e+39"),
        ({"beta": float("inf")}, "beta is inf"),
        ({"expert_map": torch.zeros(0, dtype=torch.int32)}, "expert_map is empty"),
        ({"activation": "swigluoai"}, "the operator takes silu, gelu, gelu_tanh, relu2"),
    ):
        with pytest.raises(ValueError) as raised:
            torch.ops.petit.fused_moe(*call._replace(**change))
        assert message in str(raised.value), change
