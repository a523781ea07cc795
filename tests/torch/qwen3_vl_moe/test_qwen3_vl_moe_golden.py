"""The parameter tree of the tiny and of the published 30B-A3B config, against golden files and against transformers.

After a change that is meant, rewrite the golden files with

    REWRITE_GOLDEN=1 python -m pytest tests/torch/qwen3_vl_moe/test_qwen3_vl_moe_golden.py

and review their diff.
"""

import os
from pathlib import Path

import pytest
import torch
from reference import tiny_config
from transformers import Qwen3VLMoeConfig as ReferenceConfig
from transformers import Qwen3VLMoeForConditionalGeneration

from qwen3vl_functional import Qwen3VLMoeConfig, param_specs
from qwen3vl_functional.spec import ParamSpec, count, leaves, matches

GOLDEN = Path(__file__).with_name("golden")
CONFIGS = {"tiny": tiny_config(), "30b": Qwen3VLMoeConfig()}

# What the hub's config.json of Qwen3-VL-30B-A3B-Instruct says about the architecture.
PUBLISHED = {
    "model_type": "qwen3_vl_moe",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "model_type": "qwen3_vl_moe",
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def line(path: str, spec: ParamSpec) -> str:
    dims = " ".join(f"{name}={size}" for name, size in zip(spec.dims, spec.shape, strict=True))
    init = f"normal({spec.std})" if spec.init == "normal" else spec.init
    return f"{path} [{dims}] {init} {'decay' if spec.decay else 'no-decay'}"


@pytest.mark.parametrize("name", CONFIGS)
def test_tree_is_golden(name) -> None:
    specs = param_specs(CONFIGS[name])
    lines = [line(path, spec) for path, spec in leaves(specs)] + [f"total {count(specs)}"]
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("REWRITE_GOLDEN") == "1":
        file.write_text("\n".join(lines) + "\n")
        pytest.skip(f"{file.name} rewritten; review the diff and run again without REWRITE_GOLDEN")
    assert file.read_text().splitlines() == lines


def test_defaults_are_the_published_model() -> None:
    assert Qwen3VLMoeConfig.from_dict(PUBLISHED) == Qwen3VLMoeConfig()


def test_published_counts() -> None:
    specs = dict(leaves(param_specs(Qwen3VLMoeConfig())))

    def total(*patterns: str) -> int:
        return sum(spec.numel for path, spec in specs.items() if not patterns or matches(path, patterns))

    assert total() == 31_070_754_032
    assert total("model.visual") == 538_631_408
    assert sum(spec.numel for spec in specs.values() if spec.dims[0] == "experts") == 28_991_029_248
    assert total("lm_head") == total("model.language_model.embed_tokens") == 311_164_928


@pytest.mark.parametrize("name", ["tiny", "tied", "dense", "30b"])
def test_names_and_shapes_are_the_references(name) -> None:
    """transformers builds the same tree (on the meta device); its experts lie transposed in memory."""
    cfg = {
        **CONFIGS,
        "tied": tiny_config(tied=True),
        "dense": tiny_config(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(1,)),
    }[name]
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(ReferenceConfig.from_dict(PUBLISHED if name == "30b" else cfg.to_dict()))
    theirs = {path: tuple(parameter.shape) for path, parameter in model.named_parameters()}
    ours = {}
    for path, spec in leaves(param_specs(cfg)):
        assert len(spec.dims) == len(spec.shape), path
        experts, *rest = spec.shape
        ours[path] = (experts, *reversed(rest)) if spec.dims[0] == "experts" else spec.shape
    assert ours == theirs


@pytest.mark.parametrize("name", CONFIGS)
def test_decay_and_initialisation_by_kind(name) -> None:
    """Matrices and tables are drawn and decayed; gains start at one, biases at zero, and neither is decayed."""
    for path, spec in leaves(param_specs(CONFIGS[name])):
        is_norm = "norm" in path.split(".")[-2]
        if path.endswith("bias"):
            assert (spec.init, spec.decay) == ("zeros", False), path
        elif is_norm:
            assert (spec.init, spec.decay) == ("ones", False), path
        else:
            assert (spec.init, spec.decay, spec.std) == ("normal", True, 0.02), path
