"""AdamW, its schedule and the clip against torch's own."""

import math
import zlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from qwen3vl_functional import AdamW, Qwen3VLMoeConfig, param_specs
from qwen3vl_functional.optim import adamw_update, clip_factor, global_norm, init_opt_state, learning_rate
from qwen3vl_functional.spec import ParamSpec, leaves

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
trees = st.dictionaries(
    st.sampled_from(["a", "b.c", "b.d", "b.e.f", "g.h"]), st.tuples(shapes, st.booleans()), min_size=1, max_size=5
)
NUM_STEPS = 20


def draw(path: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{path}:{step}".encode()))
    return torch.randn(shape, generator=generator)


def train(tree, cfg: AdamW):
    """``NUM_STEPS`` of ours and of torch's, on the same gradients; yields both sets of tensors after each step."""
    specs = {path: ParamSpec(shape, ("x",) * len(shape), decay=decay) for path, (shape, decay) in tree.items()}
    params = {path: draw(path, spec.shape, -1) for path, spec in specs.items()}
    theirs = {path: leaf.clone().requires_grad_() for path, leaf in params.items()}
    state = init_opt_state(params)
    optimizer = torch.optim.AdamW(
        [
            {"params": [theirs[path] for path in specs if specs[path].decay == decay], "weight_decay": cfg.weight_decay * decay}
            for decay in (True, False)
        ],
        lr=cfg.lr,
        betas=cfg.betas,
        eps=cfg.eps,
        **({"fused": True} if cfg.foreach is None else {"foreach": cfg.foreach}),
    )
    for step in range(NUM_STEPS):
        grads = {path: draw(path, spec.shape, step) for path, spec in specs.items()}
        for path, leaf in theirs.items():
            leaf.grad = grads[path].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), cfg.max_grad_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step)
        optimizer.step()
        own_norm = global_norm(list(grads.values()))
        assert torch.equal(own_norm, norm)
        state = adamw_update(params, grads, state, specs, cfg, grad_factor=clip_factor(own_norm, cfg.max_grad_norm))
        assert state.step == step + 1
        for name in ("exp_avg", "exp_avg_sq"):
            flat = dict(leaves(getattr(state, name).to_dict()))
            yield flat, {path: optimizer.state[leaf][name] for path, leaf in theirs.items()}
        yield params, {path: leaf.detach() for path, leaf in theirs.items()}


@pytest.mark.parametrize("foreach", [None, True, False])
@given(tree=trees, clipped=st.booleans(), weight_decay=st.sampled_from([0.0, 0.3]))
@example(tree={"a": ((3, 4), True), "b.c": ((4,), False)}, clipped=True, weight_decay=0.3)
def test_adamw_equals_torch(foreach, tree, clipped, weight_decay):
    cfg = AdamW(
        lr=0.01,
        lr_min=0.001,
        warmup_steps=3,
        total_steps=NUM_STEPS,
        betas=(0.8, 0.95),
        weight_decay=weight_decay,
        foreach=foreach,
    )
    cfg = cfg._replace(max_grad_norm=0.5 if clipped else 0.0)
    for ours, theirs in train(tree, cfg):
        assert ours.keys() == theirs.keys()
        for path in ours:
            if clipped and foreach is None:  # the fused kernel divides by 1 / factor, where the clip multiplies with factor
                torch.testing.assert_close(ours[path], theirs[path], rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(ours[path], theirs[path])


def test_decay_touches_decayed_leaves_only():
    specs = {"w": ParamSpec((3,), ("x",)), "b": ParamSpec((3,), ("x",), decay=False)}
    params = {path: torch.ones(3) for path in specs}
    grads = {path: torch.zeros(3) for path in specs}
    adamw_update(params, grads, init_opt_state(params), specs, AdamW(lr=0.1, weight_decay=0.5), grad_factor=torch.ones(()))
    # A zero gradient is not no gradient: the decayed leaf shrinks by lr x weight_decay.
    torch.testing.assert_close(params["w"], torch.full((3,), 0.95))
    assert torch.equal(params["b"], torch.ones(3))


@pytest.mark.parametrize("max_norm", [0.1, 5.0, 1e6])
def test_clip_equals_torch(max_norm):
    grads = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in ((40, 3), (), (5,))]
    theirs = [grad.clone().requires_grad_() for grad in grads]
    for leaf, grad in zip(theirs, grads, strict=True):
        leaf.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    factor = clip_factor(global_norm(grads), max_norm)
    assert torch.equal(global_norm(grads), norm)
    for leaf, grad in zip(theirs, grads, strict=True):
        assert torch.equal(leaf.grad, grad * factor)
    assert torch.equal(clip_factor(norm, 0.0), torch.ones(()))
    assert torch.equal(clip_factor(norm, -1.0), torch.ones(()))


def contract_factor(cfg: AdamW, step: int) -> float:
    """The learning-rate factor as the existing Trainer states it."""
    warmup, total, floor = cfg.warmup_steps, cfg.total_steps, cfg.lr_min / cfg.lr
    if step < warmup:
        return step / warmup
    if cfg.decay_style == "constant":
        return 1.0
    done = min(step, total) - warmup
    span = max(1, total - warmup)
    if cfg.decay_style == "linear":
        return floor + (1 - floor) * (1 - done / span)
    return floor + (1 - floor) * (1 + math.cos(math.pi * done / span)) / 2


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 9), (3, 12), (4, 4)])
def test_learning_rate_follows_lambda_lr(style, warmup, total):
    cfg = AdamW(lr=3e-3, lr_min=2e-4, decay_style=style, warmup_steps=warmup, total_steps=total)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=cfg.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: contract_factor(cfg, step))
    for step in range(total + 3 if total > warmup else total + 1):
        assert learning_rate(cfg, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=0.0)
        optimizer.step()
        scheduler.step()
    if warmup:
        assert learning_rate(cfg, 0) == 0.0
    assert learning_rate(cfg, warmup) == cfg.lr
    if style != "constant" and total > warmup:
        assert learning_rate(cfg, total + 5) == pytest.approx(cfg.lr_min, rel=1e-12)


def test_a_step_of_rate_zero_changes_moments_only():
    specs = {"w": ParamSpec((4,), ("x",))}
    params, grads = {"w": torch.arange(4.0)}, {"w": torch.ones(4)}
    state = adamw_update(
        params, grads, init_opt_state(params), specs, AdamW(warmup_steps=2, total_steps=4), grad_factor=torch.ones(())
    )
    assert torch.equal(params["w"], torch.arange(4.0))
    assert torch.count_nonzero(state.exp_avg["w"]) == 4


def test_decay_mask_follows_names(cfg):
    dense_text = {"text_config": {"mlp_only_layers": [1]}}
    for config in (cfg, Qwen3VLMoeConfig(), Qwen3VLMoeConfig.from_dict(dense_text)):
        for path, spec in leaves(param_specs(config)):
            assert spec.decay == (not any(word in path for word in ("bias", "norm"))), path


def test_norm_of_long_gradients_is_exact_and_does_not_depend_on_the_cut():
    grad = torch.randn(3_000_017, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1e-2
    exact = float(grad.double().norm())
    for pieces in (1, 2, 3, 7):
        parts = list(grad.chunk(pieces))
        assert float(global_norm([*parts, torch.zeros(5)])) == pytest.approx(exact, rel=2e-7)
