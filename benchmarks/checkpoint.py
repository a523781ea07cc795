"""Saving and loading 138 M parameters with their moments: ours, torch's DCP on the same tensors, and the disk itself.

    python benchmarks/checkpoint.py [--ranks 2] [--rounds 5] [--directory DIR]

One run, the contenders in turns, each round in another order. Times are of the slowest rank, and the best over rounds: disks of
virtual machines vary by a factor of three from one second to the next (the median stands beside it). Files are written through
to the disk, and dropped from the page cache before they are read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import SMALL

from hyper_parallel.config_loader import config_from_dict
from hyper_parallel.trainer.resume import Progress, problems
from hyper_parallel.trainer.trainer import Trainer
from qwen3vl_functional.spec import leaves

BLOCK = 1 << 24
SETTLE_SECONDS = 2.0  # before each write: a shared disk takes in some gigabytes at once, then falls back


def configuration(directory: Path, ranks: int) -> dict[str, Any]:
    architecture = SMALL.config.to_dict()
    ids = {name: architecture[name] for name in architecture if name.endswith("_token_id")}
    overrides = {"vl": True, **ids, "text_config": architecture["text_config"], "vision_config": architecture["vision_config"]}
    return {
        "model": {"config_overrides": overrides},
        "data": {"type": "vl_dummy", "max_seq_len": 256, "vl_grid_h": 16, "vl_grid_w": 16, "vl_grid_t": 1},
        "train": {
            "max_steps": 1000,
            "global_batch_size": 2,
            "accelerator": {"dp_shard": ranks},
            "checkpoint": {"output_dir": str(directory / "ours"), "save_hf_weights": False},
        },
    }


def rotated(contenders: list[Any], repeat: int) -> list[Any]:
    """Another one begins in every round."""
    first = repeat % len(contenders)
    return contenders[first:] + contenders[:first]


def drop_from_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def raw_write(path: Path, size: int) -> None:
    block = memoryview(bytearray(os.urandom(BLOCK)))
    with path.open("wb", buffering=0) as file:
        for begin in range(0, size, BLOCK):
            file.write(block[: min(BLOCK, size - begin)])
        os.fsync(file.fileno())


def raw_read(path: Path) -> None:
    block = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def dcp_state(trainer: Trainer) -> dict[str, Any]:
    """The same tensors as DCP takes them: DTensors by name."""
    state = trainer.model.state  # pyright: ignore[reportAttributeAccessIssue]
    trees = {"model": state.params, "exp_avg": state.opt_state.exp_avg, "exp_avg_sq": state.opt_state.exp_avg_sq}
    return {f"{kind}.{path}": leaf for kind, tree in trees.items() for path, leaf in leaves(tree)}


def work(rank: int, ranks: int, port: int, rounds: int, directory: Path, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    trainer = Trainer(config_from_dict(configuration(directory, ranks), source="benchmark"))
    if ranks == 1:
        dist.init_process_group("gloo")
    checkpointer, loader, model = trainer.checkpointer, trainer.loader, trainer.model
    checkpointer.say = lambda message: None
    settings = checkpointer.settings
    batches = iter(loader)
    times: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any], repeat: int) -> None:
        dist.barrier()
        begin = time.perf_counter()
        action()
        elapsed = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        if repeat >= 0:
            times.setdefault(name, []).append(float(elapsed))

    def step() -> float:
        """One training step; the seconds it waited for a snapshot."""
        waited = 0.0

        def before_update() -> None:
            nonlocal waited
            begin = time.perf_counter()
            checkpointer.before_update()
            waited = time.perf_counter() - begin

        model.train_step([next(batches) for _ in range(trainer.micro_batches)], before_update)
        return waited

    step()
    step_directory, dcp_directory = directory / "ours" / "step_1", directory / "dcp"
    mine = 3 * sum(part.tensor.numel() * part.tensor.element_size() for part in model.snapshot().params.values())
    tp = None if ranks == 1 else other_topology(trainer, directory, ranks)

    def cold() -> None:
        dist.barrier()
        if rank == 0:
            drop_from_cache(directory)

    def load(which: Any, mesh: Any) -> None:
        def setup() -> None:
            which.setup(total_steps=1000, device=trainer.ranks.device, mesh=mesh, resume=step_directory)

        found = problems(step_directory, trainer.ranks, setup)
        assert not found, found

    raw = directory / f"raw_{rank}"
    writes: list[tuple[str, Callable[[], Any]]] = [
        ("raw write", lambda: raw_write(raw, mine)),
        ("ours: save", lambda: checkpointer.save(Progress(1), loader)),
        ("DCP: save", lambda: dcp.save(dcp_state(trainer), checkpoint_id=dcp_directory)),
    ]
    reads: list[tuple[str, Callable[[], Any]]] = [
        ("raw read", lambda: raw_read(raw)),
        ("ours: load", lambda: load(model, trainer.ranks.mesh)),
        ("DCP: load", lambda: dcp.load(dcp_state(trainer), checkpoint_id=dcp_directory)),
    ]
    if tp is not None:
        other, mesh, tensors = tp
        reads.append(("ours: load on TP", lambda: load(other, mesh)))
        reads.append(("DCP: load on TP", lambda: dcp.load(tensors, checkpoint_id=dcp_directory)))

    for repeat in range(-1, rounds):
        raw.unlink(missing_ok=True)
        if rank == 0:  # nobody's time holds the deletion of what an earlier round wrote
            shutil.rmtree(step_directory, ignore_errors=True)
            shutil.rmtree(dcp_directory, ignore_errors=True)
        checkpointer.settings = replace(settings, save_async=False)
        for name, action in rotated(writes, repeat):
            time.sleep(SETTLE_SECONDS)
            timed(name, action, repeat)

        checkpointer.settings = replace(settings, save_async=True)
        dist.barrier()
        begin = time.perf_counter()
        checkpointer.save(Progress(2), loader)
        stall = torch.tensor(time.perf_counter() - begin + step())
        dist.all_reduce(stall, op=dist.ReduceOp.MAX)
        times.setdefault("ours: asynchronous save, stall", []).append(float(stall))
        checkpointer.drain()
        if rank == 0:
            shutil.rmtree(directory / "ours" / "step_2")

        for name, action in rotated(reads, repeat):
            cold()
            timed(name, action, repeat)
    if rank == 0:
        results.put((times, mine * ranks))
    dist.barrier()
    dist.destroy_process_group()


def other_topology(trainer: Trainer, directory: Path, ranks: int) -> tuple[Any, Any, dict[str, Any]]:
    """The same model on a mesh of tp alone, and its tensors as DCP takes them."""
    from torch.distributed.device_mesh import init_device_mesh

    from hyper_parallel import models

    raw = configuration(directory, ranks)
    raw["train"]["accelerator"] = {"tp": ranks}
    config = config_from_dict(raw, source="benchmark")
    names = tuple(asdict(trainer.ranks.topology))
    mesh = init_device_mesh("cpu", tuple(ranks if name == "tp" else 1 for name in names), mesh_dim_names=names)
    other: Any = models.build(config)
    other.setup(total_steps=1000, device=trainer.ranks.device, mesh=mesh)
    holder: Any = type("Holder", (), {"model": other})
    return other, mesh, dcp_state(holder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: the temporary directory")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    job = (arguments.ranks, port, arguments.rounds, directory, results)
    processes = [context.Process(target=work, args=(rank, *job)) for rank in range(arguments.ranks)]
    try:
        for process in processes:
            process.start()
        times, size = results.get()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)
    best = {name: min(values) for name, values in times.items()}
    print(f"{size / 2**30:.2f} GiB in {arguments.ranks} ranks, {arguments.rounds} rounds")
    print(f"{'':32} {'seconds':>8} {'median':>7} {'GiB/s':>7}  {'of raw':>6}  {'of DCP':>6}")
    for name, seconds in sorted(best.items()):
        kind = "write" if "save" in name or "write" in name else "read"
        peer = best.get(name.replace("ours", "DCP")) if name.startswith("ours") else None
        median = statistics.median(times[name])
        columns = [f"{name:32}", f"{seconds:8.2f}", f"{median:7.2f}", f"{size / 2**30 / seconds:7.2f}"]
        columns.append(f" {best[f'raw {kind}'] / seconds:6.2f}" if not name.endswith("stall") else " " * 7)
        columns.append(f" {seconds / peer:6.2f}" if peer else "")
        print(" ".join(columns))
    stall = best["ours: asynchronous save, stall"] / best["ours: save"]
    print(f"stall of an asynchronous save: {100 * stall:.1f} % of a save")


if __name__ == "__main__":
    main()
