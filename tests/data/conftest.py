import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyper_parallel.data.processor import Processor
from hyper_parallel.data.spec import DataSpec

torch.set_num_threads(1)
EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3_vl_digits" / "prepare.py"


@pytest.fixture(scope="session")
def spec() -> DataSpec:
    return DataSpec(
        vocab_size=151936,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        vision=True,
        in_channels=3,
        patch_size=4,
        temporal_patch_size=2,
        spatial_merge_size=2,
    )


@pytest.fixture(scope="session")
def prepare_script() -> Path:
    return EXAMPLE


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """What the digits example writes."""
    out = tmp_path_factory.mktemp("digits")
    arguments, sys.argv = sys.argv, [str(EXAMPLE), "--out", str(out)]
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        sys.argv = arguments
    return out


@pytest.fixture(scope="session")
def processor(digits, spec) -> Processor:
    return Processor(digits / "model", spec)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """a.png 16x16, b.png 24x16, c.png 33x50 and frames f0..f4 24x16: noise, so that no two patches are alike."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    sizes = {"a": (16, 16), "b": (24, 16), "c": (33, 50)} | {f"f{i}": (24, 16) for i in range(5)}
    for name, size in sizes.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(root / f"{name}.png")
    return root
