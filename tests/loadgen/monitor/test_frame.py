"""A picture of a run: its size at every width, its numbers whole, and nothing in it that a terminal obeys."""

from __future__ import annotations

import itertools
import re

import pytest

from backends.gpus import GpuSample
from loadgen.live_view import MAX_LINES, clock, sparkline
from loadgen.monitor.frame import Frame, lines
from loadgen.monitor.server_view import ServerSample
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.terminal import styled

HOSTILE = "\x1b[2J\x1b]0;owned\x07 [red]x[/red] [link=http://z]y[/link] \u202egnp.exe 模型\r\n"
METRICS = {"running": 987_654.0, "waiting": 123_456.0, "kv_cache_usage_ratio": 0.873, "preemptions": 55_123.0}
GPUS = [
    GpuSample(
        index=index, utilization_ratio=0.5 + index / 10, memory_used_bytes=70 << 30, power_w=650.0, energy_mj=None
    )
    for index in range(4)
]


def full(**changes: object) -> Frame:
    """With every field that there is, and large numbers in each."""
    values: dict[str, object] = {
        "server": "vllm meta-llama/Llama-3.1-405B-Instruct-FP8", "load": "poisson:1234.5", "emulated": True,
        "elapsed_s": 3725, "left_s": 45.2, "done_ratio": 0.4242,
        "planned": 9_876_543, "sent": 8_765_432, "done": 7_654_321,
        "in_flight": 1_111_111, "failed": {name: 10_000 + at for at, name in enumerate(OUTCOMES) if name != "ok"},
        "tokens_per_s": 1_234_567.8, "tokens_history": [float(at) for at in range(60)],
        "ttft_ms": {"p50": 12_345.6, "p99": 0.456}, "ttft_history": {"p50": [1.0, None, 2.0] * 20, "p99": []},
        "cpu_ratio": 0.974, "loop_lag_ms": 12.34,
        "sample": ServerSample(at_ns=0, took_ms=1, metrics=METRICS, gpus=GPUS),
    }  # fmt: skip
    return Frame(**{**values, **changes})  # type: ignore[arg-type]


def shown(frame: Frame, width: int) -> str:
    return "\n".join(line.plain for line in lines(frame, width))


@pytest.mark.parametrize("width", [60, 80, 160])
def test_every_number_is_there_and_whole(width: int) -> None:
    drawn = lines(full(), width)
    assert len(drawn) <= MAX_LINES and max(line.cell_len for line in drawn) <= width
    text = " ".join(line.plain for line in drawn)
    for number in (
        "8,765,432 sent", "7,654,321 of 9,876,543 done", "1,111,111 in flight", "42 %  1:02:05 gone", "1,234,568",
        "12,346 ms", "0.46 ms", "CPU 97 % of a core", "loop lag 12.3 ms", "987,654 running", "123,456 waiting",
        "KV cache 87 % full", "55,123 preemptions", "65 % busy", "280.0 GiB used", "2,600 W", "EMULATED vllm",
        "poisson:1234.5",
    ):  # fmt: skip
        assert number in text, number
    ordered = sorted(full().failed.items(), key=lambda each: -each[1])
    for name, count in [*ordered[:3], ("others", sum(count for _, count in ordered[3:]))]:
        assert f"{count:,} {name}" in text


@pytest.mark.parametrize("width", range(1, 60))
def test_a_narrow_terminal_has_fewer_fields_and_no_part_of_a_number(width: int) -> None:
    whole = set(re.findall(r"[\d.,:]*\d", shown(full(server=""), 200)))
    drawn = lines(full(server=""), width)
    assert len(drawn) <= MAX_LINES and max(line.cell_len for line in drawn) <= width
    assert set(re.findall(r"[\d.,:]*\d", "\n".join(line.plain for line in drawn))) <= whole


@pytest.mark.parametrize("height", [0, 1, 5, 14, 40])
def test_a_low_terminal_has_the_first_lines(height: int) -> None:
    drawn = lines(full(), 80, height)
    assert len(drawn) == min(height, len(lines(full(), 80)))


def test_what_is_not_known_is_left_out() -> None:
    text = shown(Frame(server="openai m", load="burst", emulated=False, ttft_ms={"p50": None, "p99": None}), 80)
    assert "EMULATED" not in text and "left" not in text and "server" not in text and "GPUs" not in text
    assert "0 sent, 0 done, 0 in flight, 0 failed" in text and "ttft p99  -" in text


def test_a_server_that_is_silent_is_shown_so() -> None:
    assert "silent" not in shown(full(sample_age_s=1.0), 80)
    assert "server    silent for 12 s, 987,654 running" in shown(full(sample_age_s=12.3), 80)
    reserved = ServerSample(at_ns=0, took_ms=1, metrics={"kv_reserved_tokens": 123_456.0})
    assert "123,456 KV tokens reserved" in shown(full(sample=reserved), 60)


def test_a_run_that_is_stopped_says_so() -> None:
    assert shown(full(stopping=True), 80).startswith("stopping, waits for replies  EMULATED vllm")


@pytest.mark.parametrize("width", [40, 60, 160])
def test_a_name_from_a_server_is_plain_text(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    drawn = lines(full(server=HOSTILE), width)
    assert max(line.cell_len for line in drawn) <= width  # of wide characters too
    out = "".join(styled(drawn))
    assert set(re.findall(r"\x1b(?!\[[\d;]*m)", out)) == set()  # colours alone
    assert not any(not char.isprintable() and char != "\x1b" for char in out)
    assert "\\x1b[2J\\x1b]0;owned" in out
    assert width < 160 or "[red]x[/red] [link=http://z]y[/link] \\u202egnp.exe 模型" in out


@pytest.mark.parametrize(("no_color", "term"), [*itertools.product(("", "1"), ("xterm-256color", "dumb"))])
def test_colours_are_what_the_terminal_and_its_user_want(
    no_color: str, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    out = "".join(styled(lines(full(), 80)))
    codes = {code for group in re.findall(r"\x1b\[([\d;]*)m", out) for code in group.split(";")}
    assert bool(codes) is (term != "dumb")
    assert any(len(code) > 1 for code in codes) is (term != "dumb" and not no_color)  # 1, 2: bold, dim; 3x: colours


def test_sparklines_and_clocks() -> None:
    assert sparkline([0.0, 1.0, None, 3.5, 7.0]) == "▁▂ ▅█"
    assert sparkline([None, 0.0]) == " ▁" and sparkline([]) == ""
    assert [clock(seconds) for seconds in (0.9, 59.9, 61, 3599, 3661)] == ["0:00", "0:59", "1:01", "59:59", "1:01:01"]
