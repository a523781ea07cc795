"""One record per parameter, and trees of them: the single source of shapes, placement, initialisation and decay."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict


class ParamSpec(NamedTuple):
    """Everything about one leaf: ``dims`` names each tensor dim, ``std`` is used by ``init="normal"`` alone.

    ``unit``: rows that stay together along the dim that a model axis cuts, such as those of one head.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.0
    decay: bool = True
    unit: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


SpecTree = dict[str, Any]  # nested: str -> SpecTree | ParamSpec


def weight(shape: tuple[int, ...], dims: tuple[str, ...], std: float, *, unit: int = 1) -> ParamSpec:
    """A matrix or table, N(0, std)."""
    return ParamSpec(shape, dims, "normal", std, unit=unit)


def bias(size: int, dim: str) -> ParamSpec:
    """An additive vector, zero at first, not decayed."""
    return ParamSpec((size,), (dim,), "zeros", decay=False)


def scale(size: int, dim: str) -> ParamSpec:
    """A norm's gain, one at first, not decayed."""
    return ParamSpec((size,), (dim,), "ones", decay=False)


def linear(out_size: int, in_size: int, dims: tuple[str, str], std: float) -> SpecTree:
    """A linear map with bias: ``weight (out, in)``, ``bias (out)``."""
    return {"weight": weight((out_size, in_size), dims, std), "bias": bias(out_size, dims[0])}


def norm(size: int, dim: str) -> SpecTree:
    """A layer norm's ``weight`` and ``bias``."""
    return {"weight": scale(size, dim), "bias": bias(size, dim)}


def leaves(tree: Mapping[str, Any] | TensorDict) -> Iterator[tuple[str, Any]]:
    """Walk a nested dict or TensorDict in order, yielding dotted paths (which are Hugging Face's names) and leaves."""
    found: list[tuple[str, Any]] = []

    def walk(node: Mapping[str, Any] | TensorDict, prefix: str) -> None:
        for key, value in node.items():
            # Tensors first: to ask whether something is a TensorDict takes as long as the rest of the walk.
            if isinstance(value, torch.Tensor) or not isinstance(value, (dict, TensorDict)):
                found.append((f"{prefix}{key}", value))
            else:
                walk(value, f"{prefix}{key}.")

    walk(tree, "")  # into one list: a chain of generators takes twice as long, several times a step
    return iter(found)


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nest a mapping of dotted paths; the inverse of ``dict(leaves(tree))``."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def subtree(tree: Mapping[str, Any], path: str) -> Any:
    """The node at a dotted path."""
    for key in path.split("."):
        tree = tree[key]
    return tree


def count(specs: SpecTree) -> int:
    """Number of parameters in a tree of specs."""
    return sum(spec.numel for _, spec in leaves(specs))


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a leaf lies in one of the named subtrees (``model.visual`` holds ``model.visual.merger.norm.bias``)."""
    return any(path == pattern or path.startswith(pattern + ".") for pattern in patterns)


def split_frozen(specs: SpecTree, frozen: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Paths of the trainable and of the frozen leaves.

    Raises ValueError if a pattern matches no leaf, or if nothing is left to train.
    """
    paths = [path for path, _ in leaves(specs)]
    for pattern in frozen:
        if not any(matches(path, (pattern,)) for path in paths):
            raise ValueError(f"freeze pattern {pattern!r} matches no parameter; subtrees are named like {paths[0]!r}")
    trainable = [path for path in paths if not matches(path, frozen)]
    if not trainable:
        raise ValueError(f"freeze patterns {list(frozen)} leave nothing to train")
    return trainable, [path for path in paths if matches(path, frozen)]


def init_leaf(
    path: str, spec: ParamSpec, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Initialise one leaf from ``(seed, path)`` alone, so the weights depend neither on the order nor on the ranks."""
    if spec.init == "zeros":
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    if spec.init == "ones":
        return torch.ones(spec.shape, dtype=dtype, device=device)
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # Drawn on the CPU in fp32 on every device: the generators of devices differ.
    return torch.empty(spec.shape).normal_(0.0, spec.std, generator=generator).to(device=device, dtype=dtype)


def to_tensordict(flat: Mapping[str, torch.Tensor]) -> TensorDict:
    """Nest tensors under dotted paths as a TensorDict (no batch dim)."""
    return TensorDict(unflatten(flat), batch_size=[])
