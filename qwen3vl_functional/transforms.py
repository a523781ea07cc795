"""Function transformers: a model is a list of blocks over named values, differentiated block by block.

``torch.func.grad`` differentiates with ``create_graph=True`` and so keeps everything until the end: three times the memory.
A chain of pullbacks, each released as soon as it was pulled, costs what plain autograd costs, and leaves every cast,
recompute and release as a line in a loop that one can read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict
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


class Weights(Protocol):
    """Where a chain gets its leaves from, by full path, and where their gradients go."""

    def paths(self, roots: Iterable[str]) -> list[str]:
        """Full paths of the leaves in the named subtrees."""
        ...

    def size(self, path: str) -> int:
        """Bytes that a whole leaf takes at rest."""
        ...

    def prefetch(self, paths: Sequence[str], into: Values | None = None) -> None:
        """Announce the next ``fetch``, or the ``refill`` of ``into``."""
        ...

    def fetch(self, paths: Sequence[str], *, dtype: torch.dtype | None = None) -> Values:
        """Leaves ready for use."""
        ...

    def release(self, leaves: Values) -> bool:
        """The forward is done with these; True if they were emptied and need a ``refill`` before their backward."""
        ...

    def refill(self, leaves: Values) -> None:
        """Make the same tensors hold the same numbers again."""
        ...

    def reduce(self, grads: Values, pending: Collection[torch.Tensor] = ()) -> None:
        """Take the gradients of a block's leaves; they may share storage with ``pending`` cotangents."""
        ...

    def finish(self) -> Values:
        """Gradients taken so far, of all micro-batches: fp32, by path, shaped as the leaves at rest."""
        ...


class LocalWeights:
    """Whole leaves of one process, nested or by path; ``dtype`` casts them in flight, ``grads`` holds what earlier calls left."""

    def __init__(
        self, params: Mapping[str, Any] | TensorDict, dtype: torch.dtype | None = None, grads: Values | None = None
    ) -> None:
        self._params, self._dtype = dict(leaves(params)), dtype
        self._grads: Values = {} if grads is None else grads

    def paths(self, roots: Iterable[str]) -> list[str]:
        return within(self._params, roots)

    def size(self, path: str) -> int:
        return self._params[path].numel() * self._params[path].element_size()

    def prefetch(self, paths: Sequence[str], into: Values | None = None) -> None:
        pass

    def fetch(self, paths: Sequence[str], *, dtype: torch.dtype | None = None) -> Values:
        wanted = dtype or self._dtype
        return {path: self._params[path] if wanted is None else self._params[path].to(wanted) for path in paths}

    def release(self, leaves: Values) -> bool:
        return False

    def refill(self, leaves: Values) -> None:
        raise AssertionError("nothing was released")

    def reduce(self, grads: Values, pending: Collection[torch.Tensor] = ()) -> None:
        accumulate(self._grads, grads, pending)

    def finish(self) -> Values:
        return self._grads


def within(paths: Iterable[str], roots: Iterable[str]) -> list[str]:
    """The paths that lie in the named subtrees, subtree by subtree."""
    return list(_within(tuple(paths), tuple(roots)))


@functools.lru_cache(maxsize=4096)  # asked for every block in every step
def _within(paths: tuple[str, ...], roots: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for root in roots for path in paths if path == root or path.startswith(root + ".")))


def accumulate(grads: Values, new: Values, pending: Collection[torch.Tensor] = ()) -> None:
    """Add gradients in fp32; the first of a path becomes its buffer.

    Autograd may hand out one tensor twice (both terms of a sum get the same gradient), so a buffer that another new
    gradient or a ``pending`` cotangent shares is copied first. Disjoint parts of one storage are fine.
    """
    uses = Counter(grad.data_ptr() for grad in new.values())
    held = {tensor.untyped_storage().data_ptr() for tensor in pending}
    for path, grad in new.items():
        if path in grads:
            grads[path] += grad
            continue
        alone = uses[grad.data_ptr()] == 1 and grad.is_contiguous() and grad.untyped_storage().data_ptr() not in held
        if not (alone and grad.dtype == torch.float32):
            grad = grad.to(torch.float32, copy=not alone, memory_format=torch.contiguous_format)
        grads[path] = grad


def run(blocks: Sequence[Block], weights: Weights) -> Values:
    """Evaluate a chain without derivatives."""
    values: Values = {}
    own = [weights.paths(block.paths) for block in blocks]
    for i, block in enumerate(blocks):
        leaves_ = weights.fetch(own[i])
        if i + 1 < len(blocks):
            weights.prefetch(own[i + 1])
        function = _function(block, leaves_, {name: values[name] for name in block.reads})
        values.update(zip(block.writes, function({}, {}), strict=True))
        weights.release(leaves_)
    return values


def value_and_grad(
    blocks: Sequence[Block], loss: Loss, weights: Weights, trainable: Collection[str], *, compiled: bool = False
) -> LossValue:
    """Run a chain forward and pull its loss back, handing the gradients of trainable leaves to ``weights``.

    A block that needs no gradient stores nothing; a ``remat`` block stores its inputs alone and is run again when its turn
    comes. The next block's weights are announced before a block computes, so they may travel meanwhile.
    """
    own = [weights.paths(block.paths) for block in blocks]
    values: Values = {}
    differentiable: set[str] = set()
    tape: list[_Step] = []
    for i, block in enumerate(blocks):
        leaves_ = weights.fetch(own[i])
        if i + 1 < len(blocks):
            weights.prefetch(own[i + 1])
        reads = {name: values[name] for name in block.reads}
        names = [path for path in own[i] if path in trainable], [name for name in block.reads if name in differentiable]
        linearized = None
        if any(names) and not block.remat:
            linearized = _linearize(block, leaves_, reads, *names, compiled)
            outputs = linearized.outputs
        else:
            outputs = _function(block, leaves_, reads, compiled)({}, {})
        emptied = weights.release(leaves_)
        if any(names):
            differentiable.update(block.writes)
            # Without locals of its own: what they named last would stay alive through the backward.
            tape.append(
                _Step(
                    block,
                    own[i],
                    {} if linearized else reads,
                    *names,
                    linearized,
                    leaves_ if emptied and linearized else {},
                )
            )
        else:
            differentiable.difference_update(block.writes)
        values.update(zip(block.writes, outputs, strict=True))
        del leaves_, reads, outputs, linearized

    head = weights.paths(loss.paths)
    head_leaves = weights.fetch(head, dtype=loss.dtype)
    if tape:
        tape[-1].prefetch(weights)
    result = loss.fn(head_leaves, {name: values[name] for name in loss.reads})
    cotangents = {name: grad for name, grad in result.read_grads.items() if name in differentiable}
    weights.reduce({path: grad for path, grad in result.param_grads.items() if path in trainable}, cotangents.values())
    del values, head_leaves
    while tape:
        step = tape.pop()
        linearized = step.linearized
        if linearized is None:
            leaves_ = weights.fetch(step.paths)
        elif step.emptied:
            weights.refill(step.emptied)
        if tape:
            tape[-1].prefetch(weights)
        if linearized is None:
            linearized = _linearize(step.block, leaves_, step.reads, step.params, step.inputs, compiled)
            del leaves_
        outputs, pullback = linearized
        cotangent = tuple(
            cotangents.pop(name) if name in cotangents else torch.zeros_like(output)
            for name, output in zip(step.block.writes, outputs, strict=True)
        )
        param_grads, read_grads = pullback(cotangent)
        del step, linearized, outputs, pullback, cotangent
        for name, grad in read_grads.items():
            cotangents[name] = cotangents[name] + grad if name in cotangents else grad
        weights.reduce(param_grads, cotangents.values())
        del param_grads, read_grads
    return result._replace(param_grads={}, read_grads={})


def fuse(blocks: Sequence[Block], weights: Weights, keep: Collection[str], *, max_bytes: int = FUSE_BYTES) -> list[Block]:
    """Join neighbouring blocks while their parameters stay below ``max_bytes``: one vjp costs less than several.

    ``keep`` names the values that are read after the chain. Rematerialised blocks stay as they are.
    """
    runs: list[list[Block]] = []
    room = 0
    for block in blocks:
        size = sum(weights.size(path) for path in weights.paths(block.paths))
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


def compile_end(
    blocks: Sequence[Block], loss: Loss, weights: Weights, trainable: Collection[str], *, max_bytes: int = FUSE_BYTES
) -> tuple[Sequence[Block], Loss]:
    """Where the last block and the loss are bound by dispatch, make them one compiled end of the chain: value and gradients
    in one program. For a small model that is the whole chain."""
    size = sum(weights.size(path) for path in weights.paths((*blocks[-1].paths, *loss.paths)))
    if blocks[-1].remat or loss.dtype is not None or size > max_bytes:
        return blocks, loss
    end = absorb(blocks[-1], loss, weights, trainable)
    program = _program(end.fn.__code__, len(end.paths), True)
    return blocks[:-1], end._replace(fn=functools.partial(program, end.fn))


def absorb(block: Block, loss: Loss, weights: Weights, trainable: Collection[str]) -> Loss:
    """The end of a chain with its last block in it, differentiated on the spot."""
    paths = weights.paths(block.paths)
    reads = tuple(dict.fromkeys([*block.reads, *(name for name in loss.reads if name not in block.writes)]))

    def fn(params: Mapping[str, Any], values: Values) -> LossValue:
        leaves = {path: params[path] for path in paths}
        free = {path: leaf for path, leaf in leaves.items() if path in trainable}
        inputs = {name: values[name] for name in block.reads}
        outputs, pullback = vjp(_function(block, leaves, {}), free, inputs)[:2]
        written = dict(zip(block.writes, outputs, strict=True))
        end = loss.fn(params, {**values, **written})
        seeds = tuple(end.read_grads.get(name, torch.zeros_like(output)) for name, output in written.items())
        param_grads, read_grads = pullback(seeds, retain_graph=False, create_graph=False)
        passed = {name: grad for name, grad in end.read_grads.items() if name not in written}
        return end._replace(param_grads=_sum(end.param_grads, param_grads), read_grads=_sum(passed, read_grads))

    return Loss((*block.paths, *loss.paths), reads, fn)


def _sum(some: Values, others: Values) -> Values:
    """Gradients of both, added where both have one."""
    return {**some, **{name: some[name] + grad if name in some else grad for name, grad in others.items()}}


_Function = Callable[[Values, Values], tuple[torch.Tensor, ...]]


class _Linearized(NamedTuple):
    outputs: tuple[torch.Tensor, ...]
    pullback: Callable[[tuple[torch.Tensor, ...]], tuple[Values, Values]]


class _Step(NamedTuple):
    """One entry of the tape: what the backward of a block needs."""

    block: Block
    paths: list[str]
    reads: Values  # inputs, kept only where the block is run again
    params: list[str]  # what to differentiate
    inputs: list[str]
    linearized: _Linearized | None  # None: run again
    emptied: Values  # leaves to refill before the pullback

    def prefetch(self, weights: Weights) -> None:
        """Announce what the backward will ask for."""
        if self.linearized is None:
            weights.prefetch(self.paths)
        elif self.emptied:
            weights.prefetch(self.paths, self.emptied)


def _linearize(
    block: Block, leaves: Values, reads: Values, params: Collection[str], inputs: Collection[str], compiled: bool
) -> _Linearized:
    """Evaluate a block, keeping the residuals until the pullback is called (once).

    It returns what ``torch.func.vjp`` returns, whose wrappers around every tensor of every operation would make a step that
    is bound by dispatch a fifth longer, and which cannot look into a compiled program.
    """
    weights = {path: leaves[path].detach().requires_grad_() for path in params}
    values = {name: reads[name].detach().requires_grad_() for name in inputs}
    with torch.enable_grad():
        outputs = _function(block, leaves, reads, compiled)(weights, values)

    def pullback(cotangents: tuple[torch.Tensor, ...]) -> tuple[Values, Values]:
        ends = [(output, grad) for output, grad in zip(outputs, cotangents, strict=True) if output.requires_grad]
        outs, seeds = [output for output, _ in ends], [grad for _, grad in ends]
        primals = [*weights.values(), *values.values()]
        found = torch.autograd.grad(outs, primals, seeds, allow_unused=True)
        # Zeros of our own: those of torch 2.6's materialize_grads require a gradient.
        grads = iter([torch.zeros_like(x) if grad is None else grad for x, grad in zip(primals, found, strict=True)])
        return {path: next(grads) for path in weights}, {name: next(grads) for name in values}

    return _Linearized(tuple(output.detach() for output in outputs), pullback)


def _function(block: Block, leaves: Values, reads: Values, compiled: bool = False) -> _Function:
    """The block as a function of those leaves and inputs that are given again; blocks index their leaves by name."""

    def function(params: Values, inputs: Values) -> tuple[torch.Tensor, ...]:
        tree = unflatten({**leaves, **params})
        values = {**reads, **inputs}
        arguments = *(subtree(tree, path) for path in block.paths), *(values[name] for name in block.reads)
        if not compiled:
            return block.fn(*arguments)
        return _program(block.fn.__code__, len(arguments), bool(params or inputs))(block.fn, *arguments)

    return function


@functools.cache
def _program(code: CodeType, num_arguments: int, differentiated: bool) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A compiled caller for functions of one code object: for all layers of a kind, that is.

    torch keeps a few programs (for one shape, for varying shapes, ...) for each code object that it compiles and then goes on
    without compiling, hence a copy of the code for each use: with and without gradients, with and without optional arguments.
    """

    def call(fn: Callable[..., tuple[torch.Tensor, ...]], *arguments: Any) -> tuple[torch.Tensor, ...]:
        return fn(*arguments)

    call.__code__ = call.__code__.replace(co_name=code.co_name)
    return torch.compile(call)


def compiler_problem(device: torch.device) -> str | None:
    """Why torch.compile does not work on this device, in one line; None where it does. Asked by compiling an addition."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # a missing compiler shows in as many ways as there are backends
        return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    return None
