"""Collectives that torch.func can differentiate, named by what a tensor is across the ranks of an axis.

A tensor is *replicated* (equal on all ranks), *varying* (each rank has its own) or *partial* (the ranks' values add up to
the meaning). Every function is the identity where the group is None, and states its backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Groups(NamedTuple):
    """The process group of each mesh axis that the forward itself talks over; None: an axis of size 1."""

    tp: dist.ProcessGroup | None = None


def axis_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's coordinate along an axis."""
    return 0 if group is None else dist.get_rank(group)


def replicated_to_varying(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Hand a replicated tensor to per-rank work; backward: the ranks' gradients are added (all-reduce)."""
    return x if group is None else _ReplicatedToVarying.apply(x, group)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Add up a partial tensor, giving a replicated one; backward: the identity."""
    return x if group is None else _AllReduce.apply(x, group)


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class _ReplicatedToVarying(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
