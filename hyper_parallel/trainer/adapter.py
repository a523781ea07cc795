"""What the Trainer asks of a model. A model package's ``build(config)`` returns an object with these methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..config import Topology
from ..data.spec import DataSpec

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StepReport:
    """Numbers of one optimizer step, over all ranks; ``extra`` holds what only this model reports."""

    loss: float
    grad_norm: float
    lr: float
    num_targets: int
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalReport:
    """Sums over evaluated batches: token losses, target tokens, answers, and answers that are right in every token."""

    loss_sum: float = 0.0
    num_targets: int = 0
    num_answers: int = 0
    num_correct: int = 0

    def __add__(self, other: EvalReport) -> EvalReport:
        return EvalReport(
            self.loss_sum + other.loss_sum,
            self.num_targets + other.num_targets,
            self.num_answers + other.num_answers,
            self.num_correct + other.num_correct,
        )

    @property
    def loss(self) -> float:
        """Mean over target tokens."""
        return self.loss_sum / max(1, self.num_targets)

    @property
    def accuracy(self) -> float:
        """Part of the answers that greedy decoding would write exactly."""
        return self.num_correct / max(1, self.num_answers)


class ModelAdapter(Protocol):
    """A model as the Trainer sees it: its state is its own business."""

    def data_spec(self) -> DataSpec:
        """Token ids and patch geometry for the data pipeline."""
        ...

    def check_topology(self, topology: Topology) -> None:
        """Raise ValueError, with the numbers, if the model cannot be divided so; needs no process."""
        ...

    def setup(self, *, total_steps: int, device: torch.device, mesh: DeviceMesh | None) -> str:
        """Create or load this rank's part of weights and optimizer state; returns a description of the model, a few lines.

        ``mesh``: named axes dp_replicate, dp_shard, ep, cp, tp; None for one process.
        """
        ...

    def train_step(self, micro_batches: Sequence[Batch]) -> StepReport:
        """One optimizer step over this rank's micro-batches (CPU tensors); the report is of all ranks together."""
        ...

    def eval_step(self, batch: Batch) -> EvalReport:
        """Evaluate this rank's batch without changing the state; all ranks call it equally often."""
        ...

    def export_hf(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory; all ranks take part, one writes."""
        ...
