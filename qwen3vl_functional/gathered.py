"""FSDP as two functions of a block's leaves: gather them before the block, reduce their gradients after it.

The forward never learns of it. Each block's leaves travel in one flat collective (``fused``), cast to the dtype in flight
before they leave; the next block's gather runs while this block computes, and so does the last block's reduction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .collectives import gather_single, scatter_single
from .sharding import Axes, Layout, chunk_range
from .transforms import Values, within


class _Done:
    """A collective over one rank."""

    def wait(self) -> None:
        pass


class _Gather(NamedTuple):
    """A gather under way: rows of ``flat`` (ranks, elements) are the ranks' padded shards, end to end."""

    paths: list[str]
    flat: torch.Tensor
    work: dist.Work
    source: torch.Tensor  # kept alive until the work is done


class _Reduction(NamedTuple):
    """A reduction under way; ``flat`` will hold this rank's padded shards of the summed gradients."""

    paths: list[str]
    flat: torch.Tensor
    work: dist.Work | _Done
    source: torch.Tensor  # kept alive until the work is done
    replicated: bool


class GatheredWeights:
    """Leaves at rest as this rank's shards; whole (along the FSDP axis) only in flight.

    ``reshard``: free a block's whole leaves after its forward and gather them again for its backward, instead of keeping
    them. ``fused``: one collective per block rather than one per leaf. Gradients are summed in ``reduce_dtype``.
    """

    def __init__(
        self,
        shards: Values,
        layouts: Mapping[str, Layout],
        axes: Axes,
        *,
        dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
        reshard: bool = True,
        fused: bool = True,
    ) -> None:
        self.shards, self.layouts, self.axes = shards, layouts, axes
        self.dtype, self.reduce_dtype, self.reshard, self.fused = dtype, reduce_dtype, reshard, fused
        self.world = 1 if axes.shard is None else dist.get_world_size(axes.shard)
        self.rank = 0 if axes.shard is None else dist.get_rank(axes.shard)
        self._ahead: dict[tuple[str, ...], list[_Gather]] = {}
        self._kept: dict[tuple[str, ...], Values] = {}
        self._reductions: list[_Reduction] = []
        self._grads: Values = {}

    def paths(self, roots: Iterable[str]) -> list[str]:
        return within(self.shards, roots)

    def size(self, path: str) -> int:
        return self.shards[path].numel() * self.shards[path].element_size() * self.world

    def prefetch(self, paths: Sequence[str]) -> None:
        key = tuple(paths)
        if key not in self._ahead and key not in self._kept:
            self._ahead[key] = self._start(paths, None)

    def fetch(self, paths: Sequence[str], *, dtype: torch.dtype | None = None) -> Values:
        key = tuple(paths)
        if (kept := self._kept.get(key)) is not None:
            return kept
        gathers = self._ahead.pop(key) if key in self._ahead else self._start(paths, dtype)
        leaves = {path: self._cast(self.shards[path], dtype) for path in paths if not self._is_cut(path)}
        for gather in gathers:
            leaves |= self._unpack(gather)
        leaves = {path: leaves[path] for path in paths}
        if not self.reshard:
            self._kept[key] = leaves
        return leaves

    def release(self, leaves: Values) -> bool:
        emptied = False
        for path, leaf in leaves.items():
            if self.reshard and self._is_cut(path):
                leaf.untyped_storage().resize_(0)
                emptied = True
        return emptied

    def refill(self, leaves: Values) -> None:
        cut = [path for path in leaves if self._is_cut(path)]
        key = tuple(leaves)
        gathers = self._ahead.pop(key) if key in self._ahead else self._start(cut, None)
        for gather in gathers:
            for path in gather.paths:
                leaf = leaves[path]
                leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
            # .data: the graph's version check must not see that the same numbers were written again.
            self._unpack(gather, into={path: leaves[path].data for path in gather.paths})

    def reduce(self, grads: Values, pending: Collection[torch.Tensor] = ()) -> None:
        cut = [path for path in grads if self._is_cut(path)]
        whole = [path for path in grads if not self._is_cut(path)]
        for group in self._groups(cut):
            self._reductions.append(self._reduce_scatter(group, grads))
        for group in self._groups(whole):
            self._reductions.append(self._all_reduce(group, grads))
        while len(self._reductions) > 2:  # bounded memory; two are enough to hide one behind the compute
            self._collect(self._reductions.pop(0))

    def finish(self) -> Values:
        while self._reductions:
            self._collect(self._reductions.pop(0))
        assert not self._ahead, "a gather was begun that nobody fetched"
        self._kept.clear()
        return self._grads

    def _is_cut(self, path: str) -> bool:
        return self.world > 1 and self.layouts[path].fsdp_dim is not None

    def _cast(self, leaf: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        wanted = dtype or self.dtype
        return leaf if wanted is None else leaf.to(wanted)

    def _groups(self, paths: Sequence[str]) -> list[list[str]]:
        if not paths:
            return []
        return [list(paths)] if self.fused else [[path] for path in paths]

    def _piece(self, path: str) -> tuple[int, ...]:
        """Shape of a padded shard: the largest that a rank holds, so that all ranks send alike."""
        dim, shape = self.layouts[path].fsdp_dim, list(self.shards[path].shape)
        assert dim is not None
        shape[dim] = -(-self._full_size(path) // self.world)
        return tuple(shape)

    def _full_size(self, path: str) -> int:
        """Size of the FSDP dim before FSDP cut it (no model axis cuts the same dim)."""
        dim = self.layouts[path].fsdp_dim
        assert dim is not None
        return self.layouts[path].shape[dim]

    def _start(self, paths: Sequence[str], dtype: torch.dtype | None) -> list[_Gather]:
        gathers = []
        for group in self._groups([path for path in paths if self._is_cut(path)]):
            own = torch.cat([_padded(self._cast(self.shards[path], dtype), self._piece(path)).flatten() for path in group])
            flat = own.new_empty(self.world, own.numel())
            work = gather_single(flat.view(-1), own, group=self.axes.shard, async_op=True)
            assert work is not None
            gathers.append(_Gather(group, flat, work, own))
        return gathers

    def _unpack(self, gather: _Gather, into: Values | None = None) -> Values:
        gather.work.wait()
        leaves: Values = {}
        offset = 0
        for path in gather.paths:
            piece, dim, size = self._piece(path), self.layouts[path].fsdp_dim, self._full_size(path)
            assert dim is not None
            end = offset + math.prod(piece)
            pieces = gather.flat[:, offset:end].view(self.world, *piece)
            sizes = [high - low for low, high in (chunk_range(size, self.world, rank) for rank in range(self.world))]
            parts = [pieces[rank].narrow(dim, 0, rows) for rank, rows in enumerate(sizes)]
            if into is None:
                leaves[path] = torch.cat(parts, dim)
            else:
                torch.cat(parts, dim, out=into[path])
            offset = end
        return leaves

    def _reduce_scatter(self, paths: list[str], grads: Values) -> _Reduction:
        total = sum(math.prod(self._piece(path)) for path in paths)
        # Padding is reduced too and never read; zeros only keep it finite.
        even = all(self._full_size(path) % self.world == 0 for path in paths)
        new = torch.empty if even else torch.zeros
        source = new(self.world, total, dtype=self.reduce_dtype, device=grads[paths[0]].device)
        offset = 0
        for path in paths:
            piece, dim = self._piece(path), self.layouts[path].fsdp_dim
            assert dim is not None
            end = offset + math.prod(piece)
            for rank in range(self.world):
                low, high = chunk_range(self._full_size(path), self.world, rank)
                target = source[rank, offset:end].view(piece)
                target.narrow(dim, 0, high - low).copy_(grads[path].narrow(dim, low, high - low))
            offset = end
        flat = source.new_empty(total)
        work = scatter_single(flat, source.view(-1), group=self.axes.shard, async_op=True)
        assert work is not None
        return _Reduction(paths, flat, work, source, replicated=False)

    def _all_reduce(self, paths: list[str], grads: Values) -> _Reduction:
        flat = torch.cat([grads[path].flatten().to(self.reduce_dtype) for path in paths])
        work = dist.all_reduce(flat, group=self.axes.shard, async_op=True) if self.axes.shard is not None else _Done()
        assert work is not None
        return _Reduction(paths, flat, work, flat, replicated=True)

    def _collect(self, reduction: _Reduction) -> None:
        """Wait for a reduction, add it up over the replicas, and add this rank's part to the gradients."""
        reduction.work.wait()
        flat = reduction.flat
        if self.axes.replicate is not None:
            dist.all_reduce(flat, group=self.axes.replicate)
        offset = 0
        for path in reduction.paths:
            shard, dim = self.shards[path], self.layouts[path].fsdp_dim
            piece = tuple(shard.shape) if reduction.replicated else self._piece(path)
            end = offset + math.prod(piece)
            part = flat[offset:end].view(piece)
            if not reduction.replicated:
                assert dim is not None
                part = part.narrow(dim, 0, shard.shape[dim])
            if path in self._grads:
                self._grads[path] += part
            else:
                self._grads[path] = part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            offset = end


def _padded(shard: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(shard.shape) == shape:
        return shard
    out = shard.new_zeros(shape)
    out[tuple(slice(0, size) for size in shard.shape)] = shard
    return out
