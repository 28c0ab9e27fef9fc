"""The dashboards as Grafana will read them: made by the code beside them, of metrics that there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.observability import names

BOARDS = ["comparison", "serving", "training"]


def panels(board: Any) -> list[Any]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_the_committed_files_are_what_the_code_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, names.COMPOSE / "dashboards", "--out", tmp_path], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(made) == [f"{name}.json" for name in BOARDS]
    assert made == {path.name: path.read_text() for path in names.DASHBOARDS.iterdir()}, "run `make compose`"


@pytest.mark.parametrize(
    ("expr", "selected"),
    [
        ("sum by (le, run_id) (rate(a_bucket{x=\"b_c{d}\", run_id=~'$run_id'}[$__rate_interval]))", {"a_bucket"}),
        ("a:b:c5m > 0.5 and on (run_id) up == 1 or time() - n_seconds * 2^20 > 1e-9", {"a:b:c5m", "up", "n_seconds"}),
        ("topk by (r) (1, last_over_time(x[10m:5s]))", {"x"}),
    ],
)
def test_metrics_are_found_in_queries(expr: str, selected: set[str]) -> None:
    assert names.metrics(expr) == selected


def test_every_metric_is_one_that_there_is() -> None:
    there = names.EXPORTED | names.PROMETHEUS | names.DCGM | names.recorded()
    for query in names.queries():
        assert names.metrics(query.expr) and names.metrics(query.expr) <= there, query
    for rule in names.rules():
        assert names.metrics(rule["expr"]) <= names.EXPORTED | names.PROMETHEUS | names.recorded(), rule
    for board in names.boards().values():
        (variable,) = board["templating"]["list"]
        assert names.metrics(variable["query"].replace("label_values(", "(").replace(", run_id)", ")")) <= there


def test_every_metric_of_a_run_is_shown_somewhere() -> None:
    shown = set().union(*(names.metrics(query.expr) for query in names.queries()))
    shown |= set().union(*(names.metrics(rule["expr"]) for rule in names.rules()))
    assert {"llm_dissect_exporter_runs", "llm_dissect_exporter_scrape_seconds"} == names.GAUGES - shown
    assert not names.COUNTERS - shown
    assert {name + "_bucket" for name in names.HISTOGRAMS} <= shown


def test_recorded_series_are_used() -> None:
    exprs = [query.expr for query in names.queries()] + [rule["expr"] for rule in names.rules()]
    for name in names.recorded():
        assert any(name in expr for expr in exprs), name


def test_every_query_is_of_the_chosen_runs() -> None:
    for query in names.queries():
        if not names.metrics(query.expr) <= names.DCGM:
            # Once for each metric: no half of a quotient is of other runs.
            assert query.expr.count('run_id=~"$run_id') == len(names.selected(query.expr)), query


def test_a_rate_is_of_a_counter_and_a_quantile_of_buckets_by_run() -> None:
    for query in names.queries():
        for part in query.expr.split("rate(")[1:] + query.expr.split("increase(")[1:]:
            name = part.split("{")[0]
            assert name.endswith(("_total", "_bucket")), query
        if "histogram_quantile(" in query.expr:
            assert "by (le, run_id)" in query.expr and "_bucket" in query.expr, query


def test_the_comparison_reads_runs_that_were_over_before_they_were_seen() -> None:
    for query in names.queries():
        if query.board == "comparison":
            assert "rate(" not in query.expr and "increase(" not in query.expr, query
            assert query.instant and "[$__range]" in query.expr, query


@pytest.mark.parametrize("name", BOARDS)
def test_a_panel_without_data_says_so(name: str) -> None:
    for panel in panels(names.boards()[name]):
        assert panel["fieldConfig"]["defaults"].get("noValue") in {"no data", "none"}, panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_a_place_and_an_id_of_their_own(name: str) -> None:
    board = names.boards()[name]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(board):
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters)
        assert all(target["datasource"]["uid"] == "prometheus" for target in panel["targets"])


def test_the_dashboards_are_told_apart_and_cannot_be_changed() -> None:
    boards = names.boards()
    assert len({board["uid"] for board in boards.values()}) == len(BOARDS)
    assert all(board["editable"] is False for board in boards.values())
    assert all(board["templating"]["list"][0]["multi"] is True for board in boards.values())
