"""Saves that fail, or are killed: what the user is told, and what is left on the disk."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from test_launch_ranks import FAILURE_SECONDS, command, environment, launch, metrics, output
from test_launch_ranks import small as small
from test_resume import accelerated, as_launched, assert_same_step, computed, into, ranks, run, whole

from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.trainer import checkpoint
from hyper_parallel.trainer.callbacks import Callback, StepRecord
from hyper_parallel.trainer.checkpoint import SaveError
from hyper_parallel.trainer.launch import main
from hyper_parallel.trainer.trainer import Trainer

FULL = OSError(28, "No space left on device")
ROUNDS = {  # what is called in a save, and how often before the save of step 2
    "_make_empty": 1,
    "write_tensors": 1,
    "write_pt": 5,
    "write_bytes": 3,
    "metadata_bytes": 2,
    "record_file": 9,
    "merge": 1,
    "write_manifest": 1,
    "flush_directory": 2,
    "put_in_place": 1,
}

pytestmark = pytest.mark.timeout(150)


def failing(name: str, successes: int, failures: int = 1) -> Any:
    """A function of the checkpoint module that fails like a full disk after some calls."""
    original, calls = getattr(checkpoint, name), [0]

    def function(*arguments: Any) -> Any:
        calls[0] += 1
        if successes < calls[0] <= successes + failures:
            raise FULL
        return original(*arguments)

    return mock.patch.object(checkpoint, name, function)


def steps(raw: dict[str, Any]) -> list[str]:
    return sorted(path.name for path in output(raw).glob("step_*"))


@pytest.fixture
def saving(raw) -> dict[str, Any]:
    """A run that saves every step."""
    raw["train"]["checkpoint"] |= {"save_steps": 1, "save_hf_weights": False}
    return raw


class During(Callback):
    """Calls a function in the course of a step, before its save."""

    def __init__(self, step: int, function: Callable[[], object]) -> None:
        self.step, self.function = step, function

    def on_step_end(self, record: StepRecord) -> None:
        if record.step == self.step:
            self.function()


# --- whatever fails in a save -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUNDS)
def test_a_failed_save_ends_the_run_and_harms_nothing(saving, tmp_path, capsys, name):
    with failing(name, ROUNDS[name]), pytest.raises(SaveError) as failure:
        run(saving)
    text = str(failure.value)
    assert f"{output(saving) / 'step_2'} was not saved: rank 0: " in text and "No space left on device" in text
    assert "MiB free in" in text and "\n" not in text
    assert steps(saving) == ["step_1"] and whole(output(saving) / "step_1")
    assert [record["step"] for record in metrics(saving)] == [1, 2]
    if name == "write_tensors":  # and the run can be taken up
        assert run(into(saving, output(saving), load_path="latest")) == 0
        straight = into(saving, tmp_path / "straight", save_steps=4)
        run(straight)
        assert computed(saving) == computed(straight)
        assert_same_step(output(saving) / "step_4", output(straight) / "step_4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("write_pt", "merge") else pytest.mark.slow) for name in ROUNDS]
)
@pytest.mark.parametrize("save_async", [False, True])
def test_a_failed_save_is_passed_over_on_request(saving, tmp_path, capsys, name, save_async):
    saving["train"]["checkpoint"] |= {"on_save_error": "continue", "save_async": save_async}
    with failing(name, ROUNDS[name]):
        assert run(saving) == 0
    out = capsys.readouterr().out
    (told,) = [line for line in out.splitlines() if "was not saved" in line]
    assert f"{output(saving) / 'step_2'} was not saved: rank 0: " in told and "No space left" in told
    assert told.endswith("the run goes on (train.checkpoint.on_save_error = continue)")
    assert steps(saving) == ["step_1", "step_3", "step_4"]
    assert all(whole(path) for path in output(saving).glob("step_*"))
    if name == "merge":
        straight = into(saving, tmp_path / "straight", save_steps=4)
        run(straight)
        assert computed(saving) == computed(straight)
        assert_same_step(output(saving) / "step_4", output(straight) / "step_4")


def test_a_failed_export_counts_as_a_failed_save(saving):
    saving["train"]["checkpoint"] |= {"save_hf_weights": True}
    with mock.patch("hyper_parallel.models.qwen3_vl_moe.adapter.save_params", side_effect=FULL), pytest.raises(SaveError):
        run(saving)
    assert steps(saving) == []


def test_what_was_to_be_replaced_stays(saving):
    run(saving)
    rename = os.rename

    def refuse(old: Any, new: Any) -> None:
        if str(old).endswith(".partial"):
            raise FULL
        rename(old, new)

    before = {path: path.read_bytes() for path in output(saving).rglob("*/*") if path.is_file()}
    again = into(saving, output(saving), load_path=str(output(saving) / "step_1"))
    with mock.patch.object(os, "rename", refuse), pytest.raises(SaveError, match="step_2 was not saved"):
        run(again)
    assert {path: path.read_bytes() for path in output(saving).rglob("*/*") if path.is_file()} == before
    assert run(again) == 0 and steps(saving) == ["step_1", "step_2", "step_3", "step_4"]


def test_a_save_in_the_background_fails_at_a_later_step(saving):
    saving["train"]["checkpoint"] |= {"save_async": True}
    trainer = Trainer(config_from_dict(saving, source="test"))

    def until_it_failed() -> None:
        pending = trainer.checkpointer._pending
        assert pending is not None and pending.exception(timeout=30) is not None

    trainer.callbacks.append(During(3, until_it_failed))
    with failing("write_tensors", 1), pytest.raises(SaveError, match="step_2 was not saved"):
        trainer.train()
    assert steps(saving) == ["step_1"]
    assert [record["step"] for record in metrics(saving)] == [1, 2, 3]


def test_the_last_save_in_the_background_fails_the_run(saving, tmp_path, capfd):
    saving["train"]["checkpoint"] |= {"save_async": True, "save_steps": 100}
    with failing("write_tensors", 0):
        assert main(command(saving)[3:]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: ") and "step_4 was not saved: rank 0: " in err and err.count("\n") == 1


def test_a_signal_during_the_last_save_waits_for_it(saving):
    """Until the files are there; then too it is a request to stop, not the end."""
    handlers = []
    original = checkpoint.write_tensors

    def look(*arguments: Any) -> None:
        time.sleep(0.3)  # the loop has ended meanwhile
        handlers.append(signal.getsignal(signal.SIGTERM))
        original(*arguments)

    saving["train"]["checkpoint"] |= {"save_async": True, "save_steps": 100}
    with mock.patch.object(checkpoint, "write_tensors", look):
        run(saving)
    assert len(handlers) == 1 and callable(handlers[0])


# --- disks --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(saving, tmp_path) -> Iterator[Path]:
    """The run's output directory on a file system of its own, with room for a few checkpoints of 4.7 MB."""
    directory = output(saving)
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root and the right to do so")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=30)


def test_a_full_disk_ends_the_run(saving, small_disk, capfd):
    assert main(command(saving)[3:]) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"error: {small_disk / 'step_4'} was not saved: rank 0: ") and err.count("\n") == 1, err
    assert "optimizer_rank0.pt" in err or "_rank0_.safetensors" in err, err
    assert f"MiB free in {small_disk}" in err
    assert steps(saving) == ["step_1", "step_2", "step_3"] and all(whole(path) for path in small_disk.glob("step_*"))


@pytest.mark.parametrize("save_async", [False, True])
def test_room_is_made_on_a_full_disk(saving, small_disk, tmp_path, capsys, save_async):
    """Steps 2 and 3 do not fit beside a large file; losses are not concerned."""
    saving["train"]["checkpoint"] |= {"on_save_error": "continue", "save_async": save_async}
    large = small_disk / "large"
    large.write_bytes(bytes(9 << 20))
    assert run(saving, callbacks=[During(4, large.unlink)]) == 0
    out = capsys.readouterr().out
    for step in (2, 3):
        assert f"{small_disk / f'step_{step}'} was not saved: rank 0: " in out
    assert steps(saving) == ["step_1", "step_4"] and all(whole(path) for path in small_disk.glob("step_*"))
    straight = into(saving, tmp_path / "straight", save_steps=4)
    run(straight)
    assert computed(saving) == computed(straight)
    assert_same_step(small_disk / "step_4", output(straight) / "step_4")


def test_a_directory_that_nobody_may_write_to(saving, capsys):
    """Root ignores modes, not this attribute."""
    directory = output(saving)

    def attribute(change: str) -> None:
        subprocess.run(["chattr", change, str(directory)], check=True, capture_output=True)

    directory.mkdir()
    try:
        attribute("+i")
        attribute("-i")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the file system, or the user, has no immutable attribute")
    saving["train"]["checkpoint"] |= {"on_save_error": "continue"}
    try:
        assert run(saving, callbacks=[During(2, lambda: attribute("+i")), During(3, lambda: attribute("-i"))]) == 0
    finally:
        attribute("-i")
    out = capsys.readouterr().out
    assert f"{directory / 'step_2'} was not saved: rank 0: PermissionError" in out and "step_2.partial" in out
    assert steps(saving) == ["step_1", "step_3", "step_4"]


@pytest.mark.parametrize("arguments", [(), ("--train.accelerator.dp_shard=2",)], ids=["one", "two"])
def test_an_output_directory_that_cannot_be(saving, tmp_path, capfd, arguments):
    (tmp_path / "file").write_text("")
    saving["train"]["checkpoint"]["output_dir"] = str(tmp_path / "file" / "run")
    (tmp_path / "run.yaml").write_text("")
    config = command(into(saving, tmp_path / "run"))[3:]
    code = main([*config, f"--train.checkpoint.output_dir={tmp_path / 'file' / 'run'}", *arguments])
    err = capfd.readouterr().err
    assert code in (1, 2)
    assert err.startswith("error: ") and str(tmp_path / "file" / "run") in err and "Traceback" not in err, err


# --- several ranks ------------------------------------------------------------------------------------------------------


def fail_on_rank(raw: dict[str, Any], failing_rank: int, name: str) -> str:
    """What this rank raises, or nothing."""
    patch = failing(name, ROUNDS[name]) if dist.get_rank() == failing_rank else contextlib.nullcontext()
    with as_launched(), patch:
        try:
            run(raw)
        except SaveError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("rank", "name"), [(0, "write_manifest"), (1, "write_tensors"), (1, "write_pt"), (0, "_make_empty")])
@pytest.mark.parametrize("on_save_error", ["stop", "continue"])
def test_one_rank_that_cannot_write_fails_the_save_on_all(saving, tmp_path, rank, name, on_save_error):
    saving["train"]["checkpoint"] |= {"on_save_error": on_save_error}
    saving = accelerated(saving, dp_shard=2)
    begin = time.perf_counter()
    raised = ranks(2).call(fail_on_rank, saving, rank, name)
    assert time.perf_counter() - begin < FAILURE_SECONDS
    assert raised[0] == raised[1] and "\n" not in raised[0]
    if on_save_error == "stop":
        assert f"{output(saving) / 'step_2'} was not saved: rank {rank}: " in raised[0]
        assert steps(saving) == ["step_1"]
    else:
        assert raised[0] == ""
        assert steps(saving) == ["step_1", "step_3", "step_4"]
    assert all(whole(path) for path in output(saving).glob("step_*"))


@pytest.mark.parametrize("save_async", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_of_one_rank_ends_the_launch(small, tmp_path, save_async):
    """Rank 1 may write no file longer than this; the launcher says so once."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, resource\nif os.environ.get('RANK') == '1':\n"
        f"    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]}))\n"
    )
    small["train"]["checkpoint"] |= {"save_steps": 2, "save_async": save_async}
    small["train"] |= {"max_steps": 200, "accelerator": {"dp_shard": 2}}
    small["data"] |= {"train_size": 64}
    done = launch(small, PYTHONPATH=str(tmp_path / "site"))
    assert time.time() - (output(small) / "metrics.jsonl").stat().st_mtime < FAILURE_SECONDS
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: rank ") and "step_2 was not saved: rank 1: " in error, error
    assert "_rank1_.safetensors" in error and str(output(small) / "logs") in error
    assert steps(small) == []


# --- killed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kills", "seed"), [(3, 0), pytest.param(40, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_killed_while_saving(kills, seed):
    script = Path(__file__).with_name("kill_saves.py")
    done = subprocess.run(
        [sys.executable, str(script), "--kills", str(kills), "--seed", str(seed)],
        capture_output=True,
        text=True,
        timeout=60 + 20 * kills,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kills} kills, 0 checkpoints lost, 0 half-written taken for whole, "), done.stdout
