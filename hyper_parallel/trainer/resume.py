"""Which ``step_<N>`` directory a run goes on from, whether it is whole, and all of its state but the model's."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..config import Config
from ..core.distributed_checkpoint.chunks import HF_WEIGHTS, ChunkedTensors
from ..core.distributed_checkpoint.manifest import MANIFEST, FileRecord, Manifest, damage, read_manifest
from ..core.distributed_checkpoint.optimizer import optimizer_file
from ..core.distributed_checkpoint.storage import read_pt
from ..data.loader import ResumableLoader
from ..data.sampler import Position
from ..platform import Platform
from .distributed import Ranks

EXTRA_STATE = "extra_state.json"
LATEST = "latest"
SMALL = 1 << 24  # bytes of a file that is checked before anything is loaded
STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps, epochs and tokens taken."""

    step: int = 0
    epoch: int = 0
    consumed_tokens: int = 0


def restore(config: Config, ranks: Ranks, say: Callable[[str], None], load: Callable[[Path | None], None]) -> Path | None:
    """Call ``load`` with the directory that ``load_path`` names (None: start afresh) while all ranks check its files; returns it.

    ``latest`` is the newest whole one in ``output_dir``; damaged ones are reported and passed over. Raises ValueError, on every
    rank, for a checkpoint that is missing, unfinished or damaged, with the files and what is wrong with them; what ``load``
    made of it is then worth nothing.
    """
    load_path, output_dir = config.train.checkpoint.load_path, Path(config.train.checkpoint.output_dir)
    if load_path is None:
        weights = config.model.weights_path
        if weights is None or not (Path(weights) / MANIFEST).exists():
            load(None)
        elif found := problems(Path(weights), ranks, lambda: load(None)):
            raise ValueError(f"model.weights_path = {weights} cannot be loaded: {'; '.join(found)}")
        return None
    if load_path != LATEST:
        directory = Path(load_path)
        if found := problems(directory, ranks, lambda: load(directory)):
            raise ValueError(f"train.checkpoint.load_path = {directory} cannot be resumed from: {'; '.join(found)}")
        return directory
    candidates: list[Path] = ranks.gather(newest_first(output_dir) if ranks.is_main else [])[0]
    for directory in candidates:
        if not (found := problems(directory, ranks, functools.partial(load, directory))):
            return directory
        say(f"{directory} is passed over: {'; '.join(found)}")
    raise ValueError(
        f"train.checkpoint.load_path = latest: {output_dir} holds no whole step_<N> directory "
        f"({len(candidates)} damaged); to start afresh, set it to null"
    )


def newest_first(output_dir: Path) -> list[Path]:
    """The ``step_<N>`` directories of a run, by the time they were finished, then by number."""

    def age(directory: Path) -> tuple[str, int]:
        manifest = manifest_of(directory)
        return (manifest.saved_at if manifest else "", step_number(directory))

    directories = output_dir.iterdir() if output_dir.is_dir() else ()
    return sorted((path for path in directories if path.is_dir() and STEP.fullmatch(path.name)), key=age, reverse=True)


def step_number(directory: Path) -> int:
    """N of ``step_<N>``."""
    match = STEP.fullmatch(directory.name)
    assert match is not None, directory
    return int(match[1])


def manifest_of(directory: Path) -> Manifest | None:
    """The manifest of a directory; None where there is none that can be read."""
    try:
        return read_manifest(directory)
    except ValueError:
        return None


def problems(directory: Path, ranks: Ranks, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
    """Why a directory cannot be resumed from, a sentence each; ranks share the reading of the files.

    ``meanwhile`` is called once sizes and small files are known to be right, while the large ones are read for their checksums:
    each file comes from the disk once, for both. What it raises is raised here, unless something is wrong with the files.
    """
    mine, failure = [], None
    small: dict[str, FileRecord] = {}
    large: dict[str, FileRecord] = {}
    try:
        if not directory.is_dir():
            raise ValueError(f"{directory} does not exist")
        manifest = read_manifest(directory)
        if manifest is None:
            _check_without_manifest(directory)
        else:
            small, large = _share(manifest, ranks)
        mine = damage(directory, small) + damage(directory, large, contents=False)
    except (ValueError, OSError) as error:
        mine = [str(error)]
    if found := _all_of(mine, ranks):
        return found
    with ThreadPoolExecutor(1) as reader:
        checksums = reader.submit(damage, directory, large)
        try:
            meanwhile()
        except Exception as error:
            failure = error
        mine = checksums.result()
    found = _all_of(mine, ranks)
    if failure is not None and not found:
        raise failure
    return found


def _share(manifest: Manifest, ranks: Ranks) -> tuple[dict[str, FileRecord], dict[str, FileRecord]]:
    """The files that this rank checks: small ones, large ones. An export takes no part in resuming."""
    files = [(name, record) for name, record in manifest.files.items() if not name.startswith(f"{HF_WEIGHTS}/")]
    mine = sorted(files, key=lambda file: file[1].size)[ranks.rank :: ranks.world_size]
    small = {name: record for name, record in mine if record.size <= SMALL}
    return small, {name: record for name, record in mine if name not in small}


def _all_of(mine: list[str], ranks: Ranks) -> list[str]:
    """Every rank's problems, each once."""
    return list(dict.fromkeys(problem for part in ranks.gather(mine) for problem in part))


def _check_without_manifest(directory: Path) -> None:
    """What can be said of a checkpoint that another Trainer wrote: all files are there and their headers are right."""
    if not (directory / EXTRA_STATE).exists():
        raise ValueError(
            f"{directory / EXTRA_STATE} is missing: the save was not finished, or this is no step_<N> directory (for weights "
            "alone, set model.weights_path to it)"
        )
    tensors = ChunkedTensors(directory)
    for file in tensors.files:
        rank = re.fullmatch(r"_rank(\d+)_\.safetensors", file)
        names = [file, *([optimizer_file(int(rank[1]))] if rank else [])]
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ValueError(f"{directory / missing[0]} is missing")
    tensors.check()


def load_progress(directory: Path) -> Progress:
    """How far the run had come that wrote a checkpoint."""
    path = directory / EXTRA_STATE
    try:
        extra = json.loads(path.read_text())
        step, epoch = int(extra["global_step"]), int(extra["epoch"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from None
    manifest = read_manifest(directory)
    return Progress(step, epoch, manifest.consumed_tokens if manifest else 0)


def load_position(directory: Path, loader: ResumableLoader, step: int) -> str | None:
    """Move the loader to where the run was; returns what there is to say, if anything.

    The position is one for all ranks. Another Trainer's loader is in its own order: then the loader goes to where this
    Trainer is after as many steps.
    """
    if not (directory / MANIFEST).exists():
        loader.batch_sampler.seek(Position(*loader.batch_sampler.position_at(step)))
        return f"{directory} holds another Trainer's data position: data go on where step {step} of this Trainer ends"
    loader.load_state_dict(read_pt(directory / "dataloader_rank0.pt"))
    return None


def load_rng(directory: Path, rank: int, platform: Platform) -> str | None:
    """Restore this rank's generators; returns what there is to say, if anything (a rank that was not there has none)."""
    path, extra_path = directory / f"rng_rank{rank}.pt", directory / f"rng_extra_rank{rank}.pt"
    if not path.exists():
        return f"{directory} was written by fewer ranks: rank {rank} starts its random numbers from train.seed"
    torch.set_rng_state(read_pt(path))
    if extra_path.exists():
        extra = read_pt(extra_path)
        version, words, gauss = extra["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = extra["numpy"]
        np.random.set_state((name, keys.numpy().view(np.uint32), position, has_gauss, cached))
        if extra["device_type"] != platform.device_type:
            return f"{directory} was written on {extra['device_type']}: this {platform.device_type}'s random numbers start afresh"
        if extra["device"] is not None:
            platform.set_rng_state(extra["device"])
    return None
