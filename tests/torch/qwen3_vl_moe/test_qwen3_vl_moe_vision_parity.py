"""The vision tower against transformers: every rung in values and gradients, then the whole tower."""

import pytest
import torch
from reference import RUNG_TOLERANCE, assert_close, check_rung, make_batch, reference_grads, relative_error, tree_of
from torch import nn
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as hf
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from qwen3vl_functional import forward
from qwen3vl_functional.layers import apply_rotary
from qwen3vl_functional.model import model_blocks
from qwen3vl_functional.positions import VisionInputs, interpolation_taps, merge_block_order, prepare, vision_rotary
from qwen3vl_functional.spec import leaves
from qwen3vl_functional.transforms import Block, LocalWeights, Loss, LossValue, value_and_grad
from qwen3vl_functional.vision import merger, patch_embed, vision_block

# Of cos and sin themselves: both sides take the same fp32 angle, so only the last bit may differ.
TABLE_TOLERANCE = 1.2e-7
# Of interpolation weights: both sides place patch i of n at i * (side - 1) / (n - 1) in fp32; only the product of the two
# axes' weights may round differently.
TAPS_TOLERANCE = 1.2e-7

GRIDS = {
    "one image": [("image", (1, 4, 10))],
    "equal images": [("image", (1, 4, 6)), ("image", (1, 4, 6))],
    "unequal images": [("image", (1, 2, 2)), ("image", (1, 10, 4)), ("image", (1, 6, 6)), ("image", (1, 14, 2))],
    "video": [("video", (3, 4, 6))],
    "mixed": [("video", (2, 6, 4)), ("image", (1, 8, 4)), ("video", (3, 2, 4)), ("image", (1, 4, 4))],
}


@pytest.fixture(params=GRIDS, ids=lambda name: name.replace(" ", "-"))
def batch(request, cfg) -> dict[str, torch.Tensor]:
    return make_batch(cfg, [[3, *GRIDS[request.param], 4]])


def grid_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """All grids in the tower's order: images, then videos."""
    return torch.cat([batch[f"{name}_grid_thw"] for name in ("image", "video") if f"{name}_grid_thw" in batch])


def vision_inputs(batch, cfg) -> VisionInputs:
    inputs = prepare(batch, cfg).vision
    assert inputs is not None
    return inputs


def hidden_like(inputs: VisionInputs, cfg) -> torch.Tensor:
    return torch.randn(len(inputs.patches_PC), cfg.vision.hidden_size, generator=torch.Generator().manual_seed(3))


def test_patch_embed_with_interpolated_positions(model, cfg, batch) -> None:
    visual, inputs, grid = model.model.visual, vision_inputs(batch, cfg), grid_of(batch)

    def theirs(patches_PC):
        rows, weights = get_vision_interpolation_indices_and_weights(
            grid,
            visual.num_grid_per_side,
            visual.interpolation_mode,
            visual.interpolation_align_corners,
            cfg.vision.spatial_merge_size,
        )
        return visual.patch_embed(patches_PC) + (visual.pos_embed(rows) * weights[..., None]).sum(1)

    def ours(params, patches_PC):
        return patch_embed(params["patch_embed"]["proj"], params["pos_embed"], inputs._replace(patches_PC=patches_PC))

    module = nn.ModuleDict({"patch_embed": visual.patch_embed, "pos_embed": visual.pos_embed})
    check_rung(module, ours, theirs, inputs.patches_PC)


@pytest.mark.parametrize("side", [6, 48])
def test_interpolation_taps_of_every_frame_size(side) -> None:
    """Per axis, from one block to beyond the table; compared as the dense map from table to patches."""
    for size in range(2, 72, 2):
        grid = torch.tensor([[1, size, 4]])
        rows, weights = get_vision_interpolation_indices_and_weights(grid, side, "bilinear", True, 2)
        taps, tap_weights = interpolation_taps(merge_block_order(size, 4, 2), (size, 4), side)
        dense = torch.zeros(size * 4, side**2).scatter_add_(1, taps.T, tap_weights.T.contiguous())
        expected = torch.zeros(size * 4, side**2).scatter_add_(1, rows, weights)
        assert (dense - expected).abs().max() <= TAPS_TOLERANCE, size


def test_rotary_tables(model, cfg, batch) -> None:
    visual, inputs, grid = model.model.visual, vision_inputs(batch, cfg), grid_of(batch)
    cos, sin = visual.rotary_pos_emb(inputs.patches_PC, get_vision_position_ids(grid, cfg.vision.spatial_merge_size))
    for ours, theirs in ((inputs.cos_P1H, cos), (inputs.sin_P1H, sin)):
        assert ours.dtype == torch.float32
        assert (torch.cat((ours, ours), -1)[:, 0] - theirs).abs().max() <= TABLE_TOLERANCE


def test_rotary_application() -> None:
    """Odd number of heads, a published head width, positions as large as a 4096-pixel side has."""
    rows_cols = torch.randint(256, (37, 2), generator=torch.Generator().manual_seed(0))
    cos, sin = vision_rotary(rows_cols, 72)
    q, k = torch.randn(2, 37, 3, 72, generator=torch.Generator().manual_seed(1))
    wide = [torch.cat((table, table), -1) for table in (cos, sin)]
    check_rung(
        nn.Module(),
        lambda _, q, k: tuple(apply_rotary(x, cos[:, None], sin[:, None]) for x in (q, k)),
        lambda q, k: hf.apply_rotary_pos_emb_vision(q, k, *wide),
        q,
        k,
    )


def test_block(model, cfg, batch) -> None:
    visual, inputs, grid = model.model.visual, vision_inputs(batch, cfg), grid_of(batch)
    lengths, longest = get_vision_attention_seqlens(grid, visual.config)
    tables = [torch.cat((table, table), -1)[:, 0] for table in (inputs.cos_P1H, inputs.sin_P1H)]
    check_rung(
        visual.blocks[1],
        lambda params, x_PW: vision_block(params, x_PW, inputs, cfg.vision),
        lambda x_PW: visual.blocks[1](x_PW, cu_seqlens=lengths, max_seqlen=longest, position_embeddings=tables),
        hidden_like(inputs, cfg),
    )


@pytest.mark.parametrize("which", ["merger", "deepstack"])
def test_mergers(model, cfg, batch, which) -> None:
    visual, deepstack = model.model.visual, which == "deepstack"
    module = visual.deepstack_merger_list[1] if deepstack else visual.merger
    x_PW = hidden_like(vision_inputs(batch, cfg), cfg)
    check_rung(module, lambda params, x: merger(params, x, cfg.vision, norm_merged=deepstack), module, x_PW)


def final_merger(params, x_PW, cfg):
    return merger(params, x_PW, cfg.vision, norm_merged=False)


@pytest.mark.parametrize("remat", ["off", "full"])
def test_whole_tower(model, cfg, batch, remat) -> None:
    """Merged tokens and every deepstack feature; gradients through the chain of blocks."""
    visual, inputs = model.model.visual, prepare(batch, cfg)
    outputs = visual(inputs.vision.patches_PC, grid_thw=grid_of(batch))
    names = ["visual", *(f"deepstack.{j}" for j in range(len(cfg.vision.deepstack_visual_indexes)))]
    expected = dict(zip(names, [outputs.pooler_output, *outputs.deepstack_features], strict=True))
    generator = torch.Generator().manual_seed(5)
    cotangents = {name: torch.randn(x.shape, generator=generator) for name, x in expected.items()}

    def loss(_, values) -> LossValue:
        total = sum((values[name] * cotangents[name]).sum() for name in names)
        return LossValue(total, dict(values), {}, cotangents)

    tree = {"model": {"visual": tree_of(visual)}}
    trainable = frozenset(path for path, _ in leaves(tree))
    tower = [block for block in model_blocks(cfg, inputs, remat=remat) if "vision" in block.writes]
    merge = Block(("model.visual.merger",), ("vision",), ("visual",), lambda params, x: (final_merger(params, x, cfg),))
    weights = LocalWeights(tree)
    values = value_and_grad([*tower, merge], Loss((), tuple(names), loss), weights, trainable).metrics
    grads = weights.finish()
    for name in names:
        assert_close(values[name], expected[name].detach(), RUNG_TOLERANCE, name)
    target = reference_grads(visual, sum((expected[name] * cotangents[name]).sum() for name in names))
    assert {f"model.visual.{name}" for name in target} == grads.keys()
    for name, grad in target.items():
        error = relative_error(grads[f"model.visual.{name}"], grad)
        assert error <= RUNG_TOLERANCE, (name, error)


def test_frames_do_not_see_each_other(model, cfg) -> None:
    """A video's features are those of its frames as separate images: in the reference and in ours."""
    video = make_batch(cfg, [[3, ("video", (3, 4, 6)), 4]])
    images = make_batch(cfg, [[3, *[("image", (1, 4, 6))] * 3, 4]])
    images["pixel_values"] = video["pixel_values_videos"]
    tree = tree_of(model)
    merge = tree["model"]["visual"]["merger"]
    ours = [final_merger(merge, forward(tree, batch, cfg).values["vision"], cfg) for batch in (video, images)]
    assert_close(ours[0], ours[1], RUNG_TOLERANCE, "ours")
    with torch.no_grad():
        theirs = model.model.visual(images["pixel_values"], grid_thw=images["image_grid_thw"]).pooler_output
    assert_close(ours[0], theirs, RUNG_TOLERANCE, "reference")
