"""The training step: ``step(state, micro_batches) -> (state, metrics)``, composed once from pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict

from .collectives import Groups
from .config import Qwen3VLMoeConfig
from .loss import head_loss
from .model import Remat, head_path, model_blocks, param_specs
from .moe import load_balance
from .optim import AdamW, AdamWState, adamw_update, clip_factor, global_norm, init_opt_state, learning_rate
from .positions import IGNORE_INDEX, Batch, Inputs, prepare
from .spec import leaves, split_frozen, subtree
from .transforms import Loss, LossValue, Values, fuse, run, value_and_grad

LossAggregation = Literal["token_weighted", "rank_average"]


class TrainState(NamedTuple):
    """All that a step changes: the weights and the optimizer's state (which counts the steps)."""

    params: TensorDict
    opt_state: AdamWState


class StepMetrics(NamedTuple):
    """Numbers of one step, over all micro-batches."""

    loss: torch.Tensor  # what was differentiated: the mean over targets, plus the weighted load balance
    grad_norm: torch.Tensor  # before clipping
    lr: float
    num_targets: int
    load_balance: torch.Tensor | None  # unweighted, mean over micro-batches; None where it is off


class EvalMetrics(NamedTuple):
    """Sums over one batch: token losses, targets, samples that have a target, and those whose every target came first."""

    loss_sum: torch.Tensor
    num_targets: int
    num_answers: int
    num_correct: int


TrainStep = Callable[[TrainState, Sequence[Batch]], tuple[TrainState, StepMetrics]]


def init_state(params: TensorDict, cfg: Qwen3VLMoeConfig, *, frozen: tuple[str, ...] = ()) -> TrainState:
    """A fresh state around given weights; frozen subtrees get no moments."""
    trainable, _ = split_frozen(param_specs(cfg), frozen)
    flat = dict(leaves(params.to_dict()))
    return TrainState(params, init_opt_state({path: flat[path] for path in trainable}))


def make_train_step(
    cfg: Qwen3VLMoeConfig,
    optimizer: AdamW,
    *,
    frozen: tuple[str, ...] = (),
    remat: Remat = "off",
    dtype: torch.dtype | None = None,
    head_dtype: torch.dtype | None = None,
    loss_aggregation: LossAggregation = "token_weighted",
    groups: Groups = Groups(),
) -> TrainStep:
    """Compose the step. ``dtype``: of parameters and activations in flight (None: as at rest); ``head_dtype``: of the
    output head's matmuls where that differs.

    The step takes the micro-batches of one update and reuses the storage of the state it was handed.
    """
    specs = dict(leaves(param_specs(cfg)))
    trainable = frozenset(split_frozen(param_specs(cfg), frozen)[0])

    def step(state: TrainState, micro_batches: Sequence[Batch]) -> tuple[TrainState, StepMetrics]:
        tree = state.params.to_dict()
        loss, balance, num_targets, grads = accumulate(
            tree,
            micro_batches,
            cfg,
            trainable,
            remat=remat,
            dtype=dtype,
            head_dtype=head_dtype,
            loss_aggregation=loss_aggregation,
            groups=groups,
        )
        ordered = {path: leaf for path, leaf in leaves(tree) if path in trainable}
        grads = {path: grads[path] for path in ordered}
        norm = global_norm(list(grads.values()))
        factor = clip_factor(norm, optimizer.max_grad_norm)
        lr = learning_rate(optimizer, state.opt_state.step)
        opt_state = adamw_update(ordered, grads, state.opt_state, specs, optimizer, grad_factor=factor)
        return TrainState(state.params, opt_state), StepMetrics(loss, norm, lr, num_targets, balance)

    return step


def accumulate(
    tree: Mapping[str, Any],
    micro_batches: Sequence[Batch],
    cfg: Qwen3VLMoeConfig,
    trainable: frozenset[str],
    *,
    remat: Remat = "off",
    dtype: torch.dtype | None = None,
    head_dtype: torch.dtype | None = None,
    loss_aggregation: LossAggregation = "token_weighted",
    groups: Groups = Groups(),
) -> tuple[torch.Tensor, torch.Tensor | None, int, Values]:
    """Loss, load balance, number of targets and gradients (fp32, by path) of one update's micro-batches together.

    ``token_weighted`` divides the sum of token losses once, by the count over all micro-batches, so that accumulation
    cannot change it; ``rank_average`` averages the micro-batches' means.
    """
    if not micro_batches:
        raise ValueError("a step needs at least one micro-batch; a rank without samples takes one without targets")
    counts = [count_targets(batch) for batch in micro_batches]
    grads: Values = {}
    losses, balances = [], []
    for batch, count in zip(micro_batches, counts, strict=True):
        if loss_aggregation == "token_weighted":
            scale = 1.0 / max(1, sum(counts))
        else:
            scale = 1.0 / (max(1, count) * len(counts))
        inputs = prepare(batch, cfg)
        blocks = model_blocks(cfg, inputs, groups, rows=inputs.text.target_rows, remat=remat)
        loss = training_loss(cfg, inputs, trainable, scale=scale, balance_scale=1.0 / len(counts), dtype=head_dtype)
        blocks = fuse(blocks, tree, loss.reads)
        value = value_and_grad(blocks, loss, tree, trainable, grads, dtype=dtype)
        losses.append(value.loss)
        balances += [value.metrics["load_balance"]] if "load_balance" in value.metrics else []
    total = torch.stack(losses).sum()
    return total, torch.stack(balances).mean() if balances else None, sum(counts), grads


def count_targets(batch: Batch) -> int:
    """Number of unmasked tokens whose next token is a target."""
    targets = batch["labels"][:, 1:] != IGNORE_INDEX
    if "attention_mask" in batch:
        targets = targets & batch["attention_mask"][:, :-1].bool()
    return int(targets.sum())


def training_loss(
    cfg: Qwen3VLMoeConfig,
    inputs: Inputs,
    trainable: frozenset[str],
    *,
    scale: float,
    balance_scale: float,
    dtype: torch.dtype | None = None,
) -> Loss:
    """The end of the chain: ``scale`` x the sum of token losses, plus the weighted load balance where it is on.

    ``dtype``: of the output head's matmuls (None: as the blocks).
    """
    text, head = cfg.text, head_path(cfg)
    moe_layers = [i for i in range(text.num_hidden_layers) if text.output_router_logits and text.is_moe_layer(i)]
    probs = [f"router_prob.{i}" for i in moe_layers]
    counts = [f"router_count.{i}" for i in moe_layers]

    def fn(params: Mapping[str, Any], values: Values) -> LossValue:
        weight, hidden, targets = params[head], values["hidden"], inputs.text.targets
        weight_trainable = head in trainable
        result = head_loss(
            weight, hidden.to(weight.dtype), targets, scale=scale, with_grad=True, weight_trainable=weight_trainable
        )
        assert result.hidden_grad is not None
        value = LossValue(result.loss_sum * scale, {}, {}, {"hidden": result.hidden_grad.to(hidden.dtype)})
        if result.weight_grad is not None:
            value.param_grads[head] = result.weight_grad
        if probs:
            count_E = torch.stack([values[name] for name in counts]).sum(0)
            rows = len(inputs.text.ids_T) * len(moe_layers)

            def balance(*prob_sums_E: torch.Tensor) -> torch.Tensor:
                return load_balance(torch.stack(prob_sums_E).sum(0), count_E, rows)

            aux, pullback = torch.func.vjp(balance, *(values[name] for name in probs))[:2]
            coefficient = text.router_aux_loss_coef * balance_scale
            prob_grads = pullback(aux.new_tensor(coefficient), retain_graph=False, create_graph=False)
            value.read_grads.update(zip(probs, prob_grads, strict=True))
            value.metrics["load_balance"] = aux
            value = value._replace(loss=value.loss + coefficient * aux)
        return value

    return Loss((head,), ("hidden", *probs, *counts), fn, dtype)


def make_eval_step(
    cfg: Qwen3VLMoeConfig, *, dtype: torch.dtype | None = None, head_dtype: torch.dtype | None = None, groups: Groups = Groups()
) -> Callable[[TensorDict, Batch], EvalMetrics]:
    """A forward-only step. An answer counts as correct when each of its targets is the likeliest token given the ones
    before it: exactly when greedy decoding would write it."""

    def step(params: TensorDict, batch: Batch) -> EvalMetrics:
        inputs = prepare(batch, cfg)
        tree = params.to_dict()
        values = run(model_blocks(cfg, inputs, groups, rows=inputs.text.target_rows), tree, dtype=dtype)
        head = subtree(tree, head_path(cfg)).to(head_dtype or dtype)
        result = head_loss(head, values["hidden"].to(head.dtype), inputs.text.targets)
        num_samples, length = batch["input_ids"].shape
        sample = inputs.text.token_rows[inputs.text.target_rows] // length
        targets = torch.bincount(sample, minlength=num_samples)
        hits = torch.bincount(sample, weights=result.correct.double(), minlength=num_samples).long()
        answered = targets > 0
        return EvalMetrics(result.loss_sum, len(sample), int(answered.sum()), int((answered & (hits == targets)).sum()))

    return step
