"""A server driven through a profile: a stand-in whose streams and profiler do as told."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import backends
from backends.launch import Profiler
from backends.protocol import ServerInfo
from loadgen import cli, rundir, trace
from loadgen.breakdown import measure, page, tables
from loadgen.breakdown.measure import Watched
from loadgen.breakdown.tables import StepBreakdown
from loadgen.config import Config, ConfigError
from loadgen.document import files
from loadgen.plan import plan_run
from loadgen.run import ServerError
from loadgen.rundir import RunError
from loadgen.target import Target
from tests.loadgen import traces

STEP_S = 0.004
STREAMS = 3
EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
PROFILER = Profiler(start=("POST", "/start_profile"), stop=("POST", "/stop_profile"))


@dataclass
class StandIn:
    """Every stream has a token every STEP_S; `tokens` is how many it ends after. profiler: the status with which it
    answers; 0: it never does. prefill_s: how long each of STREAMS prompts takes, one after another;
    one more comes before any second token."""

    tokens: int = 100_000
    profiler: int = 200
    fails: bool = False
    prefill_s: float = 0.0
    url: str = ""
    heard: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    prefill: threading.Lock = field(default_factory=threading.Lock)
    prefilled: threading.Barrier = field(default_factory=lambda: threading.Barrier(STREAMS))


@contextlib.contextmanager
def serving(standin: StandIn) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.endswith("_profile"):
                standin.heard.append(self.path)
                if not standin.profiler:
                    standin.over.wait(30.0)
                    return
                self._plain(standin.profiler)
            elif standin.fails:
                self._plain(500)
            else:
                self._stream()

        def _plain(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(OSError):
                with standin.prefill:
                    time.sleep(standin.prefill_s)
                for at in range(standin.tokens):
                    self.wfile.write(EVENT)
                    self.wfile.flush()
                    if standin.prefill_s and not at:
                        standin.prefilled.wait(30.0)
                        time.sleep(standin.prefill_s)
                    time.sleep(STEP_S)
                self.wfile.write(b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n')
                self.wfile.write(b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":5}}\n\n')
                self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    standin.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield standin
    finally:
        standin.over.set()
        server.shutdown()
        server.server_close()


def drive(standin: StandIn, directory: Path, **options: object) -> Watched:
    config = measure.load(Config(launch="process", concurrency=STREAMS, input_tokens=8, **options))  # type: ignore[arg-type]
    backend = backends.get("vllm")
    with serving(standin):
        plan = plan_run(config, backend, Target(standin.url), ServerInfo("m"), "run-1")
        return asyncio.run(measure.drive(plan, PROFILER, 5, directory, lambda text: None))


def test_steps_are_profiled_in_decode_and_the_load_is_cut_off(tmp_path: Path) -> None:
    standin = StandIn()
    seen = drive(standin, tmp_path)
    assert standin.heard == ["/start_profile", "/stop_profile"]
    assert seen.before_ms >= STEP_S * 1000 * 0.9 and seen.during_ms >= STEP_S * 1000 * 0.9
    assert seen.context_tokens > 8 + 5
    *records, facts = (json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()[1:])
    assert [record["outcome"] for record in records] == ["cancelled"] * STREAMS and facts


def test_waiting_for_the_others_prompts_is_no_step(tmp_path: Path) -> None:
    """It would make the first five steps take 60 ms each and more."""
    seen = drive(StandIn(prefill_s=0.3), tmp_path)
    assert seen.before_ms < 30


def test_a_server_without_a_profiler(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="has no /start_profile") as raised:
        drive(StandIn(profiler=404), tmp_path)
    assert str(raised.value).count(".") == 1


def test_a_profiler_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="POST /start_profile with status 500"):
        drive(StandIn(profiler=500), tmp_path)


def test_a_profiler_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "START_TIMEOUT_S", 0.3)
    with pytest.raises(ServerError, match=r"vllm gave no answer to POST /start_profile in \d+\.\d s; its server\.log"):
        drive(StandIn(profiler=0), tmp_path)


def test_replies_that_are_too_short(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"lower --concurrency or --output-tokens \(1024 here\)"):
        drive(StandIn(tokens=4), tmp_path)


def test_requests_that_fail(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="requests failed before"):
        drive(StandIn(fails=True), tmp_path)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"url": "http://h:1"}, "instead of --url"),
        ({"launch": "process", "arrival": "poisson:3"}, "--concurrency says how large"),
        ({"launch": "process", "requests": 10}, "--concurrency says how large"),
        ({"launch": "process", "dataset": Path("d.jsonl")}, "leave --dataset"),
        ({"launch": "process", "concurrency": 2000}, "raise that"),
        ({"launch": "process", "workers": "2"}, "leave --workers out"),
    ],
)
def test_loads_that_are_no_batch(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        measure.load(Config(**options))  # type: ignore[arg-type]


def test_replies_are_long_unless_they_are_told(tmp_path: Path) -> None:
    assert measure.load(Config(launch="process")).output_tokens == measure.LONG_REPLY_TOKENS
    assert measure.load(Config(launch="process", output_tokens=50)).output_tokens == 50


@pytest.mark.parametrize(
    ("asked", "cache_tokens", "reply"),
    [
        ({}, None, 1024),  # it does not tell
        ({}, 1_000_000, 1024),
        ({}, 200_667, 232),  # 190,633 tokens are 744 for each of 256 requests, of which prompts take 512
        ({}, 160_000, 1024),  # not enough for the profile: whoever reads the error chooses
        ({"output_tokens": 900}, 200_667, 900),
    ],
)
def test_replies_fit_into_the_cache(asked: dict[str, Any], cache_tokens: int | None, reply: int) -> None:
    config = measure.load(Config(launch="process", concurrency=256, **asked))
    assert measure.that_fit(config, cache_tokens, 30).output_tokens == reply


# The trace.


def test_the_first_gpus_trace_is_kept_once_it_is_whole(tmp_path: Path) -> None:
    """Other ranks' files are larger, other processes' have no rank, and it is still being written when we look."""
    place = tmp_path / "trace"
    place.mkdir()
    events = traces.with_device(traces.decode(2), 3, graph=True)
    traces.write(place / "dp0_pp0_tp1_rank1.1.pt.trace.json.gz", events + events)
    traces.write(place / "host_77.1.pt.trace.json.gz", events * 3)
    whole = gzip.compress(json.dumps({"traceEvents": events}).encode())
    path = place / "dp0_pp0_tp0_rank0.2.pt.trace.json.gz"
    path.write_bytes(whole[: len(whole) // 2])

    async def collected() -> list[trace.TraceSpan]:
        waiting = asyncio.ensure_future(measure.collect(place, tmp_path / "trace.json.gz", 20.0))
        await asyncio.sleep(1.2)
        assert not waiting.done()
        path.write_bytes(whole)
        return await waiting

    spans = asyncio.run(collected())
    assert len(spans) == len(events)
    assert trace.read(tmp_path / "trace.json.gz") == spans


def test_a_plain_trace_is_kept_gzipped(tmp_path: Path) -> None:
    events = traces.with_device(traces.decode(2), 3, graph=True)
    traces.write(tmp_path / "rank-0.pt.trace.json", events)
    spans = asyncio.run(measure.collect(tmp_path, tmp_path / "trace.json.gz", 20.0))
    assert trace.read(tmp_path / "trace.json.gz") == spans
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_no_trace_comes(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="left no whole trace"):
        asyncio.run(measure.collect(tmp_path, tmp_path / "kept", 0.1))


# Once more.


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A run's directory as an older version left it: it knew no kernel of the trace."""
    events = traces.with_device(traces.decode(3), 6, graph=True)
    traces.write(tmp_path / measure.TRACE_FILE, events)
    config = {"concurrency": 12}
    rundir.write_manifest(
        tmp_path,
        rundir.Manifest(
            run_id="r", version="0", started_unix_s=0.0, argv=[], config=config, backend="vllm", model="7b", url="",
            emulated=False, arrival="concurrency:12", machine=rundir.this_machine(),
        ),
    )  # fmt: skip
    kept = StepBreakdown(
        emulated=False, backend="vllm 0.9", model="llama", hardware="1 x GPU", batch=8, prompt_tokens=512,
        context_tokens=600.0, step_ms=9.0, kinds={"Unrecognised": 9.0}, parts={"Not assigned": 9.0}, layers=None,
        steps=2, delimited_by="execute annotations", form="graph", client_ms=0.4, client_before_ms=0.3,
        trace=measure.TRACE_FILE, notes=("an old note",),
    )  # fmt: skip
    tables.write(tmp_path, kept)
    files.write(tmp_path / page.FILE, page.of(tmp_path, kept), "report.md")
    (tmp_path / "requests.jsonl").write_text("a run's report would count these\n")
    return tmp_path


def test_a_report_of_a_breakdown_takes_its_trace_apart_again(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["report", str(measured)]) == 0
    redone = json.loads(capsys.readouterr().out)
    true = traces.truth(traces.decode(3))
    assert redone == json.loads((measured / "breakdown.json").read_text())
    assert redone["step_ms"] == pytest.approx(true.step_ms)
    assert {name: ms for name, ms in redone["kinds"].items() if ms > 1e-9} == pytest.approx(true.kinds)
    assert (redone["layers"], redone["steps"], redone["backend"], redone["client_ms"]) == (3, 4, "vllm 0.9", 0.4)
    assert redone["notes"] == ["12 requests were in flight, and the server decoded 8 of them in a step."]
    assert "3 x Attention blocks" in (measured / "report.md").read_text()
    assert not (measured / "report.json").exists()


@pytest.mark.parametrize(("during", "before", "merged"), [(9, 9, True), (9, 1, False)])
def test_what_a_profiler_takes_to_start_is_no_token(
    during: float, before: float, merged: bool, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step_ms = traces.truth(traces.decode(3)).step_ms
    kept = tables.read(measured)
    kept = msgspec.structs.replace(kept, client_ms=during * step_ms, client_before_ms=before * step_ms)
    tables.write(measured, kept)
    assert cli.invoke(["report", str(measured)]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("several tokens into one" in note for note in notes) == merged


def test_without_its_trace_it_stays_what_it_was(measured: Path) -> None:
    (measured / measure.TRACE_FILE).unlink()
    before = (measured / "report.md").read_text(), (measured / "breakdown.json").read_text()
    assert cli.invoke(["report", str(measured)]) == 0
    assert ((measured / "report.md").read_text(), (measured / "breakdown.json").read_text()) == before


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        ("trace.json.gz", [], "is not a trace of torch.profiler"),
        ("breakdown.json", [], "is not a breakdown of this version"),
        ("", ["--convention", "vllm"], "leave it out"),
    ],
)
def test_a_report_that_cannot_be_redone(
    measured: Path, spoil: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if spoil:
        (measured / spoil).write_bytes(b"{")
    before = (measured / "report.md").read_text()
    assert cli.invoke(["report", str(measured), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert (measured / "report.md").read_text() == before


def test_names_from_elsewhere_do_nothing_to_terminal_or_page(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (measured / measure.TRACE_FILE).unlink()
    hostile = "\x1b]0;owned\x07\u202e\n<img src=x> $a$"
    kept = replace(tables.read(measured), model=hostile, hardware=hostile, backend=hostile, notes=(hostile,))
    kept = replace(kept, delimited_by=hostile)
    (measured / "breakdown.json").write_text(tables.to_json(kept))
    assert cli.invoke(["report", str(measured)]) == 0
    shown, page = capsys.readouterr().err, (measured / "report.md").read_text()
    for text in (*shown.split("\n"), *page.split("\n")):
        assert text.isprintable()
    assert shown.count("\\x1b]0;owned\\x07\\u202e\\n<img src=x> $a$") == 5
    assert "<img" not in page and page.count("&lt;img src=x&gt; \\$a\\$") == 5


def test_a_breakdown_with_rows_that_nobody_knows(measured: Path) -> None:
    kept = replace(tables.read(measured), kinds={"$x": 9.0})
    (measured / "breakdown.json").write_text(tables.to_json(kept))
    with pytest.raises(RunError, match="not a breakdown of this version"):
        tables.read(measured)
