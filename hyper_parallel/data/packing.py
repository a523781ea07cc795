"""Several short samples as one entry: as many tokens a micro-batch as ``max_seq_len`` allows, whatever the samples' lengths."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from hyper_parallel.data.collator import Sample


class PackedDataset(Dataset[list[Sample]]):
    """Entries are lists of samples whose tokens together fit ``capacity``.

    Nothing is joined: the samples of a pack stay samples, which do not attend to each other and count their positions from 0.
    The packs depend on the lengths alone, so they are the same on all ranks and in all epochs.
    """

    def __init__(self, dataset: Dataset[Sample], lengths: Sequence[int], capacity: int) -> None:
        self.dataset, self.capacity, self.num_tokens = dataset, capacity, sum(lengths)
        self.packs = pack(lengths, capacity)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> list[Sample]:
        return [self.dataset[sample] for sample in self.packs[index]]

    def __str__(self) -> str:
        samples = sum(len(indices) for indices in self.packs)
        filled = self.num_tokens / (len(self.packs) * self.capacity)
        return f"{samples:,} samples in {len(self.packs):,} packs of {self.capacity} tokens, {100 * filled:.1f} % filled"


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Partition samples so that each part's lengths sum up to at most ``capacity``: best fit, longest first."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        assert length <= capacity, (index, length, capacity)
        place = bisect.bisect_left(rooms, (length, 0))
        room, number = rooms.pop(place) if place < len(rooms) else (capacity, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(index)
        if room > length:
            bisect.insort(rooms, (room - length, number))
    return [sorted(indices) for indices in packs]


class _Lengths(Dataset[int]):
    def __init__(self, dataset: Any, size: int) -> None:
        self.dataset, self.size = dataset, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return self.dataset.length(index)


def measure(dataset: Any, size: int, num_workers: int) -> list[int]:
    """Lengths of the first ``size`` samples of a data set that can tell them (``length(index)``), by so many processes."""
    loader = DataLoader(_Lengths(dataset, size), batch_size=64, num_workers=num_workers, collate_fn=list)
    return [length for batch in loader for length in batch]
