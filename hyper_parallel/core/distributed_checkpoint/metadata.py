"""The records in ``.metadata`` and ``<rank>.metadata``. Their module paths are part of the format: pickles name them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class TensorProperties:
    """``dtype`` is torch's name of it, such as ``torch.float32``."""

    dtype: str
    requires_grad: bool = False
    memory_format: str | None = None


@dataclass(frozen=True)
class ChunkStorageMetadata:
    """A box of a tensor: where it begins and how long it is in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorStorageMetadata:
    """A whole tensor's dtype and shape, and the boxes of it that are stored."""

    properties: TensorProperties
    size: tuple[int, ...]
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """An entry that is no tensor."""


@dataclass(frozen=True)
class MetadataIndex:
    """Names one stored chunk; ``index`` is its place in the list of chunks, and no part of its identity."""

    fqn: str
    offset: tuple[int, ...] = ()
    index: int | None = field(default=None, compare=False)


@dataclass
class Metadata:
    """What is stored (by name), and where (by chunk; values are ``StorageInfo``)."""

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: Any = None
    storage_data: dict[MetadataIndex, Any] | None = None
    version: str = "1.0"


_HERE = "hyper_parallel.core.distributed_checkpoint"
_MODULES = {  # this package's modules, under their present and their earlier names
    f"{prefix}.{module}": f"{_HERE}.{module}"
    for prefix in (_HERE, "hyper_parallel.core.checkpoint")
    for module in ("metadata", "storage")
}


def read_metadata(path: Path) -> Metadata:
    """Unpickle a metadata file that may come from anywhere: only the records of this format are ever constructed.

    Raises ValueError naming the file for anything else in it, and for a damaged one.
    """
    try:
        metadata = _Unpickler(path.read_bytes(), path).load()
        if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
            raise _Refused(f"{path} is not checkpoint metadata: it holds a {type(metadata).__name__}")
        _check(metadata)
    except _Refused:
        raise
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # a damaged pickle fails in every way there is
        raise ValueError(f"{path} is not readable checkpoint metadata: {type(error).__name__}: {error}") from None
    return metadata


def _check(metadata: Metadata) -> None:
    """Raise one of several errors unless the records hold what their fields say (unpickling sets whatever it is told to)."""
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        dims = len(entry.size)
        vectors = [entry.size, *(vector for chunk in entry.chunks for vector in (chunk.offsets, chunk.sizes))]
        numbers = all(len(vector) == dims and all(type(n) is int and n >= 0 for n in vector) for vector in vectors)
        if not (isinstance(name, str) and isinstance(entry.properties.dtype, str) and numbers):
            raise TypeError(f"the entry {name!r} describes no tensor")
    for index, place in (metadata.storage_data or {}).items():
        if not (isinstance(index, MetadataIndex) and isinstance(place.relative_path, str)):
            raise TypeError(f"{index!r} is stored nowhere")


def metadata_bytes(metadata: Metadata) -> bytes:
    """The pickle of a metadata record."""
    return pickle.dumps(metadata, protocol=4)


class _Refused(ValueError):
    """A refusal that names its file already."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        from .storage import StorageInfo

        if (module, name) == ("torch", "Size"):
            return torch.Size
        known = {
            f"{_HERE}.metadata": (
                BytesStorageMetadata,
                ChunkStorageMetadata,
                Metadata,
                MetadataIndex,
                TensorProperties,
                TensorStorageMetadata,
            ),
            f"{_HERE}.storage": (StorageInfo,),
        }
        for record in known.get(_MODULES.get(module, ""), ()):
            if record.__name__ == name:
                # A stand-in makes the records: what a pickle sets on a class must not be set on ours.
                return type(name, (), {"__new__": lambda _, *__, record=record: object.__new__(record)})
        raise _Refused(f"{self._path} asks for {module}.{name}, which is no part of checkpoint metadata: it was not loaded")


def merge(parts: Mapping[int, Metadata]) -> Metadata:
    """The metadata of all ranks together, each chunk once (the lowest rank that stores it).

    Raises ValueError where two ranks disagree on a tensor's shape or dtype.
    """
    whole = Metadata({}, storage_data={})
    assert whole.storage_data is not None
    for rank in sorted(parts):
        part = parts[rank]
        for name, entry in part.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            known = whole.state_dict_metadata.setdefault(name, TensorStorageMetadata(entry.properties, entry.size, []))
            assert isinstance(known, TensorStorageMetadata)
            if (known.properties, tuple(known.size)) != (entry.properties, tuple(entry.size)):
                raise ValueError(
                    f"rank {rank} stores {name} as {entry.properties.dtype} {list(entry.size)}, "
                    f"another rank as {known.properties.dtype} {list(known.size)}"
                )
            stored = {tuple(chunk.offsets) for chunk in known.chunks}
            for chunk in entry.chunks:
                if tuple(chunk.offsets) not in stored:
                    index = MetadataIndex(name, tuple(chunk.offsets), len(known.chunks))
                    known.chunks.append(chunk)
                    if part.storage_data and index in part.storage_data:
                        whole.storage_data[index] = part.storage_data[index]
    return whole
