"""fused_moe against the float64 reference, stage by stage, over shapes, formats, dtypes, layouts and activations."""

from __future__ import annotations

import pytest
import torch
from moe_cases import Case, check, make_checkpoint, make_tokens, redecoded

from petit_plugin import _native

SHAPES = [  # experts, top-k, tokens, hidden, intermediate
    (1, 1, 1, 64, 32),
    (1, 1, 33, 128, 96),
    (2, 2, 15, 384, 192),
    (4, 2, 0, 128, 64),
    (4, 2, 2, 704, 384),
    (8, 2, 33, 256, 160),
    (8, 8, 15, 128, 128),
    (16, 4, 1, 192, 64),
    (32, 8, 33, 64, 96),
    (64, 8, 128, 128, 32),
    (64, 6, 2, 160, 64),
    (60, 4, 15, 64, 704),
]
TYPES = [(fmt, dtype) for fmt in ("nvfp4", "mxfp4") for dtype in ("bfloat16", "float16", "float32")]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize(("fmt", "dtype"), TYPES)
def test_shapes(shape: tuple[int, ...], fmt: str, dtype: str) -> None:
    experts, topk, tokens, hidden, intermediate = shape
    case = Case(fmt, dtype, experts, topk, tokens, hidden, intermediate, seed=sum(shape))
    check(make_checkpoint(case), make_tokens(case, drop=0.1))


# Sizes of real models that are no multiple of 128: gpt-oss, Nemotron-H, and tensor-parallel shares of MiniMax,
# Qwen1.5-MoE and others.
@pytest.mark.parametrize(
    "case",
    [
        Case("mxfp4", "bfloat16", 2, 2, 3, 2880, 2880, "interleaved", "swigluoai", bias=True),
        Case("nvfp4", "bfloat16", 2, 1, 17, 2880, 736, "interleaved", "swigluoai", bias=True),
        Case("nvfp4", "float16", 2, 2, 5, 2688, 1856, "ungated", "relu2"),
        Case("nvfp4", "float32", 2, 2, 2, 2688, 1856, "ungated", "relu2_no_mul"),
        *(
            Case(fmt, "bfloat16", 2, 2, 16, 512, size, activation="swigluoai", seed=size)
            for fmt in ("nvfp4", "mxfp4")
            for size in (128, 160, 192, 384, 640, 704)
        ),
    ],
    ids=str,
)
def test_sizes_of_real_models(case: Case) -> None:
    check(make_checkpoint(case), make_tokens(case))


@pytest.mark.parametrize(
    ("activation", "layout"),
    [(name, layout) for name in ("silu", "gelu", "gelu_tanh", "relu2") for layout in ("gate_up", "ungated")]
    + [("swigluoai", "gate_up")],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations(activation: str, layout: str, dtype: str) -> None:
    case = Case("nvfp4", dtype, 4, 2, 20, 256, 96, layout, activation, bias=True, seed=3)
    check(make_checkpoint(case), make_tokens(case))


@pytest.mark.parametrize("parameters", [{"limit": 0.5}, {"alpha": 1.25}, {"alpha": 0.7, "beta": 0.25, "limit": 1.0}])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_parameters_of_silu(activation: str, parameters: dict[str, float]) -> None:
    case = Case("mxfp4", "float32", 4, 2, 20, 256, 96, "interleaved", activation, bias=True, seed=4)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case)
    plain = check(checkpoint, tokens)
    assert not torch.equal(check(checkpoint, tokens, **parameters), plain)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_router_weight_on_input(dtype: str, bias: bool) -> None:
    case = Case("nvfp4", dtype, 4, 1, 33, 128, 64, bias=bias, seed=5)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case, drop=0.2)
    on_input = check(checkpoint, tokens, apply_router_weight_on_input=True)
    assert not torch.equal(on_input, check(checkpoint, tokens))  # silu does not commute with the weight


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("reduce", [True, False])
def test_out_dtype_scaling_and_terms(dtype: str, out_dtype: str, reduce: bool) -> None:
    case = Case("nvfp4", dtype, 8, 4, 16, 128, 64, bias=True, seed=6)
    check(
        make_checkpoint(case),
        make_tokens(case, drop=0.2),
        out_dtype=out_dtype,
        routed_scaling_factor=2.5,
        reduce=reduce,
    )


def test_terms_add_up() -> None:
    case = Case("mxfp4", "float32", 8, 5, 16, 128, 64, seed=7)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case, drop=0.2)
    terms = check(checkpoint, tokens, reduce=False)
    total = torch.zeros_like(terms[:, 0])
    for j in range(case.topk):
        total += terms[:, j]
    assert torch.equal(total, check(checkpoint, tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_that_need_exponents_and_the_exact_kernel(dtype: str) -> None:
    """MXFP4 blocks far outside the fast kernels' window, in one expert only; then a row that spans 200 octaves."""
    case = Case("mxfp4", dtype, 3, 2, 9, 128, 64, seed=8)
    checkpoint = make_checkpoint(case)
    checkpoint.tensors["w13_scale"][1, 5] = torch.tensor([30, 28, 33, 35], dtype=torch.uint8)
    checkpoint.tensors["w2_scale"][1, 7] = torch.tensor([200, 198], dtype=torch.uint8)
    tokens = make_tokens(case)
    far = redecoded(checkpoint)
    experts = far.pack()
    assert experts.w13_row_exponent is not None and experts.w2_row_exponent is not None and not experts.meta.exact
    check(far, tokens, out_dtype="float32", experts=experts)
    checkpoint.tensors["w13_scale"][2, 3] = torch.tensor([5, 120, 180, 125], dtype=torch.uint8)
    exact = redecoded(checkpoint)
    experts = exact.pack()
    assert experts.meta.exact
    check(exact, tokens, out_dtype="float32", experts=experts)


AVAILABLE = [isa for isa in range(4) if _native.isa_supported(isa)]


@pytest.mark.parametrize("isa", AVAILABLE, ids=_native.isa_name)
@pytest.mark.parametrize(("fmt", "dtype"), TYPES)
def test_every_instruction_set_this_cpu_has(isa: int, fmt: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIT_CPU_ISA", _native.isa_name(isa))
    for tokens in (1, 40):  # few rows per expert, many rows per expert
        case = Case(fmt, dtype, 4, 2, tokens, 320, 96, "interleaved", "swigluoai", bias=True, seed=9)
        check(make_checkpoint(case), make_tokens(case, drop=0.1))
