"""Charts as figures: what is drawn is what the chart holds, and a reader sees where its numbers come from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadgen.document import figure
from loadgen.document.content import Chart, Document, Mark, Section, Series, Shade

HOSTILE = "a\x1b[31m $x_1$ \u202e<b>\n"


def chart(*series: Series, **changes: Any) -> Chart:
    return Chart(**{"title": "A chart", "x_label": "x (s)", "y_label": "y (ms)", "series": series, **changes})


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(drawn: Figure, *rest: Any, **options: Any) -> None:
        figures.append(drawn)
        save(drawn, *rest, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def texts(axis: Axes) -> list[str]:
    return [text.get_text().strip() for text in axis.texts]


def test_a_gap_stays_one_and_names_stand_beside_points(tmp_path: Path, kept: list[Figure]) -> None:
    line = Series("a $x$", [0, 1, 2], [1.0, None, 3.0])
    dots = Series("b", [0, 2], [2.0, 4.0], kind="points", names=["low", "high"], low=[1.0, 3.5], high=[3.0, 5.0])
    figure.draw([chart(line, dots)], "T", [tmp_path / "f.png"])
    (axis,) = kept[0].axes
    drawn = np.asarray(axis.lines[0].get_ydata())
    assert drawn[[0, 2]].tolist() == [1.0, 3.0] and math.isnan(drawn[1])
    assert {"low", "high"} <= set(texts(axis))
    assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 5.0  # whiskers are within it
    whiskers = [segment.tolist() for segment in axis.collections[0].get_segments()]  # type: ignore[attr-defined]
    assert whiskers == [[[0, 1], [0, 3]], [[2, 3.5], [2, 5]]]
    assert [text.get_text() for text in kept[0].legends[0].get_texts()] == ["a $x$", "b"]


def test_what_made_the_numbers_stands_first(tmp_path: Path, kept: list[Figure]) -> None:
    section = Section("s", "Something", [chart(Series("a", [0, 1], [1, 2]))], ["one.png", "one.svg"])
    page = Document(
        "A model", "", [section, Section("none", "Nothing", [], ["no.png"])], origin="predicted", stamp="INVALID"
    )
    assert page.figures == [("one.png", "Something")]
    figure.write(page, tmp_path)
    title = " ".join(kept[0].get_suptitle().split())
    assert title == "INVALID PREDICTED (emulated hardware, no real server) A model: Something"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "one.svg"]
    first = (tmp_path / "one.svg").read_bytes()
    figure.write(page, tmp_path)
    assert (tmp_path / "one.svg").read_bytes() == first
    figure.draw(section.charts, "Measured", [tmp_path / "one.svg"])
    assert kept[-1].get_suptitle() == "Measured"


def test_bars_have_their_numbers_and_say_why_one_is_missing(tmp_path: Path, kept: list[Figure]) -> None:
    ours = Series("ours", [0, 1, 2], [10.0, 7000.0, None], kind="bars", labels=["", "", "OOM"])
    theirs = Series("theirs", [0, 1, 2], [400.0, None, 1.5], kind="bars")
    made = chart(ours, theirs, categories=["Z2", "Q", HOSTILE], marks=[Mark("y", 9000.0, "device")])
    figure.draw([made], HOSTILE, [tmp_path / "f.svg"])
    (axis,) = kept[0].axes
    assert {"10.00", "7,000", "OOM", "400.0", "1.50", "device"} <= set(texts(axis))
    assert [bar.get_y() for bar in axis.patches] == [0] * 6  # type: ignore[attr-defined]
    assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 9000
    ElementTree.parse(tmp_path / "f.svg")


def test_parts_of_a_bar_add_up(tmp_path: Path, kept: list[Figure]) -> None:
    parts = [Series(name, [0, 1], y, kind="bars", colour=at) for at, (name, y) in enumerate(
        {"a": [3.0, 1.0], "b": [2.0, None], "c": [0.01, 4.0]}.items())]  # fmt: skip
    figure.draw([chart(*parts, stacked=True, categories=["this", "that"])], "T", [tmp_path / "f.png"])
    (axis,) = kept[0].axes
    spans = [(patch.get_x(), patch.get_width()) for patch in axis.patches]  # type: ignore[attr-defined]
    assert np.array(spans) == pytest.approx(np.array([(0, 3), (0, 1), (3, 2), (1, 0), (5, 0.01), (1, 4)]))
    assert [label.get_text() for label in axis.get_yticklabels()] == ["this", "that"]
    assert "0.01" not in texts(axis) and {"3", "2", "1", "4"} <= set(texts(axis))


def test_stretches_and_lines_are_named(tmp_path: Path, kept: list[Figure]) -> None:
    curve = Series("a", [0.0, 10.0], [1.0, 2.0], kind="step")
    shades = [Shade(0, 6, "$4$/s"), Shade(6, 6.01, "short"), Shade(7, 8, "server stalled", "bad")]
    both = [chart(curve, shades=shades, marks=[Mark("x", 5.0, "p50 5 ms")], sync="time") for _ in range(2)]
    figure.draw(both, "T", [tmp_path / "f.png"])
    first, second = kept[0].axes
    assert texts(first) == ["p50 5 ms", "$4$/s"] and texts(second) == ["p50 5 ms"]
    assert len(first.patches) == len(second.patches) == 3
    assert first.get_xlabel() == "" and second.get_xlabel() == "x (s)"
    assert [text.get_text() for text in kept[0].legends[0].get_texts()] == ["a", "server stalled"]


def test_axes_are_logarithmic_where_the_values_reach_far(tmp_path: Path, kept: list[Figure]) -> None:
    for values, scale in (([1.0, 29.0], "linear"), ([1.0, 40.0], "log"), ([0.0, 40.0], "linear")):
        figure.draw([chart(Series("a", [1, 2], values), log=["y"])], "T", [tmp_path / "f.png"])
        assert kept[-1].axes[0].get_yscale() == scale
    figure.draw([chart(Series("a", [1, 2], [1.0, 2.0]), log_now=["x", "y"])], "T", [tmp_path / "f.png"])
    assert kept[-1].axes[0].get_xscale() == kept[-1].axes[0].get_yscale() == "log"


def test_title_and_legend_are_within_the_figure(tmp_path: Path, kept: list[Figure]) -> None:
    names = [f"{platform}, a name of some length" for platform in ("A800", "RTX4090", "RTX3090", "NVIDIA H200", "CPU")]
    made = chart(*(Series(name, [0, 1], [1, 2], colour=at) for at, name in enumerate(names)), note="A note. " * 40)
    figure.draw([made], "As Table IV of arXiv 2311.03687: Pre-training, the largest batch that fits " * 3,
                [tmp_path / "f.png"])  # fmt: skip
    (legend,) = kept[0].legends
    assert [text.get_text() for text in legend.get_texts()] == names
    kept[0].draw_without_rendering()
    for part in (legend, kept[0]._suptitle):  # type: ignore[attr-defined]
        box = part.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= kept[0].bbox.width
        assert 0 <= box.y0 < box.y1 <= kept[0].bbox.height


numbers = st.one_of(st.none(), st.floats(-1e9, 1e9), st.sampled_from([math.inf, math.nan, 0.0]))
KINDS = st.sampled_from(["line", "step", "points", "bars"])


@given(st.lists(st.tuples(KINDS, st.lists(numbers, max_size=5)), max_size=3), st.booleans(), st.booleans())
def test_any_numbers_are_drawn(rows: list[tuple[Any, list[float | None]]], stacked: bool, quantile: bool) -> None:
    """Nothing, gaps and what is not finite among them."""
    series = [Series(HOSTILE, list(range(len(y))), y, kind=kind, low=y, high=y) for kind, y in rows]
    names = ["n"] * max((len(y) for _, y in rows), default=0) if any(kind == "bars" for kind, _ in rows) else []
    made = chart(*series, stacked=stacked, quantile=quantile, categories=names, title=HOSTILE, log=["x", "y"])
    figure.draw([made], HOSTILE, [])
