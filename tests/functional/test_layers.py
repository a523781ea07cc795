"""Attention over packed segments, norms and rotary application against explicit formulas."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from qwen3vl_functional.layers import apply_rotary, attention, layer_norm, linear, rms_norm, segments


def per_segment_attention(q, k, v, lengths, causal):
    """Softmax written out, one segment and one query head at a time."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    outputs, begin = [], 0
    for length in lengths:
        rows = slice(begin, begin + length)
        begin += length
        per_head = []
        for head in range(heads):
            scores = q[rows, head] @ k[rows, head // group].T / q.shape[-1] ** 0.5
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            per_head.append(scores.softmax(-1) @ v[rows, head // group])
        outputs.append(torch.cat(per_head, 1))
    return torch.cat(outputs) if outputs else q.flatten(1)


@pytest.mark.parametrize("causal", [True, False])
@given(
    lengths=st.lists(st.integers(1, 7), max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    seed=st.integers(0, 9),
)
@example(lengths=[], heads=(4, 2), seed=0)
@example(lengths=[5, 5], heads=(4, 2), seed=0)
@example(lengths=[1, 7, 3], heads=(6, 1), seed=0)
def test_attention(causal, lengths, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, dim = sum(lengths), 4
    operands = [
        torch.randn(rows, count, dim, generator=generator, dtype=torch.float64) for count in (heads[0], heads[1], heads[1])
    ]
    cotangent = torch.randn(rows, heads[0] * dim, generator=generator, dtype=torch.float64)
    seg = segments(lengths)
    out, pullback = torch.func.vjp(lambda q, k, v: attention(q, k, v, seg, causal=causal), *operands)
    expected, reference = torch.func.vjp(lambda q, k, v: per_segment_attention(q, k, v, lengths, causal), *operands)
    torch.testing.assert_close(out, expected)
    for ours, exact in zip(pullback(cotangent), reference(cotangent), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, exact)


def test_equal_segments_need_no_padding():
    assert segments([4, 4]) == (2, None, None, None)
    pad = segments([4, 3]).pad
    assert pad is not None and pad.shape == (2, 4)
    assert segments([]).count == 0


def test_segments_do_not_see_each_other():
    q, k, v = (torch.randn(9, 2, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    before = attention(q, k, v, segments([4, 5]), causal=False)
    k[4:], v[4:] = 0.0, 1e3
    assert torch.equal(attention(q, k, v, segments([4, 5]), causal=False)[:4], before[:4])


def test_rms_norm_equals_torch():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 8, generator=generator) * 3, torch.randn(8, generator=generator)
    torch.testing.assert_close(rms_norm(weight, x, 1e-3), F.rms_norm(x, (8,), weight, 1e-3))
    low = rms_norm(weight.bfloat16(), x.bfloat16(), 1e-3)
    # Normed in fp32, rounded, then multiplied in bf16: the reference's order.
    normed = F.rms_norm(x.bfloat16().float(), (8,), None, 1e-3).bfloat16()
    assert torch.equal(low, weight.bfloat16() * normed)


def test_layer_norm_and_linear_equal_torch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=generator)
    params = {"weight": torch.randn(8, generator=generator), "bias": torch.randn(8, generator=generator)}
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(layer_norm(params, x), normed * params["weight"] + params["bias"])
    weight, offset = torch.randn(3, 8, generator=generator), torch.randn(3, generator=generator)
    torch.testing.assert_close(linear({"weight": weight}, x), x @ weight.T)
    torch.testing.assert_close(linear({"weight": weight, "bias": offset}, x), x @ weight.T + offset)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rotary_equals_rotate_half(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 8, generator=generator).to(dtype)
    angles = torch.randn(6, 1, 4, generator=generator) * 10
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    expected = (x.float() * cos + rotate_half(x.float()) * sin).to(dtype)
    ours = apply_rotary(x, angles.cos(), angles.sin())
    assert ours.dtype == dtype and torch.equal(ours, expected)
    torch.testing.assert_close(ours.float().norm(dim=-1), x.float().norm(dim=-1), rtol=1e-2, atol=1e-2)  # a rotation
