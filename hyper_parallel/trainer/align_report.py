"""How a comparison of runs is shown: numbers, charts in SVG, one HTML page that needs nothing else, a PNG from matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .align import Comparison

# The baseline is a wide pale band, so that thin lines on top of it stay visible where all of them coincide; the gaps of the
# later lines show the earlier ones. Colours: Okabe and Ito's, which the colour-blind can tell apart; lighter ones on dark.
BASELINE_COLOURS = ("#8a8f98", "#8b929d")
COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8a3d"),
    ("#009e73", "#2fc79b"),
    ("#cc79a7", "#e6a3c8"),
    ("#b8860b", "#f0c64a"),
)
DASHES = ((), (9, 9), (4, 5), (2, 4), (2, 10), (6, 12))
DENSE_FROM = 400  # steps, from which lines are drawn thinner
LOG_FROM = 30.0  # largest to smallest difference, from which a linear axis would hide the small ones

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 86, 624, 14, 262  # the frame of a line chart


def format_loss(value: float) -> str:
    return f"{value:.6f}"


def format_difference(value: float) -> str:
    return f"{value:.2e}" if value else "0"


def format_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def format_rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def format_memory(count: float | None) -> str:
    if count is None:
        return "-"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Axis:
    """From numbers to pixels; ``ticks`` are numbers with their labels."""

    low: float
    high: float
    begin: float  # pixel of low
    end: float
    ticks: list[tuple[float, str]]
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(max(value, 10**self.low))  # a difference of zero lies on the floor
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def linear_axis(values: Sequence[float], begin: float, end: float, *, whole: bool = False, fit: bool = True) -> Axis:
    """Round ticks: 1, 2 or 5 times a power of ten, and ``whole`` numbers if asked; ``fit`` widens the axis to whole ticks."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    least = 1.0 if whole else 1e-4 * max(abs(low), abs(high)) or 1.0  # equal values still need an axis
    if high - low < least:
        low, high = low - least / 2, high + least / 2
    rough = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    step = max(step, 1.0) if whole else step
    if fit:
        low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals, largest = -math.floor(math.log10(step) + 1e-9), max(abs(low), abs(high))
    digits = decimals + math.floor(math.log10(largest)) + 1
    form = f",.{max(0, decimals)}f" if 1e-3 <= largest < 1e7 else f".{digits}g"
    ticks = [(number * step, format(number * step, form)) for number in range(first, last + 1)]
    return Axis(low, high, begin, end, ticks)


def difference_axis(differences: Sequence[float], tolerance: float, begin: float, end: float) -> Axis:
    """Logarithmic where the differences (and the tolerance, always in the picture) span much; its floor then means zero."""
    shown = [value for value in (*differences, tolerance) if 0 < value < math.inf]
    if not any(0 < value < math.inf for value in differences) or max(shown) < LOG_FROM * min(shown):
        return linear_axis([0.0, *shown] if shown else [0.0, 1.0], begin, end)
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)) + 1e-9)
    zero = 0.0 in differences
    stride = math.ceil((high - low) / 6)
    ticks = [(10.0**power, f"1e{power}") for power in range(high, low - 1, -stride)]
    if zero:
        low -= 1
        ticks.append((10.0**low, "0"))
    return Axis(low, high, begin, end, ticks, log=True)


def style(index: int) -> tuple[tuple[str, str], tuple[int, ...], float]:
    """Colours (light, dark), dashes and width of the run with this index."""
    if index == 0:
        return BASELINE_COLOURS, (), 7.0
    return COLOURS[(index - 1) % len(COLOURS)], DASHES[(index - 1) % len(DASHES)], 2.0


def loss_chart(comparison: Comparison) -> str:
    finite = [loss for scenario in comparison.scenarios for loss in scenario.losses if math.isfinite(loss)]
    lines = [(index, scenario.label, scenario.losses) for index, scenario in enumerate(comparison.scenarios)]
    return _line_chart(comparison.steps, lines, linear_axis(finite, BOTTOM, TOP))


def difference_chart(comparison: Comparison) -> str:
    lines = [(index, scenario.label, scenario.differences) for index, scenario in enumerate(comparison.scenarios)][1:]
    axis = difference_axis([value for *_, line in lines for value in line], comparison.tolerance, BOTTOM, TOP)
    y = axis(comparison.tolerance)
    mark = (
        f'<line class="limit" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="limit-text" x="{RIGHT - 4}" y="{y - 5 if y > TOP + 16 else y + 14:.1f}" text-anchor="end">'
        f"tolerance {comparison.tolerance:g} (for the mean)</text>"
    )
    return _line_chart(comparison.steps, lines, axis, mark)


def _line_chart(steps: Sequence[int], lines: Sequence[tuple[int, str, Sequence[float]]], axis: Axis, mark: str = "") -> str:
    across = linear_axis(steps, LEFT + 6, RIGHT - 6, whole=True, fit=False)
    parts = []
    for value, label in axis.ticks:
        y = axis(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in across.ticks:
        x = across(value)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    for index, label, values in lines:
        parts.append(f'<g class="run-{index}"><title>{escape(label)}</title>')
        for stretch in _finite_stretches(steps, values):
            points = [f"{across(step):.2f},{axis(value):.2f}" for step, value in stretch]
            parts.append(f'<polyline points="{" ".join(points)}"/>')
            if len(points) == 1:  # a line through one point is not drawn
                x, y = points[0].split(",")
                parts.append(f'<circle cx="{x}" cy="{y}" r="{style(index)[2] / 2 + 1.5}"/>')
        parts.append("</g>")
    return _svg(HEIGHT, [*parts, mark], "dense" if len(steps) >= DENSE_FROM else "")


def _finite_stretches(steps: Sequence[int], values: Sequence[float]) -> list[list[tuple[int, float]]]:
    """The points of a line, which breaks where a value is not finite."""
    stretches: list[list[tuple[int, float]]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            stretches[-1].append((step, value))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def bar_chart(labels: Sequence[str], values: Sequence[float | None], form: Callable[[float | None], str]) -> str:
    """A bar a run, from zero, with its value and its ratio to the baseline's."""
    begin, end, pitch = 168, 470, 34
    largest = max((value for value in values if value is not None), default=0.0) or 1.0
    parts = [f'<line class="axis" x1="{begin}" x2="{begin}" y1="4" y2="{pitch * len(values) + 4}"/>']
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        y = pitch * index + 8
        parts.append(
            f'<text x="{begin - 8}" y="{y + 17}" text-anchor="end"><title>{escape(label)}</title>{escape(_short(label))}</text>'
        )
        if value is None:
            parts.append(f'<text x="{begin + 8}" y="{y + 17}">not recorded</text>')
            continue
        width = max(value, 0.0) / largest * (end - begin)
        ratio = f" · {value / values[0]:.2f}×" if index and values[0] else ""
        parts.append(f'<rect class="bar run-{index}" x="{begin}" y="{y}" width="{width:.1f}" height="26"/>')
        parts.append(f'<text class="value" x="{begin + width + 8:.1f}" y="{y + 17}">{form(value)}{ratio}</text>')
    return _svg(pitch * len(values) + 8, parts)


def _short(label: str) -> str:
    return label if len(label) <= 22 else f"{label[:10]}…{label[-11:]}"


def _svg(height: float, parts: Sequence[str], kind: str = "") -> str:
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" class="{kind}">'
    return f"{start}{''.join(parts)}</svg>"


CSS = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #1c2128; --soft: #5c6570; --rule: #dfe3e8;
  --good: #0a7a55; --bad: #b3261e; }
body { margin: 0 auto; max-width: 1400px; padding: 28px 24px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", "Noto Sans CJK SC", "Microsoft YaHei", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0; } p { margin: 4px 0; color: var(--soft); }
.conclusion { font-weight: 600; } .pass { color: var(--good); } .MISS { color: var(--bad); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 16px 0 12px; padding: 0; list-style: none; }
.legend svg { width: 44px; height: 12px; vertical-align: middle; margin-right: 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px; }
figure, .scroll { margin: 0; padding: 14px 16px; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
figure p { font-size: 13px; margin: 0 0 8px; } figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; margin: 16px 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; font-size: 13px; } th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
svg .value { fill: var(--ink); }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.limit { stroke: var(--bad); stroke-dasharray: 6 4; }
svg .limit-text { fill: var(--bad); stroke: var(--card); stroke-width: 4; paint-order: stroke; }
polyline { fill: none; stroke: var(--run); stroke-linejoin: round; } circle, .bar { fill: var(--run); }
@media (prefers-color-scheme: dark) { :root { --paper: #12151a; --card: #1a1f26; --ink: #e8ebef; --soft: #a3acb8; --rule: #2f3640;
  --good: #4fd1a5; --bad: #ff8a80; } }
"""


def _run_css(count: int) -> str:
    rules, dark = [], []
    for index in range(count):
        colours, dashes, width = style(index)
        dasharray = " ".join(map(str, dashes)) or "none"
        rules.append(f".run-{index} {{ --run: {colours[0]}; stroke-width: {width}; stroke-dasharray: {dasharray}; }}")
        dark.append(f".run-{index} {{ --run: {colours[1]}; }}")
    rules.append(".run-0 polyline { opacity: 0.55; } .bar { stroke: none; } .dense g:not(.run-0) polyline { stroke-width: 1; }")
    return "\n".join([*rules, "@media (prefers-color-scheme: dark) {", *dark, "}", ""])


def write_html(comparison: Comparison, header: Sequence[str], path: Path) -> None:
    """One page of HTML that is XML too; nothing is fetched, no script runs."""
    scenarios = comparison.scenarios
    labels = [scenario.label for scenario in scenarios]
    charts = (
        ("Loss", "Training loss; the wide band is the baseline.", loss_chart(comparison)),
        ("Difference from the baseline", "Absolute, step by step.", difference_chart(comparison)),
        ("Throughput", "Tokens/s.", bar_chart(labels, [scenario.tokens_per_second for scenario in scenarios], format_rate)),
        (
            "Peak memory",
            "Of the run's fullest device.",
            bar_chart(labels, [scenario.peak_memory for scenario in scenarios], format_memory),
        ),
    )
    figures = [f"<figure><h2>{title}</h2><p>{caption}</p>{chart}</figure>" for title, caption, chart in charts]
    swatch = '<svg viewBox="0 0 44 12"><g class="run-{}"><polyline points="0,6 44,6"/></g></svg>'
    legend = [f"<li>{swatch.format(index)}{escape(label)}</li>" for index, label in enumerate(labels)]
    rows = []
    for row, scenario in zip(comparison.table(), scenarios, strict=True):
        cells = (f'<td class="{cell}">{cell}</td>' if cell == scenario.verdict else f"<td>{escape(cell)}</td>" for cell in row)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    page = (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/><title>Loss alignment</title>'
        f"<style>{CSS}{_run_css(len(scenarios))}</style></head>\n<body><h1>Loss alignment</h1>"
        f'<p class="conclusion {"MISS" if comparison.misses else "pass"}">{escape(comparison.conclusion)}</p>'
        f'<div class="scroll"><table><thead><tr>{"".join(f"<th>{name}</th>" for name in header)}</tr></thead>\n'
        f"<tbody>{chr(10).join(rows)}</tbody></table></div>\n"
        f"{''.join(f'<p>{escape(note)}</p>' for note in comparison.notes)}\n"
        f'<ul class="legend">{"".join(legend)}</ul>\n'
        f'<div class="charts">{chr(10).join(figures)}</div></body></html>\n'
    )
    path.write_text(page, encoding="utf-8")


def write_png(comparison: Comparison, path: Path) -> bool:
    """The four charts as a picture; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return False
    scenarios = comparison.scenarios
    # neither a formula nor a name that begins with "_", which matplotlib would leave out
    names = [" " + _short(scenario.label).replace("$", r"\$") for scenario in scenarios]
    figure = Figure(figsize=(13, 8), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
    (losses, differences), (rates, memory) = figure.subplots(2, 2, gridspec_kw={"height_ratios": (3, 0.9 + 0.28 * len(names))})
    marker, thin = ("o" if len(comparison.steps) == 1 else ""), (0.5 if len(comparison.steps) >= DENSE_FROM else 0.75)
    for index, scenario in enumerate(scenarios):
        (colour, _), dashes, width = style(index)
        look = {"color": colour, "lw": width * thin, "alpha": 1.0 if index else 0.5, "marker": marker}
        pattern = (0, [length / width for length in dashes]) if dashes else "-"
        losses.plot(comparison.steps, scenario.losses, label=names[index], ls=pattern, **look)
        if index:
            differences.plot(comparison.steps, scenario.differences, ls=pattern, **look)
    axis = difference_axis([value for scenario in scenarios[1:] for value in scenario.differences], comparison.tolerance, 0, 1)
    if axis.log:
        differences.set_yscale("symlog", linthresh=10.0 ** (axis.low + 1), linscale=1)
        differences.set_ylim(0, 10.0**axis.high)
    else:
        differences.set_ylim(axis.low, axis.high)
    limit = f"tolerance {comparison.tolerance:g} (for the mean)"
    differences.axhline(comparison.tolerance, color="#b3261e", lw=1, ls="--", label=limit)
    losses.set_title("Loss")
    differences.set_title("Difference from the baseline")
    for axes in (losses, differences):
        axes.set_xlabel("step")
        axes.grid(axis="y", color="#dfe3e8")
    bars = (
        (rates, "Throughput, tokens/s", [scenario.tokens_per_second for scenario in scenarios], format_rate),
        (memory, "Peak memory", [scenario.peak_memory for scenario in scenarios], format_memory),
    )
    for axes, title, values, form in bars:
        colours = [style(index)[0][0] for index in range(len(names))]
        drawn = axes.barh(range(len(names)), [value or 0.0 for value in values], color=colours, tick_label=names)
        axes.bar_label(drawn, [form(value) for value in values], padding=4)
        axes.set_title(title)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_xticks([])
    for axes in (losses, differences, rates, memory):
        axes.spines[["top", "right"]].set_visible(False)
    handles = [*losses.get_lines(), differences.get_lines()[-1]]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5), frameon=False, handlelength=4)
    figure.savefig(path, dpi=120)
    return True
