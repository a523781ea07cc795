"""``manifest.json``: the files of a finished checkpoint with sizes and checksums, and what the run was."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .storage import CHECKSUM, checksum, write_bytes

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and checksum (XXH3, 128 bits) of one file."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """``files`` by path relative to the directory; ``saved_at`` in UTC, ISO 8601."""

    step: int
    saved_at: str
    world_size: int
    topology: dict[str, int]
    consumed_tokens: int
    config: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)


def record_file(path: Path) -> FileRecord:
    """Measure a file."""
    return FileRecord(path.stat().st_size, checksum(path))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest; a directory with one is finished."""
    write_bytes(directory / MANIFEST, (json.dumps(asdict(manifest), indent=1) + "\n").encode())


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory; None where there is none. ValueError if it is damaged."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        raw = json.loads(path.read_text())
        files = {name: FileRecord(int(entry["size"]), str(entry[CHECKSUM])) for name, entry in raw.pop("files").items()}
        datetime.datetime.fromisoformat(raw["saved_at"])
        return Manifest(files=files, **raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None


def damage(directory: Path, files: Mapping[str, FileRecord], *, contents: bool = True) -> list[str]:
    """What is wrong with files, a sentence each; without ``contents``, only what can be told without reading them."""
    problems = []
    for name, record in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif (size := path.stat().st_size) != record.size:
            problems.append(f"{path} has {size} bytes, {record.size} were written")
        elif contents and checksum(path) != record.xxh3_128:
            problems.append(f"{path} is damaged: its checksum is not that of what was written")
    return problems
