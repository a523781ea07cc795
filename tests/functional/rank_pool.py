"""Gloo ranks for tests: processes that start once for each number of ranks and then take one case after another."""

from __future__ import annotations

import atexit
import functools
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from qwen3vl_functional.sharding import AXES

TIME_LIMIT = 60.0  # seconds for a case, the start of the processes included


class Ranks:
    """``call`` runs a function of a test module on every rank and returns what each rank returned.

    An exception on a rank, or a rank that does not answer in time, is an AssertionError; the processes are then started anew
    for the next call, so hypothesis can go on to shrink the case.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        atexit.register(self.stop)

    def call(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        deadline = time.monotonic() + TIME_LIMIT
        try:
            for pipe in self._pipes:
                pipe.send_bytes(pickle.dumps((fn, arguments)))
            results: dict[int, Any] = {}
            while len(results) < self.world:
                for rank in [rank for rank in range(self.world) if rank not in results]:
                    if not self._pipes[rank].poll(0.002):
                        continue
                    ok, results[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                    assert ok, f"rank {rank} of {self.world}:\n{results[rank]}"
                assert time.monotonic() < deadline, f"ranks hang: only {sorted(results)} of {self.world} answered"
        except BaseException:  # a rank may wait for ever for the one that failed
            self.stop()
            raise
        return [results[rank] for rank in range(self.world)]

    def _start(self) -> None:
        # The server imports torch once and forks the ranks; spawned ones would each import it again.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "hypothesis", "qwen3vl_functional.step"])
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, str(store), theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []


@functools.cache
def ranks(world: int) -> Ranks:
    """The ranks that all tests of a session share."""
    return Ranks(world)


@functools.cache
def mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """On a rank: the mesh of these axis sizes, made at its first use (on all ranks alike)."""
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES)


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIME_LIMIT)
    )
    while True:
        try:
            fn, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, fn(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
