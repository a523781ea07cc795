"""What the benchmarks share: two sizes, their batches, transformers' module on the same weights, and their FLOPs."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from qwen3vl_functional import Qwen3VLMoeConfig, TextConfig, VisionConfig, init_params, param_specs
from qwen3vl_functional.spec import leaves

LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0


class Case(NamedTuple):
    """A model size and a batch for it: ``samples`` sequences of ``tokens``, each with one square image."""

    name: str
    config: Qwen3VLMoeConfig
    samples: int
    tokens: int
    image_side: int  # pixels


def _ids(vocab: int) -> dict[str, Any]:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: vocab - 4 + i for i, name in enumerate(names)}


TINY = Case(
    "tiny",
    Qwen3VLMoeConfig(
        TextConfig(
            vocab_size=1024,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            mrope_section=(4, 2, 2),
        ),
        VisionConfig(
            depth=2,
            hidden_size=32,
            num_heads=2,
            intermediate_size=64,
            out_hidden_size=64,
            num_position_embeddings=16,
            deepstack_visual_indexes=(0, 1),
        ),
        **_ids(1024),
    ),
    samples=1,
    tokens=64,
    image_side=64,
)
SMALL = Case(
    "small",
    Qwen3VLMoeConfig(
        TextConfig(
            vocab_size=32000,
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=384,
            mrope_section=(12, 10, 10),
        ),
        VisionConfig(
            depth=6,
            hidden_size=384,
            num_heads=6,
            intermediate_size=1536,
            out_hidden_size=512,
            num_position_embeddings=2304,
            deepstack_visual_indexes=(1, 3, 5),
        ),
        **_ids(32000),
    ),
    samples=2,
    tokens=512,
    image_side=448,
)
CASES = {case.name: case for case in (TINY, SMALL)}


def make_batch(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """One image at the start of each sample; every text token that follows another text token is a target."""
    cfg, generator = case.config, torch.Generator().manual_seed(seed)
    assert cfg.vision is not None
    side = case.image_side // cfg.vision.patch_size
    merged = (side // cfg.vision.spatial_merge_size) ** 2
    ids = torch.randint(0, cfg.text.vocab_size - 4, (case.samples, case.tokens), generator=generator)
    ids[:, 0] = cfg.vision_start_token_id
    ids[:, 1 : 1 + merged] = cfg.image_token_id
    ids[:, 1 + merged] = cfg.vision_end_token_id
    labels = torch.where(ids == cfg.image_token_id, -100, ids)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "mm_token_type_ids": (ids == cfg.image_token_id).long(),
        "pixel_values": torch.randn(case.samples * side**2, cfg.vision.patch_values, generator=generator),
        "image_grid_thw": torch.tensor([[1, side, side]] * case.samples),
    }


def make_params(case: Case) -> Any:
    """Our randomly initialised tree."""
    return init_params(param_specs(case.config), seed=0)


def transformers_model(case: Case, params: Any, *, attention: str, experts: str = "grouped_mm") -> torch.nn.Module:
    """transformers' module holding copies of the same weights."""
    from transformers import Qwen3VLMoeConfig as ReferenceConfig
    from transformers import Qwen3VLMoeForConditionalGeneration

    config = ReferenceConfig.from_dict(case.config.to_dict())
    config._attn_implementation = attention
    config._experts_implementation = experts
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(config)
    model.to_empty(device="cpu")
    flat = dict(leaves(params))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = flat[name]
            parameter.copy_(leaf.transpose(1, 2) if "experts" in name else leaf)
    for module in model.modules():  # tables that are no parameters were left empty by to_empty
        if hasattr(module, "inv_freq"):
            module.__init__(module.config)  # pyright: ignore
    return model.train()


def step_flops(case: Case) -> float:
    """Matmul FLOPs that one training step needs: three times the forward, the output head on rows with a target only."""
    cfg, batch = case.config, make_batch(case)
    text, vision = cfg.text, cfg.vision
    assert vision is not None
    patches, tokens = len(batch["pixel_values"]), case.samples * case.tokens
    targets = int((batch["labels"][:, 1:] != -100).sum())
    width, merged = vision.hidden_size, vision.merged_size
    per_frame = patches // case.samples
    block = patches * (4 * width**2 + 2 * width * vision.intermediate_size + 2 * per_frame * width)
    mergers = (1 + len(vision.deepstack_visual_indexes)) * patches // vision.spatial_merge_size**2
    tower = patches * vision.patch_values * width + vision.depth * block + mergers * merged * (merged + text.hidden_size)
    heads = (2 * text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    attention = 2 * case.tokens / 2 * text.num_attention_heads * text.head_dim  # causal: half of the rectangle
    experts = text.num_experts_per_tok * 3 * text.moe_intermediate_size * text.hidden_size
    layer = tokens * (text.hidden_size * heads + attention + experts + text.num_experts * text.hidden_size)
    return 3 * 2 * (tower + text.num_hidden_layers * layer + targets * text.vocab_size * text.hidden_size)


def matmul_peak(dtype: torch.dtype, size: int = 2048, repeats: int = 5) -> float:
    """Best FLOP/s of a square matmul on this machine, now."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
