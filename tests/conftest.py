"""What several folders of tests start from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_config() -> dict:
    """config.json of a small model with every mechanism in it."""
    return json.loads((Path(__file__).parent / "torch" / "qwen3_vl_moe" / "tiny_config.json").read_text())


@pytest.fixture(scope="session")
def make_raw(tiny_config) -> Callable[[Path], dict]:
    """A run of the tiny model on synthetic data, as a configuration file would say it."""

    def make(output_dir: Path) -> dict:
        overrides = {key: value for key, value in tiny_config.items() if key.endswith(("_config", "_token_id"))}
        return {
            "model": {"config_overrides": {"vl": True, **overrides}},
            "data": {"type": "vl_dummy", "max_seq_len": 24, "vl_grid_h": 4, "vl_grid_w": 4},
            "train": {
                "max_steps": 4,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "optimizer": {"lr": 1e-2, "lr_warmup_ratio": 0.25},
                "checkpoint": {"output_dir": str(output_dir), "save_steps": 0},
            },
        }

    return make


@pytest.fixture(scope="session")
def sample() -> Path:
    """What the existing Trainer's own writer left, of the tiny model on 2 ranks; it lies beside the repository."""
    directory = Path(__file__).parents[2] / "shared" / "fixtures" / "existing_trainer"
    if not directory.is_dir():
        pytest.skip("the sample that the existing Trainer wrote is not beside the repository")
    return directory
