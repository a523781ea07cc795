"""The alignment tool on small metrics files: verdicts, exit codes, errors, and what the report holds."""

import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.trainer import align, callbacks
from hyper_parallel.trainer.align import main
from hyper_parallel.trainer.align_report import difference_axis, linear_axis

SVG = "{http://www.w3.org/2000/svg}"
HTML = "{http://www.w3.org/1999/xhtml}"


def write(path: Path, losses: dict[int, float], **columns) -> Path:
    """A run's directory with the given loss at each step and the same other columns everywhere."""
    path.mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": loss, **columns}) for step, loss in losses.items()]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def curve(first: int, last: int, shift: float = 0.0) -> dict[int, float]:
    return {step: 5 / step**0.5 + shift for step in range(first, last + 1)}


def call(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def table(output: str) -> dict[str, list[str]]:
    """The cells of each row by its label; cells are two blanks apart."""
    lines = output.splitlines()
    rows = lines[2 : lines.index("")]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows)}


def refused(capsys, *arguments) -> str:
    code, output, error = call(capsys, *arguments)
    assert (code, output) == (2, "")
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_reads_what_the_trainer_writes(tmp_path, capsys):
    assert callbacks.METRICS_FILE == align.METRICS_FILE
    for name, losses in (("one", (3.0, 2.0)), ("two", (3.0, 2.004))):
        file = callbacks.MetricsFile(tmp_path / name)
        file.on_train_begin(2, 0)
        for step, loss in enumerate(losses, start=1):
            file.on_step_end(
                callbacks.StepRecord(
                    step=step,
                    epoch=0,
                    loss=loss,
                    grad_norm=1.0,
                    lr=1e-3,
                    step_time=0.25 * step,
                    tokens_per_second=4000.0 / step,
                    peak_memory=3 * 2**29,
                    num_targets=1000,
                    consumed_samples=4 * step,
                    consumed_tokens=1000 * step,
                    extra={"load_balance": 1.0},
                )
            )
            file.on_eval_end(step, callbacks.EvalReport(9.0, 1, 2))
        file.on_train_end()
    code, output, error = call(capsys, tmp_path / "one", tmp_path / "two" / "metrics.jsonl")
    assert (code, error) == (0, "")
    assert table(output) == {
        "one": ["1-2", "2.500000", "0", "0", "baseline", "375.0 ms", "3,000", "1.50 GiB"],
        "two": ["1-2", "2.502000", "2.00e-03", "4.00e-03 @2", "pass", "375.0 ms", "3,000", "1.50 GiB"],
    }


def test_miss_and_tolerance(tmp_path, capsys):
    base = write(tmp_path / "base", curve(1, 10))
    near, far = write(tmp_path / "near", curve(1, 10, 4e-3)), write(tmp_path / "far", curve(1, 10, -0.02))
    code, output, _ = call(capsys, base, near, far)
    assert code == 1
    assert [cells[4] for cells in table(output).values()] == ["baseline", "pass", "MISS"]
    assert output.splitlines()[-1] == "MISS: 1 of 3 runs not within 0.005 of base"
    assert call(capsys, base, near, far, "--tolerance", "0.03")[0] == 0
    assert call(capsys, base, near, "--tolerance", "1e-3")[0] == 1
    assert call(capsys, base, base, "--tolerance", "0")[0] == 0


def test_the_mean_decides_and_the_largest_step_is_shown(tmp_path, capsys):
    base = write(tmp_path / "base", dict.fromkeys(range(1, 5), 2.0))
    swings = write(tmp_path / "swings", {1: 2.5, 2: 1.5, 3: 2.25, 4: 1.75})
    code, output, _ = call(capsys, base, swings)
    assert code == 0
    assert table(output)["swings"][1:5] == ["2.000000", "0", "5.00e-01 @1", "pass"]


def test_other_trainers_need_only_step_and_loss(tmp_path, capsys):
    mine = write(tmp_path / "mine", curve(1, 3), step_time=1.5, tokens_per_second=12.5, peak_memory=2**20)
    theirs = write(tmp_path / "theirs", curve(1, 3), epoch="first", step_time=None, peak_memory=math.nan)
    _, output, _ = call(capsys, mine, theirs)
    assert table(output)["mine"][-3:] == ["1.500 s", "12.5", "1.0 MiB"]
    assert table(output)["theirs"][-3:] == ["-", "-", "-"]


@pytest.mark.parametrize(("count", "time", "skipped"), [(3, "2.000 s", False), (4, "3.000 s", True)])
def test_warm_up_step_is_left_out_of_the_times(tmp_path, capsys, count, time, skipped):
    run = tmp_path / "run" / "metrics.jsonl"
    run.parent.mkdir()
    run.write_text("".join(json.dumps({"step": 6 + i, "loss": 1.0, "step_time": i}) + "\n" for i in range(1, count + 1)))
    _, output, _ = call(capsys, run, run)
    assert table(output)["run"][5] == time
    assert ("without step 7 (warm-up)" in output) == skipped


def test_last_record_of_a_step_counts(tmp_path, capsys):
    base, again = write(tmp_path / "base", curve(1, 6)), write(tmp_path / "again", curve(1, 4, 1.0))
    with (again / "metrics.jsonl").open("a") as file:  # went back to step 0, after four steps with other losses
        file.writelines(json.dumps({"step": float(step), "loss": loss}) + "\n\n" for step, loss in curve(1, 6).items())
    code, output, _ = call(capsys, base, again)
    assert code == 0
    assert table(output)["again"][2:4] == ["0", "0"]


def test_resumed_run(tmp_path, capsys):
    whole, resumed = write(tmp_path / "whole", curve(1, 100)), write(tmp_path / "resumed", curve(51, 100))
    code, output, _ = call(capsys, whole, resumed, "--steps", "51-100")
    assert code == 0
    assert table(output)["resumed"][0] == table(output)["whole"][0] == "51-100"
    assert "not compared" not in output
    assert "run resumed lacks steps 1-50 of --steps 1-100; it has 51-100" in refused(capsys, whole, resumed, "--steps", "1-100")
    _, output, _ = call(capsys, whole, resumed)
    assert table(output)["whole"][0] == "51-100"
    assert "whole: 50 more steps are not compared; it has 1-100." in output


def test_absent_steps_are_named(tmp_path, capsys):
    whole = write(tmp_path / "whole", curve(1, 20))
    holes = write(tmp_path / "holes", {step: loss for step, loss in curve(1, 20).items() if step not in (3, 7, 8)})
    assert "run holes lacks steps 3, 7-8 of --steps 2-19; it has 17 of 1-20" in refused(capsys, whole, holes, "--steps", "2-19")
    assert "run whole lacks steps 21-9999999999 of" in refused(capsys, whole, holes, "--steps", "1-9999999999")
    every_other = write(tmp_path / "every_other", {step: loss for step, loss in curve(1, 20).items() if step % 2})
    assert "lacks steps 2, 4, 6, 8, 10 and 5 more gaps of" in refused(capsys, every_other, whole, "--steps", "1-20")
    code, output, _ = call(capsys, whole, every_other)
    assert (code, table(output)["whole"][0]) == (0, "10 of 1-19")


def test_no_step_in_common(tmp_path, capsys):
    error = refused(capsys, write(tmp_path / "a", curve(1, 5)), write(tmp_path / "b", curve(6, 9)))
    assert "no step in common: a has 1-5; b has 6-9" in error


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("broken_is_baseline", [False, True])
def test_loss_that_is_not_finite_is_a_miss(tmp_path, capsys, loss, broken_is_baseline):
    good, broken = write(tmp_path / "good", curve(1, 5)), write(tmp_path / "broken", {**curve(1, 5), 3: loss})
    runs = (broken, good) if broken_is_baseline else (good, broken)
    code, output, _ = call(capsys, *runs, "--tolerance", "1e9", "--report", tmp_path / "report")
    assert code == 1
    assert table(output)["broken"][4] == "MISS"
    assert table(output)["good"][4] == ("MISS" if broken_is_baseline else "baseline")
    assert f"broken: the loss is {loss} at step 3." in output
    report = json.loads((tmp_path / "report" / "report.json").read_text(), parse_constant=pytest.fail)
    assert [run["mean_loss"] is None for run in report["scenarios"]] == [broken_is_baseline, not broken_is_baseline]
    drawn = {title: [len(line) for line in lines] for title, lines in polylines(tmp_path / "report", "Loss").items()}
    assert drawn == {"good": [5], "broken": [2, 2]}  # the curve has a gap there


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "loss": 2.0}\n{"step": 2, "lo', "line 2: not JSON"),
        ('{"step": 1, "loss": 2.0}\n\n[1, 2]\n', "line 3: [1, 2] is not a JSON object"),
        ('{"loss": 2.0}\n', "line 1: step must be a whole number, got None"),
        ('{"step": 1.5, "loss": 2.0}\n', "line 1: step must be a whole number, got 1.5"),
        ('{"step": NaN, "loss": 2.0}\n', "line 1: step must be a whole number, got nan"),
        ('{"step": true, "loss": 2.0}\n', "line 1: step must be a whole number, got True"),
        ('{"step": 1}\n', "line 1: loss must be a number, got None"),
        ('{"step": 1, "loss": "2.0"}\n', "line 1: loss must be a number, got '2.0'"),
        ("", "holds no step"),
        ('{"step": 1, "eval_loss": 2.0}\n', "holds no step"),
        (b"\xff\xfe{}", "line 1: not JSON"),
    ],
)
def test_broken_files(tmp_path, capsys, text, message):
    good, bad = write(tmp_path / "good", curve(1, 3)), tmp_path / "bad.jsonl"
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refused(capsys, good, bad)
    assert message in error and str(bad) in error


def test_wrong_arguments(tmp_path, capsys):
    run = write(tmp_path / "run", curve(1, 3))
    (tmp_path / "empty").mkdir()
    assert f"there is no {tmp_path}/none" in refused(capsys, run, tmp_path / "none")
    assert f"directory {tmp_path}/empty holds no metrics.jsonl" in refused(capsys, run, tmp_path / "empty")
    assert f"there is no other={tmp_path}/none" in refused(capsys, run, f"other={tmp_path}/none")
    assert "there is no other=; a run is" in refused(capsys, run, "other=")
    assert f"there is no ={run}; a run is" in refused(capsys, run, f"={run}")
    assert "one run is nothing to compare" in refused(capsys, run)
    assert "RUN" in refused(capsys)
    assert "--stepz" in refused(capsys, run, run, "--stepz", "1-2")
    for steps in ("5", "1-", "-3", "3-1", "1-2-3", "a-b", "1.0-2", ""):
        assert f"argument --steps: {steps!r} is not a range of steps" in refused(capsys, run, run, f"--steps={steps}")
    for tolerance in ("-1", "nan", "inf", "small", ""):
        assert f"argument --tolerance: {tolerance!r} is not" in refused(capsys, run, run, f"--tolerance={tolerance}")


def test_report_directory_that_cannot_be_made(tmp_path, capsys):
    run = write(tmp_path / "run", curve(1, 3))
    (tmp_path / "taken").write_text("")
    code, _, error = call(capsys, run, run, "--report", tmp_path / "taken")
    assert code == 2
    assert error.startswith("error: ") and "taken" in error


def test_labels(tmp_path, capsys, monkeypatch):
    a, b, equals = (write(tmp_path / name, curve(1, 3)) for name in ("a/run", "b/run", "dp=2"))
    moved = a / "metrics.1.jsonl"
    moved.write_bytes((a / "metrics.jsonl").read_bytes())
    monkeypatch.chdir(a)
    _, output, _ = call(capsys, a, b, equals, f"1card={equals}", f"1card={a}", a / "metrics.1.jsonl", ".", "bell\a=.")
    assert list(table(output)) == ["a/run", "b/run", "dp=2", "1card", "1card (2)", "metrics.1", "a/run (2)", "bell?"]


def polylines(report: Path, title: str) -> dict[str, list[list[str]]]:
    """The points of each line in the chart with this title, by the label of the run."""
    page = ElementTree.parse(report / "report.html")
    for figure in page.iter(f"{HTML}figure"):
        if figure.findtext(f"{HTML}h2") == title:
            groups = list(figure.iter(f"{SVG}g"))
            return {
                group.findtext(f"{SVG}title", ""): [line.get("points", "").split() for line in group.iter(f"{SVG}polyline")]
                for group in groups
            }
    raise AssertionError(title)


class Balance(HTMLParser):
    """Every element closed, in order; nothing loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        assert tag not in ("script", "link", "img", "iframe") and not {name for name, _ in attrs} & {"src", "href"}

    def handle_startendtag(self, tag, attrs): ...

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    columns = {"step_time": 0.5, "tokens_per_second": 2048.0, "peak_memory": 2**31}
    base = write(tmp_path / "base", curve(1, 60), **columns)
    same, odd = write(tmp_path / "same", curve(1, 60), **columns), write(tmp_path / "odd", curve(1, 60, 1e-6))
    nasty = r'a<b&"</g>_$\frac$'  # markup, and a broken formula to matplotlib
    report = tmp_path / "new" / "report"
    code, output, error = call(capsys, base, same, f"{nasty}={odd}", "--report", report)
    assert (code, error) == (0, "")
    assert f"{report}/report.html, report.json, report.png" in output

    Balance((report / "report.html").read_text())
    for title, count in (("Loss", 3), ("Difference from the baseline", 2)):
        lines = polylines(report, title)
        assert list(lines) == ["base", "same", nasty][-count:]
        assert [[len(points) for points in drawn] for drawn in lines.values()] == [[60]] * count
        for drawn in lines.values():
            for x, y in (map(float, point.split(",")) for point in drawn[0]):
                assert 0 <= x <= 640 and 0 <= y <= 300
    page = ElementTree.parse(report / "report.html")
    assert [[cell.text for cell in row] for row in page.iter(f"{HTML}tr")][1:] == [
        [label, *cells] for label, cells in table(output).items()
    ]
    texts = ["".join(element.itertext()) for element in page.iter(f"{SVG}text")]
    assert texts.count("2,048") == 1 and texts.count("2,048 · 1.00×") == 1 and texts.count("not recorded") == 2
    assert (report / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_report_json_has_the_printed_numbers(tmp_path, capsys):
    a = write(tmp_path / "a", curve(1, 9), step_time=0.123, tokens_per_second=1234.0, peak_memory=5 * 2**20)
    b = write(tmp_path / "b", {**curve(1, 9), 5: 2.5}, step_time=1.25, tokens_per_second=99.5, peak_memory=2**30)
    code, output, _ = call(capsys, a, b, "--steps", "2-8", "--report", tmp_path / "report")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (code, report["passed"], report["tolerance"], report["steps"]) == (1, False, 5e-3, list(range(2, 9)))
    assert report["conclusion"] in output and all(note in output for note in report["notes"])
    for run in report["scenarios"]:
        steps, loss, mean, largest, verdict, time, rate, memory = table(output)[run["label"]]
        assert (steps, loss, verdict) == ("2-8", f"{run['mean_loss']:.6f}", run["verdict"])
        assert float(mean) == pytest.approx(run["mean_difference"], rel=5e-3)
        assert float(largest.split(" @")[0]) == pytest.approx(run["largest_difference"], rel=5e-3)
        assert (time, rate, memory) == (
            f"{1e3 * run['step_time']:.1f} ms" if run["label"] == "a" else f"{run['step_time']:.3f} s",
            f"{run['tokens_per_second']:,.0f}" if run["label"] == "a" else f"{run['tokens_per_second']:.1f}",
            f"{run['peak_memory'] / 2**20:.1f} MiB" if run["label"] == "a" else f"{run['peak_memory'] / 2**30:.2f} GiB",
        )
    assert report["scenarios"][1]["largest_at"] == 5
    assert report["scenarios"][1]["losses"][3] == 2.5


def test_report_without_matplotlib(tmp_path, capsys, monkeypatch):
    run = write(tmp_path / "run", {7: 2.0})  # a single step, and nothing differs
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, output, _ = call(capsys, run, run, "--report", tmp_path / "report", "--tolerance", "0")
    assert code == 0
    assert output.splitlines()[-1].endswith("(report.png is skipped: matplotlib is not installed)")
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.html", "report.json"]
    assert [len(line) for lines in polylines(tmp_path / "report", "Loss").values() for line in lines] == [1, 1]


@pytest.mark.parametrize("losses", [{3: 1.5}, {1: 0.0, 2: 0.0}, {1: 1e9, 2: -1e9}, {1: math.nan, 2: math.nan}])
@pytest.mark.parametrize("tolerance", ["0", "5e-3"])
def test_picture_of_extreme_runs(tmp_path, capsys, losses, tolerance):
    pytest.importorskip("matplotlib")
    base, other = write(tmp_path / "base", losses), write(tmp_path / "other", dict.fromkeys(losses, 1.0))
    code, *_ = call(capsys, base, other, "--tolerance", tolerance, "--report", tmp_path / "report")
    assert code == 1
    assert (tmp_path / "report" / "report.png").stat().st_size > 1000
    ElementTree.parse(tmp_path / "report" / "report.html")


def test_starts_without_torch(tmp_path):
    run = write(tmp_path / "run", curve(1, 5))
    script = "import sys; from hyper_parallel.trainer.align import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, str(run), str(run), "--report", str(tmp_path / "report")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "False"


def test_as_a_command(tmp_path):
    one, two = write(tmp_path / "one", curve(1, 5)), write(tmp_path / "two", curve(1, 5, 1.0))
    command = [sys.executable, "-m", "hyper_parallel.trainer.align"]
    codes = [
        subprocess.run([*command, *runs], capture_output=True).returncode for runs in ([one, one], [one, two], [one, "none"])
    ]
    assert codes == [0, 1, 2]


numbers = st.floats(min_value=-1e12, max_value=1e12, allow_subnormal=False).map(
    lambda value: value if abs(value) > 1e-12 else 0.0
)


@given(st.lists(numbers, max_size=20), st.booleans())
def test_ticks_are_round_distinct_and_inside(values, whole):
    axis = linear_axis(values, 0.0, 100.0, whole=whole)
    ticks = [value for value, _ in axis.ticks]
    assert 2 <= len(ticks) <= 11 and ticks == sorted(set(ticks))
    step = ticks[1] - ticks[0]
    assert all(-1e-6 <= axis(value) <= 100 + 1e-6 for value in (*values, *ticks))
    mantissa = float(f"{step:.3e}".split("e")[0])
    assert mantissa in (1.0, 2.0, 5.0) or max(map(abs, ticks)) > 1e5 * step  # there the subtraction above is not exact
    labels = [label for _, label in axis.ticks]
    assert len(set(labels)) == len(labels)
    assert whole or max(map(len, labels)) <= 12  # there is room for that many characters


@given(st.lists(st.floats(min_value=1e-9, max_value=1e3) | st.just(0.0), min_size=1, max_size=20), st.sampled_from([0.0, 5e-3]))
def test_difference_axis_shows_every_difference_and_the_tolerance(differences, tolerance):
    axis = difference_axis(differences, tolerance, 0.0, 100.0)
    assert all(-1e-6 <= axis(value) <= 100 + 1e-6 for value in (*differences, tolerance))
    if axis.log and 0.0 in differences:
        assert axis(0.0) == 0 and axis.ticks[-1][1] == "0"
        assert all(axis(value) > 1 for value in differences if value)  # only an exact zero touches the floor
    assert len(axis.ticks) <= 11
