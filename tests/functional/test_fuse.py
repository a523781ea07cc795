"""Joined blocks are the blocks they join: values, gradients, and nothing kept that nobody reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import fuse, run, value_and_grad

from qwen3vl_functional.spec import leaves
from qwen3vl_functional.transforms import Block, Loss, LossValue

NAMES = ("a", "b", "c")


def block(index, reads, writes, remat=False):
    def fn(params, *values):
        total = sum((value for value in values), torch.ones(3)) @ params["w"]
        return tuple(torch.sin(total * (1 + j)) for j in range(len(writes)))

    return Block((f"blocks.{index}",), reads, writes, fn, remat)


@st.composite
def chains(draw):
    count = draw(st.integers(1, 6))
    written = {"a"}
    blocks = [block(0, (), ("a",))]
    for index in range(1, count + 1):
        reads = tuple(draw(st.lists(st.sampled_from(sorted(written)), min_size=1, max_size=2, unique=True)))
        writes = tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)))
        written |= set(writes)
        blocks.append(block(index, reads, writes, draw(st.booleans())))
    keep = draw(st.lists(st.sampled_from(sorted(written)), min_size=1, unique=True))
    return blocks, tuple(keep)


def quadratic(keep):
    def fn(_, values):
        loss = sum((value * value).sum() for value in values.values()) / 2
        return LossValue(loss, {}, {}, dict(values))

    return Loss((), keep, fn)


def gradients(blocks, keep, tree):
    grads = {}
    value = value_and_grad(blocks, quadratic(keep), tree, {path for path, _ in leaves(tree)}, grads)
    return value.loss, grads


@settings(max_examples=80, deadline=None)
@given(chains(), st.sampled_from([0, 72, 150, 10**6]))
def test_fused_equals_plain(case, max_bytes):
    blocks, keep = case
    generator = torch.Generator().manual_seed(1)
    tree = {"blocks": {str(i): {"w": torch.randn(3, 3, generator=generator)} for i in range(len(blocks))}}
    fused = fuse(blocks, tree, keep, max_bytes=max_bytes)
    assert [path for b in fused for path in b.paths] == [path for b in blocks for path in b.paths]
    plain_values, fused_values = run(blocks, tree), run(fused, tree)
    assert all(torch.equal(plain_values[name], fused_values[name]) for name in keep)
    loss, grads = gradients(blocks, keep, tree)
    fused_loss, fused_grads = gradients(fused, keep, tree)
    assert torch.equal(loss, fused_loss)
    for path, grad in grads.items():
        torch.testing.assert_close(fused_grads.get(path, torch.zeros_like(grad)), grad, rtol=1e-5, atol=1e-6)


def test_the_bound_and_remat_separate():
    blocks = [block(0, (), ("a",)), *(block(i, ("a",), ("a",), remat=i == 3) for i in range(1, 6))]
    tree = {"blocks": {str(i): {"w": torch.zeros(3, 3)} for i in range(6)}}  # 36 bytes each
    assert [len(b.paths) for b in fuse(blocks, tree, ("a",), max_bytes=10**6)] == [3, 1, 2]
    assert [len(b.paths) for b in fuse(blocks, tree, ("a",), max_bytes=72)] == [2, 1, 1, 2]
    assert [len(b.paths) for b in fuse(blocks, tree, ("a",), max_bytes=1)] == [1] * 6


def test_only_what_is_read_later_is_written():
    blocks = [block(0, (), ("a", "b")), block(1, ("a",), ("c",)), block(2, ("c",), ("a",))]
    tree = {"blocks": {str(i): {"w": torch.eye(3)} for i in range(3)}}
    (joined,) = fuse(blocks, tree, ("a",))
    assert joined.writes == ("a",) and joined.reads == ()


@pytest.mark.parametrize("max_bytes", [0, 10**6])
def test_a_leaf_used_by_two_blocks_adds_up(max_bytes):
    blocks = [block(0, (), ("a",)), block(1, ("a",), ("b",)), block(0, ("b",), ("a",))]
    tree = {"blocks": {str(i): {"w": torch.eye(3) * (0.5 + i)} for i in range(2)}}
    w0, w1 = (tree["blocks"][str(i)]["w"].clone().requires_grad_() for i in range(2))
    a = torch.sin(torch.ones(3) @ w0)
    b = torch.sin((torch.ones(3) + a) @ w1)
    loss = (torch.sin((torch.ones(3) + b) @ w0) ** 2).sum() / 2
    expected = torch.autograd.grad(loss, (w0, w1))
    value, grads = gradients(fuse(blocks, tree, ("a",), max_bytes=max_bytes), ("a",), tree)
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close((grads["blocks.0.w"], grads["blocks.1.w"]), expected)
