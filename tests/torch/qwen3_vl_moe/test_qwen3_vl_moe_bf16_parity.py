"""bf16 in flight over fp32 weights: no further from the fp32 result than transformers' own bf16 model is.

Two bf16 computations of one quantity differ by their roundings, so neither can be the other's target. Both are measured
against the fp32 result; the weights hold bf16 values to begin with, so all of the distance is the computation's. Errors are
pooled over several models and batches, because any one draw may favour either side.
"""

import copy
import math
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from reference import assert_close, build_reference, make_batch, reference_grads, reference_outputs, tiny_config, tree_of
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as hf
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from qwen3vl_functional import forward, moe
from qwen3vl_functional.layers import apply_rotary, rms_norm
from qwen3vl_functional.positions import prepare
from qwen3vl_functional.step import accumulate
from qwen3vl_functional.transforms import LocalWeights
from qwen3vl_functional.vision import patch_embed

NUM_DRAWS = 8
SAMPLES = [[3, ("image", (1, 4, 6)), 9], [4, ("image", (1, 2, 8)), 2, ("video", (3, 4, 2)), 6], [5], [60]]

# Our error over theirs, root mean square over many thousand numbers. Both round after the same operations, so about 1 is
# expected; over 64 draws it is 0.95, over any 8 of them between 0.93 and 0.97.
POOLED_FACTOR = 1.05
# The same for few numbers: a norm's gain has some dozens that share their rounding, 8 draws of it move by about
# 1 / sqrt(8) = 35 %.
FEW_FACTOR = 1.5
# Our loss against the fp32 cross entropy of our own bf16 logits: equal but for fp32 summation (1e-7 here); the head multiplies
# only the rows that have a target, so elsewhere a kernel may round one logit among thousands to the other neighbour.
LOSS_TOLERANCE = 1e-5
# Of the numbers of an elementwise rung: ours take the same roundings at the same places as the reference's, so they are equal
# but for a fp32 sum of a few terms in another order that ends next to the middle of two bf16 values.
UNEQUAL_SHARE = 1e-3


def with_dtype(model, dtype: torch.dtype):
    """A copy with its parameters cast. Not ``model.to``: that would round the rotary frequencies too, which loading a bf16
    checkpoint does not."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def draw(cfg, seed: int):
    """A bf16 reference, the same weights as an fp32 reference, and a batch."""
    half = with_dtype(build_reference(cfg, seed=seed), torch.bfloat16)
    return half, with_dtype(half, torch.float32), make_batch(cfg, SAMPLES, seed=seed)


class Errors:
    """Squared distances from the fp32 result, ours and theirs, by quantity."""

    def __init__(self) -> None:
        self.ours: dict[str, float] = defaultdict(float)
        self.theirs: dict[str, float] = defaultdict(float)

    def add(self, name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
        # Over the norm of the exact value, so that no draw outweighs the others.
        norm = exact.double().norm()
        self.ours[name] += float(((ours.double() - exact) / norm).square().sum())
        self.theirs[name] += float(((theirs.double() - exact) / norm).square().sum())

    def quotient(self, name: str) -> float:
        return math.sqrt(self.ours[name] / self.theirs[name])


def test_logits_loss_and_gradients() -> None:
    """Every expert is chosen, so that rounding cannot change a choice (see the next test)."""
    cfg = tiny_config(num_experts_per_tok=tiny_config().text.num_experts)
    errors = Errors()
    for seed in range(NUM_DRAWS):
        half, full, batch = draw(cfg, seed)
        keep = batch["attention_mask"].bool()
        exact, theirs = reference_outputs(full, batch), reference_outputs(half, batch)
        exact_grads, their_grads = reference_grads(full, exact.loss), reference_grads(half, theirs.loss)
        tree = tree_of(full)
        logits_TV = forward(tree, batch, cfg, dtype=torch.bfloat16).logits_TV
        sums = accumulate(LocalWeights(tree, torch.bfloat16), [batch], cfg, frozenset(exact_grads))
        loss, grads = sums.loss, sums.grads
        assert logits_TV.dtype == torch.bfloat16
        assert all(grad.dtype == torch.float32 for grad in grads.values())

        text = prepare(batch, cfg).text
        all_logits = logits_TV, theirs.logits[keep].detach(), exact.logits[keep].detach()
        token_losses = [F.cross_entropy(x[text.target_rows].float(), text.targets, reduction="none") for x in all_logits]
        assert abs(loss - token_losses[0].mean()) <= LOSS_TOLERANCE * loss, (loss, token_losses[0].mean())
        errors.add("logits", *all_logits)
        errors.add("token losses", *token_losses)
        errors.add("gradients", *(_flat(tree) for tree in (grads, their_grads, exact_grads)))
        for path, grad in exact_grads.items():
            errors.add(path, grads[path], their_grads[path], grad)

    for name in ("logits", "token losses", "gradients"):
        assert errors.quotient(name) <= POOLED_FACTOR, (name, errors.quotient(name))
    worst = max(errors.ours, key=errors.quotient)
    assert errors.quotient(worst) <= FEW_FACTOR, (worst, errors.quotient(worst))


def test_choice_of_experts(monkeypatch) -> None:
    """Rounding moves a token across the edge between chosen and not chosen experts as rarely as in the reference."""
    cfg = tiny_config()
    chosen: list[torch.Tensor] = []

    def recording(*args) -> moe.Routing:
        routing = route(*args)
        chosen.append(_mask(routing.experts_TK, cfg.text.num_experts))
        return routing

    route = moe.route
    monkeypatch.setattr(moe, "route", recording)
    ours_changed = theirs_changed = 0
    for seed in range(NUM_DRAWS):
        half, full, batch = draw(cfg, seed)
        rows = batch["attention_mask"].bool().flatten()
        exact, theirs = (
            [
                _mask(
                    logits_TE[rows].softmax(-1, dtype=torch.float32).topk(cfg.text.num_experts_per_tok).indices,
                    cfg.text.num_experts,
                )
                for logits_TE in reference_outputs(model, batch | {"output_router_logits": True}).router_logits
            ]
            for model in (full, half)
        )
        chosen.clear()
        forward(tree_of(full), batch, cfg, dtype=torch.bfloat16)
        ours_changed += sum(int((a != b).any(1).sum()) for a, b in zip(chosen, exact, strict=True))
        theirs_changed += sum(int((a != b).any(1).sum()) for a, b in zip(theirs, exact, strict=True))
    assert theirs_changed > 0
    assert ours_changed <= FEW_FACTOR * theirs_changed, (ours_changed, theirs_changed)


def unequal(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.bfloat16
    return float((ours != theirs).float().mean())


@pytest.fixture(scope="module")
def half(model):
    return with_dtype(model, torch.bfloat16)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_rms_norm_rounds_where_the_reference_does(half, cfg) -> None:
    norm, x_TD = half.model.language_model.norm, 3 * normal(200, cfg.text.hidden_size)
    assert unequal(rms_norm(norm.weight, x_TD, cfg.text.rms_norm_eps), norm(x_TD)) <= UNEQUAL_SHARE


def test_text_rotation_rounds_where_the_reference_does() -> None:
    """In bf16, with tables rounded after cos and sin."""
    q, k = normal(2, 1, 3, 500, 16)
    angles = 100 * torch.rand(500, 8, generator=torch.Generator().manual_seed(1))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    theirs = hf.apply_rotary_pos_emb(q, k, *(torch.cat((table, table), -1)[None] for table in (cos, sin)))
    for x, target in zip((q, k), theirs, strict=True):
        assert unequal(apply_rotary(x[0].transpose(0, 1), cos[:, None], sin[:, None]), target[0].transpose(0, 1)) <= UNEQUAL_SHARE


def test_vision_rotation_rounds_where_the_reference_does() -> None:
    """In fp32, rounded once at its end."""
    q, k = normal(2, 500, 3, 16)
    angles = 100 * torch.rand(500, 8, generator=torch.Generator().manual_seed(1))
    cos, sin = angles.cos(), angles.sin()
    theirs = hf.apply_rotary_pos_emb_vision(q, k, *(torch.cat((table, table), -1) for table in (cos, sin)))
    for x, target in zip((q, k), theirs, strict=True):
        assert unequal(apply_rotary(x, cos[:, None], sin[:, None]), target) <= UNEQUAL_SHARE


def test_interpolated_positions_round_where_the_reference_does(half, cfg) -> None:
    """Weights and sum of the taps in fp32, rounded once; black patches leave nothing but the positions and the bias."""
    visual = half.model.visual
    batch = make_batch(cfg, [[3, ("image", (1, 10, 4)), ("image", (1, 8, 14)), 4]])
    inputs = prepare(batch, cfg).vision
    black = inputs._replace(patches_PC=torch.zeros_like(inputs.patches_PC))
    params = tree_of(visual)
    rows, weights = get_vision_interpolation_indices_and_weights(
        batch["image_grid_thw"], visual.num_grid_per_side, "bilinear", True, cfg.vision.spatial_merge_size
    )
    positions = (visual.pos_embed(rows) * weights[..., None]).sum(1)
    theirs = visual.patch_embed(black.patches_PC) + positions.bfloat16()
    assert unequal(patch_embed(params["patch_embed"]["proj"], params["pos_embed"], black), theirs) <= UNEQUAL_SHARE


def test_router_rounds_where_the_reference_does(half, cfg) -> None:
    """Softmax, choice and renormalisation in fp32 over bf16 logits."""
    gate, x_TD = half.model.language_model.layers[0].mlp.gate, normal(200, cfg.text.hidden_size)
    routing = moe.route(gate.weight, x_TD, cfg.text)
    logits_TE, weights_TK, experts_TK = gate(x_TD)
    # Equal bf16 logits tie, and topk may break a tie either way.
    tied = (logits_TE.gather(1, routing.experts_TK) == logits_TE.gather(1, experts_TK)).all(1)
    assert tied.all()
    assert unequal(routing.weights_TK, weights_TK) <= UNEQUAL_SHARE
    expected = logits_TE.softmax(-1, dtype=torch.float32).sum(0)
    assert routing.prob_sum_E.dtype == torch.float32
    assert_close(routing.prob_sum_E, expected.detach(), 1e-6, "summed probabilities")


def _mask(experts_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.zeros(len(experts_TK), num_experts, dtype=torch.bool).scatter_(1, experts_TK, True)


def _flat(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([grads[path].float().flatten() for path in sorted(grads)])
