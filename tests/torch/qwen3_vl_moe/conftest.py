import pytest
import reference
import torch
from transformers import Qwen3VLMoeForConditionalGeneration

from qwen3vl_functional import Qwen3VLMoeConfig

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cfg() -> Qwen3VLMoeConfig:
    return reference.tiny_config()


@pytest.fixture(scope="session")
def model(cfg) -> Qwen3VLMoeForConditionalGeneration:
    """The tiny config's reference; tests only read it."""
    return reference.build_reference(cfg)
