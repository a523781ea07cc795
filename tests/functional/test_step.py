"""The step: accumulation, remat, freezing, load balance, evaluation; the same by torch.func and torch's AdamW."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from qwen3vl_functional import AdamW, Recipe, forward, init_params, init_state, make_eval_step, make_train_step, param_specs
from qwen3vl_functional.optim import learning_rate
from qwen3vl_functional.spec import leaves, split_frozen, to_tensordict
from qwen3vl_functional.step import accumulate, count_targets
from qwen3vl_functional.transforms import LocalWeights

GRAD_TOLERANCE = 1e-5  # of the leaf's norm: fp32 sums in another order
OPTIMIZER = AdamW(lr=1e-2, lr_min=1e-3, warmup_steps=0, total_steps=6, eps=1e-5)


def every_path(cfg):
    return frozenset(path for path, _ in leaves(param_specs(cfg)))


def flat(params):
    return dict(leaves(params))


def gradients(params, batches, cfg, **options):
    return accumulate(LocalWeights(params, options.get("dtype")), batches, cfg, every_path(cfg), Recipe(**options))


def assert_same_grads(ours, expected, tolerance=GRAD_TOLERANCE):
    assert ours.keys() == expected.keys()
    for path in ours:
        error = (ours[path] - expected[path]).norm()
        assert error <= tolerance * expected[path].norm() + 1e-9, (path, float(error), float(expected[path].norm()))


def dense_logits(params, batch, cfg):
    """Logits at their places in the padded batch, (B, T, V)."""
    out = forward(params, batch, cfg)
    num_samples, length = batch["input_ids"].shape
    rows = out.logits_TV.new_zeros(num_samples * length, cfg.text.vocab_size)
    return rows.index_copy(0, out.token_rows, out.logits_TV).view(num_samples, length, -1)


def shifted_labels(batch):
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return labels.masked_fill(batch["attention_mask"] == 0, -100)


def func_grad(params, batches, cfg):
    """Loss over all batches together, and its gradients, by torch.func over ``forward``."""
    labels = [shifted_labels(batch) for batch in batches]
    count = sum(int((wanted != -100).sum()) for wanted in labels)

    def mean_loss(free):
        pairs = [
            (dense_logits(free, batch, cfg).flatten(0, 1), wanted.flatten())
            for batch, wanted in zip(batches, labels, strict=True)
        ]
        return sum(F.cross_entropy(*pair, ignore_index=-100, reduction="sum") for pair in pairs) / count

    grads, loss = torch.func.grad_and_value(mean_loss)(params)
    return loss, count, flat(grads)


def rows_of(batch, begin, end, cfg):
    """Samples ``begin`` .. ``end`` as a batch of their own (an image of 24 patches each, the last sample's video too)."""
    out = {name: batch[name][begin:end] for name in ("input_ids", "attention_mask", "labels")}
    if "pixel_values" in batch:
        out["pixel_values"] = batch["pixel_values"][24 * begin : 24 * end]
        out["image_grid_thw"] = batch["image_grid_thw"][begin:end]
        if end == len(batch["input_ids"]):
            out |= {name: batch[name] for name in ("pixel_values_videos", "video_grid_thw")}
    return out


@pytest.fixture(scope="module")
def params(cfg, make_params):
    return make_params(cfg)


@pytest.mark.parametrize("text", [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": (0, 2)}])
def test_gradients_equal_torch_func(cfg, make_params, make_batch, text):
    cfg = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, **text))
    params = make_params(cfg)
    batches = [make_batch(cfg, seed=0), make_batch(cfg, seed=1, text_lengths=(5,))]
    loss, balance, num_targets, grads = gradients(params, batches, cfg)
    expected_loss, count, expected = func_grad(params, batches, cfg)
    assert balance is None and num_targets == count == sum(map(count_targets, batches))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    assert_same_grads(grads, expected)
    assert all(grad.any() for grad in grads.values())


def test_steps_equal_torch_optimizer(cfg, params, make_batch):
    """Forward, autograd, clip_grad_norm_, torch.optim.AdamW with two groups: three steps, the first with rate 0."""
    optimizer = OPTIMIZER._replace(warmup_steps=1, max_grad_norm=0.3, weight_decay=0.1)
    specs = dict(leaves(param_specs(cfg)))
    theirs = {path: leaf.clone() for path, leaf in flat(params).items()}
    groups = [[theirs[path] for path in theirs if specs[path].decay == decay] for decay in (True, False)]
    torch_optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], betas=(0.9, 0.999), eps=1e-5
    )
    step, state = make_train_step(cfg, optimizer), init_state(params.clone(), cfg)
    for number in range(3):
        batches = [make_batch(cfg, seed=number), make_batch(cfg, seed=10 + number, text_lengths=(3, 6))]
        loss, count, grads = func_grad(to_tensordict(theirs), batches, cfg)
        for path, leaf in theirs.items():
            leaf.grad = grads[path]
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.3)
        for group in torch_optimizer.param_groups:
            group["lr"] = learning_rate(optimizer, number)
        torch_optimizer.step()
        state, metrics = step(state, batches)
        assert metrics.num_targets == count and metrics.lr == learning_rate(optimizer, number)
        torch.testing.assert_close(metrics.loss, loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(metrics.grad_norm, norm, rtol=1e-5, atol=1e-5)
        for path, leaf in flat(state.params).items():
            # An update is lr x a ratio that may magnify a gradient's rounding by 1 / eps: 1e-9 / 1e-5 of 1e-2 here.
            torch.testing.assert_close(leaf, theirs[path], rtol=0, atol=5e-6, msg=path)
        if number == 0:
            assert metrics.lr == 0.0
            assert all(torch.equal(leaf, flat(params)[path]) for path, leaf in flat(state.params).items())
    assert state.opt_state.step == 3


@pytest.mark.parametrize("parts", [[(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 3)]])
def test_token_weighted_does_not_depend_on_the_split(cfg, params, make_batch, parts):
    batch = make_batch(cfg, text_lengths=(12, 3, 6))
    loss, _, num_targets, grads = gradients(params, [batch], cfg)
    micro = [rows_of(batch, begin, end, cfg) for begin, end in parts]
    micro_loss, _, micro_targets, micro_grads = gradients(params, micro, cfg)
    assert micro_targets == num_targets
    torch.testing.assert_close(micro_loss, loss, rtol=1e-6, atol=1e-6)
    assert_same_grads(micro_grads, grads)


def test_rank_average_is_a_mean_of_means(cfg, params, make_batch):
    batches = [make_batch(cfg, seed=0, text_lengths=(12,)), make_batch(cfg, seed=1, text_lengths=(3,))]
    alone = [gradients(params, [batch], cfg) for batch in batches]
    assert alone[0][2] != alone[1][2]
    loss, _, num_targets, grads = gradients(params, batches, cfg, loss_aggregation="rank_average")
    assert num_targets == alone[0][2] + alone[1][2]
    torch.testing.assert_close(loss, (alone[0][0] + alone[1][0]) / 2, rtol=1e-6, atol=1e-6)
    assert_same_grads(grads, {path: (alone[0][3][path] + alone[1][3][path]) / 2 for path in grads})
    weighted = gradients(params, batches, cfg)[0]
    assert abs(float(weighted - loss)) > 1e-4


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_remat_is_bitwise(balanced_cfg, params, make_batch, remat):
    batches = [make_batch(balanced_cfg, seed=0), make_batch(balanced_cfg, seed=1, images=False)]
    loss, balance, _, grads = gradients(params, batches, balanced_cfg)
    remat_loss, remat_balance, _, remat_grads = gradients(params, batches, balanced_cfg, remat=remat)
    assert torch.equal(loss, remat_loss) and torch.equal(balance, remat_balance) and grads.keys() == remat_grads.keys()
    assert all(torch.equal(grads[path], remat_grads[path]) for path in grads)


@pytest.mark.parametrize("aggregation", ["token_weighted", "rank_average"])
def test_all_labels_masked(cfg, params, make_batch, aggregation):
    batch = make_batch(cfg)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss, _, num_targets, grads = gradients(params, [batch, batch], cfg, loss_aggregation=aggregation)
    assert num_targets == 0 and loss == 0
    assert grads.keys() == every_path(cfg) and not any(grad.any() for grad in grads.values())
    _, metrics = make_train_step(cfg, OPTIMIZER, Recipe(loss_aggregation=aggregation))(init_state(params.clone(), cfg), [batch])
    assert metrics.loss == 0 and metrics.grad_norm == 0


def test_a_masked_micro_batch_changes_nothing(cfg, params, make_batch):
    batch, masked = make_batch(cfg, seed=0), make_batch(cfg, seed=1)
    masked["labels"] = torch.full_like(masked["labels"], -100)
    loss, _, _, grads = gradients(params, [batch], cfg)
    both_loss, _, _, both_grads = gradients(params, [batch, masked], cfg)
    assert torch.equal(loss, both_loss)
    assert_same_grads(both_grads, grads, 1e-7)


def test_labels_on_padding_do_not_count(cfg, params, make_batch):
    """Only a real token predicts: the label behind the last one counts, those further behind do not."""
    batch = make_batch(cfg, text_lengths=(3, 4))
    batch["labels"] = torch.where(batch["attention_mask"] == 0, 5, batch["labels"])
    assert int((batch["attention_mask"] == 0).sum()) > 2
    loss, _, num_targets, grads = gradients(params, [batch], cfg)
    expected_loss, count, expected = func_grad(params, [batch], cfg)
    assert num_targets == count == make_eval_step(cfg)(params, batch).num_targets
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    assert_same_grads(grads, expected)


def test_a_fully_masked_sample_changes_nothing(cfg, params, make_batch):
    batch = make_batch(cfg, text_lengths=(6, 5), images=False)
    extra = {name: torch.cat((x[:1], torch.zeros_like(x[:1]), x[1:])) for name, x in batch.items()}
    loss, _, num_targets, grads = gradients(params, [batch], cfg)
    extra_loss, _, extra_targets, extra_grads = gradients(params, [extra], cfg)
    assert extra_targets == num_targets and torch.equal(extra_loss, loss)
    assert all(torch.equal(extra_grads[path], grads[path]) for path in grads)


@pytest.mark.parametrize("length", [1, 4])
def test_batches_without_a_token_or_a_next_one(balanced_cfg, params, length):
    ids = torch.ones(2, length, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.full_like(ids, int(length == 1))}
    loss, balance, num_targets, grads = gradients(params, [batch], balanced_cfg)
    assert num_targets == 0 and loss == 0.5 * balance and loss.isfinite()
    assert grads.keys() == every_path(balanced_cfg) and all(grad.isfinite().all() for grad in grads.values())
    assert make_eval_step(balanced_cfg)(params, batch) == (0.0, 0, 0, 0)


def test_text_only_batch_reaches_every_leaf(cfg, params, make_batch):
    batch = make_batch(cfg, images=False)
    loss, _, _, grads = gradients(params, [batch], cfg)
    assert grads.keys() == every_path(cfg) and loss > 0
    for path, grad in grads.items():
        assert bool(grad.any()) != path.startswith("model.visual."), path
    text_cfg = dataclasses.replace(cfg, vision=None)
    text_params = to_tensordict({path: leaf for path, leaf in flat(params).items() if not path.startswith("model.visual.")})
    text_loss, _, _, text_grads = gradients(text_params, [batch], text_cfg)
    assert torch.equal(loss, text_loss)
    assert all(torch.equal(grads[path], grad) for path, grad in text_grads.items())


def test_frozen_tower(cfg, params, make_batch):
    frozen = ("model.visual",)
    state = init_state(params.clone(), cfg, frozen=frozen)
    trainable, held = split_frozen(param_specs(cfg), frozen)
    for tree in (state.opt_state.exp_avg, state.opt_state.exp_avg_sq):
        assert dict(leaves(tree)).keys() == set(trainable)
    batch = make_batch(cfg)
    grads = accumulate(LocalWeights(params), [batch], cfg, frozenset(trainable)).grads
    assert grads.keys() == set(trainable)
    _, _, _, full = gradients(params, [batch], cfg)
    assert all(torch.equal(grads[path], full[path]) for path in grads)
    state, _ = make_train_step(cfg, OPTIMIZER, frozen=frozen)(state, [batch])
    before, after = flat(params), flat(state.params)
    assert held and all(torch.equal(before[path], after[path]) for path in held)
    assert all(not torch.equal(before[path], after[path]) for path in trainable)
    with pytest.raises(ValueError, match=r"'model\.vision' matches no parameter"):
        make_train_step(cfg, OPTIMIZER, frozen=("model.vision",))


def test_a_step_moves_routers_and_pixels_matter(cfg, params, make_batch):
    batch = make_batch(cfg)
    step = make_train_step(cfg, OPTIMIZER)
    state, metrics = step(init_state(params.clone(), cfg), [batch])
    for layer in range(cfg.text.num_hidden_layers):
        path = f"model.language_model.layers.{layer}.mlp.gate.weight"
        assert not torch.equal(flat(state.params)[path], flat(params)[path])
    other = {**batch, "pixel_values": batch["pixel_values"].flip(0)}
    assert abs(float(gradients(params, [other], cfg)[0] - metrics.loss)) > 1e-4
    losses = [float(metrics.loss)]
    for _ in range(5):
        state, metrics = step(state, [batch])
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.8 * losses[0]


def test_step_is_deterministic_and_counts(cfg, params, make_batch):
    batches = [make_batch(cfg, seed=0), make_batch(cfg, seed=1)]
    before = [{name: x.clone() for name, x in batch.items()} for batch in batches]
    results = []
    for _ in range(2):
        state = init_state(params.clone(), cfg)
        for _ in range(2):
            state, metrics = make_train_step(cfg, OPTIMIZER)(state, batches)
        results.append((state, metrics))
    (state, metrics), (again, same) = results
    assert state.opt_state.step == 2 and torch.equal(metrics.loss, same.loss) and torch.equal(metrics.grad_norm, same.grad_norm)
    for one, other in zip((state.params, *state.opt_state[:2]), (again.params, *again.opt_state[:2]), strict=True):
        assert all(torch.equal(flat(one)[path], flat(other)[path]) for path in flat(one))
    for batch, copy in zip(batches, before, strict=True):
        assert all(torch.equal(batch[name], copy[name]) for name in copy)


def test_bf16_in_flight(cfg, params, make_batch):
    """Weights, moments and gradients stay fp32; the loss moves by bf16's rounding only."""
    batch = make_batch(cfg)
    loss, _, _, grads = gradients(params, [batch], cfg)
    low_loss, _, _, low = gradients(params, [batch], cfg, dtype=torch.bfloat16)
    assert low_loss.dtype == torch.float32 and 0 < abs(float(low_loss - loss)) < 0.05
    assert all(grad.dtype == torch.float32 for grad in low.values())
    head = "lm_head.weight"
    assert (low[head] - grads[head]).norm() < 0.1 * grads[head].norm()  # some routers choose otherwise
    state, _ = make_train_step(cfg, OPTIMIZER, Recipe(dtype=torch.bfloat16))(init_state(params.clone(), cfg), [batch])
    for tree in (state.params, state.opt_state.exp_avg, state.opt_state.exp_avg_sq):
        assert all(leaf.dtype == torch.float32 for leaf in flat(tree).values())


def test_head_has_its_own_dtype(cfg, params, make_batch):
    """The blocks in fp32, the head in bf16: only the logits' matmuls are rounded."""
    batch = make_batch(cfg)
    loss, _, _, grads = gradients(params, [batch], cfg)
    same_loss, _, _, same = gradients(params, [batch], cfg, head_dtype=torch.float32)
    assert torch.equal(loss, same_loss) and all(torch.equal(grads[path], same[path]) for path in grads)
    low_loss, _, _, low = gradients(params, [batch], cfg, head_dtype=torch.bfloat16)
    hidden = forward(params, batch, cfg).values["hidden"].bfloat16()
    labels = shifted_labels(batch).flatten()[forward(params, batch, cfg).token_rows]
    logits = (hidden @ flat(params)["lm_head.weight"].bfloat16().T).float()
    torch.testing.assert_close(low_loss, F.cross_entropy(logits, labels), rtol=1e-6, atol=1e-6)
    assert all(grad.dtype == torch.float32 for grad in low.values())
    assert_same_grads(low, grads, 2e-2)  # bf16's 2^-8, twice
    eval_metrics = make_eval_step(cfg, Recipe(head_dtype=torch.bfloat16))(params, batch)
    torch.testing.assert_close(eval_metrics.loss_sum / eval_metrics.num_targets, low_loss, rtol=1e-6, atol=1e-6)


def brute_force(params, batch, cfg):
    """Losses and answers sample by sample, token by token."""
    logits, labels = dense_logits(params, batch, cfg), shifted_labels(batch)
    total, targets, answers, right = 0.0, 0, 0, 0
    for sample in range(len(labels)):
        rows = [t for t in range(labels.shape[1]) if int(labels[sample, t]) != -100]
        total += sum(-float(logits[sample, t].log_softmax(-1)[labels[sample, t]]) for t in rows)
        targets += len(rows)
        answers += bool(rows)
        right += bool(rows) and all(int(logits[sample, t].argmax()) == int(labels[sample, t]) for t in rows)
    return total, targets, answers, right


def test_eval_counts_answers(cfg, params, make_batch):
    """One sample is right throughout, one all but once, one has no target, one is arbitrary."""
    batch = make_batch(cfg, text_lengths=(6, 5, 7, 4))
    likeliest = F.pad(dense_logits(params, batch, cfg).argmax(-1), (1, 0))[:, :-1]
    labels = torch.where(batch["labels"] == -100, -100, likeliest)
    labels[1, 3] = (likeliest[1, 3] + 1) % 300
    labels[2] = -100
    labels[3] = batch["labels"][3]
    batch["labels"] = labels
    metrics = make_eval_step(cfg)(params, batch)
    total, targets, answers, right = brute_force(params, batch, cfg)
    assert (metrics.num_targets, metrics.num_answers, metrics.num_correct) == (targets, answers, right) == (targets, 3, 1)
    assert float(metrics.loss_sum) == pytest.approx(total, rel=1e-5)
    assert count_targets(batch) == targets


def test_eval_loss_equals_training_loss(cfg, params, make_batch):
    batch = make_batch(cfg)
    metrics = make_eval_step(cfg)(params, batch)
    loss, _, num_targets, _ = gradients(params, [batch], cfg)
    assert metrics.num_targets == num_targets
    torch.testing.assert_close(metrics.loss_sum / num_targets, loss, rtol=1e-6, atol=1e-6)
    assert make_eval_step(cfg, Recipe(dtype=torch.bfloat16))(params, batch).loss_sum.dtype == torch.float32


def test_untrained_loss_is_that_of_guessing(cfg, make_batch):
    fresh = init_params(param_specs(cfg), seed=0)
    loss = gradients(fresh, [make_batch(cfg, text_lengths=(40, 40))], cfg)[0]
    assert float(loss) == pytest.approx(math.log(cfg.text.vocab_size), abs=0.05)
