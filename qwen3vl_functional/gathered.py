"""FSDP as two functions of a block's leaves: gather them before the block, reduce their gradients after it.

The forward never learns of it. Leaves travel in the dtype in flight; the next block's gather runs while this block computes,
and so does the last block's reduction. On accelerators a block is one flat collective each way (``fused``). Ranks that compute
on the CPUs of one machine may ``share`` the memory of their leaves, where those lie whole; failing that, plain messages between
pairs of ranks beat gloo's collectives, and need no buffer to pack into.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict

from .peers import PeerMemory, forget_pages, is_shared, peer_memory, shared_tensors
from .sharding import Axes, Layout, Placement, local_view
from .spec import leaves, to_tensordict
from .transfers import (
    FlatGather,
    FlatReduction,
    MemoryGather,
    MemoryReduction,
    MessageGather,
    MessageReduction,
    Sum,
    Transfer,
    cuts_of,
)
from .transforms import Values, within

Transport = Literal["memory", "messages", "collectives"]


def share(params: TensorDict, placement: Placement) -> TensorDict:
    """Move a placed tree to memory that all ranks map, so that none of it travels: for ranks on the CPUs of one machine.

    A tree on anything else, or that nobody cuts, comes back as it is. All ranks must call it.
    """
    group, flat = placement.axes.shard, dict(leaves(params))
    on_cpu = all(leaf.device.type == "cpu" for leaf in flat.values())
    if group is None or not on_cpu or dist.get_backend(group) != "gloo" or peer_memory(group) is None:
        return params
    local = {path: local_view(leaf) for path, leaf in flat.items()}
    cuts = cuts_of(local, placement.layouts, group)
    memory = shared_tensors([(cut.shape, local[path].dtype) for path, cut in cuts.items()], group)
    if memory is None:
        return params
    for (path, cut), whole in zip(cuts.items(), memory, strict=True):
        flat[path] = placement.wrap(path, cut.slot(whole, cut.rank).copy_(local[path]))
    return to_tensordict(flat)


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
        self.cuts = {} if axes.shard is None else cuts_of(shards, layouts, axes.shard)
        self.memory: PeerMemory | None = None
        self.transport: Transport = "collectives"
        if axes.shard is not None and dist.get_backend(axes.shard) == "gloo":
            self.transport = "messages"
            lies_shared = {is_shared(shards[path]) for path, cut in self.cuts.items() if math.prod(cut.shape)}
            if lies_shared == {True}:
                self.memory, self.transport = peer_memory(axes.shard), "memory"
                dist.barrier(group=axes.shard)  # all ranks have finished their last update
        self._ahead: dict[tuple[str, ...], list[Transfer]] = {}
        self._kept: dict[tuple[str, ...], Values] = {}
        self._reductions: list[Transfer] = []
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
        leaves |= {path: self.cuts[path].whole(self.shards[path]) for path in paths if self._lies_whole(path, dtype)}
        for transfer in transfers:
            leaves |= transfer.finish()
        leaves = {path: leaves[path] for path in paths}
        if not self.reshard:
            self._kept[key] = leaves
        return leaves

    def release(self, leaves: Values) -> bool:
        if not self.reshard:
            return False
        self._forget(leaves)
        emptied = [leaf for path, leaf in leaves.items() if path in self.cuts and leaf.numel() and not is_shared(leaf)]
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
        self._forget(cut)
        if self.transport == "memory" and cut:
            self._reductions.append(MemoryReduction(cut, self.cuts, self.reduce_dtype, self.memory))
        elif self.transport == "messages" and cut:
            self._reductions.append(MessageReduction(cut, self.cuts, self.reduce_dtype))
        else:
            for group in self._groups(cut):
                self._reductions.append(FlatReduction({path: cut[path] for path in group}, self.cuts, self.reduce_dtype))
        for group in self._groups(whole):
            self._reductions.append(Sum({path: whole[path] for path in group}, self.axes.shard, self.reduce_dtype))
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

    def _lies_whole(self, path: str, dtype: torch.dtype | None) -> bool:
        """Whether a leaf can be used where all ranks' shards of it lie."""
        wanted = dtype or self.dtype or self.shards[path].dtype
        cut = self.cuts.get(path)
        return self.transport == "memory" and cut is not None and cut.dim == 0 and wanted == self.shards[path].dtype

    def _forget(self, paths: Iterable[str]) -> None:
        """Let others' shards go from this process's pages."""
        for path in paths:
            if path in self.cuts and is_shared(self.shards[path]):
                for rank, _ in self.cuts[path].peers():
                    forget_pages(self.cuts[path].slot(self.shards[path], rank))

    def _cast(self, leaf: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        wanted = dtype or self.dtype
        return leaf if wanted is None else leaf.to(wanted)

    def _groups(self, paths: Iterable[str]) -> list[list[str]]:
        paths = list(paths)
        return [paths] if self.fused and paths else [[path] for path in paths]

    def _gather(self, paths: Sequence[str], dtype: torch.dtype | None, into: Values | None) -> list[Transfer]:
        """Begin to gather the cut leaves among ``paths``, into emptied tensors where they are given."""
        cut = [path for path in paths if path in self.cuts and not self._lies_whole(path, dtype)]
        whole = {}
        for path in cut:
            if into is None:
                shard = self.shards[path]
                whole[path] = shard.new_empty(self.cuts[path].shape, dtype=dtype or self.dtype or shard.dtype)
            else:
                into[path].untyped_storage().resize_(into[path].numel() * into[path].element_size())
                # .data: the graph's version check must not see that the same numbers are written again.
                whole[path] = into[path].data
        if not cut:
            return []
        if self.transport == "memory":
            return [MemoryGather({path: self.shards[path] for path in cut}, whole, self.cuts)]
        shards = {path: self._cast(self.shards[path], dtype) for path in cut}
        if self.transport == "messages":
            return [MessageGather(shards, whole, self.cuts)]
        groups = self._groups(shards)
        return [FlatGather({path: shards[path] for path in group}, whole, self.cuts) for group in groups]

    def _collect(self, reduction: Transfer) -> None:
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
