"""Reading the memory of other ranks on this machine, for ranks that compute on CPUs: one copy and no message.

Through sockets the same bytes are copied four times by the cores that should compute. Linux lets a process read another one of
the same user (``process_vm_readv``); where it does not, there is no PeerMemory and messages do the work.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets

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
