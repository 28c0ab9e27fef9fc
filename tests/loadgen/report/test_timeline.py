"""The figure over time: what it draws is what the records say, extremes are kept, and marks are on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
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


def test_what_stands_on_the_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = table(request(at, scheduled=10 * at, sent=10 * at, first=10 * at + 30) for at in range(400))
    sampled = [
        (at_s, {"running": 3.0, "waiting": 40.0, "kv_cache_usage_ratio": at_s / 10}) for at_s in (-1.0, 0.5, 2.0, 99.0)
    ]
    phases = (Phase("4/s", 0.0, 2.0), Phase("$8$/s", 2.0, 4.0))
    report = build.build(manifest(emulated=True, phases=phases), run, [facts(state="interrupted")])
    report = msgspec.structs.replace(report, stalls=[Stall(1.0, 2.5), Stall(3.0, 3.5)])
    figure = drawn(monkeypatch, tmp_path, report, run, sampled, "run")
    assert figure.get_suptitle().startswith("INVALID") and "EMULATED" in figure.get_suptitle()
    rate, flying, ttft, queue, kv = figure.axes
    assert [text.get_text() for text in rate.texts] == ["4/s", "$8$/s"]
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in flying.patches]  # type: ignore[attr-defined]
    assert spans == [(0.0, 2.0), (2.0, 4.0), (1.0, 2.5), (3.0, 3.5)]
    assert ttft.lines[0].get_ydata() == pytest.approx(30.0)
    assert [line.get_label() for line in queue.lines] == ["running", "waiting"]
    assert np.asarray(kv.lines[0].get_xydata()).tolist() == [[0.5, 5.0], [2.0, 20.0]]  # what lies in the run alone
    valid = build.build(manifest(), run, [facts()])
    plain = drawn(monkeypatch, tmp_path, valid, run, [], "run")
    assert plain.get_suptitle() == "run" and len(plain.axes) == 3
    assert not plain.axes[1].patches and not plain.axes[0].texts


def test_it_is_drawn_from_a_run_directory_with_its_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [request(at) for at in range(5)], manifest(model=HOSTILE), facts())
    lines = [msgspec.json.encode(Header(run_id=manifest().run_id, series=["running"], gpus=[]))]
    for at_ns, error in ((50_000_000, None), (90_000_000, "busy")):
        metrics = {} if error else {"running": 5.0}
        lines.append(msgspec.json.encode(ServerSample(at_ns=at_ns, took_ms=1, metrics=metrics, error=error)))
    (run / "server.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    built, rows = build.from_directory(run)
    of_another = msgspec.structs.replace(built, run_id="another")
    assert build.shown_run(run, of_another, rows).samples == []
    sampled = [(at_s, sample.metrics) for at_s, sample in build.shown_run(run, built, rows).samples]
    assert sampled == [(0.05, {"running": 5.0})]
    figure = drawn(monkeypatch, tmp_path, built, rows.measured(), sampled, "title")
    assert len(figure.axes) == 4
    build.write(run, built, rows)
    assert (run / "timeline.png").exists()


@pytest.mark.parametrize("rows", [[], [failure(0)], [failure(0, "dropped", sent=None)], [request(0, gaps=())]])
def test_a_run_with_nothing_in_it_is_drawn(rows: list[Any], tmp_path: Path) -> None:
    built = build.build(manifest(), table(rows), [])
    timeline.draw(built, table(rows), [], "title", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
