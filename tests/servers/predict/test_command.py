"""What a prediction writes: its records hold the simulated times, and its report is the one that is read from them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen import rundir
from loadgen.cli import invoke
from loadgen.config import Config
from loadgen.load import shapes as load_shapes
from loadgen.load.load import Load
from loadgen.load.shapes import Shapes, TraceShapes
from loadgen.load.turns import Turns
from loadgen.report import build
from loadgen.rundir import records
from servers.predict import command as predict
from servers.simulator.build import emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import Outcome
from tests.loadgen.tables import manifest

TRACE = "trace"  # an option that a test replaces with its own file
LOADS: dict[str, dict[str, Any]] = {
    "a trace": {"trace": TRACE},
    "a trace by closed loop": {"trace": TRACE, "concurrency": "3"},
    "a part of a trace": {"trace": TRACE, "trace_from": 3.0, "trace_limit": 40},
    "lengths that vary": {"arrival": "poisson:20", "requests": 60, "output_tokens": "uniform:1:40"},
    "prompts that share": {"arrival": "poisson:20", "requests": 30, "prefix": "2:64"},
    "a closed loop that drains": {"concurrency": "4", "requests": 20, "output_tokens": 20, "drain_warmup": True},
    "a closed loop for a time": {"concurrency": "4", "duration": 3.0, "output_tokens": 20, "goodput": ("ttft:20",)},
    "phases": {"arrival": "steps:5@2,20@2", "output_tokens": 8},
    "sessions": {"sessions": 6, "turns": "uniform:1:4", "think_time": "0.1", "output_tokens": 12},
    "sessions that end early": {"sessions": 4, "turns": "5", "input_tokens": 300, "output_tokens": 80},
    "nothing that fits": {"requests": 3, "input_tokens": 3000, "output_tokens": 8},
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, maker = tmp_path_factory.mktemp("trace") / "trace.jsonl", Path("benchmarks/make_trace.py").resolve()
    made = f"--requests 90 --rate 6 --input-tokens 900 --output-tokens 40 --most-tokens 2500 --out {path}"
    subprocess.run([sys.executable, str(maker), *made.split()], check=True, capture_output=True, timeout=60)
    return path


def played(options: dict[str, Any], trace: Path) -> tuple[Config, list[Outcome], Load, Shapes]:
    """On a GPU whose cache holds 1024 tokens where the load is one of those that do not fit, or 6000."""
    options = {name: trace if value == TRACE else value for name, value in options.items()}
    config = Config(gpu="h200", **options)
    load, shapes = predict.drawn(config)
    small = options.get("input_tokens") in (300, 3000)
    hardware = Hardware(gpu="h200", kv_tokens=1024 if small else 6000, prefix_caching="on")
    emulated = emulate(hardware.setup("vllm", "7b", 4096))
    warm_up = predict.filling(config, load, shapes)
    return config, predict.play(emulated, load, predict.requests(load, shapes), warm_up), load, shapes


def as_records(outcomes: list[Outcome], shapes: Shapes, turns: Turns | None) -> Iterator[records.Record]:
    """One by one and token by token."""
    warm_up = sum(each.index < 0 for each in outcomes)
    for each in outcomes:
        sent_ns = round(each.sent_s * 1e9)
        times_us = [math.floor(at_s * 1e6) for at_s in each.times_s]
        record = records.Record(
            id=shapes.id(each.index) if each.index >= 0 else warm_up + each.index, scheduled_ns=sent_ns,
            asked_prompt_tokens=each.prompt, asked_tokens=each.output, outcome="ok", status=each.status,
            phase="measured" if each.index >= 0 else "warmup",
        )  # fmt: skip
        if turns is not None:
            session, turn = turns.place(each.index)
            record.session, record.turn = session, turn + 1
        if each.status is None:
            record.outcome, record.error, record.done_ns = "dropped", each.dropped, sent_ns
        else:
            record.sent_ns = sent_ns
            shared_tokens = shapes.shape(each.index).shared_tokens if each.index >= 0 else 0
            record.shared_tokens = shared_tokens or msgspec.UNSET
        if each.status not in (200, None):
            record.outcome, record.error = "http_error", f"status {each.status} (emulated)"
            record.done_ns = sent_ns
        if times_us:
            record.headers_ns = record.first_token_ns = times_us[0] * 1000
            record.last_token_ns = record.done_ns = times_us[-1] * 1000
            record.prompt_tokens, record.output_tokens = each.prompt, len(times_us)
            record.cached_tokens, record.events = each.cached_tokens or None, len(times_us)
            record.itl_us = [later - earlier for earlier, later in pairwise(times_us)]
        record.first_tokens = 1 if len(times_us) > 1 else None
        yield record


def assert_same(one: records.RequestTable, other: records.RequestTable) -> None:
    for name in (*records.COLUMNS, "itl_us", "itl_offsets"):
        column = getattr(one, name)
        assert column.dtype == getattr(other, name).dtype, name
        np.testing.assert_array_equal(column, getattr(other, name), name)
    rest = ("errors", "warmup_error", "retried")
    assert [getattr(one, name) for name in rest] == [getattr(other, name) for name in rest]


@pytest.mark.parametrize("name", LOADS)
def test_what_is_written_is_what_would_be_read(
    name: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "COUNTED_TOGETHER", 7)
    monkeypatch.setattr(records, "WRITTEN_TOGETHER", 5)
    config, outcomes, load, shapes = played(LOADS[name], trace)
    expected = list(as_records(outcomes, shapes, load.turns()))
    assert {record.outcome for record in expected} == {
        "sessions that end early": {"ok", "http_error", "dropped"}, "nothing that fits": {"http_error"},
    }.get(name, {"ok"})  # fmt: skip
    run = manifest(
        config=config.as_dict(), arrival=load.when, phases=tuple(load.phases()), emulated=True,
        hands_over=outcomes[0].index < 0,
    )  # fmt: skip
    written = predict.write(tmp_path, run, outcomes, shapes, load.turns())
    assert not outcomes  # let go of
    lines = (tmp_path / "requests.jsonl").read_bytes().splitlines()
    assert lines[1:-1] == [msgspec.json.encode(record) for record in expected]
    table, facts = records.read(tmp_path)
    assert_same(written[0], table)
    assert written[1] == facts and facts[0].events == sum(
        record.events for record in expected if record.phase == "measured"
    )
    assert build.from_directory(tmp_path, written=written)[0] == build.from_directory(tmp_path)[0]


def test_a_report_that_is_made_again_is_the_same(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first is made without reading what was written."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(records, "read", lambda directory: pytest.fail("it is read again"))
        assert invoke(["predict", "--gpu", "h200", "--trace", str(trace), "--out", str(run), "--figures"]) in (0, 4)
    first = capsys.readouterr()
    files = ("report.json", "report.md", "report.html", "cdf.svg")
    before = [(run / name).read_bytes() for name in files]
    for name in files:
        (run / name).unlink()
    assert invoke(["report", str(run), "--figures"]) in (0, 4)
    again = capsys.readouterr()
    assert [(run / name).read_bytes() for name in files] == before
    assert again.out.splitlines()[-1] == first.out.splitlines()[-1]
    assert json.loads(before[0])["requests"]["ok"] == 90


@pytest.mark.parametrize(
    ("times_s", "message"),
    [((1.0, 5000.0), "tokens of a reply come over 4295 s apart"), ((40 * 86400.0,), "more than 30 days from")],
)
def test_times_that_no_record_holds_are_not_written(times_s: tuple[float, ...], message: str, tmp_path: Path) -> None:
    _, shapes = predict.drawn(Config(gpu="h200", requests=1))
    with pytest.raises(records.RecordsError, match=message):
        predict.write(tmp_path, manifest(), [Outcome(0, 10, len(times_s), 0.5, array("d", times_s))], shapes, None)
    assert not list(tmp_path.iterdir())
    rundir.create(tmp_path)  # may be used again


def test_what_cannot_be_recorded_leaves_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"timestamp": days * 86_400_000, "input_length": 9, "output_length": 2, "hash_ids": [0]} for days in (0, 31)
    ]
    (tmp_path / "far.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "runs" / "far"
    assert invoke(["predict", "--gpu", "h200", "--trace", str(tmp_path / "far.jsonl"), "--out", str(out)]) == 2
    assert "more than 30 days from the run's start" in capsys.readouterr().err
    assert not out.parent.exists()


@pytest.mark.parametrize(("scheduler", "given"), [("tgi@3", 2048), ("tgi@1", 1500)])
def test_long_replies_are_as_long_as_tgi_makes_them(
    scheduler: str, given: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "--backend", "tgi", "--gpu", "h200", "--scheduler", scheduler, "--requests", "2"]
    assert invoke([*words, "--input-tokens", "64", "--output-tokens", "1500", "--out", str(tmp_path / "run")]) == 0
    table = records.read(tmp_path / "run")[0]
    assert table.output_tokens.tolist() == table.events.tolist() == [given] * 2
    assert table.asked_tokens.tolist() == [1500] * 2
    assert ("whole pieces of 1024" in capsys.readouterr().err) == (given > 1500)


def test_a_trace_is_drawn_as_it_is_sent(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all at once, which would take more memory than the trace; and in parts as in one."""
    load, shapes = predict.drawn(Config(gpu="h200", trace=trace))
    assert isinstance(shapes, TraceShapes)
    whole = list(shapes.in_common())
    monkeypatch.setattr(load_shapes, "DRAWN_TOGETHER", 7)
    assert list(shapes.in_common()) == whole and len(whole) == len(shapes) == 90
    sent = predict.requests(load, shapes)
    assert not isinstance(sent, list)
    longest = predict.longest_request_tokens(load, shapes, sent)
    arrivals = list(sent)  # still all of them
    assert [each[1:4] for each in arrivals] == [shape[:3] for shape in whole]
    assert [round(each.at_s * 1e9) for each in arrivals] == load.due_ns().tolist()
    assert longest == max(each.prompt + each.output for each in arrivals)


def test_a_closed_loop_begins_with_the_slots_of_its_warm_up_as_a_real_one(tmp_path: Path) -> None:
    """Two requests a slot, beside a long loop: handed over it has that one's throughput and waits, drained neither."""
    words = ["predict", "--gpu", "h200", "--concurrency", "32", "--warmup", "32", "--output-tokens", "uniform:32:224"]
    tables = {}
    for name, more in {
        "handed": ["--requests", "64"], "drained": ["--requests", "64", "--drain-warmup"],
        "long": ["--requests", "1600"],
    }.items():  # fmt: skip
        assert invoke([*words, *more, "--out", str(tmp_path / name)]) in (0, 4)
        tables[name] = records.read(tmp_path / name)[0]
    handed, drained = tables["handed"], tables["drained"]
    assert rundir.read_manifest(tmp_path / "handed").hands_over and len(handed.measured()) == 64 == len(drained)
    assert not rundir.read_manifest(tmp_path / "drained").hands_over
    warm_up = handed.rows(0, 32)
    measured = handed.measured()
    assert measured.sent_ns.min() == 0 and warm_up.id.tolist() == list(range(32))
    assert (warm_up.sent_ns < 0).all() and (warm_up.first_token_ns <= 0).all()  # all had begun
    assert ((warm_up.done_ns <= 0) == (warm_up.done_ns == warm_up.done_ns.min())).all()  # and the first had ended
    starts, ends = np.sort(handed.sent_ns), np.sort(handed.done_ns)
    assert max(int((starts <= at).sum() - (ends <= at).sum()) for at in starts) == 32
    found = {name: build.from_directory(tmp_path / name)[0] for name in tables}
    long, short = found["long"], found["handed"]
    assert short.metrics["ttft_ms"].p90 < 2 * long.metrics["ttft_ms"].p90 < found["drained"].metrics["ttft_ms"].p90
    assert short.throughput.output_tokens_per_s == pytest.approx(long.throughput.output_tokens_per_s, rel=0.1)
    assert found["drained"].throughput.output_tokens_per_s < 0.9 * long.throughput.output_tokens_per_s
