"""The vision tower: patches to merged tokens as wide as the text, plus the deepstack features of chosen depths."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .config import VisionConfig
from .layers import Params, apply_rotary, attention, layer_norm, linear
from .positions import VisionInputs
from .spec import SpecTree, bias, norm, weight
from .spec import linear as linear_spec


def patch_embed_specs(cfg: VisionConfig) -> SpecTree:
    """The patch projection, stored as the convolution it is on the hub."""
    patch = (cfg.in_channels, cfg.temporal_patch_size, cfg.patch_size, cfg.patch_size)
    dims = ("vision_embed", "channels", "patch_time", "patch_height", "patch_width")
    return {
        "weight": weight((cfg.hidden_size, *patch), dims, cfg.initializer_range),
        "bias": bias(cfg.hidden_size, "vision_embed"),
    }


def patch_embed(params: Params, table: Params, inputs: VisionInputs) -> torch.Tensor:
    """Project flat patches (the convolution's kernel is its stride: a matmul) and add interpolated positions.

    The four taps are weighted and summed in fp32: in bf16 their weights alone would move a patch visibly.
    """
    proj, pos = params["weight"], table["weight"]
    x_PW = F.linear(inputs.patches_PC.to(proj.dtype), proj.flatten(1), params["bias"])
    taps_4PW = pos.index_select(0, inputs.tap_rows_4P.flatten()).unflatten(0, (4, -1))
    return x_PW + (taps_4PW * inputs.tap_weights_4P[..., None]).sum(0).to(x_PW.dtype)


def vision_block_specs(cfg: VisionConfig) -> SpecTree:
    """One pre-norm block; q, k and v lie end to end in one fused dim, which is why no model axis may cut it."""
    width, mlp, std = cfg.hidden_size, cfg.intermediate_size, cfg.initializer_range
    return {
        "norm1": norm(width, "vision_embed"),
        "norm2": norm(width, "vision_embed"),
        "attn": {
            "qkv": linear_spec(3 * width, width, ("qkv", "vision_embed"), std),
            "proj": linear_spec(width, width, ("vision_embed", "vision_heads"), std),
        },
        "mlp": {
            "linear_fc1": linear_spec(mlp, width, ("vision_mlp", "vision_embed"), std),
            "linear_fc2": linear_spec(width, mlp, ("vision_embed", "vision_mlp"), std),
        },
    }


def vision_block(params: Params, x_PW: torch.Tensor, inputs: VisionInputs, cfg: VisionConfig) -> torch.Tensor:
    """Attention within each frame, then the MLP (tanh GELU), each on a residual."""
    attn, mlp = params["attn"], params["mlp"]
    qkv = linear(attn["qkv"], layer_norm(params["norm1"], x_PW))
    qk, v = qkv.unflatten(1, (3 * cfg.num_heads, -1)).split((2 * cfg.num_heads, cfg.num_heads), dim=1)
    q, k = apply_rotary(qk, inputs.cos_P1H, inputs.sin_P1H).chunk(2, dim=1)
    x_PW = x_PW + linear(attn["proj"], attention(q, k, v, inputs.frames, causal=False))
    hidden = F.gelu(linear(mlp["linear_fc1"], layer_norm(params["norm2"], x_PW)), approximate="tanh")
    return x_PW + linear(mlp["linear_fc2"], hidden)


def merger_specs(cfg: VisionConfig, *, norm_merged: bool) -> SpecTree:
    """A patch merger; ``norm_merged``: the norm spans the merged row (deepstack) rather than each patch (final)."""
    wide, std = cfg.merged_size, cfg.initializer_range
    norm_spec = norm(wide, "vision_merged") if norm_merged else norm(cfg.hidden_size, "vision_embed")
    return {
        "norm": norm_spec,
        "linear_fc1": linear_spec(wide, wide, ("vision_merged", "vision_merged_in"), std),
        "linear_fc2": linear_spec(cfg.out_hidden_size, wide, ("embed", "vision_merged"), std),
    }


def merger(params: Params, x_PW: torch.Tensor, cfg: VisionConfig, *, norm_merged: bool) -> torch.Tensor:
    """Join each block of merge x merge patches into one token as wide as the text, (M, D), through an exact-GELU MLP."""
    if norm_merged:
        x_MW = layer_norm(params["norm"], x_PW.view(-1, cfg.merged_size))
    else:
        x_MW = layer_norm(params["norm"], x_PW).view(-1, cfg.merged_size)
    return linear(params["linear_fc2"], F.gelu(linear(params["linear_fc1"], x_MW)))


def vision_specs(cfg: VisionConfig) -> SpecTree:
    """The whole tower."""
    table = weight((cfg.num_position_embeddings, cfg.hidden_size), ("positions", "vision_embed"), cfg.initializer_range)
    return {
        "patch_embed": {"proj": patch_embed_specs(cfg)},
        "pos_embed": {"weight": table},
        "blocks": {str(i): vision_block_specs(cfg) for i in range(cfg.depth)},
        "merger": merger_specs(cfg, norm_merged=False),
        "deepstack_merger_list": {str(j): merger_specs(cfg, norm_merged=True) for j in range(len(cfg.deepstack_visual_indexes))},
    }
