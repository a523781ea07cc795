import errno
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from rank_pool import ranks

from qwen3vl_functional.peers import PeerMemory, peer_memory


def exchange(dtype, shape):
    """Every rank reads every other's numbers."""
    memory = peer_memory(dist.group.WORLD)
    assert memory is not None and memory is peer_memory(dist.group.WORLD)
    mine = (torch.arange(4000).view(*shape) + 10_000 * dist.get_rank()).to(dtype)
    addresses = [0] * dist.get_world_size()
    dist.all_gather_object(addresses, mine.data_ptr())
    for rank, address in enumerate(addresses):
        theirs = torch.empty(*shape, dtype=dtype)
        memory.read(rank, address, theirs)
        assert torch.equal(theirs, (torch.arange(4000).view(*shape) + 10_000 * rank).to(dtype))
        memory.read(rank, address, torch.empty(0))
    dist.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_others_hold(dtype):
    ranks(3).call(exchange, dtype, (40, 100))


def forbidden():
    """One rank may not: then none does, and nobody waits."""

    def read(self, rank, address, target):
        raise OSError(errno.EPERM, "forbidden")

    original = PeerMemory.read
    if dist.get_rank() == 1:
        PeerMemory.read = read
    try:
        assert peer_memory.__wrapped__(dist.group.WORLD) is None
    finally:
        PeerMemory.read = original


def test_one_rank_that_may_not_read():
    ranks(3).call(forbidden)


def test_a_process_that_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    memory = PeerMemory([os.getpid(), process.pid])
    number, found = torch.tensor([7]), torch.zeros(1, dtype=torch.int64)
    memory.read(0, number.data_ptr(), found)
    assert int(found) == 7
    with pytest.raises(OSError, match=r"cannot read the memory of rank 1 \(process \d+\): No such process"):
        memory.read(1, number.data_ptr(), found)
    with pytest.raises(OSError, match="Bad address"):
        memory.read(0, 8, found)
