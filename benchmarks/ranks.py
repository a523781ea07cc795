"""Ranks beside each other: 1 rank with 2 threads, 2 ranks with 1 thread each, ours and torch's fully_shard on transformers.

    python benchmarks/ranks.py [--size small] [--rounds 5] [--only "ours, 1 rank x 2 threads" "ours, FSDP 2"]

Same weights, same global batch, one run: the contenders take turns, each in processes of its own that stay alive between
turns. Tokens per second and step time are medians; memory is the peak of the largest rank; bytes are what one rank sends.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, LEARNING_RATE, MAX_GRAD_NORM, Case, make_batch, make_params, transformers_model
from teams import Measured, Team, measure
from torch.distributed.device_mesh import init_device_mesh

from qwen3vl_functional import AdamW, Recipe, init_state, make_train_step, param_specs
from qwen3vl_functional.gathered import share
from qwen3vl_functional.sharding import AXES, place, shard


@dataclass(frozen=True)
class Contender:
    """Who steps, on how many ranks with how many threads each."""

    name: str
    ranks: int
    threads: int
    axis: str = ""  # the mesh axis of size ``ranks``
    remat: bool = False


ALONE = "ours, 1 rank x 2 threads"
CONTENDERS = (
    Contender(ALONE, 1, 2),
    Contender("ours, FSDP 2", 2, 1, "dp_shard"),
    Contender("ours, FSDP 2, remat", 2, 1, "dp_shard", remat=True),
    Contender("ours, TP 2", 2, 1, "tp"),
    Contender("fully_shard + transformers, 2", 2, 1, "fully_shard"),
    Contender("fully_shard + transformers, 2, remat", 2, 1, "fully_shard", remat=True),
)
PEER = {
    "ours, FSDP 2": "fully_shard + transformers, 2",
    "ours, FSDP 2, remat": "fully_shard + transformers, 2, remat",
}


def samples(batch: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The rank's part of a batch whose samples are all alike in size."""
    per_rank = len(batch["input_ids"]) // ranks
    patches = len(batch["pixel_values"]) // ranks
    part = {name: tensor[rank * per_rank : (rank + 1) * per_rank] for name, tensor in batch.items() if name != "pixel_values"}
    return {**part, "pixel_values": batch["pixel_values"][rank * patches : (rank + 1) * patches]}


def ours(case: Case, contender: Contender, rank: int) -> Callable[[], float]:
    sizes = [contender.ranks if axis == contender.axis else 1 for axis in AXES]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=AXES) if contender.ranks > 1 else None
    placement = place(param_specs(case.config), mesh)
    params = make_params(case)
    state = init_state(params if mesh is None else share(shard(params, mesh, placement.layouts), placement), case.config)
    del params
    optimizer = AdamW(lr=LEARNING_RATE, decay_style="constant", max_grad_norm=MAX_GRAD_NORM)
    recipe = Recipe(remat="full" if contender.remat else "off")
    train_step = make_train_step(case.config, optimizer, recipe, placement=placement)
    batch = make_batch(case)
    if contender.axis == "dp_shard":
        batch = samples(batch, rank, contender.ranks)

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, [batch])
        return float(metrics.loss)

    return step


def fully_sharded(case: Case, contender: Contender, rank: int) -> Callable[[], float]:
    from torch.distributed.fsdp import fully_shard

    model: Any = transformers_model(case, make_params(case), attention="sdpa")
    if contender.remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inner = model.model
    for block in (*inner.visual.blocks, *inner.visual.deepstack_merger_list, *inner.language_model.layers):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batch = samples(make_batch(case), rank, contender.ranks)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean) / contender.ranks

    return step


def bytes_on_the_wire(step: Callable[[], float]) -> int:
    """Bytes that this rank's collectives hand to others in one step, or that it reads in their memory, counted at the calls."""
    sent = 0

    def counted(function: Callable[..., Any], weight: Callable[[int], float]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal sent
            tensors = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
            group = options.get("group")
            ranks = dist.get_world_size(group)
            largest = max(tensors, key=lambda tensor: tensor.numel())
            sent += int(largest.numel() * largest.element_size() * weight(ranks))
            return function(*arguments, **options)

        return call

    import qwen3vl_functional.transfers as transfers
    from qwen3vl_functional.peers import PeerMemory

    def part(ranks: int) -> float:
        return (ranks - 1) / ranks

    def both_ways(ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def whole(ranks: int) -> float:
        return 1.0

    saved = {(module, name): getattr(module, name) for module, name, _ in _COLLECTIVES}
    weights = {"part": part, "both_ways": both_ways, "whole": whole}
    for module, name, kind in _COLLECTIVES:
        setattr(module, name, counted(saved[module, name], weights[kind]))
    own = transfers.gather_single, transfers.scatter_single
    transfers.gather_single, transfers.scatter_single = (counted(function, part) for function in own)
    read = PeerMemory.read

    def counted_read(self: PeerMemory, rank: int, address: int, target: torch.Tensor) -> None:
        nonlocal sent
        sent += target.numel() * target.element_size()
        read(self, rank, address, target)

    PeerMemory.read = counted_read
    try:
        step()
    finally:
        PeerMemory.read = read
        for (module, name), function in saved.items():
            setattr(module, name, function)
        transfers.gather_single, transfers.scatter_single = own
    return sent


_COLLECTIVES = (
    (dist, "all_reduce", "both_ways"),
    (dist, "isend", "whole"),
    (dist, "all_gather_into_tensor", "part"),
    (dist, "reduce_scatter_tensor", "part"),
    *((dist, name, "part") for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name)),
)


def start(case: Case, contender: Contender) -> Team:
    """Start a contender's processes."""
    build = functools.partial(fully_sharded if contender.axis == "fully_shard" else ours, case, contender)
    count = bytes_on_the_wire if contender.ranks > 1 else None
    return Team(build, ranks=contender.ranks, threads=contender.threads, count=count)


def measure_ranks(case: Case, names: Sequence[str], rounds: int) -> dict[str, Measured]:
    """Contenders by name, with bytes that rank 0 sends in a step."""
    return measure({contender.name: start(case, contender) for contender in CONTENDERS if contender.name in names}, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=CASES, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    names = [contender.name for contender in CONTENDERS]
    plain = [contender.name for contender in CONTENDERS if not contender.remat]
    parser.add_argument("--only", nargs="+", choices=names, default=plain, help="they all stay in memory at once")
    args = parser.parse_args()
    case = CASES[args.size]
    case = case._replace(samples=max(2, case.samples))  # one for each rank
    results = measure_ranks(case, args.only, args.rounds)
    tokens = case.samples * case.tokens
    print(f"{case.name}, fp32, global batch of {tokens} tokens")
    print(f"| {'contender':38} | ms/step | tokens/s | peak MiB a rank | MiB sent a step | first loss |")
    print(f"|{'-' * 40}|---------|----------|-----------------|-----------------|------------|")
    for name, found in results.items():
        row = f"{1e3 * found.seconds:7.0f} | {tokens / found.seconds:8.0f} | {found.peak_memory / 2**20:15,.0f}"
        print(f"| {name:38} | {row} | {found.counted / 2**20:15,.0f} | {found.first_loss:10.6f} |")
    for name in (name for name in results if name.startswith("ours") and name != ALONE):
        for peer in (ALONE, PEER.get(name)):
            if peer in results:
                mine, theirs = results[name], results[peer]
                time_ratio, memory = mine.seconds / theirs.seconds, mine.peak_memory / theirs.peak_memory
                print(f"{name} / {peer}: step time {time_ratio:.3f}, tokens/s {1 / time_ratio:.3f}, memory {memory:.3f}")


if __name__ == "__main__":
    main()
