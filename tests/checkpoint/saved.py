"""Checkpoints of made-up tensors on any number of ranks in one process: every rank a thread, every file the product's own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from hyper_parallel import platform
from hyper_parallel.config import Config, Topology
from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.core.distributed_checkpoint.chunks import Part
from hyper_parallel.core.distributed_checkpoint.optimizer import ParamGroup
from hyper_parallel.data.loader import ResumableLoader
from hyper_parallel.trainer.adapter import ModelAdapter, ModelState
from hyper_parallel.trainer.checkpoint import Checkpointer
from hyper_parallel.trainer.distributed import Ranks
from hyper_parallel.trainer.resume import Progress
from qwen3vl_functional.sharding import AXES, Layout, local_slices

ADAMW = {"weight_decay": 0.01, "lr": 2e-5, "betas": (0.9, 0.999), "eps": 1e-8, "initial_lr": 1e-4}
ALONE = Ranks(0, 1, torch.device("cpu"), Topology(1, 1, 1, 1, 1), None, 0)


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads: they meet to exchange values."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    values: list[Any] = field(default_factory=lambda: [None])

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait(30)
        values = list(self.values)
        self.barrier.wait(30)
        return values


def run_ranks(shape: Sequence[int], act: Callable[[Ranks], Any]) -> list[Any]:
    """Call ``act`` as every rank of a mesh; what each returned."""
    world = torch.Size(shape).numel()
    barrier, values = threading.Barrier(world), [None] * world
    topology = Topology(*shape)
    everyone = [ThreadRanks(rank, world, torch.device("cpu"), topology, None, 0, None, barrier, values) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(act, everyone))


def coordinates(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Of every rank of a mesh, in the order of ranks."""
    return itertools.product(*map(range, shape))


def cut(tensors: Mapping[str, torch.Tensor], placed: Mapping[str, Layout], shape: tuple[int, ...]) -> list[dict[str, Part]]:
    """Every rank's parts of whole tensors."""
    assert len(shape) == len(AXES)
    ranks = []
    for coordinate in coordinates(shape):
        boxes = {name: local_slices(placed[name], shape, coordinate) for name in tensors}
        ranks.append(
            {
                name: Part(tensors[name][box], tuple(part.start for part in box), tuple(tensors[name].shape))
                for name, box in boxes.items()
            }
        )
    return ranks


def state(params: dict[str, Part], moments: Sequence[dict[str, Part]], groups: list[ParamGroup], step: int) -> ModelState:
    """A rank's state out of its parts."""
    exp_avg, exp_avg_sq = [{name: part.tensor for name, part in moment.items()} for moment in moments]
    return ModelState(params, exp_avg, exp_avg_sq, step, groups)


def small_state(value: float = 0.0, step: int = 0) -> ModelState:
    """The whole of a model of two parameters."""
    whole = {"body.weight": torch.arange(12.0).view(4, 3) + value, "body.bias": torch.arange(4.0) + value}
    parts = {name: Part(tensor, (0,) * tensor.ndim, tuple(tensor.shape)) for name, tensor in whole.items()}
    groups = [ParamGroup(("body.weight",), ADAMW), ParamGroup(("body.bias",), {**ADAMW, "weight_decay": 0.0})]
    return state(parts, [parts, parts], groups, step)


def small_config(output_dir: Path, **checkpoint: Any) -> Config:
    """A run that saves there, without an export."""
    raw = {"train": {"checkpoint": {"output_dir": str(output_dir), "save_hf_weights": False, **checkpoint}}}
    return config_from_dict({"model": {}, "data": {"type": "vl_dummy"}, **raw}, source="test")


def checkpointer(config: Config, ranks: Ranks, model_state: ModelState, say: Callable[[str], None] = str) -> Checkpointer:
    """The product's, over a model that has nothing but a state."""
    model = cast(ModelAdapter, SimpleNamespace(snapshot=lambda: model_state))
    return Checkpointer(config, ranks, platform.detect(), model, say)


def save(writer: Checkpointer, step: int, *, epoch: int = 0, consumed_tokens: int = 0) -> Path:
    """Write ``step_<step>``; where it lies."""
    loader = cast(ResumableLoader, SimpleNamespace(state_dict=lambda: {"_snapshot": {"_snapshot_step": step}}))
    writer.save(Progress(step, epoch, consumed_tokens), loader)
    return writer.output_dir / f"step_{step}"


def save_small(output_dir: Path, *steps: int, **checkpoint: Any) -> list[Path]:
    """Checkpoints of the small model, one after another; its values are the steps'."""
    directories = []
    for step in steps:
        writer = checkpointer(small_config(output_dir, **checkpoint), ALONE, small_state(float(step), step))
        directories.append(save(writer, step))
        writer.close()
    return directories


def nothing(directory: Path | None) -> None:
    """Loads nothing."""


def names(directory: Path) -> set[str]:
    """Of what lies in a directory."""
    return {path.name for path in directory.iterdir()}
