"""Every configuration that the repository ships loads and describes a model."""

from pathlib import Path

import pytest

from hyper_parallel import models
from hyper_parallel.config_loader import load_config

FILES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_loads(path):
    load_config(["--config", str(path)])
    config = load_config(["--config", str(path), "--model.weights_path=null"])  # a template's path is there to be edited
    assert models.build(config).data_spec().vocab_size > 0


def test_there_are_examples():
    assert FILES
