"""Processes and their mesh: joining, coordinates, sums over ranks, leaving."""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import Topology, TrainConfig, resolve_topology
from ..platform import Platform

TIMEOUT = datetime.timedelta(minutes=30)  # of one collective; a rank that fails ends the others long before
SETTLE_SECONDS = 0.2


@dataclass(frozen=True)
class Ranks:
    """This process among all: rank and world, its device, the mesh (None: one process), its data-parallel coordinate."""

    rank: int
    world_size: int
    device: torch.device
    topology: Topology
    mesh: DeviceMesh | None
    data_rank: int
    files: dist.ProcessGroup | None = None  # all ranks, on the CPU: agreeing on files, beside what the devices exchange

    @property
    def is_main(self) -> bool:
        """Whether this process writes the logs and files that exist once."""
        return self.rank == 0

    def total(self, *numbers: float) -> list[float]:
        """Each number added up over the data-parallel ranks (ranks that read the same samples count once)."""
        if self.mesh is None:
            return list(numbers)
        mine = numbers if self.data_rank * self._copies == self.rank else [0.0] * len(numbers)
        total = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def largest(self, *numbers: float) -> list[float]:
        """The largest of all ranks' numbers, for each."""
        if self.mesh is None:
            return list(numbers)
        largest = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks; waits for all of them."""
        if self.files is None:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.files)
        return values

    def leave(self) -> None:
        """End the process group. A barrier first: gloo may hang if one rank leaves during another's last collective.

        Then a pause: until torch 2.8 a group is destroyed with the interpreter's lock held, and waits for ever for a thread of
        its own that needs the lock to let go of its last tensor.
        """
        if self.mesh is not None:
            dist.barrier()
            time.sleep(SETTLE_SECONDS)
            dist.destroy_process_group()

    @property
    def _copies(self) -> int:
        """Ranks that read the same samples; they are neighbours, because tp and cp are the mesh's last axes."""
        return self.topology.cp * self.topology.tp


def join(train: TrainConfig, platform: Platform) -> Ranks:
    """Join the processes that the launcher's environment names (none: this one alone) and lay out the mesh.

    Raises ValueError if the accelerator section does not multiply to the number of processes.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    topology = resolve_topology(train.accelerator, world_size)
    local_rank = train.local_rank if train.local_rank is not None else int(os.environ.get("LOCAL_RANK", "0"))
    device = platform.device(local_rank)
    platform.keep_freed_memory()
    if world_size == 1:
        return Ranks(rank, world_size, device, topology, None, 0)
    if not dist.is_initialized():
        dist.init_process_group(train.comm_backend or platform.backend, timeout=TIMEOUT)
    axes = tuple(field.name for field in fields(Topology))
    mesh = init_device_mesh(platform.device_type, astuple(topology), mesh_dim_names=axes)
    files = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(files, dist.ProcessGroup)
    return Ranks(rank, world_size, device, topology, mesh, rank // (topology.cp * topology.tp), files)
