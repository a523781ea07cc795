"""Trees of specs: paths, initialisation per leaf, counts, freezing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3vl_functional import init_params, param_specs
from qwen3vl_functional.spec import (
    ParamSpec,
    bias,
    count,
    init_leaf,
    leaves,
    matches,
    norm,
    split_frozen,
    subtree,
    to_tensordict,
    unflatten,
    weight,
)

names = st.text("abc01_", min_size=1, max_size=3)
trees = st.recursive(st.integers(), lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3), max_leaves=12).filter(
    lambda tree: isinstance(tree, dict)
)


@given(trees)
def test_unflatten_inverts_leaves(tree):
    flat = dict(leaves(tree))
    assert unflatten(flat) == tree
    assert list(leaves(unflatten(flat))) == list(flat.items())  # the order too


@given(trees)
def test_subtree_finds_every_node(tree):
    for path, leaf in leaves(tree):
        assert subtree(tree, path) == leaf
        keys = path.split(".")
        for end in range(1, len(keys)):
            root = ".".join(keys[:end])
            below = {full: value for full, value in leaves(tree) if full.startswith(root + ".")}
            assert {f"{root}.{path}": value for path, value in leaves(subtree(tree, root))} == below


@given(trees)
def test_tensordict_keeps_paths(tree):
    flat = {path: torch.tensor(value % 1000) for path, value in leaves(tree)}
    back = dict(leaves(to_tensordict(flat)))
    assert {path: int(leaf) for path, leaf in back.items()} == {path: int(leaf) for path, leaf in flat.items()}


def test_init_depends_on_seed_and_path_only():
    specs = {"a": {"x": weight((7, 5), ("p", "q"), 0.3), "y": weight((7, 5), ("p", "q"), 0.3)}, "b": norm(4, "p")}
    reordered = {"b": specs["b"], "a": {"y": specs["a"]["y"]}}
    first, again, other = (dict(leaves(init_params(specs, seed=seed))) for seed in (3, 3, 4))
    part = dict(leaves(init_params(reordered, seed=3)))
    assert all(torch.equal(first[path], again[path]) for path in first)
    assert all(torch.equal(first[path], part[path]) for path in part)
    assert not torch.equal(first["a.x"], first["a.y"])
    assert not torch.equal(first["a.x"], other["a.x"])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    init_params(specs, seed=3)
    assert torch.equal(state, torch.get_rng_state())


def test_init_statistics_and_dtype():
    drawn = init_leaf("a", weight((400, 500), ("p", "q"), 0.05), seed=0)
    assert abs(float(drawn.std()) / 0.05 - 1) < 0.01  # 200,000 draws: the standard error is 0.16 %
    assert abs(float(drawn.mean())) < 5 * 0.05 / 200_000**0.5
    rounded = init_leaf("a", weight((400, 500), ("p", "q"), 0.05), seed=0, dtype=torch.bfloat16)
    assert torch.equal(rounded, drawn.bfloat16())
    assert torch.equal(init_leaf("b", bias(3, "p"), seed=0), torch.zeros(3))
    assert torch.equal(init_leaf("b", norm(3, "p")["weight"], seed=0), torch.ones(3))


def test_count(cfg):
    specs = param_specs(cfg)
    assert count(specs) == sum(leaf.numel() for _, leaf in leaves(init_params(specs, seed=0)))
    assert count({"a": ParamSpec((2, 3), ("p", "q")), "b": {"c": ParamSpec((), ())}}) == 7


def test_matches_whole_names():
    assert matches("model.visual.merger.norm.bias", ("model.visual",))
    assert matches("model.visual", ("model.visual",))
    assert not matches("model.visual_other.weight", ("model.visual",))
    assert not matches("model.language_model.norm.weight", ("visual", "norm"))
    assert not matches("model", ("model.visual",))


def test_split_frozen(cfg):
    specs = param_specs(cfg)
    paths = [path for path, _ in leaves(specs)]
    trainable, frozen = split_frozen(specs, ("model.visual", "lm_head"))
    assert sorted(trainable + frozen) == sorted(paths)
    assert frozen == [path for path in paths if path.startswith(("model.visual.", "lm_head."))]
    assert any("deepstack_merger_list" in path for path in frozen) and any("pos_embed" in path for path in frozen)
    assert split_frozen(specs, ()) == (paths, [])
    with pytest.raises(ValueError, match=r"'model\.visuals' matches no parameter"):
        split_frozen(specs, ("model.visual", "model.visuals"))
    with pytest.raises(ValueError, match="leave nothing to train"):
        split_frozen(specs, ("model", "lm_head.weight"))
