"""Which tokens meet which experts: absent ids, expert maps, expert parallelism, skew, what must not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_cases import Case, Checkpoint, check, make_checkpoint, make_tokens, run_stages

import petit_plugin as pp
from petit_plugin.backends import cpu_moe


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(3))
def test_absent_ids_contribute_exactly_zero(seed: int) -> None:
    case = Case("nvfp4", "bfloat16", 8, 2, 12, 128, 64, bias=True, seed=seed)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case)
    experts = checkpoint.pack()
    tokens.ids[3] = -1
    tokens.ids[7, 0] = -1
    tokens.x[3] = torch.nan
    tokens.weights[7, 0] = torch.inf  # must not be multiplied with anything
    _, y = run_stages(experts, tokens)
    assert torch.equal(y[3], torch.zeros_like(y[3]))
    alone = pp.fused_moe(tokens.x[7:8], experts, tokens.weights[7:8, 1:], tokens.ids[7:8, 1:])
    assert torch.equal(y[7:8], alone)
    _, terms = run_stages(experts, tokens, reduce=False)
    assert torch.equal(terms[3], torch.zeros_like(terms[3]))
    assert torch.equal(terms[7, 0], torch.zeros_like(terms[7, 0]))


def test_all_ids_absent() -> None:
    case = Case(tokens=6)
    tokens = make_tokens(case)
    tokens.ids.fill_(-1)
    _, y = run_stages(make_checkpoint(case).pack(), tokens)
    assert torch.equal(y, torch.zeros(6, case.hidden, dtype=torch.bfloat16))


@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("reduce", [True, False])
def test_no_tokens_and_no_experts_per_token(tokens: int, reduce: bool) -> None:
    case = Case(tokens=tokens, topk=0)
    experts = make_checkpoint(case).pack()
    x, none = torch.randn(tokens, case.hidden), torch.zeros(tokens, 0)
    y = pp.fused_moe(x, experts, none, none.long(), reduce=reduce)
    shape = (tokens, case.hidden) if reduce else (tokens, 0, case.hidden)
    assert torch.equal(y, torch.zeros(shape))


def test_int32_and_int64_ids_give_the_same_bits() -> None:
    case = Case("mxfp4", "float16", 8, 3, 33, 128, 64, seed=1)
    experts = make_checkpoint(case).pack()
    results = [
        run_stages(experts, make_tokens(case, drop=0.2, ids_dtype=dtype))[1] for dtype in (torch.int32, torch.int64)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_one_expert_gets_everything(fmt: str) -> None:
    case = Case(fmt, "bfloat16", 64, 1, 128, 128, 64, seed=2)
    tokens = make_tokens(case)
    tokens.ids.fill_(63)
    check(make_checkpoint(case), tokens)


def rank_of(checkpoint: Checkpoint, local: list[int]) -> pp.PackedExperts:
    """What a rank that holds these experts packs."""
    return checkpoint.pack(**{name: tensor[local] for name, tensor in checkpoint.tensors.items()})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("by_map", [True, False], ids=["expert_map", "local_ids"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranks_add_up(ranks: int, by_map: bool, index: torch.dtype, dtype: str) -> None:
    case = Case("nvfp4", dtype, 8, 3, 17, 128, 64, bias=True, seed=ranks)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case, ids_dtype=index)
    whole = check(checkpoint, tokens, out_dtype="float32", routed_scaling_factor=1.5)
    order = np.random.default_rng(ranks).permutation(case.experts)  # experts need not be contiguous on a rank
    total = torch.zeros_like(whole)
    terms = pp.fused_moe(tokens.x, checkpoint.pack(), tokens.weights, tokens.ids, reduce=False, out_dtype=torch.float32)
    for rank in range(ranks):
        local = sorted(order[rank::ranks].tolist())
        expert_map = torch.full((case.experts,), -1, dtype=index)
        expert_map[local] = torch.arange(len(local), dtype=index)
        ids = expert_map[tokens.ids.long()]
        tokens_here = tokens if by_map else replace(tokens, ids=ids)
        total += check(
            replace(checkpoint, model=model_of_rank(checkpoint, local)),
            tokens_here,
            local_ids=ids,
            out_dtype="float32",
            experts=rank_of(checkpoint, local),
            routed_scaling_factor=1.5,
            expert_map=expert_map if by_map else None,
        )
    bound = (case.topk + ranks + 2) * 2.0**-24 * 1.5 * terms.abs().sum(1)
    assert ((total - whole).abs() <= bound).all()


def model_of_rank(checkpoint: Checkpoint, local: list[int]):
    m = checkpoint.model
    return replace(m, **{name: value[local] for name, value in vars(m).items() if value is not None})


@pytest.mark.parametrize("bad", [-2, 8, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ids_out_of_range_are_refused_before_anything_is_written(bad: int, index: torch.dtype) -> None:
    case = Case(experts=8, topk=2, tokens=9)
    experts, tokens = make_checkpoint(case).pack(), make_tokens(case, ids_dtype=index)
    tokens.ids[8, 1] = bad
    out = torch.full((9, case.hidden), 7.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=rf"topk_ids\[8, 1\] is {bad}: .* below 8, the number of experts packed"):
        pp.fused_moe(tokens.x, experts, tokens.weights, tokens.ids, out=out)
    assert (out == 7).all()


def test_a_bad_expert_map_is_refused() -> None:
    case = Case(experts=4, topk=2, tokens=3)
    experts, tokens = make_checkpoint(case).pack(), make_tokens(case)
    tokens.ids[:] = torch.tensor([0, 5])
    with pytest.raises(ValueError, match=r"topk_ids\[0, 1\] is 5: .* below 4, the length of expert_map"):
        pp.fused_moe(tokens.x, experts, tokens.weights, tokens.ids, expert_map=torch.arange(4))
    with pytest.raises(ValueError, match=r"expert_map\[5\] is 4: .* below 4, the number of experts packed"):
        pp.fused_moe(tokens.x, experts, tokens.weights, tokens.ids, expert_map=torch.tensor([0, 1, 2, 3, -1, 4]))
    with pytest.raises(ValueError, match=r"expert_map\[0\] is -2"):
        pp.fused_moe(tokens.x, experts, tokens.weights, tokens.ids, expert_map=torch.tensor([-2, 1, 2, 3, -1, 0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_nan_token_touches_no_other(dtype: str) -> None:
    case = Case("nvfp4", dtype, 4, 2, 33, 128, 64, bias=True, seed=3)
    experts, tokens = make_checkpoint(case).pack(), make_tokens(case)
    _, clean = run_stages(experts, tokens)
    for poison in (torch.nan, torch.inf):
        tokens.x[5] = poison
        _, y = run_stages(experts, tokens)
        assert torch.isnan(y[5]).all()  # inf - inf in a dot product of mixed signs
        keep = torch.arange(33) != 5
        assert torch.equal(y[keep], clean[keep])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 4, 33])
def test_same_bits_every_time_and_for_every_thread_count(fmt: str, tokens: int, threads) -> None:
    case = Case(fmt, "bfloat16", 8, 4, tokens, 256, 96, bias=True, seed=tokens)
    experts, inputs = make_checkpoint(case).pack(), make_tokens(case, drop=0.1)
    results = []
    for count in (1, 2, 3, 1):
        threads(count)
        results.append(run_stages(experts, inputs))
    for intermediate, y in results[1:]:
        assert torch.equal(intermediate, results[0][0])
        assert torch.equal(y, results[0][1])


@pytest.mark.parametrize("reduce", [True, False])
def test_long_batches_are_done_in_chunks_of_bounded_memory(reduce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("nvfp4", "float32", 8, 2, 700, 32, 32, bias=True, seed=4)
    checkpoint, tokens = make_checkpoint(case), make_tokens(case, drop=0.05)
    sizes = []

    def allocate(nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    monkeypatch.setattr("moe_cases.poisoned_workspace", allocate)
    whole = check(checkpoint, tokens, reduce=reduce)
    monkeypatch.setattr(cpu_moe, "WORKSPACE_BUDGET", 200_000)
    chunked = check(checkpoint, tokens, reduce=reduce)  # each half against the reference
    assert sizes[1] <= 200_000 < sizes[0]
    # Other row counts may run other kernels; where a sum cancels, its error is that of its terms.
    assert torch.allclose(whole, chunked, rtol=1e-5, atol=1e-6 * float(whole.abs().max()))
    y = tokens.x.clone()
    if reduce:  # x may be its own result: a chunk must be read before it is written
        pp.fused_moe(y, checkpoint.pack(), tokens.weights, tokens.ids, out=y)
        assert torch.equal(y, chunked)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("reduce", [True, False])
def test_flush_modes_change_nothing(threads, count: int, reduce: bool) -> None:
    """Subnormal sums, activations and results, whatever torch.set_flush_denormal says, on every thread."""
    threads(count)
    case = Case("nvfp4", "float32", 4, 2, 60, 128, 64, seed=5)
    experts, tokens = make_checkpoint(case).pack(), make_tokens(case)
    tokens.x *= 2.0**-63
    tokens.weights *= 2.0**-5
    _, expected = run_stages(experts, tokens, reduce=reduce)
    magnitude = expected.abs()
    assert bool(((magnitude > 0) & (magnitude < 2.0**-126)).any())
    assert torch.set_flush_denormal(True)
    try:
        _, y = run_stages(experts, tokens, reduce=reduce)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))
