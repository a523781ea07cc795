"""``python -m hyper_parallel.trainer.align RUN_A RUN_B [RUN_C ...]``: do several runs of one recipe have the same losses?

A RUN is a run's output directory or a ``metrics.jsonl`` file, and may be named: ``label=path``. The first one is the baseline.
Exit code 0: every mean loss lies within the tolerance of the baseline's; 1: one does not; 2: the input is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

from .align_report import format_difference, format_loss, format_memory, format_rate, format_time, write_html, write_png

METRICS_FILE = "metrics.jsonl"  # as callbacks.py names it, which would import torch
HEADER = ("scenario", "steps", "mean loss", "mean diff", "largest diff", "verdict", "step time", "tokens/s", "peak memory")
LEGEND = "mean diff and largest diff (at its step): absolute differences from the baseline; the tolerance is for the mean."
WARM_UP_FROM = 4  # compared steps; with fewer the first one counts too

Steps = tuple[int, int]  # the first and the last, both included


@dataclass(frozen=True)
class Record:
    """What is read of one step; a column that the file lacks is None."""

    loss: float
    step_time: float | None  # seconds
    tokens_per_second: float | None
    peak_memory: float | None  # bytes


@dataclass(frozen=True)
class Run:
    """A metrics file and its records by step."""

    label: str
    path: Path
    records: dict[int, Record]


@dataclass(frozen=True)
class Scenario:
    """One run over the compared steps; a loss that is not finite makes the numbers it enters nan, and a miss."""

    label: str
    path: str
    losses: tuple[float, ...]
    differences: tuple[float, ...]  # from the baseline, absolute
    mean_loss: float
    mean_difference: float
    largest_difference: float
    largest_at: int  # step
    verdict: Literal["baseline", "pass", "MISS"]
    step_time: float | None  # seconds, median
    tokens_per_second: float | None  # median
    peak_memory: float | None  # bytes, largest


@dataclass(frozen=True)
class Comparison:
    """All runs over the same steps, the baseline first."""

    steps: tuple[int, ...]
    tolerance: float
    scenarios: tuple[Scenario, ...]
    notes: tuple[str, ...]

    @property
    def misses(self) -> int:
        return sum(scenario.verdict == "MISS" for scenario in self.scenarios)

    @property
    def conclusion(self) -> str:
        baseline, others = self.scenarios[0].label, len(self.scenarios) - 1
        if not self.misses:
            return f"all mean losses within {self.tolerance:g} of {baseline} ({others} compared)"
        return f"MISS: {self.misses} of {len(self.scenarios)} runs not within {self.tolerance:g} of {baseline}"

    def table(self) -> list[tuple[str, ...]]:
        """The rows under HEADER, as they are shown."""
        return [
            (
                scenario.label,
                _describe_steps(self.steps),
                format_loss(scenario.mean_loss),
                format_difference(scenario.mean_difference),
                _describe_largest(scenario),
                scenario.verdict,
                format_time(scenario.step_time),
                format_rate(scenario.tokens_per_second),
                format_memory(scenario.peak_memory),
            )
            for scenario in self.scenarios
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, report; a mistake in the input is one readable line and exit code 2."""
    try:
        arguments = _parser().parse_args(argv)
        if len(arguments.runs) < 2:
            raise ValueError("one run is nothing to compare; give the baseline and at least one more")
        comparison = compare(read_runs(arguments.runs), steps=arguments.steps, tolerance=arguments.tolerance)
        print(format_table(comparison), flush=True)
        if arguments.report is not None:
            print(write_report(comparison, arguments.report))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if comparison.misses else 0


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """The files named on the command line; labels that agree are told apart by the parent directory, then by a number."""
    named = [_split_label(argument) for argument in arguments]
    paths = [path / METRICS_FILE if path.is_dir() else path for _, path in named]
    places = [(path.parent if path.name == METRICS_FILE else path.with_suffix("")).resolve() for path in paths]
    labels = [label or place.name for (label, _), place in zip(named, places, strict=True)]
    pairs = set(zip(labels, places, strict=True))
    repeated = {label for label in labels if sum(label == other for other, _ in pairs) > 1}
    unique: list[str] = []
    for (given, _), label, place in zip(named, labels, places, strict=True):
        if label in repeated and not given:
            label = f"{place.parent.name}/{place.name}"
        label = wanted = "".join(character if character.isprintable() else "?" for character in label)
        number = 2
        while label in unique:
            label, number = f"{wanted} ({number})", number + 1
        unique.append(label)
    return [Run(label, path, read_metrics(path)) for label, path in zip(unique, paths, strict=True)]


def read_metrics(path: Path) -> dict[int, Record]:
    """The records of a file with one JSON object a line, by step; evaluations are skipped, the last record of a step counts."""
    if not path.is_file():
        known = path.name == METRICS_FILE and path.parent.is_dir()
        where = f"the directory {path.parent} holds no {METRICS_FILE}" if known else f"there is no {path}"
        raise ValueError(f"{where}; a run is its output directory or its {METRICS_FILE}, as PATH or LABEL=PATH")
    records = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                columns = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error})") from error
            if not isinstance(columns, dict):
                raise ValueError(f"{where}: {columns!r:.40} is not a JSON object")
            if any(name.startswith("eval_") for name in columns):
                continue
            step, loss = (_number(columns.get(name)) for name in ("step", "loss"))
            if step is None or not step.is_integer():
                raise ValueError(f"{where}: step must be a whole number, got {columns.get('step')!r:.40}")
            if loss is None:
                raise ValueError(f"{where}: loss must be a number, got {columns.get('loss')!r:.40}")
            others = (_finite(columns.get(name)) for name in ("step_time", "tokens_per_second", "peak_memory"))
            records[int(step)] = Record(loss, *others)
    if not records:
        raise ValueError(f"{path} holds no step; did the run begin to train?")
    return records


def compare(runs: Sequence[Run], *, steps: Steps | None, tolerance: float) -> Comparison:
    """Hold every run against the first one, over ``steps`` or else over the steps that all of them have."""
    compared = _asked_steps(runs, *steps) if steps else sorted(set.intersection(*(set(run.records) for run in runs)))
    if not compared:
        held = "; ".join(f"{run.label} has {_describe_steps(sorted(run.records))}" for run in runs)
        raise ValueError(f"the runs have no step in common: {held}")
    timed = compared[1:] if len(compared) >= WARM_UP_FROM else compared
    baseline = [runs[0].records[step].loss for step in compared]
    scenarios = []
    for run in runs:
        losses = [run.records[step].loss for step in compared]
        differences = [abs(loss - other) for loss, other in zip(losses, baseline, strict=True)]
        mean_difference = abs(_mean(losses) - _mean(baseline))
        largest = max(range(len(compared)), key=lambda index: (math.isnan(differences[index]), differences[index]))
        within = mean_difference <= tolerance  # false for nan
        scenarios.append(
            Scenario(
                label=run.label,
                path=str(run.path),
                losses=tuple(losses),
                differences=tuple(differences),
                mean_loss=_mean(losses),
                mean_difference=mean_difference,
                largest_difference=differences[largest],
                largest_at=compared[largest],
                verdict="MISS" if not within else "baseline" if run is runs[0] else "pass",
                step_time=_over(statistics.median, (run.records[step].step_time for step in timed)),
                tokens_per_second=_over(statistics.median, (run.records[step].tokens_per_second for step in timed)),
                peak_memory=_over(max, (run.records[step].peak_memory for step in compared)),
            )
        )
    return Comparison(tuple(compared), tolerance, tuple(scenarios), tuple(_notes(runs, compared, timed, asked=steps is not None)))


def format_table(comparison: Comparison) -> str:
    """The table for a terminal, names to the left and numbers to the right, with its notes and the conclusion."""
    rows = [HEADER, *comparison.table()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([label.ljust(widths[0]), *right]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", *comparison.notes, "", comparison.conclusion])


def write_report(comparison: Comparison, directory: Path) -> str:
    """Write report.json, report.html and, where matplotlib is installed, report.png; say in one line what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = asdict(comparison) | {"conclusion": comparison.conclusion, "passed": not comparison.misses}
    (directory / "report.json").write_text(json.dumps(_strict(numbers), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_html(comparison, HEADER, directory / "report.html")
    if write_png(comparison, directory / "report.png"):
        return f"report: {directory}/report.html, report.json, report.png"
    return f"report: {directory}/report.html, report.json (report.png is skipped: matplotlib is not installed)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m hyper_parallel.trainer.align", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output directory or metrics.jsonl, or LABEL=PATH; the baseline first"
    )
    parser.add_argument(
        "--steps", type=_parse_steps, metavar="A-B", help="compare these steps; default: those that all runs have"
    )
    parser.add_argument(
        "--tolerance", type=_parse_tolerance, default=5e-3, help="for the mean loss, absolute; default: %(default)s"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.html, report.json and report.png there")
    return parser


def _parse_steps(text: str) -> Steps:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps such as 1-100")
    return int(first), int(last)


def _parse_tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = math.nan
    if not 0 <= tolerance < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a difference such as 5e-3")
    return tolerance


def _split_label(argument: str) -> tuple[str, Path]:
    """LABEL=PATH, or a path, which may hold "=" itself."""
    label, _, path = argument.partition("=")
    if label and path and Path(path).exists() and not Path(argument).exists():
        return label, Path(path)
    return "", Path(argument)


def _asked_steps(runs: Sequence[Run], first: int, last: int) -> list[int]:
    """All steps of the range, which every run must have."""
    for run in runs:
        held = sorted(step for step in run.records if first <= step <= last)
        if len(held) < last - first + 1:
            bounds = [first - 1, *held, last + 1]
            gaps = [(before + 1, after - 1) for before, after in pairwise(bounds) if after > before + 1]
            absent = ", ".join(f"{begin}-{end}" if end > begin else f"{begin}" for begin, end in gaps[:5])
            more = f" and {len(gaps) - 5} more gaps" if len(gaps) > 5 else ""
            has = _describe_steps(sorted(run.records))
            raise ValueError(f"run {run.label} lacks steps {absent}{more} of --steps {first}-{last}; it has {has}")
    return list(range(first, last + 1))


def _notes(runs: Sequence[Run], compared: Sequence[int], timed: Sequence[int], *, asked: bool) -> list[str]:
    """Footnotes of the table, and what is easily overlooked about each run."""
    warm_up = "" if timed is compared else f" without step {compared[0]} (warm-up)"
    notes = [LEGEND, f"step time and tokens/s: median{warm_up}; peak memory: largest."]
    for run in runs:
        others = len(run.records) - len(compared)
        if others and not asked:
            notes.append(f"{run.label}: {others} more steps are not compared; it has {_describe_steps(sorted(run.records))}.")
        if broken := [step for step in compared if not math.isfinite(run.records[step].loss)]:
            notes.append(f"{run.label}: the loss is {run.records[broken[0]].loss} at step {broken[0]}.")
    return notes


def _describe_steps(steps: Sequence[int]) -> str:
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return str(first)
    return f"{first}-{last}" if len(steps) == last - first + 1 else f"{len(steps)} of {first}-{last}"


def _describe_largest(scenario: Scenario) -> str:
    if scenario.largest_difference == 0:
        return format_difference(0)
    return f"{format_difference(scenario.largest_difference)} @{scenario.largest_at}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _finite(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def _over(reduce: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return reduce(present) if present else None


def _strict(value: Any) -> Any:
    """For JSON, which has no nan and no infinity: null."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
