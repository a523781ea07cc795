"""The adapter: configuration to functions, batches to steps. Its one mutable attribute is the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from qwen3vl_functional import (
    AdamW,
    Recipe,
    TrainState,
    init_params,
    init_state,
    load_params,
    make_eval_step,
    make_train_step,
    param_specs,
    save_params,
)
from qwen3vl_functional.gathered import share
from qwen3vl_functional.hf import refuse_square_experts
from qwen3vl_functional.moe import can_compile_experts
from qwen3vl_functional.optim import AdamWState, learning_rate
from qwen3vl_functional.sharding import layouts, local_view, place
from qwen3vl_functional.spec import count, leaves, split_frozen, to_tensordict
from qwen3vl_functional.transforms import compiler_problem

from ...config import Config, OptimizerConfig, Topology
from ...core.distributed_checkpoint.chunks import ChunkedTensors, Part, hugging_face_directory, is_checkpoint
from ...core.distributed_checkpoint.optimizer import Moment, ParamGroup, StoredMoments
from ...data.spec import DataSpec
from ...trainer.adapter import Batch, EvalReport, ModelState, StepReport
from .architecture import resolve


class Qwen3VLMoeAdapter:
    """Qwen3-VL-MoE behind the Trainer's protocol."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.architecture = resolve(config)
        self.frozen = tuple(config.model.freeze_modules or ())
        split_frozen(param_specs(self.architecture), self.frozen)  # a pattern that matches nothing fails here, at once
        self.recipe = step_recipe(config)
        if config.train.checkpoint.save_hf_weights and config.train.checkpoint.save_steps > 0:
            refuse_square_experts(self.architecture)
        self.state: TrainState | None = None

    def data_spec(self) -> DataSpec:
        cfg = self.architecture
        vision = cfg.vision
        return DataSpec(
            vocab_size=cfg.text.vocab_size,
            image_token_id=cfg.image_token_id,
            video_token_id=cfg.video_token_id,
            vision_start_token_id=cfg.vision_start_token_id,
            vision_end_token_id=cfg.vision_end_token_id,
            vision=vision is not None,
            in_channels=vision.in_channels if vision else 0,
            patch_size=vision.patch_size if vision else 0,
            temporal_patch_size=vision.temporal_patch_size if vision else 0,
            spatial_merge_size=vision.spatial_merge_size if vision else 1,
        )

    def check_topology(self, topology: Topology) -> None:
        layouts(param_specs(self.architecture), asdict(topology))
        _replicated(self.config, topology.data_parallel_size)

    def setup(self, *, total_steps: int, device: torch.device, mesh: DeviceMesh | None, resume: Path | None = None) -> str:
        config, cfg = self.config, self.architecture
        replicated = _replicated(config, 1 if mesh is None else mesh["dp_replicate"].size() * mesh["dp_shard"].size())
        if self.recipe.compiled:
            no_kernel = None if can_compile_experts() else f"torch {torch.__version__} has no grouped matmul"
            if problem := no_kernel or compiler_problem(device):
                raise ValueError(
                    f"train.compile: true, but torch.compile does not work here ({problem}): mend that, or leave it out"
                )
        self.device, self.placement = device, place(param_specs(cfg), mesh, replicated=replicated)
        weights = resume or config.model.weights_path
        if weights is None:
            params = init_params(param_specs(cfg), seed=config.train.seed, device=device, placement=self.placement)
        else:
            source = ChunkedTensors(Path(weights)) if is_checkpoint(Path(weights)) else weights
            layout = config.model.expert_layout
            params = load_params(source, cfg, device=device, expert_layout=layout, placement=self.placement)
        params = share(params, self.placement)
        if resume is None:
            self.state = init_state(params, cfg, frozen=self.frozen)
        else:
            self.state = TrainState(params, self._load_moments(resume))
        self.optimizer = optimizer_settings(config.train.optimizer, total_steps)
        self._train_step = make_train_step(cfg, self.optimizer, self.recipe, frozen=self.frozen, placement=self.placement)
        self._eval_step = make_eval_step(cfg, self.recipe, placement=self.placement)
        return self._describe()

    def train_step(self, micro_batches: Sequence[Batch], before_update: Callable[[], None]) -> StepReport:
        assert self.state is not None
        batches = [self._to_device(batch) for batch in micro_batches]
        self.state, metrics = self._train_step(self.state, batches, before_update)
        extra = {} if metrics.load_balance is None else {"load_balance": float(metrics.load_balance)}
        return StepReport(float(metrics.loss), float(metrics.grad_norm), metrics.lr, metrics.num_targets, extra)

    def eval_step(self, batch: Batch) -> EvalReport:
        assert self.state is not None
        metrics = self._eval_step(self.state.params, self._to_device(batch))
        return EvalReport(float(metrics.loss_sum), metrics.num_targets, metrics.num_answers, metrics.num_correct)

    def snapshot(self) -> ModelState:
        assert self.state is not None
        params, (exp_avg, exp_avg_sq, step) = self.state
        parts = {}
        for path, leaf in leaves(params):
            offsets = tuple(part.start for part in self.placement.part(path)) or (0,) * leaf.ndim
            parts[path] = Part(local_view(leaf).detach(), offsets, tuple(leaf.shape))
        moments = [{path: local_view(leaf) for path, leaf in leaves(tree)} for tree in (exp_avg, exp_avg_sq)]
        rates = {"lr": learning_rate(self.optimizer, step), "initial_lr": self.optimizer.lr}
        same = {**rates, "betas": self.optimizer.betas, "eps": self.optimizer.eps}
        decays = (self.optimizer.weight_decay, 0.0)
        groups = [ParamGroup(names, {"weight_decay": decay, **same}) for names, decay in zip(self._groups(), decays, strict=True)]
        return ModelState(parts, moments[0], moments[1], step, groups)

    def export_hf(self, tensors: ChunkedTensors, directory: Path) -> None:
        model, data = self.config.model, self.config.data
        save_params(
            tensors,
            self.architecture,
            directory,
            source=hugging_face_directory(model.weights_path) if model.weights_path is not None else None,
            companions=[path for path in (model.tokenizer_path, data.processor_path) if path is not None],
        )

    def _groups(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the trained parameters: decayed, not decayed."""
        specs = param_specs(self.architecture)
        flat, (trainable, _) = dict(leaves(specs)), split_frozen(specs, self.frozen)
        return tuple(path for path in trainable if flat[path].decay), tuple(path for path in trainable if not flat[path].decay)

    def _load_moments(self, directory: Path) -> AdamWState:
        tensors = ChunkedTensors(directory)
        specs = dict(leaves(param_specs(self.architecture)))
        if turned := [path for path, spec in specs.items() if tensors.shape_of[path] != spec.shape]:
            raise ValueError(
                f"{directory} holds its experts transposed ({turned[0]}): start from its weights alone, set "
                "model.weights_path to it instead of train.checkpoint.load_path"
            )
        groups = self._groups()
        moments = StoredMoments(tensors, groups)
        trees: dict[Moment, dict[str, torch.Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for path in (path for group in groups for path in group):
            for moment, flat in trees.items():  # both of a parameter: they lie beside each other in the file
                local = moments.read(moment, path, self.placement.part(path)).to(self.device, torch.float32, copy=True)
                flat[path] = self.placement.wrap(path, local.contiguous())
        exp_avg, exp_avg_sq = (to_tensordict({path: flat[path] for path in specs if path in flat}) for flat in trees.values())
        return AdamWState(exp_avg, exp_avg_sq, moments.step)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def _describe(self) -> str:
        specs = param_specs(self.architecture)
        frozen = split_frozen(specs, self.frozen)[1]
        flat = dict(leaves(specs))
        total, fixed = count(specs), sum(flat[path].numel for path in frozen)
        text = self.architecture.text
        balance = f"on, coefficient {text.router_aux_loss_coef}" if text.output_router_logits else "off"
        at_rest = 4 * total + 8 * (total - fixed)
        assert self.state is not None
        trees = (self.state.params, self.state.opt_state.exp_avg, self.state.opt_state.exp_avg_sq)
        mine = sum(4 * local_view(leaf).numel() for tree in trees for _, leaf in leaves(tree))
        return (
            f"{total:,} parameters, {total - fixed:,} trained, {fixed:,} frozen\n"
            f"weights and moments at rest {at_rest / 2**20:,.0f} MiB, on this rank {mine / 2**20:,.0f} MiB\n"
            f"in flight {self.recipe.dtype or torch.float32}, router load-balance loss {balance}, "
            f"vision tower {'yes' if self.architecture.vision else 'no'}"
        )


def step_recipe(config: Config) -> Recipe:
    """What the configuration says of the step's arithmetic and communication."""
    train, precision = config.train, config.train.mixed_precision
    recipe = Recipe(
        remat=train.gradient_checkpointing.activation_checkpoint,
        loss_aggregation=train.optimizer.loss_aggregation,
        reshard=train.accelerator.reshard_after_forward,
        fused=train.accelerator.comm_fusion,
        compiled=train.compile,
    )
    if not precision.enabled:
        return recipe
    return recipe._replace(
        dtype=getattr(torch, precision.param_dtype),
        reduce_dtype=getattr(torch, precision.reduce_dtype),
        head_dtype=getattr(torch, precision.output_dtype) if precision.output_dtype else None,
    )


def optimizer_settings(optimizer: OptimizerConfig, total_steps: int) -> AdamW:
    """The optimizer's hyperparameters for a run of ``total_steps``."""
    return AdamW(
        lr=optimizer.lr,
        lr_min=optimizer.lr_min,
        decay_style=optimizer.lr_decay_style,
        warmup_steps=math.ceil(total_steps * optimizer.lr_warmup_ratio),
        total_steps=total_steps,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        foreach=optimizer.foreach,
    )


def _replicated(config: Config, data_parallel_size: int) -> tuple[str, ...]:
    """Subtrees that FSDP leaves whole; ValueError for a ``vision_parallel.dp_shard`` that is none of its three choices."""
    shards = config.model.vision_parallel.dp_shard if config.model.vision_parallel else 0
    if shards not in (0, 1, data_parallel_size):
        raise ValueError(
            f"model.vision_parallel.dp_shard = {shards}: 0 (as the text), 1 (replicated tower) or the "
            f"data-parallel size {data_parallel_size}"
        )
    return ("model.visual",) if shards == 1 and data_parallel_size > 1 else ()
