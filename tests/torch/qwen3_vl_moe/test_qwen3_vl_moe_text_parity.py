"""The text decoder and the whole model against transformers: rungs, logits, loss and every parameter's gradient."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from reference import (
    assert_close,
    build_reference,
    check_rung,
    make_batch,
    reference_grads,
    reference_outputs,
    relative_error,
    tiny_config,
    tree_of,
)

from qwen3vl_functional import forward, moe
from qwen3vl_functional.collectives import Groups
from qwen3vl_functional.layers import segments
from qwen3vl_functional.positions import TextInputs, text_rotary
from qwen3vl_functional.spec import leaves
from qwen3vl_functional.step import Recipe, accumulate
from qwen3vl_functional.text import attention_half, dense_mlp, mlp_half
from qwen3vl_functional.transforms import LocalWeights

# Of cos and sin: both sides take the same fp32 angle, so only the last bit may differ.
TABLE_TOLERANCE = 1.2e-7
# Of logits and gradients of the whole model, relative to the largest logit and to each leaf's own largest gradient: no leaf
# here is zero by symmetry, and one that the loss does not reach (the tower, in a batch of text) must be exactly zero.
MODEL_TOLERANCE = 1e-5
# Of the loss, a mean of some ten to some hundred fp32 logarithms.
LOSS_TOLERANCE = 1e-6

IMAGE, VIDEO = ("image", (1, 4, 6)), ("video", (3, 4, 2))


# --- rungs -----------------------------------------------------------------------------------------------------------------


def text_inputs(lengths: list[int], cfg) -> TextInputs:
    """Two or more samples end to end; the three axes of their positions differ everywhere."""
    total, generator = sum(lengths), torch.Generator().manual_seed(2)
    positions = torch.randint(300, (3, total), generator=generator)
    cos, sin = text_rotary(positions, cfg.text)
    none = torch.zeros(0, dtype=torch.int64)
    rows = torch.arange(1, total, 3)
    return TextInputs(none, cos[:, None], sin[:, None], segments(lengths), rows, none, none, none)


def hidden(rows: int, cfg, *, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, cfg.text.hidden_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("section", [(4, 2, 2), (2, 3, 3), (24, 20, 20)])
def test_interleaved_mrope_tables(section) -> None:
    """Three axes with positions far beyond a prompt, B = 3 (which an exchange of axes and samples would survive)."""
    head_dim = 2 * sum(section)
    cfg = tiny_config(head_dim=head_dim, mrope_section=section)
    rotary = build_reference(cfg).model.language_model.rotary_emb
    positions_3BT = torch.randint(20000, (3, 3, 50), generator=torch.Generator().manual_seed(0))
    expected = rotary(torch.zeros(1), positions_3BT)
    ours = text_rotary(positions_3BT.flatten(1), cfg.text)
    for table, target in zip(ours, expected, strict=True):
        assert table.dtype == torch.float32
        assert (torch.cat((table, table), -1) - target.flatten(0, 1)).abs().max() <= TABLE_TOLERANCE


def test_router(model, cfg) -> None:
    gate, x_TD = model.model.language_model.layers[0].mlp.gate, hidden(70, cfg)
    routing = moe.route(gate.weight.detach(), x_TD, cfg.text)
    logits, _, experts_TK = gate(x_TD)
    assert torch.equal(routing.experts_TK, experts_TK)
    assert torch.equal(routing.count_E, torch.bincount(experts_TK.flatten(), minlength=cfg.text.num_experts))
    assert routing.count_E.sum() == 70 * cfg.text.num_experts_per_tok and logits.shape[1] == cfg.text.num_experts

    def ours(params, x_TD):
        routing = moe.route(params["weight"], x_TD, cfg.text)
        return routing.weights_TK, routing.prob_sum_E

    def theirs(x_TD):
        logits, weights_TK, _ = gate(x_TD)
        return weights_TK, logits.softmax(-1, dtype=torch.float32).sum(0)

    check_rung(gate, ours, theirs, x_TD)


KERNELS = ["grouped", "loop"]


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch) -> str:
    """Both ways to run the experts; which one runs is asserted, not assumed."""
    if request.param == "loop":
        monkeypatch.setattr(moe, "_can_group", lambda *_: False)
    elif not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    return request.param


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("num_chosen", [3, 5, 12])
def test_experts(model, cfg, kernel, rows, num_chosen) -> None:
    """Tokens confined to ``num_chosen`` of twelve experts: the others are empty and their gradient is exactly zero."""
    module, x_TD = model.model.language_model.layers[1].mlp.experts, hidden(rows, cfg)
    top, num_experts = cfg.text.num_experts_per_tok, cfg.text.num_experts
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randperm(num_experts, generator=generator)[:num_chosen]
    experts_TK = torch.stack([chosen[torch.randperm(num_chosen, generator=generator)[:top]] for _ in range(rows)])
    weights_TK = torch.rand(rows, top, generator=generator)
    count_E = torch.bincount(experts_TK.flatten(), minlength=num_experts)
    if kernel == "grouped":
        assert moe._can_group(x_TD, torch.zeros(1, cfg.text.hidden_size, 2 * cfg.text.moe_intermediate_size))

    def ours(params, x_TD, weights_TK):
        tensors = params["gate_up_proj"], params["down_proj"], x_TD, experts_TK, weights_TK
        return moe.run_experts(*tensors, first=0, count_E=count_E)

    grads = check_rung(module, ours, lambda x_TD, weights_TK: module(x_TD, experts_TK, weights_TK), x_TD, weights_TK)
    assert (count_E == 0).any() or num_chosen == 12
    for grad in grads.values():
        assert (grad[count_E == 0] == 0).all()


def test_experts_without_tokens(model, cfg, kernel) -> None:
    params, x_TD = tree_of(model.model.language_model.layers[1].mlp), hidden(0, cfg)
    (y_TD, _), pullback = torch.func.vjp(lambda p: (moe.moe(p, x_TD, cfg.text, Groups())[0], x_TD), params)
    assert y_TD.shape == (0, cfg.text.hidden_size)
    (grads,) = pullback((torch.zeros_like(y_TD), torch.zeros_like(x_TD)))
    assert all((grad == 0).all() for _, grad in leaves(grads))


def test_moe_layer(model, cfg, kernel) -> None:
    """Router and experts together: the gradient through the routing weights reaches both."""
    block = model.model.language_model.layers[2].mlp
    check_rung(
        block,
        lambda params, x_TD: moe.moe(params, x_TD, cfg.text, Groups())[0],
        lambda x_TD: block(x_TD[None])[0],
        hidden(70, cfg),
    )


def dense_config():
    """Layer 0 dense by its step, layer 1 by name, layer 2 dense by its step; layer 3 has experts."""
    return tiny_config(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(1,))


def test_dense_mlp() -> None:
    module = build_reference(dense_config()).model.language_model.layers[0].mlp
    check_rung(module, lambda params, x_TD: dense_mlp(params, x_TD, Groups()), module, hidden(11, dense_config()))


@pytest.mark.parametrize(
    "fields", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": (0, 2)}, {"decoder_sparse_step": 2, "mlp_only_layers": (1,)}]
)
def test_which_layers_have_experts(fields) -> None:
    cfg = tiny_config(num_hidden_layers=4, **fields)
    layers = build_reference(cfg).model.language_model.layers
    assert [cfg.text.is_moe_layer(i) for i in range(4)] == [hasattr(layer.mlp, "experts") for layer in layers]


@pytest.mark.parametrize("lengths", [[9], [5, 9], [7, 7], [1, 12, 3]])
@pytest.mark.parametrize("injected", [False, True], ids=["plain", "deepstack"])
@pytest.mark.parametrize("dense", [False, True], ids=["experts", "dense"])
def test_decoder_layer(model, cfg, lengths, injected, dense) -> None:
    """Packed samples are what the reference computes for each alone; then the layer's deepstack feature at visual rows."""
    if dense:
        cfg = dense_config()
        model = build_reference(cfg)
    text, layer = model.model.language_model, model.model.language_model.layers[1]
    inputs = text_inputs(lengths, cfg)
    if not injected:
        inputs = inputs._replace(visual_rows_M=torch.zeros(0, dtype=torch.int64))
    visual = torch.zeros(sum(lengths), dtype=torch.bool).index_fill(0, inputs.visual_rows_M, True)
    x_TD, feature_MD = hidden(sum(lengths), cfg), hidden(len(inputs.visual_rows_M), cfg, seed=8)

    def ours(params, x_TD, feature_MD):
        x_TD = attention_half(params["input_layernorm"], params["self_attn"], x_TD, inputs, cfg.text, Groups())
        feature = feature_MD if injected else None
        return mlp_half(params["post_attention_layernorm"], params["mlp"], x_TD, feature, inputs, cfg.text, Groups())[0]

    def theirs(x_TD, feature_MD):
        outputs, begin = [], 0
        for length in lengths:
            part = slice(begin, begin + length)
            mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
            tables = [torch.cat((table, table), -1)[part].transpose(0, 1) for table in (inputs.cos_T1H, inputs.sin_T1H)]
            outputs.append(layer(x_TD[None, part], attention_mask=mask, position_embeddings=tables))
            begin += length
        y_1TD = torch.cat(outputs, 1)
        return (text._deepstack_process(y_1TD, visual[None], feature_MD) if injected else y_1TD)[0]

    check_rung(layer, ours, theirs, x_TD, feature_MD)


# --- the whole model -------------------------------------------------------------------------------------------------------

PADDED = [[3, IMAGE, 9], [4, ("image", (1, 2, 8)), 2, VIDEO, 6], [5]]
CASES = {
    "one image": [[3, IMAGE, 12]],
    "several images a sample": [[3, IMAGE, 2, ("image", (1, 6, 4)), 5], [("image", (1, 2, 2)), ("image", (1, 8, 4)), 7]],
    "video": [[4, VIDEO, 11]],
    "image and video": [[3, IMAGE, 5, VIDEO, 4, ("image", (1, 2, 4)), 6]],
    "video before image": [[2, VIDEO, 3, IMAGE, 8], [4, IMAGE, 3, VIDEO, 5, ("video", (2, 2, 2)), 2]],
    "adjacent modalities": [[4, ("bare image", (1, 4, 2)), ("bare video", (1, 2, 6)), 9]],
    "image of two frames": [[4, ("image", (2, 4, 2)), 9]],
    "text only": [[17], [17]],
    "long": [[40, ("image", (1, 8, 12)), 300, VIDEO, 180], [520]],
    "three samples": [[3, IMAGE, 6], [6, IMAGE, 3], [2, ("image", (1, 4, 6)), 7]],
}


@dataclasses.dataclass(frozen=True)
class Case:
    samples: list
    padding_side: str = "right"
    text: dict = dataclasses.field(default_factory=dict)
    tied: bool = False


MODEL_CASES = {name: Case(samples) for name, samples in CASES.items()} | {
    "right padding": Case(PADDED),
    "left padding": Case(PADDED, "left"),
    "right padding, text only": Case([[9], [14], [2]]),
    "left padding, text only": Case([[9], [14], [2]], "left"),
    "tied embeddings": Case(PADDED, tied=True),
    # Both expert tensors square: a transposed matrix would still multiply.
    "square experts, gate and up": Case(PADDED, text={"moe_intermediate_size": 24}),
    "square experts, down": Case(PADDED, text={"moe_intermediate_size": 48}),
    "dense layers": Case(PADDED, text={"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": (1,)}),
    "load balance": Case(PADDED, "left", text={"output_router_logits": True, "router_aux_loss_coef": 0.7}),
    "load balance, dense layers": Case(
        PADDED,
        text={"num_hidden_layers": 4, "decoder_sparse_step": 2, "output_router_logits": True, "router_aux_loss_coef": 0.7},
    ),
}


@pytest.fixture(scope="module", params=MODEL_CASES, ids=lambda name: name.replace(",", "").replace(" ", "-"))
def solved(request):
    """Config, our tree, batch, the reference's outputs and gradients."""
    case = MODEL_CASES[request.param]
    cfg = tiny_config(tied=case.tied, **case.text)
    reference = build_reference(cfg)
    batch = make_batch(cfg, case.samples, padding_side=case.padding_side)
    outputs = reference_outputs(reference, batch)
    return cfg, tree_of(reference), batch, outputs, reference_grads(reference, outputs.loss)


def test_logits(solved) -> None:
    cfg, tree, batch, outputs, _ = solved
    keep = batch["attention_mask"].bool()
    result = forward(tree, batch, cfg)
    assert torch.equal(result.token_rows, keep.flatten().nonzero().flatten())
    assert_close(result.logits_TV, outputs.logits[keep].detach(), MODEL_TOLERANCE, "logits")


@pytest.mark.parametrize("remat", ["off", "full", "selective"])
def test_loss_and_every_gradient(solved, remat) -> None:
    cfg, tree, batch, outputs, target = solved
    assert {path for path, _ in leaves(tree)} == target.keys()
    loss, balance, num_targets, grads = accumulate(LocalWeights(tree), [batch], cfg, frozenset(target), Recipe(remat=remat))
    assert num_targets == (batch["labels"] >= 0).sum()
    assert_close(loss, outputs.loss.detach(), LOSS_TOLERANCE, "loss")
    if cfg.text.output_router_logits:
        assert_close(balance, outputs.aux_loss.detach(), LOSS_TOLERANCE, "load balance")
    else:
        assert balance is None
    assert grads.keys() == target.keys()
    errors = {path: relative_error(grads[path], grad) for path, grad in target.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= MODEL_TOLERANCE, f"{worst}: relative error {errors[worst]:.2e}"


def test_micro_batches_add_up() -> None:
    """Two batches of unequal target counts as one update: the reference's sum over both, divided once."""
    cfg = tiny_config()
    reference = build_reference(cfg)
    batches = [make_batch(cfg, PADDED), make_batch(cfg, CASES["video"], padding_side="left", seed=1)]
    counts = [int((batch["labels"] >= 0).sum()) for batch in batches]
    assert counts[0] != counts[1]
    losses = [reference_outputs(reference, batch | {"num_items_in_batch": sum(counts)}).loss for batch in batches]
    target = reference_grads(reference, torch.stack(losses).sum())
    loss, _, num_targets, grads = accumulate(LocalWeights(tree_of(reference)), batches, cfg, frozenset(target))
    assert num_targets == sum(counts)
    assert_close(loss, torch.stack(losses).sum().detach(), LOSS_TOLERANCE, "loss")
    for path, grad in target.items():
        assert_close(grads[path], grad, MODEL_TOLERANCE, path)
