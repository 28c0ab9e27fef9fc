"""The page of a comparison: the numbers of the comparison, the gate's verdict, and files that are not overwritten."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen import cli
from loadgen.document import html
from loadgen.document.content import Document, Text
from loadgen.report import compare, limits
from loadgen.report.compare import BETTER, LIMITED, WORSE, Comparison
from loadgen.report.contrast import SAME, contrast
from loadgen.report.pages import compare as compare_page
from loadgen.report.pages.compare import ComparisonDetails
from tests.loadgen.report.pages.contents import blocks_of, links, points
from tests.loadgen.report.pages.test_run import drawn
from tests.loadgen.report.pages.test_sweep import reported
from tests.loadgen.report.test_build import HOSTILE
from tests.loadgen.report.test_repeats import many, run


def page_of(compared: Comparison, *texts: str) -> Document:
    checks = compare.judged(compared, limits.parse(texts, LIMITED)) if texts else []
    sides = {"A": {}, "B": {}}
    return compare_page.page(
        compared, ComparisonDetails(sides, {"A": "", "B": "emulated"}, {}, checks, ["loadgen", "compare"])
    )


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    path = tmp_path_factory.mktemp("runs")
    return compare.compare(many(path / "a", [101, 103, 102]), many(path / "b", [121, 123, 122]))


def test_numbers_are_those_of_the_comparison(slower: Comparison) -> None:
    page = page_of(slower)
    (table,) = blocks_of(page, "numbers")
    by_name = {row[0]: row[1:] for row in table.rows}
    for metric, statistic in (("ttft_ms", "p99"), ("e2el_ms", "mean")):
        change = slower.metrics[metric][statistic]
        *numbers, shows = by_name[f"{metric.removesuffix('_ms')} {statistic}, ms"]
        expected = [change.a, change.b, change.difference, *change.difference_ci, change.ratio, *change.ratio_ci]
        assert [cell.value for cell in numbers] == expected and shows == change.shows == "B is higher"
    percent = drawn(page)["B over A, less 1"]
    place = percent.categories.index("ttft p50")
    worse = next(series for series in percent.series if series.name == WORSE)
    at = list(worse.x).index(place)
    change = slower.metrics["ttft_ms"]["p50"]
    assert worse.y[at] == pytest.approx(100 * (change.ratio - 1)) and worse.y[at] == pytest.approx(20, abs=2)
    assert [worse.low[at], worse.high[at]] == pytest.approx([100 * (bound - 1) for bound in change.ratio_ci])
    assert percent.marks[0].value == 0 and percent.marks[0].axis == "y"
    for chart in drawn(page).values():
        for series in points(chart):
            assert list(series.x) == sorted(series.x)
    assert {chart.origin for chart in drawn(page).values() if not chart.quantile} == {"partly emulated"}


def test_what_differs_is_the_verdict(slower: Comparison, tmp_path: Path) -> None:
    page = page_of(slower)
    assert page.verdict.startswith("B is worse: ttft p50 +") and page.tone == "warning"
    a = many(tmp_path / "a", [101, 103, 102])
    same = page_of(compare.compare(a, a))
    assert same.verdict == "No difference is shown in any of the main metrics." and same.tone == "plain"
    better = page_of(compare.compare(many(tmp_path / "b", [121, 123, 122]), a))
    assert better.verdict.startswith(f"{BETTER}: ttft p50 -") and better.tone == "good"
    assert {series.name for series in drawn(same)["B over A, less 1"].series} == {SAME}


def test_nothing_is_claimed_without_an_interval(slower: Comparison) -> None:
    unknown = {
        name: {statistic: contrast(each.a, each.b) for statistic, each in of.items()}
        for name, of in slower.metrics.items()
    }
    rates = {name: contrast(each.a, each.b) for name, each in slower.throughput.items()}
    page = page_of(msgspec.structs.replace(slower, metrics=unknown, throughput=rates))
    assert page.verdict == "There are too few requests to tell whether A and B differ." and page.tone == "plain"


def test_a_run_that_was_stopped_is_in_the_numbers(tmp_path: Path) -> None:
    run(tmp_path / "a", 101)
    run(tmp_path / "b", 105, state="interrupted")
    text = html.render(page_of(compare.compare(tmp_path / "a", tmp_path / "b")))
    assert "<strong>not finished</strong>" in text and "in no number" not in text


def test_different_loads_are_a_warning(slower: Comparison) -> None:
    changed = {"arrival": ["burst", "poisson:3"], "config.seed": [1, 2], "config.think_time": [None, 2.0]}
    for configuration, names in ((changed, "arrival, think time"), ({"config.seed": [1, 2]}, "")):
        page = page_of(msgspec.structs.replace(slower, configuration=configuration))
        shown = [block.text for block in blocks_of(page, "sides") if isinstance(block, Text)]
        assert shown[0].startswith("A: ") and shown[1].startswith("B: ") and " ok of " in shown[0]
        assert [text.partition(":")[0] for text in shown[2:]] == (
            [f"A and B were sent different loads ({names})"] if names else []
        )


def test_the_gate_comes_first(slower: Comparison) -> None:
    broken, kept = page_of(slower, "ttft_p99>+5%", "tpot_mean>+50%"), page_of(slower, "ttft_p99>+50%")
    assert broken.verdict == "Gate: B is worse than A by more than a limit allows." and broken.tone == "bad"
    assert kept.verdict == "Gate: no limit is broken." and kept.tone == "good"
    table = blocks_of(broken, "gate")[1]
    assert {row[1]: row[0] for row in table.rows if ">" in row[1]} == {"ttft_p99>+5%": "BEYOND", "tpot_mean>+50%": "ok"}
    assert broken.sections[0].id == "gate"


def test_the_file_leads_to_the_runs_and_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    run(tmp_path / "runs" / "a", 101)
    run(tmp_path / "runs" / "b: #2", 121)
    reported(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    line = ["compare", "runs/a", "runs/b: #2", "--html", "page.html"]
    assert cli.invoke(line) == 0
    text = Path("page.html").read_text()
    assert 'href="runs/a/report.html"' in text and 'href="runs/b%3A%20%232/report.html"' in text
    assert cli.invoke(line) == 2
    assert "page.html exists; name another --html" in capsys.readouterr().err
    assert Path("page.html").read_text() == text
    assert cli.invoke([*line[:-1], "no/such/page.html"]) == 2
    assert "name a file in a directory that is there" in capsys.readouterr().err


def test_an_invalid_run_and_hostile_names(slower: Comparison) -> None:
    bad = [msgspec.structs.replace(slower.b.runs[0], valid=False, reasons=[HOSTILE], directory=HOSTILE)]
    b = msgspec.structs.replace(slower.b, runs=bad, backend=HOSTILE, model=HOSTILE)
    page = page_of(msgspec.structs.replace(slower, b=b, configuration={HOSTILE: [HOSTILE, HOSTILE]}))
    text = html.render(page)
    assert "<script>alert" not in text and all(char.isprintable() or char in "\n\t" for char in text)
    assert page.tone == "bad" and page.verdict.startswith("INVALID: a run of B")
    assert links(page) == {}
