"""The loop: batches in, steps, evaluations, exports; callbacks watch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import models, platform
from ..config import Config, micro_batches_per_step
from ..data.loader import build_eval_loader, build_loader
from .adapter import Batch, EvalReport
from .callbacks import Callback, FiniteCheck, GarbageCollection, MetricsFile, Progress, StepRecord, TensorBoard
from .distributed import join


class Trainer:
    """One run of a configuration, on this process. Everything that can be refused is refused in the constructor."""

    def __init__(self, config: Config) -> None:
        self.config = config
        train, data = config.train, config.data
        for key in ("load_path", "save_async"):  # accepting them without effect would be worse than refusing
            if value := getattr(train.checkpoint, key):
                raise ValueError(f"train.checkpoint.{key} = {value}: this version exports weights, it cannot resume a run yet")
        self.platform = platform.detect()
        self.platform.seed(train.seed)
        if train.debug.deterministic:
            torch.use_deterministic_algorithms(True)
        self.model = models.build(config)
        self.ranks = join(train, self.platform)
        self.model.check_topology(self.ranks.topology)
        readers = self.ranks.topology.data_parallel_size
        self.micro_batches = micro_batches_per_step(train, readers)
        self.output_dir = Path(train.checkpoint.output_dir)

        spec = self.model.data_spec()
        processor_path = data.processor_path or config.model.tokenizer_path or config.model.weights_path
        reading: dict[str, Any] = {
            "processor_path": processor_path,
            "rank": self.ranks.data_rank,
            "world_size": readers,
            "micro_batch_size": train.micro_batch_size,
        }
        self.loader = build_loader(
            data,
            spec,
            **reading,
            global_batch_size=train.global_batch_size,
            seed=train.seed,
            max_steps=train.max_steps,
        )
        steps_per_epoch = self.loader.steps_per_epoch
        wanted = train.max_steps or 0
        self.total_steps = wanted if wanted > 0 else train.num_train_epochs * steps_per_epoch
        self.eval_loader = None
        if data.eval_path is not None:
            self.eval_loader = build_eval_loader(data, spec, **reading)
        self.callbacks = self._callbacks()
        description = self.model.setup(total_steps=self.total_steps, device=self.ranks.device, mesh=self.ranks.mesh)
        self._say(description)

    def train(self) -> None:
        """Run to the last step."""
        train = self.config.train
        batches = iter(self.loader)
        self._tell("on_train_begin", self.total_steps, 0)
        sampler, tokens = self.loader.batch_sampler, 0
        try:
            for step in range(1, self.total_steps + 1):
                begin = time.perf_counter()
                micro_batches = self._next(batches)
                report = self.model.train_step(micro_batches)
                self.platform.synchronize()
                elapsed = time.perf_counter() - begin
                (step_tokens,) = self.ranks.total(sum(int(batch["attention_mask"].sum()) for batch in micro_batches))
                tokens += int(step_tokens)
                record = StepRecord(
                    step=step,
                    epoch=sampler.position_at(step - 1).epoch,
                    loss=report.loss,
                    grad_norm=report.grad_norm,
                    lr=report.lr,
                    step_time=elapsed,
                    tokens_per_second=step_tokens / elapsed,
                    peak_memory=int(self.ranks.largest(self.platform.peak_memory())),
                    num_targets=report.num_targets,
                    consumed_samples=sampler.samples_before(step),
                    consumed_tokens=tokens,
                    extra={**report.extra, **self._utilisation(step_tokens / elapsed)},
                )
                self._tell("on_step_end", record)
                last = step == self.total_steps
                if self.eval_loader and (last or (train.eval.eval_steps and step % train.eval.eval_steps == 0)):
                    self._tell("on_eval_end", step, self.evaluate())
                if train.checkpoint.save_steps > 0 and (last or step % train.checkpoint.save_steps == 0):
                    self._save(step)
        finally:
            self._tell("on_train_end")
        self.ranks.leave()

    def evaluate(self) -> EvalReport:
        """One pass over ``data.eval_path``, all ranks together."""
        assert self.eval_loader is not None
        mine = sum((self.model.eval_step(batch) for batch in self.eval_loader), EvalReport())
        loss_sum, *counts = self.ranks.total(mine.loss_sum, mine.num_targets, mine.num_answers, mine.num_correct)
        return EvalReport(loss_sum, *(int(count) for count in counts))

    def _next(self, batches: Iterator[Batch]) -> list[Batch]:
        return [next(batches) for _ in range(self.micro_batches)]

    def _save(self, step: int) -> None:
        if self.config.train.checkpoint.save_hf_weights:
            path = self.output_dir / f"step_{step}" / "hf_ckpt"
            self.model.export_hf(path)
            self._say(f"weights after step {step}: {path}")

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        logging = self.config.train.logging
        if logging.model_flops_per_token is None or logging.peak_tflops is None:
            return {}
        peak = logging.peak_tflops * 1e12 * self.ranks.world_size
        return {"mfu": logging.model_flops_per_token * tokens_per_second / peak}

    def _callbacks(self) -> list[Callback]:
        train = self.config.train
        callbacks: list[Callback] = []
        if self.ranks.is_main:
            callbacks += [MetricsFile(self.output_dir), Progress(train.logging)]
            if train.tensorboard.enabled:
                callbacks.append(TensorBoard(train.tensorboard))
        if train.debug.gc_steps:
            callbacks.append(GarbageCollection(train.debug.gc_steps))
        if train.debug.check_nan_inf:
            callbacks.append(FiniteCheck())
        return callbacks

    def _tell(self, event: str, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)

    def _say(self, message: str) -> None:
        if self.ranks.is_main:
            print(message, flush=True)
