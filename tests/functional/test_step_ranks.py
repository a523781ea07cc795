"""The step on 2, 3 and 4 gloo ranks equals the step on one: loss, counts, norm and every gradient, on random batches."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import mesh, ranks

from qwen3vl_functional import AdamW, Recipe, init_state, make_eval_step, make_train_step, param_specs
from qwen3vl_functional import loss as loss_module
from qwen3vl_functional.collectives import Groups
from qwen3vl_functional.gathered import share
from qwen3vl_functional.loss import head_loss
from qwen3vl_functional.optim import global_norm
from qwen3vl_functional.sharding import Placement, local_view, place, shard
from qwen3vl_functional.spec import leaves, split_frozen, to_tensordict
from qwen3vl_functional.step import accumulate, make_weights, placed_norm
from qwen3vl_functional.text import embedding

# All relative to a leaf's gradient norm.
# Data parallelism adds up the same fp32 numbers, in another order at the very end.
DATA_PARALLEL_TOLERANCE = 1e-6
# Tensor parallelism adds up in another order inside every block, and later blocks amplify it: over 40 random steps the worst
# leaf (a norm of the vision tower) differed by 2.1e-6, while one rank in fp32 was itself off by 2.4e-6 from fp64. That it is
# rounding and nothing else is seen in fp64, where DATA_PARALLEL_TOLERANCE holds (2.4e-7: router and logits stay fp32).
TENSOR_PARALLEL_TOLERANCE = 5e-6
# Partial sums are rounded to bf16 (unit roundoff 4e-3) before they are added up: leaves differ by 2 to 5e-2, while one rank
# in bf16 is off by 4e-2 to 2e-1 from fp32.
BF16_TENSOR_PARALLEL_TOLERANCE = 5e-2
# Of the whole gradient's norm: what a leaf has whose gradient is zero but for rounding (keys of samples of one token).
ROUNDING = 1e-9

FSDP2, TP2, HSDP2, FSDP3 = (1, 2, 1, 1, 1), (1, 1, 1, 1, 2), (2, 1, 1, 1, 1), (1, 3, 1, 1, 1)
FSDP2_TP2, HSDP2_FSDP2 = (1, 2, 1, 1, 2), (2, 2, 1, 1, 1)
TOPOLOGIES = {
    "fsdp2": FSDP2, "tp2": TP2, "hsdp2": HSDP2, "fsdp3": FSDP3, "fsdp2_tp2": FSDP2_TP2, "hsdp2_fsdp2": HSDP2_FSDP2,
}  # fmt: skip

PLAIN = Recipe()

# A sample is a list of parts: a number of text tokens, or the kind and (frames, height, width) of an image or a video.
TEXT = [6]
IMAGE = [3, ("image", (1, 4, 6)), 4]
MIXED = [2, ("image", (1, 2, 2)), 2, ("video", (2, 4, 2)), 5, ("image", (1, 4, 4)), 3]


def make_batch(cfg, samples, *, seed=0, masked=False):
    """Right-padded samples; no samples give one token without a target, as the collator does."""
    generator = torch.Generator().manual_seed(seed)
    rows, grids = [], {"image": [], "video": []}

    def text(n):
        return torch.randint(0, 300, (n,), generator=generator).tolist()

    for sample in samples:
        row = []
        for part in sample:
            if isinstance(part, int):
                row += text(part)
                continue
            kind, (t, h, w) = part
            grids[kind].append([t, h, w])
            token = cfg.image_token_id if kind == "image" else cfg.video_token_id
            for _ in range(t):
                row += [cfg.vision_start_token_id, *[token] * (h * w // 4), cfg.vision_end_token_id, *text(1)]
        rows.append(row)
    masked, rows = masked or not rows, rows or [[0]]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    target = (ids < 300) & mask.bool() & (torch.rand(ids.shape, generator=generator) < (0.0 if masked else 0.8))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(target, ids, -100)}
    for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            patches = sum(t * h * w for t, h, w in grids[kind])
            batch[key] = torch.randn(patches, cfg.vision.patch_values, generator=generator)
            batch[f"{kind}_grid_thw"] = torch.tensor(grids[kind])
    return batch


def variant(cfg, name):
    changes = {
        "plain": {},
        "balanced": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
        "dense": {"decoder_sparse_step": 2},
        "tied": {},
    }[name]
    return dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, **changes), tie_word_embeddings=name == "tied")


def gradients(flat, batches, cfg, recipe, frozen, placement=Placement()):
    tree = to_tensordict(flat)
    tree = tree if placement.mesh is None else shard(tree, placement.mesh, placement.layouts)
    trainable = frozenset(split_frozen(param_specs(cfg), frozen)[0])
    sums = accumulate(make_weights(tree, recipe, placement), batches, cfg, trainable, recipe, placement)
    balance = None if sums.load_balance is None else float(sums.load_balance)
    return float(sums.loss), balance, sums.num_targets, float(placed_norm(sums.grads, placement)), sums.grads


def data_rank(shape):
    """Which samples this rank reads; the ranks of a tp group read the same."""
    replicate, cut, *_ = mesh(shape).get_coordinate()
    return replicate * shape[1] + cut


def gradients_on_rank(flat, batches, cfg, recipe, frozen, shape, replicated):
    placement = place(param_specs(cfg), mesh(shape), replicated=replicated)
    *numbers, grads = gradients(flat, batches[data_rank(shape)], cfg, recipe, frozen, placement)
    return numbers, {path: (placement.part(path), grad) for path, grad in grads.items()}


def worst(answers, expected):
    """Largest error of any leaf relative to its norm, over ranks; each rank's part is compared, so replicas are too."""
    errors = {}
    floor = ROUNDING * float(global_norm(list(expected.values())))
    for path, whole in expected.items():
        for _, grads in answers:
            part, grad = grads[path]
            assert grad.dtype == torch.float32 and grad.shape == whole[part].shape, path
            error, norm = max(0.0, float((grad - whole[part]).norm()) - floor), float(whole.norm())
            errors[path] = max(errors.get(path, 0.0), error / norm if norm else (math.inf if error else 0.0))
    path = max(errors, key=errors.__getitem__)
    return errors[path], path


def compare(params, batches, cfg, shape, *, recipe=PLAIN, frozen=(), replicated=(), tolerance=DATA_PARALLEL_TOLERANCE):
    """``batches``: the micro-batches of each data-parallel rank. One rank takes all of them."""
    flat = {path: leaf for path, leaf in params.items() if path in dict(leaves(param_specs(cfg)))}
    loss, balance, num_targets, norm, expected = gradients(flat, [b for part in batches for b in part], cfg, recipe, frozen)
    answers = ranks(math.prod(shape)).call(gradients_on_rank, flat, batches, cfg, recipe, frozen, shape, replicated)
    for (our_loss, our_balance, our_targets, our_norm), grads in answers:
        assert our_targets == num_targets and grads.keys() == expected.keys()
        assert our_loss == pytest.approx(loss, rel=tolerance, abs=1e-9)
        assert our_balance == (None if balance is None else pytest.approx(balance, rel=tolerance))
        assert our_norm == pytest.approx(norm, rel=tolerance)
    error, path = worst(answers, expected)
    assert error <= tolerance, (path, error)
    return expected


@pytest.fixture(scope="module")
def params(cfg, make_params):
    return dict(leaves(make_params(cfg)))


def named_batches(cfg, dp):
    """Two micro-batches a rank: the last rank has no image and every label of its second micro-batch is masked."""
    batches = [[make_batch(cfg, [MIXED, TEXT], seed=2 * r), make_batch(cfg, [IMAGE], seed=2 * r + 1)] for r in range(dp)]
    if dp > 1:
        batches[-1] = [make_batch(cfg, [TEXT, [9]], seed=98), make_batch(cfg, [TEXT], seed=99, masked=True)]
    return batches


RECIPES = [
    Recipe(),
    Recipe(remat="full"),
    Recipe(remat="selective", reshard=False),
    Recipe(fused=False, loss_aggregation="rank_average"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.remat}-{r.reshard}-{r.fused}-{r.loss_aggregation}")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ranks_equal_one(cfg, params, topology, recipe):
    shape = TOPOLOGIES[topology]
    cfg = variant(cfg, "balanced")
    tolerance = DATA_PARALLEL_TOLERANCE if shape[4] == 1 else TENSOR_PARALLEL_TOLERANCE
    expected = compare(params, named_batches(cfg, shape[0] * shape[1]), cfg, shape, recipe=recipe, tolerance=tolerance)
    assert all(grad.any() for grad in expected.values())


SAMPLES = st.lists(st.sampled_from([TEXT, IMAGE, MIXED, [1], [12], [1, ("video", (1, 2, 4)), 2]]), max_size=2)
RANDOM_RECIPES = st.fixed_dictionaries(
    {
        "remat": st.sampled_from(["off", "full", "selective"]),
        "loss_aggregation": st.sampled_from(["token_weighted", "rank_average"]),
        "reshard": st.booleans(),
        "fused": st.booleans(),
    }
).map(lambda options: Recipe(**options))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(data=st.data())
@settings(max_examples=8)
def test_ranks_equal_one_on_random_batches(cfg, params, topology, data):
    """Empty and short micro-batches, ranks without images or without targets, experts without tokens."""
    shape = TOPOLOGIES[topology]
    cfg = variant(cfg, data.draw(st.sampled_from(["plain", "balanced", "dense", "tied"])))
    num = data.draw(st.integers(1, 3))
    batches = [
        [
            make_batch(cfg, data.draw(SAMPLES), seed=data.draw(st.integers(0, 99)), masked=data.draw(st.integers(0, 3)) == 3)
            for _ in range(num)
        ]
        for _ in range(shape[0] * shape[1])
    ]
    frozen = data.draw(st.sampled_from([(), ("model.visual",), ("model.language_model.layers",), ("model.language_model.norm",)]))
    replicated = data.draw(st.sampled_from([(), ("model.visual",)]))
    if cfg.text.decoder_sparse_step == 2:  # one more kind of leaf
        generator = torch.Generator().manual_seed(3)
        specs = dict(leaves(param_specs(cfg)))
        params = params | {
            path: torch.randn(spec.shape, generator=generator) * 0.1 for path, spec in specs.items() if path not in params
        }
    recipe = data.draw(RANDOM_RECIPES)
    if shape[4] > 1:
        params = {path: leaf.double() for path, leaf in params.items()}
        recipe = recipe._replace(dtype=torch.float64)
    compare(params, batches, cfg, shape, recipe=recipe, frozen=frozen, replicated=replicated)


@pytest.mark.parametrize("topology", ["fsdp3", "hsdp2_fsdp2", "tp2"])
def test_bf16_in_flight(cfg, params, topology):
    """Data-parallel ranks compute what one rank computes, in bf16 too: only the fp32 sums at the end differ."""
    shape, tolerance = TOPOLOGIES[topology], DATA_PARALLEL_TOLERANCE
    if shape[4] > 1:
        tolerance = BF16_TENSOR_PARALLEL_TOLERANCE
        # Activations differ in their last bit, which sends about one token in a hundred to another expert. Here all are chosen.
        cfg = dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, num_experts_per_tok=cfg.text.num_experts))
    recipe = Recipe(dtype=torch.bfloat16, head_dtype=torch.float32)
    compare(params, named_batches(cfg, shape[0] * shape[1]), cfg, shape, recipe=recipe, tolerance=tolerance)


@pytest.mark.parametrize("topology", ["fsdp2", "tp2", "fsdp3"])
def test_nothing_to_learn(cfg, params, topology):
    """No rank has a target: the loss and every gradient are zero, and nobody waits for anybody."""
    shape = TOPOLOGIES[topology]
    batches = [[make_batch(cfg, []), make_batch(cfg, [IMAGE], masked=True)] for _ in range(shape[0] * shape[1])]
    expected = compare(params, batches, cfg, shape)
    assert not any(grad.any() for grad in expected.values())


OPTIMIZER = AdamW(lr=1e-2, lr_min=1e-3, warmup_steps=0, total_steps=6, eps=1e-5, max_grad_norm=0.3)


def train(flat, steps, cfg, shape=None):
    """Steps with the tower frozen, then an evaluation; ``steps`` holds each rank's micro-batches of each step."""
    placement = Placement() if shape is None else place(param_specs(cfg), mesh(shape))
    tree = to_tensordict({path: leaf.clone() for path, leaf in flat.items()})
    if shape is not None:  # as the Trainer keeps it; the gradients above travel in messages
        tree = share(shard(tree, placement.mesh, placement.layouts), placement)
    state = init_state(tree, cfg, frozen=("model.visual",))
    step = make_train_step(cfg, OPTIMIZER, frozen=("model.visual",), placement=placement)
    numbers = []
    for batches in steps:
        mine = [batch for rank in batches for batch in rank] if shape is None else batches[data_rank(shape)]
        state, metrics = step(state, mine)
        numbers.append((float(metrics.loss), float(metrics.grad_norm), metrics.num_targets))
    evaluated = make_eval_step(cfg, placement=placement)(state.params, steps[0][0][0])  # the same batch on all ranks
    numbers.append((float(evaluated.loss_sum), evaluated.num_targets, evaluated.num_answers, evaluated.num_correct))
    return numbers, {path: (placement.part(path), local_view(leaf)) for path, leaf in leaves(state.params)}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_training_equals_one_rank(cfg, params, topology):
    shape = TOPOLOGIES[topology]
    steps = [named_batches(cfg, shape[0] * shape[1]) for _ in range(3)]
    numbers, expected = train(params, steps, cfg)
    for ours, leaves_ in ranks(math.prod(shape)).call(train, params, steps, cfg, shape):
        for mine, theirs in zip(ours, numbers, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for path, (part, leaf) in leaves_.items():
            # An update is lr x a ratio that may magnify a gradient's rounding by 1 / eps: 1e-9 / 1e-5 of 1e-2 a step.
            torch.testing.assert_close(leaf, expected[path][1][part], rtol=0, atol=5e-6, msg=path)
            assert path.startswith("model.visual.") == torch.equal(leaf, params[path][part])


# The vocabulary-parallel ends alone.


def head_case(num_rows, dtype):
    """Targets on both sides of the cut and at its edges; two tokens tie in every row for the largest logit."""
    generator = torch.Generator().manual_seed(num_rows)
    weight, hidden = (torch.randn(rows, 8, generator=generator) for rows in (10, num_rows))
    weight[7] = weight[2] = 4 * weight[2]
    targets = torch.tensor([0, 4, 5, 9, 2, 7, 7, 2, 3, 8] * 3)[:num_rows]
    hidden[4:8] = hidden[4:8].abs() * weight[2].sign()
    return weight.to(dtype), hidden.to(dtype), targets


def head_parts(num_rows, dtype, chunk_bytes, with_grad, group=None):
    rank, world = (0, 1) if group is None else (mesh(TP2).get_local_rank("tp"), 2)
    weight, hidden, targets = head_case(num_rows, dtype)
    weight = weight.chunk(world)[rank].contiguous()
    before, loss_module.CHUNK_BYTES = loss_module.CHUNK_BYTES, chunk_bytes // world
    try:
        return head_loss(weight, hidden, targets, groups=Groups(tp=group), scale=0.25, with_grad=with_grad)
    finally:
        loss_module.CHUNK_BYTES = before


def head_on_rank(*arguments):
    return head_parts(*arguments, mesh(TP2).get_group("tp"))


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4 * 10 * 3])
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(30, torch.float32), (1, torch.float32), (0, torch.float32), (30, torch.bfloat16)]
)
def test_vocabulary_parallel_loss(num_rows, dtype, chunk_bytes, with_grad):
    arguments = num_rows, dtype, chunk_bytes, with_grad
    expected, answers = head_parts(*arguments), ranks(2).call(head_on_rank, *arguments)
    weight, hidden, targets = head_case(num_rows, dtype)
    plain = F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")
    torch.testing.assert_close(expected.loss_sum, plain, rtol=1e-5, atol=1e-5)
    assert with_grad or num_rows < 30 or 0 < int(expected.correct.sum()) < num_rows
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for rank, ours in enumerate(answers):
        torch.testing.assert_close(ours.loss_sum, expected.loss_sum, rtol=1e-6, atol=1e-6)
        if not with_grad:
            assert torch.equal(ours.correct, expected.correct)
            assert ours.hidden_grad is None and ours.weight_grad is None
            continue
        torch.testing.assert_close(ours.hidden_grad, expected.hidden_grad, **tolerance)
        torch.testing.assert_close(ours.weight_grad, expected.weight_grad.chunk(2)[rank], **tolerance)


def embedding_on_rank(table, ids, cotangent):
    group = mesh(TP2).get_group("tp")
    part = table.chunk(2)[mesh(TP2).get_local_rank("tp")]
    out, pullback = torch.func.vjp(lambda part: embedding(part, ids, Groups(tp=group)), part)
    return out, pullback(cotangent, retain_graph=False, create_graph=False)[0]


@pytest.mark.parametrize("ids", [[0, 4, 5, 9, 5, 0, 7], [9, 9], [0], []])
def test_vocabulary_parallel_embedding(ids):
    """Each row comes from one rank and the others add zeros, so values and gradients are exact."""
    generator, ids = torch.Generator().manual_seed(0), torch.tensor(ids, dtype=torch.int64)
    table, cotangent = torch.randn(10, 3, generator=generator), torch.randn(len(ids), 3, generator=generator)
    expected, pullback = torch.func.vjp(lambda table: F.embedding(ids, table), table)
    for rank, (out, grad) in enumerate(ranks(2).call(embedding_on_rank, table, ids, cotangent)):
        assert torch.equal(out, expected)
        assert torch.equal(grad, pullback(cotangent)[0].chunk(2)[rank])
