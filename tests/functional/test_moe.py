"""Grouped matmuls and the experts against plain einsums, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from qwen3vl_functional import moe as moe_module
from qwen3vl_functional.collectives import Groups
from qwen3vl_functional.moe import grouped_linear, load_balance, moe, route, run_experts

# fp32 sums over at most 64 terms; bf16 has 8 bits, and its intermediate results are rounded too.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


@pytest.fixture
def loop_only(monkeypatch):
    monkeypatch.setattr(moe_module, "_can_group", lambda *_: False)


def relative(ours, expected):
    return float((ours.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def grads_of(fn, *inputs, seed=5):
    """Value, and gradients of a random weighted sum."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, cotangent)


def dense_linear(x_RD, weight_EDF, count_E):
    """Every row through every expert, then the right one is picked."""
    expert_R = torch.repeat_interleave(torch.arange(len(count_E)), count_E)
    return torch.einsum("rd,edf,re->rf", x_RD, weight_EDF, F.one_hot(expert_R, len(count_E)).to(x_RD.dtype))


def grouped_operands(counts, d, f, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), d, generator=generator).to(dtype)
    weight = torch.randn(len(counts), d, f, generator=generator).to(dtype)
    return x, weight, torch.tensor(counts)


@pytest.mark.parametrize("dtype", TOLERANCE)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=5), d=st.sampled_from([1, 3, 8, 16]), f=st.sampled_from([1, 5, 8, 24])
)
@example(counts=[0, 0, 0], d=8, f=16)
@example(counts=[0, 5, 0, 2, 0], d=8, f=16)
@example(counts=[0, 5, 0, 2, 0], d=7, f=5)
def test_grouped_linear(dtype, counts, d, f):
    x, weight, count = grouped_operands(counts, d, f, dtype)
    results = grads_of(lambda x, w: grouped_linear(x, w, count.cumsum(0).int()), x, weight)
    expected = grads_of(lambda x, w: dense_linear(x, w, count), x.double(), weight.double())
    for ours, reference in zip(results, expected, strict=True):
        assert ours.dtype == dtype and ours.shape == reference.shape
        assert relative(ours, reference) < TOLERANCE[dtype]
    for expert, rows in enumerate(counts):
        if rows == 0:
            assert not results[2][expert].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_grouped_kernel_equals_loop(dtype, monkeypatch):
    x, weight, count = grouped_operands([3, 0, 4, 1], 16, 8, dtype)
    kernel = grads_of(lambda x, w: grouped_linear(x, w, count.cumsum(0).int()), x, weight)
    monkeypatch.setattr(moe_module, "_can_group", lambda *_: False)
    loop = grads_of(lambda x, w: grouped_linear(x, w, count.cumsum(0).int()), x, weight)
    for ours, reference in zip(kernel, loop, strict=True):
        assert relative(ours, reference) < TOLERANCE[dtype]


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped matmul")
def test_the_kernel_as_an_operator_for_compilers():
    x, weight, count = grouped_operands([3, 0, 4, 1], 16, 8, torch.float32)
    ends = count.cumsum(0).int()
    expected = grads_of(lambda x, w: grouped_linear(x, w, ends), x, weight)
    results = grads_of(lambda x, w: moe_module._GroupedMM.apply(x, w, ends), x, weight)
    assert all(torch.equal(ours, reference) for ours, reference in zip(results, expected, strict=True))
    torch.library.opcheck(torch.ops.qwen3vl_functional.grouped_mm.default, (x, weight, ends))


def test_which_operands_the_kernel_takes():
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped matmul")
    takes = moe_module._can_group
    assert takes(torch.zeros(3, 8), torch.zeros(2, 8, 4))
    assert takes(torch.zeros(3, 8).bfloat16(), torch.zeros(2, 8, 16).bfloat16())
    assert not takes(torch.zeros(3, 8).bfloat16(), torch.zeros(2, 8, 4).bfloat16())  # 8 bytes
    assert not takes(torch.zeros(3, 5), torch.zeros(2, 5, 4))
    assert not takes(torch.zeros(0, 8), torch.zeros(2, 8, 4))
    assert not takes(torch.zeros(3, 8).double(), torch.zeros(2, 8, 4).double())


def dense_experts(gate_up, down, x, experts, weights):
    """Each token through its K experts, one by one."""
    gate, up = torch.einsum("td,edf->tef", x, gate_up).chunk(2, dim=-1)
    y_TED = torch.einsum("tef,efd->ted", F.silu(gate) * up, down)
    mix_TE = torch.zeros(len(x), len(gate_up), dtype=x.dtype).scatter(1, experts, weights)
    return torch.einsum("te,ted->td", mix_TE, y_TED)


def expert_operands(tokens, *, num_experts=6, k=2, d=8, f=4, dtype=torch.float32, usable=None):
    """Random distinct experts per token, all below ``usable``."""
    generator = torch.Generator().manual_seed(tokens)
    gate_up = torch.randn(num_experts, d, 2 * f, generator=generator).to(dtype)
    down = torch.randn(num_experts, f, d, generator=generator).to(dtype)
    x = torch.randn(tokens, d, generator=generator).to(dtype)
    experts = torch.rand(tokens, usable or num_experts, generator=generator).argsort(-1)[:, :k]
    weights = torch.rand(tokens, k, generator=generator).to(dtype)
    return (gate_up, down, x, weights), experts, torch.bincount(experts.flatten(), minlength=num_experts)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [4, 3])  # 3: rows that the grouped kernel refuses
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_run_experts(dtype, width, tokens):
    operands, experts, count = expert_operands(tokens, f=width, dtype=dtype)

    def ours(gate_up, down, x, weights):
        return run_experts(gate_up, down, x, experts, weights, first=0, count_E=count)

    def reference(gate_up, down, x, weights):
        return dense_experts(gate_up, down, x, experts, weights)

    results = grads_of(ours, *operands)
    expected = grads_of(reference, *(x.double() for x in operands))
    for result, exact in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert relative(result, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 6])
@pytest.mark.parametrize("tokens", [0, 5])
def test_expert_ranges_add_up(num_ranges, tokens):
    """Each range of experts as one rank runs it; with 3 of 6 experts in use, some ranges get no token."""
    operands, experts, count = expert_operands(tokens, dtype=torch.float64, usable=3)
    size = 6 // num_ranges

    def ranges(gate_up, down, x, weights):
        parts = [
            run_experts(gate_up[at : at + size], down[at : at + size], x, experts, weights, first=at, count_E=count)
            for at in range(0, 6, size)
        ]
        return torch.stack(parts).sum(0)

    def whole(gate_up, down, x, weights):
        return dense_experts(gate_up, down, x, experts, weights)

    for ours, expected in zip(grads_of(ranges, *operands), grads_of(whole, *operands), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_route(cfg):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 48, generator=generator)
    x = torch.randn(20, 48, generator=generator)
    routing = route(weight, x, cfg.text)
    probs = (x @ weight.T).softmax(-1)
    for token in range(20):
        order = probs[token].argsort(descending=True)[:3]
        assert routing.experts_TK[token].tolist() == order.tolist()
        torch.testing.assert_close(routing.weights_TK[token], probs[token][order] / probs[token][order].sum())
    assert routing.count_E.tolist() == [int((routing.experts_TK == e).sum()) for e in range(12)]
    torch.testing.assert_close(routing.prob_sum_E, probs.sum(0))
    low = route(weight.bfloat16(), x.bfloat16(), cfg.text)
    assert low.weights_TK.dtype == torch.bfloat16 and low.prob_sum_E.dtype == torch.float32


def test_moe_is_route_then_experts(cfg, loop_only):
    (gate_up, down, x, _), _, _ = expert_operands(9, num_experts=12, k=3, d=48, f=40)
    weight = torch.randn(12, 48, generator=torch.Generator().manual_seed(1)) * 0.1

    def ours(weight, gate_up, down, x):
        params = {"gate": {"weight": weight}, "experts": {"gate_up_proj": gate_up, "down_proj": down}}
        return moe(params, x, cfg.text, Groups())[0]

    def reference(weight, gate_up, down, x):
        chosen, experts = (x @ weight.T).softmax(-1).topk(3)
        return dense_experts(gate_up, down, x, experts, chosen / chosen.sum(-1, keepdim=True))

    operands = (weight, gate_up, down, x)
    expected = grads_of(reference, *(x.double() for x in operands))
    for result, exact in zip(grads_of(ours, *operands), expected, strict=True):
        assert relative(result, exact) < 1e-5


def test_load_balance():
    """K when every expert gets its share; larger when all tokens crowd on one; gradients flow through probabilities alone."""
    even = torch.full((6,), 10.0)  # 60 rows
    assert float(load_balance(even, torch.full((6,), 20), 60)) == pytest.approx(2.0)
    crowded = torch.tensor([60.0, 0, 0, 0, 0, 0])
    assert float(load_balance(crowded, torch.tensor([60, 60, 0, 0, 0, 0]), 60)) == pytest.approx(6.0)
    assert float(load_balance(torch.zeros(6), torch.zeros(6, dtype=torch.int64), 0)) == 0.0
    prob = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: load_balance(p, torch.arange(6), 15), prob)
