"""Contenders in processes of their own that take turns: none of them inherits another's memory, and a drift of the machine hits
all alike."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyper_parallel.platform import Platform

WARMUP_ROUNDS = 2
Step = Callable[[], float]  # returns the loss
Build = Callable[[int], Step]  # of a rank


class Measured(NamedTuple):
    """Median seconds a step, of the slowest rank; peak bytes of the largest rank; what was counted in one more step."""

    seconds: float
    peak_memory: int
    first_loss: float
    counted: int


class Team:
    """The processes of one contender, one a rank."""

    def __init__(self, build: Build, *, ranks: int = 1, threads: int | None = None, count: Callable[[Step], int] | None = None):
        context, port = multiprocessing.get_context("spawn"), _free_port()
        self.pipes, self.processes = [], []
        threads = threads or torch.get_num_threads()
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            arguments = (build, rank, ranks, threads, port, count, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.first_loss: float = self._receive()[0]

    def step(self, repeats: int = 1) -> float:
        """Seconds of a step, of the slowest rank, over some in a row."""
        for pipe in self.pipes:
            pipe.send(repeats)
        return max(self._receive()) / repeats

    def finish(self) -> tuple[int, int]:
        """Peak bytes of the largest rank, and what rank 0 counted."""
        for pipe in self.pipes:
            pipe.send(0)
        reports = self._receive()
        for process in self.processes:
            process.join()
        return max(peak for peak, _ in reports), reports[0][1]

    def _receive(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise RuntimeError("a contender's process ended before its turn; what it said is above") from None


def measure(
    teams: Mapping[str, Team], *, rounds: int, repeats: int = 1, between: Callable[[], None] = lambda: None
) -> dict[str, Measured]:
    """Let the teams take turns, ``repeats`` steps each, and end them."""
    seconds: dict[str, list[float]] = {name: [] for name in teams}
    for turn in range(WARMUP_ROUNDS + rounds):
        between()
        for name, team in teams.items():
            took = team.step(repeats)
            if turn >= WARMUP_ROUNDS:
                seconds[name].append(took)
    ends = {name: team.finish() for name, team in teams.items()}
    return {
        name: Measured(statistics.median(seconds[name]), ends[name][0], teams[name].first_loss, ends[name][1]) for name in teams
    }


def _serve(
    build: Build, rank: int, ranks: int, threads: int, port: int, count: Callable[[Step], int] | None, pipe: Connection
) -> None:
    """One rank: build, then step when told, until told to stop."""
    torch.set_num_threads(threads)
    Platform("cpu").keep_freed_memory()  # as the Trainer does, for the peer too
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
        dist.init_process_group("gloo")
    step = build(rank)
    pipe.send(step())
    while repeats := pipe.recv():
        begin = time.perf_counter()
        for _ in range(repeats):
            step()
        pipe.send(time.perf_counter() - begin)
    peak = Platform("cpu").peak_memory()
    pipe.send((peak, count(step) if count else 0))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
