"""The ``step_<N>`` directories of a run: written whole or not at all, now or in the background."""

from __future__ import annotations

import datetime
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import CheckpointConfig, Config
from ..core.distributed_checkpoint.chunks import GLOBAL_METADATA, HF_WEIGHTS, ChunkedTensors, rank_metadata, tensor_file
from ..core.distributed_checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    record_file,
    write_manifest,
)
from ..core.distributed_checkpoint.metadata import Metadata, merge, metadata_bytes
from ..core.distributed_checkpoint.optimizer import optimizer_file, optimizer_state_dict
from ..core.distributed_checkpoint.storage import flush_directory, write_bytes, write_pt, write_tensors
from ..data.loader import ResumableLoader
from ..platform import Platform
from .adapter import ModelAdapter, ModelState
from .distributed import Ranks
from .resume import EXTRA_STATE, STEP, Progress, manifest_of, newest_first

SCHEDULER = "scheduler.pt"


def make_output_dir(config: CheckpointConfig) -> Path:
    """The run's directory, created where it does not exist; ValueError if it cannot be."""
    path = Path(config.output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"train.checkpoint.output_dir = {path} cannot be created: {error.strerror}") from None
    return path


class SaveError(RuntimeError):
    """A checkpoint was not written; the run's state and earlier checkpoints are as they were."""


@dataclass(frozen=True)
class _Snapshot:
    """What this rank writes for one step."""

    progress: Progress
    model: ModelState
    rng: torch.Tensor
    rng_extra: dict[str, Any]
    loader: dict[str, Any]


_Written = tuple[Metadata, dict[str, FileRecord]]  # what a rank tells of its files


class Checkpointer:
    """Saves a run. With ``save_async`` the tensors are copied while the next step computes its gradients (``before_update``
    waits for the copy), and files are written in the background, one checkpoint at a time.
    """

    def __init__(self, config: Config, ranks: Ranks, platform: Platform, model: ModelAdapter, say: Callable[[str], None]) -> None:
        self.config, self.settings = config, config.train.checkpoint
        self.output_dir = Path(self.settings.output_dir)
        self.ranks, self.platform, self.model, self.say = ranks, platform, model, say
        self.loaded: Path | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        if ranks.is_main:
            recover(self.output_dir)
        ranks.gather(None)  # nobody looks for checkpoints before that is done

    def save(self, progress: Progress, loader: ResumableLoader) -> None:
        """Write ``step_<N>``; all ranks call it. Raises SaveError, on every rank, unless the run is to go on without it."""
        self.drain()
        snapshot = _Snapshot(
            progress,
            self.model.snapshot(),
            torch.get_rng_state(),
            {
                "python": _python_rng(),
                "numpy": _numpy_rng(),
                "device": self.platform.rng_state(),
                "device_type": self.platform.device_type,
            },
            loader.state_dict(),
        )
        if not self.settings.save_async:
            self._report(lambda: self._write(snapshot))
            return
        self._copied.clear()
        self._pending = self._background.submit(self._copy_and_write, snapshot)

    def before_update(self) -> None:
        """Wait until a snapshot in the making no longer needs the tensors that an update changes."""
        self._copied.wait()

    def check(self) -> None:
        """Report a save in the background that has ended."""
        if self._pending is not None and self._pending.done():
            self.drain()

    def drain(self) -> None:
        """Wait for a save in the background, and report it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._report(pending.result)

    def close(self) -> None:
        """Finish what is being written; its outcome is reported."""
        try:
            self.drain()
        finally:
            self._background.shutdown()

    def _report(self, outcome: Callable[[], None]) -> None:
        try:
            outcome()
        except SaveError as error:
            if self.settings.on_save_error == "stop":
                raise
            self.say(f"{error}; the run goes on (train.checkpoint.on_save_error = continue)")

    def _copy_and_write(self, snapshot: _Snapshot) -> None:
        try:
            snapshot = replace(snapshot, model=snapshot.model.copy())
        finally:
            self._copied.set()
        self._write(snapshot)

    def _write(self, snapshot: _Snapshot) -> None:
        """Three rounds: an empty directory, every rank's files, what exists once and the renaming. Each ends for all ranks
        alike, in success or in SaveError."""
        begin = time.perf_counter()
        step, rank = snapshot.progress.step, self.ranks.rank
        target = self.output_dir / f"step_{step}"
        partial = target.with_name(target.name + ".partial")
        try:
            self._together(target, lambda: _make_empty(partial) if self.ranks.is_main else None)
            mine = self._together(target, lambda: _write_rank(partial, rank, snapshot))
            self._together(target, lambda: self._commit(partial, target, snapshot, mine) if self.ranks.is_main else None)
        except SaveError:
            if self.ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.say(f"saved {target} in {time.perf_counter() - begin:.1f} s")

    def _together(self, target: Path, action: Callable[[], Any]) -> list[Any]:
        """Run one round on all ranks; their results, or SaveError on all of them."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:  # whatever fails on one rank must end the round on all
            failure = f"rank {self.ranks.rank}: {type(error).__name__}: {error} ({_free_space(self.output_dir)})"
        outcomes = self.ranks.gather((result, failure))
        if failures := [failure for _, failure in outcomes if failure is not None]:
            raise SaveError(f"{target} was not saved: {'; '.join(failures)}")
        return [result for result, _ in outcomes]

    def _commit(self, partial: Path, target: Path, snapshot: _Snapshot, parts: list[_Written]) -> None:
        progress = snapshot.progress
        write_bytes(partial / GLOBAL_METADATA, metadata_bytes(merge({rank: part for rank, (part, _) in enumerate(parts)})))
        write_pt(partial / SCHEDULER, _scheduler_state(snapshot.model))
        extra = {"global_step": progress.step, "epoch": progress.epoch}
        write_bytes(partial / EXTRA_STATE, json.dumps(extra).encode())
        if self.settings.save_hf_weights:
            self.model.export_hf(ChunkedTensors(partial), partial / HF_WEIGHTS)
        files = {name: record for _, records in parts for name, record in records.items()}
        once = [partial / name for name in (GLOBAL_METADATA, SCHEDULER, EXTRA_STATE)]
        once += sorted(path for path in (partial / HF_WEIGHTS).rglob("*") if path.is_file())
        files |= {path.relative_to(partial).as_posix(): record_file(path) for path in once}
        manifest = Manifest(
            step=progress.step,
            saved_at=_later_than(newest_first(self.output_dir)),
            world_size=self.ranks.world_size,
            topology=asdict(self.ranks.topology),
            consumed_tokens=progress.consumed_tokens,
            config=asdict(self.config),
            files=files,
        )
        write_manifest(partial, manifest)
        flush_directory(partial)
        put_in_place(partial, target)
        self._retire(target)

    def _retire(self, saved: Path) -> None:
        """Delete what ``keep_last`` does not keep: never what was just saved or loaded, nor what another Trainer wrote."""
        if self.settings.keep_last is None:
            return
        ours = [path for path in newest_first(self.output_dir) if (path / MANIFEST).exists()]
        for path in ours[self.settings.keep_last :]:
            if path != saved and (self.loaded is None or path.resolve() != self.loaded.resolve()):
                doomed = path.with_name(path.name + ".partial")  # half a deletion must not look like a checkpoint
                try:
                    path.rename(doomed)
                    shutil.rmtree(doomed)
                except OSError as error:
                    self.say(f"{path} could not be deleted (train.checkpoint.keep_last): {error}")


def _write_rank(directory: Path, rank: int, snapshot: _Snapshot) -> _Written:
    """Write this rank's files; the metadata of its chunks and the files' records."""
    model = snapshot.model
    metadata = rank_metadata(rank, model.params)
    optimizer = optimizer_state_dict(model.groups, model.exp_avg, model.exp_avg_sq, model.step)
    files: dict[str, Callable[[Path], None]] = {
        tensor_file(rank): lambda path: write_tensors(path, {name: part.tensor for name, part in model.params.items()}),
        optimizer_file(rank): lambda path: write_pt(path, optimizer),
        f"{rank}.metadata": lambda path: write_bytes(path, metadata_bytes(metadata)),
        f"rng_rank{rank}.pt": lambda path: write_pt(path, snapshot.rng),
        f"rng_extra_rank{rank}.pt": lambda path: write_pt(path, snapshot.rng_extra),
        f"dataloader_rank{rank}.pt": lambda path: write_pt(path, snapshot.loader),
    }

    def write(name: str) -> FileRecord:
        files[name](directory / name)
        return record_file(directory / name)

    with ThreadPoolExecutor(2) as pool:  # one file is written while the disk takes in another
        return metadata, dict(zip(files, pool.map(write, files), strict=True))


def recover(output_dir: Path) -> None:
    """Clear up after a run that was killed while saving: what was being replaced comes back, what was unfinished goes."""
    for old in output_dir.glob("step_*.old"):
        if not STEP.fullmatch(old.stem):
            continue
        target = old.with_suffix("")
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for partial in output_dir.glob("step_*.partial"):
        if STEP.fullmatch(partial.stem):
            shutil.rmtree(partial)


def put_in_place(partial: Path, target: Path) -> None:
    """Give a finished directory its name. One that stands there is kept until then (``recover`` knows the moment between)."""
    old, replaced = target.with_name(target.name + ".old"), target.exists()
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    try:
        os.rename(partial, target)
    except OSError:
        if replaced:
            os.rename(old, target)
        raise
    flush_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _later_than(earlier: list[Path]) -> str:
    """Now, in UTC; or just after the newest checkpoint, should it come from a machine whose clock is ahead."""
    now = datetime.datetime.now(datetime.timezone.utc)
    manifest = next((manifest for path in earlier if (manifest := manifest_of(path))), None)
    if manifest is not None:
        now = max(now, datetime.datetime.fromisoformat(manifest.saved_at) + datetime.timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _scheduler_state(model: ModelState) -> dict[str, Any]:
    """The ``state_dict`` of torch's LambdaLR after as many steps."""
    rates = [group.options["lr"] for group in model.groups]
    return {
        "base_lrs": [group.options["initial_lr"] for group in model.groups],
        "last_epoch": model.step,
        "_step_count": model.step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None] * len(rates),
    }


def _python_rng() -> tuple[int, list[int], float | None]:
    version, words, gauss = random.getstate()
    return version, list(words), gauss


def _numpy_rng() -> tuple[str, torch.Tensor, int, int, float]:
    name, keys, position, has_gauss, cached = np.random.get_state()
    return str(name), torch.from_numpy(np.asarray(keys).view(np.int32)), int(position), int(has_gauss), float(cached)


def _free_space(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free / 2**20:,.0f} MiB free in {directory}"
    except OSError as error:
        return str(error)
