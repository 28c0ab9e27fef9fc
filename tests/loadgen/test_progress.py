"""The quiet lines of a run without a live view."""

from __future__ import annotations

import pytest

from loadgen import progress
from loadgen.client.engine import LiveCounters
from loadgen.progress import QUIET_EVERY_S, ProgressLine


def snapshot(elapsed_s: float, **changes: object) -> LiveCounters:
    values = {
        "planned": 600,
        "done": 0,
        "failed": 0,
        "in_flight": 0,
        "events": 0,
        "ttft_ms": [],
        "elapsed_s": elapsed_s,
    }
    return LiveCounters(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_line_every_ten_seconds_where_nothing_else_shows(
    drawn: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    line = ProgressLine()
    for second in range(1, 36):
        clock[0] = 100.0 + second
        other = snapshot(second, planned=400, done=second, in_flight=3, events=50 * second)
        line([snapshot(second, done=second, failed=1, events=100 * second, ttft_ms=[10.0, 30.0]), other], drawn)
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\r" not in said
    tail = "failed, 3 in flight, 150 tokens/s, TTFT p50 20 ms"
    expected = [f"{at:4} s  {2 * at}/1000 done, 1 {tail}" for at in (10, 20, 30)]
    assert QUIET_EVERY_S == 10 and said.splitlines() == ([] if drawn else expected)
