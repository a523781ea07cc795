"""The training step: ``step(state, micro_batches) -> (state, metrics)``, composed once from pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict

from .collectives import Groups
from .config import Qwen3VLMoeConfig
from .gathered import GatheredWeights
from .loss import head_loss
from .model import Remat, head_path, model_blocks, param_specs
from .moe import load_balance
from .optim import AdamW, AdamWState, adamw_update, clip_factor, global_norm, init_opt_state, learning_rate
from .positions import IGNORE_INDEX, Batch, Inputs, prepare
from .sharding import Placement, local_view
from .spec import leaves, split_frozen
from .transforms import LocalWeights, Loss, LossValue, Values, Weights, compile_end, fuse, run, value_and_grad

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


class TrainStep(Protocol):
    """See ``make_train_step``."""

    def __call__(
        self, state: TrainState, micro_batches: Sequence[Batch], before_update: Callable[[], None] | None = None, /
    ) -> tuple[TrainState, StepMetrics]: ...


class Recipe(NamedTuple):
    """How a step computes what it computes.

    ``dtype``: of parameters and activations in flight (None: as at rest); ``head_dtype``: of the output head's matmuls where
    that differs; ``reduce_dtype``: in which gradients are summed over ranks; ``reshard``: free gathered weights between
    forward and backward; ``fused``: one collective a block; ``compiled``: blocks go through torch.compile, a program for each
    kind of block.
    """

    remat: Remat = "off"
    dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    loss_aggregation: LossAggregation = "token_weighted"
    reshard: bool = True
    fused: bool = True
    compiled: bool = False


def init_state(params: TensorDict, cfg: Qwen3VLMoeConfig, *, frozen: tuple[str, ...] = ()) -> TrainState:
    """A fresh state around given weights (whole or placed); frozen subtrees get no moments."""
    trainable, _ = split_frozen(param_specs(cfg), frozen)
    flat = dict(leaves(params))
    return TrainState(params, init_opt_state({path: flat[path] for path in trainable}))


def make_train_step(
    cfg: Qwen3VLMoeConfig,
    optimizer: AdamW,
    recipe: Recipe = Recipe(),
    *,
    frozen: tuple[str, ...] = (),
    placement: Placement = Placement(),
) -> TrainStep:
    """Compose the step. It takes this rank's micro-batches of one update and reuses the storage of the state it is handed;
    ``before_update`` is called when the gradients are there and that storage is still untouched."""
    specs = dict(leaves(param_specs(cfg)))
    trainable = frozenset(split_frozen(param_specs(cfg), frozen)[0])

    def step(
        state: TrainState, micro_batches: Sequence[Batch], before_update: Callable[[], None] | None = None
    ) -> tuple[TrainState, StepMetrics]:
        weights = make_weights(state.params, recipe, placement)
        sums = accumulate(weights, micro_batches, cfg, trainable, recipe, placement)
        params = {path: local_view(leaf) for path, leaf in leaves(state.params) if path in trainable}
        grads = {path: sums.grads[path] for path in params}
        norm = placed_norm(grads, placement)
        lr = learning_rate(optimizer, state.opt_state.step)
        factor = clip_factor(norm, optimizer.max_grad_norm)
        if before_update is not None:
            before_update()
        opt_state = adamw_update(params, grads, state.opt_state, specs, optimizer, grad_factor=factor)
        metrics = StepMetrics(sums.loss, norm, lr, sums.num_targets, sums.load_balance)
        return TrainState(state.params, opt_state), metrics

    return step


def make_weights(params: TensorDict, recipe: Recipe, placement: Placement) -> Weights:
    """The leaves of a tree at rest, ready to be used by a chain."""
    local = {path: local_view(leaf) for path, leaf in leaves(params)}
    if placement.axes.size == 1:
        return LocalWeights(local, recipe.dtype)
    return GatheredWeights(
        local,
        placement.layouts,
        placement.axes,
        dtype=recipe.dtype,
        reduce_dtype=recipe.reduce_dtype,
        reshard=recipe.reshard,
        fused=recipe.fused,
    )


def placed_norm(grads: Values, placement: Placement) -> torch.Tensor:
    """Norm of the whole gradient, the same on every rank; a part that several ranks hold counts once."""
    own = [grad for path, grad in grads.items() if placement.owns(path)]
    norm = global_norm(own) if own else torch.zeros((), device=next(iter(grads.values())).device)
    if placement.mesh is None:
        return norm
    square = norm.double().square()
    dist.all_reduce(square)
    return square.sqrt().float()


class StepSums(NamedTuple):
    """Over all micro-batches and data-parallel ranks; ``grads`` by path, fp32, this rank's parts."""

    loss: torch.Tensor
    load_balance: torch.Tensor | None
    num_targets: int
    grads: Values


def accumulate(
    weights: Weights,
    micro_batches: Sequence[Batch],
    cfg: Qwen3VLMoeConfig,
    trainable: frozenset[str],
    recipe: Recipe = Recipe(),
    placement: Placement = Placement(),
) -> StepSums:
    """Loss and gradients of one update's micro-batches together.

    ``token_weighted`` divides the sum of token losses once, by the count over all ranks and micro-batches, so that neither
    accumulation nor data parallelism can change it; ``rank_average`` averages the micro-batches' means.
    """
    if not micro_batches:
        raise ValueError("a step needs at least one micro-batch; a rank without samples takes one without targets")
    axes = placement.axes
    counts = [count_targets(batch) for batch in micro_batches]
    device = micro_batches[0]["input_ids"].device
    num_targets = int(axes.add_up(torch.tensor(sum(counts), device=device)))
    parts = len(counts) * axes.size
    losses, balances = [], []
    for batch, count in zip(micro_batches, counts, strict=True):
        token_weighted = recipe.loss_aggregation == "token_weighted"
        scale = 1.0 / max(1, num_targets) if token_weighted else 1.0 / (max(1, count) * parts)
        inputs = prepare(batch, cfg)
        blocks = model_blocks(cfg, inputs, placement.groups, rows=inputs.text.target_rows, remat=recipe.remat)
        loss = training_loss(
            cfg, inputs, trainable, placement.groups, scale=scale, balance_scale=1.0 / parts, dtype=recipe.head_dtype
        )
        blocks = fuse(blocks, weights, loss.reads)
        if recipe.compiled:
            blocks, loss = compile_end(blocks, loss, weights, trainable)
        value = value_and_grad(blocks, loss, weights, trainable, compiled=recipe.compiled)
        losses.append(value.loss)
        balances += [value.metrics["load_balance"]] if "load_balance" in value.metrics else []
    total = axes.add_up(torch.stack(losses).sum())
    balance = axes.add_up(torch.stack(balances).sum()) / parts if balances else None
    return StepSums(total, balance, num_targets, weights.finish())


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
    groups: Groups = Groups(),
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
            weight,
            hidden.to(weight.dtype),
            targets,
            groups=groups,
            scale=scale,
            with_grad=True,
            weight_trainable=weight_trainable,
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
    cfg: Qwen3VLMoeConfig, recipe: Recipe = Recipe(), *, placement: Placement = Placement()
) -> Callable[[TensorDict, Batch], EvalMetrics]:
    """A forward-only step over this rank's batch. An answer counts as correct when each of its targets is the likeliest token
    given the ones before it: exactly when greedy decoding would write it."""

    def step(params: TensorDict, batch: Batch) -> EvalMetrics:
        inputs, groups = prepare(batch, cfg), placement.groups
        weights = make_weights(params, recipe, placement)
        blocks = model_blocks(cfg, inputs, groups, rows=inputs.text.target_rows)
        hidden = run(blocks, weights)["hidden"]
        (head,) = weights.fetch([head_path(cfg)], dtype=recipe.head_dtype).values()
        result = head_loss(head, hidden.to(head.dtype), inputs.text.targets, groups=groups)
        assert result.correct is not None
        num_samples, length = batch["input_ids"].shape
        sample = inputs.text.token_rows[inputs.text.target_rows] // length
        targets = torch.bincount(sample, minlength=num_samples)
        hits = torch.bincount(sample, weights=result.correct.double(), minlength=num_samples).long()
        answered = targets > 0
        return EvalMetrics(result.loss_sum, len(sample), int(answered.sum()), int((answered & (hits == targets)).sum()))

    return step
