"""One training step, ours beside transformers' own module: same weights, same batch, one run, interleaved.

    python benchmarks/step_time.py [--size tiny small] [--dtype fp32 bf16] [--rounds 9] [--remat]

A step is forward, backward, clip to a global norm and AdamW. Times are medians over rounds in which the contenders take
turns, each in a process of its own, whose peak memory is reported.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any, Literal, NamedTuple

import torch
from cases import CASES, LEARNING_RATE, MAX_GRAD_NORM, Case, make_batch, make_params, matmul_peak, step_flops, transformers_model
from teams import Measured, Step, Team, measure

from qwen3vl_functional import AdamW, Recipe, init_state, make_train_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS, COMPILED = "ours", "ours compiled"
CONTENDERS = {
    "fp32": (OURS, COMPILED, "transformers eager", "transformers sdpa"),
    "bf16": (OURS, "transformers eager bf16", "transformers sdpa bf16", "transformers sdpa autocast"),
}


def build(case: Case, dtype: str, contender: str, remat: bool, rank: int = 0) -> Step:
    """A step function that returns its loss. In bf16, ours keeps fp32 weights at rest, as autocast does."""
    params, batch = make_params(case), make_batch(case)
    if contender in (OURS, COMPILED):
        return our_step(case, params, batch, torch.bfloat16 if dtype == "bf16" else None, remat, compiled=contender == COMPILED)
    attention = "eager" if "eager" in contender else "sdpa"
    model = transformers_model(case, params, attention=attention)
    del params
    if contender.endswith("bf16"):
        model.to(torch.bfloat16)
    return peer_step(model, batch, autocast="autocast" in contender, remat=remat)


def our_step(
    case: Case,
    params: Any,
    batch: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
    remat: bool,
    frozen: tuple[str, ...] = (),
    compiled: bool = False,
) -> Step:
    """Our step; ``dtype`` in flight."""
    state = init_state(params, case.config, frozen=frozen)
    optimizer = AdamW(lr=LEARNING_RATE, decay_style="constant", max_grad_norm=MAX_GRAD_NORM)
    recipe = Recipe(dtype=dtype, remat="full" if remat else "off", compiled=compiled)
    train_step = make_train_step(case.config, optimizer, recipe, frozen=frozen)

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, [batch])
        return float(metrics.loss)

    return step


def peer_step(model: Any, batch: dict[str, torch.Tensor], *, autocast: bool, remat: bool) -> Step:
    """transformers' module and torch's AdamW over the parameters that want a gradient."""
    if remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def step() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


class StepTimes(NamedTuple):
    """What each contender took, and the best matmul seen on this machine among their turns."""

    contenders: dict[str, Measured]
    peak_flops: float

    @property
    def ours(self) -> list[str]:
        """Our contenders, as they are and compiled."""
        return [name for name in (OURS, COMPILED) if name in self.contenders]

    def ratio(self, what: Literal["seconds", "peak_memory"], ours: str = OURS) -> tuple[float, str]:
        """Ours against the peer that needs least, and who that is."""
        values = {name: getattr(found, what) for name, found in self.contenders.items()}
        best = min((name for name in values if name not in self.ours), key=values.__getitem__)
        return values[ours] / values[best], best


def measure_step(case: Case, dtype: str, rounds: int, remat: bool) -> StepTimes:
    """One table."""
    teams = {name: Team(functools.partial(build, case, dtype, name, remat)) for name in CONTENDERS[dtype]}
    peaks: list[float] = []
    repeats = 20 if case.name == "tiny" else 1
    found = measure(teams, rounds=rounds, repeats=repeats, between=lambda: peaks.append(matmul_peak(DTYPES[dtype])))
    return StepTimes(found, max(peaks))


def report(case: Case, dtype: str, rounds: int, remat: bool) -> None:
    """Measure and print one table."""
    result, flops = measure_step(case, dtype, rounds, remat), step_flops(case)
    print(f"\n{case.name} {dtype}{' remat' if remat else ''}: {flops / 1e9:,.2f} GFLOP a step needed, "
          f"matmul peak {result.peak_flops / 1e9:,.0f} GFLOP/s, {torch.get_num_threads()} threads")  # fmt: skip
    print(f"| {'contender':26} | ms/step | % of peak | peak MiB | first loss |")
    print(f"|{'-' * 28}|---------|-----------|----------|------------|")
    for name, found in result.contenders.items():
        share = 100 * flops / found.seconds / result.peak_flops
        memory = found.peak_memory / 2**20
        print(f"| {name:26} | {1e3 * found.seconds:7.1f} | {share:9.1f} | {memory:8,.0f} | {found.first_loss:10.6f} |")
    for ours in result.ours:
        for what in ("seconds", "peak_memory"):
            ratio, best = result.ratio(what, ours)
            print(f"{what}: {ours} / best peer ({best}) = {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtype", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--remat", action="store_true", help="recompute blocks in the backward, on both sides")
    args = parser.parse_args()
    for size in args.size:
        for dtype in args.dtype:
            report(CASES[size], dtype, args.rounds, args.remat)


if __name__ == "__main__":
    main()
