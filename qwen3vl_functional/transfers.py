"""How leaves travel between the ranks that share them: out of each other's memory, as messages in pairs, or as collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .collectives import gather_single, scatter_single
from .peers import PeerMemory
from .sharding import Layout, chunk_range, contiguous_stride
from .transforms import Values


class Transfer(Protocol):
    """Leaves on their way."""

    def finish(self) -> Values:
        """Wait; whole leaves of a gather, this rank's summed parts of a reduction."""
        ...


class Cut:
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

    def slot(self, shard: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's shard, in memory where all ranks' shards lie end to end, this rank's ``shard`` among them."""
        low, high = self.ranges[rank]
        shape = (*self.shape[: self.dim], high - low, *self.shape[self.dim + 1 :])
        row = math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])
        return shard.as_strided(shape, contiguous_stride(shape), low * row)

    def whole(self, shard: torch.Tensor) -> torch.Tensor:
        """The whole leaf in such memory; only where the leading dim is cut do shards end to end make one."""
        assert self.dim == 0
        return shard.as_strided(self.shape, contiguous_stride(self.shape), 0)

    def peers(self) -> list[tuple[int, int]]:
        """The other ranks: in the group, and globally."""
        return [(rank, dist.get_global_rank(self.group, rank)) for rank in range(self.world) if rank != self.rank]


Cuts = Mapping[str, Cut]


def cuts_of(shards: Values, layouts: Mapping[str, Layout], group: dist.ProcessGroup) -> dict[str, Cut]:
    """How the FSDP axis, whose ranks are ``group``, cuts the leaves that it cuts."""
    return {
        path: Cut(layouts[path], tuple(shard.shape), group)
        for path, shard in shards.items()
        if layouts[path].fsdp_dim is not None
    }


class MemoryGather:
    """This rank copies all shards from where they lie at rest; nobody else has to do anything."""

    def __init__(self, shards: Values, whole: Values, cuts: Cuts) -> None:
        self.whole = whole
        for path, shard in shards.items():
            cut = cuts[path]
            for rank in range(cut.world):
                cut.part(whole[path], rank).copy_(cut.slot(shard, rank))

    def finish(self) -> Values:
        return self.whole


class MemoryReduction:
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


class MessageGather:
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


class MessageReduction:
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


class FlatGather:
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


class FlatReduction:
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


class Sum:
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
