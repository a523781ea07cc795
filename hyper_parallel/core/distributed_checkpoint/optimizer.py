"""AdamW's moments on disk: every rank's file is the ``state_dict`` that torch's own AdamW would give for that rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from .chunks import Box, ChunkedTensors, StoredChunk, assemble, tensor_file
from .metadata import TensorStorageMetadata, read_metadata
from .storage import read_pt

Moment = Literal["exp_avg", "exp_avg_sq"]
_STEP_SHOWN = 3


class ParamGroup(NamedTuple):
    """Trained parameters that share their settings, in order, and the settings, under torch's names."""

    names: tuple[str, ...]
    options: dict[str, Any]


def optimizer_file(rank: int) -> str:
    """Name of the file with a rank's moments."""
    return f"optimizer_rank{rank}.pt"


def optimizer_state_dict(
    groups: Sequence[ParamGroup], exp_avg: Mapping[str, torch.Tensor], exp_avg_sq: Mapping[str, torch.Tensor], step: int
) -> dict[str, Any]:
    """torch's AdamW ``state_dict`` over local shards; ``param_names`` stands beside the integers."""
    names = [name for group in groups for name in group.names]
    number = {name: index for index, name in enumerate(names)}
    count = torch.tensor(float(step))
    state = {number[name]: {"step": count, "exp_avg": exp_avg[name], "exp_avg_sq": exp_avg_sq[name]} for name in names}
    defaults = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
    param_groups = [
        {
            **defaults,
            "decoupled_weight_decay": True,
            **group.options,
            "params": [number[name] for name in group.names],
            "param_names": list(group.names),
        }
        for group in groups
    ]
    return {"state": state, "param_groups": param_groups}


class StoredMoments:
    """The moments in a checkpoint directory, cut as its model chunks are, whatever number of ranks wrote them.

    ``groups``: names of the parameters trained now, decayed and not. Raises ValueError if the checkpoint trained others, or
    if its parameters cannot be told apart.
    """

    def __init__(self, tensors: ChunkedTensors, groups: Sequence[Sequence[str]]) -> None:
        self.directory = tensors.directory
        self._tensors = tensors
        self._ranks = sorted(int(path.stem.removeprefix("optimizer_rank")) for path in self.directory.glob("optimizer_rank*.pt"))
        if not self._ranks:
            raise ValueError(
                f"{self.directory} holds no optimizer state: to start from its weights alone, set model.weights_path to it "
                "instead of train.checkpoint.load_path"
            )
        # Moments lie in files by parameter number; an order that is not written down is that of the model's own tensors.
        self._order = [[name for name in tensors.shape_of if name in set(group)] for group in groups]
        self._states: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
        self._chunks = self._locate()
        self.step = self._step_of(self._ranks[0])

    def read(self, moment: Moment, name: str, part: Box = ()) -> torch.Tensor:
        """A moment of a parameter, or the ``part`` of it; it may be a view of a mapped file."""

        def fetch(chunk: StoredChunk, box: Box) -> torch.Tensor:
            rank = int(chunk.key)
            stored = self._state(rank)[name][moment]
            if tuple(stored.shape) != chunk.sizes:
                raise ValueError(
                    f"{self.directory / chunk.file}: {moment} of {name} has shape {list(stored.shape)}, its parameter "
                    f"{list(chunk.sizes)}: the order of parameters is another"
                )
            return stored[box]

        box = part or tuple(slice(0, size) for size in self._tensors.shape_of[name])
        return assemble(f"{moment} of {name}", box, torch.float32, self._chunks[name], fetch, source=self.directory)

    def _locate(self) -> dict[str, list[StoredChunk]]:
        """The chunk of every parameter whose moments each file holds, once. A chunk's key is its rank."""
        chunks: dict[str, dict[tuple[int, ...], StoredChunk]] = {name: {} for name in self._tensors.chunks_of}
        for rank in self._ranks:
            for name, offsets, sizes in self._cut(rank):
                chunks[name].setdefault(offsets, StoredChunk(offsets, sizes, optimizer_file(rank), str(rank)))
        return {name: list(found.values()) for name, found in chunks.items()}

    def _cut(self, rank: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        own = self.directory / f"{rank}.metadata"
        if own.exists():
            entries = read_metadata(own).state_dict_metadata.items()
            stored = [
                (name, chunk) for name, entry in entries if isinstance(entry, TensorStorageMetadata) for chunk in entry.chunks
            ]
        else:
            file = tensor_file(rank)
            stored = [(name, chunk) for name, chunks in self._tensors.chunks_of.items() for chunk in chunks if chunk.file == file]
        return [(name, tuple(chunk.offsets), tuple(chunk.sizes)) for name, chunk in stored]

    def _state(self, rank: int) -> dict[str, dict[str, torch.Tensor]]:
        """One file's state by parameter name."""
        if rank not in self._states:
            path = self.directory / optimizer_file(rank)
            saved = read_pt(path)
            try:
                self._states[rank] = self._named(saved, path)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is not the state of torch's AdamW: {error!r}") from None
        return self._states[rank]

    def _named(self, saved: dict[str, Any], path: Path) -> dict[str, dict[str, torch.Tensor]]:
        groups = [group for group in saved["param_groups"] if group["params"]]
        trained = [order for order in self._order if order]
        if all("param_names" in group for group in groups):
            names = {number: name for group in groups for number, name in zip(group["params"], group["param_names"], strict=True)}
        else:
            if [len(group["params"]) for group in groups] != [len(order) for order in trained]:
                raise ValueError(
                    f"{path} names no parameters and holds {[len(group['params']) for group in groups]} of them (decayed, not "
                    f"decayed), this run trains {[len(order) for order in trained]}: set model.freeze_modules as it was, or "
                    "start from the weights alone with model.weights_path"
                )
            names = {
                number: name
                for group, order in zip(groups, trained, strict=True)
                for number, name in zip(group["params"], order, strict=True)
            }
        expected = {name for order in trained for name in order}
        if set(names.values()) != expected:
            differing = sorted(set(names.values()) ^ expected)
            raise ValueError(
                f"{path} holds the moments of other parameters than this run trains ({len(differing)} differ, such as "
                f"{differing[0]}): set model.freeze_modules as it was, or start from the weights alone with model.weights_path"
            )
        return {names[number]: state for number, state in saved["state"].items()}

    def _step_of(self, rank: int) -> int:
        steps = {name: int(state["step"]) for name, state in self._state(rank).items()}
        if len(set(steps.values())) > 1:
            some = dict(sorted(steps.items(), key=lambda item: item[1])[:_STEP_SHOWN])
            raise ValueError(
                f"{self.directory / optimizer_file(rank)}: its parameters were updated different numbers of times (such as "
                f"{some}): start from the weights alone with model.weights_path"
            )
        return next(iter(steps.values()), 0)
