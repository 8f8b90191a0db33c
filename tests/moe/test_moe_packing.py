"""pack_experts: layouts, global scales, biases, storage, round trips and what it refuses."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_cases import Case, check, decode, make_checkpoint, make_tokens, redecoded, run_stages
from moe_reference import halves

import petit_plugin as pp

ORDERS = ("gate_up", "up_gate", "interleaved")


def reordered(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """gate_up tensors as a checkpoint of another layout would hold them."""

    def rows(t: torch.Tensor) -> torch.Tensor:
        half = t.shape[1] // 2
        gate, up = t[:, :half], t[:, half:]
        if layout == "up_gate":
            return torch.cat([up, gate], 1)
        return torch.stack([gate, up], 2).flatten(1, 2) if layout == "interleaved" else t

    return {name: rows(t) if name.startswith("w13") else t for name, t in tensors.items()}


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("intermediate", [96, 160, 736])  # 736: 1472 rows, halves that are no multiple of 16 rows
def test_every_layout_of_one_weight_packs_to_the_same_bytes(fmt: str, intermediate: int) -> None:
    case = Case(fmt, "bfloat16", 3, 2, 7, 128, intermediate, bias=True, seed=intermediate)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case)
    packed = {layout: pp.pack_experts(fmt, layout=layout, **reordered(checkpoint.tensors, layout)) for layout in ORDERS}
    _, expected = run_stages(packed["gate_up"], tokens)
    for layout, experts in packed.items():
        assert experts.meta.layout == layout
        for name, tensor in packed["gate_up"].tensors().items():
            assert torch.equal(experts.tensors()[name], tensor), (layout, name)
        assert torch.equal(run_stages(experts, tokens)[1], expected)


@pytest.mark.parametrize("layout", [*ORDERS, "ungated"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_dequantize_and_unpack(fmt: str, layout: str) -> None:
    case = Case(fmt, "bfloat16", 3, 1, 1, 160, 96, layout, seed=1)
    checkpoint = make_checkpoint(case)
    experts, tensors = checkpoint.pack(), checkpoint.tensors
    expected = {
        part: decode(fmt, tensors[part], tensors[f"{part}_scale"], tensors.get(f"{part}_global_scale"))
        for part in ("w13", "w2")
    }
    w13, w2 = experts.dequantize(torch.float64, checkpoint_order=True)
    np.testing.assert_array_equal(w13.numpy(), expected["w13"])
    np.testing.assert_array_equal(w2.numpy(), expected["w2"])
    packed_order, _ = experts.dequantize(torch.float64)
    for e in range(3):
        rows = np.concatenate([half for half in halves(expected["w13"][e], layout) if half is not None])
        np.testing.assert_array_equal(packed_order[e].numpy(), rows)
        unpacked = experts.expert(e, "w2").unpack()
        assert torch.equal(unpacked.weight, tensors["w2"][e])
        assert torch.equal(unpacked.weight_scale.view(torch.uint8), tensors["w2_scale"][e])
    with pytest.raises(IndexError, match="expert 3 of 3"):
        experts.expert(3, "w2")


@pytest.mark.parametrize("layout", ORDERS)
def test_gate_and_up_keep_their_own_global_scale(layout: str) -> None:
    """[E, 2]: gate 1e-3, up 1e-2, in the order of the checkpoint's halves. [E] is the same for both."""
    case = Case("nvfp4", "float32", 2, 2, 9, 128, 64, layout, seed=2)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case)
    gate, up = torch.tensor([1e-3, 2e-3]), torch.tensor([1e-2, 3e-2])
    pair = torch.stack([up, gate] if layout == "up_gate" else [gate, up], 1)
    rows = 2 * case.intermediate
    per_row = pair.repeat(1, rows // 2) if layout == "interleaved" else pair.repeat_interleave(rows // 2, 1)
    checkpoint.tensors["w13_global_scale"] = per_row
    checkpoint = redecoded(checkpoint)
    by_pair = checkpoint.pack(w13_global_scale=pair)
    check(checkpoint, tokens, experts=by_pair)
    assert torch.equal(by_pair.w13_row_scale, checkpoint.pack().w13_row_scale)
    one = checkpoint.pack(w13_global_scale=gate)
    both = checkpoint.pack(w13_global_scale=torch.stack([gate, gate], 1))
    assert one.w13_row_scale.shape == (2, 1) and one.nbytes < both.nbytes
    checkpoint.tensors["w13_global_scale"] = gate[:, None].expand(2, rows)
    check(redecoded(checkpoint), tokens, experts=one)
    for a, b in zip(one.dequantize(torch.float64), both.dequantize(torch.float64), strict=True):
        assert torch.equal(a, b)


def test_out_with_one_scale_takes_rows_that_agree() -> None:
    """Reload in place: nothing is written when an expert's rows need scales of their own."""
    checkpoint = make_checkpoint(Case(experts=3))
    rows = checkpoint.tensors["w13"].shape[1]
    one = torch.tensor([0.5, 2.0, 1.0])
    experts = checkpoint.pack(w13_global_scale=one)
    before = {name: tensor.clone() for name, tensor in experts.tensors().items()}
    several = one[:, None].repeat(1, rows)
    several[2, 5] = 3.0
    with pytest.raises(ValueError, match=r"w13_global_scale differs from row to row in experts \[2\].*without out="):
        checkpoint.pack(w13_global_scale=several, out=experts)
    assert all(torch.equal(tensor, before[name]) for name, tensor in experts.tensors().items())
    checkpoint.pack(w13_global_scale=(2 * one)[:, None].expand(3, rows), out=experts)
    assert torch.equal(experts.w13_row_scale[:, 0], 2 * one)


def test_scalar_global_scales() -> None:
    checkpoint = make_checkpoint(Case(experts=3))
    expected = checkpoint.pack(w13_global_scale=torch.full((3,), 0.25), w2_global_scale=torch.full((3,), 0.5))
    for shape in ((), (1,)):
        experts = checkpoint.pack(w13_global_scale=torch.full(shape, 0.25), w2_global_scale=0.5)
        for name, tensor in expected.tensors().items():
            assert torch.equal(experts.tensors()[name], tensor), name


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_typed_scales_and_transposed_storage(fmt: str) -> None:
    """float8 tensors and their bytes are the same; so are BMM-ordered banks given as transposed views."""
    checkpoint = make_checkpoint(Case(fmt, experts=2, seed=3))
    t, expected = checkpoint.tensors, checkpoint.pack()
    dtype = torch.float8_e4m3fn if fmt == "nvfp4" else torch.float8_e8m0fnu
    typed = checkpoint.pack(w13_scale=t["w13_scale"].view(dtype), w2_scale=t["w2_scale"].view(dtype))
    views = checkpoint.pack(
        **{
            name: t[name].transpose(1, 2).contiguous().transpose(1, 2)
            for name in ("w13", "w13_scale", "w2", "w2_scale")
        }
    )
    for experts in (typed, views):
        for name, tensor in expected.tensors().items():
            assert torch.equal(experts.tensors()[name], tensor), name


def test_tensors_round_trip_without_copies() -> None:
    experts = make_checkpoint(Case("mxfp4", bias=True)).pack()
    again = pp.PackedExperts.from_tensors(experts.meta, experts.tensors())
    assert {n: t.data_ptr() for n, t in again.tensors().items()} == {
        n: t.data_ptr() for n, t in experts.tensors().items()
    }
    tensors = experts.tensors()
    with pytest.raises(ValueError, match=r"missing tensors \['w2_scale'\], unknown tensors \['w3'\]"):
        pp.PackedExperts.from_tensors(
            experts.meta, {("w3" if name == "w2_scale" else name): t for name, t in tensors.items()}
        )
    with pytest.raises(ValueError, match=r"w2_scale is torch\.uint8"):
        pp.PackedExperts.from_tensors(experts.meta, {**tensors, "w2_scale": tensors["w2_scale"][..., :8]})


def test_exact_experts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Three of six, one of them in both banks; again when packed into the same storage."""
    checkpoint = make_checkpoint(Case("mxfp4", experts=6))
    wide = torch.tensor([5, 200], dtype=torch.uint8)
    for part, expert in (("w13", 1), ("w13", 4), ("w2", 2), ("w2", 4)):
        checkpoint.tensors[part][expert, 7] = 0x22
        checkpoint.tensors[f"{part}_scale"][expert, 7, :2] = wide
    with caplog.at_level(logging.INFO, logger="petit_plugin"):
        experts = checkpoint.pack(name="layers.3.experts")
        again = checkpoint.pack(name="layers.3.experts", out=experts)
    assert experts.meta.exact and again.meta.exact
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and messages[0] == messages[1]
    assert messages[0].startswith("layers.3.experts: 3 of 6 experts") and "layers.3.experts.w13[1]" in messages[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 136}, "hidden is 136.*multiple of 32"),
        ({"intermediate": 0}, "intermediate is 0"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"format": "fp4"}, "format is 'fp4'"),
        ({"layout": "down"}, "layout is 'down'"),
    ],
)
def test_numbers_no_experts_can_have(change: dict[str, object], words: str) -> None:
    experts = make_checkpoint(Case("mxfp4")).pack()
    meta = replace(experts.meta, **change)
    with pytest.raises(ValueError, match=words):
        pp.PackedExperts.from_tensors(meta, experts.tensors())
    tokens = make_tokens(Case("mxfp4"))
    if "layout" not in change:  # the operator has "gated" instead
        with pytest.raises(ValueError, match=words):
            pp.fused_moe(tokens.x, pp.PackedExperts(meta, experts.tensors()), tokens.weights, tokens.ids)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_packing_again_uses_the_same_storage(fmt: str) -> None:
    first, second = (make_checkpoint(Case(fmt, bias=True, seed=seed)) for seed in (1, 2))
    experts = first.pack()
    addresses = {name: tensor.data_ptr() for name, tensor in experts.tensors().items()}
    for tensor in experts.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    again = second.pack(out=experts)
    assert again is experts
    assert {name: tensor.data_ptr() for name, tensor in again.tensors().items()} == addresses
    for name, tensor in second.pack().tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name


def snapshot(experts: pp.PackedExperts) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in experts.tensors().items()}


def test_out_stays_untouched_by_errors() -> None:
    first, second = (make_checkpoint(Case("mxfp4", bias=True, seed=seed)) for seed in (1, 2))
    experts = first.pack()
    before = snapshot(experts)
    second.tensors["w2_scale"][3, 5] = torch.tensor([10, 12], dtype=torch.uint8)
    second.tensors["w2"][3, 5] = 0x11
    with pytest.raises(ValueError, match=r"w2_scale needs row exponents in experts \[3\].*pack without out="):
        second.pack(out=experts)
    with pytest.raises(ValueError, match=r"out was packed with w2_bias"):
        first.pack(out=experts, w2_bias=None)
    with pytest.raises(TypeError, match=r"w2.* is int32"):
        first.pack(out=experts, w2=first.tensors["w2"].int())
    with pytest.raises(ValueError, match="pack without out= to get new storage"):
        make_checkpoint(Case("mxfp4", bias=True, experts=5)).pack(out=experts)
    for name, tensor in before.items():
        assert torch.equal(experts.tensors()[name], tensor), name


def test_row_exponents_come_and_go_in_storage_that_has_them() -> None:
    plain, far = make_checkpoint(Case("mxfp4", seed=1)), make_checkpoint(Case("mxfp4", seed=2))
    far.tensors["w13_scale"][2] = 20
    experts = far.pack()
    assert experts.w13_row_exponent is not None and experts.w13_row_exponent[2, :128].eq(-47).all()
    assert experts.w13_row_exponent[[0, 1, 3]].eq(0).all()
    plain.pack(out=experts)
    assert experts.w13_row_exponent.eq(0).all()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_nan_scales_name_every_damaged_expert(fmt: str) -> None:
    checkpoint = make_checkpoint(Case(fmt, experts=7, seed=4))
    nan = 0x7F if fmt == "nvfp4" else 255
    for expert, row in ((3, 17), (5, 0)):
        checkpoint.tensors["w13_scale"][expert, row, 1] = nan
    with pytest.raises(ValueError, match=r"layer.9.w13_scale: NaN scale in experts \[3, 5\] .*w13_scale\[3, 17, 1\]"):
        checkpoint.pack(name="layer.9")
    group = 16 if fmt == "nvfp4" else 32
    for expert, row in ((3, 17), (5, 0)):  # harmless over zeros of either sign
        checkpoint.tensors["w13"][expert, row, group // 2 : group] = 0x80
    experts = checkpoint.pack()
    assert torch.isfinite(experts.dequantize()[0]).all()


def test_global_scales_must_be_finite() -> None:
    checkpoint = make_checkpoint(Case(experts=4))
    scales = torch.tensor([[1, 1], [1, float("nan")], [1, 1], [float("inf"), 1]])
    with pytest.raises(ValueError, match=r"w13_global_scale is not finite in experts \[1, 3\]"):
        checkpoint.pack(w13_global_scale=scales)


@pytest.mark.parametrize(
    ("fmt", "change", "error", "message"),
    [
        ("nvfp4", {"w13_global_scale": None}, ValueError, "w13_global_scale is missing: NVFP4 needs it"),
        ("mxfp4", {"w2_global_scale": 1.0}, ValueError, "w2_global_scale was given, but MXFP4 has no global scales"),
        ("nvfp4", {"w2_global_scale": torch.ones(4, 2)}, ValueError, "w2_global_scale has shape [4, 2]"),
        ("nvfp4", {"w13_global_scale": torch.ones(3)}, ValueError, "w13_global_scale has shape [3]"),
        ("nvfp4", {"w13_global_scale": torch.ones(4).double()}, TypeError, "keep it in float32"),
        ("nvfp4", {"w2": torch.zeros(4, 128, 16, dtype=torch.uint8)}, ValueError, "w2 has shape [4, 128, 16]"),
        ("nvfp4", {"w2_scale": torch.zeros(4, 128, 2, dtype=torch.uint8)}, ValueError, "needs [4, 128, 4]"),
        ("mxfp4", {"w13_scale": torch.zeros(4, 128, 8, dtype=torch.uint8)}, ValueError, "needs [4, 128, 4]"),
        ("nvfp4", {"w13": torch.zeros(4, 127, 64, dtype=torch.uint8)}, ValueError, "127 rows cannot be gate and up"),
        ("nvfp4", {"w13": torch.zeros(4, 128, 60, dtype=torch.uint8)}, ValueError, "hidden size is 120"),
        ("mxfp4", {"w13": torch.zeros(4, 96, 64, dtype=torch.uint8)}, ValueError, "intermediate size is 48"),
        ("nvfp4", {"w13": torch.zeros(128, 64, dtype=torch.uint8)}, ValueError, "expected [experts, rows, columns]"),
        ("nvfp4", {"w13": torch.zeros(0, 128, 64, dtype=torch.uint8)}, ValueError, "nothing to pack"),
        ("nvfp4", {"w13": torch.zeros(4, 128, 64)}, TypeError, "w13[0].weight is float32"),
        ("nvfp4", {"w2_scale": torch.zeros(4, 128, 4)}, TypeError, "w2[0].weight_scale is float32"),
        ("nvfp4", {"w13_bias": torch.zeros(4, 64)}, ValueError, "w13_bias has shape [4, 64]; expected [4, 128]"),
        ("nvfp4", {"w2_bias": torch.zeros(4, 128, dtype=torch.int32)}, TypeError, "w2_bias is torch.int32"),
        ("nvfp4", {"layout": "gate"}, ValueError, "layout is 'gate'; expected one of gate_up"),
        ("nvfp4", {"arch": "gfx000"}, ValueError, "arch 'gfx000' has no backend here"),
        ("nvfp4", {"w2": [1]}, TypeError, "w2 must be a torch.Tensor, got list"),
    ],
)
def test_refused(fmt: str, change: dict[str, object], error: type[Exception], message: str) -> None:
    checkpoint = make_checkpoint(Case(fmt))
    with pytest.raises(error) as raised:
        pp.pack_experts(fmt, **{"layout": "gate_up", **checkpoint.tensors, **change})
    assert message in str(raised.value)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="fmt is 'fp4'; expected one of nvfp4, mxfp4"):
        pp.pack_experts("fp4", **make_checkpoint(Case()).tensors)


def test_extra_memory_is_a_few_experts_not_a_bank() -> None:
    """Peak resident memory over inputs and result, in a process of its own; the bank is 48 experts of 2.6 MB."""
    script = """
        import resource, torch, petit_plugin as pp
        torch.set_num_threads(1)
        E, H, I = 48, 1024, 1024
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        def make(E):
            return dict(w13=torch.ones(E, 2*I, H//2, dtype=torch.uint8), w2=torch.ones(E, H, I//2, dtype=torch.uint8),
                w13_scale=torch.full((E, 2*I, H//16), 0x38, dtype=torch.uint8),
                w2_scale=torch.full((E, H, I//16), 0x38, dtype=torch.uint8),
                w13_global_scale=torch.ones(E, 2*I), w2_global_scale=torch.ones(E))
        pp.pack_experts("nvfp4", **make(2), layout="interleaved")  # code and allocator warm
        bank = make(E)
        before = peak()
        experts = pp.pack_experts("nvfp4", **bank, layout="interleaved")
        expert = experts.nbytes // E
        print((peak() - before - experts.nbytes) / expert)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True
    ).stdout
    assert float(output) < 6, f"{output.strip()} experts' worth of extra memory"
