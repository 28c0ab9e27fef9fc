"""The report: its schema key by key, its numbers by hand, its escapes, and what an emulated run says everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from loadgen import cli, rundir
from loadgen.document import files, markdown
from loadgen.document.content import number
from loadgen.document.files import ReportError
from loadgen.monitor.server_view import GpuPeak, GpuStats, SamplesHeader, ServerSample, ServerStats, ServerView
from loadgen.report import build
from loadgen.report import text as texts
from loadgen.report.metrics import CONVENTIONS, METRICS, Summary
from loadgen.report.schema import Burst, Connecting, ErrorCount, Goodput, Report, Requests, Throughput, TokenCounts
from loadgen.rundir import records
from loadgen.rundir.emulation import Emulation, HeldOut
from loadgen.rundir.launch_facts import LaunchFacts
from loadgen.rundir.records import table
from tests.loadgen.report.test_metrics import HAND, WARMUP
from tests.loadgen.tables import facts, failure, manifest, request, write_run

CEILING = rundir.Ceiling(events_per_s_per_core=140.0, cpu_us_per_event=6.0, requests=1000, output_tokens=128)
HOSTILE = "\x1b[31mred\x1b[0m\r\n| x | `y` <script>alert(1)</script> ![z](http://z) \u202egnp.exe $a$"


def hand_report(**options: Any) -> Report:
    planned = manifest(requests_planned=4, ceiling=CEILING)
    return build.build(planned, table([WARMUP, *HAND]), [facts(events=7, cpu_s=0.007)], **options)


def test_the_schema_key_by_key() -> None:
    built: dict[str, Any] = msgspec.to_builtins(hand_report(slos={"ttft": 200}))
    assert list(built) == [
        "schema",
        "version",
        "run_id",
        "backend",
        "model",
        "server_version",
        "arrival",
        "emulated",
        "convention",
        "convention_differs",
        "offered_requests_per_s",
        "requests",
        "tokens",
        "duration_s",
        "throughput",
        "metrics",
        "goodput",
        "burst",
        "connect_ms",
        "retried_connections",
        "client",
        "ceiling",
        "emulation",
        "launch",
        "server",
        "gpus",
        "errors",
        "asked_output_tokens",  # these requests asked for 4, 2 and 1
        "economics",
        "verdict",
    ]
    assert built["schema"] == "loadgen.report/1"
    assert list(built["metrics"]) == [
        "ttft_ms",
        "tpot_ms",
        "itl_ms",
        "e2el_ms",
        "send_lag_ms",
        "ttft_from_schedule_ms",
        "e2el_from_schedule_ms",
    ]
    for statistics in built["metrics"].values():
        assert list(statistics) == ["n", "mean", "std", "min", "max", "p50", "p90", "p95", "p99", "p99_9"]
    assert list(built["verdict"]) == ["valid", "findings"]
    for finding in built["verdict"]["findings"]:
        assert list(finding) == ["code", "severity", "message", "advice"]


def test_numbers_by_hand() -> None:
    built = hand_report(slos={"ttft": 200, "e2el": 350})
    assert built.requests == Requests(planned=4, ok=3, failed=1, by_outcome={"ok": 3, "http_error": 1})
    assert built.tokens == TokenCounts(prompt=30, output=7)
    assert built.duration_s == 0.505
    assert built.throughput == Throughput(
        requests_per_s=3 / 0.505, output_tokens_per_s=7 / 0.505, total_tokens_per_s=37 / 0.505
    )
    assert built.metrics["e2el_ms"].mean == (401 + 300 + 301) / 3
    assert built.metrics["itl_ms"].n == 4
    assert built.goodput == Goodput(slos_ms={"ttft": 200, "e2el": 350}, good=1, request_goodput=1 / 0.505)
    assert built.burst == Burst(requests=4, send_spread_ms=5.0)
    assert built.errors == [ErrorCount(count=1, outcome="http_error", message="no reason given")]
    assert built.ceiling is not None
    # 7 events within 300 ms of each other: first at 101, last at 401 ms
    assert built.ceiling.peak_events_per_s == pytest.approx(7 / 0.3)
    assert built.ceiling.headroom_ratio == pytest.approx(140 * 0.3 / 7)
    assert built.verdict.valid is False  # one of four failed


def test_the_rate_that_was_drawn_is_shown() -> None:
    due = table([request(at, scheduled=50 * at) for at in range(11)])
    drawn = build.build(manifest(arrival="poisson:16"), due, [])
    assert drawn.offered_requests_per_s == pytest.approx(20.0)
    assert "Offered: 20" in texts.render(drawn)
    for arrival in ("burst", "closed:4"):
        assert build.build(manifest(arrival=arrival), due, []).offered_requests_per_s is None
    for at_once in range(3):
        tied = table([request(at) for at in range(at_once)])
        assert build.build(manifest(arrival="poisson:1e9"), tied, []).offered_requests_per_s is None


def test_client_facts_of_several_processes() -> None:
    clients = [
        facts(events=100, cpu_s=0.5, peak_rss_bytes=40_000_000, loop_lag_p99_ms=3.0),
        facts(events=300, cpu_s=1.5, cpu_peak_ratio=0.7, connect_max_ms=9.0, receive_lag_p99_ms=0.4),
    ]
    built = build.build(manifest(ceiling=CEILING), table(HAND), clients)
    assert msgspec.to_builtins(built.client) == {
        "processes": 2,
        "cpu_us_per_event": 5000.0,  # 2 s over 400 events
        "cpu_peak_ratio": 0.7,
        "peak_rss_mb": 90.0,
        "loop_lag_p50_ms": 0.1,
        "loop_lag_p99_ms": 3.0,
        "loop_lag_max_ms": 3.0,
        "receive_lag_p50_ms": None,
        "receive_lag_p99_ms": 0.4,
        "receive_lag_max_ms": None,
    }
    assert built.connect_ms == Connecting(n=200, p50=0.2, max=9.0)
    assert built.ceiling is not None
    assert built.ceiling.headroom_ratio == pytest.approx(2 * 140 * 0.3 / 7)


SEEN = ServerView(
    server=ServerStats(
        samples=4, covered=True, running_max=32, waiting_max=4, kv_cache_usage_max_ratio=0.875, preemptions=0,
        prefix_cache_hits=0, prefix_cache_queries=30, prompt_tokens=30, generation_tokens=7, ttft_mean_ms=198.0,
    ),
    gpus=GpuStats(
        each=[GpuPeak(index=at, name="H200", memory_peak_bytes=2 ** (30 + at)) for at in range(2)],
        memory_peak_bytes=3 * 2**30, power_mean_w=512.5, energy_j=1400.0, energy_from="counter",
    ),
)  # fmt: skip


def test_the_servers_own_view() -> None:
    built = hand_report(seen=SEEN)
    assert built.gpus is not None
    plain: dict[str, Any] = msgspec.to_builtins(built)
    assert list(plain["server"]) == [
        "samples",
        "failed",
        "covered",
        "problem",
        "failure",
        "running_max",
        "waiting_max",
        "paused_max",
        "kv_cache_usage_max_ratio",
        "kv_reserved_max_tokens",
        "preemptions",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "generation_tokens",
        "ttft_mean_ms",
        "itl_mean_ms",
        "e2el_mean_ms",
    ]
    assert list(plain["gpus"]) == [
        "each",
        "memory_peak_bytes",
        "power_mean_w",
        "energy_j",
        "energy_from",
        "j_per_output_token",
    ]
    assert built.gpus.j_per_output_token == 200.0  # 7 output tokens of the three that ended ok
    client_ms = number(built.metrics["ttft_ms"].mean)
    for text in (texts.render(built), markdown.render(texts.summary(built))):
        assert (
            "Server: at most 32 running, at most 4 waiting, KV cache at most 87.50 % full, 0 preemptions, 0 prompt "
            "tokens from its prefix cache." in text
        )
        assert f"By the server's own clock, mean ms (its /metrics): ttft 198.0 (client {client_ms}, between " in text
        assert (
            "GPUs (2): at most 3.00 GiB of memory used, 512.5 W on average, 1,400 J, 200.0 J an output token." in text
        )
    assert json.loads(msgspec.json.encode(built)) == plain == json.loads(files.json_line(built))


def test_a_view_of_reservations() -> None:
    """As LightLLM gives it: no use of the KV cache and no preemptions, but what may be needed, and who waits again."""
    server = ServerStats(samples=4, covered=True, waiting_max=4, kv_reserved_max_tokens=9000, paused_max=2)
    shown = texts.render(hand_report(seen=ServerView(server=server)))
    assert "Server: at most 4 waiting, at most 9,000 tokens of KV cache reserved, at most 2 paused." in shown


def test_what_the_server_does_not_show_is_not_shown() -> None:
    nothing = GpuStats(each=[], memory_peak_bytes=None, power_mean_w=None, energy_j=None, energy_from=None)
    for seen in (None, ServerView(), ServerView(server=ServerStats(problem="it has none"), gpus=nothing)):
        built = hand_report(seen=seen)
        assert (built.server is None) == (seen is None or seen.server is None)
        assert "Server:" not in texts.render(built) and "GPUs" not in texts.render(built)
    some = texts.render(hand_report(seen=ServerView(server=ServerStats(running_max=3))))
    assert "Server: at most 3 running.\n" in some
    energetic = ServerView(gpus=msgspec.structs.replace(nothing, energy_j=5.0))
    without_tokens = build.build(manifest(), table([]), [facts()], seen=energetic)
    assert without_tokens.gpus is not None and without_tokens.gpus.j_per_output_token is None


def test_the_servers_view_comes_from_the_run_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [WARMUP, *HAND], manifest(), facts())
    assert build.from_directory(run)[0].server is None
    last_ms = max(record.done_ns or 0 for record in HAND) / 1e6
    lines = [msgspec.json.encode(SamplesHeader(run_id=manifest().run_id, series=["prompt_tokens"], gpus=[]))]
    for at_ms, prompt_tokens in ((-500, 0), (-9, 100), (1, 120), (last_ms + 1, 130), (last_ms + 900, 500)):
        seen = ServerSample(at_ns=round(at_ms * 1e6), took_ms=5, metrics={"prompt_tokens": prompt_tokens})
        lines.append(msgspec.json.encode(seen))
    (run / "server.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    built, rows = build.from_directory(run)
    assert built.server is not None
    assert (built.server.prompt_tokens, built.server.covered, built.server.samples) == (30, True, 3)
    build.write(run, built, rows)
    assert msgspec.json.decode((run / "report.json").read_bytes(), type=Report) == built


def test_the_servers_view_outlives_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was kept without server.jsonl still has what was computed from it."""
    preempted = msgspec.structs.replace(SEEN, server=ServerStats(covered=True, preemptions=34))
    run = write_run(tmp_path / "run", HAND, manifest(), facts())
    sampled = build.build(manifest(), table(HAND), [facts()], seen=preempted)
    build.write(run, sampled, table(HAND))
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    cli.invoke(["report", str(run)])
    shown = capsys.readouterr()
    assert "Server: 34 preemptions" in shown.err and "GPUs (2)" in shown.err and "PREEMPTIONS" in shown.err
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    built, _ = build.from_directory(run, convention="vllm")
    assert (built.server, built.gpus) == (sampled.server, sampled.gpus)
    (run / "server.jsonl").write_bytes(b"")
    server = build.from_directory(run)[0].server
    assert server is not None and "does not begin" in (server.problem or "")  # samples that are there count


@pytest.mark.parametrize(
    "changes", [{"run_id": "another"}, {"schema": "loadgen.report/0"}, {"server": 7}, {"gpus": {}}, {"run_id": None}]
)
def test_a_report_that_is_not_the_runs_has_nothing_on_its_server(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", HAND, manifest(), facts())
    sampled = build.build(manifest(), table(HAND), [facts()], seen=SEEN)
    (run / "report.json").write_text(json.dumps(msgspec.to_builtins(sampled) | changes))
    assert build.from_directory(run)[0].server is None
    for spoiled in (b"", b"[" * 100_000, b'{"run_id":"\xff"}'):
        (run / "report.json").write_bytes(spoiled)
        assert build.from_directory(run)[0].gpus is None


def test_figures_are_drawn_where_they_are_asked_for_or_there_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not drawn is named nowhere."""
    run = write_run(tmp_path / "run", HAND, manifest(), facts())
    assert cli.invoke(["report", str(run)]) == 4  # one of its requests failed
    assert not list(run.glob("*.png")) and "](" not in (run / "report.md").read_text()
    assert cli.invoke(["report", str(run), "--figures"]) == 4
    drawn = {path: path.read_bytes() for path in (run / "cdf.svg", run / "cdf.png", run / "timeline.png")}
    assert "](cdf.svg)" in (run / "report.md").read_text()
    (run / "timeline.png").unlink()
    (run / "cdf.svg").write_text("of another run")
    assert cli.invoke(["report", str(run)]) == 4
    assert (run / "cdf.svg").read_bytes() == drawn[run / "cdf.svg"] and not (run / "timeline.png").exists()
    assert "cdf.svg" in (text := (run / "report.md").read_text()) and "timeline" not in text
    assert "](cdf.svg)" in text
    capsys.readouterr()


def test_what_is_missing_is_null_and_the_report_still_stands(tmp_path: Path) -> None:
    rundir.write_manifest(tmp_path, manifest())
    for rows in ([], [failure(0), failure(1, "dropped", sent=None)]):
        built = build.build(manifest(), table(rows), [])
        assert built.client is built.connect_ms is built.ceiling is built.goodput is built.burst is None
        assert built.tokens == TokenCounts(prompt=None, output=None)
        assert built.throughput.output_tokens_per_s is None
        assert all(built.metrics[name].n == 0 for name in METRICS)
        assert built.verdict.valid is False
        build.write(tmp_path, built, table(rows))
        assert json.loads((tmp_path / "report.json").read_text())["requests"]["ok"] == 0
        assert "INVALID" in texts.render(built)


def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [WARMUP, *HAND], manifest(), facts())
    outputs = []
    for _ in range(2):
        built, rows = build.from_directory(run)
        build.write(run, built, rows, figures=True)
        outputs.append({path.name: path.read_bytes() for path in run.iterdir()})
    assert outputs[0] == outputs[1]
    assert sorted(outputs[0]) == [
        "cdf.png", "cdf.svg", "manifest.json", "report.html", "report.json", "report.md", "requests.jsonl",
        "timeline.png",
    ]  # fmt: skip
    assert json.loads(outputs[0]["report.json"]) == msgspec.to_builtins(built)
    assert outputs[0]["cdf.png"].startswith(b"\x89PNG")
    ElementTree.fromstring(outputs[0]["cdf.svg"])


def test_a_killed_run_is_reported_and_invalid(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HAND[:3], manifest(requests_planned=4), None)
    path = run / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-25])
    built, _ = build.from_directory(run)
    assert built.requests == Requests(planned=4, ok=2, failed=0, by_outcome={"ok": 2})
    assert built.verdict.findings[0].code == "KILLED"
    assert "2 of 4 planned requests left no record" in texts.render(built)


def test_an_old_run_is_judged_as_it_is(tmp_path: Path) -> None:
    """What the first version wrote: a manifest and records without what came later."""
    rows = [request(at, scheduled=100 * at / 1.5, sent=100 * at / 1.5, first=100 * at + 1) for at in range(400)]
    run = write_run(tmp_path / "run", rows, manifest(arrival="poisson:15", requests_planned=400), facts())
    first = "schema run_id version started_unix_s argv config backend model url emulated arrival machine"
    kept = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({name: kept[name] for name in first.split()}))
    lines = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    late = ("first_tokens", "shared_tokens", "retried", "session", "turn")
    old = [{name: value for name, value in line.items() if name not in late} for line in lines]
    (run / "requests.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in old))
    built, _ = build.from_directory(run)
    assert built.steady is not None and built.steady.keeping_up is not None
    assert built.steady.keeping_up.word == "fell_behind"
    assert built.steady.keeping_up.served_per_s == pytest.approx(10, rel=0.05)


def test_limits_of_the_run_itself_are_the_default(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HAND, manifest(config={"goodput": ["ttft:200", "tpot:100"]}), facts())
    limits_of_the_run = build.from_directory(run)[0].goodput
    assert limits_of_the_run is not None and limits_of_the_run.slos_ms == {"ttft": 200, "tpot": 100}
    assert limits_of_the_run.good == 2
    other_limits = build.from_directory(run, slos={"ttft": 100})[0].goodput
    assert other_limits is not None and other_limits.good == 1


@pytest.mark.parametrize("convention", [name for name in CONVENTIONS if name != "loadgen"])
def test_another_convention_is_named_in_every_text(convention: str) -> None:
    built = hand_report(convention=convention)
    assert built.convention == convention
    assert built.convention_differs == CONVENTIONS[convention].differs
    assert CONVENTIONS[convention].differs in texts.render(built)
    assert CONVENTIONS[convention].differs[:40] in markdown.render(texts.summary(built))
    assert texts.render(built) != texts.render(hand_report())


def test_mlperf_counts_from_zero_and_takes_whole_samples() -> None:
    built = hand_report(convention="mlperf")
    assert built.duration_s == 0.506
    assert built.metrics["ttft_ms"].p50 == 203
    assert built.metrics["ttft_ms"].p90 == 305
    assert built.metrics["itl_ms"].n == 0


def test_unknown_names_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ReportError, match="Unknown convention 'sglang'; use one of loadgen, vllm, guidellm, aiperf, mlperf"
    ):
        hand_report(convention="sglang")
    with pytest.raises(ReportError, match="goodput has no limit on 'itl'"):
        hand_report(slos={"itl": 5})
    with pytest.raises(ReportError, match=r"must end in \.html, \.png or \.svg"):
        build.overlay([tmp_path], tmp_path / "cdf.jpeg")
    with pytest.raises(rundir.RunError, match=r"holds no manifest\.json"):
        build.from_directory(tmp_path)
    with pytest.raises(ReportError, match="cannot write the report to"):
        build.write(tmp_path / "nowhere", hand_report(), table(HAND))


@pytest.mark.parametrize("events_per_s", [0.0, -1.0, 1e-308])
def test_a_client_that_could_take_nothing_is_refused(events_per_s: float, tmp_path: Path) -> None:
    impossible = msgspec.structs.replace(CEILING, events_per_s_per_core=events_per_s)
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(manifest(ceiling=impossible)))
    with pytest.raises(rundir.RunError, match=r"ceiling\.events_per_s_per_core: expected float >= 1"):
        build.from_directory(tmp_path)


def test_every_output_of_an_emulated_run_is_marked(tmp_path: Path) -> None:
    for emulated in (True, False):
        run = write_run(tmp_path / str(emulated), HAND, manifest(emulated=emulated), facts())
        built, rows = build.from_directory(run)
        build.write(run, built, rows, figures=True)
        assert built.emulated is emulated
        assert texts.render(built).startswith("EMULATED") is emulated
        for name in ("report.md", "cdf.svg"):
            assert ("emulated" in (run / name).read_text().lower()) is emulated


def test_several_runs_on_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes where it is asked for, or to runs.html, and never over what is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    a, b = (write_run(path, HAND, manifest(), facts()) for path in (tmp_path / "run", tmp_path / "other/run"))
    build.write(a, *build.from_directory(a))
    assert cli.invoke(["report", str(a), str(b), "--html"]) == 0
    assert "wrote runs.html" in capsys.readouterr().err
    page = (tmp_path / "runs.html").read_text()
    assert 'href="run/report.html"' in page and "other/run (INVALID)</td>" in page
    assert cli.invoke(["report", str(a), str(b), "--html"]) == 2
    assert "runs.html exists; name another --out, nothing was overwritten." in capsys.readouterr().err
    assert (tmp_path / "runs.html").read_text() == page
    assert cli.invoke(["report", str(a), str(a), "--html", "--out", "twice.html"]) == 0
    assert f"1 {a}" in (tmp_path / "twice.html").read_text()
    assert not (tmp_path / "cdf.png").exists()
    assert cli.invoke(["report", str(a), str(b), "--html", "--out", "no/such/page.html"]) == 2
    assert "cannot write --out no/such/page.html; name a file in a directory" in capsys.readouterr().err
    assert cli.invoke(["report", str(a), "--out", "one.html"]) == 2
    assert "--out is for several runs; leave it out" in capsys.readouterr().err


def test_a_page_leads_to_runs_of_any_name(tmp_path: Path) -> None:
    """A colon in the first folder of a path is no scheme of a URL."""
    runs = [write_run(tmp_path / name, HAND, manifest(), facts()) for name in ("rate:5", "rate #6")]
    for each in runs:
        build.write(each, *build.from_directory(each))
    build.overlay(runs, tmp_path / "runs.html")
    page = (tmp_path / "runs.html").read_text()
    assert 'href="./rate%3A5/report.html"' in page and 'href="rate%20%236/report.html"' in page


def test_a_figure_tells_the_verdict_and_what_its_curves_leave_out(tmp_path: Path) -> None:
    bad = write_run(tmp_path / "bad", HAND, manifest(), facts())
    built, rows = build.from_directory(bad)
    assert not built.verdict.valid and built.requests.failed == 1
    build.write(bad, built, rows, figures=True)
    drawn = (bad / "cdf.svg").read_text()
    assert "INVALID" in drawn and "3 requests; 1 more failed and are in no curve: 25.0 %" in drawn
    good = write_run(tmp_path / "good", [request(key) for key in range(400)], manifest(), facts())
    built, rows = build.from_directory(good)
    assert built.verdict.valid
    build.write(good, built, rows, figures=True)
    assert "INVALID" not in (good / "cdf.svg").read_text() and "failed" not in (good / "cdf.svg").read_text()
    build.overlay([bad, good], tmp_path / "both.svg")
    both = (tmp_path / "both.svg").read_text()
    assert "PARTLY INVALID" in both and "bad (INVALID): vllm llama-2-7b" in both
    assert "3 requests; 1 more failed" in both


def test_a_closed_loop_is_no_burst() -> None:
    burst, closed = (build.build(manifest(arrival=law), table(HAND), [facts()]) for law in ("burst", "concurrency:4"))
    assert "\nBurst: 4 requests due at t = 0" in texts.render(burst)
    assert "\nStart: 4 requests due at t = 0" in texts.render(closed) and "Burst" not in texts.render(closed)


def test_samples_that_saw_nothing_are_not_told_as_an_idle_server() -> None:
    idle = ServerStats(samples=2, running_max=0, waiting_max=0, kv_cache_usage_max_ratio=0.0, preemptions=0)
    told = texts.render(hand_report(seen=ServerView(server=idle)))
    assert "Server: sampled too seldom to see a request running (2 samples), 0 preemptions.\n" in told
    assert "at most 0" not in told


def hostile_report() -> Report:
    hostile = manifest(model=HOSTILE, server_version=HOSTILE, arrival="burst")
    return build.build(hostile, table([*HAND, failure(9, error=HOSTILE)]), [facts()])


def test_the_terminal_obeys_nothing_of_the_server() -> None:
    text = texts.render(hostile_report())
    assert all(character == "\n" or character.isprintable() for character in text)
    assert "\\x1b[31mred" in text and "\\u202e" in text
    assert len([line for line in text.splitlines() if "alert(1)" in line]) == 2  # the model and the error, a line each
    text.encode("utf-8")


def test_markdown_shows_hostile_text_and_does_not_obey_it() -> None:
    text = markdown.render(texts.summary(hostile_report()))
    assert "<script" not in text and "\x1b" not in text and "\u202e" not in text
    assert "&lt;script&gt;" in text
    assert "\\!\\[z\\](http://z)" in text
    rows = [line for line in text.splitlines() if line.startswith("| 1 | http\\_error |") and "alert" in line]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 4  # still three cells


def test_hostile_text_survives_in_json_and_figures(tmp_path: Path) -> None:
    built = hostile_report()
    rundir.write_manifest(tmp_path, manifest(model=HOSTILE))
    build.write(tmp_path, built, table(HAND), figures=True)
    ElementTree.fromstring((tmp_path / "cdf.svg").read_bytes())
    assert json.loads((tmp_path / "report.json").read_bytes())["model"] == HOSTILE


def test_errors_are_grouped_most_frequent_first_and_few() -> None:
    rows = [failure(at, error=f"reason {at}") for at in range(10)]
    rows += [failure(100 + at, error="busy", status=503) for at in range(4)]
    rows += [failure(200, "reset", error="busy"), failure(201, error="x" * 5000)]
    rows += [failure(0, phase="warmup", error="warming up")]
    errors = build.build(manifest(), table(rows), [facts()]).errors
    assert errors[0] == ErrorCount(count=4, outcome="http_error", message="busy")
    assert len(errors) == build.MAX_ERRORS
    assert all(len(error.message) <= build.MAX_ERROR_CHARACTERS for error in errors)


def test_numbers_keep_three_figures() -> None:
    shown = {
        None: "-",
        0: "0",
        12: "12",
        12345: "12,345",
        0.12345: "0.123",
        1.2345: "1.23",
        123.45: "123.5",
        1e6: "1,000,000",
    }
    assert {value: number(value) for value in shown} == shown


def test_runs_are_drawn_over_each_other_with_their_names(tmp_path: Path) -> None:
    manifests = [manifest(emulated=True), manifest(backend="tgi", model="a$b_c$")]
    for name, one in zip(("first", "second"), manifests, strict=True):
        write_run(tmp_path / name, HAND, one, facts())
    out = tmp_path / "overlay.svg"
    built = build.overlay([tmp_path / "first", tmp_path / "second"], out)
    assert [one.backend for one in built] == ["vllm", "tgi"]
    text = out.read_text()
    assert "first (emulated) (INVALID): vllm llama-2-7b" in text  # text stays text
    assert "second (measured) (INVALID): tgi a$b_c$" in text
    assert "PARTLY EMULATED" in text
    build.overlay([tmp_path / "first"] * 9, tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 10_000


def test_what_a_user_sees_a_gpu_gives_and_tokens_cost() -> None:
    """Two GPUs at 3 USD an hour; HAND's records have known rates."""
    modelled = Emulation(
        scheduler="vllm@v1", gpu="NVIDIA H200", gpus=2, topology="nvlink", tensor_parallel=2, dtype="float16",
        kv_cache_tokens=1000, max_running=256, memory_ratio=0.9, profile="built in",
    )  # fmt: skip
    asked = {"requests": 1000, "seed": 0, "gpu_hour_price": "3USD"}
    of = manifest(emulated=True, emulation=modelled, config=asked, requests_planned=4)
    report = build.build(of, table([WARMUP, *HAND]), [facts()], slos={"ttft": 200})
    told, throughput, tpot = report.economics, report.throughput, report.metrics["tpot_ms"]
    assert told is not None and throughput.output_tokens_per_s and throughput.total_tokens_per_s
    assert tpot.p50 and tpot.p90 and report.goodput and report.goodput.request_goodput
    assert told.interactivity_tokens_per_s == pytest.approx(1000 / tpot.p50)
    assert told.tps_per_user == pytest.approx(1000 / tpot.p90)
    assert told.output_tokens_per_s_per_gpu == pytest.approx(throughput.output_tokens_per_s / 2)
    usd_per_s = 2 * 3 / 3600
    assert told.price_per_million_output_tokens == pytest.approx(1e6 * usd_per_s / throughput.output_tokens_per_s)
    assert told.price_per_million_tokens == pytest.approx(1e6 * usd_per_s / throughput.total_tokens_per_s)
    assert told.goodput_requests_per_price == pytest.approx(report.goodput.request_goodput / usd_per_s)
    assert "USD a GPU hour" in texts.render(report)
    without = build.build(manifest(config=asked), table([WARMUP, *HAND]), [facts()])
    assert without.economics is not None and without.economics.price_per_million_tokens is None  # GPUs unknown
    assert "how many GPUs share the model is not known" in texts.render(without)
    assert "not known; name them" not in texts.render(report)


def test_predicted_and_measured_runs_have_other_labels_over_each_other(tmp_path: Path) -> None:
    modelled = Emulation(
        scheduler="vllm@v1", gpu="NVIDIA H200", gpus=1, topology="none", tensor_parallel=1, dtype="float16",
        kv_cache_tokens=1000, max_running=256, memory_ratio=0.9, profile="built in",
    )  # fmt: skip
    write_run(tmp_path / "model", HAND, manifest(emulated=True, emulation=modelled, url="virtual time"), facts())
    write_run(tmp_path / "real", HAND, manifest(), facts())
    write_run(tmp_path / "timetable", HAND, manifest(emulated=True), facts())
    out = tmp_path / "overlay.svg"
    build.overlay([tmp_path / "model", tmp_path / "real", tmp_path / "timetable"], out)
    text = out.read_text()
    for name in ("model (predicted)", "real (measured)", "timetable (emulated)"):
        assert f"{name} (INVALID): vllm llama-2-7b" in text
    assert "PARTLY EMULATED AND PREDICTED" in text
    build.overlay([tmp_path / "real"] * 2, tmp_path / "real.svg")
    alone = (tmp_path / "real.svg").read_text()
    assert "PREDICTED" not in alone and "(predicted)" not in alone


def test_matplotlib_waits_until_a_figure_is_drawn() -> None:
    code = "import sys, loadgen.report.build, loadgen.report.compare; print('matplotlib' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_a_page_holds_every_number_of_the_terminal() -> None:
    built = hand_report()
    page = markdown.render(texts.summary(built))
    for metric in METRICS:
        for statistic in set(Summary.__struct_fields__) - {"std", "min"}:
            assert number(getattr(built.metrics[metric], statistic)) in page


def test_a_table_of_all_phases_is_not_needed() -> None:
    only_measured = build.build(manifest(), table(HAND), [facts()])
    assert build.build(manifest(), table([WARMUP, *HAND]), [facts()]) == only_measured
    assert records.table([request(0)]).measured().id.tolist() == [0]


LAUNCH: dict[str, Any] = {
    "launch": "docker", "command": "docker run --rm image --model m", "image": "repo/vllm:v1", "version": "1.0.0",
    "image_digest": "repo/vllm@sha256:0a", "tensor_parallel": 2, "dtype": "float16", "driver": "580.1",
    "model": "m", "max_model_len": 4096, "max_running": 1024, "memory_ratio": 0.9, "notes": [],
    "gpus": [{"index": n, "name": "NVIDIA <H200>", "memory_bytes": 1 << 37} for n in range(2)],
    "p2p": {"enabled": False, "reason": "GPU 0 and 1: not supported", "matrix": [["self", "no"], ["no", "self"]]},
    "kv_cache_tokens": 123456, "ready_s": 61.2,
}  # fmt: skip


def launched(**changes: object) -> LaunchFacts:
    return msgspec.convert({**LAUNCH, **changes}, LaunchFacts)


def test_what_was_started_is_shown() -> None:
    built = build.build(manifest(launch=launched()), table(HAND), [facts()])
    assert msgspec.to_builtins(built.launch) == LAUNCH
    started = (
        "Started: Docker image repo/vllm@sha256:0a, tensor parallel 2 on 2 x NVIDIA <H200> (driver 580.1), float16; "
        "P2P off: GPU 0 and 1: not supported; KV cache of 123,456 tokens; ready after 61.20 s."
    )
    assert started in texts.render(built)
    page = markdown.render(texts.summary(built))
    assert "NVIDIA &lt;H200&gt;" in page
    alone = launched(image=None, image_digest=None, gpus=[], kv_cache_tokens=None)
    shown = texts.render(build.build(manifest(launch=alone), table(HAND), [facts()]))
    assert "Started: a process (version 1.0.0), tensor parallel 2 without a GPU, float16; ready after" in shown
    assert "Started" not in texts.render(hand_report())


def test_a_server_that_died_makes_the_run_invalid() -> None:
    ended = "vllm was killed by signal 9; read the end of its log."
    built = build.build(manifest(launch=launched(ended=ended)), table(HAND), [facts()])
    finding = built.verdict.findings[0]
    assert (finding.code, finding.severity) == ("SERVER_ENDED", "invalid") and ended in finding.message


def test_an_even_number_of_errors_has_its_median_in_the_middle() -> None:
    errors = (0.01, -0.02, 0.04, -0.10)
    runs_kept = [
        HeldOut(run="h200", makespan=0.0, e2el_mape=0.0, **dict.fromkeys(texts.HELD_OUT, error)) for error in errors
    ]
    line = texts.held_out_line(runs_kept, "", 4)
    assert "of 4 real runs" in line and "throughput 3.0, 10.0 %, ttft 3.0, 10.0 %" in line
    assert "throughput 2.0, 4.0 %" in texts.held_out_line(runs_kept[:3], "", 4)
