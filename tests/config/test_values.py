"""Values from a mapping: types, limits, unknown and unsupported keys, and the round trip."""

import copy
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.config import Config, VisionParallelConfig, iter_keys
from hyper_parallel.config_loader import ConfigError, config_from_dict


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for ``a.b``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def read(path: str, value: Any) -> Any:
    """The value that the configuration holds at ``path`` once it was given as ``value``."""
    result: Any = config_from_dict(nested(path, value), source="run.yaml")
    for name in path.split("."):
        result = getattr(result, name)
    return result


def message(path: str, value: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read(path, value)
    return str(error.value)


LR, STEPS, BETAS = "train.optimizer.lr", "train.max_steps", "train.optimizer.betas"
CHECKPOINTING = "train.gradient_checkpointing.activation_checkpoint"
PARAM_DTYPE, OUTPUT_DTYPE = "train.mixed_precision.param_dtype", "train.mixed_precision.output_dtype"


@pytest.mark.parametrize(
    "path,given_value,value",
    [
        (LR, 1, 1.0),
        (LR, "1e-4", 1e-4),
        (LR, "1.0e9", 1e9),
        (LR, "+2.E1", 20.0),
        (LR, ".5e+1", 5.0),
        ("train.optimizer.max_grad_norm", -1, -1.0),
        ("train.optimizer.max_grad_norm", "-1e0", -1.0),
        (STEPS, "1e3", 1000),
        (STEPS, "1.5e1", 15),
        (STEPS, None, None),
        (STEPS, -1, -1),
        (STEPS, 0, 0),
        ("train.checkpoint.save_steps", 0, 0),
        ("train.accelerator.dp_shard", -1, -1),
        (BETAS, [0, "5e-1"], (0.0, 0.5)),
        ("train.optimizer.foreach", False, False),
        (CHECKPOINTING, "full", "full"),
        (CHECKPOINTING, False, "off"),
        (PARAM_DTYPE, "bf16", "bfloat16"),
        (PARAM_DTYPE, "fp16", "float16"),
        (PARAM_DTYPE, "float32", "float32"),
        (OUTPUT_DTYPE, "fp32", "float32"),
        (OUTPUT_DTYPE, None, None),
        ("model.freeze_modules", ["model.visual"], ["model.visual"]),
        ("model.freeze_modules", [], []),
        ("model.vision_parallel", None, None),
        ("model.vision_parallel", {}, VisionParallelConfig()),
        ("model.vision_parallel", {"dp_shard": 1}, VisionParallelConfig(dp_shard=1)),
        (
            "model.config_overrides",
            {"vl": True, "text_config": {"eps": "1e-6"}},
            {"vl": True, "text_config": {"eps": 1e-6}},
        ),
        ("train.optimizer", None, Config().train.optimizer),
    ],
)
def test_accepted(path, given_value, value):
    result = read(path, given_value)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "path,value,expected",
    [
        (STEPS, "three", '= "three": expected an integer or null (in run.yaml)'),
        (STEPS, 3.0, "= 3.0: expected an integer or null"),
        (STEPS, "15e-1", '= "15e-1": expected an integer or null'),
        (STEPS, "1e999", '= "1e999": expected an integer or null'),
        (STEPS, "3", '= "3": expected an integer or null'),
        ("train.seed", True, "= true: expected an integer (in run.yaml)"),
        ("train.seed", None, "= null: expected an integer"),
        (LR, True, "= true: expected a finite number"),
        (LR, "fast", '= "fast": expected a finite number'),
        (LR, float("inf"), "= Infinity: expected a finite number"),
        (LR, float("nan"), "= NaN: expected a finite number"),
        (LR, "1e999", '= "1e999": expected a finite number'),
        (LR, 10**400, ": expected a finite number"),
        ("data.shuffle", 1, "= 1: expected true or false"),
        ("data.shuffle", "yes", '= "yes": expected true or false'),
        ("data.text_key", 1, "= 1: expected a string"),
        ("data.train_path", ["a"], '= ["a"]: expected a string or null'),
        ("model.freeze_modules", "model.visual", '= "model.visual": expected a list of strings or null'),
        ("model.freeze_modules", [1], "= [1]: expected a list of strings or null"),
        ("model.config_overrides", [], "= []: expected a mapping with string keys or null"),
        ("model.config_overrides", {"text_config": {1: 2}}, ": expected a mapping with string keys or null"),
        (BETAS, [0.9], "= [0.9]: expected a list of 2 finite numbers"),
        (BETAS, 0.9, "= 0.9: expected a list of 2 finite numbers"),
        ("data.type", "parquet", '= "parquet": expected one of vl_dummy, json_file, hf_datasets'),
        ("data.type", ["vl_dummy"], '= ["vl_dummy"]: expected one of vl_dummy, json_file, hf_datasets'),
        ("train.backend", "mindspore", '= "mindspore": expected torch, the only choice'),
        ("train.optimizer.type", "sgd", '= "sgd": expected adamw, the only choice'),
        ("train.optimizer.loss_aggregation", "mean", "expected one of token_weighted, rank_average"),
        (PARAM_DTYPE, "int8", '= "int8": expected one of bfloat16, float16, float32'),
        (CHECKPOINTING, True, "= true: expected one of off, full, selective"),
        (CHECKPOINTING, 0, "= 0: expected one of off, full, selective"),
        ("model.expert_layout", "square", '= "square": expected one of hub, transposed or null'),
        ("train", 3, "= 3: expected a mapping (in run.yaml)"),
        ("train.optimizer", "adamw", '= "adamw": expected a mapping'),
        ("model.vision_parallel", 2, "= 2: expected a mapping"),
    ],
)
def test_wrong_type(path, value, expected):
    text = message(path, value)
    assert text.startswith(f"{path} = ")
    assert expected in text
    assert text.endswith("(in run.yaml)")


@pytest.mark.parametrize(
    "path,value,limit",
    [
        ("train.global_batch_size", 0, "greater than 0"),
        ("train.micro_batch_size", -1, "greater than 0"),
        ("train.num_train_epochs", 0, "greater than 0"),
        ("train.seed", -1, "at least 0"),
        ("data.max_seq_len", 0, "greater than 0"),
        ("data.num_workers", -1, "at least 0"),
        ("data.vl_grid_h", 0, "greater than 0"),
        ("model.hidden_size", 0, "greater than 0"),
        ("model.vision_parallel.dp_shard", -1, "at least 0"),
        ("train.accelerator.dp_shard", 0, "greater than 0, or -1"),
        ("train.accelerator.dp_shard", -2, "greater than 0, or -1"),
        ("train.accelerator.dp", -2, "greater than 0, or -1"),
        ("train.accelerator.tp", 0, "greater than 0"),
        (LR, 0, "greater than 0"),
        ("train.optimizer.lr_min", -1e-5, "at least 0"),
        ("train.optimizer.lr_warmup_ratio", 1.5, "between 0 and 1"),
        ("train.optimizer.lr_warmup_ratio", -0.1, "between 0 and 1"),
        (BETAS, [0.9, 1.0], "at least 0 and below 1"),
        (BETAS, [-0.1, 0.9], "at least 0 and below 1"),
        ("train.logging.log_steps", 0, "greater than 0"),
        ("train.eval.eval_steps", -1, "at least 0"),
    ],
)
def test_out_of_limits(path, value, limit):
    text = message(path, value)
    assert text.startswith(f"{path} = {value}: must be {limit}")
    assert text.endswith("(in run.yaml)")


def test_batch_sizes_must_divide():
    text = message("train", {"global_batch_size": 8, "micro_batch_size": 3})
    assert text == "train.global_batch_size = 8 is not a multiple of train.micro_batch_size = 3 (in run.yaml)"


def test_compiled_tensor_parallelism():
    text = message("train", {"compile": True, "accelerator": {"tp": 2}})
    assert text.startswith("train.compile: true with train.accelerator.tp = 2: ") and text.endswith("(in run.yaml)")
    assert read("train", {"compile": True, "accelerator": {"dp_shard": 2}}).compile


def test_lr_min_above_lr():
    text = message("train.optimizer", {"lr": "1e-6"})
    assert text == ("train.optimizer.lr_min = 1e-05 is above train.optimizer.lr = 1e-06: lower lr_min (in run.yaml)")
    assert read("train.optimizer", {"lr": 1e-5}).lr == 1e-5
    assert read("train.optimizer", {"lr": "1e-6", "lr_decay_style": "constant"}).lr == 1e-6


@pytest.mark.parametrize(
    "path,hint",
    [
        ("optimizer", "did you mean train.optimizer?"),
        ("trian", "did you mean train?"),
        ("zzz", "known are model, data, train"),
        ("train.max_step", "did you mean train.max_steps?"),
        ("train.lr", "did you mean train.optimizer.lr?"),
        ("train.optimizer.learning", "known are type, lr, lr_min"),
        ("train.optimizer.lr_mim", "did you mean train.optimizer.lr_min?"),
        ("model.vision_parallel.dpshard", "did you mean model.vision_parallel.dp_shard?"),
        ("train.checkpoint.retention", "known are output_dir, save_steps"),
        ("train.1", "known are max_steps"),
    ],
)
def test_unknown_key(path, hint):
    text = message(path, 1)
    assert text.startswith(f"unknown key {path}: {hint}")
    assert text.endswith("(in run.yaml)")


def test_unknown_key_that_is_no_string():
    with pytest.raises(ConfigError, match=r"unknown key train\.1: known are"):
        config_from_dict({"train": {1: 2}})


UNSUPPORTED = {path: declared for path, declared in iter_keys() if "accepts" in declared.metadata}


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_unsupported_key_accepts_its_default_only(path):
    declared = UNSUPPORTED[path]
    for accepted in declared.metadata["accepts"]:
        value = read(path, accepted)
        assert value == declared.default and type(value) is type(declared.default)
    for wrong in ("other", 2, 1.0, {}):
        assert message(path, wrong).startswith(f"{path} = ")
        assert "not supported by this Trainer (only " in message(path, wrong)


def test_unsupported_message():
    text = "train.accelerator.cp = 2: not supported by this Trainer (only 1) (in run.yaml)"
    assert message("train.accelerator.cp", 2) == text
    assert "(only 1)" in message("train.accelerator.cp", True)
    assert "(only null or false)" in message("data.streaming", True)
    assert "(only null or false)" in message("data.streaming", 0)


@pytest.mark.parametrize("name", ["wandb", "profile", "memory_monitor", "monitor", "moe_monitor"])
def test_disabled_feature(name):
    assert read(f"train.{name}", {"enabled": False, "log_steps": 50}) is None
    for wrong in ({"enabled": True}, {"log_steps": 50}, {"enabled": 0}, False):
        assert 'not supported by this Trainer (only null or {"enabled": false})' in message(f"train.{name}", wrong)


def test_linear_attention_keys():
    assert config_from_dict(nested("train.accelerator.linear_attention_mode", None)) == Config()
    assert message("train.accelerator.linear_attention_mode", "x") == (
        'train.accelerator.linear_attention_mode = "x": not supported by this Trainer (only null) (in run.yaml)'
    )


def test_old_name_of_dp_shard():
    assert config_from_dict(nested("train.accelerator.dp", 4)).train.accelerator.dp_shard == 4
    assert read("train.accelerator", {"dp": None, "dp_shard": 2}).dp_shard == 2
    for both in ({"dp": 2, "dp_shard": 2}, {"dp_shard": 2, "dp": 2}):
        assert message("train.accelerator", both) == (
            "train.accelerator.dp is the old name of train.accelerator.dp_shard: give one (in run.yaml)"
        )
    assert message("train.accelerator.dp", "all").startswith("train.accelerator.dp = ")


def test_the_given_mapping_is_neither_changed_nor_shared():
    tree = {"model": {"freeze_modules": ["model.visual"], "config_overrides": {"text_config": {"num_experts": 4}}}}
    before = copy.deepcopy(tree)
    config = config_from_dict(tree)
    plain = config.to_dict()
    plain["model"]["freeze_modules"].append("lm_head")
    plain["model"]["config_overrides"]["text_config"]["num_experts"] = 8
    assert tree == before == {"model": {k: config.to_dict()["model"][k] for k in before["model"]}}
    tree["model"]["freeze_modules"].append("lm_head")
    assert config.model.freeze_modules == ["model.visual"]


def test_config_needs_no_torch():
    code = "import sys, hyper_parallel.config_loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


texts = st.text(max_size=8)
positive = st.integers(1, 10**6)
finite = st.floats(allow_nan=False, allow_infinity=False)
free = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.sampled_from(["silu", "", "a.b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
overrides = st.fixed_dictionaries(
    {},
    optional={
        "model.name": texts,
        "model.weights_path": st.none() | texts,
        "model.freeze_modules": st.none() | st.lists(texts, max_size=3),
        "model.hidden_size": st.none() | positive,
        "model.config_overrides": st.none() | st.dictionaries(texts, free, max_size=3),
        "model.vision_parallel": st.none() | st.fixed_dictionaries({}, optional={"dp_shard": st.integers(0, 9)}),
        "model.expert_layout": st.sampled_from([None, "hub", "transposed"]),
        "data.type": st.sampled_from(["vl_dummy", "json_file", "hf_datasets"]),
        "data.shuffle": st.booleans(),
        "data.train_size": st.none() | positive,
        "train.max_steps": st.none() | st.integers(),
        "train.global_batch_size": positive,
        "train.accelerator.dp_shard": st.just(-1) | positive,
        "train.mixed_precision.output_dtype": st.sampled_from([None, "bf16", "fp16", "float32"]),
        "train.optimizer.lr": st.floats(1e-5, 1.0) | st.just(1),
        "train.optimizer.betas": st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
        "train.optimizer.max_grad_norm": finite,
        "train.optimizer.foreach": st.none() | st.booleans(),
        "train.checkpoint.load_path": st.none() | texts,
        "train.debug.gc_steps": st.integers(0, 9),
    },
)


@given(overrides)
def test_round_trip(flat):
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    config = config_from_dict(tree)
    plain = config.to_dict()
    assert config_from_dict(plain) == config
    assert config_from_dict(plain).to_dict() == plain
    for path, value in flat.items():
        found: Any = plain
        for name in path.split("."):
            found = found[name]
        if path == "model.vision_parallel" and value is not None:
            value = {"dp_shard": value.get("dp_shard", 0)}
        if path == "train.mixed_precision.output_dtype":
            value = {"bf16": "bfloat16", "fp16": "float16"}.get(value, value)
        assert found == value
