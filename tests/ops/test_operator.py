"""torch.ops.petit.linear and dequantize as operators: shapes, strides, tracing, compiling, errors, cost of a call."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest
import torch
from numerics import DTYPES, assert_close, random_activations, random_checkpoint, reference

import petit_plugin as pp

FORMATS = ["nvfp4", "mxfp4", "mxfp4-shifted", "mxfp4-exact"]
N, K = 40, 96


def make(rng: np.random.Generator, fmt: str, n: int = N, k: int = K) -> tuple[pp.PackedWeight, np.ndarray]:
    scales = {"mxfp4-shifted": range(20, 60), "mxfp4-exact": (20, 127, 200)}.get(fmt)
    c = random_checkpoint(rng, fmt.split("-")[0], n, k, scales=scales)
    packed = getattr(pp, f"pack_{c.fmt}")(*c.torch_arguments())
    assert packed.meta.exact == fmt.endswith("exact")
    assert (packed.row_exponent is not None) == fmt.endswith("shifted")
    return packed, c.values


def arguments(x: torch.Tensor, w: pp.PackedWeight, bias: torch.Tensor | None = None) -> tuple[Any, ...]:
    m = w.meta
    return (x, w.weight, w.scale, w.row_scale, w.row_exponent, bias, m.format, m.arch, m.n, m.k, m.exact)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(rng: np.random.Generator, fmt: str, dtype: torch.dtype) -> None:
    w, _ = make(rng, fmt)
    bias = random_activations(rng, (N,), dtype)
    for shape, b in [((5, K), bias), ((0, K), None), ((2, 3, K), bias), ((K,), None)]:
        x = random_activations(rng, shape, dtype)
        torch.library.opcheck(torch.ops.petit.linear.default, arguments(x, w, b))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_opcheck_of_dequantize(rng: np.random.Generator, dtype: torch.dtype) -> None:
    w, _ = make(rng, "mxfp4-shifted")
    m = w.meta
    tensors = (w.weight, w.scale, w.row_scale, w.row_exponent)
    torch.library.opcheck(torch.ops.petit.dequantize.default, (*tensors, m.format, m.arch, m.n, m.k, m.exact, dtype))


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_shape_and_stride_of_x(rng: np.random.Generator, fmt: str) -> None:
    w, values = make(rng, fmt)
    base = random_activations(rng, (4, 6, 2 * K), torch.bfloat16)
    views = {
        "rows with a gap": base[:, :, :K],
        "every other column": base[:, :, ::2],
        "transposed": base[:, :, :K].transpose(0, 1),
        "columns first": base[0, :, :K].t().contiguous().t(),
        "expanded": base[:1, :1, :K].expand(3, 5, K),
        "one row of many": base[1, 2:3, :K],
        "vector": base[2, 3, :K],
        "vector with stride": base[2, 3, ::2],
        "empty": base[:0, :, :K],
        "empty inside": base[:, :0, :K],
        "reversed": base[:, :, :K].flip(0),
        "four dimensions": base[:, :, :K].unflatten(0, (2, 2)),
    }
    for name, x in views.items():
        y = pp.linear(x, w)
        assert y.shape == (*x.shape[:-1], N) and y.is_contiguous(), name
        assert_close(y, reference(x, values), norm=False)
        assert torch.equal(y, pp.linear(x.contiguous(), w)), name


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4-shifted"])
def test_compiled_without_breaks_for_any_number_of_rows(rng: np.random.Generator, fmt: str) -> None:
    torch._dynamo.reset()
    w, _ = make(rng, fmt)
    bias = random_activations(rng, (N,), torch.bfloat16)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(pp.linear(x * 2, w, bias))

    for rows in (5, 17, 2, 64, 3, 0, 1):
        x = random_activations(rng, (rows, K), torch.bfloat16)
        y = layer(x)
        assert y.shape == (rows, N)
        assert torch.equal(y, torch.relu(pp.linear(x * 2, w, bias)))
    assert any("petit.linear" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert len(graphs) <= 3, "one graph for many rows, perhaps one each for 0 and 1"


def test_one_compiled_function_for_weights_of_several_shapes(rng: np.random.Generator) -> None:
    """The numbers of a weight may arrive as symbols once they have changed; they must become constants again."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def layer(x: torch.Tensor, w: pp.PackedWeight) -> torch.Tensor:
        return pp.linear(x, w) + 1

    for n, k in ((40, 96), (24, 96), (40, 64), (24, 160)):
        w, _ = make(rng, "nvfp4", n, k)
        x = random_activations(rng, (5, k), torch.bfloat16)
        assert torch.equal(layer(x, w), pp.linear(x, w) + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "k"), [("nvfp4", 3696), ("mxfp4", 2880)])
def test_inductor_agrees_with_eager(rng: np.random.Generator, fmt: str, k: int) -> None:
    torch._dynamo.reset()
    w, _ = make(rng, fmt, 64, k)

    @torch.compile(fullgraph=True, dynamic=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(pp.linear(x.transpose(0, 1), w).float()) + 1

    for rows in (6, 9):
        x = random_activations(rng, (rows, 3, 2 * k), torch.bfloat16)[:, :, k:]
        torch.testing.assert_close(layer(x), torch.sin(pp.linear(x.transpose(0, 1), w).float()) + 1)


def test_export_keeps_the_operator(rng: np.random.Generator) -> None:
    w, _ = make(rng, "nvfp4")

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pp.linear(x, w)

    x = random_activations(rng, (6, K), torch.float32)
    rows = torch.export.Dim("rows", min=2, max=1024)
    program = torch.export.export(Layer(), (x,), dynamic_shapes=({0: rows},))
    assert torch.equal(program.module()(x[:3]), pp.linear(x[:3], w))


def test_meta_tensors_give_the_shape(rng: np.random.Generator) -> None:
    w, _ = make(rng, "nvfp4")
    moved = pp.PackedWeight(w.meta, *(t.to("meta") for t in w.tensors().values()))
    y = pp.linear(torch.empty(3, 2, K, dtype=torch.float16, device="meta"), moved)
    assert y.shape == (3, 2, N) and y.dtype == torch.float16 and y.device.type == "meta"
    assert moved.dequantize(torch.bfloat16).shape == (N, K)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(3, K - 1)}, ValueError, ["x has shape [3, 95]", "[40, 96]", "96"]),
        ({"x": torch.zeros(())}, ValueError, ["x has shape []"]),
        ({"x": torch.zeros(3, K, dtype=torch.float64)}, TypeError, ["x is torch.float64", "bfloat16"]),
        ({"x": torch.zeros(3, K, dtype=torch.int32)}, TypeError, ["x is torch.int32"]),
        ({"bias": torch.zeros(N + 1)}, ValueError, ["bias has shape [41]", "[40]"]),
        ({"bias": torch.zeros(1, N)}, ValueError, ["bias has shape [1, 40]"]),
        ({"bias": torch.zeros(N, dtype=torch.bfloat16)}, TypeError, ["bias is torch.bfloat16", "float32"]),
        ({"weight": torch.zeros(3, 12, 64)}, ValueError, ["weight is torch.float32", "uint8"]),
        ({"weight": torch.zeros(2, 12, 64, dtype=torch.uint8)}, ValueError, ["weight", "[2, 12, 64]", "[3, 12, 64]"]),
        ({"weight": torch.zeros(3, 64, 12, dtype=torch.uint8).mT}, ValueError, ["weight", "contiguous"]),
        ({"scale": torch.zeros(3, 5, 16, dtype=torch.uint8)}, ValueError, ["scale", "[3, 6, 16]"]),
        ({"row_scale": torch.zeros(N)}, ValueError, ["row_scale", "[48]"]),
        ({"row_exponent": torch.zeros(48)}, ValueError, ["row_exponent was given", "nvfp4", "None"]),
        ({"format": "fp4"}, ValueError, ["format is 'fp4'", "nvfp4, mxfp4"]),
        ({"arch": "gfx1100"}, ValueError, ["arch 'gfx1100'", "cpu"]),
        ({"n": 400}, ValueError, ["weight", "[25, 12, 64]"]),
        ({"k": 192}, ValueError, ["weight", "[3, 24, 64]"]),
        ({"k": 104}, ValueError, ["k is 104", "multiple of 16"]),
        ({"n": 0}, ValueError, ["n is 0"]),
        ({"exact": True}, ValueError, ["exact", "nvfp4"]),
    ],
)
def test_wrong_arguments(
    rng: np.random.Generator, change: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    w, _ = make(rng, "nvfp4")
    names = ("x", "weight", "scale", "row_scale", "row_exponent", "bias", "format", "arch", "n", "k", "exact")
    given = dict(zip(names, arguments(torch.zeros(3, K), w), strict=True)) | change
    with pytest.raises(error) as caught:
        torch.ops.petit.linear(*given.values())
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_python_layer_names_its_argument(rng: np.random.Generator) -> None:
    w, _ = make(rng, "nvfp4")
    with pytest.raises(TypeError, match="weight must be a PackedWeight"):
        pp.linear(torch.zeros(1, K), w.weight)
    with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
        w.dequantize(torch.int8)
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, got str"):
        w.dequantize("float32")
    for x, words in (
        (np.zeros((1, K), np.float32), "x must be a torch.Tensor, got ndarray; convert"),
        ([[0.0] * K], "x must be a torch.Tensor, got list"),
        (torch.zeros(1, K).to_sparse(), "x is a torch.sparse_coo tensor; pass a dense one"),
    ):
        with pytest.raises(TypeError, match=words):
            pp.linear(x, w)
    with pytest.raises(TypeError, match=r"bias must be a torch\.Tensor, got list"):
        pp.linear(torch.zeros(1, K), w, [0.0] * N)


def test_a_call_never_reads_a_value_back(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No .item(), truth value or copy to the host: each would stop a GPU stream, or break a graph capture."""
    w, _ = make(rng, "nvfp4")
    x, bias = random_activations(rng, (4, K), torch.bfloat16), random_activations(rng, (N,), torch.bfloat16)
    expected = pp.linear(x, w, bias)

    def forbidden(*_: object) -> None:
        raise AssertionError("a tensor's value was read on the host")

    for name in ("item", "__bool__", "__float__", "__int__", "cpu", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    y = pp.linear(x, w, bias)
    monkeypatch.undo()
    assert torch.equal(y, expected)


def test_storage_may_be_replaced_in_place(rng: np.random.Generator) -> None:
    """A reload copies into the tensors a graph has captured; the next call must see it."""
    first, second = make(rng, "nvfp4")[0], make(rng, "nvfp4")[0]
    x = random_activations(rng, (4, K), torch.bfloat16)
    pp.linear(x, first)
    for name, tensor in second.tensors().items():
        first.tensors()[name].copy_(tensor)
    assert torch.equal(pp.linear(x, first), pp.linear(x, second))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4-shifted"])
def test_gradients_of_x_and_bias(rng: np.random.Generator, fmt: str) -> None:
    w, values = make(rng, fmt)
    x = random_activations(rng, (2, 3, K), torch.float32).requires_grad_()
    bias = random_activations(rng, (N,), torch.float32).requires_grad_()
    grad = random_activations(rng, (2, 3, N), torch.float32)
    pp.linear(x, w, bias).backward(grad)
    exact = torch.from_numpy(values)
    torch.testing.assert_close(x.grad.double(), grad.double() @ exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))
    with torch.no_grad():
        assert not pp.linear(x, w, bias).requires_grad


def test_cost_of_a_call(rng: np.random.Generator) -> None:
    """Python and dispatch above the kernel: a few tens of microseconds, here for an empty batch that runs no kernel."""
    w, _ = make(rng, "nvfp4")
    x = torch.zeros(0, K, dtype=torch.bfloat16)

    def timed() -> float:
        start = time.process_time()  # one thread, no kernel: the same as wall time on a quiet machine
        for _ in range(200):
            pp.linear(x, w)
        return (time.process_time() - start) / 200

    timed()
    assert min(timed() for _ in range(7)) < 100e-6, statistics.mean(timed() for _ in range(3))
