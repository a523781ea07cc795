"""The directories of a run: damage is named, whole ones are found, and what a run takes up comes back."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from saved import ALONE, checkpointer, names, nothing, run_ranks, save, save_small, small_config, small_state

from hyper_parallel import platform
from hyper_parallel.config import DataConfig
from hyper_parallel.core.distributed_checkpoint.manifest import damage, read_manifest
from hyper_parallel.core.distributed_checkpoint.storage import (
    write_pt,
)
from hyper_parallel.data.loader import build_loader
from hyper_parallel.data.spec import DataSpec
from hyper_parallel.trainer import resume
from hyper_parallel.trainer.resume import (
    Progress,
    load_position,
    load_progress,
    load_rng,
    newest_first,
    problems,
    restore,
)

FILES = (
    ".metadata",
    "0.metadata",
    "_rank0_.safetensors",
    "dataloader_rank0.pt",
    "extra_state.json",
    "optimizer_rank0.pt",
    "rng_extra_rank0.pt",
    "rng_rank0.pt",
    "scheduler.pt",
)


def latest(output_dir: Path, **options) -> tuple[Path, list[str]]:
    said: list[str] = []
    found = restore(small_config(output_dir, load_path="latest", **options), ALONE, said.append, nothing)
    assert found is not None
    return found, said


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(len(data) * at))] ^= 4
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_whole_one_has_no_problems_and_lists_every_file(written):
    for step in (1, 2, 3):
        directory = written / f"step_{step}"
        manifest = read_manifest(directory)
        assert problems(directory, ALONE) == []
        assert manifest is not None and set(manifest.files) == set(FILES) == names(directory) - {"manifest.json"}
        assert (manifest.step, manifest.world_size, manifest.topology["dp_shard"]) == (step, 1, 1)
        assert restore(small_config(written, load_path=str(directory)), ALONE, print, nothing) == directory


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Path.unlink, r"is missing"),
        (cut_short, r"has \d+ bytes, \d+ were written"),
        (lengthen, r"has \d+ bytes, \d+ were written"),
        (lambda path: path.write_bytes(b""), r"has 0 bytes, \d+ were written"),
        (lambda path: flip(path, 0), r"is damaged: its checksum is not that of what was written"),
        (lambda path: flip(path, 0.5), r"is damaged: its checksum is not that of what was written"),
        (lambda path: flip(path, 1), r"is damaged: its checksum is not that of what was written"),
        (lambda path: (path.unlink(), path.mkdir()), r"is missing"),
    ],
    ids=["missing", "shorter", "longer", "empty", "first", "middle", "last", "directory"],
)
def test_every_fault_of_every_file_is_named(run, name, fault, reason):
    directory = run / "step_3"
    fault(directory / name)
    (problem,) = problems(directory, ALONE)
    assert re.fullmatch(re.escape(str(directory / name)) + " " + reason, problem)
    with pytest.raises(ValueError, match=re.escape(f"load_path = {directory} cannot be resumed from: {problem}")):
        restore(small_config(run, load_path=str(directory)), ALONE, print, nothing)
    found, said = latest(run)
    assert found == run / "step_2"
    assert said == [f"{directory} is passed over: {problem}"]


def test_all_faults_of_a_directory_are_named(run):
    directory = run / "step_3"
    (directory / "scheduler.pt").unlink()
    flip(directory / "_rank0_.safetensors", 0.9)
    lengthen(directory / "0.metadata")
    assert {re.split(r" (?:is|has) ", problem)[0] for problem in problems(directory, ALONE)} == {
        str(directory / name) for name in ("scheduler.pt", "_rank0_.safetensors", "0.metadata")
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"files": []}',
        b'{"files": {}}',
        b'{"files": {"a": {"size": 1}}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_manifest_is_named(run, content):
    (run / "step_3" / "manifest.json").write_bytes(content)
    (problem,) = problems(run / "step_3", ALONE)
    assert problem.startswith(f"{run / 'step_3' / 'manifest.json'} is damaged: ")
    assert latest(run)[0] == run / "step_2"


def test_a_manifest_with_a_flipped_bit_is_no_reason_to_crash(run):
    path = run / "step_3" / "manifest.json"
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        assert all(str(run / "step_3") in problem for problem in problems(run / "step_3", ALONE))


@pytest.mark.parametrize("saved_at", [None, 5])
def test_a_manifest_without_a_time_is_no_reason_to_crash(run, saved_at):
    path = run / "step_3" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "saved_at": saved_at}))
    assert {directory.name for directory in newest_first(run)} == {"step_1", "step_2", "step_3"}


def test_a_record_of_a_hub_export_is_not_what_a_run_resumes_from(run):
    """The export is as large as the weights, and nothing of it is read to go on."""
    path = run / "step_3" / "manifest.json"
    raw = json.loads(path.read_text())
    raw["files"]["hf_ckpt/model.safetensors"] = {"size": 1, "xxh3_128": "0"}
    path.write_text(json.dumps(raw))
    assert problems(run / "step_3", ALONE) == []


def test_a_foreign_directory_is_no_checkpoint(tmp_path):
    for make in (lambda path: None, lambda path: path.mkdir(), lambda path: (path / "config.json").touch()):
        make(tmp_path / "step_3")
        (problem,) = problems(tmp_path / "step_3", ALONE)
        assert "does not exist" in problem or "extra_state.json is missing: the save was not finished" in problem
        assert str(tmp_path / "step_3") in problem
    (tmp_path / "step_3" / "extra_state.json").write_text("{}")
    (problem,) = problems(tmp_path / "step_3", ALONE)
    assert problem == f"{tmp_path / 'step_3'} is no checkpoint: it holds neither .metadata nor <rank>.metadata"


def test_weights_of_a_damaged_checkpoint_are_refused(run):
    config = small_config(run)
    weights = run / "step_3"
    object.__setattr__(config.model, "weights_path", str(weights))
    assert restore(config, ALONE, print, nothing) is None
    flip(weights / "_rank0_.safetensors", 0.9)
    message = f"model.weights_path = {weights} cannot be loaded: {weights / '_rank0_.safetensors'} is damaged"
    with pytest.raises(ValueError, match=re.escape(message)):
        restore(config, ALONE, print, nothing)


def test_ranks_share_the_checking_and_tell_the_same(run):
    directory = run / "step_3"
    damaged = ("scheduler.pt", "_rank0_.safetensors", "0.metadata", "rng_rank0.pt")
    for name in damaged:
        cut_short(directory / name)
    told = run_ranks((1, 3, 1, 1, 1), lambda ranks: problems(directory, ranks))
    assert told[0] == told[1] == told[2] and len(told[0]) == len(damaged)
    assert set(told[0]) == set(problems(directory, ALONE))

    def refused(ranks):
        with pytest.raises(ValueError) as refusal:
            restore(small_config(run, load_path=str(directory)), ranks, print, nothing)
        return str(refusal.value)

    assert len(set(run_ranks((1, 3, 1, 1, 1), refused))) == 1
    config = small_config(run, load_path="latest")
    assert set(run_ranks((1, 3, 1, 1, 1), lambda ranks: restore(config, ranks, lambda _: None, nothing))) == {run / "step_2"}


@pytest.mark.parametrize("error", [None, ValueError("no such weights"), RuntimeError("shapes differ")])
def test_what_loading_raises_is_raised_unless_the_files_explain_it(run, monkeypatch, error):
    """Every file counts as large: it is loaded from while it is read for its checksum."""
    monkeypatch.setattr(resume, "SMALL", 0)
    loaded = []

    def load(directory):
        loaded.append(directory)
        if error is not None:
            raise error

    step_3, whole = run / "step_3", small_config(run, load_path=str(run / "step_2"))
    if error is None:
        assert restore(whole, ALONE, print, load) == run / "step_2"
    else:
        with pytest.raises(type(error), match=str(error)):
            restore(whole, ALONE, print, load)
    flip(step_3 / "_rank0_.safetensors", 0.5)
    with pytest.raises(ValueError, match=r"_rank0_\.safetensors is damaged"):
        restore(small_config(run, load_path=str(step_3)), ALONE, print, load)
    assert loaded == [run / "step_2", step_3]
    cut_short(step_3 / "optimizer_rank0.pt")  # seen without reading
    with pytest.raises(ValueError, match=r"optimizer_rank0\.pt has .* bytes"):
        restore(small_config(run, load_path=str(step_3)), ALONE, print, load)
    assert loaded == [run / "step_2", step_3]


def test_what_was_loaded_from_damaged_files_is_loaded_anew(run, monkeypatch):
    monkeypatch.setattr(resume, "SMALL", 0)
    flip(run / "step_3" / "optimizer_rank0.pt", 0.5)
    config = small_config(run, load_path="latest")

    def on_each(ranks):
        loaded: list[Path | None] = []
        return restore(config, ranks, lambda _: None, loaded.append), loaded

    assert run_ranks((1, 3, 1, 1, 1), on_each) == [(run / "step_2", [run / "step_3", run / "step_2"])] * 3


def test_damage_names_what_it_was_asked_for_alone(run):
    directory = run / "step_1"
    manifest = read_manifest(directory)
    assert manifest is not None
    cut_short(directory / "scheduler.pt")
    assert damage(directory, {"0.metadata": manifest.files["0.metadata"]}) == []
    assert len(damage(directory, manifest.files)) == 1
    assert read_manifest(run) is None


# --- the latest -------------------------------------------------------------------------------------------------------


def test_the_latest_is_the_one_finished_last(run):
    """Not the highest number: a run that went back to an earlier step writes lower ones."""
    assert [path.name for path in newest_first(run)] == ["step_3", "step_2", "step_1"]
    save_small(run, 2)
    assert [path.name for path in newest_first(run)] == ["step_2", "step_3", "step_1"]
    assert latest(run) == (run / "step_2", [])


def test_what_another_trainer_wrote_is_older_and_goes_by_number(run):
    for number in (9, 10):
        shutil.copytree(run / "step_1", run / f"step_{number}")
        (run / f"step_{number}" / "manifest.json").unlink()
    assert [path.name for path in newest_first(run)] == ["step_3", "step_2", "step_1", "step_10", "step_9"]


def test_the_latest_passes_over_all_that_are_damaged(run):
    cut_short(run / "step_3" / "optimizer_rank0.pt")
    (run / "step_2" / "manifest.json").write_text("{")
    found, said = latest(run)
    assert found == run / "step_1"
    assert [message.split(" is passed over: ")[0] for message in said] == [str(run / "step_3")]  # damaged manifests come last
    flip(run / "step_1" / ".metadata", 0.1)
    said = []
    with pytest.raises(ValueError, match=rf"{re.escape(str(run))} holds no whole step_<N> directory \(3 damaged\)"):
        restore(small_config(run, load_path="latest"), ALONE, said.append, nothing)
    assert len(said) == 3


def test_no_checkpoint_at_all(tmp_path):
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"load_path = latest: .* \(0 damaged\); to start afresh, set it to null"):
            latest(directory)
    assert restore(small_config(tmp_path), ALONE, print, nothing) is None


def test_only_whole_names_are_considered(run):
    for name in ("step_9.partial", "step_9.old", "step_x", "step_", "xstep_9", "step_9x", "step_-9"):
        shutil.copytree(run / "step_1", run / name)
    (run / "step_8").touch()
    assert [path.name for path in newest_first(run)] == ["step_3", "step_2", "step_1"]


# --- what a run takes up ----------------------------------------------------------------------------------------------


def test_progress_comes_back(tmp_path):
    writer = checkpointer(small_config(tmp_path), ALONE, small_state())
    directory = save(writer, 8, epoch=3, consumed_tokens=4096)
    writer.close()
    assert load_progress(directory) == Progress(8, 3, 4096)
    assert json.loads((directory / "extra_state.json").read_text()) == {"global_step": 8, "epoch": 3}


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"global_step": 1}', '{"global_step": "x", "epoch": 0}', "null"])
def test_a_damaged_progress_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "extra_state.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'extra_state.json'} cannot be read: ")):
        load_progress(tmp_path)


def test_every_generator_comes_back(tmp_path):
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        random.gauss(0, 1), np.random.standard_normal(3)  # which leave a second value waiting
        (directory,) = save_small(tmp_path, 1)
        expected = random.gauss(0, 1), np.random.standard_normal(2).tolist(), torch.rand(2).tolist()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        assert load_rng(directory, 0, platform.detect()) is None
        assert (random.gauss(0, 1), np.random.standard_normal(2).tolist(), torch.rand(2).tolist()) == expected
    finally:
        random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])


def test_the_data_position_comes_back(tmp_path):
    text_only = {"vision": False, "in_channels": 0, "patch_size": 0, "temporal_patch_size": 0, "spatial_merge_size": 1}
    spec = DataSpec(320, image_token_id=301, video_token_id=302, vision_start_token_id=303, vision_end_token_id=304, **text_only)
    sizes = {"micro_batch_size": 2, "global_batch_size": 4, "seed": 0, "max_steps": 6, "rank": 0, "world_size": 1}

    def loader():
        return build_loader(DataConfig(type="vl_dummy", max_seq_len=8), spec, processor_path=None, **sizes)

    first = loader()
    batches = iter(first)
    for _ in range(4):
        next(batches)
    write_pt(tmp_path / "dataloader_rank0.pt", first.state_dict())
    (tmp_path / "manifest.json").touch()
    second = loader()
    assert load_position(tmp_path, second, 1) is None  # the file decides, not the step
    assert second.batch_sampler.position == (0, 8, 0)
    ahead = iter(second)
    for _ in range(3):
        mine, theirs = next(ahead), next(batches)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    (tmp_path / "dataloader_rank0.pt").unlink()
    with pytest.raises(ValueError, match=r"dataloader_rank0\.pt does not exist"):
        load_position(tmp_path, second, 1)
    (tmp_path / "manifest.json").unlink()
    assert "another Trainer's data position" in str(load_position(tmp_path, second, 2))
    assert second.batch_sampler.position == (0, 8, 0)
