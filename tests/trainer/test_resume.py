"""Runs that end early and go on: the same numbers to the last bit on the same ranks, the same state on any others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).parents[1] / "functional"))

from rank_pool import ranks
from test_launch_ranks import TORCHRUN, _alive, _wait_for, launch, metrics, output, started
from test_launch_ranks import conversations as conversations
from test_launch_ranks import small as small

from hyper_parallel import checkpoint as tool
from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.core.distributed_checkpoint.chunks import ChunkedTensors
from hyper_parallel.data.loader import sampler_state
from hyper_parallel.trainer import resume
from hyper_parallel.trainer.callbacks import Callback, StepRecord
from hyper_parallel.trainer.distributed import Ranks
from hyper_parallel.trainer.interruption import REPEAT_SECONDS
from hyper_parallel.trainer.trainer import Trainer

END_SECONDS = 60  # at most, from a signal to the end of all ranks
WALL = {"step_time", "tokens_per_second", "peak_memory"}  # what is measured, not computed

pytestmark = pytest.mark.timeout(150)


# --- one process, or ranks of a pool, as the launcher would start them --------------------------------------------------


class SignalAfter(Callback):
    """SIGTERM to this process in the course of step ``step``, noticed when it ends; random numbers are drawn meanwhile."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, total_steps: int, first_step: int) -> None:
        if self.step and first_step == self.step - 1:
            signal.raise_signal(signal.SIGTERM)

    def on_step_end(self, record: StepRecord) -> None:
        for draw in (random.random, np.random.rand, lambda: torch.rand(1)):  # what a later step could depend on
            draw()
        if record.step == self.step - 1:
            signal.raise_signal(signal.SIGTERM)


def run(raw: dict[str, Any], stop_after: int = 0, callbacks: Sequence[Callback] = ()) -> int:
    """Train on this process; ``stop_after``: a signal comes during that step. Returns the signal that ended the run."""
    np.random.seed(0)  # as every fresh process would begin the same
    trainer = Trainer(config_from_dict(raw, source="test"))
    trainer.callbacks += [SignalAfter(stop_after), *callbacks]
    return trainer.train()


@contextlib.contextmanager
def as_launched() -> Any:
    """On a rank of the pool: the environment of a launched one. Its process group outlives the run."""
    variables = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}
    with mock.patch.dict(os.environ, variables), mock.patch.object(Ranks, "leave", lambda self: dist.barrier()):
        yield


def run_on_rank(raw: dict[str, Any], stop_after: int) -> int:
    with as_launched():
        return run(raw, stop_after if dist.get_rank() == dist.get_world_size() - 1 else 0)


def run_on(world: int, raw: dict[str, Any], stop_after: int = 0) -> int:
    """``run`` on as many ranks; the signal reaches only the last of them."""
    if world == 1:
        return run(raw, stop_after)
    (stopped_by,) = set(ranks(world).call(run_on_rank, raw, stop_after))
    return stopped_by


def into(raw: dict[str, Any], directory: Path, **checkpoint: Any) -> dict[str, Any]:
    """The same run with another output directory and other checkpoint settings."""
    settings = {**raw["train"]["checkpoint"], "output_dir": str(directory), **checkpoint}
    return {**raw, "train": {**raw["train"], "checkpoint": settings}}


def accelerated(raw: dict[str, Any], **accelerator: int) -> dict[str, Any]:
    return {**raw, "train": {**raw["train"], "accelerator": accelerator}}


# --- the same to the last bit -------------------------------------------------------------------------------------------


def computed(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: record[name] for name in record.keys() - WALL} for record in metrics(raw)]


def assert_same_value(a: Any, b: Any, where: str) -> None:
    """Equal in every bit and in structure."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same_value(a[key], b[key], f"{where}[{key}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same_value(left, right, f"{where}[{index}]")
    else:
        assert a == b, where


def assert_same_step(a: Path, b: Path) -> None:
    """Two ``step_<N>`` directories of the same ranks hold the same."""
    names = [{path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} for root in (a, b)]
    assert names[0] == names[1]
    for name in names[0] - {"manifest.json"}:
        if name.startswith("dataloader"):
            positions = [sampler_state(torch.load(root / name, weights_only=True)) for root in (a, b)]
            assert positions[0] == positions[1], name
        elif name.endswith(".pt"):
            assert_same_value(*(torch.load(root / name, weights_only=True) for root in (a, b)), name)
        else:
            assert (a / name).read_bytes() == (b / name).read_bytes(), name


def whole(directory: Path) -> bool:
    return tool.main(["verify", str(directory)]) == 0


def check_resumed(raw: dict[str, Any], tmp_path: Path, stops: tuple[int, ...], last: int, world: int = 1) -> None:
    """A run without and one with interruptions after each of ``stops``, resumed with ``latest``."""
    straight, stopped = into(raw, tmp_path / "straight", save_steps=last), into(raw, tmp_path / "stopped", save_steps=1000)
    assert run_on(world, straight) == 0
    for number, stop in enumerate((*stops, 0)):
        resumed = into(stopped, output(stopped), load_path="latest" if number else None)
        assert run_on(world, resumed, stop) == (signal.SIGTERM if stop else 0)
    assert sorted(path.name for path in output(stopped).glob("step_*")) == sorted(f"step_{step}" for step in (*stops, last))
    assert computed(stopped) == computed(straight)
    assert [record["step"] for record in computed(stopped) if "loss" in record] == list(range(1, last + 1))
    assert_same_step(output(stopped) / f"step_{last}", output(straight) / f"step_{last}")
    assert all(whole(path) for path in output(stopped).glob("step_*"))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": {"freeze_modules": ["model.visual"]}, "train": {"gradient_checkpointing": {"activation_checkpoint": "full"}}},
        {"checkpoint": {"save_async": True, "save_hf_weights": False}},
        {"train": {"mixed_precision": {"enabled": True}, "optimizer": {"lr": 1e-2, "lr_decay_style": "linear"}}},
    ],
    ids=["plain", "frozen_tower", "in_background", "bf16"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_same_to_the_last_bit(raw, tmp_path, world, change):
    raw["model"] |= change.get("model", {})
    raw["train"] |= change.get("train", {})
    raw["train"]["checkpoint"] |= change.get("checkpoint", {})
    check_resumed(accelerated(raw, dp_shard=world), tmp_path, (2,), 4, world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_same_to_the_last_bit_after_fifty_steps(raw, tmp_path, world):
    raw["train"] |= {"max_steps": 100}
    check_resumed(accelerated(raw, dp_shard=world), tmp_path, (50,), 100, world)


@pytest.mark.parametrize("stops", [(2, 3), (3, 6), (4, 5)], ids=["twice", "at_the_ends_of_epochs", "within_epochs"])
def test_epochs_resumed_twice(raw, tmp_path, stops):
    """10 samples in steps of 4: three steps an epoch, the last of them short."""
    raw["data"]["train_size"] = 10
    raw["train"] |= {"max_steps": -1, "num_train_epochs": 3}
    check_resumed(raw, tmp_path, stops, 9)


@pytest.mark.parametrize(("num_workers", "stop"), [(0, 3), (2, 4)])
def test_conversations(conversations, tmp_path, num_workers, stop):
    """Rows from a file, read by worker processes that are ahead of the training."""
    conversations["data"] |= {"num_workers": num_workers, "shuffle": True}
    conversations["train"] |= {"num_train_epochs": 2, "eval": {"eval_steps": 4}}
    if num_workers:
        conversations["data"].pop("eval_path")
    check_resumed(conversations, tmp_path, (stop,), 6)


def test_the_random_numbers_of_a_resumed_run_go_on(raw):
    raw["train"]["checkpoint"] |= {"save_steps": 2}
    drawn = []
    for load_path in (None, str(output(raw) / "step_2")):
        raw["train"]["checkpoint"]["load_path"] = load_path

        class Draw(Callback):
            def on_step_end(self, record: StepRecord) -> None:
                drawn.append((record.step, random.random(), np.random.rand(), float(torch.rand(1))))

        trainer = Trainer(config_from_dict(raw, source="test"))
        trainer.callbacks.append(Draw())
        trainer.train()
    assert [step for step, *_ in drawn] == [1, 2, 3, 4, 3, 4]
    assert drawn[2:4] == drawn[4:6]


# --- what load_path may name --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(make_raw, tmp_path_factory) -> Path:
    """A run of four steps that saved two of them. Nobody writes there."""
    raw = make_raw(tmp_path_factory.mktemp("finished") / "run")
    raw["train"]["checkpoint"]["save_steps"] = 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run(raw)
    torch.set_num_threads(threads)
    return output(raw)


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_another_run_may_go_on_from_a_checkpoint(raw, finished, capsys):
    """The source stays as it is, whatever ``keep_last`` says."""
    before = contents(finished)
    raw["train"]["checkpoint"] |= {"load_path": str(finished / "step_2"), "save_steps": 1, "keep_last": 1}
    assert run(raw) == 0
    assert contents(finished) == before
    assert f"resumed from {finished / 'step_2'}, after step 2 of 4" in capsys.readouterr().out
    assert [path.name for path in output(raw).glob("step_*")] == ["step_4"]
    assert_same_step(output(raw) / "step_4", finished / "step_4")
    assert [record["step"] for record in metrics(raw)] == [3, 4]


def test_a_finished_run_has_nothing_left_to_do(raw, finished):
    shutil.copytree(finished, output(raw))
    before = contents(output(raw))
    for load_path in ("latest", str(output(raw) / "step_4")):
        done = launch(into(raw, output(raw), load_path=load_path, save_steps=2))
        assert (done.returncode, done.stderr) == (0, "")
        assert "after step 4 of 4" in done.stdout and "saved" not in done.stdout
    after = contents(output(raw))
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in before.items()}


def test_metrics_go_on_where_the_run_does(raw, finished):
    shutil.copytree(finished, output(raw))
    first = metrics(raw)
    run(into(raw, output(raw), load_path=str(output(raw) / "step_2"), save_steps=2))
    assert metrics(raw)[:2] == first[:2]
    assert [record["step"] for record in metrics(raw)] == [1, 2, 3, 4]
    aside = [json.loads(line) for line in (output(raw) / "metrics.1.jsonl").read_text().splitlines()]
    assert aside == first
    assert not (output(raw) / "metrics.2.jsonl").exists()


def test_a_torn_last_line_of_metrics_is_dropped(raw, finished):
    shutil.copytree(finished, output(raw))
    path = output(raw) / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')
    run(into(raw, output(raw), load_path="latest", save_steps=2))
    assert [record["step"] for record in metrics(raw)] == [1, 2, 3, 4]


@pytest.mark.parametrize("small", [0, resume.SMALL], ids=["loaded while checked", "checked first"])
def test_latest_is_the_newest_and_passes_over_damage(raw, finished, capsys, monkeypatch, small):
    """By time, not by number: step 2 saved anew after step 4 is what the run did last."""
    monkeypatch.setattr(resume, "SMALL", small)
    shutil.copytree(finished, output(raw))
    raw["data"]["train_size"] = 16
    raw["train"] |= {"max_steps": 3}
    run(into(raw, output(raw), load_path=str(output(raw) / "step_2"), save_steps=3))
    raw["train"] |= {"max_steps": 4}
    raw["train"]["checkpoint"] |= {"load_path": "latest"}
    assert f"resumed from {output(raw) / 'step_3'}," in said(raw, capsys)
    damaged = output(raw) / "step_3" / "optimizer_rank0.pt"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    text = said(raw, capsys)
    assert f"step_3 is passed over: {damaged} is damaged: its checksum" in text
    assert f"resumed from {output(raw) / 'step_4'}," in text
    (output(raw) / "step_4" / "scheduler.pt").unlink()
    (output(raw) / "step_2" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds no whole step_<N> directory \(3 damaged\)"):
        Trainer(config_from_dict(raw, source="test"))
    text = capsys.readouterr().out
    assert "scheduler.pt is missing" in text and "manifest.json is damaged" in text


def said(raw: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    Trainer(config_from_dict(raw, source="test"))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("load_path", "change", "messages"),
    [
        ("latest", {}, ["load_path = latest", "holds no whole step_<N> directory (0 damaged)", "set it to null"]),
        ("{finished}/step_3", {}, ["load_path", "step_3 does not exist"]),
        ("{finished}", {}, ["load_path", "extra_state.json is missing"]),
        ("{finished}/step_4/hf_ckpt", {}, ["load_path", "extra_state.json is missing", "model.weights_path"]),
        ("{finished}/step_4", {"max_steps": 3}, ["step_4 is 4 steps into its run", "ends after 3", "train.max_steps"]),
        ("{finished}/step_4", {"freeze": ["model.visual"]}, ["other parameters than this run trains", "model.freeze_modules"]),
    ],
    ids=["empty", "missing", "run", "export", "beyond", "frozen"],
)
def test_refused_with_one_line(raw, finished, load_path, change, messages):
    raw["train"]["checkpoint"]["load_path"] = load_path.format(finished=finished)
    raw["train"]["max_steps"] = change.get("max_steps", 4)
    raw["model"]["freeze_modules"] = change.get("freeze")
    with pytest.raises(ValueError) as refusal:
        Trainer(config_from_dict(raw, source="test"))
    text = str(refusal.value)
    assert "\n" not in text and all(message in text for message in messages), text
    assert not output(raw).exists() or not any(output(raw).iterdir())


def test_weights_alone_start_a_run_anew(raw, finished):
    raw["model"]["weights_path"] = str(finished / "step_2")
    trainer = Trainer(config_from_dict(raw, source="test"))
    assert trainer.progress.step == 0 and trainer.model.state.opt_state.step == 0
    held, stored = trainer.model.snapshot(), ChunkedTensors(finished / "step_2")
    assert_same_value({name: part.tensor for name, part in held.params.items()}, {n: stored.read(n) for n in held.params}, "")
    assert not any(moment.any() for moment in [*held.exp_avg.values(), *held.exp_avg_sq.values()])
    damaged = output(raw) / "step_2"
    shutil.copytree(finished / "step_2", damaged)
    (damaged / "_rank0_.safetensors").write_bytes(b"")
    raw["model"]["weights_path"] = str(damaged)
    with pytest.raises(ValueError, match=r"model\.weights_path = .*_rank0_\.safetensors has 0 bytes"):
        Trainer(config_from_dict(raw, source="test"))


# --- other ranks --------------------------------------------------------------------------------------------------------

TOPOLOGIES = {
    "one": {"dp_shard": 1},
    "fsdp2": {"dp_shard": 2},
    "fsdp3": {"dp_shard": 3},  # leaves parts of unequal length, and some ranks without any
    "tp2": {"tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp2_tp2": {"dp_shard": 2, "tp": 2},
}
RING = [("one", "fsdp3"), ("fsdp3", "tp2"), ("tp2", "fsdp2_tp2"), ("fsdp2_tp2", "hsdp"), ("hsdp", "fsdp2"), ("fsdp2", "one")]
PAIRS = [(a, b) for a in TOPOLOGIES for b in TOPOLOGIES if (a, b) not in RING]


def state_digests(trainer: Trainer) -> dict[str, str]:
    """A digest of every parameter and moment, put together from all ranks; ranks that hold the same must agree in every bit."""
    state = trainer.model.snapshot()
    trees = {"param": {n: p.tensor for n, p in state.params.items()}, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    mine = [
        (f"{kind} {name}", state.params[name].box, state.params[name].shape, tensor.detach())
        for kind, tree in trees.items()
        for name, tensor in tree.items()
    ]
    whole: dict[str, torch.Tensor] = {}
    for key, box, shape, tensor in (piece for rank in trainer.ranks.gather(mine) for piece in rank):
        target = whole.setdefault(key, torch.full(shape, float("nan")))
        assert torch.isnan(target[box]).all() or torch.equal(target[box], tensor), key
        target[box] = tensor
    assert not any(torch.isnan(tensor).any() for tensor in whole.values())
    return {key: digest(tensor) for key, tensor in whole.items()} | {"updates": str(state.step)}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def state_on_rank(raw: dict[str, Any], stop_after: int) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The state before and after the training, and the notes."""
    with as_launched() if dist.is_initialized() else contextlib.nullcontext():
        notes: list[str] = []
        with mock.patch.object(Trainer, "_say", lambda self, message: notes.append(message)):
            trainer = Trainer(config_from_dict(raw, source="test"))
        before = state_digests(trainer)
        trainer.callbacks.append(SignalAfter(stop_after))
        trainer.train()
        return before, state_digests(trainer), notes


def state_on(world: int, raw: dict[str, Any], stop_after: int = 0) -> tuple[dict[str, str], dict[str, str], list[str]]:
    return state_on_rank(raw, stop_after) if world == 1 else ranks(world).call(state_on_rank, raw, stop_after)[0]


def of_topology(raw: dict[str, Any], name: str) -> tuple[int, dict[str, Any]]:
    sizes = TOPOLOGIES[name]
    raw["train"] |= {"global_batch_size": 12, "micro_batch_size": 1, "optimizer": {"lr": 1e-3}}
    return math.prod(sizes.values()), accelerated(raw, **sizes)


@pytest.fixture(scope="module")
def interrupted_on(tmp_path_factory):
    """By topology: a run that ended after two of four steps (made once), and its state at that moment."""
    made: dict[str, tuple[Path, dict[str, str]]] = {}

    def make(raw: dict[str, Any], name: str) -> tuple[Path, dict[str, str]]:
        if name not in made:
            world, there = of_topology(raw, name)
            there = into(there, tmp_path_factory.mktemp(name) / "run", save_steps=1000, load_path=None)
            made[name] = output(there) / "step_2", state_on(world, there, 2)[1]
        return made[name]

    return make


@pytest.mark.parametrize(("saved", "loaded"), [*RING, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS)])
def test_any_topology_resumes_on_any_other(raw, interrupted_on, saved, loaded):
    directory, state = interrupted_on(raw, saved)
    world, here = of_topology(raw, loaded)
    before, after, notes = state_on(world, into(here, output(raw), load_path=str(directory)))
    assert before == state
    newcomers = world > math.prod(TOPOLOGIES[saved].values())
    assert newcomers == any("was written by fewer ranks: rank" in note for note in notes)
    assert after.keys() == state.keys() and after["updates"] == "4"
    straight = into(raw, output(raw).with_name("straight"))
    run(straight)
    later = [[record["loss"] for record in records if record["step"] > 2] for records in (metrics(here), metrics(straight))]
    assert [len(losses) for losses in later] == [2, 2]
    assert np.mean(later[0]) == pytest.approx(np.mean(later[1]), abs=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_the_existing_trainer(raw, sample, world):
    """Written by two ranks of FSDP, each with a half of every tensor's first dim."""
    sample /= "step_2"
    raw["train"]["checkpoint"] |= {"load_path": str(sample)}
    before, after, notes = state_on(world, accelerated(raw, dp_shard=world))
    expected = {
        f"param {name}": digest(tensor) for name, tensor in load_file(sample.parent / "expected_model.safetensors").items()
    }
    order = json.loads((sample.parent / "optimizer_param_order.json").read_text())
    states = [torch.load(sample / f"optimizer_rank{rank}.pt", weights_only=True)["state"] for rank in (0, 1)]
    for number, name in enumerate([*order["decay"], *order["no_decay"]]):
        for moment in ("exp_avg", "exp_avg_sq"):
            expected[f"{moment} {name}"] = digest(torch.cat([state[number][moment] for state in states]))
    assert before == expected | {"updates": "2"}
    assert after["updates"] == "4" and [record["step"] for record in metrics(raw)] == [3, 4]
    assert f"resumed from {sample}, after step 2 of 4" in notes
    assert any("another Trainer's data position: data go on where step 2 of this Trainer ends" in note for note in notes)
    assert metrics(raw)[0]["consumed_samples"] == 12


# --- signals ------------------------------------------------------------------------------------------------------------


def check_stopped(raw: dict[str, Any], out: str, name: str) -> int:
    """One last save, whole, from which a run goes on; returns its step."""
    step = metrics(raw)[-1]["step"]
    assert f"stopped by {name} after step {step} of 100000" in out
    assert [path.name for path in output(raw).glob("step_*")] == [f"step_{step}"]
    assert whole(output(raw) / f"step_{step}")
    resumed = Trainer(config_from_dict(into(accelerated(raw), output(raw), load_path="latest"), source="test"))
    assert resumed.progress.step == step and resumed.model.state.opt_state.step == step
    return step


@pytest.fixture
def endless(small) -> dict[str, Any]:
    """A run that would take minutes and saves when it is stopped."""
    small["train"] |= {"max_steps": 100_000}
    small["train"]["checkpoint"] |= {"save_steps": 100_000, "save_hf_weights": False}
    small["data"] |= {"train_size": 64}
    return small


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_to_one_process(endless, name):
    endless["train"]["checkpoint"] |= {"save_async": True}
    with started(endless) as (process, children):
        assert not children
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=END_SECONDS)
    assert (process.returncode, err) == (128 + signal.Signals[name], "")
    check_stopped(endless, out, name)


@pytest.mark.parametrize(
    ("name", "to_all"),
    [
        ("SIGTERM", False),
        ("SIGTERM", True),
        *(pytest.param("SIGINT", to_all, marks=pytest.mark.slow) for to_all in (False, True)),
    ],
)
def test_a_signal_to_the_launcher_of_two_ranks(endless, name, to_all):
    """Or to every process at once, as a scheduler or a terminal sends it. With threads, any of which may get the signal."""
    endless = accelerated(endless, dp_shard=2)
    with started(endless, OMP_NUM_THREADS="2") as (launcher, children):
        assert len(children) == 2
        (os.killpg if to_all else os.kill)(launcher.pid, signal.Signals[name])
        out, err = launcher.communicate(timeout=END_SECONDS)
        assert not any(map(_alive, children))
    assert (launcher.returncode, err) == (128 + signal.Signals[name], "")
    step = check_stopped(endless, out, name)
    if not to_all:  # two ranks of another kind go on from it
        resumed = into(accelerated(endless, tp=2), output(endless), load_path="latest")
        done = launch(resumed, f"--train.max_steps={step + 2}")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"resumed from {output(endless) / f'step_{step}'}, after step {step} of {step + 2}" in done.stdout
        assert [record["step"] for record in metrics(endless)] == list(range(1, step + 3))


def test_a_signal_under_torchrun(endless):
    endless = accelerated(endless, dp_shard=2)
    with started(endless, TORCHRUN) as (torchrun, children):
        torchrun.terminate()
        out, _ = torchrun.communicate(timeout=END_SECONDS)
        assert torchrun.returncode != 0
        assert not any(map(_alive, children))
    check_stopped(endless, out, "SIGTERM")


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once(endless, world):
    """The step takes minutes, so the first signal alone would not end the run soon."""
    endless["train"] |= {"global_batch_size": 100_000, "max_steps": 1, "accelerator": {"dp_shard": world}}
    with started(endless, records=0) as (process, children):
        time.sleep(1.0)
        process.terminate()
        time.sleep(1.0)
        process.terminate()  # what a scheduler may repeat within moments is the same request
        time.sleep(REPEAT_SECONDS)
        assert process.poll() is None
        process.terminate()
        process.communicate(timeout=END_SECONDS)
        assert process.returncode in (130, 128 + signal.SIGTERM)
        _wait_for(lambda: not any(map(_alive, children)), 5)
    assert metrics(endless) == [] and not any(output(endless).glob("step_*"))
