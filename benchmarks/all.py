"""Everything that docs/performance.md says in figures, measured in one run and written there.

    python benchmarks/all.py [--only step loss ranks wide packing growth] [--rounds 5]

Each section beside its best peer, on this machine, one after another; about twenty minutes. The document's text stays; what
stands between its two markers is replaced, and the growth curves are drawn anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from cases import CASES, SMALL, Case, make_batch, make_params, step_flops, transformers_model
from packing import compare as compare_packing
from ranks import ALONE, measure_ranks
from step_time import OURS, StepTimes, build, measure_step, our_step, peer_step
from teams import Measured, Step, Team, measure

from qwen3vl_functional import Qwen3VLMoeConfig
from qwen3vl_functional.loss import head_loss

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
CURVES = DOCUMENT.parent / "images" / "growth.png"
BEGIN, END = "<!-- figures: written by benchmarks/all.py -->", "<!-- end of figures -->"
AUTOCAST, SDPA = "transformers sdpa autocast", "transformers sdpa"
Row = tuple[str, str, str, str]  # what, ours, the peer, ours / the peer


def ratio(what: str, ours: float, peer: float, unit: str, *, digits: int = 0) -> Row:
    return what, f"{ours:,.{digits}f} {unit}", f"{peer:,.{digits}f} {unit}", f"{ours / peer:.2f}"


def step_rows(rounds: int) -> list[Row]:
    """Time and memory of a step at two sizes."""
    rows: list[Row] = []
    for name, case in CASES.items():
        for dtype in ("fp32", "bf16"):
            found = measure_step(case, dtype, rounds, remat=False)
            peer = AUTOCAST if dtype == "bf16" else found.ratio("seconds")[1]
            rows += _step(f"{name} {dtype}", case, found, peer)
    for dtype, peer in (("fp32", SDPA), ("bf16", AUTOCAST)):
        found = measure_step(SMALL, dtype, rounds, remat=True)
        rows += _step(f"small {dtype}, recomputing every block", SMALL, found, peer)
    return rows


def _step(what: str, case: Case, found: StepTimes, peer: str) -> list[Row]:
    rows: list[Row] = []
    theirs = found.contenders[peer]
    for ours in found.ours:
        mine, label = found.contenders[ours], what + ours.removeprefix(OURS)
        digits = 1 if mine.seconds < 0.1 else 0
        rows.append(ratio(f"{label}: step ({peer})", 1e3 * mine.seconds, 1e3 * theirs.seconds, "ms", digits=digits))
        if case is not SMALL:
            continue
        share, peer_share = (100 * step_flops(case) / run.seconds / found.peak_flops for run in (mine, theirs))
        rows.append(ratio(f"{label}: share of the matmul peak", share, peer_share, "%"))
        least = peer if peer == AUTOCAST else SDPA
        memories = mine.peak_memory / 2**20, found.contenders[least].peak_memory / 2**20
        rows.append(ratio(f"{label}: peak memory ({least})", *memories, "MiB"))
    return rows


VOCABULARY, HIDDEN, TOKENS = 151_936, 512, 2048


def build_loss(kind: str, rank: int) -> Step:
    """Loss and gradients of hidden rows and of the head: chunk by chunk, plain, or nothing but the tensors that both hold."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.02
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)

    held: list[torch.Tensor] = []

    def step() -> float:
        if kind == "nothing":
            held[:] = held or [torch.ones_like(weight), torch.ones_like(hidden)]
            return 0.0
        if kind == OURS:
            return float(head_loss(weight, hidden, targets, scale=1 / TOKENS, with_grad=True).loss_sum) / TOKENS
        operands = hidden.clone().requires_grad_(), weight.detach().requires_grad_()
        loss = F.cross_entropy(F.linear(*operands), targets)
        torch.autograd.grad(loss, operands)
        return float(loss.detach())

    return step


def loss_rows(rounds: int) -> list[Row]:
    """The output head at the real vocabulary."""
    teams = {kind: Team(functools.partial(build_loss, kind)) for kind in (OURS, "plain", "nothing")}
    found = measure(teams, rounds=rounds)
    assert abs(found[OURS].first_loss - found["plain"].first_loss) < 1e-4
    extra = {kind: (found[kind].peak_memory - found["nothing"].peak_memory) / 2**20 for kind in (OURS, "plain")}
    what = f"loss over {VOCABULARY:,} words, hidden {HIDDEN}, {TOKENS} tokens"
    return [
        ratio(f"{what}: time (plain cross entropy)", 1e3 * found[OURS].seconds, 1e3 * found["plain"].seconds, "ms"),
        ratio(f"{what}: memory beyond weights and gradients", extra[OURS], extra["plain"], "MiB"),
    ]


def rank_rows(rounds: int) -> list[Row]:
    """Two ranks."""
    ours, peer = "ours, FSDP 2", "fully_shard + transformers, 2"
    found = measure_ranks(SMALL, (ALONE, ours, "ours, TP 2", peer), rounds)
    tokens = SMALL.samples * SMALL.tokens
    rows = [
        ratio("2 ranks FSDP: step (fully_shard + transformers)", 1e3 * found[ours].seconds, 1e3 * found[peer].seconds, "ms"),
        ratio("2 ranks FSDP: peak memory of a rank", found[ours].peak_memory / 2**20, found[peer].peak_memory / 2**20, "MiB"),
    ]
    for name in (ours, "ours, TP 2"):
        speeds = tokens / found[name].seconds, tokens / found[ALONE].seconds
        rows.append(ratio(f"{name.removeprefix('ours, ')}: tokens/s (1 rank, as many cores)", *speeds, "tokens/s"))
    rows.append(
        ratio("FSDP 2: peak memory of a rank (1 rank)", found[ours].peak_memory / 2**20, found[ALONE].peak_memory / 2**20, "MiB")
    )
    return rows


def wide_case() -> Case:
    """Four layers as wide as the 30B model's, its vocabulary and its tower; eight of its 128 experts."""
    config = Qwen3VLMoeConfig()
    assert config.vision is not None
    text = dataclasses.replace(config.text, num_hidden_layers=4, num_experts=8)
    return Case("wide", dataclasses.replace(config, text=text), samples=1, tokens=512, image_side=256)


def build_wide(contender: str, rank: int) -> Step:
    """bf16 in flight, blocks recomputed, tower frozen."""
    case = wide_case()
    params, batch = make_params(case), make_batch(case)
    if contender == OURS:
        return our_step(case, params, batch, torch.bfloat16, remat=True, frozen=("model.visual",))
    model: Any = transformers_model(case, params, attention="sdpa")
    del params
    model.model.visual.requires_grad_(False)
    return peer_step(model, batch, autocast=True, remat=True)


def wide_rows(rounds: int) -> list[Row]:
    """One after the other: both together would not fit."""
    found = {}
    for contender in (OURS, AUTOCAST):
        found |= measure({contender: Team(functools.partial(build_wide, contender))}, rounds=min(rounds, 3))
    mine, theirs = found[OURS], found[AUTOCAST]
    what = "4 layers of the 30B's width, 8 experts, frozen tower, bf16, recomputing"
    return [
        ratio(f"{what}: step ({AUTOCAST})", mine.seconds, theirs.seconds, "s", digits=1),
        ratio(f"{what}: peak memory", mine.peak_memory / 2**20, theirs.peak_memory / 2**20, "MiB"),
    ]


def packing_rows(rounds: int) -> list[Row]:
    """Packs against samples one by one, against a micro-batch of four, and against transformers on padded ones."""
    rows: list[Row] = []
    for data, speeds in compare_packing(4 + 2 * rounds).items():
        *others, (packs, packed) = speeds.items()
        rows += [ratio(f"{data}, {packs} a micro-batch ({label})", packed, speed, "tokens/s") for label, speed in others]
    return rows


GROWTH: dict[str, tuple[tuple[int, ...], Callable[[Case, int], Case]]] = {
    "tokens": ((256, 512, 1024, 2048, 4096), lambda case, n: case._replace(tokens=n)),
    "experts": ((8, 16, 32, 64, 128), lambda case, n: _with_text(case, num_experts=n)),
    "layers": ((2, 4, 8, 16), lambda case, n: _with_text(case, num_hidden_layers=n)),
}


def _with_text(case: Case, **changes: int) -> Case:
    return case._replace(config=dataclasses.replace(case.config, text=dataclasses.replace(case.config.text, **changes)))


def growth_case() -> Case:
    """What one of tokens, experts and layers grows from."""
    config = SMALL.config
    assert config.vision is not None
    small = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 256, "moe_intermediate_size": 192, "vocab_size": 4096}
    text = dataclasses.replace(config.text, **small)
    vision = dataclasses.replace(config.vision, depth=2, deepstack_visual_indexes=(0, 1), out_hidden_size=256)
    ids = {name: 4092 + i for i, name in enumerate(name for name in vars(config) if name.endswith("_token_id"))}
    config = dataclasses.replace(config, text=text, vision=vision, **ids)
    return SMALL._replace(config=config, samples=1, tokens=256, image_side=128)


def growth(rounds: int) -> tuple[list[Row], dict[str, dict[int, dict[str, Measured]]]]:
    """Time and memory as one size grows, ours and transformers'; the rows hold by how much from the first size to the last."""
    rows: list[Row] = []
    curves: dict[str, dict[int, dict[str, Measured]]] = {}
    for name, (sizes, grow) in GROWTH.items():
        curves[name] = {}
        for size in sizes:
            case = grow(growth_case(), size)
            teams = {who: Team(functools.partial(build, case, "fp32", who, False)) for who in (OURS, SDPA)}
            curves[name][size] = measure(teams, rounds=rounds)
        first, last = curves[name][sizes[0]], curves[name][sizes[-1]]
        for what, unit in (("seconds", "time"), ("peak_memory", "memory")):
            mine, theirs = (getattr(last[who], what) / getattr(first[who], what) for who in (OURS, SDPA))
            rows.append(ratio(f"{unit}, {sizes[-1] // sizes[0]} times the {name}", mine, theirs, "times", digits=2))
    return rows, curves


def draw(curves: dict[str, dict[int, dict[str, Measured]]], path: Path) -> None:
    """One column of plots for each size that grew."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(curves), figsize=(11, 5.5), layout="constrained")
    for column, (name, points) in zip(axes.T, curves.items(), strict=True):
        for axis, (what, scale, unit) in zip(
            column, (("seconds", 1e3, "ms a step"), ("peak_memory", 2**-20, "MiB")), strict=True
        ):
            for who, style in ((OURS, "o-"), (SDPA, "s--")):
                axis.plot(list(points), [scale * getattr(found[who], what) for found in points.values()], style, label=who)
            axis.set(xscale="log", yscale="log", xlabel=name, ylabel=unit)
            axis.set_xticks(list(points), [str(size) for size in points])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def table(title: str, rows: list[Row]) -> str:
    lines = [f"### {title}", "", "| what (peer) | ours | peer | ours / peer |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


SECTIONS: dict[str, tuple[str, Callable[[int], list[Row]]]] = {
    "step": ("One training step", step_rows),
    "loss": ("The output head's loss and gradients", loss_rows),
    "ranks": ("Two ranks", rank_rows),
    "wide": ("The real width", wide_rows),
    "packing": ("Packing", packing_rows),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "growth"], help="print these, and leave the document as it is")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    wanted = args.only or [*SECTIONS, "growth"]
    parts = []
    for name, (title, section) in SECTIONS.items():
        if name in wanted:
            parts.append(table(title, section(args.rounds)))
            print(parts[-1] + "\n", flush=True)
    if "growth" in wanted:
        rows, curves = growth(min(args.rounds, 3))
        parts.append(table("Growth", rows) + f"\n\n![time and memory as one size grows](images/{CURVES.name})")
        print(parts[-1])
        draw(curves, Path(tempfile.gettempdir()) / CURVES.name if args.only else CURVES)
    if args.only:
        return
    machine = (
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{args.rounds} rounds, {torch.get_num_threads()} threads."
    )
    text = DOCUMENT.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    DOCUMENT.write_text(before + "\n\n".join([BEGIN, machine, *parts]) + "\n\n" + after)


if __name__ == "__main__":
    main()
