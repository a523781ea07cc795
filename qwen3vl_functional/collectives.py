"""Collectives that torch.func can differentiate, named by what a tensor is across the ranks of an axis.

A tensor is *replicated* (equal on all ranks), *varying* (each rank has its own) or *partial* (the ranks' values add up to
the meaning). Every function is the identity where the group is None, and states its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Hand a replicated tensor to per-rank work; backward: the ranks' gradients are added up (all-reduce)."""
    return x if group is None else _apply(x, group, _same, _summed)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Add up a partial tensor, giving a replicated one; backward: the identity."""
    return x if group is None else _apply(x, group, _summed, _same)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Join the ranks' rows (dim 0, equally many), giving a replicated tensor that each rank uses in its own way; backward:
    reduce-scatter."""
    return x if group is None else _apply(x, group, _gathered, _scattered)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Add up a partial tensor and keep this rank's rows (dim 0 divides), giving a varying one; backward: all-gather."""
    return x if group is None else _apply(x, group, _scattered, _gathered)


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup | None, *, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Send ``sent[r]`` rows to each rank r and join the ``received[r]`` rows that each sends; backward: the way back."""
    if group is None:
        return x

    def there(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _exchanged(rows, group, sent, received)

    def back(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _exchanged(rows, group, received, sent)

    return _apply(x, group, there, back)


Communicate = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

# torch 2.13 renamed both.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _same(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    gather_single(out, x.contiguous(), group=group)
    return out


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    scatter_single(out, x.contiguous(), group=group)
    return out


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out


def _apply(x: torch.Tensor, group: dist.ProcessGroup, forward: Communicate, backward: Communicate) -> torch.Tensor:
    return _Collective.apply(x, group, forward, backward)  # pyright: ignore[reportReturnType]


class _Collective(torch.autograd.Function):
    """A linear map over ranks and its transpose. ``setup_context`` is what lets torch.func differentiate it."""

    @staticmethod
    def forward(x: torch.Tensor, group: dist.ProcessGroup, forward: Communicate, backward: Communicate) -> torch.Tensor:
        return forward(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.group, _, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.transpose(grads[0], ctx.group), None, None, None
