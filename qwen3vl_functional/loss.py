"""Cross entropy through the output head, chunk by chunk: no (tokens, vocab) matrix in fp32 ever exists."""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK_BYTES = 64 << 20  # of fp32 logits held at a time


class HeadLoss(NamedTuple):
    """Sum of the targets' losses, whether each target is the likeliest token, and the gradients of the scaled sum."""

    loss_sum: torch.Tensor  # fp32 scalar, not scaled
    correct: torch.Tensor  # bool, one per target
    hidden_grad: torch.Tensor | None = None
    weight_grad: torch.Tensor | None = None


def head_loss(
    weight_VD: torch.Tensor,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    scale: float = 1.0,
    with_grad: bool = False,
    weight_trainable: bool = True,
) -> HeadLoss:
    """Cross entropy of ``hidden @ weight.T`` against ``targets`` (int64), one pass for value and gradient.

    The rule is closed-form, ``d loss / d logits = softmax - onehot``: each chunk turns its logits into their gradient in
    place, so a chunk costs three matmuls and one buffer, and nothing is kept for a later backward. ``hidden_ND`` holds only
    rows that have a target; no rows give loss 0 and zero gradients. Gradients are of ``scale * loss_sum``, in the
    operands' dtypes.
    """
    num_rows, vocab = len(targets_N), weight_VD.shape[0]
    rows = max(1, CHUNK_BYTES // (4 * vocab))
    loss_sum = hidden_ND.new_zeros((), dtype=torch.float32)
    correct = torch.empty(num_rows, dtype=torch.bool, device=hidden_ND.device)
    hidden_grad = torch.empty_like(hidden_ND) if with_grad else None
    weight_grad = torch.zeros_like(weight_VD) if with_grad and weight_trainable else None
    for begin in range(0, num_rows, rows):
        part = slice(begin, min(begin + rows, num_rows))
        hidden, target = hidden_ND[part], targets_N[part, None]
        logits = (hidden @ weight_VD.T).float()
        top, likeliest = logits.max(-1, keepdim=True)
        correct[part] = (likeliest == target)[:, 0]
        at_target = logits.gather(-1, target)
        exps = logits.sub_(top).exp_()
        total = exps.sum(-1, keepdim=True)
        loss_sum += (total.log() + top - at_target).sum()
        if hidden_grad is None:
            continue
        grad = exps.mul_(scale / total)
        grad.scatter_add_(-1, target, torch.full_like(at_target, -scale))
        grad = grad.to(weight_VD.dtype)
        torch.mm(grad, weight_VD, out=hidden_grad[part])
        if weight_grad is not None:
            weight_grad.addmm_(grad.T, hidden)
    return HeadLoss(loss_sum, correct, hidden_grad, weight_grad)
