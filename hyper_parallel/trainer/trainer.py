"""The loop: batches in, steps, evaluations, saves; callbacks watch."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import models, platform
from ..config import Config, micro_batches_per_step
from ..core.distributed_checkpoint.chunks import hugging_face_directory
from ..data.loader import build_eval_loader, build_loader
from .adapter import Batch, EvalReport
from .callbacks import Callback, FiniteCheck, GarbageCollection, MetricsFile, ProgressBar, StepRecord, TensorBoard
from .checkpoint import Checkpointer, make_output_dir
from .distributed import join
from .interruption import Interruption
from .resume import Progress, load_position, load_progress, load_rng, restore


class Trainer:
    """One run of a configuration, on this process. Everything that can be refused is refused in the constructor."""

    def __init__(self, config: Config) -> None:
        self.config = config
        train, data = config.train, config.data
        self.platform = platform.detect()
        self.platform.seed(train.seed)
        if train.debug.deterministic:
            torch.use_deterministic_algorithms(True)
        self.model = models.build(config)
        self.ranks = join(train, self.platform)
        self.model.check_topology(self.ranks.topology)
        readers = self.ranks.topology.data_parallel_size
        self.micro_batches = micro_batches_per_step(train, readers)
        self.output_dir = make_output_dir(train.checkpoint)
        self.stopped_by = 0

        spec = self.model.data_spec()
        weights = None if config.model.weights_path is None else hugging_face_directory(config.model.weights_path)
        reading: dict[str, Any] = {
            "processor_path": data.processor_path or config.model.tokenizer_path or (weights and str(weights)),
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
        if data.packing:
            self._say(f"packing: {self.loader.dataset}")
        steps_per_epoch = self.loader.steps_per_epoch
        wanted = train.max_steps or 0
        self.total_steps = wanted if wanted > 0 else train.num_train_epochs * steps_per_epoch
        self.eval_loader = None
        if data.eval_path is not None:
            self.eval_loader = build_eval_loader(data, spec, **reading)
        self.callbacks = self._callbacks()
        self.checkpointer = Checkpointer(config, self.ranks, self.platform, self.model, self._say)
        directory = restore(config, self.ranks, self._say, self._load)
        self._say(self.description)
        if directory is not None:
            self._resume(directory)

    def train(self, interruption: Interruption | None = None) -> int:
        """Run to the last step. Returns the number of the signal that ended the run before, after one last save; 0: none did."""
        with (interruption or Interruption()).signals() as interruption:
            try:
                self._run(interruption)
            finally:
                self._tell("on_train_end")
                self.checkpointer.close()
        self.ranks.leave()
        return self.stopped_by

    def _run(self, interruption: Interruption) -> None:
        train, first = self.config.train, self.progress.step
        batches = iter(self.loader)
        self._tell("on_train_begin", self.total_steps, first)
        sampler = self.loader.batch_sampler
        for step in range(first + 1, self.total_steps + 1):
            self.checkpointer.check()
            begin = time.perf_counter()
            micro_batches = self._next(batches)
            report = self.model.train_step(micro_batches, self.checkpointer.before_update)
            self.platform.synchronize()
            elapsed = time.perf_counter() - begin
            (step_tokens,) = self.ranks.total(sum(int(batch["attention_mask"].sum()) for batch in micro_batches))
            epoch = sampler.position_at(step - 1).epoch
            self.progress = Progress(step, epoch, self.progress.consumed_tokens + int(step_tokens))
            # A signal may have reached any of the ranks; all leave after the same step.
            peak_memory, self.stopped_by = map(int, self.ranks.largest(self.platform.peak_memory(), interruption.requested))
            record = StepRecord(
                step=step,
                epoch=epoch,
                loss=report.loss,
                grad_norm=report.grad_norm,
                lr=report.lr,
                step_time=elapsed,
                tokens_per_second=step_tokens / elapsed,
                peak_memory=peak_memory,
                num_targets=report.num_targets,
                consumed_samples=sampler.samples_before(step),
                consumed_tokens=self.progress.consumed_tokens,
                extra={**report.extra, **self._utilisation(step_tokens / elapsed)},
            )
            self._tell("on_step_end", record)
            last = step == self.total_steps
            if last:
                self.stopped_by = 0  # nothing was cut short
            if self.eval_loader and (last or (train.eval.eval_steps and step % train.eval.eval_steps == 0)):
                self._tell("on_eval_end", step, self.evaluate())
            if train.checkpoint.save_steps > 0 and (last or self.stopped_by or step % train.checkpoint.save_steps == 0):
                self.checkpointer.save(self.progress, self.loader)
            if self.stopped_by:
                self.checkpointer.drain()
                self._say(f"stopped by {signal.Signals(self.stopped_by).name} after step {step} of {self.total_steps}")
                return

    def _progress_of(self, directory: Path) -> Progress:
        progress = load_progress(directory)
        if progress.step > self.total_steps:
            raise ValueError(
                f"{directory} is {progress.step} steps into its run, this one ends after {self.total_steps}: raise "
                "train.max_steps, or start from the weights alone with model.weights_path"
            )
        return progress

    def _load(self, directory: Path | None) -> None:
        """Make the model's state: that of a checkpoint, or (None) a run's first."""
        self.progress = Progress() if directory is None else self._progress_of(directory)
        device, mesh = self.ranks.device, self.ranks.mesh
        self.description = self.model.setup(total_steps=self.total_steps, device=device, mesh=mesh, resume=directory)

    def _resume(self, directory: Path) -> None:
        """Take up the run that wrote ``directory`` (whose state the model has loaded)."""
        notes = [
            load_position(directory, self.loader, self.progress.step),
            load_rng(directory, self.ranks.rank, self.platform),
        ]
        for note in dict.fromkeys(note for part in self.ranks.gather(notes) for note in part if note):
            self._say(note)
        self.checkpointer.loaded = directory
        self._say(f"resumed from {directory}, after step {self.progress.step} of {self.total_steps}")

    def evaluate(self) -> EvalReport:
        """One pass over ``data.eval_path``, all ranks together."""
        assert self.eval_loader is not None
        mine = sum((self.model.eval_step(batch) for batch in self.eval_loader), EvalReport())
        loss_sum, *counts = self.ranks.total(mine.loss_sum, mine.num_targets, mine.num_answers, mine.num_correct)
        return EvalReport(loss_sum, *(int(count) for count in counts))

    def _next(self, batches: Iterator[Batch]) -> list[Batch]:
        return [next(batches) for _ in range(self.micro_batches)]

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
            callbacks += [MetricsFile(self.output_dir), ProgressBar(train.logging)]
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
