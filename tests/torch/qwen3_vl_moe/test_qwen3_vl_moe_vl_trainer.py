"""The Trainer as a user starts it, on one card and on two: neither the topology nor an interruption changes what is computed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.trainer import align
from hyper_parallel.trainer.trainer import Trainer

ROOT = Path(__file__).parents[3]
TINY = json.loads(Path(__file__).with_name("tiny_config.json").read_text())
CARDS: dict[str, dict[str, int]] = {"one": {}, "fsdp": {"dp_shard": 2}, "tp": {"tp": 2}, "hsdp": {"dp_replicate": 2}}
TWO_CARDS = ["fsdp", "tp", pytest.param("hsdp", marks=pytest.mark.slow)]
STEPS, LONG = 20, 100
LENGTHS = [STEPS, pytest.param(LONG, marks=pytest.mark.slow)]
WEIGHTS = "model.safetensors"
WALL = {"step_time", "tokens_per_second", "peak_memory"}  # what is measured, not computed

pytestmark = pytest.mark.timeout(600)


class Run(NamedTuple):
    """A finished run: one record a step, its output directory and what it printed."""

    records: list[dict[str, Any]]
    directory: Path
    stdout: str

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.records]

    def export(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.directory / f"step_{step}" / "hf_ckpt" / WEIGHTS)


def configuration(output: Path, *, cards: str = "one", steps: int = STEPS, bf16: bool = False) -> dict[str, Any]:
    """The tiny model on synthetic images and text, with a learning rate that moves it; saved half-way and at the end."""
    overrides = {key: value for key, value in TINY.items() if key not in ("architectures", "model_type", "tie_word_embeddings")}
    for part in ("text_config", "vision_config"):
        overrides[part] = {**TINY[part], "initializer_range": 0.1}  # so that pixels and routers count from the first step
    return {
        "model": {"config_overrides": {"vl": True, **overrides}},
        "data": {"type": "vl_dummy", "max_seq_len": 24, "vl_grid_h": 4, "vl_grid_w": 4},
        "train": {
            "max_steps": steps,
            "global_batch_size": 2,
            "accelerator": CARDS[cards],
            "mixed_precision": {"enabled": bf16},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"output_dir": str(output), "save_steps": steps // 2},
        },
    }


def launch(raw: dict[str, Any]) -> Run:
    output = Path(raw["train"]["checkpoint"]["output_dir"])
    config = output.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "hyper_parallel.trainer.launch", "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return Run([json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()], output, done.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[..., Run]:
    """The run on the cards that a key of CARDS names, started when first asked for."""
    directory = tmp_path_factory.mktemp("runs")

    @cache
    def start(cards: str, steps: int, bf16: bool) -> Run:
        output = directory / f"{cards}_{steps}{'_bf16' if bf16 else ''}"
        return launch(configuration(output, cards=cards, steps=steps, bf16=bf16))

    return lambda cards, *, steps=STEPS, bf16=False: start(cards, steps, bf16)


def differences(run: Run, other: Run, name: str) -> list[float]:
    return [mine - theirs for mine, theirs in zip(run.column(name), other.column(name), strict=True)]


def aligned(*runs: Run, steps: str, tolerance: float) -> bool:
    """What the alignment command finds."""
    code = align.main([*(str(run.directory) for run in runs), "--steps", steps, "--tolerance", str(tolerance)])
    assert code in (0, 1)
    return code == 0


# --- one card and two ---------------------------------------------------------------------------------------------------


def test_one_card_smoke(trained):
    run = trained("one")
    assert run.column("step") == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for loss in run.column("loss"))
    assert run.records[0]["loss"] == pytest.approx(math.log(TINY["text_config"]["vocab_size"]), abs=1.0)
    assert run.records[-1]["loss"] < run.records[0]["loss"] - 1.0
    assert min(run.column("grad_norm")) > 0.1
    assert f"step {STEPS}/{STEPS}" in run.stdout


@pytest.mark.parametrize("cards", TWO_CARDS)
def test_two_cards_smoke(trained, cards):
    one, two = trained("one"), trained(cards)
    assert max(map(abs, differences(two, one, "loss"))) <= 1e-5
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), abs=1e-5)
    for name in ("step", "lr", "num_targets", "consumed_samples", "consumed_tokens"):
        assert two.column(name) == one.column(name)
    assert two.stdout.count(f"step {STEPS}/{STEPS}") == 1


def test_first_step_is_the_same_on_any_cards(trained):
    """The same weights and samples: loss and gradient before anything has been updated."""
    first = [trained(cards).records[0] for cards in ("one", "fsdp", "tp")]
    for name in ("loss", "grad_norm"):
        values = [record[name] for record in first]
        assert max(values) - min(values) <= 1e-6


@pytest.mark.parametrize("cards", TWO_CARDS)
def test_two_cards_export_what_one_card_exports(trained, cards):
    for step in (STEPS // 2, STEPS):
        one, two = trained("one").export(step), trained(cards).export(step)
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in two.items()} == {
            name: (leaf.shape, leaf.dtype) for name, leaf in one.items()
        }
        assert max(float((two[name] - one[name]).abs().max()) for name in one) <= 1e-5
    first, last = trained(cards).export(STEPS // 2), trained(cards).export(STEPS)
    assert [name for name in first if torch.equal(first[name], last[name])] == []  # every weight is trained


# --- alignment ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("cards", TWO_CARDS)
def test_alignment(trained, cards, steps):
    one, two = (trained(name, steps=steps) for name in ("one", cards))
    assert aligned(one, two, steps=f"1-{steps}", tolerance=1e-6)
    assert abs(sum(differences(two, one, "loss")) / steps) <= 1e-6


@pytest.mark.parametrize(
    ("cards", "steps"),
    [("fsdp", STEPS), *(pytest.param(name, LONG, marks=pytest.mark.slow) for name in ("fsdp", "tp", "hsdp"))],
)
def test_alignment_in_bf16(trained, cards, steps):
    one, two = (trained(name, steps=steps, bf16=True) for name in ("one", cards))
    assert one.column("loss") != trained("one", steps=steps).column("loss")
    assert aligned(one, two, steps=f"1-{steps}", tolerance=5e-3)


def test_alignment_report(trained, tmp_path):
    runs = [str(trained(cards).directory) for cards in ("one", "fsdp", "tp")]
    assert align.main([*runs, "--tolerance", "1e-6", "--report", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and [scenario["losses"] for scenario in report["scenarios"]] == [
        trained(cards).column("loss") for cards in ("one", "fsdp", "tp")
    ]
    assert not aligned(trained("one"), trained("one", bf16=True), steps=f"1-{STEPS}", tolerance=1e-6)  # another run is noticed


# --- resume -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "steps"),
    [("fsdp", STEPS), *(pytest.param(name, LONG, marks=pytest.mark.slow) for name in ("one", "fsdp", "tp"))],
)
def test_resume_half_way(trained, tmp_path, cards, steps):
    """Into another directory: the second half has the same losses, and ends with the same weights, to the last bit."""
    straight, half = trained(cards, steps=steps), steps // 2
    raw = configuration(tmp_path / "resumed", cards=cards, steps=steps)
    raw["train"]["checkpoint"]["load_path"] = str(straight.directory / f"step_{half}")
    resumed = launch(raw)
    assert f"resumed from {straight.directory / f'step_{half}'}, after step {half} of {steps}" in resumed.stdout
    assert resumed.column("step") == list(range(half + 1, steps + 1))
    for record, other in zip(resumed.records, straight.records[half:], strict=True):
        assert {name: record[name] for name in record.keys() - WALL} == {name: other[name] for name in other.keys() - WALL}
    assert aligned(straight, resumed, steps=f"{half + 1}-{steps}", tolerance=0)
    before, after = straight.export(steps), resumed.export(steps)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


# --- what the loss depends on -------------------------------------------------------------------------------------------


def test_pixels_and_router_reach_the_loss(trained, tmp_path):
    """On exported weights; two cards that load the same edited file see the same change."""
    exported = trained("one").directory / f"step_{STEPS}" / "hf_ckpt"
    edited = tmp_path / "edited"
    edited.mkdir()
    (edited / "config.json").write_text((exported / "config.json").read_text())
    weights = load_file(exported / WEIGHTS)
    weights["model.language_model.layers.1.mlp.gate.weight"][0, 0] += 1.0
    save_file(weights, edited / WEIGHTS, metadata={"format": "pt"})

    def one_step(directory: Path, output: str, cards: str = "one") -> dict[str, Any]:
        raw = configuration(tmp_path / output, cards=cards, steps=1)
        raw["model"] |= {"weights_path": str(directory)}
        return raw

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = Trainer(config_from_dict(one_step(exported, "plain"), source="test"))
    batch = next(iter(trainer.loader))
    plain = trainer.model.eval_step(batch).loss
    batch["pixel_values"][3, 5] += 1.0
    pixel = trainer.model.eval_step(batch).loss
    batch["pixel_values"][3, 5] -= 1.0
    router = Trainer(config_from_dict(one_step(edited, "router"), source="test"))
    changed = router.model.eval_step(batch).loss
    assert abs(pixel - plain) > 1e-4
    assert abs(changed - plain) > 1e-4

    router.train()
    alone = json.loads((tmp_path / "router" / "metrics.jsonl").read_text())
    torch.set_num_threads(before)
    together = launch(one_step(edited, "router_tp", "tp")).records[0]
    assert together["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert together["grad_norm"] == pytest.approx(alone["grad_norm"], abs=1e-5)
