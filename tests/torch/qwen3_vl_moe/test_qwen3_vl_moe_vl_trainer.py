"""The Trainer as a user starts it, on one card and on two: the topology must not change what is computed."""

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
from hyper_parallel.trainer.trainer import Trainer

ROOT = Path(__file__).parents[3]
TINY = json.loads(Path(__file__).with_name("tiny_config.json").read_text())
TWO_CARDS = {"fsdp": {"dp_shard": 2}, "tp": {"tp": 2}, "hsdp": {"dp_replicate": 2}}
STEPS = 100
WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.timeout(240)


class Run(NamedTuple):
    """A finished run: one record a step, its output directory and what it printed."""

    records: list[dict[str, Any]]
    directory: Path
    stdout: str

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.records]

    def export(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.directory / f"step_{step}" / "hf_ckpt" / WEIGHTS)


def configuration(output: Path, *, bf16: bool = False, **accelerator: int) -> dict[str, Any]:
    """The tiny model on synthetic images and text, with a learning rate that moves it."""
    overrides = {key: value for key, value in TINY.items() if key not in ("architectures", "model_type", "tie_word_embeddings")}
    return {
        "model": {"config_overrides": {"vl": True, **overrides}},
        "data": {"type": "vl_dummy", "max_seq_len": 24, "vl_grid_h": 4, "vl_grid_w": 4},
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 2,
            "accelerator": accelerator,
            "mixed_precision": {"enabled": bf16},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"output_dir": str(output), "save_steps": 20},
        },
    }


def launch(raw: dict[str, Any]) -> Run:
    output = Path(raw["train"]["checkpoint"]["output_dir"])
    config = output.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "hyper_parallel.trainer.launch", "--config", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return Run([json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()], output, done.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[str, bool], Run]:
    """The run of a topology (``one`` or a key of TWO_CARDS) and precision, started when first asked for."""
    directory = tmp_path_factory.mktemp("runs")

    @cache
    def get(topology: str, bf16: bool = False) -> Run:
        accelerator = TWO_CARDS.get(topology, {})
        return launch(configuration(directory / f"{topology}{'_bf16' if bf16 else ''}", bf16=bf16, **accelerator))

    return get


def differences(run: Run, other: Run, name: str) -> list[float]:
    return [mine - theirs for mine, theirs in zip(run.column(name), other.column(name), strict=True)]


def test_one_card_smoke(trained):
    run = trained("one")
    assert run.column("step") == list(range(1, STEPS + 1))
    assert all(math.isfinite(loss) for loss in run.column("loss"))
    assert run.records[0]["loss"] == pytest.approx(math.log(TINY["text_config"]["vocab_size"]), abs=0.1)
    assert run.records[-1]["loss"] < 2.5
    assert min(run.column("grad_norm")) > 0.1
    assert f"step {STEPS}/{STEPS}" in run.stdout


@pytest.mark.parametrize("topology", TWO_CARDS)
def test_two_cards_smoke(trained, topology):
    one, two = trained("one"), trained(topology)
    losses = differences(two, one, "loss")
    assert abs(losses[0]) <= 1e-6
    assert max(map(abs, losses)) <= 1e-5
    assert two.records[0]["grad_norm"] == pytest.approx(one.records[0]["grad_norm"], abs=1e-6)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), abs=1e-5)
    for name in ("step", "lr", "num_targets", "consumed_samples", "consumed_tokens"):
        assert two.column(name) == one.column(name)
    assert two.stdout.count(f"step {STEPS}/{STEPS}") == 1


@pytest.mark.parametrize("topology", TWO_CARDS)
def test_two_cards_export_what_one_card_exports(trained, topology):
    for step in (20, STEPS):
        one, two = trained("one").export(step), trained(topology).export(step)
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in two.items()} == {
            name: (leaf.shape, leaf.dtype) for name, leaf in one.items()
        }
        assert max(float((two[name] - one[name]).abs().max()) for name in one) <= 1e-5
    first, last = trained(topology).export(20), trained(topology).export(STEPS)
    assert [name for name in first if torch.equal(first[name], last[name])] == []  # every weight is trained


@pytest.mark.parametrize("topology", TWO_CARDS)
def test_alignment_over_100_steps(trained, topology):
    losses = differences(trained(topology), trained("one"), "loss")
    assert abs(sum(losses) / STEPS) <= 1e-6


@pytest.mark.parametrize(
    "topology", ["fsdp", pytest.param("tp", marks=pytest.mark.slow), pytest.param("hsdp", marks=pytest.mark.slow)]
)
def test_alignment_over_100_steps_in_bf16(trained, topology):
    one, two = trained("one", True), trained(topology, True)
    assert one.column("loss") != trained("one").column("loss")
    losses = differences(two, one, "loss")
    assert abs(sum(losses) / STEPS) <= 5e-3
    assert max(map(abs, losses)) <= 5e-3


def test_pixels_and_router_reach_the_loss(trained, tmp_path):
    """On exported weights; two cards that load the same edited file see the same change."""
    exported = trained("one").directory / f"step_{STEPS}" / "hf_ckpt"
    edited = tmp_path / "edited"
    edited.mkdir()
    (edited / "config.json").write_text((exported / "config.json").read_text())
    weights = load_file(exported / WEIGHTS)
    weights["model.language_model.layers.1.mlp.gate.weight"][0, 0] += 1.0
    save_file(weights, edited / WEIGHTS, metadata={"format": "pt"})

    def one_step(directory: Path, output: str) -> dict[str, Any]:
        raw = configuration(tmp_path / output)
        raw["model"] |= {"weights_path": str(directory)}
        raw["train"] |= {"max_steps": 1}
        raw["train"]["checkpoint"]["save_steps"] = 0
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
    assert abs(pixel - plain) > 1e-5
    assert abs(changed - plain) > 1e-5

    router.train()
    alone = json.loads((tmp_path / "router" / "metrics.jsonl").read_text())
    torch.set_num_threads(before)
    raw = one_step(edited, "router_tp")
    raw["train"]["accelerator"] = TWO_CARDS["tp"]
    together = launch(raw).records[0]
    assert together["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert together["grad_norm"] == pytest.approx(alone["grad_norm"], abs=1e-5)
