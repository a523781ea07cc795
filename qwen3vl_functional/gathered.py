"""FSDP as two functions of a block's leaves: gather them before the block, reduce their gradients after it.

The forward never learns of it. Leaves travel in the dtype in flight; the next block's gather runs while this block computes,
and so does the last block's reduction. On accelerators a block is one flat collective each way (``fused``). Ranks that compute
on the CPUs of one machine read each other's memory instead; failing that, plain messages between pairs of ranks beat gloo's
collectives, and need no buffer to pack into.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from .collectives import gather_single, scatter_single
from .peers import PeerMemory, peer_memory
from .sharding import Axes, Layout, chunk_range
from .transforms import Values, within

Transport = Literal["memory", "messages", "collectives"]


class _Transfer(Protocol):
    """Leaves on their way."""

    def finish(self) -> Values:
        """Wait; whole leaves of a gather, this rank's summed parts of a reduction."""
        ...


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
        self.shards, self.axes = shards, axes
        self.dtype, self.reduce_dtype, self.reshard, self.fused = dtype, reduce_dtype, reshard, fused
        self.cuts = {
            path: _Cut(layouts[path], tuple(shard.shape), axes.shard)
            for path, shard in shards.items()
            if axes.shard is not None and layouts[path].fsdp_dim is not None
        }
        self.memory: PeerMemory | None = None
        self.transport: Transport = "collectives"
        if axes.shard is not None and dist.get_backend(axes.shard) == "gloo":
            self.memory = peer_memory(axes.shard)
            self.transport = "messages" if self.memory is None else "memory"
            if self.memory is not None:
                self._addresses = _exchanged_addresses(shards, axes.shard)
        self._ahead: dict[tuple[str, ...], list[_Transfer]] = {}
        self._kept: dict[tuple[str, ...], Values] = {}
        self._reductions: list[_Transfer] = []
        self._grads: Values = {}

    def paths(self, roots: Iterable[str]) -> list[str]:
        return within(self.shards, roots)

    def size(self, path: str) -> int:
        shape = self.cuts[path].shape if path in self.cuts else self.shards[path].shape
        return math.prod(shape) * self.shards[path].element_size()

    def prefetch(self, paths: Sequence[str], into: Values | None = None) -> None:
        key = tuple(paths)
        if self.transport != "memory" and key not in self._ahead and key not in self._kept:
            self._ahead[key] = self._gather(paths, None, into)

    def fetch(self, paths: Sequence[str], *, dtype: torch.dtype | None = None) -> Values:
        key = tuple(paths)
        if (kept := self._kept.get(key)) is not None:
            return kept
        transfers = self._ahead.pop(key) if key in self._ahead else self._gather(paths, dtype, None)
        leaves = {path: self._cast(self.shards[path], dtype) for path in paths if path not in self.cuts}
        for transfer in transfers:
            leaves |= transfer.finish()
        leaves = {path: leaves[path] for path in paths}
        if not self.reshard:
            self._kept[key] = leaves
        return leaves

    def release(self, leaves: Values) -> bool:
        emptied = [leaf for path, leaf in leaves.items() if self.reshard and path in self.cuts]
        for leaf in emptied:
            leaf.untyped_storage().resize_(0)
        return bool(emptied)

    def refill(self, leaves: Values) -> None:
        key = tuple(leaves)
        for transfer in self._ahead.pop(key) if key in self._ahead else self._gather(list(leaves), None, leaves):
            transfer.finish()

    def reduce(self, grads: Values, pending: Collection[torch.Tensor] = ()) -> None:
        cut = {path: grad for path, grad in grads.items() if path in self.cuts}
        whole = {path: grad for path, grad in grads.items() if path not in self.cuts}
        if self.transport == "memory" and cut:
            self._reductions.append(_ReadReduction(cut, self.cuts, self.reduce_dtype, self.memory))
        elif self.transport == "messages" and cut:
            self._reductions.append(_PairwiseReduction(cut, self.cuts, self.reduce_dtype))
        else:
            for group in self._groups(cut):
                self._reductions.append(_FlatReduction({path: cut[path] for path in group}, self.cuts, self.reduce_dtype))
        for group in self._groups(whole):
            self._reductions.append(_Sum({path: whole[path] for path in group}, self.axes.shard, self.reduce_dtype))
        while len(self._reductions) > 2:  # bounded memory; two are enough to hide one behind the compute
            self._collect(self._reductions.pop(0))

    def finish(self) -> Values:
        while self._reductions:
            self._collect(self._reductions.pop(0))
        assert not self._ahead, "a gather was begun that nobody fetched"
        if self.transport == "memory":
            dist.barrier(group=self.axes.shard)  # nobody changes what another rank still reads
        self._kept.clear()
        return self._grads

    def _cast(self, leaf: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        wanted = dtype or self.dtype
        return leaf if wanted is None else leaf.to(wanted)

    def _groups(self, paths: Iterable[str]) -> list[list[str]]:
        paths = list(paths)
        return [paths] if self.fused and paths else [[path] for path in paths]

    def _gather(self, paths: Sequence[str], dtype: torch.dtype | None, into: Values | None) -> list[_Transfer]:
        """Begin to gather the cut leaves among ``paths``, into emptied tensors where they are given."""
        cut = [path for path in paths if path in self.cuts]
        whole = {}
        for path in cut:
            if into is None:
                shard = self.shards[path]
                whole[path] = shard.new_empty(self.cuts[path].shape, dtype=dtype or self.dtype or shard.dtype)
            else:
                into[path].untyped_storage().resize_(into[path].numel() * into[path].element_size())
                # .data: the graph's version check must not see that the same numbers are written again.
                whole[path] = into[path].data
        if self.transport == "memory":
            return (
                [_Read({path: self.shards[path] for path in cut}, whole, self.cuts, self.memory, self._addresses)] if cut else []
            )
        shards = {path: self._cast(self.shards[path], dtype) for path in cut}
        if self.transport == "messages" and shards:
            return [_PairwiseGather(shards, whole, self.cuts)]
        groups = self._groups(shards)
        return [_FlatGather({path: shards[path] for path in group}, whole, self.cuts) for group in groups]

    def _collect(self, reduction: _Transfer) -> None:
        """Wait for a reduction, add it up over the replicas, and add this rank's part to the gradients."""
        parts = reduction.finish()
        if self.axes.replicate is not None:
            flat = torch.cat([part.flatten() for part in parts.values()])
            dist.all_reduce(flat, group=self.axes.replicate)
            pieces = flat.split([part.numel() for part in parts.values()])
            parts = {path: piece.view(part.shape) for (path, part), piece in zip(parts.items(), pieces, strict=True)}
        for path, part in parts.items():
            if path in self._grads:
                self._grads[path] += part
            else:
                shared = part.untyped_storage().nbytes() != part.nbytes  # with a collective's buffer, which is not kept
                self._grads[path] = part.to(torch.float32, copy=shared, memory_format=torch.contiguous_format)


def _exchanged_addresses(shards: Values, group: dist.ProcessGroup) -> list[dict[str, int]]:
    """Where each rank's shards lie in its memory. Whoever knows it also knows that all ranks have finished their last update."""
    assert all(shard.is_contiguous() for shard in shards.values())
    own = torch.tensor([shard.data_ptr() for shard in shards.values()])
    table = own.new_empty(dist.get_world_size(group), len(own))
    dist.all_gather(list(table.unbind()), own, group=group)
    return [dict(zip(shards, addresses, strict=True)) for addresses in table.tolist()]


class _Cut:
    """How the FSDP axis cuts one leaf: its whole shape in flight, the dim, and each rank's rows."""

    def __init__(self, layout: Layout, shard: tuple[int, ...], group: dist.ProcessGroup) -> None:
        assert layout.fsdp_dim is not None
        self.dim, self.group = layout.fsdp_dim, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        size = layout.shape[self.dim]  # no model axis cuts the same dim
        self.ranges = [chunk_range(size, self.world, rank) for rank in range(self.world)]
        self.shape = (*shard[: self.dim], size, *shard[self.dim + 1 :])
        self.padded = (*shard[: self.dim], -(-size // self.world), *shard[self.dim + 1 :])  # the largest shard

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's rows of a whole leaf."""
        low, high = self.ranges[rank]
        return whole.narrow(self.dim, low, high - low)

    def peers(self) -> list[tuple[int, int]]:
        """The other ranks: in the group, and globally."""
        return [(rank, dist.get_global_rank(self.group, rank)) for rank in range(self.world) if rank != self.rank]


Cuts = Mapping[str, _Cut]


class _Read:
    """This rank takes the others' shards out of their memory, as they lie at rest; nobody else has to do anything."""

    def __init__(
        self, shards: Values, whole: Values, cuts: Cuts, memory: PeerMemory | None, addresses: list[dict[str, int]]
    ) -> None:
        assert memory is not None
        self.whole = whole
        for path, shard in shards.items():
            cut = cuts[path]
            cut.part(whole[path], cut.rank).copy_(shard)
            for rank, _ in cut.peers():
                rows = cut.part(whole[path], rank)
                if rows.numel():
                    as_it_lies = rows.is_contiguous() and rows.dtype == shard.dtype
                    target = rows if as_it_lies else shard.new_empty(rows.shape)
                    memory.read(rank, addresses[rank][path], target)
                    if target is not rows:
                        rows.copy_(target)

    def finish(self) -> Values:
        return self.whole


class _ReadReduction:
    """Every rank tells the others where their rows of its gradients lie, reads its own rows at all of them, and says when it
    has; until then the gradients are kept."""

    def __init__(self, grads: Values, cuts: Cuts, dtype: torch.dtype, memory: PeerMemory | None) -> None:
        assert memory is not None
        self.cuts, self.memory, self.grads = cuts, memory, {path: grad.to(dtype) for path, grad in grads.items()}
        first = cuts[next(iter(grads))]
        self.group, self.peers = first.group, first.peers()
        self.rows: list[list[torch.Tensor]] = []
        self.told: dict[int, torch.Tensor] = {}
        self.works: list[Any] = []
        for rank, peer in self.peers:
            rows = [cuts[path].part(grad, rank).contiguous() for path, grad in self.grads.items()]
            where = torch.tensor([part.data_ptr() for part in rows])
            self.told[rank] = torch.empty_like(where)
            self.rows += [rows, [where]]
            self.works.append(dist.isend(where, peer, group=self.group))
            self.works.append(dist.irecv(self.told[rank], peer, group=self.group))

    def finish(self) -> Values:
        for work in self.works:
            work.wait()
        where = {rank: dict(zip(self.grads, told.tolist(), strict=True)) for rank, told in self.told.items()}
        sums = {}
        for path, grad in self.grads.items():
            cut = self.cuts[path]
            own = cut.part(grad, cut.rank)
            parts = [own] * cut.world
            for rank, _ in self.peers:
                parts[rank] = torch.empty_like(own, memory_format=torch.contiguous_format)
                self.memory.read(rank, where[rank][path], parts[rank])
            sums[path] = _add_up(parts, cut.rank)
        done, theirs = torch.zeros(1), [torch.empty(1) for _ in self.peers]
        works: list[Any] = [dist.isend(done, peer, group=self.group, tag=1) for _, peer in self.peers]
        works += [dist.irecv(signal, peer, group=self.group, tag=1) for signal, (_, peer) in zip(theirs, self.peers, strict=True)]
        for work in works:
            work.wait()
        return sums


class _PairwiseGather:
    """Every rank sends its shards to every other, which receives them where they belong."""

    def __init__(self, shards: Values, whole: Values, cuts: Cuts) -> None:
        self.whole, self.sent, self.works = whole, [], []
        self.detours: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows of an inner dim do not lie end to end
        for path, shard in shards.items():
            cut, own = cuts[path], shard.contiguous()
            cut.part(whole[path], cut.rank).copy_(own)
            self.sent.append(own)
            for rank, peer in cut.peers():
                rows = cut.part(whole[path], rank)
                if own.numel():
                    self.works.append(dist.isend(own, peer, group=cut.group))
                if rows.numel():
                    target = rows if rows.is_contiguous() else torch.empty_like(rows, memory_format=torch.contiguous_format)
                    self.works.append(dist.irecv(target, peer, group=cut.group))
                    if target is not rows:
                        self.detours.append((rows, target))

    def finish(self) -> Values:
        for work in self.works:
            work.wait()
        for rows, target in self.detours:
            rows.copy_(target)
        return self.whole


class _PairwiseReduction:
    """Every rank sends to every other that one's rows of its gradients, and adds up its own rows in rank order."""

    def __init__(self, grads: Values, cuts: Cuts, dtype: torch.dtype) -> None:
        self.cuts, self.sent, self.works = cuts, [], []
        self.parts: dict[str, list[torch.Tensor]] = {}
        for path, grad in grads.items():
            cut, grad = cuts[path], grad.to(dtype)
            own = cut.part(grad, cut.rank)
            parts = [
                own if rank == cut.rank else torch.empty_like(own, memory_format=torch.contiguous_format)
                for rank in range(cut.world)
            ]
            for rank, peer in cut.peers():
                rows = cut.part(grad, rank).contiguous()
                self.sent.append(rows)
                if rows.numel():
                    self.works.append(dist.isend(rows, peer, group=cut.group))
                if own.numel():
                    self.works.append(dist.irecv(parts[rank], peer, group=cut.group))
            self.parts[path] = parts

    def finish(self) -> Values:
        for work in self.works:
            work.wait()
        return {path: _add_up(parts, self.cuts[path].rank) for path, parts in self.parts.items()}


def _add_up(parts: list[torch.Tensor], own: int) -> torch.Tensor:
    """Sum in rank order, in memory that was received into; the rank's own part still belongs to its gradient."""
    total = torch.add(parts[0], parts[1], out=parts[1 if own == 0 else 0])
    for part in parts[2:]:
        total += part
    return total


class _FlatGather:
    """One collective: rows of ``flat`` are the ranks' padded shards, end to end."""

    def __init__(self, shards: Values, whole: Values, cuts: Cuts) -> None:
        self.paths, self.whole, self.cuts = list(shards), whole, cuts
        first = cuts[self.paths[0]]
        self.own = torch.cat([_padded(shard, cuts[path].padded).flatten() for path, shard in shards.items()])
        self.flat = self.own.new_empty(first.world, self.own.numel())
        self.work = gather_single(self.flat.view(-1), self.own, group=first.group, async_op=True)

    def finish(self) -> Values:
        assert self.work is not None
        self.work.wait()
        sizes = [math.prod(self.cuts[path].padded) for path in self.paths]
        for path, pieces in zip(self.paths, self.flat.split(sizes, dim=1), strict=True):
            cut = self.cuts[path]
            for rank in range(cut.world):
                rows = cut.part(self.whole[path], rank)
                rows.copy_(pieces[rank].view(cut.padded).narrow(cut.dim, 0, rows.shape[cut.dim]))
        return {path: self.whole[path] for path in self.paths}


class _FlatReduction:
    """One collective: rows of ``source`` are each rank's padded parts of the gradients, end to end."""

    def __init__(self, grads: Values, cuts: Cuts, dtype: torch.dtype) -> None:
        self.paths, self.cuts = list(grads), cuts
        first = cuts[self.paths[0]]
        self.sizes = [math.prod(cuts[path].padded) for path in self.paths]
        # Padding is reduced too and never read; zeros only keep it finite.
        self.source = torch.zeros(first.world, sum(self.sizes), dtype=dtype, device=grads[self.paths[0]].device)
        for path, target in zip(self.paths, self.source.split(self.sizes, dim=1), strict=True):
            cut = cuts[path]
            for rank in range(cut.world):
                rows = cut.part(grads[path], rank)
                target[rank].view(cut.padded).narrow(cut.dim, 0, rows.shape[cut.dim]).copy_(rows)
        self.flat = self.source.new_empty(sum(self.sizes))
        self.work = scatter_single(self.flat, self.source.view(-1), group=first.group, async_op=True)

    def finish(self) -> Values:
        assert self.work is not None
        self.work.wait()
        parts = {}
        for path, piece in zip(self.paths, self.flat.split(self.sizes), strict=True):
            cut = self.cuts[path]
            low, high = cut.ranges[cut.rank]
            parts[path] = piece.view(cut.padded).narrow(cut.dim, 0, high - low)
        return parts


class _Sum:
    """Gradients of leaves that FSDP leaves whole: added up over its ranks."""

    def __init__(self, grads: Values, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        self.grads = grads
        self.flat = torch.cat([grad.flatten().to(dtype) for grad in grads.values()])
        self.work = None if group is None else dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> Values:
        if self.work is not None:
            self.work.wait()
        pieces = self.flat.split([grad.numel() for grad in self.grads.values()])
        return {path: piece.view(grad.shape) for (path, grad), piece in zip(self.grads.items(), pieces, strict=True)}


def _padded(shard: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(shard.shape) == shape:
        return shard
    out = shard.new_zeros(shape)
    out[tuple(slice(0, size) for size in shard.shape)] = shard
    return out
