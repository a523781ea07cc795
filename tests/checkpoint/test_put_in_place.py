"""No crash, failed save or clean-up loses a checkpoint that is whole."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from saved import ALONE, checkpointer, names, run_ranks, save, save_small, small_config, small_state

from hyper_parallel.core.distributed_checkpoint.chunks import ChunkedTensors
from hyper_parallel.core.distributed_checkpoint.storage import (
    flush_directory,
    write_tensors,
)
from hyper_parallel.trainer.checkpoint import SaveError, put_in_place, recover
from hyper_parallel.trainer.resume import problems

# --- put in place, and what a crash leaves ----------------------------------------------------------------------------


class Crash(BaseException):
    """The end of a process."""


def value_of(directory: Path) -> float:
    return float(ChunkedTensors(directory).read("body.bias")[0])


CALLS = ("rmtree", "rename", "rename", "flush_directory", "rmtree")  # the first two only where there is one to replace


@pytest.mark.parametrize(
    ("call", "replaces"), [*((call, True) for call in range(len(CALLS))), *((call, False) for call in range(len(CALLS) - 2))]
)
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_moment_of_put_in_place_loses_nothing(tmp_path, monkeypatch, call, after, replaces):
    """Before and after each change on the disk; the next start finds a whole checkpoint, the old one or the new one."""
    output_dir = tmp_path / "run"
    save_small(output_dir, 1, *([5] if replaces else []))
    (fresh,) = save_small(tmp_path / "fresh", 5)
    write_tensors(fresh / "_rank0_.safetensors", {"body.weight": torch.zeros(4, 3), "body.bias": torch.full((4,), 99.0)})
    target, partial = output_dir / "step_5", output_dir / "step_5.partial"
    os.rename(fresh, partial)
    seen = []

    def counted(act):
        def called(*arguments, **options):
            seen.append(act.__name__)
            if len(seen) == expected and not after:
                raise Crash
            act(*arguments, **options)
            if len(seen) == expected:
                raise Crash

        return called

    calls = CALLS if replaces else CALLS[2:]
    expected = call + 1
    monkeypatch.setattr("hyper_parallel.trainer.checkpoint.os.rename", counted(os.rename))
    monkeypatch.setattr("hyper_parallel.trainer.checkpoint.shutil.rmtree", counted(shutil.rmtree))
    monkeypatch.setattr("hyper_parallel.trainer.checkpoint.flush_directory", counted(flush_directory))
    with pytest.raises(Crash):
        put_in_place(partial, target)
    assert seen == list(calls[:expected])
    monkeypatch.undo()

    recover(output_dir)
    recover(output_dir)
    done = seen.count("rename") == calls.count("rename") and (after or seen[-1] != "rename")  # the new one has its name
    assert names(output_dir) == {"step_1"} | ({"step_5"} if replaces or done else set())
    if replaces or done:
        assert value_of(target) == (99.0 if done else 5.0)


def test_put_in_place_replaces_and_leaves_nothing_else(tmp_path):
    (old,) = save_small(tmp_path / "run", 5)
    (fresh,) = save_small(tmp_path / "fresh", 6)
    shutil.copytree(old, tmp_path / "run" / "step_5.old")
    os.rename(fresh, tmp_path / "run" / "step_5.partial")
    put_in_place(tmp_path / "run" / "step_5.partial", old)
    assert names(tmp_path / "run") == {"step_5"} and value_of(old) == 6.0


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path):
    (old,) = save_small(tmp_path, 5)
    with pytest.raises(OSError):
        put_in_place(tmp_path / "step_5.partial", old)  # which is not there
    assert names(tmp_path) == {"step_5"} and problems(old, ALONE) == []


def test_recover_leaves_alone_what_no_save_left(run):
    for name in ("notes.partial", "best.old", "xstep_1.old", "metrics.jsonl"):
        (run / name).mkdir()
    recover(run)
    assert names(run) == {"step_1", "step_2", "step_3", "notes.partial", "best.old", "xstep_1.old", "metrics.jsonl"}
    recover(run / "nowhere")


@pytest.mark.parametrize("name", ["step_notes.partial", "step_1_backup.old", "step_1.best.old"])
def test_recover_touches_numbered_directories_alone(run, name):
    (run / name).mkdir()
    recover(run)
    assert name in names(run)


def test_a_run_clears_up_when_it_starts(run):
    shutil.copytree(run / "step_1", run / "step_4.partial")
    os.rename(run / "step_2", run / "step_2.old")
    checkpointer(small_config(run), ALONE, small_state()).close()
    assert names(run) == {"step_1", "step_2", "step_3"} and problems(run / "step_2", ALONE) == []


# --- saving -----------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_what_was_there(run, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("hyper_parallel.trainer.checkpoint.write_pt", full)
    with pytest.raises(SaveError, match=r"step_3 was not saved: rank 0: OSError: .*No space left.* MiB free in"):
        save_small(run, 3)
    assert names(run) == {"step_1", "step_2", "step_3"} and problems(run / "step_3", ALONE) == []
    said: list[str] = []
    writer = checkpointer(small_config(run, on_save_error="continue"), ALONE, small_state(), said.append)
    save(writer, 4)
    writer.close()
    assert "step_4 was not saved" in said[0] and "the run goes on" in said[0]
    assert names(run) == {"step_1", "step_2", "step_3"}


def test_a_failure_of_one_rank_fails_the_save_on_all(tmp_path):
    config = small_config(tmp_path / "run")

    def write(ranks):
        broken = small_state(0.0, 1)
        if ranks.rank == 2:
            broken.exp_avg.clear()
        writer = checkpointer(config, ranks, broken)
        with pytest.raises(SaveError) as failure:
            save(writer, 1)
        writer.close()
        return str(failure.value)

    told = run_ranks((1, 3, 1, 1, 1), write)
    assert len({message.split(" (")[0] for message in told}) == 1 and "rank 2: KeyError" in told[0]
    assert names(tmp_path / "run") == set()


def test_an_asynchronous_save_holds_the_values_of_its_moment(tmp_path):
    whole = small_state(7.0, 1)
    writer = checkpointer(small_config(tmp_path, save_async=True), ALONE, whole)
    directory = save(writer, 1)
    writer.before_update()
    for tree in (whole.exp_avg, whole.exp_avg_sq, {name: part.tensor for name, part in whole.params.items()}):
        for tensor in tree.values():
            tensor.fill_(-1.0)
    writer.close()
    assert problems(directory, ALONE) == [] and value_of(directory) == 7.0


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_last_are_kept(tmp_path, keep):
    save_small(tmp_path, 1, 2, 3, keep_last=keep)
    assert names(tmp_path) == {f"step_{step}" for step in (1, 2, 3)[-keep:]}


def test_what_was_saved_loaded_or_written_by_others_is_never_deleted(run):
    shutil.copytree(run / "step_1", run / "step_90")
    (run / "step_90" / "manifest.json").unlink()
    (run / "step_notes").mkdir()
    writer = checkpointer(small_config(run, keep_last=1), ALONE, small_state(4.0, 4))
    writer.loaded = run / ".." / "run" / "step_1"
    save(writer, 4)
    assert names(run) == {"step_1", "step_4", "step_90", "step_notes"}
    save(writer, 2)  # of an earlier step, but the newest
    writer.close()
    assert names(run) == {"step_1", "step_2", "step_90", "step_notes"}


def test_the_saved_one_is_the_newest_even_if_the_clock_went_back(run):
    path = run / "step_1" / "manifest.json"
    path.write_text(path.read_text().replace('"saved_at": "2', '"saved_at": "9'))
    save_small(run, 5, keep_last=1)
    assert names(run) == {"step_5"}


def test_one_that_cannot_be_deleted_does_not_end_the_run(run, monkeypatch):
    said: list[str] = []
    writer = checkpointer(small_config(run, keep_last=1), ALONE, small_state(), said.append)
    monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(PermissionError(13, "denied", str(self))))
    save(writer, 4)
    writer.close()
    assert len([message for message in said if "could not be deleted (train.checkpoint.keep_last)" in message]) == 3
    assert names(run) == {"step_1", "step_2", "step_3", "step_4"}


def test_an_unfinished_deletion_is_no_checkpoint(run, monkeypatch):
    def crash(path, **_):
        raise Crash

    writer = checkpointer(small_config(run, keep_last=2), ALONE, small_state())
    monkeypatch.setattr("hyper_parallel.trainer.checkpoint.shutil.rmtree", crash)
    with pytest.raises(Crash):
        writer._retire(run / "step_3")
    monkeypatch.undo()
    writer.close()
    assert "step_1" not in names(run)
    recover(run)
    assert names(run) == {"step_2", "step_3"}
