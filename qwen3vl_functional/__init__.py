"""Qwen3-VL-MoE as a tree of tensors and pure functions.

Shapes are written as suffixes: ``B`` batch, ``T`` tokens, ``D`` text width, ``N`` query heads, ``G`` key-value heads, ``H`` head
dim (or half of it, in rotary tables), ``E`` experts, ``K`` experts per token, ``R`` routed rows, ``F`` expert width, ``V``
vocabulary, ``P`` vision patches, ``C`` values per patch, ``W`` vision width, ``M`` merged vision tokens. Inside the model the
tokens of all samples stand end to end (``x_TD``); padding is dropped before it enters.
"""

from .config import Qwen3VLMoeConfig, TextConfig, VisionConfig
from .hf import load_params, read_config, save_params
from .model import forward, param_specs
from .optim import AdamW
from .sharding import init_params
from .step import Recipe, TrainState, init_state, make_eval_step, make_train_step

__all__ = [
    "AdamW",
    "Qwen3VLMoeConfig",
    "Recipe",
    "TextConfig",
    "TrainState",
    "VisionConfig",
    "forward",
    "init_params",
    "init_state",
    "load_params",
    "make_eval_step",
    "make_train_step",
    "param_specs",
    "read_config",
    "save_params",
]
