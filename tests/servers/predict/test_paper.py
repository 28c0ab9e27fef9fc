"""The paper's Section VI in virtual time: every combination is there, misses are said, nothing passes for measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen import cli
from loadgen.document import markdown
from loadgen.document.content import Chart
from servers.predict import paper, paper_page
from servers.predict.paper import Fits, Order, Ratio, Result, Spread, StepTime, Value, Variant
from servers.predict.paper_layout import Figure, Panel

PAPER = paper.load()


def made(*latencies_s: float, tokens: int = 100) -> Result:
    return Result(latencies_s=np.array(sorted(latencies_s)), output_tokens=tokens)


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """A tenth of the burst, on GPUs of which two are too few for 70B."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "load", lambda: msgspec.structs.replace(PAPER, requests=100, gpus=2))
        yield


@pytest.fixture(scope="module")
def results(small: None) -> dict[str, Result]:
    return paper.predict_all()


def test_all_combinations_are_there(results: dict[str, Result]) -> None:
    platforms, models, servers = (
        {"a800", "rtx4090", "rtx3090-nvlink", "rtx3090"},
        {"7b", "13b", "70b"},
        set(PAPER.servers),
    )
    assert servers == {"vllm", "lightllm", "tgi"}
    assert set(results) == {f"{p}/{m}/{s}" for p in platforms for m in models for s in servers}
    assert [each.scheduler for each in PAPER.servers.values()] == ["vllm@0.2", "lightllm@2310", "tgi@1"]
    for run, result in results.items():
        assert bool(result.reason) != (len(result.latencies_s) == 100), run


def test_a_model_that_does_not_fit_is_a_row_with_its_reason(results: dict[str, Result]) -> None:
    reasons = {run: result.reason for run, result in results.items() if result.reason}
    assert {run.split("/")[1] for run in reasons} == {"70b"}
    assert all("does not fit" in reason for reason in reasons.values())
    text = markdown.render(paper_page.page(paper.summary(results), results, []))
    row = next(line for line in text.splitlines() if line.startswith("| RTX4090 (P2P off), 70B, TGI |"))
    assert "GB are missing on 2 x NVIDIA GeForce RTX 4090" in row


def test_lengths_follow_the_law_that_is_stated() -> None:
    lengths = msgspec.structs.replace(PAPER, requests=20_000).lengths(0)
    assert PAPER.lengths(1) == PAPER.lengths(1) != PAPER.lengths(2)
    assert max(lengths) == 512 and min(lengths) == 1
    assert lengths.count(512) / 20_000 == pytest.approx(0.35, abs=0.01)
    early = [length for length in lengths if length < 512]
    assert sum(early) / len(early) == pytest.approx(30.5, abs=1)


def test_a_reply_that_stops_early_leaves_and_frees_its_memory(small: None) -> None:
    """A server that reserves for 512 tokens each, with room for few: short replies let the next in sooner."""
    run = Variant("", "a800/7b/tgi", kv_tokens=4096)
    short, long = (paper.predict(run, [length] * 100) for length in (20, 512))
    assert (len(short.latencies_s), short.output_tokens) == (100, 2000)
    assert short.latencies_s[-1] < long.latencies_s[-1] / 10


def test_variants_change_what_they_name(small: None, results: dict[str, Result]) -> None:
    lengths = paper.load().lengths(0)
    run = "a800/7b/tgi"
    few = paper.predict(Variant("", run, max_requests=30), lengths)
    assert (few.refused, len(few.latencies_s)) == (70, 30)
    queued = paper.predict(Variant("", run, detokenize_us=1000), lengths)
    assert queued.latencies_s[-1] > results[run].latencies_s[-1]
    assert queued.latencies_s[-1] >= sum(lengths) * 1e-3


def test_checks_with_known_answers() -> None:
    results = {"a/m/x": made(1, 2, 3), "a/m/y": made(2, 4, 6), "b/m/x": made(5, 5, 5), "b/m/y": Result(reason="no")}
    assert Value("p50_s", "a/m/x", 2.4, 0.25).check(results) == ("2", True)
    assert Value("p50_s", "a/m/x", 3, 0.25).check(results) == ("2", False)
    assert Ratio("throughput", "a/m/x", ("a/m/y", "b/m/x"), 1.5, 2).check(results) == ("1.7 times", True)
    assert Ratio("throughput", "a/m/x", ("a/m/y",), 2.5, 3).check(results) == ("2.0 times", False)
    assert Order("p50_s", ("x", "y"), ("a/m/*",)).check(results) == ("in 1 of 1 (1 x x < y)", True)
    assert Order("p50_s", ("y", "x"), ("a/m/*",), least=0.5).check(results)[1] is False
    assert Order("p50_s", ("y", "x"), ("a/m/*",), highest=True, rest_free=True).check(results)[1] is True
    assert Spread("p50_s", ("x", "y"), ("a/m/*",), 2).check(results) == ("2.0", True)
    assert Spread("p50_s", ("x", "y"), ("a/m/*",), 1.9).check(results) == ("2.0", False)
    assert Fits(("a/m/x", "b/m/y"), False).check(results) == ("1 of 2 fit", False)
    assert Fits(("b/m/y",), False).check(results) == ("0 of 1 fit", True)


def test_what_did_not_run_meets_nothing() -> None:
    none = {"a/m/x": Result(reason="no"), "a/m/y": Result(reason="no")}
    assert math.isnan(none["a/m/x"].measure("throughput"))
    for check in (
        Value("p50_s", "a/m/x", 2, 0.25), Ratio("p50_s", "a/m/x", ("a/m/y",), 0, 9),
        Order("p50_s", ("x", "y"), ("a/m/*",)), Spread("p50_s", ("x", "y"), ("a/m/*",), 2),
        StepTime("a/m/x", 8, 100, 1, 0.5),
    ):  # fmt: skip
        assert check.check(none)[1] is False


def test_misses_are_marked(results: dict[str, Result]) -> None:
    summary = paper.summary(results)
    facts = json.loads(summary.as_json())["facts"]
    assert [fact["said"] for fact in facts] == [fact.statement for fact in PAPER.facts]
    assert all(fact["place"] and fact["predicted"] and fact["counts"] for fact in facts)
    text = markdown.render(paper_page.page(summary, results, []))
    tried = [fact for fact in facts if not fact["fitted"]]
    missed = sum(not fact["met"] for fact in tried)
    assert 0 < missed < len(tried)
    assert text.count("| MISS |") == sum(not fact["met"] for fact in facts)
    assert f"{len(tried) - missed} of {len(tried)} statements of the paper are met, {missed} are missed" in text
    assert all(assumption in text for assumption in PAPER.assumptions)


def test_runs_named_by_facts_and_variants_exist() -> None:
    known = set(PAPER.runs())
    for fact in PAPER.facts:
        check = fact.check
        if isinstance(check, (Order, Spread)):
            assert {place.replace("*", rank) for place in check.at for rank in check.ranks} <= known
        elif isinstance(check, Ratio):
            assert {check.of, *check.over} <= known
        else:
            assert set(check.runs if isinstance(check, Fits) else [check.run]) <= known
    assert {variant.run for variant in PAPER.variants} <= known


def test_a_page_names_what_its_curves_leave_out() -> None:
    figure = Figure(7, "latency", [Panel("A800", {"vLLM": "long", "TGI": "none"}), Panel("RTX4090", {"vLLM": "short"})])
    runs = {"long": made(*range(1, 1001)), "none": Result(reason="no room"), "short": made(1, 2)}
    thinned, whole = paper_page.latencies(figure, runs)
    assert isinstance(thinned, Chart) and isinstance(whole, Chart)
    assert thinned.note.startswith("Does not fit: TGI. Of more than 250 values only every k-th is drawn")
    assert [series.name for series in thinned.series] == ["vLLM"] and len(thinned.series[0].x) < 1000
    assert whole.note == "" and whole.series[0].x == [1.0, 1.0, 2.0] and whole.series[0].y == [0.0, 0.5, 1.0]
    assert thinned.origin == whole.origin == "predicted"


@pytest.mark.processes
def test_the_command_writes_everything_and_marks_it(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "paper"
    assert cli.invoke(["predict", "--preset", "paper", "--out", str(out), "--seed", "3"]) == 0
    printed = capsys.readouterr()
    figures = {f"figure{number}.{suffix}" for number in range(6, 11) for suffix in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == {"paper.json", "paper.md", "paper.html"} | figures
    written = json.loads((out / "paper.json").read_text())
    assert json.loads(printed.out) == written
    assert (written["emulated"], written["seed"], len(written["runs"])) == (True, 3, 36)
    page = (out / "paper.md").read_text()
    verdict = re.search(r"\d+ of 22 statements of the paper are met, \d+ are missed\.", page)
    assert verdict is not None and verdict[0] in printed.err
    for text in (printed.err, page):
        assert "EMULATED (predicted): emulated hardware" in text and "arXiv 2311.03687, Section VI, predicted" in text
    for number in range(6, 11):
        assert (out / f"figure{number}.png").stat().st_size > 5000
        text = (out / f"figure{number}.svg").read_text()
        assert "PREDICTED (emulated hardware" in text and f"As Figure {number}: " in text and "2311.03687" in text
        assert ("oes not fit" in text) == (number in (6, 10))  # a chart of none that fit is on the page alone
    assert cli.invoke(["predict", "--preset", "paper", "--out", str(out)]) == 2  # nothing is overwritten


@pytest.mark.parametrize("option", [["--requests", "10"], ["--gpu", "h200"], ["--backend", "tgi"]])
def test_other_options_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["predict", "--preset", "paper", *option]) == 2
    assert "only --out and --seed go with it" in capsys.readouterr().err
