"""Cross entropy through the head, chunk by chunk, against torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3vl_functional import loss as loss_module
from qwen3vl_functional.loss import head_loss

# Logits and their gradient are fp32 whatever the operands; bf16 rounds the logits before and the gradient after.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def operands(rows, vocab, width, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    return weight, hidden, torch.randint(0, vocab, (rows,), generator=generator)


def chunked(rows_per_chunk, vocab):
    patch = pytest.MonkeyPatch()
    patch.setattr(loss_module, "CHUNK_BYTES", rows_per_chunk * 4 * vocab)
    return patch


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "rows_per_chunk"), [(1, 4), (8, 4), (9, 4), (11, 4), (11, 1), (11, 100)])
def test_equals_cross_entropy(dtype, rows, rows_per_chunk):
    weight, hidden, targets = operands(rows, 50, 8, dtype)
    targets[::2] = (hidden @ weight.T).float().argmax(-1)[::2]  # some are right
    patch = chunked(rows_per_chunk, 50)
    try:
        result = head_loss(weight, hidden, targets, scale=0.37, with_grad=True)
        value = head_loss(weight, hidden, targets)
    finally:
        patch.undo()
    exact = [x.double().requires_grad_() for x in (weight, hidden)]
    logits = exact[1] @ exact[0].T
    expected = F.cross_entropy(logits, targets, reduction="sum")
    weight_grad, hidden_grad = torch.autograd.grad(0.37 * expected, exact)
    assert result.loss_sum.dtype == torch.float32
    assert relative(result.loss_sum, expected.detach()) < TOLERANCE[dtype]
    assert torch.equal(value.correct, (hidden @ weight.T).float().argmax(-1) == targets)
    assert result.hidden_grad.dtype == result.weight_grad.dtype == dtype
    assert relative(result.hidden_grad, hidden_grad) < TOLERANCE[dtype]
    assert relative(result.weight_grad, weight_grad) < TOLERANCE[dtype]
    assert torch.equal(value.loss_sum, result.loss_sum) and result.correct is None
    assert value.hidden_grad is None and value.weight_grad is None


@given(rows=st.integers(0, 12), rows_per_chunk=st.integers(0, 5), vocab=st.integers(1, 9), scale=st.floats(-2, 2))
def test_chunks_do_not_matter(rows, rows_per_chunk, vocab, scale):
    weight, hidden, targets = operands(rows, vocab, 3)
    whole = head_loss(weight, hidden, targets, scale=scale, with_grad=True)
    patch = chunked(rows_per_chunk, vocab)
    try:
        parts = head_loss(weight, hidden, targets, scale=scale, with_grad=True)
    finally:
        patch.undo()
    for name in ("loss_sum", "hidden_grad", "weight_grad"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-5)


def test_no_targets():
    weight, hidden, targets = operands(0, 50, 8)
    result = head_loss(weight, hidden, targets, with_grad=True)
    assert result.loss_sum == 0 and head_loss(weight, hidden, targets).correct.shape == (0,)
    assert result.hidden_grad.shape == (0, 8)
    assert torch.equal(result.weight_grad, torch.zeros(50, 8))


def test_frozen_head_gets_no_gradient():
    weight, hidden, targets = operands(5, 50, 8)
    result = head_loss(weight, hidden, targets, with_grad=True, weight_trainable=False)
    assert result.weight_grad is None
    assert torch.equal(result.hidden_grad, head_loss(weight, hidden, targets, with_grad=True).hidden_grad)


def test_large_logits_stay_finite():
    weight, hidden, targets = operands(6, 20, 4)
    result = head_loss(weight * 1e3, hidden, targets, with_grad=True)
    assert result.loss_sum.isfinite() and result.hidden_grad.isfinite().all() and result.weight_grad.isfinite().all()
    torch.testing.assert_close(result.loss_sum, F.cross_entropy(hidden @ (weight * 1e3).T, targets, reduction="sum"))


def test_operands_are_left_alone():
    weight, hidden, targets = operands(6, 20, 4)
    before = [x.clone() for x in (weight, hidden, targets)]
    head_loss(weight, hidden, targets, with_grad=True)
    assert all(torch.equal(x, y) for x, y in zip(before, (weight, hidden, targets), strict=True))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("with_grad", [False, True])
def test_whole_logits_never_exist(with_grad):
    weight, hidden, targets = operands(64, 100, 4)
    patch = chunked(8, 100)
    try:
        with LargestTensor() as largest:
            head_loss(weight, hidden, targets, with_grad=with_grad)
    finally:
        patch.undo()
    assert largest.numel == 8 * 100  # one chunk; all logits would be 6400
    with LargestTensor() as largest:  # the recorder does see them
        F.cross_entropy(hidden @ weight.T, targets)
    assert largest.numel == 64 * 100
