"""A small Qwen3-VL-MoE with random weights as a Hugging Face directory, to try whatever takes one; no network.

    python -m hyper_parallel.models.qwen3_vl_moe.make_tiny DIR [--seed N] [--layers N]

The tokenizer and the processor's settings are the published model's; the architecture is a small likeness with every mechanism
in it. The weights are large enough that each of them, and each pixel, counts in the loss.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qwen3vl_functional import Qwen3VLMoeConfig, TextConfig, VisionConfig, param_specs, save_params
from qwen3vl_functional.spec import ParamSpec, init_leaf, leaves, to_tensordict

from ...data.qwen_tokenizer import CHAT_TEMPLATE, write_qwen_tokenizer

GAIN = 2.0  # of matrices: how much larger the output is than the input
TABLE_STD = 0.5  # of token and position embeddings
VECTOR_STD = 0.2  # of biases around 0, and of norms around 1

# The published model's values; sizes are areas in pixels.
PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
FILES: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        **PATCHES,
    },
    "video_preprocessor_config.json": {
        "processor_class": "Qwen3VLProcessor",
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        **PATCHES,
    },
    "generation_config.json": {
        "bos_token_id": 151643,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    },
    "chat_template.json": {"chat_template": CHAT_TEMPLATE},  # the processor does not look into the tokenizer's settings
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hyper_parallel.models.qwen3_vl_moe.make_tiny",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write: absent or empty")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default 0)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="decoder layers (default 2)")
    args = parser.parse_args(argv)
    try:
        write_tiny(args.directory, seed=args.seed, layers=args.layers)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def tiny_config(layers: int = 2) -> Qwen3VLMoeConfig:
    """The published architecture with small sizes, all of which tp = 2 divides."""
    text = TextConfig(
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=5,  # most of them: a router row moves the loss only where its expert is among the chosen
        max_position_embeddings=4096,
        mrope_section=(4, 2, 2),
    )
    vision = VisionConfig(
        depth=3,
        hidden_size=32,
        intermediate_size=56,
        num_heads=4,
        out_hidden_size=text.hidden_size,
        num_position_embeddings=36,
        deepstack_visual_indexes=(0, 2)[:layers],  # each feature needs a decoder layer that takes it
    )
    return Qwen3VLMoeConfig(text, vision)


def write_tiny(directory: Path, *, seed: int = 0, layers: int = 2) -> None:
    """Write weights (fp32, about 60 MB), configuration, tokenizer and processor; the directory appears whole or not at all.

    The same seed gives the same weights. Raises ValueError if ``directory`` holds anything already, or without the package
    qwen-tokenizer.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory: name another, or remove it")
    cfg = tiny_config(layers)
    params = to_tensordict({path: _draw(path, spec, seed) for path, spec in leaves(param_specs(cfg))})
    with tempfile.TemporaryDirectory() as companions:
        write_qwen_tokenizer(companions)
        for name, content in FILES.items():
            (Path(companions) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        save_params(params, cfg, directory, companions=[companions])


def _draw(path: str, spec: ParamSpec, seed: int) -> torch.Tensor:
    """One leaf at this module's scales, from ``(seed, path)`` alone."""
    if len(spec.shape) == 1:
        mean, std = float(spec.init == "ones"), VECTOR_STD
    elif path.endswith(("embed_tokens.weight", "pos_embed.weight")):
        mean, std = 0.0, TABLE_STD
    else:  # experts are (experts, in, out), everything else (out, in...)
        fan_in = spec.shape[1] if spec.dims[0] == "experts" else math.prod(spec.shape[1:])
        mean, std = 0.0, GAIN * fan_in**-0.5
    return mean + init_leaf(path, spec._replace(init="normal", std=std), seed=seed)


if __name__ == "__main__":
    sys.exit(main())
