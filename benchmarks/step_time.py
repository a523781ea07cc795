"""One training step, ours beside transformers' own module: same weights, same batch, one run, interleaved.

    python benchmarks/step_time.py [--size tiny small] [--dtype fp32 bf16] [--rounds 9] [--remat]

A step is forward, backward, clip to a global norm and AdamW. Times are medians over rounds in which the contenders take
turns, so that a drift of the machine hits all alike; peak memory is that of a process that runs one contender alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from cases import CASES, LEARNING_RATE, MAX_GRAD_NORM, Case, make_batch, make_params, matmul_peak, step_flops, transformers_model

from hyper_parallel.platform import Platform
from qwen3vl_functional import AdamW, Recipe, init_state, make_train_step

WARMUP_ROUNDS = 2
Step = Callable[[], float]
CONTENDERS = {
    "fp32": ("ours", "transformers eager", "transformers sdpa"),
    "bf16": ("ours", "transformers eager bf16", "transformers sdpa bf16", "transformers sdpa autocast"),
}


def build(case: Case, dtype: str, contender: str, remat: bool) -> Step:
    """A step function that returns its loss. In bf16, ours keeps fp32 weights at rest, as autocast does."""
    params, batch = make_params(case), make_batch(case)
    if contender == "ours":
        return _ours(case, params, batch, torch.bfloat16 if dtype == "bf16" else None, remat)
    attention = "eager" if "eager" in contender else "sdpa"
    model = transformers_model(case, params, attention=attention)
    del params
    if contender.endswith("bf16"):
        model.to(torch.bfloat16)
    if remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
    return _transformers(model, batch, autocast="autocast" in contender)


def _ours(case: Case, params: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype | None, remat: bool) -> Step:
    state = init_state(params, case.config)
    optimizer = AdamW(lr=LEARNING_RATE, decay_style="constant", max_grad_norm=MAX_GRAD_NORM)
    train_step = make_train_step(case.config, optimizer, Recipe(dtype=dtype, remat="full" if remat else "off"))

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, [batch])
        return float(metrics.loss)

    return step


def _transformers(model: torch.nn.Module, batch: dict[str, torch.Tensor], *, autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def measure(case: Case, dtype: str, rounds: int, remat: bool) -> dict[str, Any]:
    """Median seconds a step of each contender, their first losses, and the matmul peak measured among them."""
    steps = {name: build(case, dtype, name, remat) for name in CONTENDERS[dtype]}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: step() for name, step in steps.items()}
    peaks = []
    for turn in range(WARMUP_ROUNDS + rounds):
        peaks.append(matmul_peak(torch.bfloat16 if dtype == "bf16" else torch.float32))
        for name, step in steps.items():
            gc.collect()
            repeats = 20 if case.name == "tiny" else 1
            begin = time.perf_counter()
            for _ in range(repeats):
                step()
            if turn >= WARMUP_ROUNDS:
                times[name].append((time.perf_counter() - begin) / repeats)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {"seconds": medians, "losses": losses, "peak_flops": max(peaks)}


def peak_memory(case: Case, dtype: str, contender: str, remat: bool) -> int:
    """Bytes: peak of a process that builds one contender and makes three steps."""
    arguments = [sys.executable, __file__, "--memory-of", case.name, dtype, contender, *(["--remat"] if remat else [])]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(case: Case, dtype: str, rounds: int, remat: bool) -> None:
    """Measure and print one table."""
    result = measure(case, dtype, rounds, remat)
    gc.collect()
    memory = {name: peak_memory(case, dtype, name, remat) for name in CONTENDERS[dtype]}
    flops = step_flops(case)
    print(f"\n{case.name} {dtype}{' remat' if remat else ''}: {flops / 1e9:,.2f} GFLOP a step needed, "
          f"matmul peak {result['peak_flops'] / 1e9:,.0f} GFLOP/s, {torch.get_num_threads()} threads")  # fmt: skip
    print(f"| {'contender':26} | ms/step | % of peak | peak MiB | first loss |")
    print(f"|{'-' * 28}|---------|-----------|----------|------------|")
    for name, seconds in result["seconds"].items():
        share = 100 * flops / seconds / result["peak_flops"]
        print(
            f"| {name:26} | {1e3 * seconds:7.1f} | {share:9.1f} | {memory[name] / 2**20:8,.0f} | {result['losses'][name]:10.6f} |"
        )
    peers = [name for name in result["seconds"] if name != "ours"]
    for what, values in (("time", result["seconds"]), ("memory", memory)):
        best = min(peers, key=values.__getitem__)
        print(f"{what}: ours / best peer ({best}) = {values['ours'] / values[best]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtype", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--remat", action="store_true", help="recompute blocks in the backward, on both sides")
    parser.add_argument("--memory-of", nargs=3, metavar=("SIZE", "DTYPE", "CONTENDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        size, dtype, contender = args.memory_of
        step = build(CASES[size], dtype, contender, args.remat)
        for _ in range(3):
            step()
        print(json.dumps(Platform("cpu").peak_memory()))
        return
    for size in args.size:
        for dtype in args.dtype:
            report(CASES[size], dtype, args.rounds, args.remat)


if __name__ == "__main__":
    main()
