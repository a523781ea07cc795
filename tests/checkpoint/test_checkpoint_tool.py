"""``python -m hyper_parallel.checkpoint`` on what a real run of the tiny model left."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from saved import ALONE, save_small

from hyper_parallel.checkpoint import main
from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.core.distributed_checkpoint.chunks import ChunkedTensors
from hyper_parallel.core.distributed_checkpoint.manifest import read_manifest
from hyper_parallel.core.distributed_checkpoint.optimizer import StoredMoments
from hyper_parallel.trainer.resume import problems
from hyper_parallel.trainer.trainer import Trainer
from qwen3vl_functional.spec import leaves

PARAMETERS = 374_120


@pytest.fixture(scope="module")
def raw(make_raw, tmp_path_factory) -> dict:
    raw = make_raw(tmp_path_factory.mktemp("tool") / "run")
    raw["train"] |= {"max_steps": 2, "global_batch_size": 2}
    raw["train"]["optimizer"]["lr_warmup_ratio"] = 0.0
    raw["train"]["checkpoint"]["save_steps"] = 1
    return raw


@pytest.fixture(scope="module")
def trainer(raw) -> Trainer:
    """A run of two steps, each saved, with its weights as they were at the end."""
    trainer = Trainer(config_from_dict(raw, source="test"))
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run(trainer) -> Path:
    return trainer.output_dir


@pytest.fixture
def step_2(run, tmp_path) -> Path:
    """A copy to damage."""
    return shutil.copytree(run / "step_2", tmp_path / "step_2")


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_checkpoint_holds_the_state_of_the_run(trainer, run):
    state = trainer.model.state
    tensors = ChunkedTensors(run / "step_2")
    moments = StoredMoments(tensors, [group.names for group in trainer.model.snapshot().groups])
    assert moments.step == state.opt_state.step == 2
    for path, leaf in leaves(state.params):
        assert torch.equal(tensors.read(path), leaf)
        assert torch.equal(moments.read("exp_avg", path), dict(leaves(state.opt_state.exp_avg))[path])
        assert torch.equal(moments.read("exp_avg_sq", path), dict(leaves(state.opt_state.exp_avg_sq))[path])
    with (run / "step_2" / ".metadata").open("rb") as file:
        entries = pickle.load(file).state_dict_metadata
    assert all(type(entry.size) is tuple and type(entry.chunks[0].sizes) is torch.Size for entry in entries.values())
    assert all(
        type(entry.chunks[0].offsets) is tuple and len(entry.chunks[0].offsets) == len(entry.size) for entry in entries.values()
    )


# --- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_one(capsys, run):
    code, out, err = call(capsys, "inspect", run / "step_2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(run / "step_2")
    assert lines[1] == "  step 2, epoch 0"
    assert lines[2] == f"  {PARAMETERS:,} parameters in 93 tensors (93 float32)"
    assert [part.split()[0] for part in lines[3].split(", ")] == ["model", "optimizer", "hf_ckpt", "other"]
    assert lines[3].strip().startswith("model 1.4 MiB, optimizer 2.9 MiB, hf_ckpt 1.4 MiB")
    manifest = read_manifest(run / "step_2")
    assert manifest is not None
    assert lines[4] == f"  saved {manifest.saved_at} by 1 ranks (one process)"
    assert lines[5:] == [f"  {len(manifest.files)} files: all there, in the recorded sizes"]


def test_inspect_a_run_newest_first(capsys, run):
    code, out, err = call(capsys, "inspect", run)
    assert (code, err) == (0, "")
    blocks = out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [str(run / "step_2"), str(run / "step_1")]
    assert "step 2, epoch 0" in blocks[0] and "step 1, epoch 0" in blocks[1]


def test_inspect_tells_missing_and_short_files(capsys, step_2):
    (step_2 / "scheduler.pt").unlink()
    (step_2 / "rng_rank0.pt").write_bytes(b"short")
    code, out, _ = call(capsys, "inspect", step_2)
    assert code == 0
    assert "2 files missing or of another size, such as " in out and "all there" not in out


def test_inspect_what_another_trainer_wrote(capsys, sample):
    code, out, err = call(capsys, "inspect", sample / "step_2")
    assert (code, err) == (0, "")
    assert f"{PARAMETERS:,} parameters in 93 tensors (93 float32)" in out
    assert out.endswith("no manifest.json: another Trainer wrote it, and nothing tells whether its files are whole\n")


def test_inspect_what_is_none(capsys, tmp_path, step_2):
    for directory in (tmp_path / "nowhere", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        message = f"error: {directory} neither is a checkpoint nor holds step_<N> directories\n"
        assert call(capsys, "inspect", directory) == (2, "", message)
    (step_2 / "extra_state.json").unlink()
    code, out, err = call(capsys, "inspect", step_2)
    assert (code, out) == (2, "") and err.startswith(f"error: {step_2 / 'extra_state.json'} cannot be read: ")


def test_inspect_a_run_with_a_damaged_one_tells_of_the_others(capsys, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "step_2" / ".metadata").write_bytes(b"")
    _, out, err = call(capsys, "inspect", copy)
    assert str(copy / "step_1") in out and str(copy / "step_2" / ".metadata") in out + err


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_a_whole_one(capsys, run):
    manifest = read_manifest(run / "step_2")
    assert manifest is not None
    message = f"{run / 'step_2'}: {len(manifest.files)} files are as they were written\n"
    assert call(capsys, "verify", run / "step_2") == (0, message, "")
    assert set(contents(run / "step_2")) == {*manifest.files, "manifest.json"}
    assert any(name.startswith("hf_ckpt/") for name in manifest.files)


def test_verify_names_every_damaged_file(capsys, step_2):
    (export,) = (step_2 / "hf_ckpt").glob("*.safetensors")
    for path in (export, step_2 / "_rank0_.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    (step_2 / "scheduler.pt").unlink()
    (step_2 / "extra_state.json").write_bytes(b"{}")
    code, out, err = call(capsys, "verify", step_2)
    assert (code, out) == (1, "")
    damaged = "is damaged: its checksum is not that of what was written"
    assert err.splitlines() == [
        f"{step_2 / '_rank0_.safetensors'} {damaged}",
        f"{step_2 / 'extra_state.json'} has 2 bytes, 30 were written",
        f"{export} {damaged}",
        f"{step_2 / 'scheduler.pt'} is missing",
    ]
    found = problems(step_2, ALONE)
    assert len(found) == 3 and not any("hf_ckpt" in problem for problem in found)


def test_verify_without_a_manifest_or_with_a_damaged_one(capsys, step_2, tmp_path):
    (step_2 / "manifest.json").write_text("[")
    code, _, err = call(capsys, "verify", step_2)
    assert code == 2 and err.startswith(f"error: {step_2 / 'manifest.json'} is damaged: ")
    (step_2 / "manifest.json").unlink()
    for directory in (step_2, tmp_path / "nowhere"):
        message = f"error: {directory} has no manifest.json: it is unfinished, or another Trainer wrote it\n"
        assert call(capsys, "verify", directory) == (2, "", message)


# --- export-hf ------------------------------------------------------------------------------------------------------


def test_export_is_that_of_the_run_byte_for_byte(capsys, run, tmp_path):
    out = tmp_path / "export"
    assert call(capsys, "export-hf", run / "step_2", out) == (0, f"wrote {out}\n", "")
    assert contents(out) == contents(run / "step_2" / "hf_ckpt")
    assert "config.json" in contents(out)


def test_export_does_not_overwrite(capsys, run, tmp_path):
    (tmp_path / "export").mkdir()
    message = f"error: {tmp_path / 'export'} exists already\n"
    assert call(capsys, "export-hf", run / "step_2", tmp_path / "export") == (2, "", message)
    assert contents(tmp_path / "export") == {}


def test_export_of_another_trainers_needs_the_configuration(capsys, sample, raw, tmp_path):
    out, config = tmp_path / "export", tmp_path / "run.yaml"
    message = f"error: {sample / 'step_2'} has no manifest.json, which would tell the model: give the run's --config FILE\n"
    assert call(capsys, "export-hf", sample / "step_2", out) == (2, "", message)
    config.write_text(yaml.safe_dump(raw))
    for layout in ("step_2", "global_step_2"):
        assert call(capsys, "export-hf", sample / layout, out / layout, "--config", config)[0] == 0
        expected = load_file(sample / "expected_model.safetensors")
        stored = {name: tensor for path in (out / layout).glob("*.safetensors") for name, tensor in load_file(path).items()}
        assert stored.keys() == expected.keys()
        assert all(torch.equal(stored[name], expected[name]) for name in expected)
        exported = json.loads((out / layout / "config.json").read_text())
        assert exported["text_config"]["num_experts"] == 12 and exported["model_type"] == "qwen3_vl_moe"


def test_there_is_no_export_of_a_damaged_one(capsys, step_2, tmp_path):
    data = (step_2 / "_rank0_.safetensors").read_bytes()
    (step_2 / "_rank0_.safetensors").write_bytes(data[: len(data) // 2])
    code, out, err = call(capsys, "export-hf", step_2, tmp_path / "export")
    assert (code, out) == (2, "") and str(step_2 / "_rank0_.safetensors") in err
    assert not (tmp_path / "export").exists()


def test_export_of_another_model_is_refused(capsys, tmp_path, raw):
    (directory,) = save_small(tmp_path / "small", 1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    code, out, err = call(capsys, "export-hf", directory, tmp_path / "export", "--config", tmp_path / "run.yaml")
    assert (code, out) == (2, "") and err.startswith("error: ") and "lack" in err
    assert not (tmp_path / "export").exists()


# --- diff -----------------------------------------------------------------------------------------------------------


def test_diff_of_equal_ones(capsys, run, sample):
    equal = (0, "93 parameters are equal, 0 differ\n", "")
    assert call(capsys, "diff", run / "step_2", run / "step_2") == equal
    assert call(capsys, "diff", run / "step_2", run / "step_2" / "hf_ckpt") == equal
    assert call(capsys, "diff", run / "step_2" / "hf_ckpt", run / "step_2") == equal
    assert call(capsys, "diff", sample / "step_2", sample / "global_step_2") == equal


def test_diff_of_a_step(capsys, run):
    """Every parameter is trained, so every one differs: a row each, the largest first, with the numbers it has."""
    code, out, err = call(capsys, "diff", run / "step_1", run / "step_2")
    assert (code, err) == (1, "")
    *rows, last = out.splitlines()
    assert last == "0 parameters are equal, 93 differ"
    a, b = ChunkedTensors(run / "step_1"), ChunkedTensors(run / "step_2")
    largest = []
    for row in rows:
        name, absolute, _, relative = row.split()
        difference = float((a.read(name) - b.read(name)).abs().max())
        assert absolute == f"{difference:.3e}"
        assert relative == f"{difference / max(float(a.read(name).abs().max()), 1e-30):.3e}"
        largest.append(difference)
    assert largest == sorted(largest, reverse=True) and len(rows) == 93


def test_diff_of_a_directory_of_weights(capsys, tmp_path):
    base = {"a": torch.ones(3), "b": torch.zeros(2, 2), "empty": torch.zeros(0, 2), "n": torch.tensor([1, 2])}
    others = {
        "changed": {**base, "a": torch.tensor([1.0, 1.5, 1.0])},
        "shape": {**base, "b": torch.zeros(4)},
        "less": {name: tensor for name, tensor in base.items() if name != "b"},
        "half": {**base, "a": base["a"].to(torch.bfloat16)},
    }
    for name, tensors in {"base": base, **others}.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    told = {name: call(capsys, "diff", tmp_path / "base", tmp_path / name) for name in others}
    summary = "3 parameters are equal, 1 differ\n"
    assert told["changed"] == (1, f"a  5.000e-01  relative 5.000e-01\n{summary}", "")
    assert told["shape"] == (1, f"b: [2, 2] in {tmp_path / 'base'}, [4] in {tmp_path / 'shape'}\n{summary}", "")
    assert told["less"] == (1, f"b: only in {tmp_path / 'base'}\n{summary}", "")
    assert told["half"] == (0, "4 parameters are equal, 0 differ\n", "")
    code, out, _ = call(capsys, "diff", tmp_path / "less", tmp_path / "base")
    assert (code, out) == (1, f"b: only in {tmp_path / 'base'}\n{summary}")


def test_diff_does_not_take_nan_for_equal(capsys, tmp_path):
    for name, value in (("a", 1.0), ("b", float("nan"))):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor([1.0, value]), "v": torch.ones(2)}, tmp_path / name / "model.safetensors")
    for pair in (("a", "b"), ("b", "a")):
        code, out, _ = call(capsys, "diff", *(tmp_path / name for name in pair))
        assert code == 1 and out.startswith("w  nan") and out.endswith("1 parameters are equal, 1 differ\n")


@pytest.mark.parametrize("pair", [(1.0, 1.0 + 1e-12), (2**24, 2**24 + 1)])
def test_diff_sees_more_than_float32_does(capsys, tmp_path, pair):
    for name, value in zip("ab", pair, strict=True):
        (tmp_path / name).mkdir()
        tensor = torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else torch.int64)
        save_file({"w": tensor}, tmp_path / name / "model.safetensors")
    assert call(capsys, "diff", tmp_path / "a", tmp_path / "b")[0] == 1


def test_a_diverged_checkpoint_does_not_differ_from_itself(capsys, tmp_path):
    save_file({"w": torch.tensor([float("nan"), float("inf"), 1.0])}, tmp_path / "model.safetensors")
    assert call(capsys, "diff", tmp_path, tmp_path) == (0, "1 parameters are equal, 0 differ\n", "")


def test_diff_of_what_holds_no_tensors(capsys, run, tmp_path):
    message = f"error: {tmp_path} holds neither a checkpoint nor safetensors files\n"
    assert call(capsys, "diff", run / "step_1", tmp_path) == (2, "", message)
    (tmp_path / "model.safetensors").write_bytes(b"\x01")
    code, _, err = call(capsys, "diff", tmp_path, run / "step_1")
    assert code == 2 and err.startswith(f"error: {tmp_path / 'model.safetensors'} cannot be read: ")


# --- as a user meets it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["inspect"], ["diff", "a"], ["export-hf", "a"], ["verify", "a", "b"]])
def test_a_wrong_command_line_is_refused(capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and "usage: python -m hyper_parallel.checkpoint" in capsys.readouterr().err


def test_the_command(run):
    command = [sys.executable, "-m", "hyper_parallel.checkpoint", "verify", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {run} has no manifest.json")
