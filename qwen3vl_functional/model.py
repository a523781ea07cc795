"""The model as a chain of blocks: patches -> tower -> mergers -> fused with the text -> decoder layers -> hidden rows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict

from .collectives import Groups
from .config import Qwen3VLMoeConfig
from .layers import Params, rms_norm
from .positions import Batch, Inputs, prepare
from .spec import SpecTree, leaves, weight
from .text import attention_half, embedding, mlp_half, text_specs
from .transforms import Block, LocalWeights, Values, run
from .vision import merger, patch_embed, vision_block, vision_specs

Remat = Literal["off", "full", "selective"]

VISION = "model.visual"
TEXT = "model.language_model"


def param_specs(cfg: Qwen3VLMoeConfig) -> SpecTree:
    """The whole tree; dotted paths are the names on the hub. A tied head has no leaf of its own."""
    model: SpecTree = {} if cfg.vision is None else {"visual": vision_specs(cfg.vision)}
    model["language_model"] = text_specs(cfg.text)
    if cfg.tie_word_embeddings:
        return {"model": model}
    head = weight((cfg.text.vocab_size, cfg.text.hidden_size), ("vocab", "embed"), cfg.text.initializer_range)
    return {"model": model, "lm_head": {"weight": head}}


def head_path(cfg: Qwen3VLMoeConfig) -> str:
    """Path of the leaf that turns hidden rows into logits."""
    return f"{TEXT}.embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"


def model_blocks(
    cfg: Qwen3VLMoeConfig, inputs: Inputs, groups: Groups = Groups(), *, rows: torch.Tensor | None = None, remat: Remat = "off"
) -> list[Block]:
    """The chain from pixels and ids to ``hidden``: the normed hidden states at ``rows`` (None: of every token).

    Other values it leaves: ``vision``, ``deepstack.<j>``, ``text``, and with ``output_router_logits`` the routers'
    ``router_prob.<layer>`` and ``router_count.<layer>`` (see ``moe.Routing``).
    """
    blocks = [] if cfg.vision is None else _vision_blocks(cfg, inputs, remat)
    blocks.append(_fuse_block(cfg, inputs, groups))
    for layer in range(cfg.text.num_hidden_layers):
        blocks += _decoder_blocks(cfg, layer, inputs, groups, remat)

    def final(norm: Params, x_TD: torch.Tensor) -> tuple[torch.Tensor]:
        x_TD = x_TD if rows is None else x_TD.index_select(0, rows)
        return (rms_norm(norm["weight"], x_TD, cfg.text.rms_norm_eps),)

    blocks.append(Block((f"{TEXT}.norm",), ("text",), ("hidden",), final))
    return blocks


def _vision_blocks(cfg: Qwen3VLMoeConfig, inputs: Inputs, remat: Remat) -> list[Block]:
    """Patch embedding, then one block a depth; a depth that deepstack taps also writes its merged feature."""
    vision, tower = cfg.vision, inputs.vision
    assert vision is not None and tower is not None

    def embed(proj: Params, table: Params) -> tuple[torch.Tensor]:
        return (patch_embed(proj, table, tower),)

    def block(params: Params, x_PW: torch.Tensor) -> tuple[torch.Tensor]:
        return (vision_block(params, x_PW, tower, vision),)

    def tapped(params: Params, tap: Params, x_PW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_PW = vision_block(params, x_PW, tower, vision)
        return x_PW, merger(tap, x_PW, vision, norm_merged=True)

    blocks = [Block((f"{VISION}.patch_embed.proj", f"{VISION}.pos_embed"), (), ("vision",), embed)]
    for i in range(vision.depth):
        path = f"{VISION}.blocks.{i}"
        if i in vision.deepstack_visual_indexes:
            j = vision.deepstack_visual_indexes.index(i)
            paths = (path, f"{VISION}.deepstack_merger_list.{j}")
            blocks.append(Block(paths, ("vision",), ("vision", f"deepstack.{j}"), tapped, remat == "full"))
        else:
            blocks.append(Block((path,), ("vision",), ("vision",), block, remat == "full"))
    return blocks


def _fuse_block(cfg: Qwen3VLMoeConfig, inputs: Inputs, groups: Groups) -> Block:
    """Embed the tokens and put the tower's merged output in the place of its placeholders."""
    text, vision = inputs.text, cfg.vision

    def embed(table: Params) -> tuple[torch.Tensor]:
        return (embedding(table["weight"], text.ids_T, groups),)

    def fuse(table: Params, params: Params, x_PW: torch.Tensor) -> tuple[torch.Tensor]:
        assert vision is not None
        (x_TD,) = embed(table)
        visual_MD = merger(params, x_PW, vision, norm_merged=False)
        return (x_TD.index_copy(0, text.visual_rows_M, visual_MD.to(x_TD.dtype)),)

    if vision is None:
        return Block((f"{TEXT}.embed_tokens",), (), ("text",), embed)
    return Block((f"{TEXT}.embed_tokens", f"{VISION}.merger"), ("vision",), ("text",), fuse)


def _decoder_blocks(cfg: Qwen3VLMoeConfig, layer: int, inputs: Inputs, groups: Groups, remat: Remat) -> list[Block]:
    """One block a layer, or with selective remat two: attention is kept, the experts are recomputed."""
    text, path = cfg.text, f"{TEXT}.layers.{layer}"
    num_features = 0 if cfg.vision is None else len(cfg.vision.deepstack_visual_indexes)
    features = (f"deepstack.{layer}",) if layer < num_features else ()
    reports = text.output_router_logits and text.is_moe_layer(layer)
    writes = ("text", f"router_prob.{layer}", f"router_count.{layer}") if reports else ("text",)

    def attention(norm: Params, attn: Params, x_TD: torch.Tensor) -> tuple[torch.Tensor]:
        return (attention_half(norm, attn, x_TD, inputs.text, text, groups),)

    def mlp(norm: Params, mlp: Params, x_TD: torch.Tensor, feature_MD: torch.Tensor | None = None) -> tuple:
        x_TD, routing = mlp_half(norm, mlp, x_TD, feature_MD, inputs.text, text, groups)
        return (x_TD, routing.prob_sum_E, routing.count_E.float()) if reports and routing else (x_TD,)

    def both(params: Params, x_TD: torch.Tensor, *feature_MD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (x_TD,) = attention(params["input_layernorm"], params["self_attn"], x_TD)
        return mlp(params["post_attention_layernorm"], params["mlp"], x_TD, *feature_MD)

    if remat != "selective":
        return [Block((path,), ("text", *features), writes, both, remat == "full")]
    return [
        Block((f"{path}.input_layernorm", f"{path}.self_attn"), ("text",), ("text",), attention),
        Block((f"{path}.post_attention_layernorm", f"{path}.mlp"), ("text", *features), writes, mlp, True),
    ]


class Outputs(NamedTuple):
    """Logits of every unmasked token, packed (T, V), where they stand in the flattened batch, and all named values."""

    logits_TV: torch.Tensor
    token_rows: torch.Tensor
    values: Values


def forward(
    params: TensorDict | dict[str, Any],
    batch: Batch,
    cfg: Qwen3VLMoeConfig,
    groups: Groups = Groups(),
    *,
    dtype: torch.dtype | None = None,
) -> Outputs:
    """Evaluate the model on a Hugging Face batch (see ``positions.prepare``); pure, so torch.func may transform it."""
    internals: Any = torch._C
    with internals._DisableFuncTorch():  # positions are worked out in numpy, which does not take what torch.func wraps
        inputs = prepare(batch, cfg)
    values = run(model_blocks(cfg, inputs, groups), LocalWeights(params, dtype))
    head = dict(leaves(params))[head_path(cfg)]
    assert groups.tp is None, "logits would be a part of the vocabulary: use the steps, which add up over ranks"
    return Outputs(F.linear(values["hidden"], head.to(values["hidden"].dtype)), inputs.text.token_rows, values)
