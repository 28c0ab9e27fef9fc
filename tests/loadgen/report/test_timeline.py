"""The figure over time: what it draws is what the records say, extremes are kept, and marks are on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from loadgen.monitor.server_view import Header, ServerSample
from loadgen.report import build, timeline
from loadgen.report.schema import Stall
from loadgen.rundir import Phase
from loadgen.rundir.records import table
from tests.loadgen.report.test_build import HOSTILE
from tests.loadgen.tables import facts, failure, manifest, request, write_run


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: Any) -> Figure:
    figures: list[Figure] = []
    save = Figure.savefig

    def kept(figure: Figure, *rest: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *rest, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    timeline.draw(*arguments, tmp_path / "timeline.png")
    return figures[-1]


def test_requests_in_flight_by_hand() -> None:
    rows = [request(0, sent=0, first=50, gaps=(50,)), request(1, sent=40, first=60, gaps=(140,)), failure(2, sent=None)]
    at_s, count = timeline.in_flight(table(rows))
    assert at_s.tolist() == [0.0, 0.04, 0.1, 0.2] and count.tolist() == [1, 2, 1, 0]


@given(st.lists(st.floats(0, 1000), max_size=50), st.floats(0.001, 1000))
def test_rates_hold_every_request(at_s: list[float], end_s: float) -> None:
    inside = np.array([round(1e9 * at) for at in at_s if at <= end_s], np.int64)
    edges, per_s = timeline.rates(inside, end_s)
    assert edges[0] == 0 and edges[-1] == end_s and (np.diff(edges) > 0).all()
    assert len(per_s) <= timeline.MOST_BINS + 1
    assert float((per_s * np.diff(edges)).sum()) == pytest.approx(len(inside))


def test_a_rate_is_a_rate() -> None:
    edges, per_s = timeline.rates(np.arange(5, 12_000, 10) * 1_000_000, 12.0)
    assert np.diff(edges) == pytest.approx(0.1) and per_s == pytest.approx(100.0)


@given(st.integers(0, 2**32 - 1), st.integers(4001, 30_000))
def test_few_points_keep_every_extreme(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    x, y = np.sort(random.exponential(1.0, n)), random.lognormal(0, 2, n)
    kept = timeline.thinned(x, y)
    assert len(kept) <= 2 * timeline.MOST_BUCKETS + timeline.MOST_OTHERS + 1
    assert (np.diff(kept) > 0).all() and kept[-1] == n - 1
    assert y[kept].max() == y.max() and y[kept].min() == y.min()
    assert timeline.thinned(x[:100], y[:100]).tolist() == list(range(100))
    assert len(timeline.thinned(np.zeros(n), y)) <= timeline.MOST_OTHERS + 3  # a burst: all due at once


def test_what_stands_on_the_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = table(request(at, scheduled=10 * at, sent=10 * at, first=10 * at + 30) for at in range(400))
    sampled = [
        (at_s, {"running": 3.0, "waiting": 40.0, "kv_cache_usage_ratio": at_s / 10}) for at_s in (-1.0, 0.5, 2.0, 99.0)
    ]
    phases = (Phase("4/s", 0.0, 2.0), Phase("$8$/s", 2.0, 4.0))
    report = build.build(manifest(emulated=True, phases=phases), run, [facts(state="interrupted")])
    report = msgspec.structs.replace(report, stalls=[Stall(1.0, 2.5), Stall(3.0, 3.5)])
    figure = drawn(monkeypatch, tmp_path, report, run, sampled, "run")
    assert figure._suptitle.get_text().startswith("INVALID") and "EMULATED" in figure._suptitle.get_text()  # type: ignore[attr-defined]
    rate, flying, ttft, queue, kv = figure.axes
    assert [text.get_text() for text in rate.texts] == ["4/s", "$8$/s"]
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in flying.patches]  # type: ignore[attr-defined]
    assert spans == [(0.0, 2.0), (2.0, 4.0), (1.0, 2.5), (3.0, 3.5)]
    assert ttft.lines[0].get_ydata() == pytest.approx(30.0)
    assert [line.get_label() for line in queue.lines] == ["running", "waiting"]
    assert np.asarray(kv.lines[0].get_xydata()).tolist() == [[0.5, 5.0], [2.0, 20.0]]  # what lies in the run alone
    valid = build.build(manifest(), run, [facts()])
    plain = drawn(monkeypatch, tmp_path, valid, run, [], "run")
    assert plain._suptitle.get_text() == "run" and len(plain.axes) == 3  # type: ignore[attr-defined]
    assert not plain.axes[1].patches and not plain.axes[0].texts


def test_it_is_drawn_from_a_run_directory_with_its_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [request(at) for at in range(5)], manifest(model=HOSTILE), facts())
    lines = [msgspec.json.encode(Header(run_id=manifest().run_id, series=["running"], gpus=[]))]
    for at_ns, error in ((50_000_000, None), (90_000_000, "busy")):
        metrics = {} if error else {"running": 5.0}
        lines.append(msgspec.json.encode(ServerSample(at_ns=at_ns, took_ms=1, metrics=metrics, error=error)))
    (run / "server.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert build._sampled(run, manifest().run_id) == [(0.05, {"running": 5.0})]
    assert build._sampled(run, "another") == []
    built, rows = build.from_directory(run)
    figure = drawn(monkeypatch, tmp_path, built, rows.measured(), build._sampled(run, built.run_id), "title")
    assert len(figure.axes) == 4
    build.write(run, built, rows)
    assert (run / "timeline.png").exists()


@pytest.mark.parametrize("rows", [[], [failure(0)], [failure(0, "dropped", sent=None)], [request(0, gaps=())]])
def test_a_run_with_nothing_in_it_is_drawn(rows: list[Any], tmp_path: Path) -> None:
    built = build.build(manifest(), table(rows), [])
    timeline.draw(built, table(rows), [], "title", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
