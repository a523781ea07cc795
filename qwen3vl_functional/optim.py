"""AdamW over a tree, its schedules and the global-norm clip. The arithmetic is torch's own functional kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch.optim.adamw import adamw

from .sharding import local_view
from .spec import ParamSpec, leaves, to_tensordict

NORM_PIECE = 1 << 15  # elements

Decay = Literal["cosine", "linear", "constant"]


class AdamW(NamedTuple):
    """Hyperparameters; leaves whose spec says ``decay=False`` get no weight decay. ``foreach`` None: torch's best."""

    lr: float = 1e-4
    lr_min: float = 1e-5
    decay_style: Decay = "cosine"
    warmup_steps: int = 0
    total_steps: int = 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # <= 0: the norm is reported, nothing is clipped
    foreach: bool | None = None


class AdamWState(NamedTuple):
    """Moments of the trainable leaves, shaped as they are, and the number of updates made (torch's names)."""

    exp_avg: TensorDict
    exp_avg_sq: TensorDict
    step: int


def learning_rate(cfg: AdamW, step: int) -> float:
    """Rate of the 0-based ``step``: linear warm-up from 0, then the decay from ``lr`` to ``lr_min``, held at the end."""
    if step < cfg.warmup_steps:
        return cfg.lr * step / cfg.warmup_steps
    if cfg.decay_style == "constant":
        return cfg.lr
    progress = min(1.0, (step - cfg.warmup_steps) / max(1, cfg.total_steps - cfg.warmup_steps))
    shape = (1 + math.cos(math.pi * progress)) / 2 if cfg.decay_style == "cosine" else 1 - progress
    return cfg.lr_min + (cfg.lr - cfg.lr_min) * shape


def init_opt_state(params: Mapping[str, torch.Tensor]) -> AdamWState:
    """Zero moments for trainable leaves given by path, placed as they are."""
    zeros = [to_tensordict({path: torch.zeros_like(leaf) for path, leaf in params.items()}) for _ in range(2)]
    return AdamWState(zeros[0], zeros[1], 0)


def global_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm over all gradients together, fp32 scalar.

    Long tensors are summed piece by piece: added up in one run, ten million fp32 squares are off by 1e-5, and by another amount
    for every way of cutting them over ranks.
    """
    short = [grad for grad in grads if grad.numel() <= NORM_PIECE]
    norms = [torch.stack(torch._foreach_norm(short))] if short else []
    for grad in grads:
        if grad.numel() > NORM_PIECE:
            flat = grad.flatten()
            whole = flat.numel() // NORM_PIECE * NORM_PIECE
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, NORM_PIECE), dim=1))
            norms.append(torch.linalg.vector_norm(flat[whole:])[None])
    return torch.linalg.vector_norm(torch.cat(norms))


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm is at most ``max_norm``, as torch's clip_grad_norm_."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm > 0 else torch.ones_like(norm)


def adamw_update(
    params: Mapping[str, torch.Tensor],
    grads: Mapping[str, torch.Tensor],
    state: AdamWState,
    specs: Mapping[str, ParamSpec],
    cfg: AdamW,
    *,
    grad_factor: torch.Tensor,
) -> AdamWState:
    """One update of the trainable leaves (by path); reuses the storage of ``params``, ``grads`` and ``state``.

    Gradients are multiplied with ``grad_factor`` (the clip) on the way, inside the fused kernel where there is one.
    Every trainable leaf is updated in every step: a tower that saw no image has a zero gradient, not none, so its
    moments decay and its weights decay, whatever the data of other ranks.
    """
    if not params:
        return state
    device = next(iter(params.values())).device
    fused = cfg.foreach is None and _has_fused_kernel(device.type)
    if not fused:
        torch._foreach_mul_(list(grads.values()), grad_factor)
    exp_avg, exp_avg_sq = (dict(leaves(tree)) for tree in (state.exp_avg, state.exp_avg_sq))
    for decay in (True, False):
        paths = [path for path in params if specs[path].decay == decay]
        if not paths:
            continue
        lists = (
            [params[path] for path in paths],
            [grads[path] for path in paths],
            [local_view(exp_avg[path]) for path in paths],
            [local_view(exp_avg_sq[path]) for path in paths],
        )
        rates: dict[str, Any] = {
            "beta1": cfg.betas[0],
            "beta2": cfg.betas[1],
            "lr": learning_rate(cfg, state.step),
            "weight_decay": cfg.weight_decay if decay else 0.0,
            "eps": cfg.eps,
        }
        if fused:
            _fused_adamw(lists, torch.full((), state.step + 1.0, device=device), 1.0 / grad_factor, rates)
        else:
            steps = list(torch.full((len(paths),), float(state.step), device=device).unbind())
            adamw(*lists, [], steps, foreach=cfg.foreach, amsgrad=False, maximize=False, **rates)
    return state._replace(step=state.step + 1)


def _fused_adamw(
    lists: Sequence[list[torch.Tensor]], step: torch.Tensor, grad_scale: torch.Tensor, rates: Mapping[str, Any]
) -> None:
    """torch's fused kernel, which divides gradients by ``grad_scale``. ``step`` counts this update; all leaves share it."""
    kernel: Any = torch._fused_adamw_  # its type knows neither None nor mappings
    steps = [step] * len(lists[0])
    kernel(*lists, [], steps, amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=None, **rates)


@functools.cache
def _has_fused_kernel(device_type: str) -> bool:
    """Whether torch's fused AdamW runs on this kind of device: asked by running it once."""
    one = torch.ones((), device=device_type)
    rates: dict[str, Any] = {"beta1": 0.9, "beta2": 0.9, "lr": 0.0, "weight_decay": 0.0, "eps": 1.0}
    try:
        _fused_adamw([[torch.ones(1, device=device_type)] for _ in range(4)], one, one, rates)
    except (AttributeError, RuntimeError, TypeError):  # not in this torch, not on this device, with other arguments
        return False
    return True
