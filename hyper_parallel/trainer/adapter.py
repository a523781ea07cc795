"""What the Trainer asks of a model. A model package's ``build(config)`` returns an object with these methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..config import Topology
from ..core.distributed_checkpoint.chunks import ChunkedTensors, Part
from ..core.distributed_checkpoint.optimizer import ParamGroup
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


@dataclass(frozen=True)
class ModelState:
    """This rank's part of what a step changes, by parameter name. ``step`` counts updates; moments are shaped as the parts.

    ``groups``: the trained parameters, decayed and not, with the optimizer's settings under torch's names.
    """

    params: dict[str, Part]
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]
    step: int
    groups: list[ParamGroup]

    def copy(self) -> ModelState:
        """The same in memory of its own, on the CPU."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to("cpu", copy=True)

        params = {name: part._replace(tensor=own(part.tensor)) for name, part in self.params.items()}
        moments = [{name: own(moment) for name, moment in tree.items()} for tree in (self.exp_avg, self.exp_avg_sq)]
        return ModelState(params, moments[0], moments[1], self.step, self.groups)


class ModelAdapter(Protocol):
    """A model as the Trainer sees it: its state is its own business."""

    def data_spec(self) -> DataSpec:
        """Token ids and patch geometry for the data pipeline."""
        ...

    def check_topology(self, topology: Topology) -> None:
        """Raise ValueError, with the numbers, if the model cannot be divided so; needs no process."""
        ...

    def setup(self, *, total_steps: int, device: torch.device, mesh: DeviceMesh | None, resume: Path | None = None) -> str:
        """Create or load this rank's part of weights and optimizer state; returns a description of the model, a few lines.

        ``mesh``: named axes dp_replicate, dp_shard, ep, cp, tp; None for one process. ``resume``: the checkpoint to go on from.
        """
        ...

    def train_step(self, micro_batches: Sequence[Batch], before_update: Callable[[], None]) -> StepReport:
        """One optimizer step over this rank's micro-batches (CPU tensors); the report is of all ranks together.

        ``before_update`` is called when the gradients are there and nothing of the state has changed yet.
        """
        ...

    def eval_step(self, batch: Batch) -> EvalReport:
        """Evaluate this rank's batch without changing the state; all ranks call it equally often."""
        ...

    def snapshot(self) -> ModelState:
        """This rank's part of the state; its tensors are the live ones, which the next update changes."""
        ...

    def export_hf(self, tensors: ChunkedTensors, directory: Path) -> None:
        """Write stored weights as a Hugging Face directory; needs neither ``setup`` nor other ranks."""
        ...
