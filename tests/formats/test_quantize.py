"""NVFP4 and MXFP4: ModelOpt's tensors bit for bit, dequantisation against NumPy float64, rules, properties, errors."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import oracle, tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from petit_plugin.formats import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    e2m1,
    e4m3,
    e8m0,
    mxfp4,
    nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
)

MODELOPT = Path(tiny_models.__file__).parent / "modelopt"
CHECKPOINTS = ["llama-nvfp4-kvfp8", "llama-w4a16-nvfp4", "llama-mxfp4", "qwen3-moe-nvfp4", "qwen3-moe-mxfp4"]
SEEDS = [int(s) for s in np.random.SeedSequence().generate_state(2)]


@cache
def modelopt_cases() -> dict[str, torch.Tensor]:
    return load_file(MODELOPT / "quantizer.safetensors")


CASES = sorted(k.removesuffix(".w") for k in modelopt_cases() if k.endswith(".w"))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


@pytest.mark.parametrize("case", CASES)
def test_nvfp4_equals_modelopt(case: str) -> None:
    data = modelopt_cases()
    for variant in ("nvfp4", "nvfp4_shared"):
        if f"{case}.{variant}.amax" not in data:
            continue
        expected = [data[f"{case}.{variant}.{t}"] for t in ("weight", "weight_scale", "weight_scale_2")]
        w, amax = data[f"{case}.w"], data[f"{case}.{variant}.amax"]
        before = w.clone()
        results = [quantize_nvfp4(w, amax=amax), quantize_nvfp4(w, global_scale=expected[2])]
        if variant == "nvfp4":
            results.append(quantize_nvfp4(w))
        for result in results:
            assert torch.equal(result.weight, expected[0])
            assert result.weight_scale.dtype == torch.float8_e4m3fn
            assert torch.equal(raw(result.weight_scale), raw(expected[1]))
            assert result.weight_scale_2.shape == () and torch.equal(result.weight_scale_2, expected[2])
        assert torch.equal(w, before), "the input was modified"


@pytest.mark.parametrize("case", CASES)
def test_mxfp4_equals_modelopt(case: str) -> None:
    data = modelopt_cases()
    for result in (quantize_mxfp4(data[f"{case}.w"]), quantize_mxfp4(data[f"{case}.w"], scale_mode="round_up")):
        assert torch.equal(result.weight, data[f"{case}.mxfp4.weight"])
        assert torch.equal(result.weight_scale, data[f"{case}.mxfp4.weight_scale"])


def test_modelopt_fixtures_reach_the_rules() -> None:
    """The committed cases hold what they are there for; otherwise the equality above would prove little."""
    data = modelopt_cases()
    scales = torch.cat([raw(v).flatten() for k, v in data.items() if ".nvfp4" in k and k.endswith("weight_scale")])
    assert {0x01, 0x7E, 0x38} <= set(scales.tolist()) and 0 not in scales and (scales < 8).sum() > 20  # subnormals
    bytes_ = torch.cat([v.flatten() for k, v in data.items() if k.endswith("mxfp4.weight_scale")])
    assert 0 in bytes_ and 252 in bytes_
    zero = data["zeros.bfloat16.w"]
    assert torch.equal(data["zeros.bfloat16.mxfp4.weight"][:3], torch.full((3, 32), 0x88, dtype=torch.uint8))
    assert not data["zeros.bfloat16.nvfp4.weight"][:3].any() and not zero[:3].any()
    small = e2m1.unpack(data["small_negatives.float32.nvfp4.weight"])
    assert (small == 8).sum() > 500
    ties = data["ties.float32.w"].abs()
    assert torch.isin(ties, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).sum() > 100


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_exported_by_modelopt(name: str) -> None:
    """Every FP4 tensor that export_hf_checkpoint wrote is what our quantiser makes of the same weight and amax."""
    stored = load_file(MODELOPT / name / "model.safetensors")
    source = tiny_models.random_weights(tiny_models.shape("qwen3_moe" if "moe" in name else "llama"))
    layers = 0
    for key, w in source.items():
        if stored[key].dtype != torch.uint8:
            assert torch.equal(stored[key], w)
            continue
        layers += 1
        scale = stored[f"{key}_scale"]
        if "mxfp4" in name:
            weight, weight_scale = quantize_mxfp4(w)
        else:
            amax = stored[f"{key}_scale_2"] * 2688
            weight, weight_scale, scale_2 = quantize_nvfp4(w, global_scale=stored[f"{key}_scale_2"])
            assert w.abs().max().float() <= amax * (1 + 1e-6)
            assert torch.equal(scale_2, stored[f"{key}_scale_2"])
        assert torch.equal(weight, stored[key]) and torch.equal(raw(weight_scale), raw(scale))
    assert layers == (2 * (4 + 3 * 8) if "moe" in name else 2 * 7)


def random_packed(seed: int, n: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
    return weight, torch.randint(0, 256, (n, k // group), generator=gen, dtype=torch.uint8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (64, 2880), (3, 0), (0, 64)])
def test_dequantize_equals_numpy(seed: int, shape: tuple[int, int]) -> None:
    n, k = shape
    weight, scale = random_packed(seed, n, k, 16)
    g = torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-6
    for global_scale in (torch.tensor(0.0123), torch.tensor([0.0123]), g if n > 1 else g[:1]):
        if n == 0 and global_scale.numel() == 0:
            continue
        expected = oracle.dequantize_nvfp4(weight.numpy(), scale.numpy(), global_scale.squeeze().numpy())
        exact = dequantize_nvfp4(weight, scale.view(torch.float8_e4m3fn), global_scale, torch.float64)
        np.testing.assert_array_equal(exact.numpy(), expected)
        np.testing.assert_array_equal(
            dequantize_nvfp4(weight, scale, global_scale).numpy(), expected.astype(np.float32)
        )

    weight, scale = random_packed(seed + 1, n, k, 32)
    expected = oracle.dequantize_mxfp4(weight.numpy(), scale.numpy())
    np.testing.assert_array_equal(dequantize_mxfp4(weight, scale, torch.float64).numpy(), expected)
    with np.errstate(over="ignore"):
        single = expected.astype(np.float32)
    np.testing.assert_array_equal(dequantize_mxfp4(weight, scale).numpy(), single)
    np.testing.assert_array_equal(np.signbit(dequantize_mxfp4(weight, scale).numpy()), np.signbit(single))
    if e8m0.DTYPE is not None:
        np.testing.assert_array_equal(dequantize_mxfp4(weight, scale.view(e8m0.DTYPE)).numpy(), single)


def test_dequantize_stack_of_experts() -> None:
    weight, scale = random_packed(SEEDS[0], 6 * 5, 64, 16)
    weight, scale = weight.view(6, 5, 32), scale.view(6, 5, 4)
    per_expert, per_row = torch.rand(6) + 0.1, torch.rand(6, 5) + 0.1
    for g, spread in ((per_expert, per_expert[:, None].expand(6, 5)), (per_row, per_row)):
        expected = oracle.dequantize_nvfp4(weight.numpy(), scale.numpy(), spread.numpy())
        np.testing.assert_array_equal(dequantize_nvfp4(weight, scale, g, torch.float64).numpy(), expected)


def test_small_block_scales_with_unit_global_scale() -> None:
    """Block scales down to 2^-9 under a global scale of 1 are exact (code 1 is an E4M3 subnormal)."""
    codes = e4m3.encode_rne(2.0 ** torch.arange(-9.0, -1))[:, None]
    weight = torch.full((8, 8), 0x21, dtype=torch.uint8)  # elements 0.5, 1
    result = dequantize_nvfp4(weight, codes, 1.0)
    assert torch.equal(result[:, 0], 2.0 ** torch.arange(-10.0, -2))
    assert torch.equal(result[:, 1], 2.0 ** torch.arange(-9.0, -1))


def test_negative_zero_decodes_to_zero() -> None:
    weight = torch.full((2, 16), 0x88, dtype=torch.uint8)
    for value in (
        dequantize_mxfp4(weight, torch.zeros(2, 1, dtype=torch.uint8)),
        dequantize_nvfp4(weight, torch.tensor([[1, 0x80]] * 2, dtype=torch.uint8), 2.0),
    ):
        assert not value.any() and not value.isnan().any()


@pytest.mark.parametrize(
    ("amax", "floor", "even", "round_up"),
    [
        (7.0, 0, 1, 1),
        (6.5, 0, 0, 1),
        (6.0, 0, 0, 0),
        (6.9999995, 0, 0, 1),
        (4.0, 0, 0, 0),
        (3.9, -1, 0, 0),
        (3.4999998, -1, -1, 0),
        (3.5, -1, 0, 0),
        (3.0, -1, -1, -1),
        (1e-45, -127, -127, -127),
        (2.0**-126, -127, -127, -127),
        (3.4e38, 125, 126, 126),
    ],
)
def test_mxfp4_scale_modes(amax: float, floor: int, even: int, round_up: int) -> None:
    w = torch.zeros(1, 32)
    w[0, 9] = -amax
    for mode, exponent in (("floor", floor), ("even", even), ("round_up", round_up)):
        assert int(quantize_mxfp4(w, scale_mode=mode).weight_scale) - 127 == exponent, mode  # type: ignore[arg-type]


def test_mxfp4_nearest_even_golden() -> None:
    """A block with scale 2^-1 whose elements include every tie."""
    golden = [129, 226, 34, 170, 26, 25, 162, 187, 18, 144, 2, 85, 234, 22, 229, 193]
    codes = torch.tensor(golden, dtype=torch.uint8)[None]
    exact = dequantize_mxfp4(codes, torch.tensor([[126]], dtype=torch.uint8))
    for mode in ("floor", "even"):
        weight, scale = quantize_mxfp4(exact, scale_mode=mode)  # type: ignore[arg-type]
        assert scale.tolist() == [[126]] and weight.tolist() == [golden]

    w = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] * 4)[None] / 2
    w[0, 8:16] *= -1
    ties_even, ties_zero = [0, 2, 2, 4, 4, 6, 6, 6], [0, 1, 2, 3, 4, 5, 6, 6]
    for mode, ties in (("even", ties_even), ("round_up", ties_zero)):
        codes = e2m1.unpack(quantize_mxfp4(w, scale_mode=mode).weight)[0].tolist()  # type: ignore[arg-type]
        assert codes[:8] == ties and codes[8:16] == [8 + c for c in ties]
    other = quantize_mxfp4(w, scale_mode="round_up", rounding="nearest_even")
    assert e2m1.unpack(other.weight)[0, :8].tolist() == ties_even


def test_zero_tensor() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        zero = torch.zeros(3, 64, dtype=dtype)
        zero[1] = -0.0
        n = quantize_nvfp4(zero)
        assert not n.weight.any() and set(raw(n.weight_scale).flatten().tolist()) == {0x38}
        assert n.weight_scale_2 == 2.0**-126 and not dequantize_nvfp4(*n).any()
        for mode, code in (("round_up", {0x88}), ("even", {0x00, 0x88})):
            m = quantize_mxfp4(zero, scale_mode=mode)  # type: ignore[arg-type]
            assert set(m.weight.flatten().tolist()) == code and not m.weight_scale.any()
            assert not dequantize_mxfp4(*m).any()


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (64,), (2, 3, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape)
    n, m = quantize_nvfp4(w), quantize_mxfp4(w)
    lead, k = shape[:-1], shape[-1]
    assert n.weight.shape == m.weight.shape == (*lead, k // 2)
    assert n.weight_scale.shape == (*lead, k // 16) and m.weight_scale.shape == (*lead, k // 32)
    assert dequantize_nvfp4(*n).shape == dequantize_mxfp4(*m).shape == shape
    transposed = torch.randn(64, 32).T
    assert torch.equal(quantize_nvfp4(transposed).weight, quantize_nvfp4(transposed.contiguous()).weight)
    assert torch.equal(quantize_mxfp4(transposed).weight, quantize_mxfp4(transposed.contiguous()).weight)
    assert not quantize_mxfp4(torch.nn.Parameter(torch.ones(1, 32))).weight.requires_grad


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(37, 96, generator=torch.Generator().manual_seed(SEEDS[0]))
    whole = [*quantize_nvfp4(w), *quantize_mxfp4(w)]
    values = [dequantize_nvfp4(*whole[:3]), dequantize_mxfp4(*whole[3:])]
    monkeypatch.setattr("petit_plugin.formats._common.CHUNK_ELEMENTS", 200)
    parts = [*quantize_nvfp4(w), *quantize_mxfp4(w)]
    assert all(
        torch.equal(raw(a) if a.dim() else a, raw(b) if b.dim() else b) for a, b in zip(whole, parts, strict=True)
    )
    assert torch.equal(values[0], dequantize_nvfp4(*parts[:3])) and torch.equal(values[1], dequantize_mxfp4(*parts[3:]))


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-8, 8, width=16),
    st.sampled_from([0.0, -0.0, 6.0, -6.0, 1e-45, -1e-45, 3.4e38, 448.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, min_size=64, max_size=64), st.sampled_from(["floor", "even", "round_up"]))
def test_mxfp4_properties(values: list[float], mode: str) -> None:
    """Each element is a nearest representable value of its block's scale, saturated elements apart."""
    w = torch.tensor(values, dtype=torch.float32).view(2, 32)
    q = quantize_mxfp4(w, scale_mode=mode)  # type: ignore[arg-type]
    back = dequantize_mxfp4(*q, torch.float64).numpy()
    step = oracle.e8m0_values(q.weight_scale.numpy())
    levels = step[:, :, None] * np.array(e2m1.MAGNITUDES)[None, None, :]
    exact = np.abs(w.double().numpy())
    distance = np.abs(exact[:, :, None] - levels).min(axis=2)
    assert np.isfinite(back).all()
    np.testing.assert_array_equal(np.abs(np.abs(back) - exact), distance)
    assert ((back == 0) | (np.signbit(back) == np.signbit(w.numpy()))).all()
    if mode == "round_up":
        assert (exact <= 6 * step * (1 + 2.0**-16)).all()
    assert (q.weight_scale != 255).all()
    # What is on the grid stays: unless the block saturated, or its largest value rounded up to infinity in float32.
    stable = (exact.max(axis=1) <= 6 * step[:, 0]) & (np.abs(back).max(axis=1) <= np.finfo(np.float32).max)
    again = quantize_mxfp4(torch.from_numpy(np.where(stable[:, None], back, 0)).float(), scale_mode=mode)  # type: ignore[arg-type]
    np.testing.assert_array_equal(dequantize_mxfp4(*again, torch.float64).numpy()[stable], back[stable])


@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, min_size=64, max_size=64))
def test_nvfp4_properties(values: list[float]) -> None:
    w = torch.tensor(values, dtype=torch.float32).view(2, 32)
    largest = float(w.abs().max())
    if 0 < largest < 1e-34:  # below, float32 subnormals leave the tensor scale itself imprecise
        return
    q = quantize_nvfp4(w)
    back = dequantize_nvfp4(*q, torch.float64)
    assert torch.isfinite(back).all()
    scales = q.weight_scale.float()
    assert (scales >= 2.0**-9).all() and (scales <= 448).all()
    # Element error: half a step (1/6 of the block's range at most), or the scale rounding (2^-4) on saturated elements;
    # blocks under the smallest scale round on its grid.
    step = (scales.double() * q.weight_scale_2.double()).repeat_interleave(16, 1)
    error = (back - w.double()).abs()
    assert (error <= torch.maximum(step, w.double().abs() * 2.0**-4) * (1 + 1e-6)).all()
    assert ((back == 0) | (torch.signbit(back) == torch.signbit(w))).all()


def test_saturation_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    w = torch.full((4, 32), 1.0)
    w[2, 20] = 100.0
    with caplog.at_level(logging.WARNING, logger="petit_plugin.formats"):
        quantize_nvfp4(w)
        quantize_nvfp4(w, amax=100.0)
        assert not caplog.records
        q = quantize_nvfp4(w, amax=10.0)
    assert [r.getMessage() for r in caplog.records] == [
        "NVFP4: 1 of 8 blocks hold values beyond 6 * 448 * weight_scale_2 and saturate: the given amax or global_scale "
        "is smaller than the weight needs"
    ]
    assert dequantize_nvfp4(*q)[2, 20] == pytest.approx(10.0)


class LargestAllocation(TorchDispatchMode):
    """Records the size of the largest storage that an operation makes."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def test_large_layers_make_no_large_temporaries() -> None:
    """Nothing bigger than the result itself is ever allocated: a layer of any size is worked through in chunks."""
    w = torch.randn(1024, 8192).to(torch.bfloat16)
    with LargestAllocation(w) as quantising:
        n, m = quantize_nvfp4(w), quantize_mxfp4(w)
    assert quantising.largest <= n.weight.nbytes == m.weight.nbytes == w.numel() // 2
    with LargestAllocation(*n, *m) as dequantising:
        values = dequantize_nvfp4(*n), dequantize_mxfp4(*m)
    assert dequantising.largest <= values[0].nbytes == values[1].nbytes


def test_quantize_argument_errors() -> None:
    with pytest.raises(ValueError, match=r"multiple of the block size 16.*\(4, 24\)"):
        quantize_nvfp4(torch.zeros(4, 24))
    with pytest.raises(ValueError, match=r"multiple of the block size 32.*\(4, 48\)"):
        quantize_mxfp4(torch.zeros(4, 48))
    with pytest.raises(TypeError, match=r"w must have dtype float32, bfloat16, float16, got float64"):
        quantize_mxfp4(torch.zeros(4, 32, dtype=torch.float64))
    for bad in (float("nan"), float("inf"), -float("inf")):
        w = torch.ones(4, 64)
        w[1, 40] = bad
        for quantize in (quantize_nvfp4, quantize_mxfp4):
            with pytest.raises(ValueError, match="w holds NaN or infinity"):
                quantize(w)
    w = torch.ones(2, 32)
    with pytest.raises(ValueError, match="not both"):
        quantize_nvfp4(w, amax=1.0, global_scale=1.0)
    for value in (0.0, -1.0, float("nan"), float("inf"), 1e-60):
        with pytest.raises(ValueError, match="amax must be positive and finite"):
            quantize_nvfp4(w, amax=value)
    with pytest.raises(ValueError, match=r"global_scale must be one number.*\(2,\)"):
        quantize_nvfp4(w, global_scale=torch.ones(2))
    with pytest.raises(ValueError, match="is too small"):
        quantize_nvfp4(w * 1e-45)
    with pytest.raises(ValueError, match=r"floor, even.*'ceil'"):
        quantize_mxfp4(w, scale_mode="ceil")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounding must be one of"):
        quantize_mxfp4(w, rounding="up")  # type: ignore[arg-type]


def test_dequantize_argument_errors() -> None:
    weight, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\(4, 4\).*got \(4, 2\)"):
        dequantize_nvfp4(weight, scale[:, :2], 1.0)
    with pytest.raises(ValueError, match=r"\(4, 2\).*got \(4, 4\).*swizzled"):
        dequantize_mxfp4(weight, scale)
    with pytest.raises(ValueError, match=r"multiple of 32.*K = 16"):
        dequantize_mxfp4(weight[:, :8], scale[:, :1])
    with pytest.raises(TypeError, match=r"weight_scale.*float8_e4m3fn, uint8.*float32"):
        dequantize_nvfp4(weight, scale.float(), 1.0)
    with pytest.raises(TypeError, match=r"weight must have dtype uint8, got int8"):
        dequantize_nvfp4(weight.view(torch.int8), scale, 1.0)
    with pytest.raises(ValueError, match=r"global_scale.*\(4, 32\).*got \(3,\)"):
        dequantize_nvfp4(weight, scale, torch.ones(3))
    with pytest.raises(TypeError, match="float16: other types would be rounded twice"):
        dequantize_nvfp4(weight, scale, 1.0, torch.float16)
    assert nvfp4.GROUP == 16 and mxfp4.GROUP == 32
