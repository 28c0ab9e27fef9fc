"""Several measurements in one directory: which are left, how long they take, and what is put aside."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from loadgen.rundir import RunError
from loadgen.rundir.series import MeasurementSeries, duration, put_aside


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be set."""
    at = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    return at


def test_a_series_that_goes_on_does_the_rest_in_order() -> None:
    series = MeasurementSeries("run", ["a", "b", "c", "d"], done=["b"])
    assert series.waiting == ["a", "c", "d"] and series.done_ratio == 0.25
    assert series.resumed == "1 of 4 runs are done; going on with the rest"
    series.begin("a")
    assert series.place("a") == "run 2 of 4"
    series.end("a", again=True)  # its server died
    series.begin("c")
    series.end("c")
    assert series.place("c") == "run 2 of 4" and series.waiting == ["a", "d"]
    left = "2 of 4 runs are left for `loadgen sweep --resume runs/s`"
    assert series.remainder("loadgen sweep", Path("runs/s")) == left


def test_the_time_left_is_of_what_took_time(now: list[float]) -> None:
    series = MeasurementSeries("cell", ["a", "b", "c", "d", "e"])
    series.instant.add("e")
    series.begin("a")
    assert series.left_s is None and series.left == ""
    now[0] = 10.0
    series.progress("a", 0.25)
    assert series.left_s == pytest.approx(30 + 3 * 40) and series.left == "; about 2 min left"
    assert series.done_ratio == pytest.approx(0.05)
    now[0] = 20.0
    series.end("a")
    series.end("e")  # never begun: it counts no time
    assert series.left_s == pytest.approx(3 * 20)
    series.begin("b")
    series.begin("c")  # beside it
    now[0] = 25.0
    series.progress("b", 0.5)
    assert series.left_s == pytest.approx(max(5, 15) + 20 / 2)
    assert [series.place(name) for name in "bc"] == ["cell 3 of 5", "cell 4 of 5"]


def test_what_was_cut_short_is_kept_under_the_first_free_number(tmp_path: Path) -> None:
    run = tmp_path / "rate-5"
    put_aside(run)  # it is not there
    for number in (1, 2):
        run.mkdir()
        (run / "requests.jsonl").write_text(f"{number}\n")
        put_aside(run)
        assert not run.exists()
        assert (tmp_path / "unfinished" / f"rate-5.{number}" / "requests.jsonl").read_text() == f"{number}\n"
    run.mkdir()
    put_aside(run)
    assert run.is_dir()  # nothing was in it
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "unfinished").touch()
    (tmp_path / "other" / "1").touch()
    with pytest.raises(RunError, match=r"cannot move .*other/1 to "):
        put_aside(tmp_path / "other" / "1")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5940, "99 min"), (7800, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
