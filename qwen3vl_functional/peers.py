"""Memory that ranks on the CPUs of one machine share, and reading what they do not: one copy or none, and no message.

Through sockets the same bytes are copied four times by the cores that should compute. Linux lets processes of one user map the
same memory, and read each other's (``process_vm_readv``); where it does not, there is no PeerMemory and messages do the work.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist


class _Range(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("begin", ctypes.c_void_p), ("length", ctypes.c_size_t))


class PeerMemory:
    """The memory of every rank of a group."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)

    def read(self, rank: int, address: int, target: torch.Tensor) -> None:
        """Fill a contiguous tensor from ``address`` on in a rank's memory, which holds still meanwhile. OSError if it is gone."""
        assert target.is_contiguous()
        begin, left = target.data_ptr(), target.numel() * target.element_size()
        while left:
            here, there = _Range(begin, left), _Range(address, left)
            done = self._read(self.pids[rank], ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if done <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"cannot read the memory of rank {rank} (process {self.pids[rank]}): {os.strerror(number)}")
            begin, address, left = begin + done, address + done, left - done


@functools.cache
def peer_memory(group: dist.ProcessGroup) -> PeerMemory | None:
    """The memory of a gloo group's ranks, if each of them can read all others'; all ranks must ask.

    Tried once, on a random number: a process of the same id on another machine would not hold it.
    """
    probe = torch.tensor([secrets.randbits(62)])
    told: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size(group)
    dist.all_gather_object(told, (os.getpid(), probe.data_ptr(), int(probe)), group=group)
    memory = None
    try:
        memory = PeerMemory([pid for pid, _, _ in told])
        for rank, (_, address, number) in enumerate(told):
            found = torch.zeros(1, dtype=torch.int64)
            memory.read(rank, address, found)
            readable = int(found) == number
            if not readable:
                break
    except (OSError, AttributeError):  # forbidden, or a system without the call
        readable = False
    everywhere = torch.tensor(int(readable))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    return memory if int(everywhere) else None


class _Mapping(mmap.mmap):
    """Memory that several processes map; it goes when the last tensor in it does."""

    base: int


_SHARED: weakref.WeakValueDictionary[int, _Mapping] = weakref.WeakValueDictionary()  # by address of a tensor's storage


def shared_tensors(like: Sequence[tuple[tuple[int, ...], torch.dtype]], group: dist.ProcessGroup) -> list[torch.Tensor] | None:
    """Zeros of the given shapes and dtypes, in the same memory on every rank of a gloo group; None if one of them cannot map it.

    All ranks are on one machine: ask ``peer_memory`` first.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in like]
    begins = [0, *itertools.accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]
    own = -1
    if dist.get_rank(group) == 0:
        own = os.memfd_create("shared tensors")
        os.ftruncate(own, max(begins[-1], 1))
    told = [(os.getpid(), own)]
    dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    mapping = None
    try:
        descriptor = own if own >= 0 else os.open("/proc/{}/fd/{}".format(*told[0]), os.O_RDWR)
        mapping = _Mapping(descriptor, 0)
    except OSError:  # no /proc, or a closed one
        descriptor = own
    everywhere = torch.tensor(int(mapping is not None))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    if descriptor >= 0:
        os.close(descriptor)
    if mapping is None or not int(everywhere):
        return None
    mapping.base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    tensors = []
    for (shape, dtype), begin in zip(like, begins, strict=False):
        if count := math.prod(shape):
            tensors.append(torch.frombuffer(mapping, dtype=dtype, count=count, offset=begin).view(shape))
            _SHARED[tensors[-1].data_ptr()] = mapping
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
    return tensors


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that other ranks map too."""
    return tensor.untyped_storage().data_ptr() in _SHARED


def forget_pages(tensor: torch.Tensor) -> None:
    """Unmap a contiguous shared tensor from this process until it is used again; the numbers stay where they are."""
    mapping = _SHARED[tensor.untyped_storage().data_ptr()]
    begin = tensor.data_ptr() - mapping.base
    end = begin + tensor.numel() * tensor.element_size()
    first, last = -(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE
    if last > first:
        mapping.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)
