import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from qwen3vl_functional import Qwen3VLMoeConfig, param_specs
from qwen3vl_functional.spec import leaves, to_tensordict

torch.set_num_threads(1)
settings.register_profile("functional", deadline=None, derandomize=True)
settings.load_profile("functional")

TINY = Path(__file__).parents[1] / "torch" / "qwen3_vl_moe" / "tiny_config.json"


@pytest.fixture(scope="session")
def cfg() -> Qwen3VLMoeConfig:
    return Qwen3VLMoeConfig.from_dict(json.loads(TINY.read_text()))


@pytest.fixture(scope="session")
def balanced_cfg(cfg) -> Qwen3VLMoeConfig:
    """The load balance is on, and weighs enough to be seen."""
    return dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, output_router_logits=True, router_aux_loss_coef=0.5))


@pytest.fixture(scope="session")
def text_cfg(cfg) -> Qwen3VLMoeConfig:
    return dataclasses.replace(cfg, vision=None)


@pytest.fixture(scope="session")
def make_params():
    """Random weights, norms and biases included, large enough for confident routers and logits."""

    def make(cfg, *, seed=0, std=0.1):
        generator = torch.Generator().manual_seed(seed)
        flat = {}
        for path, spec in leaves(param_specs(cfg)):
            flat[path] = torch.randn(spec.shape, generator=generator) * std + (spec.init == "ones")
        return to_tensordict(flat)

    return make


@pytest.fixture(scope="session")
def make_batch():
    """Right-padded samples of text; with ``images``, each holds an image of 1 x 4 x 6 patches and the last one a video too."""

    def make(cfg, *, seed=0, text_lengths=(9, 4), images=True):
        generator = torch.Generator().manual_seed(seed)
        samples, grids, frames = [], [], []
        for i, length in enumerate(text_lengths):
            ids = torch.randint(0, 300, (length,), generator=generator).tolist()
            if images:
                ids[2:2] = [cfg.vision_start_token_id] + [cfg.image_token_id] * 6 + [cfg.vision_end_token_id]
                grids.append([1, 4, 6])
                if i == len(text_lengths) - 1:
                    ids += [7] + [cfg.video_token_id] * 4 + [8] + [cfg.video_token_id] * 4 + [9, 10]
                    frames.append([2, 4, 4])
            samples.append(ids)
        longest = max(len(ids) for ids in samples)
        batch = {
            "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids in samples]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in samples]),
        }
        text = (batch["input_ids"] < 300) & batch["attention_mask"].bool()
        batch["labels"] = torch.where(text, batch["input_ids"], -100)
        for name, sizes in (("", grids), ("_videos", frames)):
            if sizes:
                patches = sum(t * h * w for t, h, w in sizes)
                batch[f"pixel_values{name}"] = torch.randn(patches, cfg.vision.patch_values, generator=generator)
                batch["image_grid_thw" if not name else "video_grid_thw"] = torch.tensor(sizes)
        return batch

    return make
