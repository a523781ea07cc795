"""Tensors that lie in chunks over several files: any part of any of them, reading no more than that part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from .metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    merge,
    read_metadata,
)
from .storage import StorageInfo

GLOBAL_METADATA = ".metadata"
HF_WEIGHTS = "hf_ckpt"
Box = tuple[slice, ...]


class Part(NamedTuple):
    """This rank's box of a tensor of ``shape``, beginning at ``offsets``."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The slices of the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.tensor.shape, strict=True))


def tensor_file(rank: int) -> str:
    """Name of the file with a rank's chunks."""
    return f"_rank{rank}_.safetensors"


def rank_metadata(rank: int, parts: Mapping[str, Part]) -> Metadata:
    """The metadata of one rank's chunks, all in its one file under their own names."""
    entries, storage = {}, {}
    for name, part in parts.items():
        chunk = ChunkStorageMetadata(part.offsets, part.tensor.shape)
        entries[name] = TensorStorageMetadata(TensorProperties(str(part.tensor.dtype)), part.shape, [chunk])
        storage[MetadataIndex(name, part.offsets, 0)] = StorageInfo(tensor_file(rank), 0, -1, name)
    return Metadata(entries, storage_data=storage)


class StoredChunk(NamedTuple):
    """A chunk and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


class Fetch(Protocol):
    """Reads a box, in the chunk's own coordinates, of a stored chunk."""

    def __call__(self, chunk: StoredChunk, box: Box, /) -> torch.Tensor: ...


def assemble(
    name: str, box: Box, dtype: torch.dtype, chunks: Iterable[StoredChunk], fetch: Fetch, *, source: object
) -> torch.Tensor:
    """One box of a tensor, put together from the chunks that overlap it. ValueError if they leave a gap or contradict."""
    begin = tuple(part.start for part in box)
    sizes = tuple(part.stop - part.start for part in box)
    pieces: dict[tuple[tuple[int, int], ...], tuple[StoredChunk, Box]] = {}  # by where they go; replicas once
    for chunk in chunks:
        low = [max(a, b) for a, b in zip(begin, chunk.offsets, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(begin, sizes, chunk.offsets, chunk.sizes, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            where = tuple((a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
            local = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            if where == tuple((0, size) for size in sizes):
                return fetch(chunk, local)
            pieces.setdefault(where, (chunk, local))
    for one, other in itertools.combinations(pieces, 2):
        if all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True)):
            raise ValueError(f"{source}: chunks of {name} overlap, at {one} and {other} of the part at {begin}")
    if (count := sum(math.prod(b - a for a, b in where) for where in pieces)) != math.prod(sizes):
        raise ValueError(f"{source}: {name} is incomplete: {count} of {math.prod(sizes)} elements of {list(sizes)} at {begin}")
    result = torch.empty(sizes, dtype=dtype)
    for where, (chunk, local) in pieces.items():
        result[tuple(slice(a, b) for a, b in where)] = fetch(chunk, local)
    return result


class ChunkedTensors:
    """The model tensors of a checkpoint directory.

    Raises ValueError naming the file for missing, damaged or contradictory ones; nothing but headers is read before ``read``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shape_of: dict[str, tuple[int, ...]] = {}
        self.dtype_of: dict[str, torch.dtype] = {}
        self.chunks_of: dict[str, list[StoredChunk]] = {}
        self._files: dict[str, Any] = {}
        metadata = read_all_metadata(directory)
        entries = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
        again = any(name.startswith("model.model.") for name in entries)  # a later layout: the model beside its optimizer
        for name, entry in entries.items():
            if again and not name.startswith("model."):
                continue
            short = name.removeprefix("model.") if again else name
            self.shape_of[short] = tuple(entry.size)
            self.dtype_of[short] = _dtype(entry.properties.dtype, directory)
            self.chunks_of[short] = [self._locate(metadata, name, chunk) for chunk in entry.chunks]

    @property
    def files(self) -> list[str]:
        """Names of the files with chunks."""
        return sorted({chunk.file for chunks in self.chunks_of.values() for chunk in chunks})

    def read(self, name: str, part: Box = ()) -> torch.Tensor:
        """A tensor, or the ``part`` of it, in the dtype it was stored in; it may be a view of a mapped file."""
        box = part or tuple(slice(0, size) for size in self.shape_of[name])

        def fetch(chunk: StoredChunk, local: Box) -> torch.Tensor:
            return self._fetch(name, chunk, local)

        return assemble(name, box, self.dtype_of[name], self.chunks_of[name], fetch, source=self.directory)

    def check(self) -> None:
        """Read the header of every file, and compare it with the metadata."""
        for name, chunks in self.chunks_of.items():
            for chunk in chunks:
                self._fetch(name, chunk, tuple(slice(0, 0) for _ in chunk.sizes))

    def _locate(self, metadata: Metadata, name: str, chunk: ChunkStorageMetadata) -> StoredChunk:
        place = (metadata.storage_data or {}).get(MetadataIndex(name, tuple(chunk.offsets)))
        if place is None:
            raise ValueError(f"{self.directory}: the metadata does not say where {name} at {tuple(chunk.offsets)} is stored")
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{self.directory}: {name} points outside the directory, to {place.relative_path!r}")
        return StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.tensor_key or name)

    def _fetch(self, name: str, chunk: StoredChunk, box: Box) -> torch.Tensor:
        path = self.directory / chunk.file
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = safe_open(path, framework="pt")
            stored = self._files[chunk.file].get_slice(chunk.key)
            if tuple(stored.get_shape()) != chunk.sizes:
                raise ValueError(f"{path}: {chunk.key} has shape {stored.get_shape()}, the metadata says {list(chunk.sizes)}")
            piece = stored[box]
            if piece.dtype != self.dtype_of[name]:
                raise ValueError(f"{path}: {chunk.key} is of {piece.dtype}, the metadata says {self.dtype_of[name]}")
            return piece
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None


def read_all_metadata(directory: Path) -> Metadata:
    """The metadata of all ranks of a directory, from the file for all or else from each rank's."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    if (directory / GLOBAL_METADATA).exists():
        return read_metadata(directory / GLOBAL_METADATA)
    parts = {int(path.stem): read_metadata(path) for path in directory.glob("*.metadata") if path.stem.isdigit()}
    if not parts:
        raise ValueError(f"{directory} is no checkpoint: it holds neither {GLOBAL_METADATA} nor <rank>.metadata")
    return merge(parts)


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds chunks (rather than, say, Hugging Face weights)."""
    return (directory / GLOBAL_METADATA).exists() or (directory / "0.metadata").exists()


def hugging_face_directory(weights: str | Path) -> Path | None:
    """Where config.json and the tokenizer of ``weights`` lie: there, or in the export inside a checkpoint (None: it has none)."""
    weights = Path(weights)
    if not is_checkpoint(weights):
        return weights
    return weights / HF_WEIGHTS if (weights / HF_WEIGHTS).is_dir() else None


def _dtype(name: str, directory: Path) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{directory}: the metadata names a dtype {name!r} that torch does not have")
    return dtype
