"""The run that a configuration describes, by transformers and torch.optim: what the Trainer's losses are held against.

    python benchmarks/reference_run.py --config FILE --output DIR [--section.key=value ...]

One process in float32 reads the Trainer's batches and trains Qwen3VLMoeForConditionalGeneration on them, from the first step.
Of the Trainer it takes the configuration, the data and the format of DIR/metrics.jsonl; model, clip and optimizer are others'.

    python -m hyper_parallel.trainer.align OUTPUT_DIR DIR
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Qwen3VLMoeForConditionalGeneration
from transformers import Qwen3VLMoeConfig as ReferenceConfig

from hyper_parallel import platform
from hyper_parallel.config import Config, OptimizerConfig
from hyper_parallel.config_loader import load_config
from hyper_parallel.core.distributed_checkpoint.chunks import hugging_face_directory
from hyper_parallel.data.loader import ResumableLoader, build_loader
from hyper_parallel.models.qwen3_vl_moe.adapter import Qwen3VLMoeAdapter
from hyper_parallel.trainer.callbacks import MetricsFile, ProgressBar, StepRecord
from qwen3vl_functional.spec import matches

IGNORE_INDEX = -100
Batch = Mapping[str, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; a mistake in the input is one readable message and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="metrics.jsonl is written there")
    arguments, others = parser.parse_known_args(argv)
    try:
        run = ReferenceRun(load_config(others))
        run.train(arguments.output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@dataclass(frozen=True)
class StepResult:
    """One update: loss and gradient norm as the Trainer reports them, and how many tokens it read."""

    loss: float
    grad_norm: float
    num_targets: int
    num_tokens: int


class ReferenceRun:
    """Model, data, optimizer and schedule of one configuration. ValueError for what float32 on one process is not."""

    def __init__(self, config: Config) -> None:
        train = config.train
        if train.mixed_precision.enabled:
            raise ValueError(
                "the reference computes in float32: set --train.mixed_precision.enabled=false, here and in the Trainer"
            )
        if train.optimizer.loss_aggregation != "token_weighted":
            raise ValueError(
                f"train.optimizer.loss_aggregation = {train.optimizer.loss_aggregation}: the reference knows token_weighted"
            )
        if config.model.weights_path is None:
            raise ValueError("the reference starts from weights: set --model.weights_path to a Hugging Face directory")
        self.config, self.platform = config, platform.detect()
        self.device = self.platform.device()
        described = Qwen3VLMoeAdapter(config)
        if described.architecture.vision is None:
            raise ValueError("the reference has a vision tower: set --model.config_overrides.vl=true")
        self.loader = read_data(config, described)
        self.total_steps = train.max_steps or 0
        if self.total_steps <= 0:
            self.total_steps = train.num_train_epochs * self.loader.steps_per_epoch
        self.model = load_model(config, described, self.device)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer, self.schedule = make_optimizer(self.trained, train.optimizer, self.total_steps)

    def train(self, output: Path) -> None:
        """Every step, one line each in ``output/metrics.jsonl``."""
        watchers = [MetricsFile(output), ProgressBar(self.config.train.logging)]
        for watcher in watchers:
            watcher.on_train_begin(self.total_steps, 0)
        batches, sampler, consumed = iter(self.loader), self.loader.batch_sampler, 0
        for step in range(1, self.total_steps + 1):
            begin = time.perf_counter()
            lr = self.optimizer.param_groups[0]["lr"]
            result = self.step([next(batches) for _ in range(self.loader.num_micro_batches)])
            self.platform.synchronize()
            elapsed = time.perf_counter() - begin
            consumed += result.num_tokens
            record = StepRecord(
                step=step,
                epoch=sampler.position_at(step - 1).epoch,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                step_time=elapsed,
                tokens_per_second=result.num_tokens / elapsed,
                peak_memory=self.platform.peak_memory(),
                num_targets=result.num_targets,
                consumed_samples=sampler.samples_before(step),
                consumed_tokens=consumed,
                extra={},
            )
            for watcher in watchers:
                watcher.on_step_end(record)
        for watcher in watchers:
            watcher.on_train_end()

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Accumulate, clip, update."""
        num_targets = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in micro_batches)
        loss = 0.0
        for batch in micro_batches:
            part = self.loss({name: tensor.to(self.device) for name, tensor in batch.items()}, num_targets, len(micro_batches))
            part.backward()
            loss += float(part.detach())
        limit = self.config.train.optimizer.max_grad_norm
        # A tower that saw no image has a zero gradient in the Trainer, so it decays; torch skips what has no gradient.
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.trained, limit if limit > 0 else math.inf)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return StepResult(loss, float(grad_norm), num_targets, sum(int(batch["attention_mask"].sum()) for batch in micro_batches))

    def loss(self, batch: Batch, num_targets: int, num_micro_batches: int) -> torch.Tensor:
        """This micro-batch's share of the step's loss.

        transformers would divide by this micro-batch's own targets, and add its whole load balance: both want the step's.
        """
        labels = batch["labels"][:, 1:]  # the token at t predicts the one at t + 1
        outputs = self.model(**{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False)
        logits = outputs.logits[:, :-1].float()
        token_losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        loss = token_losses / max(1, num_targets)
        if outputs.aux_loss is not None:
            loss = loss + self.model.config.text_config.router_aux_loss_coef * outputs.aux_loss / num_micro_batches
        return loss


def read_data(config: Config, described: Qwen3VLMoeAdapter) -> ResumableLoader:
    """The Trainer's own batches, as its only process would read them."""
    train, weights = config.train, config.model.weights_path
    assert weights is not None
    beside = hugging_face_directory(weights)
    return build_loader(
        config.data,
        described.data_spec(),
        processor_path=config.data.processor_path or config.model.tokenizer_path or (beside and str(beside)),
        rank=0,
        world_size=1,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        max_steps=train.max_steps,
    )


def load_model(config: Config, described: Qwen3VLMoeAdapter, device: torch.device) -> PreTrainedModel:
    """transformers' module in float32, with the configuration's overrides and frozen subtrees."""
    directory = hugging_face_directory(config.model.weights_path or "")
    if directory is None:
        raise ValueError(f"model.weights_path = {config.model.weights_path} holds no hf_ckpt that transformers could load")
    loaded: Any = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        directory,
        config=ReferenceConfig.from_dict(described.architecture.to_dict()),
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    model, report = loaded
    if report["missing_keys"]:
        raise ValueError(
            f"{directory} lacks {', '.join(sorted(report['missing_keys'])[:3])}: the reference would train random weights"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not matches(name, described.frozen))
    return model.to(device).train()


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], cfg: OptimizerConfig, total_steps: int
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """torch's AdamW, whose decay spares vectors (biases and norms), and the schedule: warm-up from 0, decay to ``lr_min``."""
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": cfg.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, foreach=cfg.foreach)
    warm_up = math.ceil(total_steps * cfg.lr_warmup_ratio)

    def factor(step: int) -> float:
        if step < warm_up:
            return step / warm_up
        if cfg.lr_decay_style == "constant":
            return 1.0
        progress = min(1.0, (step - warm_up) / max(1, total_steps - warm_up))
        left = 1 - progress if cfg.lr_decay_style == "linear" else math.cos(math.pi * progress / 2) ** 2
        return left + (1 - left) * cfg.lr_min / cfg.lr

    return optimizer, LambdaLR(optimizer, factor)


if __name__ == "__main__":
    sys.exit(main())
