"""One file: safetensors and ``.pt`` written through to the disk, and checksums."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

CHECKSUM = "xxh3_128"
_ZIP_OPTIONS = threading.Lock()
_BLOCK = 1 << 24  # bytes hashed at a time


@dataclass
class StorageInfo:
    """Where a chunk lies: the file beside the metadata and its key there (None: the parameter's name).

    ``offset`` and ``length`` are for files of packed bytes; for tensors they are 0 and -1.
    """

    relative_path: str
    offset: int
    length: int
    tensor_key: str | None = None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file and wait until it is on the disk."""
    local = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with _naming(path):
        path.touch()
        mode = path.stat().st_mode  # safetensors would leave the file to its owner alone
        save_file(local, path, metadata={"format": "pt"})
        path.chmod(mode)
        _flush(path)


def write_pt(path: Path, value: Any) -> None:
    """``torch.save`` and wait until it is on the disk."""
    with _naming(path), _without_zip_checksums():
        with path.open("wb") as file:  # given a path, torch would not tell why a write failed
            torch.save(value, file)
        _flush(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file and wait until it is on the disk."""
    with _naming(path):
        path.write_bytes(data)
        _flush(path)


def read_pt(path: Path) -> Any:
    """Map a ``.pt`` file: tensors are read from the disk as they are used. Nothing in it can run code.

    Raises ValueError naming a file that is missing, damaged, or holds anything but tensors and plain containers.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError and more for damaged files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from None


def checksum(path: Path) -> str:
    """XXH3 (128 bits) of a file, in hexadecimal."""
    digest = xxhash.xxh3_128()
    size = path.stat().st_size
    if size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if hasattr(data, "madvise"):
                data.madvise(mmap.MADV_SEQUENTIAL)
            view = memoryview(data)
            for begin in range(0, size, _BLOCK):
                with view[begin : begin + _BLOCK] as block:
                    digest.update(block)
            view.release()
    return digest.hexdigest()


def flush_directory(path: Path) -> None:
    """Wait until a directory's entries (new names, renames) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever fails in writing a file becomes an OSError with its name and, where one is known, the system's reason."""
    try:
        yield
    except Exception as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
        raise OSError(f"{path.name}: {reason}") from error


@contextlib.contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """torch's CRC-32 of every record halves the speed of a save, and the manifest holds a checksum of the whole file."""
    serialization: Any = torch.serialization
    if not hasattr(serialization, "set_crc32_options"):
        yield
        return
    with _ZIP_OPTIONS:  # in torch 2.6 they are those of the whole process, and two threads write
        before = serialization.get_crc32_options()
        serialization.set_crc32_options(False)
        try:
            yield
        finally:
            serialization.set_crc32_options(before)
