"""Compiled blocks against the same blocks as they are: losses and gradients of a step, over batches of changing shapes."""

import os
import shutil

import pytest
import torch
import torch._dynamo

from qwen3vl_functional import Recipe, step, transforms
from qwen3vl_functional.moe import can_compile_experts
from qwen3vl_functional.spec import leaves, split_frozen
from qwen3vl_functional.transforms import LocalWeights, compiler_problem

# Where both are there, torch.compile has to work: a failure is a failure then.
needs_compiler = pytest.mark.skipif(
    not can_compile_experts() or shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="compiling wants a torch with a grouped matmul (train.compile is refused without) and a C++ compiler",
)


@pytest.fixture(autouse=True)
def fresh_programs():
    yield
    forget_programs()


def forget_programs():
    """In this process; torch keeps them on disk."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    transforms._program.cache_clear()


def assert_same_gradients(cfg, params, batch, *, frozen=(), remat="off"):
    trainable = frozenset(split_frozen(step.param_specs(cfg), frozen)[0])
    plain, compiled = (
        step.accumulate(LocalWeights(params), [batch], cfg, trainable, Recipe(remat=remat, compiled=compiled))
        for compiled in (False, True)
    )
    torch.testing.assert_close(compiled.loss, plain.loss, rtol=1e-6, atol=1e-6)
    assert compiled.grads.keys() == plain.grads.keys() == trainable
    for path, grad in plain.grads.items():
        assert (compiled.grads[path] - grad).norm() <= 1e-5 * grad.norm(), path


def num_programs():
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@needs_compiler
@pytest.mark.parametrize("remat", ["off", pytest.param("full", marks=pytest.mark.slow)])
def test_gradients(balanced_cfg, make_params, make_batch, remat):
    params = make_params(balanced_cfg)
    before = {path: leaf.clone() for path, leaf in leaves(params)}
    assert_same_gradients(balanced_cfg, params, make_batch(balanced_cfg), remat=remat)
    assert all(torch.equal(leaf, before[path]) and not leaf.requires_grad for path, leaf in leaves(params))


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("remat", "frozen"), [("off", ()), ("full", ("model.visual",)), ("selective", ("model.language_model.layers.0",))]
)
def test_shapes_that_change(monkeypatch, cfg, make_params, make_batch, remat, frozen):
    """Block by block, as in a large model: a few programs serve all batches, made anew or found where torch keeps them."""
    monkeypatch.setattr(step, "fuse", lambda blocks, weights, keep: list(blocks))
    params = make_params(cfg)
    for _ in range(2):
        forget_programs()
        programs = []
        for seed, lengths in enumerate([(9, 4), (12, 30), (7, 7, 7), (21,), (3, 14, 5), (40, 11), (25, 25)]):
            batch = make_batch(cfg, seed=seed, text_lengths=lengths, images=seed != 4)
            assert_same_gradients(cfg, params, batch, frozen=frozen, remat=remat)
            programs.append(num_programs())
        assert programs[-1] < 8 * programs[0] and programs[-2:] == [programs[-1]] * 2, programs


def test_a_compiler_that_fails_is_reported(monkeypatch):
    def fail(function):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", fail)
    assert compiler_problem(torch.device("cpu")) == "RuntimeError: no compiler"
