"""``python tests/trainer/kill_saves.py --kills 200 [--seed S]``: SIGKILL a run of two ranks while it saves, again and again.

After every kill a fresh pair of ranks resumes. It must take up the newest whole checkpoint, no whole one may be lost, no
unfinished one taken for whole, and every loss must be that of a run that nobody killed. torch is imported once; ranks are forks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.trainer.trainer import Trainer

TINY = Path(__file__).parents[1] / "torch" / "qwen3_vl_moe" / "tiny_config.json"
STEPS, WORLD = 12, 2
JOB_SECONDS = 120.0  # for a job to come to the moment at which it is to be killed
PAUSE = 0.03  # seconds after each renaming, where the kill is to fall between two of them


def configuration(output: Path, **checkpoint: Any) -> dict[str, Any]:
    """A run of the tiny model that saves every step."""
    tiny = json.loads(TINY.read_text())
    overrides = {key: tiny[key] for key in tiny.keys() - {"architectures", "model_type", "tie_word_embeddings"}}
    return {
        "model": {"config_overrides": {"vl": True, **overrides}},
        "data": {"type": "vl_dummy", "max_seq_len": 16, "vl_grid_h": 4, "vl_grid_w": 4, "train_size": 7},
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "optimizer": {"lr": 1e-2},
            "accelerator": {"dp_shard": WORLD},
            "checkpoint": {"output_dir": str(output), "save_steps": 1, **checkpoint},
        },
    }


class Job:
    """Two ranks of one run, forked; ``loaded`` tells the directory they took up, once they have."""

    def __init__(self, raw: dict[str, Any], *, pause: float = 0.0) -> None:
        self.output = Path(raw["train"]["checkpoint"]["output_dir"])
        self.output.mkdir(parents=True, exist_ok=True)
        self.log = self.output.with_name(self.output.name + ".log")
        self._loaded = self.output.with_name(self.output.name + ".loaded")
        for path in (self.log, self._loaded):
            path.unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sys.stdout.flush()
        self.running = [self._fork(raw, rank, port, pause) for rank in range(WORLD)]
        self.failed = False

    def _fork(self, raw: dict[str, Any], rank: int, port: int, pause: float) -> int:
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            if pause:
                _pause_after_renames(pause)
            trainer = Trainer(config_from_dict(raw, source="kill_saves"))
            if rank == 0:
                self._loaded.with_suffix(".new").write_text(str(trainer.checkpointer.loaded))
                os.replace(self._loaded.with_suffix(".new"), self._loaded)
            code = trainer.train()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    @property
    def loaded(self) -> str | None:
        """The path, ``None`` spelled out for a fresh start; None while it is not known."""
        return self._loaded.read_text() if self._loaded.exists() else None

    def ended(self) -> bool:
        """Whether both ranks have ended by themselves."""
        for process in list(self.running):
            if os.waitpid(process, os.WNOHANG) != (0, 0):
                self.running.remove(process)
        return not self.running

    def wait_until(self, condition: Callable[[], bool], *, poll: float = 0.0005) -> bool:
        """Whether the condition came true before the job ended; AssertionError when neither comes."""
        end = time.monotonic() + JOB_SECONDS
        while not condition():
            if self.ended():
                return False
            assert time.monotonic() < end, f"the job hangs:\n{self.log.read_text()}"
            time.sleep(poll)
        return True

    def kill(self, order: random.Random) -> None:
        """SIGKILL to both, in any order; stopped first, so that neither sees the other go and complains."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in order.sample(self.running, len(self.running)):
                os.kill(process, number)
        for process in self.running:
            os.waitpid(process, 0)
        self.running = []


def _pause_after_renames(pause: float) -> None:
    rename = os.rename

    def slow(old: Any, new: Any) -> None:
        rename(old, new)
        time.sleep(pause)

    os.rename = slow


# --- what lies there ----------------------------------------------------------------------------------------------------


def saved_at(directory: Path) -> str | None:
    """When a directory was finished; None unless all its files are as the manifest says."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        for name, record in manifest["files"].items():
            data = (directory / name).read_bytes()
            if (len(data), xxhash.xxh3_128(data).hexdigest()) != (record["size"], record["xxh3_128"]):
                return None
        return manifest["saved_at"]
    except (OSError, ValueError):
        return None


def look(output: Path) -> tuple[dict[str, str], list[str]]:
    """The whole checkpoints with their times (one that was being replaced counts where nothing stands in its place yet), and
    the names of those that look like one and are not."""
    whole, half = {}, []
    for path in output.glob("step_*"):
        name, _, suffix = path.name.partition(".")
        if suffix == "partial" or (suffix == "old" and (output / name).exists()):
            continue
        time_of = saved_at(path)
        if time_of is None:
            half.append(path.name)
        else:
            whole[name] = time_of
    return whole, half


def losses(output: Path) -> dict[int, float]:
    """The losses in metrics.jsonl; a last line that the kill cut short is left out."""
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records}


def phase(output: Path) -> str:
    """What a killed run was doing, told by the file that changed last."""
    names = {path.name for path in output.glob("step_*")}
    if old := [name.removesuffix(".old") for name in names if name.endswith(".old")]:
        return "old one being deleted" if old[0] in names else "between the renames"
    partial = next(iter(output.glob("step_*.partial")), None)
    files = [path for path in partial.rglob("*") if path.is_file()] if partial else []
    if partial is None:
        return "no save"
    if not files:
        return "empty directory"
    latest = max(files, key=lambda path: path.stat().st_mtime_ns).relative_to(partial).as_posix()
    return re.sub(r"rank\d+|^\d+(?=\.)", lambda match: re.sub(r"\d+", "<r>", match[0]), latest)


# --- the loop -----------------------------------------------------------------------------------------------------------


def killed_again_and_again(root: Path, kills: int, seed: int) -> str:
    """Returns the summary; AssertionError at the first thing that is not as it must be."""
    rng, output = random.Random(seed), root / "run"
    reference = Job(configuration(root / "reference"))
    reference.wait_until(lambda: False)
    expected = losses(root / "reference")
    assert len(expected) == STEPS, reference.log.read_text()
    times = [float(seconds) for seconds in re.findall(r"saved .* in ([\d.]+) s", reference.log.read_text())]
    save_seconds = max(0.05, sum(times) / len(times))

    phases: Counter[str] = Counter()
    count, resumes, older = 0, 0, 0
    while count < kills:
        before, _ = look(output)
        newest = max(before, key=lambda name: (before[name], int(name[5:])), default=None)
        settings = {"save_async": rng.random() < 0.5, "keep_last": rng.choice([None, 2]), "save_hf_weights": rng.random() < 0.5}
        source = output / newest if newest else None
        if newest and int(newest[5:]) >= STEPS - 2:
            source = root / "reference" / "step_1"  # what comes after it is saved anew, over what is there
        elif newest and rng.random() < 0.2:
            source = output / min(before, key=lambda name: int(name[5:]))
        if source is not None:
            is_newest = source == output / str(newest)
            settings["load_path"] = "latest" if is_newest else str(source)
            older += not is_newest
        moment = rng.choices(["saving", "renaming", "starting"], [0.6, 0.3, 0.1])[0]
        job = Job(configuration(output, **settings), pause=PAUSE if moment == "renaming" else 0.0)

        if moment == "starting":
            begin = time.monotonic() + rng.random()
            job.wait_until(lambda begin=begin: time.monotonic() > begin)
        else:
            job.wait_until(lambda job=job: job.loaded is not None)
            for _ in range(rng.randint(0, 2)):  # let some saves pass
                _wait_for_save(job)
                job.wait_until(lambda: not any(output.glob("step_*.partial")))
            if _wait_for_save(job):
                if moment == "renaming":
                    replacing = any((output / path.stem).exists() for path in output.glob("step_*.partial"))
                    sign = "step_*.old" if replacing else "step_*.partial/manifest.json"
                    job.wait_until(lambda sign=sign: any(output.glob(sign)))
                    time.sleep(rng.random() * 3 * PAUSE)
                else:
                    time.sleep(rng.random() * 1.1 * save_seconds)
        survived = job.ended()
        job.kill(rng)
        count += not survived
        phases[phase(output) if not survived else "run had ended"] += 1

        text = f"kill {count} (seed {seed}), {settings}, killed while {moment}\n{job.log.read_text()}"
        assert "Traceback" not in text, text
        if job.loaded is not None:
            assert job.loaded == str(source), f"not resumed from {source} of {before}: {text}"
            resumes += source is not None
        after, half = look(output)
        assert not half, f"unfinished, and named like a whole one: {half}; {text}"
        gone = [name for name in before if name not in after]
        if settings["keep_last"] is not None:
            gone = [name for name in gone if sum(t > before[name] for t in after.values()) < settings["keep_last"]]
        assert not gone, f"lost {gone}; {text}"
        assert all(after[name] >= before[name] for name in before if name in after), text
        differing = {step: loss for step, loss in losses(output).items() if loss != expected[step]}
        assert not differing, f"losses {differing} differ from an uninterrupted run; {text}"
        if survived:
            shutil.rmtree(output)
        elif count % 10 == 0:
            print(f"{count} kills, {resumes} resumes", file=sys.stderr, flush=True)
    return (
        f"{count} kills, 0 checkpoints lost, 0 half-written taken for whole, {resumes} resumes seen ({older} of an older "
        f"step); killed at: {', '.join(f'{name} {number}' for name, number in phases.most_common())}"
    )


def _wait_for_save(job: Job) -> bool:
    return job.wait_until(lambda: any(job.output.glob("step_*.partial")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        print(killed_again_and_again(Path(directory), arguments.kills, arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
