import json
from pathlib import Path

import pytest
import torch

TINY = json.loads((Path(__file__).parents[1] / "torch" / "qwen3_vl_moe" / "tiny_config.json").read_text())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def raw(tmp_path) -> dict:
    """A run of the tiny model on synthetic data, as a configuration file would say it."""
    overrides = {key: value for key, value in TINY.items() if key not in ("architectures", "model_type", "tie_word_embeddings")}
    return {
        "model": {"config_overrides": {"vl": True, **overrides}},
        "data": {"type": "vl_dummy", "max_seq_len": 24, "vl_grid_h": 4, "vl_grid_w": 4},
        "train": {
            "max_steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "optimizer": {"lr": 1e-2, "lr_warmup_ratio": 0.25},
            "checkpoint": {"output_dir": str(tmp_path / "run"), "save_steps": 0},
        },
    }
