"""Rows of a data set on disk, each with a name for error messages, and the images that rows point at."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image


class Rows(Protocol):
    """What a conversation data set reads: rows by index, their names, and where relative paths start."""

    root: Path

    def __len__(self) -> int: ...
    def __getitem__(self, idx: int) -> dict[str, Any]: ...
    def name(self, idx: int) -> str:
        """``file:line`` or the like."""
        ...


class JsonLines:
    """One JSON object per line. The file is scanned once for line starts; a row is read and parsed when asked for."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.root = self.path.parent
        if not self.path.is_file():
            raise ValueError(f"{self.path} is not a file: data.type json_file reads one JSON object per line")
        offsets, lines, offset = [], [], 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    offsets.append(offset)
                    lines.append(number)
                offset += len(line)
        if not offsets:
            raise ValueError(f"{self.path} holds no rows")
        self._offsets, self._lines = np.array(offsets), np.array(lines)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        # Opened anew each time: workers are forked, and a shared handle would share its position.
        with self.path.open("rb") as file:
            file.seek(self._offsets[idx])
            line = file.readline()
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.name(idx)}: not valid JSON ({error}); expected one JSON object per line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.name(idx)}: expected a JSON object, got {type(row).__name__}")
        return row

    def name(self, idx: int) -> str:
        return f"{self.path}:{self._lines[idx]}"


class SavedDataset:
    """A directory written by ``datasets.Dataset.save_to_disk``."""

    def __init__(self, path: str | Path):
        self.root = Path(path)
        if not self.root.is_dir():
            raise ValueError(f"{self.root} is not a directory: data.type hf_datasets reads a save_to_disk directory")
        try:
            import datasets
        except ImportError:
            raise ValueError('data.type hf_datasets needs the package datasets: pip install "hyper-parallel[datasets]"') from None
        try:
            data = datasets.load_from_disk(str(self.root))
        except FileNotFoundError as error:
            raise ValueError(f"{self.root} was not written by datasets' save_to_disk: {error}") from None
        if isinstance(data, datasets.DatasetDict):
            raise ValueError(
                f"{self.root} holds the splits {list(data)}: give one of them, such as {self.root / str(next(iter(data)))}"
            )
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return self._data[idx]

    def name(self, idx: int) -> str:
        return f"{self.root}[{idx}]"


def load_image(source: Any, root: Path) -> Image:
    """An image from a path relative to ``root``, a PIL image, or an undecoded ``datasets.Image``: ``{bytes, path}``."""
    from PIL import ImageOps

    # Cameras store the rotation as a tag; Hugging Face's loader applies it too.
    return _open(source, root, ImageOps.exif_transpose)


def image_size(source: Any, root: Path) -> tuple[int, int]:
    """Height and width of what ``load_image`` would give; only the header is read."""
    from PIL import ExifTags

    def size(image: Image) -> tuple[int, int]:
        width, height = image.size
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        return (width, height) if turned else (height, width)

    image = _open(source, root, size)
    return image if isinstance(image, tuple) else (image.height, image.width)


def _open(source: Any, root: Path, read: Callable[[Image], Any]) -> Any:
    """``read`` of an image that is opened; one that is in memory already is returned as it is."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, dict) and source.get("bytes") is not None:
        file = io.BytesIO(source["bytes"])
    else:
        path = source.get("path") if isinstance(source, dict) else source
        if not isinstance(path, str):
            raise ValueError(f"an image must be a path, a PIL image or {{bytes, path}}, got {source!r:.80}")
        file = root / path
    try:
        with Image.open(file) as image:
            return read(image)
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"cannot read the image {file}: {error}") from None
