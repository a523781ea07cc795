import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from saved import save_small

settings.register_profile("checkpoint", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("checkpoint")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    """A run with checkpoints of steps 1, 2 and 3; never changed."""
    output_dir = tmp_path_factory.mktemp("written")
    save_small(output_dir, 1, 2, 3)
    return output_dir


@pytest.fixture
def run(written, tmp_path) -> Path:
    """A copy to damage."""
    return shutil.copytree(written, tmp_path / "run")
