"""Function transformers: a model is a list of blocks over named values, differentiated block by block on torch.func.vjp.

``torch.func.grad`` differentiates with ``create_graph=True`` and so keeps everything until the end: three times the memory.
A chain of ``vjp`` pullbacks, each released as soon as it was pulled, costs what plain autograd costs, and leaves every cast,
recompute and release as a line in a loop that one can read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.func import vjp

from .spec import leaves, subtree, unflatten

Values = dict[str, torch.Tensor]

# Blocks whose parameters are fewer than this are bound by dispatch, not by arithmetic.
FUSE_BYTES = 64 << 20


class Block(NamedTuple):
    """One differentiable step: ``fn(*subtrees at paths, *values read) -> tuple of values written``.

    A value may be overwritten (``reads=("text",), writes=("text",)``) and read by several blocks.
    """

    paths: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    fn: Callable[..., tuple[torch.Tensor, ...]]
    remat: bool = False


class LossValue(NamedTuple):
    """What the end of a chain returns: its value, numbers to report, and the gradients it has already taken."""

    loss: torch.Tensor
    metrics: Values
    param_grads: Values  # by full path
    read_grads: Values  # by value name


class Loss(NamedTuple):
    """The end of a chain over the leaves at ``paths``: ``fn(leaves by path, values read) -> LossValue``, gradients included."""

    paths: tuple[str, ...]
    reads: tuple[str, ...]
    fn: Callable[[Mapping[str, Any], Values], LossValue]
    dtype: torch.dtype | None = None  # of its parameters, where it differs from the blocks'


def run(blocks: Sequence[Block], params: Mapping[str, Any], *, dtype: torch.dtype | None = None) -> Values:
    """Evaluate a chain without derivatives; ``dtype`` casts the parameters in flight."""
    values: Values = {}
    for block in blocks:
        call = _bind(block, params, values, trainable=(), differentiable=(), dtype=dtype)
        values.update(zip(block.writes, call.evaluate(), strict=True))
    return values


def value_and_grad(
    blocks: Sequence[Block],
    loss: Loss,
    params: Mapping[str, Any],
    trainable: Collection[str],
    grads: Values,
    *,
    dtype: torch.dtype | None = None,
) -> LossValue:
    """Run a chain forward and pull its loss back, adding the gradient of every trainable leaf to ``grads`` in place.

    ``grads`` (full path -> fp32 tensor) may start empty; successive micro-batches add up in it. A block that needs no
    gradient stores nothing; a ``remat`` block stores its inputs alone and is run again when its turn comes.
    """
    values: Values = {}
    differentiable: set[str] = set()
    tape: list[tuple[Block, _Call | _Linearized]] = []
    for block in blocks:
        call = _bind(block, params, values, trainable, differentiable, dtype)
        if not call.needs_grad:
            outputs = call.evaluate()
            differentiable.difference_update(block.writes)
        else:
            if block.remat:
                outputs = call.evaluate()
                tape.append((block, call))
            else:
                linearized = call.linearize()
                outputs = linearized.outputs
                tape.append((block, linearized))
            differentiable.update(block.writes)
        values.update(zip(block.writes, outputs, strict=True))
        del call, outputs

    own = _cast({path: subtree(params, path) for path in loss.paths}, loss.dtype or dtype)
    result = loss.fn(own, {name: values[name] for name in loss.reads})
    _accumulate(grads, result.param_grads, trainable)
    cotangents = {name: grad for name, grad in result.read_grads.items() if name in differentiable}
    del values, own
    while tape:
        block, entry = tape.pop()
        outputs, pullback = entry.linearize() if isinstance(entry, _Call) else entry
        cotangent = tuple(
            cotangents.pop(name) if name in cotangents else torch.zeros_like(output)
            for name, output in zip(block.writes, outputs, strict=True)
        )
        del outputs, entry
        param_grads, read_grads = pullback(cotangent, retain_graph=False, create_graph=False)
        del pullback, cotangent
        for name, grad in read_grads.items():
            cotangents[name] = cotangents[name] + grad if name in cotangents else grad
        _accumulate(grads, param_grads, trainable, cotangents.values())
    return result._replace(param_grads={}, read_grads={})


def fuse(
    blocks: Sequence[Block], params: Mapping[str, Any], keep: Collection[str], *, max_bytes: int = FUSE_BYTES
) -> list[Block]:
    """Join neighbouring blocks while their parameters stay below ``max_bytes``: one vjp costs less than several.

    ``keep`` names the values that are read after the chain. Rematerialised blocks stay as they are.
    """
    runs: list[list[Block]] = []
    room = 0
    for block in blocks:
        size = sum(leaf.numel() * leaf.element_size() for root in block.paths for _, leaf in _leaves(params, root))
        if not runs or block.remat or runs[-1][-1].remat or size > room:
            runs.append([])
            room = max_bytes
        runs[-1].append(block)
        room -= size
    fused: list[Block] = []
    needed = set(keep)
    for run_ in reversed(runs):
        fused.append(run_[0] if len(run_) == 1 else _joined(run_, needed))
        needed = (needed - set(fused[-1].writes)) | set(fused[-1].reads)
    return fused[::-1]


def _joined(blocks: Sequence[Block], needed: Collection[str]) -> Block:
    """One block that does what several do, in turn, and writes what is needed after them."""
    paths = tuple(dict.fromkeys(path for block in blocks for path in block.paths))
    written: set[str] = set()
    reads: dict[str, None] = {}
    for block in blocks:
        reads.update(dict.fromkeys(name for name in block.reads if name not in written))
        written.update(block.writes)
    writes = tuple(name for name in dict.fromkeys(name for block in blocks for name in block.writes) if name in needed)
    writes = writes or blocks[-1].writes  # nobody reads it: its gradients are zeros, not missing

    def fn(*arguments: Any) -> tuple[torch.Tensor, ...]:
        subtrees = dict(zip(paths, arguments[: len(paths)], strict=True))
        values = dict(zip(reads, arguments[len(paths) :], strict=True))
        for block in blocks:
            outputs = block.fn(*(subtrees[path] for path in block.paths), *(values[name] for name in block.reads))
            values.update(zip(block.writes, outputs, strict=True))
        return tuple(values[name] for name in writes)

    return Block(paths, tuple(reads), writes, fn)


class _Linearized(NamedTuple):
    outputs: tuple[torch.Tensor, ...]
    pullback: Callable[..., tuple[Values, Values]]


class _Call(NamedTuple):
    """A block bound to its leaves and inputs: those to differentiate, and the others. Blocks index leaves by name."""

    block: Block
    params: Values  # by full path
    frozen_params: Values
    reads: Values
    constant_reads: Values
    dtype: torch.dtype | None

    @property
    def needs_grad(self) -> bool:
        return bool(self.params or self.reads)

    def evaluate(self) -> tuple[torch.Tensor, ...]:
        return self._function(_cast(self.frozen_params, self.dtype))(_cast(self.params, self.dtype), self.reads)

    def linearize(self) -> _Linearized:
        """Evaluate, keeping the residuals until the pullback is called (once)."""
        function = self._function(_cast(self.frozen_params, self.dtype))
        outputs, pullback = vjp(function, _cast(self.params, self.dtype), self.reads)[:2]
        return _Linearized(outputs, pullback)

    def _function(self, frozen_params: Values) -> Callable[[Values, Values], tuple[torch.Tensor, ...]]:
        block, constant_reads = self.block, self.constant_reads

        def function(params: Values, reads: Values) -> tuple[torch.Tensor, ...]:
            tree = unflatten({**frozen_params, **params})
            reads = {**constant_reads, **reads}
            return block.fn(*(subtree(tree, path) for path in block.paths), *(reads[name] for name in block.reads))

        return function


def _bind(
    block: Block,
    params: Mapping[str, Any],
    values: Values,
    trainable: Collection[str],
    differentiable: Collection[str],
    dtype: torch.dtype | None,
) -> _Call:
    own = {path: leaf for root in block.paths for path, leaf in _leaves(params, root)}
    return _Call(
        block,
        params={path: leaf for path, leaf in own.items() if path in trainable},
        frozen_params={path: leaf for path, leaf in own.items() if path not in trainable},
        reads={name: values[name] for name in block.reads if name in differentiable},
        constant_reads={name: values[name] for name in block.reads if name not in differentiable},
        dtype=dtype,
    )


def _leaves(params: Mapping[str, Any], root: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Full paths and tensors of a subtree, which may be a single leaf."""
    node = subtree(params, root)
    return iter([(root, node)]) if isinstance(node, torch.Tensor) else leaves(node, root + ".")


def _cast(params: Values, dtype: torch.dtype | None) -> Values:
    return params if dtype is None else {path: leaf.to(dtype) for path, leaf in params.items()}


def _accumulate(grads: Values, new: Values, trainable: Collection[str], pending: Collection[torch.Tensor] = ()) -> None:
    """Add gradients in fp32; the first of a path becomes its buffer.

    Autograd may hand out one tensor twice (both terms of a sum get the same gradient), so a buffer that another new
    gradient or a ``pending`` cotangent shares is copied first. Disjoint parts of one storage are fine.
    """
    uses = Counter(grad.data_ptr() for grad in new.values())
    held = {tensor.untyped_storage().data_ptr() for tensor in pending}
    for path, grad in new.items():
        if path not in trainable:
            continue
        if path in grads:
            grads[path] += grad
            continue
        alone = uses[grad.data_ptr()] == 1 and grad.is_contiguous() and grad.untyped_storage().data_ptr() not in held
        if not (alone and grad.dtype == torch.float32):
            grad = grad.to(torch.float32, copy=not alone, memory_format=torch.contiguous_format)
        grads[path] = grad
