"""The text decoder: attention with normed queries and keys, experts or a dense MLP, deepstack injection."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .collectives import Groups, all_reduce, axis_rank, replicated_to_varying
from .config import TextConfig
from .layers import Params, apply_rotary, attention, linear, rms_norm
from .moe import Routing, moe, moe_specs
from .positions import TextInputs
from .spec import SpecTree, scale, weight


def embedding(table_VD: torch.Tensor, ids_T: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Rows of the table (T, D); under tp each rank has part of the vocabulary and the others' rows are added."""
    if groups.tp is None:
        return F.embedding(ids_T, table_VD)
    local = ids_T - axis_rank(groups.tp) * len(table_VD)
    mine = (local >= 0) & (local < len(table_VD))
    return all_reduce(F.embedding(torch.where(mine, local, 0), table_VD) * mine[:, None], groups.tp)


def self_attention_specs(cfg: TextConfig) -> SpecTree:
    """Projections without bias; the head dims are cut by whole heads."""
    std, embed, q, kv = cfg.initializer_range, cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads
    return {
        "q_proj": {"weight": weight((q * cfg.head_dim, embed), ("q_heads", "embed"), std, unit=cfg.head_dim)},
        "k_proj": {"weight": weight((kv * cfg.head_dim, embed), ("kv_heads", "embed"), std, unit=cfg.head_dim)},
        "v_proj": {"weight": weight((kv * cfg.head_dim, embed), ("kv_heads", "embed"), std, unit=cfg.head_dim)},
        "o_proj": {"weight": weight((embed, q * cfg.head_dim), ("embed", "q_heads"), std, unit=cfg.head_dim)},
        "q_norm": {"weight": scale(cfg.head_dim, "head_dim")},
        "k_norm": {"weight": scale(cfg.head_dim, "head_dim")},
    }


def self_attention(params: Params, x_TD: torch.Tensor, inputs: TextInputs, cfg: TextConfig, groups: Groups) -> torch.Tensor:
    """Causal attention inside each sample; under tp each rank has some of the heads and the outputs are added up."""
    x_TD = replicated_to_varying(x_TD, groups.tp)
    # One matmul, one norm and one rotation for all heads: small operations cost what they are, not what they compute.
    qkv = F.linear(x_TD, torch.cat([params[f"{name}_proj"]["weight"] for name in "qkv"])).unflatten(1, (-1, cfg.head_dim))
    num_kv = params["k_proj"]["weight"].shape[0] // cfg.head_dim
    num_q = qkv.shape[1] - 2 * num_kv
    qk, v_TGH = qkv.split((num_q + num_kv, num_kv), dim=1)
    q_gain, k_gain = (replicated_to_varying(params[name]["weight"], groups.tp) for name in ("q_norm", "k_norm"))
    gain = torch.cat((q_gain.expand(num_q, -1), k_gain.expand(num_kv, -1)))
    cos, sin = (table.to(x_TD.dtype) for table in (inputs.cos_T1H, inputs.sin_T1H))
    q_TNH, k_TGH = apply_rotary(rms_norm(gain, qk, cfg.rms_norm_eps), cos, sin).split((num_q, num_kv), dim=1)
    y_TD = linear(params["o_proj"], attention(q_TNH, k_TGH, v_TGH, inputs.samples, causal=True))
    return all_reduce(y_TD, groups.tp)


def dense_mlp_specs(cfg: TextConfig) -> SpecTree:
    """The gated MLP of a layer without experts."""
    std, embed, mlp = cfg.initializer_range, cfg.hidden_size, cfg.intermediate_size
    return {
        "gate_proj": {"weight": weight((mlp, embed), ("mlp", "embed"), std)},
        "up_proj": {"weight": weight((mlp, embed), ("mlp", "embed"), std)},
        "down_proj": {"weight": weight((embed, mlp), ("embed", "mlp"), std)},
    }


def dense_mlp(params: Params, x_TD: torch.Tensor, groups: Groups) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))``; under tp each rank has part of the width and the outputs are added up."""
    x_TD = replicated_to_varying(x_TD, groups.tp)
    hidden = F.silu(linear(params["gate_proj"], x_TD)) * linear(params["up_proj"], x_TD)
    return all_reduce(linear(params["down_proj"], hidden), groups.tp)


def decoder_layer_specs(cfg: TextConfig, layer: int) -> SpecTree:
    """One decoder layer; whether it has experts depends on its index."""
    return {
        "self_attn": self_attention_specs(cfg),
        "mlp": moe_specs(cfg) if cfg.is_moe_layer(layer) else dense_mlp_specs(cfg),
        "input_layernorm": {"weight": scale(cfg.hidden_size, "embed")},
        "post_attention_layernorm": {"weight": scale(cfg.hidden_size, "embed")},
    }


def attention_half(
    norm: Params, attn: Params, x_TD: torch.Tensor, inputs: TextInputs, cfg: TextConfig, groups: Groups
) -> torch.Tensor:
    """``x + attention(norm(x))``."""
    normed = rms_norm(norm["weight"], x_TD, cfg.rms_norm_eps)
    return x_TD + self_attention(attn, normed, inputs, cfg, groups)


def mlp_half(
    norm: Params,
    mlp: Params,
    x_TD: torch.Tensor,
    feature_MD: torch.Tensor | None,
    inputs: TextInputs,
    cfg: TextConfig,
    groups: Groups,
) -> tuple[torch.Tensor, Routing | None]:
    """``x + mlp(norm(x))``, then the layer's deepstack feature (if it has one) added at the visual tokens."""
    normed = rms_norm(norm["weight"], x_TD, cfg.rms_norm_eps)
    if "experts" in mlp:
        y_TD, routing = moe(mlp, normed, cfg, groups)
    else:
        y_TD, routing = dense_mlp(mlp, normed, groups), None
    x_TD = x_TD + y_TD
    if feature_MD is not None:
        x_TD = x_TD.index_add(0, inputs.visual_rows_M, feature_MD.to(x_TD.dtype))
    return x_TD, routing


def text_specs(cfg: TextConfig) -> SpecTree:
    """Embedding, layers and the final norm."""
    table = weight((cfg.vocab_size, cfg.hidden_size), ("vocab", "embed"), cfg.initializer_range)
    return {
        "embed_tokens": {"weight": table},
        "layers": {str(i): decoder_layer_specs(cfg, i) for i in range(cfg.num_hidden_layers)},
        "norm": {"weight": scale(cfg.hidden_size, "embed")},
    }
