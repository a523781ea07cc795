"""What watches a run: progress on the terminal, metrics.jsonl, TensorBoard, checks."""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import LoggingConfig, TensorboardConfig
from .adapter import EvalReport

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as it is logged; ``step`` counts from 1, sums are over the whole run and all ranks."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    step_time: float  # seconds
    tokens_per_second: float
    peak_memory: int  # bytes
    num_targets: int
    consumed_samples: int
    consumed_tokens: int
    extra: dict[str, float]

    def flat(self) -> dict[str, Any]:
        """All numbers in one mapping."""
        record = asdict(self)
        return record | record.pop("extra")


class Callback:
    """Override what you need; nothing here changes the run except by raising."""

    def on_train_begin(self, total_steps: int, first_step: int) -> None: ...

    def on_step_end(self, record: StepRecord) -> None: ...

    def on_eval_end(self, step: int, report: EvalReport) -> None: ...

    def on_train_end(self) -> None: ...


class ProgressBar(Callback):
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self, logging: LoggingConfig) -> None:
        self.logging = logging

    def on_train_begin(self, total_steps: int, first_step: int) -> None:
        self.total, self.first, self.begin = total_steps, first_step, time.perf_counter()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def on_step_end(self, record: StepRecord) -> None:
        line = self._line(record)
        if self.bar is not None:
            self.bar.set_postfix_str(line, refresh=False)
            self.bar.update()
        elif record.step % self.logging.log_steps == 0 or record.step in (1, self.total):
            pace = (time.perf_counter() - self.begin) / (record.step - self.first)
            left = round(pace * (self.total - record.step))
            print(f"step {record.step}/{self.total}  {line}  eta {left // 60}:{left % 60:02d}", flush=True)

    def on_eval_end(self, step: int, report: EvalReport) -> None:
        self._print(
            f"evaluation after step {step}: loss {report.loss:.4f}, "
            f"answers {report.num_correct}/{report.num_answers} right ({100 * report.accuracy:.1f} %)"
        )

    def on_train_end(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _line(self, record: StepRecord) -> str:
        parts = [f"loss {record.loss:.4f}", f"grad_norm {record.grad_norm:.3f}", f"lr {record.lr:.2e}"]
        if self.logging.report_throughput:
            parts.append(f"{record.tokens_per_second:,.0f} tokens/s")
        if "mfu" in record.extra:
            parts.append(f"mfu {100 * record.extra['mfu']:.1f} %")
        return "  ".join([*parts, f"{record.peak_memory / 2**20:,.0f} MiB"])

    def _print(self, message: str) -> None:
        if self.bar is not None:
            self.bar.write(message)
        else:
            print(message, flush=True)


class MetricsFile(Callback):
    """One JSON object a line in ``<output_dir>/metrics.jsonl``: every step, and every evaluation (keys ``eval_*``).

    A file that an earlier run left there is moved aside, not overwritten; a resumed run goes on from what it holds of the
    steps before.
    """

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / METRICS_FILE

    def on_train_begin(self, total_steps: int, first_step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = []
        if self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            before = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first_step]
            if before != lines:
                number = 1
                while (aside := self.path.with_name(f"metrics.{number}.jsonl")).exists():
                    number += 1
                shutil.copyfile(self.path, aside)
                shorter = self.path.with_suffix(".partial")
                shorter.write_text("".join(before))
                shorter.replace(self.path)
        self.file = self.path.open("a", buffering=1)

    def on_step_end(self, record: StepRecord) -> None:
        self.file.write(json.dumps(record.flat()) + "\n")

    def on_eval_end(self, step: int, report: EvalReport) -> None:
        numbers = {"loss": report.loss, "accuracy": report.accuracy, "answers": report.num_answers}
        self.file.write(json.dumps({"step": step} | {f"eval_{name}": value for name, value in numbers.items()}) + "\n")

    def on_train_end(self) -> None:
        self.file.close()


class TensorBoard(Callback):
    """Scalars for TensorBoard, under ``train/`` and ``eval/``."""

    def __init__(self, config: TensorboardConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                'train.tensorboard.enabled = true needs the package tensorboard: pip install "hyper-parallel[tensorboard]"'
            ) from error
        self.config, self.writer = config, SummaryWriter(config.output_dir)

    def on_step_end(self, record: StepRecord) -> None:
        if record.step % self.config.log_steps == 0:
            for name, value in record.flat().items():
                if name != "step":
                    self.writer.add_scalar(f"train/{name}", value, record.step)

    def on_eval_end(self, step: int, report: EvalReport) -> None:
        self.writer.add_scalar("eval/loss", report.loss, step)
        self.writer.add_scalar("eval/accuracy", report.accuracy, step)

    def on_train_end(self) -> None:
        self.writer.close()


class FiniteCheck(Callback):
    """Stop at the first loss or gradient norm that is not a number or infinite."""

    def on_step_end(self, record: StepRecord) -> None:
        if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
            raise FloatingPointError(
                f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm} (train.debug.check_nan_inf)"
            )


class GarbageCollection(Callback):
    """Collect every ``steps`` steps only, so that no rank stops for it at another moment."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_begin(self, total_steps: int, first_step: int) -> None:
        gc.disable()

    def on_step_end(self, record: StepRecord) -> None:
        if record.step % self.steps == 0:
            gc.collect()

    def on_train_end(self) -> None:
        gc.enable()
