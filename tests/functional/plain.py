"""The transformers of chains over plain nested dicts of whole leaves."""

from qwen3vl_functional import transforms
from qwen3vl_functional.transforms import LocalWeights


def value_and_grad(blocks, loss, tree, trainable, grads, *, dtype=None):
    """Adds to ``grads``."""
    weights = LocalWeights(tree, dtype, grads)
    result = transforms.value_and_grad(blocks, loss, weights, trainable)
    assert weights.finish() is grads
    return result


def run(blocks, tree, *, dtype=None):
    return transforms.run(blocks, LocalWeights(tree, dtype))


def fuse(blocks, tree, keep, **options):
    return transforms.fuse(blocks, LocalWeights(tree), keep, **options)
