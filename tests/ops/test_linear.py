"""pp.linear against float64, element by element: the numerics contract on random and on hostile input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fixtures import oracle
from numerics import (
    DTYPES,
    GROUP,
    Checkpoint,
    assert_close,
    random_activations,
    random_checkpoint,
    reference,
)

import petit_plugin as pp

FORMATS = ["nvfp4", "mxfp4"]
ROWS = [0, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33]
# Columns that cut every tile size somewhere, and the shapes that real models bring.
COLUMNS = {
    "nvfp4": [16, 48, 192, 576, 640, 704, 1664, 1824, 1856, 2688, 2880, 3696],
    "mxfp4": [32, 64, 96, 192, 384, 640, 704, 1664, 1824, 1856, 2688, 2880],
}
ISAS = [name for number in range(4) if pp._native.isa_supported(number) for name in [pp._native.isa_name(number)]]


def pack(c: Checkpoint) -> pp.PackedWeight:
    return getattr(pp, f"pack_{c.fmt}")(*c.torch_arguments())


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PETIT_CPU_ISA", request.param)
    return request.param


def test_every_instruction_set_of_this_cpu_is_tested() -> None:
    """What this CPU has and this build does not (and the reverse) shows here instead of as a missing test."""
    with open("/proc/cpuinfo") as lines:
        flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if not flags:
        pytest.skip("not an x86 CPU")
    needs = {
        "portable": set(),
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    }
    needs["avx512_bf16"] = needs["avx512"] | {"avx512_bf16"}
    for number in range(4):
        name = pp._native.isa_name(number)
        if pp._native.isa_built(number):
            assert (name in ISAS) == (needs[name] <= flags), name
    assert pp._native.isa_name(pp._native.best_isa()) == ISAS[-1]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", ROWS)
def test_rows(rng: np.random.Generator, isa: str, fmt: str, dtype: torch.dtype, m: int) -> None:
    c = random_checkpoint(rng, fmt, 70, 320)
    x = random_activations(rng, (m, 320), dtype)
    y = pp.linear(x, pack(c))
    assert y.shape == (m, 70) and y.dtype == dtype and y.is_contiguous()
    assert_close(y, reference(x, c.values))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_and_ragged_rows(rng: np.random.Generator, isa: str, fmt: str, dtype: torch.dtype) -> None:
    for k, n, m in zip(
        COLUMNS[fmt], itertools.cycle([1, 17, 33, 64, 7, 100]), itertools.cycle([1, 5, 2, 16, 40]), strict=False
    ):
        c = random_checkpoint(rng, fmt, n, k)
        x, bias = random_activations(rng, (m, k), dtype), random_activations(rng, (n,), dtype)
        assert_close(pp.linear(x, pack(c), bias), reference(x, c.values, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_bias_dtypes(rng: np.random.Generator, isa: str, dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    c = random_checkpoint(rng, "nvfp4", 40, 64)
    x, bias = random_activations(rng, (5, 64), dtype), random_activations(rng, (80,), bias_dtype)[::2]
    if bias_dtype in (dtype, torch.float32):
        assert_close(pp.linear(x, pack(c), bias), reference(x, c.values, bias))
    else:
        with pytest.raises(TypeError, match="bias is"):
            pp.linear(x, pack(c), bias)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["ones", "cancel", "large", "tiny", "alternating", "one_hot", "wide"])
def test_hostile_inputs(rng: np.random.Generator, isa: str, fmt: str, dtype: torch.dtype, case: str) -> None:
    n, k, m = 48, 2048, 6
    c = random_checkpoint(rng, fmt, n, k)
    x = random_activations(rng, (m, k), torch.float64)
    if case == "ones":  # all products of one sign: rounding errors add up
        c.weight[:] = 0x77
        x = torch.rand(m, k, dtype=torch.float64) + 0.5
    elif case == "cancel":  # the second half undoes the first
        half = k // GROUP[fmt] // 2
        c.weight[:, k // 4 :], c.scale[:, half:] = c.weight[:, : k // 4], c.scale[:, :half]
        x[:, k // 2 :] = -x[:, : k // 2] + 2.0**-9 * x[:, k // 2 :]
    elif case == "large":
        x *= 2.0 ** (110 if dtype != torch.float16 else 14)
    elif case == "tiny":
        x *= 2.0 ** (-100 if dtype != torch.float16 else -22)
    elif case == "alternating":
        x = torch.tensor([1.0, -1.0]).repeat(m, k // 2).double() * (1 + 2.0**-7)
    elif case == "one_hot":
        x = torch.zeros(m, k, dtype=torch.float64)
        x[torch.arange(m), torch.from_numpy(rng.integers(0, k, m))] = 1.0
    elif case == "wide":  # block scales over many octaves
        c.scale[:] = rng.integers(0, 0x7F, c.scale.shape) if fmt == "nvfp4" else rng.integers(67, 188, c.scale.shape)
    x = x.to(dtype)
    dequantize = {"nvfp4": lambda: oracle.dequantize_nvfp4(*c[1:4]), "mxfp4": lambda: oracle.dequantize_mxfp4(*c[1:3])}
    assert_close(pp.linear(x, pack(c)), reference(x, dequantize[fmt]()), norm=case not in ("cancel", "tiny"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), [(0, 60), (40, 70), (180, 254), (230, 254), (20, 220)])
def test_mxfp4_far_from_one(rng: np.random.Generator, isa: str, dtype: torch.dtype, low: int, high: int) -> None:
    """Row exponents and the exact kernel: results under- and overflow as in float32 and nowhere else."""
    c = random_checkpoint(rng, "mxfp4", 33, 256, scales=range(low, high + 1))
    c.weight[3] = 0x80
    c = c._replace(values=oracle.dequantize_mxfp4(c.weight, c.scale))
    packed = pack(c)
    assert packed.meta.exact == (high - low > 120)
    x = random_activations(rng, (5, 256), dtype)
    y = pp.linear(x, packed)
    assert (y[:, 3] == 0).all()
    if dtype == torch.float16 and high > 150:
        assert torch.isinf(y).any()
    assert_close(y, reference(x, c.values), norm=False)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows_stay_alone(rng: np.random.Generator, isa: str, fmt: str, dtype: torch.dtype) -> None:
    """NaN, infinity, zero and subnormal rows give what float32 gives, and change no bit of any other row."""
    c = random_checkpoint(rng, fmt, 64, 256)
    c.weight[:] |= 0x11  # no zero codes: infinity times zero would be NaN
    c = c._replace(
        values={"nvfp4": oracle.dequantize_nvfp4, "mxfp4": oracle.dequantize_mxfp4}[fmt](
            *[a for a in c[1:4] if a is not None]
        )
    )
    packed = pack(c)
    x = random_activations(rng, (18, 256), dtype)
    clean = pp.linear(x, packed)
    x[3, 100], x[5, 7], x[8, 9], x[11] = float("nan"), float("inf"), -float("inf"), 0.0
    x[13] = torch.finfo(dtype).smallest_normal / 4
    y = pp.linear(x, packed)
    special = [3, 5, 8, 11, 13]
    rest = [row for row in range(18) if row not in special]
    assert torch.equal(y[rest], clean[rest])
    assert torch.isnan(y[3]).all()
    scale_sign = torch.from_numpy(np.sign(c.values[:, 7]))
    with np.errstate(invalid="ignore"):
        expected_inf = torch.where(scale_sign > 0, torch.inf, -torch.inf)
    live = scale_sign != 0  # NVFP4 scale 0: infinity times zero
    assert torch.equal(y[5][live].double(), expected_inf[live].double())
    assert torch.isnan(y[5][~live]).all()
    assert torch.equal(y[11], torch.zeros_like(y[11]))
    if dtype != torch.float32:  # float32 products of subnormals have no bits left to compare
        assert_close(y[13:14], reference(x[13:14], c.values), norm=False)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("m", [1, 7, 16, 40])
def test_same_bits_twice_and_on_any_number_of_threads(rng: np.random.Generator, isa: str, fmt: str, m: int) -> None:
    c = random_checkpoint(rng, fmt, 200, 512)
    packed, x = pack(c), random_activations(rng, (m, 512), torch.bfloat16)
    first, before = pp.linear(x, packed), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(pp.linear(x, packed), first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fmt", FORMATS)
def test_memory_around_the_weight_is_never_read_into_a_result(rng: np.random.Generator, isa: str, fmt: str) -> None:
    """Packed tensors inside buffers of 0xFF (NaN scales, -6 codes): K = 2880 cuts tiles, N = 21 leaves padded rows."""
    c = random_checkpoint(rng, fmt, 21, 2880)
    packed, x = pack(c), random_activations(rng, (5, 2880), torch.bfloat16)
    tensors = {}
    for name, tensor in packed.tensors().items():
        buffer = torch.full((tensor.nbytes + 8192,), 0xFF, dtype=torch.uint8)
        inside = buffer[4096 : 4096 + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensors[name] = inside.copy_(tensor)
    wide = torch.full((5, 4000), float("nan"), dtype=torch.bfloat16)
    wide[:, 64 : 64 + 2880] = x
    y = pp.linear(wide[:, 64 : 64 + 2880], pp.PackedWeight.from_tensors(packed.meta, tensors))
    assert torch.equal(y, pp.linear(x, packed))
    assert_close(y, reference(x, c.values))


def test_rows_of_x_beyond_two_gigabytes(rng: np.random.Generator, isa: str) -> None:
    """Offsets are 64-bit: rows of x 3 GiB apart, of which only a few pages are ever touched."""
    c = random_checkpoint(rng, "mxfp4", 17, 32)
    stride = 3 << 28
    x = torch.empty(2 * stride + 32, dtype=torch.float32).as_strided((3, 32), (stride, 1))
    x.copy_(random_activations(rng, (3, 32), torch.float32))
    assert torch.equal(pp.linear(x, pack(c)), pp.linear(x.contiguous(), pack(c)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("m", [1, 40])
def test_tensors_may_lie_at_any_address(rng: np.random.Generator, isa: str, fmt: str, m: int) -> None:
    """Views into a memory-mapped file are aligned to their elements and no more."""
    c = random_checkpoint(rng, fmt, 33, 256, scales=range(1, 60) if fmt == "mxfp4" else None)
    packed, x, bias = pack(c), random_activations(rng, (m, 256), torch.bfloat16), torch.ones(33, dtype=torch.bfloat16)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        return buffer[1:].view(tensor.shape).copy_(tensor)

    other = pp.PackedWeight.from_tensors(packed.meta, {name: moved(t) for name, t in packed.tensors().items()})
    assert torch.equal(pp.linear(moved(x), other, moved(bias)), pp.linear(x, packed, bias))
    assert torch.equal(other.dequantize(), packed.dequantize())


def test_only_the_result_is_written(rng: np.random.Generator, isa: str) -> None:
    """The native call with a poisoned result buffer: every element of y is written, nothing around it is."""
    c = random_checkpoint(rng, "nvfp4", 21, 64)
    p, x = pack(c), random_activations(rng, (3, 64), torch.float32)
    buffer = torch.full((7 * 21,), float("nan"))
    y = buffer[2 * 21 : 5 * 21]
    pp._native.linear(
        *(x.data_ptr(), 64, 3, 2, 0, 21, 64, p.weight.data_ptr(), p.scale.data_ptr(), p.row_scale.data_ptr(), 1),
        *(0, False, 0, 2, y.data_ptr(), 2, pp._native.best_isa()),
    )
    assert torch.isnan(buffer).nonzero().flatten().tolist() == [*range(2 * 21), *range(5 * 21, 7 * 21)]
    assert torch.equal(y.view(3, 21), pp.linear(x, p))


@pytest.mark.parametrize("fmt", FORMATS)
def test_identity_gives_the_dequantised_weight(rng: np.random.Generator, isa: str, fmt: str) -> None:
    c = random_checkpoint(rng, fmt, 40, 96)
    packed = pack(c)
    assert torch.equal(pp.linear(torch.eye(96), packed).T, packed.dequantize(torch.float32))


def test_long_rows_keep_their_accuracy(rng: np.random.Generator, isa: str) -> None:
    """57344 products of one sign: a single float32 accumulator would be off by a hundred times the tolerance."""
    c = random_checkpoint(rng, "nvfp4", 16, 57344, scales=[0x38])
    c.weight[:] &= 0x77
    values = oracle.dequantize_nvfp4(c.weight, c.scale, c.global_scale)
    for dtype in DTYPES:
        x = (torch.from_numpy(rng.random((2, 57344))) * (1 if dtype != torch.float16 else 2**-6)).to(dtype)
        assert_close(pp.linear(x, pack(c)), reference(x, values))
