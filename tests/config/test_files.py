"""Files and command lines: what is read, what is refused, and which of the two an error names."""

import pytest

from hyper_parallel.config import Config
from hyper_parallel.config_loader import ConfigError, config_from_dict, load_config, read_yaml_file

RUN = """\
model:
  freeze_modules: [model.visual]
  config_overrides: {vl: true, text_config: {num_hidden_layers: 4, rms_norm_eps: 1e-6}}
data:
train:
  max_steps: 20
  optimizer: {lr: 1e-3, max_grad_norm: 1.0e9}
  gradient_checkpointing:
    activation_checkpoint: off
"""


@pytest.fixture
def run_yaml(tmp_path):
    """Writes a file and returns its path as the command line has it."""

    def write(text: str | bytes = RUN) -> str:
        path = tmp_path / "run.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def test_file(run_yaml):
    config = load_config(["--config", run_yaml()])
    assert config.train.max_steps == 20
    assert config.train.optimizer.lr == 1e-3
    assert config.train.optimizer.max_grad_norm == 1e9
    assert config.train.gradient_checkpointing.activation_checkpoint == "off"
    assert config.model.config_overrides == {"vl": True, "text_config": {"num_hidden_layers": 4, "rms_norm_eps": 1e-6}}
    assert config.data == Config().data
    assert load_config([f"--config={run_yaml()}"]) == config


def test_written_configuration_is_read_back(run_yaml):
    import yaml

    config = load_config(["--config", run_yaml()])
    assert load_config(["--config", run_yaml(yaml.safe_dump(config.to_dict()))]) == config


@pytest.mark.parametrize(
    "words,path,value",
    [
        (["--train.max_steps=3"], "train.max_steps", 3),
        (["--train.max_steps", "3"], "train.max_steps", 3),
        (["--train.max_steps", "-1"], "train.max_steps", -1),
        (["--train.max_steps=null"], "train.max_steps", None),
        (["--train.max_steps="], "train.max_steps", None),
        (["--train.max_steps=3", "--train.max_steps=4"], "train.max_steps", 4),
        (["--train.optimizer.lr", "2e-4"], "train.optimizer.lr", 2e-4),
        (["--train.optimizer.betas", "[0.8, 0.9]"], "train.optimizer.betas", (0.8, 0.9)),
        (["--train.checkpoint.output_dir=a=b"], "train.checkpoint.output_dir", "a=b"),
        (["--data.shuffle", "false"], "data.shuffle", False),
        (["--model.freeze_modules", "[lm_head, model.visual]"], "model.freeze_modules", ["lm_head", "model.visual"]),
        (["--model.config_overrides={vl: false}"], "model.config_overrides", {"vl": False}),
        (["--model.vision_parallel.dp_shard=1"], "model.vision_parallel.dp_shard", 1),
        (["--train.wandb.enabled=false"], "train.wandb", None),
        (["--train.optimizer={lr: 0.5}"], "train.optimizer.max_grad_norm", 1.0),
        (["--train.gradient_checkpointing.activation_checkpoint=off"], "train.gradient_checkpointing", None),
    ],
)
@pytest.mark.parametrize("config_first", [True, False])
def test_override(run_yaml, words, path, value, config_first):
    file = ["--config", run_yaml()]
    config = load_config([*file, *words] if config_first else [*words, *file])
    found = config
    for name in path.split("."):
        found = getattr(found, name)
    assert found == (Config().train.gradient_checkpointing if path == "train.gradient_checkpointing" else value)


def test_override_inside_free_mapping_keeps_the_rest(run_yaml):
    config = load_config(["--config", run_yaml(), "--model.config_overrides.text_config.num_hidden_layers=2"])
    assert config.model.config_overrides == {"vl": True, "text_config": {"num_hidden_layers": 2, "rms_norm_eps": 1e-6}}
    assert config.train.max_steps == 20


def test_override_of_an_anchor_changes_one_place(run_yaml):
    text = "model:\n  config_overrides:\n    text_config: &a {hidden_size: 8}\n    vision_config: *a\n"
    config = load_config(["--config", run_yaml(text), "--model.config_overrides.text_config.hidden_size=4"])
    assert config.model.config_overrides == {"text_config": {"hidden_size": 4}, "vision_config": {"hidden_size": 8}}


COMMAND_LINE = "(in the command line)"


@pytest.mark.parametrize(
    "words,text",
    [
        (["--train.max_step=3"], f"unknown key train.max_step: did you mean train.max_steps? {COMMAND_LINE}"),
        (["--train.lr", "3"], f"unknown key train.lr: did you mean train.optimizer.lr? {COMMAND_LINE}"),
        (["--optimizer.lr=1"], f"unknown key optimizer: did you mean train.optimizer? {COMMAND_LINE}"),
        (["--data.foo.bar=1"], "unknown key data.foo: "),
        (["--train.max_steps=many"], f'train.max_steps = "many": expected an integer or null {COMMAND_LINE}'),
        (["--train.optimizer.lr=0"], f"train.optimizer.lr = 0: must be greater than 0 {COMMAND_LINE}"),
        (
            ["--train.accelerator.cp=2"],
            f"train.accelerator.cp = 2: not supported by this Trainer (only 1) {COMMAND_LINE}",
        ),
        (["--train.max_steps.x=1"], "train.max_steps = 20 holds no keys: cannot set train.max_steps.x"),
        (["--train.max_steps=[1"], "--train.max_steps: not valid YAML: "),
        (["--train.optimizer={lr: 1, lr: 2}"], "duplicate key lr"),
        (["--train.max_steps"], "--train.max_steps has no value"),
        (["--train.max_steps", "--train.seed=1"], "--train.max_steps has no value"),
        (["--max_steps=3"], "unknown argument '--max_steps=3'"),
        (["train.max_steps=3"], "unknown argument 'train.max_steps=3'"),
        (["-train.max_steps=3"], "unknown argument '-train.max_steps=3'"),
    ],
)
def test_command_line_errors(run_yaml, words, text):
    with pytest.raises(ConfigError) as error:
        load_config(["--config", run_yaml(), *words])
    assert text in str(error.value)
    assert "command line" in str(error.value) or "--train" in str(error.value)


def test_errors_name_the_origin_of_the_value(run_yaml):
    path = run_yaml("train: {seed: -1, micro_batch_size: 2}")
    with pytest.raises(ConfigError) as error:
        load_config(["--config", path, "--train.max_steps=3"])
    assert str(error.value) == f"train.seed = -1: must be at least 0 (in {path})"
    with pytest.raises(ConfigError) as error:
        load_config(["--config", path, "--train.seed=1", "--train.global_batch_size=5"])
    assert str(error.value).endswith(f"(in {path} and the command line)")


@pytest.mark.parametrize(
    "text,expected",
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- train\n", "expected a mapping with the keys model, data and train"),
        ("train: [1\n", "not valid YAML"),
        ("train: {seed: 2020-13-45}\n", "not valid YAML"),
        ("train: {}\n---\ntrain: {}\n", "not valid YAML"),
        ("train: !!python/object:os.system {}\n", "not valid YAML"),
        ("train:\n  seed: 1\n  max_steps: 3\n  seed: 2\n", "duplicate key seed"),
        ("train: {}\ndata: {}\ntrain: {}\n", "duplicate key train"),
        ("model: {config_overrides: {text_config: {a: 1, a: 1}}}\n", "duplicate key a"),
        (b"train: {seed: \xff}\n", "cannot read the configuration file"),
    ],
)
def test_broken_file(run_yaml, text, expected):
    path = run_yaml(text)
    with pytest.raises(ConfigError) as error:
        load_config(["--config", path])
    assert expected in str(error.value) and path in str(error.value)


def test_duplicate_key_error_has_the_line(run_yaml):
    with pytest.raises(ConfigError, match="line 3"):
        load_config(["--config", run_yaml("train:\n  seed: 1\n  seed: 2\n")])


def test_merge_keys_are_no_duplicates(run_yaml):
    text = "model:\n  config_overrides:\n    a: &a {x: 1, y: 2}\n    b: {<<: *a, x: 3}\n"
    config = load_config(["--config", run_yaml(text)])
    assert config.model.config_overrides == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}


def test_missing_file_and_directory(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the configuration file") as error:
            read_yaml_file(str(path))
        assert str(path) in str(error.value)


@pytest.mark.parametrize("argv", [[], ["--config="], ["--train.seed=1"], ["--config", "a", "--config", "b"]])
def test_one_configuration_file(argv):
    with pytest.raises(ConfigError, match="expected one --config FILE"):
        load_config(argv)


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help(word, capsys):
    with pytest.raises(SystemExit) as exit_:
        load_config([word])
    assert exit_.value.code == 0
    assert "--config FILE" in capsys.readouterr().out


def test_config_error_is_a_value_error():
    with pytest.raises(ValueError, match=r"\(in somewhere\)"):
        config_from_dict({"trian": {}}, source="somewhere")
