"""The routers' load balance in the step: its value, and gradients against finite differences."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from qwen3vl_functional import forward, param_specs
from qwen3vl_functional import moe as moe_module
from qwen3vl_functional.spec import leaves, to_tensordict
from qwen3vl_functional.step import accumulate
from qwen3vl_functional.transforms import LocalWeights


def flat(params):
    return dict(leaves(params))


def gradients(params, batches, cfg):
    """Loss, load balance, number of targets and gradients, everything trained."""
    return accumulate(LocalWeights(params), batches, cfg, frozenset(path for path, _ in leaves(param_specs(cfg))))


@pytest.fixture(scope="module")
def params(cfg, make_params):
    return make_params(cfg)


def pooled_balance(params, batch, cfg):
    """``E * sum_e f_e p_e`` over all layers' tokens at once, from the routers' inputs as seen in the forward."""
    seen, original = [], moe_module.F.linear
    patch = pytest.MonkeyPatch()
    patch.setattr(moe_module.F, "linear", lambda x, w, b=None: seen.append(original(x, w, b)) or seen[-1])
    try:
        forward(params, batch, cfg)
    finally:
        patch.undo()
    logits = torch.cat([x for x in seen if x.shape[-1] == cfg.text.num_experts])
    probs = logits.softmax(-1)
    chosen = F.one_hot(probs.topk(cfg.text.num_experts_per_tok).indices, cfg.text.num_experts).double().sum(1)
    return cfg.text.num_experts * (chosen.mean(0) * probs.double().mean(0)).sum()


@pytest.mark.parametrize("dense_layers", [(), (1,)])
def test_load_balance_value(cfg, make_params, make_batch, dense_layers):
    text = dataclasses.replace(cfg.text, mlp_only_layers=dense_layers)
    cfg = dataclasses.replace(cfg, text=text)
    balanced_cfg = dataclasses.replace(cfg, text=dataclasses.replace(text, output_router_logits=True, router_aux_loss_coef=0.5))
    params = make_params(cfg)
    batches = [make_batch(cfg, seed=0), make_batch(cfg, seed=1)]
    plain, off, _, _ = gradients(params, batches, cfg)
    loss, balance, _, _ = gradients(params, batches, balanced_cfg)
    expected = sum(pooled_balance(params, batch, cfg) for batch in batches) / 2
    assert off is None
    torch.testing.assert_close(balance.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, plain + 0.5 * balance)


@pytest.mark.parametrize(
    "path",
    [
        "model.language_model.layers.0.mlp.gate.weight",
        "model.language_model.layers.2.mlp.gate.weight",
        "model.language_model.layers.1.self_attn.q_norm.weight",
        "model.visual.merger.norm.weight",
    ],
)
def test_gradient_equals_finite_differences(cfg, params, make_batch, path):
    """Along the gradient, the loss rises by its squared length; with the load balance weighing as much as the tokens."""
    cfg = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, output_router_logits=True, router_aux_loss_coef=5.0))
    batch = make_batch(cfg)
    _, _, _, grads = gradients(params, [batch], cfg)
    direction = grads[path] / grads[path].norm()

    def loss_at(distance):
        moved = {**flat(params), path: flat(params)[path] + distance * direction}
        return float(gradients(to_tensordict(moved), [batch], cfg)[0])

    # fp32 losses are good to 1e-6, and a router's choices must not flip within the step.
    step = 5e-4
    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(float(grads[path].norm()), rel=2e-2)


def test_load_balance_gradient_is_linear_in_its_weight(cfg, balanced_cfg, params, make_batch):
    batch = make_batch(cfg)
    plain, half = (gradients(params, [batch], config)[3] for config in (cfg, balanced_cfg))
    double = dataclasses.replace(balanced_cfg, text=dataclasses.replace(balanced_cfg.text, router_aux_loss_coef=1.0))
    whole = gradients(params, [batch], double)[3]
    for path in plain:
        torch.testing.assert_close(whole[path] - plain[path], 2 * (half[path] - plain[path]), rtol=1e-4, atol=1e-6)
    gate = "model.language_model.layers.0.mlp.gate.weight"
    assert (half[gate] - plain[gate]).norm() > 1e-3
    assert torch.equal(half["lm_head.weight"], plain["lm_head.weight"])
