"""The chain of pullbacks against torch.func.grad of the composed function, over random chains of blocks."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import run, value_and_grad

from qwen3vl_functional import model, transforms
from qwen3vl_functional.positions import prepare
from qwen3vl_functional.spec import leaves, split_frozen, subtree, unflatten
from qwen3vl_functional.step import training_loss
from qwen3vl_functional.transforms import Block, LocalWeights, Loss, LossValue, absorb

SIZE = 3
LEAVES = ("p.0", "p.1", "q.w", "r", "head")
NAMES = ("a", "b", "c")


def make_tree(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return unflatten({path: torch.randn(SIZE, SIZE, generator=generator).to(dtype) for path in LEAVES})


def block_fn(kinds, num_paths):
    """A block whose j-th output is made as ``kinds[j]`` says: smooth, a plain sum, an input as it is, or a constant."""

    def fn(*args):
        # Sorted: a block's subtrees hold their frozen leaves first, so only names tell leaves apart.
        weights = [leaf for tree in args[:num_paths] for _, leaf in sorted(leaves({"": tree}))]
        reads = list(args[num_paths:])
        constant = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE)
        constant = constant.to((weights or reads)[0].dtype) if weights or reads else constant
        outputs = []
        for j, kind in enumerate(kinds):
            out = constant * (j + 1)
            if kind == "smooth":
                for x in reads:
                    out = out + torch.sin(x * (j + 2))
                for weight in weights:
                    out = torch.tanh(out @ weight) + 0.1 * weight
            elif kind == "sum" and weights + reads:
                out = sum([*weights, *reads])
            elif kind == "pass" and weights + reads:
                out = (reads + weights)[j % len(reads + weights)]
            outputs.append(out)
        return tuple(outputs)

    return fn


@st.composite
def chains(draw):
    """Blocks that read what was written, overwrite, share leaves, or need nothing at all; and what the loss reads."""
    blocks, defined = [], []
    for _ in range(draw(st.integers(1, 6))):
        paths = draw(st.lists(st.sampled_from(["p", "p.0", "p.1", "q", "r"]), max_size=2, unique=True))
        reads = draw(st.lists(st.sampled_from(defined), max_size=3)) if defined else []  # perhaps one value twice
        writes = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True))
        kinds = [draw(st.sampled_from(["smooth", "smooth", "sum", "pass", "constant"])) for _ in writes]
        blocks.append(Block(tuple(paths), tuple(reads), tuple(writes), block_fn(kinds, len(paths)), draw(st.booleans())))
        defined += [name for name in writes if name not in defined]
    loss_reads = draw(st.lists(st.sampled_from(defined), min_size=1, unique=True))
    trainable = draw(st.sets(st.sampled_from(LEAVES)))
    return blocks, tuple(loss_reads), frozenset(trainable)


def quadratic(reads):
    """``sum(head * x^2) / 2`` over the values read, gradients in closed form."""

    def fn(params, values):
        head = params["head"]
        total = sum((head * values[name] ** 2).sum() / 2 for name in reads)
        head_grad = sum(values[name] ** 2 / 2 for name in reads)
        return LossValue(total, {"n": torch.tensor(len(reads))}, {"head": head_grad}, {n: head * values[n] for n in reads})

    return Loss(("head",), reads, fn)


def composed(blocks, reads, flat):
    tree = unflatten(flat)
    values = {}
    for block in blocks:
        out = block.fn(*(subtree(tree, path) for path in block.paths), *(values[name] for name in block.reads))
        values.update(zip(block.writes, out, strict=True))
    return sum((tree["head"] * values[name] ** 2).sum() / 2 for name in reads)


def used(blocks, trainable):
    roots = [path for block in blocks for path in block.paths] + ["head"]
    return {path for path in trainable if any(path == root or path.startswith(root + ".") for root in roots)}


def grad_of_composed(blocks, reads, tree, trainable):
    flat = dict(leaves(tree))
    free = {path: leaf for path, leaf in flat.items() if path in trainable}
    return torch.func.grad_and_value(lambda free: composed(blocks, reads, {**flat, **free}))(free)


# Gradients come in fp32, so what fp64 arithmetic leaves is their last rounding; fp32 arithmetic adds its own.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
@given(chain=chains())
def test_equals_func_grad(dtype, tolerance, chain):
    blocks, reads, trainable = chain
    tree = make_tree(dtype)
    before = {path: leaf.clone() for path, leaf in leaves(tree)}
    grads = {}
    result = value_and_grad(blocks, quadratic(reads), tree, trainable, grads)
    assert grads.keys() == used(blocks, trainable)
    expected, value = grad_of_composed(blocks, reads, tree, trainable) if trainable else ({}, composed(blocks, reads, before))
    torch.testing.assert_close(result.loss, value, rtol=tolerance, atol=tolerance)
    for path, grad in grads.items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected[path].float(), rtol=tolerance, atol=tolerance * 10)
    for path, leaf in leaves(tree):
        assert torch.equal(leaf, before[path])
    assert not result.param_grads and not result.read_grads and int(result.metrics["n"]) == len(reads)


@given(chain=chains(), absorbed=st.integers(1, 6))
def test_a_loss_may_hold_the_last_blocks(chain, absorbed):
    """Taken into the loss one after the other, as many as there are: same value, same gradients, same metrics."""
    blocks, reads, trainable = chain
    tree = make_tree(torch.float64)
    expected = value_and_grad(blocks, quadratic(reads), tree, trainable, expected_grads := {})
    blocks, loss = list(blocks), quadratic(reads)
    for _ in range(min(absorbed, len(blocks))):
        loss = absorb(blocks.pop(), loss, LocalWeights(tree), trainable)
    result = value_and_grad(blocks, loss, tree, trainable, grads := {})
    torch.testing.assert_close(result.loss, expected.loss)
    assert grads.keys() == expected_grads.keys() and result.metrics == expected.metrics
    for path, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[path], rtol=1e-6, atol=1e-6)


@given(chain=chains())
def test_remat_is_bitwise(chain):
    blocks, reads, trainable = chain
    tree = make_tree(torch.float32)
    results = []
    for remat in (False, True):
        grads = {}
        value = value_and_grad([b._replace(remat=remat) for b in blocks], quadratic(reads), tree, trainable, grads)
        results.append((value.loss, grads))
    (loss, grads), (remat_loss, remat_grads) = results
    assert torch.equal(loss, remat_loss) and grads.keys() == remat_grads.keys()
    assert all(torch.equal(grads[path], remat_grads[path]) for path in grads)


@given(chain=chains(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_micro_batches_add_up(chain, dtype):
    blocks, reads, trainable = chain
    tree = make_tree(dtype)
    once, thrice = {}, {}
    value_and_grad(blocks, quadratic(reads), tree, trainable, once)
    once = {path: grad.clone() for path, grad in once.items()}
    for _ in range(3):
        value_and_grad(blocks, quadratic(reads), tree, trainable, thrice)
    for path, grad in once.items():
        torch.testing.assert_close(thrice[path], 3 * grad, rtol=1e-5, atol=1e-5)


@given(chain=chains())
def test_run_gives_the_same_values(chain):
    blocks, reads, _ = chain
    tree = make_tree(torch.float64)
    values = run(blocks, tree)
    assert values.keys() == {name for block in blocks for name in block.writes}
    total = sum((tree["head"] * values[name] ** 2).sum() / 2 for name in reads)
    torch.testing.assert_close(total, composed(blocks, reads, dict(leaves(tree))))


def test_dtype_casts_in_flight_and_gradients_stay_fp32():
    seen = []

    def fn(p, x=None):
        seen.append(p["0"].dtype)
        return (torch.tanh(p["0"] @ p["1"]),)

    tree = make_tree(torch.float32)
    blocks = [Block(("p",), (), ("a",), fn), Block(("p",), ("a",), ("a",), fn, remat=True)]
    grads = {}
    result = value_and_grad(blocks, quadratic(("a",)), tree, {"p.0", "head"}, grads, dtype=torch.bfloat16)
    assert set(seen) == {torch.bfloat16} and result.loss.dtype == torch.bfloat16
    assert grads.keys() == {"p.0", "head"}
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert run(blocks, tree, dtype=torch.bfloat16)["a"].dtype == torch.bfloat16
    assert all(leaf.dtype == torch.float32 for _, leaf in leaves(tree))
    rounded = unflatten({path: leaf.bfloat16() for path, leaf in leaves(tree)})
    expected = {}
    value_and_grad(blocks, quadratic(("a",)), rounded, {"p.0", "head"}, expected)
    assert all(torch.equal(grads[path], expected[path]) for path in grads)


@pytest.fixture
def linearized(monkeypatch):
    blocks, linearize = [], transforms._linearize
    monkeypatch.setattr(transforms, "_linearize", lambda block, *args: blocks.append(block) or linearize(block, *args))
    return blocks


def test_only_blocks_that_need_a_gradient_are_linearized(linearized):
    def fn(*args):
        return (torch.stack([leaf for arg in args for _, leaf in leaves({"": arg})]).sum(0).tanh(),)

    blocks = [
        Block(("p",), (), ("a",), fn),  # frozen
        Block(("q",), ("a",), ("b",), fn),  # trainable
        Block(("p",), ("a",), ("c",), fn),  # frozen, of a constant
        Block(("p",), ("b", "c"), ("b",), fn, remat=True),  # frozen, of a differentiable value
        Block((), ("a",), ("b",), fn),  # overwrites it by a constant
        Block(("r",), ("b",), ("c",), fn, remat=True),  # trainable
    ]
    value_and_grad(blocks, quadratic(("c",)), make_tree(torch.float32), {"q.w", "r"}, {})
    assert len(linearized) == 3
    linearized.clear()
    value_and_grad(blocks, quadratic(("c",)), make_tree(torch.float32), {"head"}, {})
    run(blocks, make_tree(torch.float32))
    assert not linearized


@pytest.mark.parametrize("remat", ["off", "full", "selective"])
def test_frozen_tower_stores_nothing(cfg, make_params, make_batch, linearized, remat):
    inputs = prepare(make_batch(cfg), cfg)
    blocks = model.model_blocks(cfg, inputs, remat=remat, rows=inputs.text.target_rows)
    tree = make_params(cfg).to_dict()
    trainable = frozenset(split_frozen(model.param_specs(cfg), ("model.visual", "model.language_model.embed_tokens"))[0])
    loss = training_loss(cfg, inputs, trainable, scale=1.0, balance_scale=1.0)
    value_and_grad(blocks, loss, tree, trainable, grads := {})
    decoder = [
        block for block in blocks if block.paths[0].startswith(("model.language_model.layers", "model.language_model.norm"))
    ]
    assert len(linearized) == len(decoder)
    assert grads.keys() == trainable


def test_frozen_below_a_trainable_leaf_still_passes_gradients(cfg, make_params, make_batch):
    """Freezing changes no gradient of what is left: only the last block of the tower is trained."""
    inputs = prepare(make_batch(cfg), cfg)
    blocks = model.model_blocks(cfg, inputs, rows=inputs.text.target_rows)
    tree = make_params(cfg).to_dict()
    everything = frozenset(path for path, _ in leaves(tree))
    some = frozenset(path for path in everything if path.startswith("model.visual.blocks.2."))
    results = []
    for trainable in (everything, some):
        loss = training_loss(cfg, inputs, trainable, scale=1.0, balance_scale=1.0)
        value_and_grad(blocks, loss, tree, trainable, grads := {})
        results.append(grads)
    assert results[1].keys() == some
    assert all(torch.equal(results[0][path], results[1][path]) for path in some)
    assert all(results[1][path].count_nonzero() for path in some)


def test_shared_head_adds_both_gradients(cfg, make_params, make_batch):
    """A tied embedding is one leaf: its gradient is the sum of the two that the untied leaves get."""
    tied = dataclasses.replace(cfg, tie_word_embeddings=True)
    tied_tree = make_params(tied).to_dict()
    table = tied_tree["model"]["language_model"]["embed_tokens"]["weight"]
    results = []
    for config, tree in ((tied, tied_tree), (cfg, {**tied_tree, "lm_head": {"weight": table}})):
        inputs = prepare(make_batch(config), config)
        trainable = frozenset(path for path, _ in leaves(tree))
        loss = training_loss(config, inputs, trainable, scale=1.0, balance_scale=1.0)
        blocks = model.model_blocks(config, inputs, rows=inputs.text.target_rows)
        value_and_grad(blocks, loss, tree, trainable, grads := {})
        results.append(grads)
    both, untied = results
    path = "model.language_model.embed_tokens.weight"
    torch.testing.assert_close(both[path], untied[path] + untied["lm_head.weight"], rtol=1e-5, atol=1e-6)
    assert "lm_head.weight" not in both and untied["lm_head.weight"].count_nonzero()


def test_gradients_own_their_storage():
    """Autograd hands one tensor to both terms of a sum, and a stride of zero to what is summed; they are added to in place."""

    def fn(p, r):
        return (p["0"] + p["1"] + r.sum(),)

    blocks, trainable = [Block(("p", "r"), (), ("a",), fn)], {"p.0", "p.1", "r"}
    grads = {}
    for _ in range(2):
        value_and_grad(blocks, quadratic(("a",)), make_tree(torch.float32), trainable, grads)
    value_and_grad(blocks, quadratic(("a",)), make_tree(torch.float32), trainable, once := {})
    for path in trainable:
        torch.testing.assert_close(grads[path], 2 * once[path])


def test_gradients_do_not_share_with_cotangents():
    """The gradient of a leaf that is added to a value is that value's cotangent, which an earlier block still waits for."""

    def start(q):
        return (q["w"] * 2.0,)

    def middle(p):
        return (p["0"] * 3.0,)

    def end(p, a, b):
        return (a + b + p["0"],)

    blocks = [Block(("q",), (), ("a",), start), Block(("p",), (), ("b",), middle), Block(("p",), ("a", "b"), ("c",), end)]
    tree, trainable = make_tree(torch.float32), {"p.0", "q.w"}
    value_and_grad(blocks, quadratic(("c",)), tree, trainable, grads := {})
    expected, _ = grad_of_composed(blocks, ("c",), tree, trainable)
    for path in trainable:
        torch.testing.assert_close(grads[path], expected[path])
