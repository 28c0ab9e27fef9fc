"""The live view beside a run: quantiles, time left and rates against known answers; what stands on the screen."""

from __future__ import annotations

import os
import pty
import select
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.live_view import Picture
from loadgen.monitor.frame import Frame, lines
from loadgen.monitor.messages import Expected, Live
from loadgen.monitor.totals import CountedRecord, Totals
from loadgen.monitor.view import Course, Recent, quantiles
from tests.loadgen.monitor.directories import write_manifest

S = 1_000_000_000
NONE = {"p50": None, "p99": None}


def ended(done_s: float, ttft_ms: float, **changes: object) -> CountedRecord:
    sent = round(done_s * S) - 2 * S
    first = sent + round(ttft_ms * 1e6)
    values = {"sent_ns": sent, "first_token_ns": first, "last_token_ns": first, "done_ns": sent + 2 * S}
    more = {"id": 1, "phase": "measured", "outcome": "ok", "output_tokens": 20, "events": 10}
    return CountedRecord(**{**values, **more, **changes})  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_quantiles_are_those_of_the_report(values: list[float]) -> None:
    expected = {"p50": np.percentile(values, 50), "p99": np.percentile(values, 99)}
    assert quantiles(values) == pytest.approx(expected)


def test_the_last_ten_seconds_and_no_others() -> None:
    recent = Recent()
    assert recent.quantiles(0) == NONE
    for second in range(60):
        recent.add(ended(second, ttft_ms=100 + second))
    for other in ({"outcome": "timeout"}, {"phase": "warmup"}, {"first_token_ns": None}, {"sent_ns": None}):
        recent.add(ended(59, 5000, **other))
    assert recent.quantiles(0)["p50"] == 154  # 49 to 59: what is older is not kept, though nobody has asked
    assert recent.quantiles(59 * S) == pytest.approx({"p50": 154.5, "p99": 158.91})  # 50 to 59
    recent.add(ended(62.5, 900))
    assert recent.quantiles(69.5 * S) == {"p50": 900, "p99": 900}  # the 60th second is over
    assert recent.quantiles(80 * S) == NONE


def course(tmp_path: Path, **expected: float) -> Course:
    return Course(Expected(**expected), write_manifest(tmp_path))  # type: ignore[arg-type]


def frame(course: Course, totals: Totals | None = None, **live: object) -> Frame:
    return course.frame(Live(**{"planned": None, "in_flight": 0, **live}), totals or Totals(), NONE, None)  # type: ignore[arg-type]


def test_rates_are_of_the_last_ten_seconds_and_their_history_of_each_picture(tmp_path: Path) -> None:
    totals, one = Totals(), course(tmp_path)
    assert frame(one, totals, events=500, elapsed_s=1.0).tokens_per_s == 500
    totals.add(ended(1.5, 100))  # two tokens an event
    shown = frame(one, totals, events=900, elapsed_s=3.0, done=7, in_flight=3, cpu_ratio=0.5, loop_lag_ms=2.0)
    assert (shown.tokens_per_s, shown.tokens_history) == (1300 / 3, (500, 400))
    assert (shown.sent, shown.done, shown.in_flight, shown.cpu_ratio, shown.loop_lag_ms) == (10, 7, 3, 0.5, 2.0)
    assert (shown.server, shown.load) == ("vllm m", "burst") and shown.emulated
    assert frame(one, totals, events=901, elapsed_s=3.01).tokens_per_s == 1300 / 3  # too soon after the one before
    for second in range(4, 14):
        latest = frame(one, totals, events=901 + 50 * (second - 3), elapsed_s=float(second))
    assert latest.tokens_per_s == pytest.approx(100, rel=0.01)


def test_a_burst_is_as_far_as_its_requests_are(tmp_path: Path) -> None:
    one = course(tmp_path, last_due_s=0.0, reply_tokens=100)
    shown = frame(one, planned=10, in_flight=10, events=250, events_in_flight=250, elapsed_s=5.0)
    assert shown.done_ratio == pytest.approx(0.25) and shown.left_s == pytest.approx(15.0)
    shown = frame(one, planned=10, done=10, elapsed_s=20.0)
    assert (shown.done_ratio, shown.left_s) == (1.0, 0.0)
    assert frame(course(tmp_path), planned=10, in_flight=10, events_in_flight=3).left_s is None  # nobody knows of what


def test_a_rate_ends_with_its_last_request_and_a_reply(tmp_path: Path) -> None:
    totals = Totals()
    assert frame(course(tmp_path, last_due_s=60.0), totals, planned=60, elapsed_s=20.0).left_s == 40
    totals.add(ended(9, 100))
    one = course(tmp_path, last_due_s=60.0)
    assert frame(one, totals, planned=60, elapsed_s=20.0).left_s == 42
    shown = frame(one, totals, planned=60, done=30, elapsed_s=61.0)
    assert shown.left_s == pytest.approx(61.0)
    assert frame(one, totals, planned=60, done=30, elapsed_s=62.0, stopping=True).left_s is None


def test_a_closed_loop_ends_with_its_time(tmp_path: Path) -> None:
    one = course(tmp_path, duration_s=30.0)
    shown = frame(one, elapsed_s=12.0, done=99)
    assert (shown.done_ratio, shown.left_s) == (0.4, 18)
    assert frame(one, elapsed_s=31.0).done_ratio == 1.0


def test_failures_by_outcome_and_those_without_a_record_yet(tmp_path: Path) -> None:
    totals, one = Totals(), course(tmp_path)
    assert frame(one, totals, failed=3).failed == {"in all": 3}
    for outcome in ("timeout", "timeout", "http_error", "ok"):
        totals.add(ended(1, 1, outcome=outcome))
    assert frame(one, totals, failed=5).failed == {"timeout": 2, "http_error": 1, "others": 2}


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


class Screen:
    """What a terminal of 80 x 24 shows of what is written to it."""

    def __init__(self, fd: int) -> None:
        self.screen = pyte.Screen(80, 24)
        self._fd, self._stream = fd, pyte.ByteStream(self.screen)

    def after(self, picture: Picture, frame: Frame) -> list[str]:
        picture.show(partial(lines, frame))
        return self.read(f"{frame.server}, burst")

    def read(self, awaited: str = "") -> list[str]:
        """Its lines, once the line `awaited` is there and nothing more comes."""
        deadline = time.monotonic() + 20
        while select.select([self._fd], [], [], 0.1)[0] or awaited not in self._lines:
            assert time.monotonic() < deadline, self._lines
            if select.select([self._fd], [], [], 0.1)[0]:
                self._stream.feed(os.read(self._fd, 1 << 16))
        return self._lines

    @property
    def _lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]


def test_a_picture_replaces_the_one_before_and_the_last_goes(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = ends
    os.write(theirs, b"before\n")
    screen, picture = Screen(ours), Picture(theirs)
    long = screen.after(picture, Frame(server="long", load="burst", emulated=False, failed={"timeout": 1}, done=1))
    assert long[:2] == ["before", "long, burst"] and "1 timeout" in long[4]
    os.write(theirs, b"^C")  # a terminal's echo of it
    short = screen.after(picture, Frame(server="short", load="burst", emulated=False, done=2))
    assert short[:2] == ["before", "short, burst"] and len(short) == len(long) - 1 and "^C" not in "".join(short)
    picture.end(erase=True)
    assert screen.read("before") == ["before"] and screen.screen.cursor.y == 1 and not screen.screen.cursor.hidden


def test_a_killed_run_leaves_the_picture_and_what_a_shell_wrote_below_it(ends: tuple[int, int]) -> None:
    ours, theirs = ends
    screen, picture = Screen(ours), Picture(theirs)
    shown = screen.after(picture, Frame(server="one", load="burst", emulated=False))
    os.write(theirs, b"$ ")
    picture.end(erase=False)
    assert screen.read("$") == [*shown, "$"]


def test_a_picture_after_a_pause_begins_below_what_was_written_meanwhile(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.live_view.FORGOTTEN_S", 0.2)
    ours, theirs = ends
    screen, picture = Screen(ours), Picture(theirs)
    screen.after(picture, Frame(server="one", load="burst", emulated=False))
    os.write(theirs, b"[1]+  Stopped\n")
    time.sleep(0.3)
    text = screen.after(picture, Frame(server="two", load="burst", emulated=False))
    assert "[1]+  Stopped" in text and text.index("one, burst") < text.index("[1]+  Stopped") < text.index("two, burst")
    picture.end(erase=True)


def test_a_terminal_that_takes_nothing_holds_nobody_up(ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.live_view.END_TIMEOUT_S", 0.1)
    _, theirs = ends
    picture = Picture(theirs)
    for number in range(200):  # nobody reads: its buffer of some kilobytes is full soon
        picture.show(partial(lines, Frame(server=f"{number}" * 60, load="burst", emulated=True)))
        time.sleep(0.001)
    picture.end(erase=True)


def test_a_terminal_that_is_gone_is_no_error() -> None:
    ours, theirs = pty.openpty()
    picture = Picture(theirs)
    os.close(ours)
    picture.show(partial(lines, Frame(server="x", load="burst", emulated=False)))
    time.sleep(0.05)
    picture.end(erase=True)
    os.close(theirs)


def test_means_of_what_ended_ok() -> None:
    totals = Totals()
    assert (totals.tokens_per_event, totals.events_per_reply, totals.reply_s) == (1.0, None, None)
    for done_s, events in ((3, 10), (4, 30)):
        totals.add(ended(done_s, 5, events=events, output_tokens=2 * events))
    totals.add(ended(9, 5, outcome="timeout"))
    assert totals.tokens_per_event == 2 and totals.events_per_reply == statistics.mean((10, 30)) and totals.reply_s == 2
