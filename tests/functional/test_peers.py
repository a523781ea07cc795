import errno
import gc
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from rank_pool import ranks

from qwen3vl_functional import peers
from qwen3vl_functional.peers import PeerMemory, forget_pages, is_shared, peer_memory, shared_tensors


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


def written_by_one_seen_by_all():
    shapes = [((3, 1000), torch.float32), ((0, 2), torch.float32), ((), torch.int64), ((5000,), torch.bfloat16)]
    tensors = shared_tensors(shapes, dist.group.WORLD)
    assert tensors is not None
    for (shape, dtype), tensor in zip(shapes, tensors, strict=True):
        assert tensor.shape == shape and tensor.dtype == dtype and not tensor.any()
        assert is_shared(tensor) == bool(tensor.numel()) and is_shared(tensor[:1] if tensor.ndim else tensor) == is_shared(tensor)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert not is_shared(torch.zeros(3))
    dist.barrier()
    tensors[0][dist.get_rank()] = dist.get_rank() + 1.0
    dist.barrier()
    expected = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 1000)
    assert torch.equal(tensors[0], expected)
    for part in (tensors[0], tensors[0][1], tensors[3][10:4000], tensors[2]):
        forget_pages(part)
    assert torch.equal(tensors[0], expected) and not tensors[3].any()
    dist.barrier()
    before = len(peers._SHARED)
    del tensors, tensor, part
    gc.collect()
    assert len(peers._SHARED) < before and not open_memory_files()


def open_memory_files():
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(name) for name in names if os.path.exists(name) and "shared tensors" in os.readlink(name)]


def test_memory_of_all_ranks():
    ranks(3).call(written_by_one_seen_by_all)


def one_cannot_map():
    def refused(path, flags):
        raise OSError(errno.EACCES, "forbidden")

    original = os.open
    if dist.get_rank() == 1:
        os.open = refused
    try:
        assert shared_tensors([((4,), torch.float32)], dist.group.WORLD) is None
    finally:
        os.open = original
    assert not open_memory_files()


def test_one_rank_that_may_not_map():
    ranks(3).call(one_cannot_map)
