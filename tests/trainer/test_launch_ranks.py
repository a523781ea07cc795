"""Several processes as a user meets them: how many start, what they compute together, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from hyper_parallel.config import AcceleratorConfig
from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.data.qwen_tokenizer import SPECIAL_TOKENS
from hyper_parallel.trainer.launch import VISIBLE_DEVICES, main, number_of_processes
from hyper_parallel.trainer.trainer import Trainer
from qwen3vl_functional.moe import can_compile_experts

ROOT = Path(__file__).parents[2]
LAUNCH = ("-m", "hyper_parallel.trainer.launch")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", *LAUNCH)
FAILURE_SECONDS = 30  # at most, from the failure to the end of all ranks

pytestmark = pytest.mark.timeout(150)


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in VISIBLE_DEVICES}
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


def command(raw: dict[str, Any], arguments: Sequence[str] = (), start: Sequence[str] = LAUNCH) -> list[str]:
    config = Path(raw["train"]["checkpoint"]["output_dir"]).with_suffix(".yaml")
    config.write_text(yaml.safe_dump(raw))
    return [sys.executable, *start, "--config", str(config), *arguments]


def launch(
    raw: dict[str, Any], *arguments: str, start: Sequence[str] = LAUNCH, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(raw, arguments, start), capture_output=True, text=True, cwd=ROOT, timeout=90, env=environment(**variables)
    )


def output(raw: dict[str, Any]) -> Path:
    return Path(raw["train"]["checkpoint"]["output_dir"])


def metrics(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output(raw) / "metrics.jsonl").read_text().splitlines()]


def alone(raw: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """The records of the same configuration on one process."""
    checkpoint = {"output_dir": str(directory), "save_steps": 0}
    raw = {**raw, "train": {**raw["train"], "accelerator": {}, "checkpoint": checkpoint}}
    Trainer(config_from_dict(raw, source="test")).train()
    return metrics(raw)


def assert_same_run(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal up to the order of sums: everything but times and memory."""
    assert [record.keys() for record in records] == [record.keys() for record in expected]
    for record, other in zip(records, expected, strict=True):
        tolerance = 1e-6 if record["step"] == 1 else 1e-5
        for name in record.keys() - {"step_time", "tokens_per_second", "peak_memory"}:
            assert record[name] == pytest.approx(other[name], abs=tolerance), (record["step"], name)


# --- how many ---------------------------------------------------------------------------------------------------------


def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VISIBLE_DEVICES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("variable", VISIBLE_DEVICES)
def test_what_is_left_of_the_visible_devices(monkeypatch, variable):
    no_devices(monkeypatch)
    monkeypatch.setenv(variable, "0,1,2,5")
    assert number_of_processes(AcceleratorConfig(dp_shard=-1), None) == 4
    assert number_of_processes(AcceleratorConfig(dp_shard=-1, tp=2), None) == 4
    assert number_of_processes(AcceleratorConfig(dp_shard=1, tp=2), None) == 2  # sizes that are given need no devices named
    with pytest.raises(ValueError, match="world size 4 is not dp_replicate 3"):
        number_of_processes(AcceleratorConfig(dp_shard=-1, dp_replicate=3), None)


def test_what_is_left_of_nproc(monkeypatch):
    no_devices(monkeypatch)
    assert number_of_processes(AcceleratorConfig(dp_shard=-1, dp_replicate=2, tp=2), 8) == 8
    assert number_of_processes(AcceleratorConfig(dp_shard=2, tp=2), 4) == 4
    assert number_of_processes(AcceleratorConfig(), None) == 1
    with pytest.raises(ValueError, match=r"none are named: set ASCEND_VISIBLE_DEVICES .* or give --nproc N"):
        number_of_processes(AcceleratorConfig(dp_shard=-1), None)


@pytest.mark.parametrize(
    ("changes", "arguments", "messages"),
    [
        ({"accelerator": {"dp_shard": 2, "tp": 2}}, ("--nproc", "6"), ["world size 6", "dp_shard 2", "tp 2"]),
        ({"accelerator": {"dp_shard": -1, "tp": 4}}, ("--nproc=6",), ["world size 6", "tp 4"]),
        ({"accelerator": {"dp_shard": 3}}, (), ["global_batch_size = 4", "micro_batch_size = 1", "size 3"]),
        (
            {"accelerator": {"tp": 4}},
            ("--model.config_overrides.text_config.num_attention_heads=8",),
            ["kv_heads' has 2 units", "tp = 4"],
        ),
        ({"accelerator": {"dp_shard": 2}}, ("--nproc=two",), ["--nproc two"]),
        ({"accelerator": {"dp_shard": -1}}, (), ["--nproc N"]),
    ],
    ids=["sizes", "left", "batch", "heads", "nproc", "unnamed"],
)
def test_refused_once_before_any_process_starts(small, monkeypatch, capfd, changes, arguments, messages):
    no_devices(monkeypatch)
    monkeypatch.setattr("hyper_parallel.trainer.launch._start", lambda *_: pytest.fail("processes were started"))
    small["train"] |= changes
    assert main(command(small, arguments)[3:]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert all(message in err for message in messages), err
    assert not output(small).exists()


# --- what they compute ------------------------------------------------------------------------------------------------


@pytest.fixture
def small(raw) -> dict[str, Any]:
    """The tiny model on synthetic data, a few steps with micro-batches of one sample."""
    raw["train"] |= {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 1, "optimizer": {"lr": 1e-3}}
    return raw


needs_grouped_kernel = pytest.mark.skipif(
    not can_compile_experts(), reason="this torch has no grouped matmul: train.compile is refused (tested below)"
)


@needs_grouped_kernel
@pytest.mark.slow
def test_compiled_blocks_on_two_ranks(small, tmp_path):
    """Each rank compiles; the losses are those of one rank that does not."""
    expected = alone(small, tmp_path / "alone")
    small["train"] |= {"accelerator": {"dp_shard": 2}, "compile": True}
    result = launch(small)
    assert result.returncode == 0, result.stderr
    assert_same_run(metrics(small), expected)


def test_without_the_grouped_kernel_nothing_is_compiled(small, monkeypatch):
    monkeypatch.delattr("torch.nn.functional.grouped_mm", raising=False)
    small["train"] |= {"compile": True}
    with pytest.raises(ValueError, match=r"train\.compile: true, but .* has no grouped matmul"):
        Trainer(config_from_dict(small, source="test")).train()


@needs_grouped_kernel
def test_without_a_compiler_nothing_starts(small, tmp_path):
    small["train"] |= {"compile": True}
    result = launch(small, CXX=str(tmp_path / "none"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "programs"))
    assert result.returncode == 2
    assert result.stderr.startswith("error: train.compile: true, but torch.compile does not work here ("), result.stderr
    assert result.stderr.count("\n") == 1


def write_processor(directory: Path) -> dict[str, int]:
    """A tokenizer of single bytes with Qwen's special tokens, and an image processor; returns the model's token ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    vocabulary = tokenizer.get_vocab()
    return {key: vocabulary[f"<|{name}|>"] for key, name in names.items()}


@pytest.fixture
def conversations(small, tmp_path) -> dict[str, Any]:
    """Rows with and without images in file order, so that a rank's share of a step may be text alone; 10 rows in steps of 4;
    5 held-out rows."""
    ids = write_processor(tmp_path / "processor")
    rng = np.random.default_rng(0)
    for name, size in {"a": (8, 8), "b": (16, 8)}.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")

    def row(number: int, image: str | None, answer: str | None = None) -> str:
        asked = f"<image>{number}?" if image else "say " * (1 + number % 3)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer or ("b" if image else "a")}]
        return json.dumps({"messages": messages} | ({"images": [image]} if image else {}))

    # Rank 1 of two reads the odd rows: no image in the first step, one in the second; rank 0 the other way round.
    pictures = ["a.png", None, "b.png", None, None, "b.png", None, "a.png", None, None]
    (tmp_path / "train.jsonl").write_text("\n".join(row(number, image) for number, image in enumerate(pictures)))
    held_out = [*(row(number, image) for number, image in enumerate(pictures[3:7])), row(4, None, "never seen")]
    (tmp_path / "eval.jsonl").write_text("\n".join(held_out))
    broken = [row(0, "a.png"), row(1, "missing.png"), *(row(number, None) for number in range(2, 8))]
    (tmp_path / "broken.jsonl").write_text("\n".join(broken))
    small["model"]["config_overrides"] |= ids
    small["data"] = {
        "type": "json_file",
        "train_path": str(tmp_path / "train.jsonl"),
        "eval_path": str(tmp_path / "eval.jsonl"),
        "processor_path": str(tmp_path / "processor"),
        "shuffle": False,
        "max_seq_len": 96,
    }
    small["train"] |= {"max_steps": -1, "num_train_epochs": 4, "eval": {"eval_steps": 9}}
    return small


def test_mixed_conversations_on_visible_devices(conversations, tmp_path):
    """Two gloo ranks because two devices are named; text-only shares, a short last step, an odd number of held-out rows."""
    conversations["train"]["accelerator"] = {"dp_shard": -1}
    done = launch(conversations, ASCEND_VISIBLE_DEVICES="0,1")
    assert (done.returncode, done.stderr) == (0, "")
    expected = alone(conversations, tmp_path / "alone")
    steps = [record["consumed_samples"] for record in expected if "loss" in record]
    assert steps == [samples + 10 * epoch for epoch in range(4) for samples in (4, 8, 10)]
    evaluations = [record for record in expected if "eval_loss" in record]
    assert [(record["step"], record["eval_answers"]) for record in evaluations] == [(9, 5), (12, 5)]
    assert evaluations[-1]["eval_accuracy"] == 4 / 5
    assert_same_run(metrics(conversations), expected)
    assert sorted(path.name for path in output(conversations).iterdir()) == ["logs", "metrics.jsonl"]
    logs = {path.name: path.read_text() for path in (output(conversations) / "logs").rglob("*") if path.is_file()}
    assert logs["rank_0.log"] == done.stdout
    assert done.stdout.count("step 12/12  loss") == 1
    assert done.stdout.count("answers ") == 2
    assert not any("step 12/12" in text for name, text in logs.items() if name != "rank_0.log")


@pytest.mark.parametrize(
    ("start", "ranks", "model", "train"),
    [
        (LAUNCH, {"dp_shard": 2, "reshard_after_forward": False}, {"vision_parallel": {"dp_shard": 1}}, {}),
        (
            TORCHRUN,
            {"dp_shard": 2},
            {"freeze_modules": ["model.visual"], "vision_parallel": {"dp_shard": 2}},
            {"gradient_checkpointing": {"activation_checkpoint": "full"}},
        ),
        (LAUNCH, {"dp_shard": 2, "tp": 2, "comm_fusion": False}, {}, {}),
    ],
    ids=["replicated_tower_kept_weights", "torchrun_frozen_tower_recomputed", "fsdp_and_tp_unfused"],
)
def test_topologies_equal_one_process(small, tmp_path, start, ranks, model, train):
    small["model"] |= model
    small["train"] |= train | {"accelerator": ranks}
    done = launch(small, start=start)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "error" not in done.stderr
    small["model"].pop("vision_parallel", None)
    small["train"].pop("gradient_checkpointing", None)
    assert_same_run(metrics(small), alone(small, tmp_path / "alone"))


# --- how they end -----------------------------------------------------------------------------------------------------


def test_one_rank_that_fails_ends_all(conversations):
    """Row 2 is rank 1's first; rank 0 is then in a collective."""
    conversations["data"] |= {"train_path": conversations["data"]["train_path"].replace("train.jsonl", "broken.jsonl")}
    conversations["data"].pop("eval_path")
    conversations["train"]["accelerator"] = {"dp_shard": 2}
    done = launch(conversations)
    (failed,) = (output(conversations) / "logs").rglob("1/stderr.log")
    assert time.time() - failed.stat().st_mtime < FAILURE_SECONDS
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
    assert errors == done.stderr.splitlines() and len(errors) == 1, done.stderr
    assert errors[0].startswith("error: rank 1: ")
    assert "broken.jsonl:2: cannot read the image" in errors[0] and "missing.png" in errors[0]
    assert str(output(conversations) / "logs") in errors[0]


def test_what_the_ranks_refuse_is_a_mistake_in_the_input(small):
    """Found only once they have joined; one message, and the exit code of a mistake that the launcher itself finds."""
    small["train"] |= {"accelerator": {"dp_shard": 2}}
    small["train"]["checkpoint"] |= {"load_path": "no/such/step_3"}
    done = launch(small)
    (error,) = done.stderr.splitlines()
    assert done.returncode == 2 and "load_path = no/such/step_3 cannot be resumed from: no/such/step_3 does not exist" in error


@contextlib.contextmanager
def started(
    raw: dict[str, Any], start: Sequence[str] = LAUNCH, *, records: int = 3, **variables: str
) -> Iterator[tuple[Any, list[int]]]:
    """A run in a process group of its own, once it has taken some steps: the launcher, and its descendants' ids."""
    launcher = subprocess.Popen(
        command(raw, start=start),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
        start_new_session=True,
    )
    try:
        _wait_for(lambda: (output(raw) / "metrics.jsonl").exists() and len(metrics(raw)) >= records, 60)
        yield launcher, _descendants(launcher.pid)
    finally:
        for process in [*_descendants(launcher.pid), launcher.pid]:
            if _alive(process):
                os.kill(process, signal.SIGKILL)
        if launcher.returncode is None:
            launcher.communicate(timeout=10)


@pytest.fixture
def running(small) -> Iterator[tuple[Any, list[int]]]:
    """Two ranks that would take minutes, and save nothing."""
    small["train"] |= {"max_steps": 100_000, "accelerator": {"dp_shard": 2}}
    small["data"] |= {"train_size": 64}
    with started(small) as processes:
        yield processes


def test_a_killed_rank_ends_the_run(running):
    launcher, ranks = running
    assert len(ranks) == 2
    begin = time.perf_counter()
    os.kill(ranks[1], signal.SIGKILL)
    _, err = launcher.communicate(timeout=FAILURE_SECONDS)
    assert time.perf_counter() - begin < FAILURE_SECONDS
    assert launcher.returncode == 1
    assert err.count("\n") == 1 and err.startswith("error: rank 1: "), err
    assert not any(map(_alive, ranks))


def test_interrupt_ends_the_run(running):
    launcher, ranks = running
    os.killpg(launcher.pid, signal.SIGINT)
    out, err = launcher.communicate(timeout=FAILURE_SECONDS)
    assert (launcher.returncode, err) == (130, "")
    assert "stopped by SIGINT after step " in out
    assert not any(map(_alive, ranks))


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "the run did not begin"
        time.sleep(0.05)


def _descendants(process: int) -> list[int]:
    """Ids of a process's children, theirs included, in the order of their start."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True).stdout
    children = [int(word) for word in listed.split()]
    return [found for child in children for found in (child, *_descendants(child))]


def _alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to notice does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")
