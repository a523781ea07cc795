"""Cross entropy through the output head, chunk by chunk: no (tokens, vocab) matrix in fp32 ever exists."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from .collectives import Groups, axis_rank

CHUNK_BYTES = 256 << 20  # of fp32 logits held at a time: every chunk reads the whole head, and adds to its whole gradient


class HeadLoss(NamedTuple):
    """Sum of the targets' losses; without gradients, whether each target is the likeliest token; or those of the scaled sum."""

    loss_sum: torch.Tensor  # fp32 scalar, not scaled
    correct: torch.Tensor | None = None  # bool, one per target
    hidden_grad: torch.Tensor | None = None
    weight_grad: torch.Tensor | None = None


def head_loss(
    weight_VD: torch.Tensor,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    groups: Groups = Groups(),
    scale: float = 1.0,
    with_grad: bool = False,
    weight_trainable: bool = True,
) -> HeadLoss:
    """Cross entropy of ``hidden @ weight.T`` against ``targets`` (int64), one pass for value and gradient.

    The rule is closed-form, ``d loss / d logits = softmax - onehot``: each chunk turns its logits into their gradient in
    place, so a chunk costs three matmuls and one buffer, and nothing is kept for a later backward. ``hidden_ND`` holds only
    rows that have a target; no rows give loss 0 and zero gradients. Gradients are of ``scale * loss_sum``, in the
    operands' dtypes. Under tp each rank has part of the vocabulary: maxima, sums and the hidden rows' gradient are reduced.
    """
    num_rows, vocab = len(targets_N), weight_VD.shape[0]
    begin_V = axis_rank(groups.tp) * vocab
    rows = max(1, CHUNK_BYTES // (4 * vocab))
    chunks = -(-num_rows // rows)
    # One buffer for all chunks: the system clears fresh memory page by page, which takes as long as a third of a matmul.
    products_RV = torch.empty(min(rows, num_rows), vocab, dtype=hidden_ND.dtype, device=hidden_ND.device)
    logits_RV = products_RV if products_RV.dtype == torch.float32 else torch.empty_like(products_RV, dtype=torch.float32)
    loss_sum = hidden_ND.new_zeros((), dtype=torch.float32)
    correct = None if with_grad else torch.empty(num_rows, dtype=torch.bool, device=hidden_ND.device)
    hidden_grad = torch.empty_like(hidden_ND) if with_grad else None
    weight_grad = torch.empty_like(weight_VD) if with_grad and weight_trainable else None
    for chunk in range(chunks):
        part = slice(chunk * rows, min((chunk + 1) * rows, num_rows))
        hidden, target = hidden_ND[part], targets_N[part, None] - begin_V  # outside 0 .. vocab: another rank's
        logits = torch.mm(hidden, weight_VD.T, out=products_RV[: len(hidden)])
        if logits_RV is not products_RV:
            logits = logits_RV[: len(hidden)].copy_(logits)
        own_top = logits.amax(-1, keepdim=True)
        mine = (target >= 0) & (target < vocab)
        target = torch.where(mine, target, 0)
        at_target = torch.where(mine, logits.gather(-1, target), 0.0)
        top = _reduced(own_top.clone(), groups, dist.ReduceOp.MAX)
        if correct is not None:  # of equal logits the first counts, whichever rank has it
            likeliest = logits.argmax(-1, keepdim=True) + begin_V
            first = torch.where(own_top == top, likeliest, torch.iinfo(torch.int64).max)
            correct[part] = (_reduced(first, groups, dist.ReduceOp.MIN) == targets_N[part, None])[:, 0]
        exps = logits.sub_(top).exp_()
        sums = torch.cat((exps.sum(-1, keepdim=True), at_target), dim=-1)
        total, at_target = _reduced(sums, groups, dist.ReduceOp.SUM).split(1, dim=-1)
        loss_sum += (total.log() + top - at_target).sum()
        if hidden_grad is None:
            continue
        # The gradient is (exps - total * onehot) * scale / total. What scales a row goes to the narrow operand and result.
        grad = exps.scatter_add_(-1, target, torch.where(mine, -total, 0.0))
        if logits_RV is not products_RV:
            grad = products_RV[: len(hidden)].copy_(grad)
        row_scale = (scale / total).to(hidden.dtype)
        torch.mm(grad, weight_VD, out=hidden_grad[part]).mul_(row_scale)
        if weight_grad is not None:
            weight_grad.addmm_(grad.T, hidden * row_scale, beta=0 if chunk == 0 else 1)
    if weight_grad is not None and chunks == 0:
        weight_grad.zero_()
    if hidden_grad is not None:
        hidden_grad = _reduced(hidden_grad, groups, dist.ReduceOp.SUM)
    return HeadLoss(loss_sum, correct, hidden_grad, weight_grad)


def _reduced(x: torch.Tensor, groups: Groups, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce over the tp ranks, in place."""
    if groups.tp is not None:
        dist.all_reduce(x, op=op, group=groups.tp)
    return x
