"""Which samples each rank reads: one global order, cut the same way for every number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class Position(NamedTuple):
    """A place in the data that does not depend on the number of ranks.

    ``sample`` is the index, in the epoch's order, of the first sample of the current optimizer step;
    ``offset`` counts the samples of that step which all ranks together have been handed already.
    """

    epoch: int = 0
    sample: int = 0
    offset: int = 0


class GlobalBatchSampler:
    """Yields this rank's micro-batches (lists of sample indices), epoch after epoch, without end.

    Every epoch has one permutation, a function of (seed, epoch). An optimizer step takes the next
    ``global_batch_size`` samples of it, the epoch's last step what is left. A step is cut into rounds of
    ``world_size * micro_batch_size`` samples and rank r reads the r-th slice of each round. So all ranks get
    ``num_micro_batches`` lists a step, some of them short or empty in a short step, and the step's samples are the same
    set for every number of ranks.

    ``state_dict`` is the position after the latest yielded micro-batch, without anything that belongs to one rank.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int,
        micro_batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        start: tuple[int, ...] = (0, 0),
    ):
        if num_samples < 1:
            raise ValueError("the dataset is empty: there is nothing to sample")
        self.round_size = micro_batch_size * world_size
        if global_batch_size < 1 or micro_batch_size < 1 or global_batch_size % self.round_size:
            raise ValueError(
                f"train.global_batch_size {global_batch_size} must be a multiple of train.micro_batch_size "
                f"{micro_batch_size} x {world_size} data-parallel ranks = {self.round_size}"
            )
        assert 0 <= rank < world_size, (rank, world_size)
        self.num_samples, self.global_batch_size, self.micro_batch_size = (
            num_samples,
            global_batch_size,
            micro_batch_size,
        )
        self.rank, self.world_size, self.shuffle, self.seed = rank, world_size, shuffle, seed
        self.position = Position()
        self.seek(Position(*start))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that a rank reads per optimizer step."""
        return self.global_batch_size // self.round_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch_size)

    def position_at(self, step: int) -> Position:
        """Where optimizer step ``step``, counted from 0 over all epochs, begins."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return Position(epoch, step_in_epoch * self.global_batch_size)

    def samples_before(self, step: int) -> int:
        """Samples that the first ``step`` optimizer steps take, over all ranks."""
        epoch, sample, _ = self.position_at(step)
        return epoch * self.num_samples + sample

    def seek(self, position: Position) -> None:
        """Continue from ``position``; a ``sample`` at the end of an epoch means the start of the next."""
        epoch, sample, offset = position
        if epoch < 0 or not 0 <= sample <= self.num_samples or not 0 <= offset <= self.global_batch_size:
            raise ValueError(
                f"data position (epoch {epoch}, sample {sample}, offset {offset}) lies outside a dataset of "
                f"{self.num_samples} samples read in steps of {self.global_batch_size}: was it saved for other data?"
            )
        if offset % self.round_size:
            raise ValueError(
                f"data position is {offset} samples into a step, which {self.world_size} ranks with micro-batches of "
                f"{self.micro_batch_size} (rounds of {self.round_size}) cannot continue: resume from a finished step"
            )
        self.position = self._normalised(epoch, sample, offset)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            epoch, _, _ = self.position
            order = self._order(epoch)
            while self.position.epoch == epoch:
                _, sample, offset = self.position
                step_end = min(sample + self.global_batch_size, self.num_samples)
                begin = sample + offset + self.rank * self.micro_batch_size
                micro_batch = order[begin : min(begin + self.micro_batch_size, step_end)]
                # Before the yield: a state taken after it must point at the next micro-batch.
                self.position = self._normalised(epoch, sample, offset + self.round_size)
                yield micro_batch.tolist()

    def state_dict(self) -> dict[str, int]:
        return {**self.position._asdict(), "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_samples"] != self.num_samples:
            warnings.warn(
                f"the data position was saved with {state['num_samples']} samples and the dataset now has "
                f"{self.num_samples}: the current epoch's order changes, so it repeats and skips samples",
                stacklevel=2,
            )
        self.seek(Position(state["epoch"], state["sample"], state["offset"]))

    def _normalised(self, epoch: int, sample: int, offset: int) -> Position:
        if offset == self.global_batch_size:
            sample, offset = sample + offset, 0
        if sample >= self.num_samples:
            return Position(epoch + 1)
        return Position(epoch, sample, offset)

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        # torch's CPU generator keeps 32 bits of a seed, so (seed, epoch) are mixed into 32 bits first.
        mixed = int(np.random.SeedSequence(self.seed, spawn_key=(epoch,)).generate_state(1)[0])
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(mixed)).numpy()
