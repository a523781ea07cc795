"""Training by transformers and torch.optim on the Trainer's batches: the losses of the two agree step by step."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import reference_run
from test_launch_ranks import conversations as conversations
from test_launch_ranks import metrics, output
from test_launch_ranks import small as small

from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.trainer.trainer import Trainer
from qwen3vl_functional import Qwen3VLMoeConfig, init_params, param_specs, save_params
from qwen3vl_functional.spec import leaves

# Losses of about 6 in fp32, whose sums the two order differently.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4  # relative: clip_grad_norm_ adds up long gradients in one run


@pytest.fixture(scope="module")
def weights(tiny_config, tmp_path_factory) -> Path:
    """The tiny model, with weights large enough that norms, biases, router and tower all count."""
    text, vision = ({**tiny_config[part], "initializer_range": 0.15} for part in ("text_config", "vision_config"))
    cfg = Qwen3VLMoeConfig.from_dict({**tiny_config, "text_config": text, "vision_config": vision})
    params = init_params(param_specs(cfg), seed=0)
    generator = torch.Generator().manual_seed(0)
    for _, leaf in leaves(params):
        if leaf.ndim == 1:
            leaf += 0.2 * torch.randn(leaf.shape, generator=generator)
    return save_params(params, cfg, tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture
def run(raw, weights) -> dict[str, Any]:
    """Five steps from those weights."""
    raw = copy.deepcopy(raw)
    raw["model"] |= {"weights_path": str(weights)}
    raw["train"] |= {"max_steps": 5}
    raw["train"]["optimizer"] |= {"lr": 3e-3, "lr_min": 1e-3, "lr_warmup_ratio": 0.2, "weight_decay": 0.1}
    return raw


def both(raw: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of the Trainer and of the reference."""
    Trainer(config_from_dict(raw, source="test")).train()
    directory = output(raw).with_name("reference")
    config = output(raw).with_suffix(".yaml")
    config.write_text(yaml.safe_dump(raw))
    assert reference_run.main(["--config", str(config), "--output", str(directory)]) == 0
    theirs = {**raw, "train": {**raw["train"], "checkpoint": {"output_dir": str(directory)}}}
    return [record for record in metrics(raw) if "loss" in record], metrics(theirs)


def assert_same_run(raw: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    ours, theirs = both(raw)
    assert [record["step"] for record in theirs] == list(range(1, steps + 1))
    for record, reference in zip(ours, theirs, strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=0, abs=LOSS_TOLERANCE), record["step"]
        assert record["grad_norm"] == pytest.approx(reference["grad_norm"], rel=NORM_TOLERANCE), record["step"]
        assert record["lr"] == pytest.approx(reference["lr"], rel=1e-12), record["step"]
        for name in ("epoch", "num_targets", "consumed_samples", "consumed_tokens"):
            assert record[name] == reference[name], (record["step"], name)
    for name in ("step_time", "tokens_per_second", "peak_memory"):
        assert all(record[name] > 0 for record in theirs)
    return theirs


def test_five_steps(run):
    theirs = assert_same_run(run, 5)
    assert theirs[0]["lr"] == 0.0
    assert theirs[-1]["loss"] < theirs[0]["loss"] - 0.05
    assert max(record["grad_norm"] for record in theirs) > 1.0  # so that clipping counts


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"lr_decay_style": "linear", "max_grad_norm": 0.0}, "micro_batch_size": 1},
        {"optimizer": {"lr_decay_style": "constant", "eps": 1e-3, "betas": [0.5, 0.7], "foreach": False}},
    ],
    ids=["linear_unclipped", "constant"],
)
def test_other_optimizer_settings(run, change):
    run["train"]["optimizer"] |= change.pop("optimizer")
    run["train"] |= change
    assert_same_run(run, 5)


def test_frozen_tower_and_load_balance(run):
    run["model"]["freeze_modules"] = ["model.visual"]
    run["model"]["config_overrides"]["text_config"] |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    balanced = assert_same_run(run, 5)
    run["model"]["config_overrides"]["text_config"] |= {"output_router_logits": False}
    run["train"]["checkpoint"]["output_dir"] += "_unbalanced"
    assert balanced[0]["loss"] > both(run)[1][0]["loss"] + 0.2


def test_conversations(conversations, weights):
    """Rows of different lengths, with and without images; 10 in steps of 4, so that every third step is short.

    Few tokens leave router rows whose gradient cancels to rounding noise, 1e-10. AdamW's first updates divide a gradient by its
    own size, so with the default epsilon of 1e-8 noise moves the loss: 2e-5 here, as do other kernels inside transformers.
    """
    conversations["model"] |= {"weights_path": str(weights)}
    conversations["train"] |= {"micro_batch_size": 2, "num_train_epochs": 2, "eval": {}, "optimizer": {"lr": 1e-3, "eps": 1e-6}}
    conversations["data"].pop("eval_path")
    theirs = assert_same_run(conversations, 6)
    assert [record["consumed_samples"] for record in theirs] == [4, 8, 10, 14, 18, 20]


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("train", {"mixed_precision": {"enabled": True}}, "computes in float32: set --train.mixed_precision.enabled=false"),
        ("train", {"optimizer": {"loss_aggregation": "rank_average"}}, "loss_aggregation = rank_average"),
        ("model", {"weights_path": None}, "set --model.weights_path"),
        ("model", {"config_overrides": {"vl": False}}, "config_overrides.vl=true"),
    ],
)
def test_refused(run, tmp_path, capsys, section, change, message):
    run[section] |= change
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert reference_run.main(["--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "reference")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "reference").exists()


def test_weights_that_are_not_there_are_refused(run, weights, tmp_path, capsys):
    """transformers would draw them at random and go on."""
    run["model"]["config_overrides"]["text_config"]["num_hidden_layers"] = 4
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert reference_run.main(["--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "reference")]) == 2
    assert "lacks model.language_model.layers.3" in capsys.readouterr().err
