"""The loop on the tiny model: what it computes, what it writes, what it refuses."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.trainer.callbacks import Callback
from hyper_parallel.trainer.resume import Progress
from hyper_parallel.trainer.trainer import Trainer
from qwen3vl_functional import AdamW, init_params, init_state, load_params, make_train_step, param_specs, save_params
from qwen3vl_functional.spec import leaves

ROOT = Path(__file__).parents[2]


def run(raw: dict) -> Trainer:
    trainer = Trainer(config_from_dict(raw, source="test"))
    trainer.train()
    return trainer


def metrics(raw: dict) -> list[dict]:
    path = Path(raw["train"]["checkpoint"]["output_dir"]) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def launch(raw: dict, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "hyper_parallel.trainer.launch", "--config", str(config), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )


def test_every_step_is_recorded(raw):
    run(raw)
    records = metrics(raw)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[0]["lr"] == 0.0 and records[1]["lr"] == 1e-2  # one warm-up step out of four
    assert records[-1]["consumed_samples"] == 16
    assert records[-1]["consumed_tokens"] == 16 * 24
    assert all(record["num_targets"] == 4 * 23 for record in records)
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)
    expected = {"epoch", "step_time", "tokens_per_second", "peak_memory"}
    assert expected <= records[0].keys()
    assert records[0]["peak_memory"] > 50 * 2**20


def test_losses_are_those_of_the_functional_step(raw):
    """The Trainer adds nothing to the mathematics: the same batches through make_train_step give the same numbers."""
    trainer = run(raw)
    config = config_from_dict(raw, source="test")
    fresh = Trainer(config)
    batches = iter(fresh.loader)
    cfg = trainer.model.architecture
    state = init_state(init_params(param_specs(cfg), seed=config.train.seed), cfg)
    step = make_train_step(cfg, AdamW(lr=1e-2, lr_min=1e-5, warmup_steps=1, total_steps=4))
    for record in metrics(raw):
        state, expected = step(state, [next(batches) for _ in range(2)])
        assert record["loss"] == float(expected.loss)
        assert record["grad_norm"] == float(expected.grad_norm)


def test_one_step_learns_from_pixels_and_router(raw):
    """Weights that receive no gradient would leave a loss curve looking normal."""
    raw["train"]["optimizer"] = {"lr": 1e-2, "lr_warmup_ratio": 0.0}
    trainer = Trainer(config_from_dict(raw, source="test"))
    before = {path: leaf.clone() for path, leaf in leaves(trainer.model.state.params)}
    trainer.train()
    after = dict(leaves(trainer.model.state.params))
    unchanged = [path for path in before if torch.equal(before[path], after[path])]
    assert unchanged == []


def test_micro_batches_do_not_change_the_run(raw):
    run(raw)
    one = [record["loss"] for record in metrics(raw)]
    raw["train"]["micro_batch_size"] = 4
    run(raw)
    assert [record["loss"] for record in metrics(raw)] == pytest.approx(one, abs=2e-6)


def test_an_earlier_metrics_file_is_moved_aside(raw):
    run(raw)
    first = metrics(raw)
    run(raw)
    aside = Path(raw["train"]["checkpoint"]["output_dir"]) / "metrics.1.jsonl"
    assert [json.loads(line)["loss"] for line in aside.read_text().splitlines()] == [record["loss"] for record in first]
    assert len(metrics(raw)) == 4


def test_export_at_the_end_loads_and_holds_the_trained_weights(raw):
    raw["train"]["checkpoint"]["save_steps"] = 3
    trainer = run(raw)
    output = Path(raw["train"]["checkpoint"]["output_dir"])
    assert sorted(path.name for path in output.glob("step_*")) == ["step_3", "step_4"]
    loaded = load_params(output / "step_4" / "hf_ckpt", trainer.model.architecture)
    ours = dict(leaves(trainer.model.state.params))
    assert all(torch.equal(leaf, ours[path]) for path, leaf in leaves(loaded))

    raw["model"]["weights_path"] = str(output / "step_4" / "hf_ckpt")
    raw["train"]["max_steps"] = 1
    run(raw)
    assert metrics(raw)[0]["loss"] < trainer_first_loss(output)


def test_transformers_loads_an_export_and_computes_the_same_loss(raw):
    transformers = pytest.importorskip("transformers")
    raw["train"]["checkpoint"]["save_steps"] = 4
    trainer = run(raw)
    directory = Path(raw["train"]["checkpoint"]["output_dir"]) / "step_4" / "hf_ckpt"
    model, report = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(report.values()), report
    batch = next(iter(Trainer(config_from_dict(raw, source="test")).loader))
    with torch.no_grad():
        loss = model(**{name: value for name, value in batch.items() if name != "labels"}, labels=batch["labels"]).loss
    assert float(loss) == pytest.approx(trainer.model.eval_step(batch).loss, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_of_what_was_loaded_is_its_source(raw, tmp_path, dtype):
    """Files, dtypes, config and tokenizer, bit for bit."""
    cfg = Trainer(config_from_dict(raw, source="test")).model.architecture
    params = init_params(param_specs(cfg), seed=5)
    source = save_params(params, cfg, tmp_path / "source", dtype=dtype, max_shard_bytes=400_000)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    raw["model"] = {"weights_path": str(source)}
    raw["train"]["checkpoint"]["save_steps"] = 1
    trainer = Trainer(config_from_dict(raw, source="test"))
    trainer.checkpointer.save(Progress(), trainer.loader)
    export = Path(raw["train"]["checkpoint"]["output_dir"]) / "step_0" / "hf_ckpt"
    written, read = ({path.name: path.read_bytes() for path in root.iterdir()} for root in (export, source))
    assert written.keys() == read.keys() and len(written) > 4
    for name in written:
        assert written[name] == read[name], name


def trainer_first_loss(output: Path) -> float:
    return json.loads((output / "metrics.1.jsonl").read_text().splitlines()[0])["loss"]


def test_frozen_tower(raw):
    raw["model"]["freeze_modules"] = ["model.visual"]
    trainer = Trainer(config_from_dict(raw, source="test"))
    before = {path: leaf.clone() for path, leaf in leaves(trainer.model.state.params)}
    trainer.train()
    for path, leaf in leaves(trainer.model.state.params):
        assert torch.equal(leaf, before[path]) == path.startswith("model.visual."), path
    assert not any(path.startswith("model.visual.") for path, _ in leaves(trainer.model.state.opt_state.exp_avg))


@pytest.mark.parametrize(
    "change",
    [
        {"mixed_precision": {"enabled": True}},
        {"mixed_precision": {"enabled": True, "output_dtype": "fp32"}},
        {"gradient_checkpointing": {"activation_checkpoint": "full"}},
        {"gradient_checkpointing": {"activation_checkpoint": "selective"}},
        {"optimizer": {"lr": 1e-2, "loss_aggregation": "rank_average", "lr_warmup_ratio": 0.25}},
        {"optimizer": {"lr": 1e-2, "foreach": False, "lr_warmup_ratio": 0.25}},
    ],
)
def test_variants_stay_near_the_plain_run(raw, change):
    run(raw)
    plain = [record["loss"] for record in metrics(raw)]
    raw["train"] |= change
    run(raw)
    bound = 2e-2 if "mixed_precision" in change else 2e-6
    assert [record["loss"] for record in metrics(raw)] == pytest.approx(plain, abs=bound)


def test_bf16_differs_and_output_dtype_matters(raw):
    losses = []
    for output_dtype in (None, "float32"):
        raw["train"]["mixed_precision"] = {"enabled": True, "output_dtype": output_dtype}
        run(raw)
        losses.append(metrics(raw)[0]["loss"])
    assert losses[0] != losses[1]


def test_text_only_and_video(raw):
    raw["data"]["vl_video"] = True
    run(raw)
    raw["model"]["config_overrides"] = {**raw["model"]["config_overrides"], "vl": False}
    trainer = run(raw)
    assert not any(path.startswith("model.visual.") for path, _ in leaves(trainer.model.state.params))


def test_load_balance_is_reported_when_on(raw):
    raw["model"]["config_overrides"]["text_config"] = {
        **raw["model"]["config_overrides"]["text_config"],
        "output_router_logits": True,
    }
    run(raw)
    assert all(3 <= record["load_balance"] < 12 for record in metrics(raw))  # K when balanced, E at worst


def test_epochs_when_max_steps_does_not_decide(raw):
    raw["data"]["train_size"] = 6
    raw["train"] |= {"max_steps": -1, "num_train_epochs": 2}
    run(raw)
    records = metrics(raw)
    assert [record["epoch"] for record in records] == [0, 0, 1, 1]
    assert [record["consumed_samples"] for record in records] == [4, 6, 10, 12]


def test_tensorboard_gc_determinism_and_utilisation(raw, tmp_path):
    raw["train"] |= {
        "tensorboard": {"enabled": True, "output_dir": str(tmp_path / "tb"), "log_steps": 2},
        "debug": {"deterministic": True, "check_nan_inf": True, "gc_steps": 2},
        "logging": {"model_flops_per_token": 1e6, "peak_tflops": 0.1},
    }
    try:
        run(raw)
    finally:
        torch.use_deterministic_algorithms(False)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4]
    record = metrics(raw)[-1]
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * 1e6 / 1e11)


def test_a_loss_that_is_not_finite_stops_the_run(raw):
    raw["train"]["debug"] = {"check_nan_inf": True}
    trainer = Trainer(config_from_dict(raw, source="test"))
    trainer.model.state.params["lm_head", "weight"].fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 1: loss nan"):
        trainer.train()


def test_evaluation_counts_answers(raw, tmp_path):
    pytest.importorskip("transformers")
    counted = []

    class Listener(Callback):
        def on_eval_end(self, step, report):
            counted.append((step, report))

    trainer = Trainer(config_from_dict(raw, source="test"))
    trainer.callbacks.append(Listener())
    batches = iter(trainer.loader)
    trainer.eval_loader = [next(batches) for _ in range(3)]
    trainer.train()
    ((step, report),) = counted
    assert step == 4
    assert (report.num_answers, report.num_targets) == (6, 6 * 23)
    record = metrics(raw)[-1]
    assert record["eval_loss"] == pytest.approx(report.loss) and record["eval_accuracy"] == report.accuracy


# --- as a user meets it ------------------------------------------------------------------------------------------------


def test_launch_prints_progress_and_succeeds(raw, tmp_path):
    done = launch(raw, tmp_path, "--train.max_steps", "2", "--train.logging.log_steps=1")
    assert done.returncode == 0, done.stderr
    assert "374,120 parameters, 374,120 trained" in done.stdout
    assert "router load-balance loss off" in done.stdout
    assert "step 2/2  loss" in done.stdout and "tokens/s" in done.stdout and "eta" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train.lr=1",), "did you mean train.optimizer.lr"),
        (("--model.name=nothing",), "models here: qwen3_vl_moe"),
        (("--model.weights_path=/no/such/dir",), "model.weights_path = /no/such/dir"),
        (("--model.freeze_modules=[model.vision]",), "'model.vision' matches no parameter"),
        (("--train.accelerator.dp_shard=2", "--nproc=1"), "world size 1 is not"),
        (("--train.global_batch_size=3", "--train.micro_batch_size=2"), "not a multiple"),
        (("--data.type=json_file",), "needs data.train_path"),
        (
            ("--model.config_overrides={text_config: {num_attention_heads: 5, num_key_value_heads: 2}}",),
            "num_attention_heads=5 is not a multiple of num_key_value_heads=2",
        ),
        (("--model.config_overrides={vl: true, text_config: {num_expert: 4}}",), "unknown field 'num_expert'"),
        (("--model.vision_parallel.dp_shard=3",), "vision_parallel.dp_shard = 3"),
        (("--train.checkpoint.load_path=latest",), "holds no whole step_<N> directory"),
        (("--train.checkpoint.load_path=/no/such/step_1",), "/no/such/step_1 does not exist"),
    ],
)
def test_launch_refuses_with_one_line(raw, tmp_path, arguments, message):
    done = launch(raw, tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_launch_refuses_another_framework(raw, tmp_path):
    done = launch(raw, tmp_path, HYPER_PARALLEL_PLATFORM="mindspore")
    assert done.returncode == 2 and "this Trainer runs on torch alone" in done.stderr


def test_missing_config_file():
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.trainer.launch", "--config=/no/such.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "/no/such.yaml" in done.stderr
