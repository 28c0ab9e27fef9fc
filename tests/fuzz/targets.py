"""Every reader of bytes that others wrote, and what must hold whatever they wrote. A target takes the bytes, and raises
where something does not hold: only the documented errors come out of a reader, in one printable line; a reply means
the same however it is cut into reads; and what a reader lets through can be used.

The unit stage gives these the corpus and what hypothesis draws; `make fuzz` gives them what a coverage-guided fuzzer
finds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from cyclopts import App

import backends
from backends.architectures.fields import UnknownModel
from backends.catalog import find, from_config
from backends.decoder import PrecisionError
from backends.protocol import Backend, Decoder, Delta, Prompt, ProtocolError, Sampling
from loadgen import cli, rundir, trace
from loadgen.client.connection import Connection, FastTransport
from loadgen.client.exchange import Exchange
from loadgen.document import files, markdown, terminal
from loadgen.load import conversations, datasets, traces
from loadgen.load.conversations import Conversations
from loadgen.load.dataset_files import holds_conversations
from loadgen.load.datasets import Dataset
from loadgen.load.lengths import MOST_TOKENS, WorkloadError, fixed
from loadgen.load.sessions import Sessions
from loadgen.monitor import server_view
from loadgen.monitor.exporter import Exporter
from loadgen.monitor.prometheus import SeriesPicker, Unreadable
from loadgen.plan import Timeouts
from loadgen.report import build as reports
from loadgen.report import sweeps
from loadgen.report import text as texts
from loadgen.report.pages import sweep as sweep_page
from loadgen.rundir import others, records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.search.sweep import planned_runs
from loadgen.target import Target
from loadgen.terminal import invoke
from servers.serve import faults
from servers.simulator import hardware, virtual
from servers.simulator.build import SCHEDULERS, EmulationError, Setup, emulate

MOST_MESSAGE_CHARS = 400
SEPARATOR = b"\n----\n"  # between the files of a run directory
MODEL = "the-model"
PROMPT = Prompt(n_tokens=1, token_ids=[7], text="a")

backend_of = functools.cache(backends.get)


def pieces(data: bytes) -> Iterator[list[bytes]]:
    """Cuts of the data into reads: none, every byte alone, and one at random that the data itself fixes."""
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]
    rng = random.Random(zlib.crc32(data))
    edges = [0, *sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 9))), len(data)]
    yield [data[begin:end] for begin, end in itertools.pairwise(edges) if end > begin]


def shown(error: Exception) -> str:
    """The message of an error, which is one line for a terminal; the command line cuts a long one."""
    message = str(error)
    assert message.isprintable(), message
    return message


# Replies of servers.


def decoded(decoder: Decoder, reads: Sequence[bytes]) -> tuple[list[Delta], str]:
    """What a decoder makes of these reads, and how it ended."""
    deltas: list[Delta] = []
    try:
        for read in reads:
            deltas += decoder.feed(read)
        deltas += decoder.eof()
    except ProtocolError as error:
        assert len(shown(error)) <= MOST_MESSAGE_CHARS
        return deltas, f"{type(error).__name__}: {error}"
    return deltas, "whole"


def codec(name: str, data: bytes) -> None:
    """The decoders of a backend, and what else it reads of a server."""
    backend = backend_of(name)
    for stream in (True, False):
        whole, *others = [decoded(backend.decoder(stream), reads) for reads in pieces(data)]
        assert all(other == whole for other in others), (whole, others)
        for delta in whole[0]:
            assert delta.n_tokens >= 0
            assert delta.error is None or (delta.error.isprintable() and len(delta.error) <= MOST_MESSAGE_CHARS)
    message = backend.error_message(data[0] + 100 if data else 500, data)
    assert message.isprintable() and len(message) <= MOST_MESSAGE_CHARS
    for path in backend.info_paths:
        with contextlib.suppress(ProtocolError):
            info = backend.read_info(path, data)
            assert backend.encode(info.model or MODEL, PROMPT, Sampling(max_tokens=1)).body
    for path in backend.account_paths:
        assert all(map(str.isprintable, backend.read_account(path, data).settings.values()))


@functools.cache
def _transport(name: str) -> FastTransport:
    backend = backend_of(name)
    return FastTransport(Target("http://127.0.0.1:1"), backend.error_message, Timeouts(1.0, 1.0, 1.0, 1.0))


def exchanged(backend: Backend, reads: Sequence[bytes]) -> tuple[Any, ...]:
    """What an exchange keeps of a connection that gives these reads and is closed then."""
    owner = _transport(backend.name)
    owner.idle.clear()
    connection = Connection(owner, SimpleNamespace(send=len, close=lambda: None))  # type: ignore[arg-type]
    aborted: list[bool] = []
    connection.transport = SimpleNamespace(abort=lambda: aborted.append(True), write=len)  # type: ignore[assignment]
    exchange = Exchange(0, "measured", 0, 4, 3, backend.decoder(True), lambda _: None)
    connection.start(exchange, b"GET / HTTP/1.1\r\n\r\n")
    for number, read in enumerate(reads, 1):
        if aborted:
            break
        connection.read(read, number)
    connection.connection_lost(None)
    assert exchange.finished and exchange.outcome in OUTCOMES
    assert exchange.error is None or (exchange.error.isprintable() and len(exchange.error) <= MOST_MESSAGE_CHARS)
    counts = (exchange.prompt_tokens, exchange.output_tokens, exchange.cached_tokens)
    return exchange.outcome, exchange.status, len(exchange.times), counts  # which of two breaches is named may differ


def http(data: bytes) -> None:
    """A connection's HTTP, with its short way around HTTP and JSON, over three protocols."""
    for name in ("vllm", "openai-chat", "tgi"):
        backend = backend_of(name)
        whole, *others = [exchanged(backend, reads) for reads in pieces(data)]
        assert all(other == whole for other in others), (name, whole, others)


@functools.cache
def _series() -> tuple[SeriesPicker, ...]:
    return tuple(SeriesPicker(backend_of(name).server_metrics) for name in ("vllm", "lightllm"))


def metrics(data: bytes) -> None:
    """A server's /metrics."""
    for series in _series():
        with contextlib.suppress(Unreadable):
            assert all(math.isfinite(value) for value in series.pick(data.decode("utf-8", "replace")).values())


# Files.


@functools.cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="llm-dissect-fuzz-"))


def _file(name: str, data: bytes) -> Path:
    path = _directory() / name
    path.write_bytes(data)
    return path


@functools.cache
def _app() -> App:
    return cli.build_app()


def config(data: bytes) -> None:
    """A --config file of `run`. The options are read and checked; nothing is run."""
    path = _file("config.toml", data)

    def command() -> int:
        rest, files = cli.config_files(["run", "--config", str(path)])
        app = _app()
        app["run"].config = files
        app.parse_args(rest, exit_on_error=False, print_error=False)
        return 0

    with contextlib.redirect_stderr(io.StringIO()):
        assert invoke("loadgen", command) in (0, 2)


def dataset(data: bytes) -> None:
    """A dataset of prompts or of conversations: each prompt that is let through can be sent."""
    path = _file("prompts.jsonl", data)
    for read in (conversations.read_file, datasets.read_lines):
        read.cache_clear()  # a file that is as long as the one before it, within the same tick of the file system
    if holds_conversations(path):
        _conversations(path)
        return
    for name in ("vllm", "openai-chat"):
        backend = backend_of(name)
        try:
            prompts = Dataset(path, 4, backend.prompt_kind, 0)
        except WorkloadError as error:
            shown(error)
            continue
        prompts.longest_tokens()
        for number in range(len(prompts)):
            sampling = Sampling(max_tokens=prompts.shape(number).output_tokens)
            assert backend.encode(MODEL, prompts.prompt("measured", number), sampling).body


def _conversations(path: Path) -> None:
    try:
        held = Conversations(path, 4, 0)
    except WorkloadError as error:
        shown(error)
        return
    sessions = Sessions(turns=None, think_time=fixed(1), counts=held.counts)
    workload = held.played(sessions.drawn(held.sessions, 0))
    assert workload.turns.total == len(held) >= held.sessions >= 1
    for number in range(len(held)):
        sampling = Sampling(max_tokens=workload.shape(number).output_tokens)
        for name in ("vllm", "openai-chat"):
            assert backend_of(name).encode(MODEL, workload.prompt("measured", number), sampling).body


def traffic(data: bytes) -> None:
    """A trace of real traffic: requests in order that can be sent, each hash id of a block in its place."""
    path = _file("traffic", data)
    for name in (None, *traces.FORMATS):
        try:
            played = traces.read(path, name, speed=0.5)
        except WorkloadError as error:
            shown(error)
            continue
        assert len(played) and played.due_ns[0] == 0 and (played.due_ns[1:] >= played.due_ns[:-1]).all()
        assert len(set(played.line.tolist())) == len(played)  # a little out of order they may be
        lengths = (played.input_tokens, played.output_tokens)
        assert all(((length >= 1) & (length <= MOST_TOKENS)).all() for length in lengths)
        blocks = -(-played.input_tokens // played.block_tokens) if played.block_tokens else 0 * played.line
        ids = played.hash_offsets[1:] - played.hash_offsets[:-1]
        fewer = ids < (blocks if played.format == "weka" else 0)
        assert ((ids == blocks) | (ids == 0) | fewer).all()  # a line without ids shares nothing
        assert len(played.hash_ids) == played.hash_offsets[-1] and (played.hash_ids >= 0).all()


def traced(data: bytes) -> None:
    """A trace of torch.profiler: spans with a beginning and an end."""
    try:
        spans = trace.read(_file("trace.json", data))
    except trace.TraceError as error:
        shown(error)
        return
    assert all(math.isfinite(span.start_s) and span.start_s <= span.end_s < math.inf for span in spans)
    trace.parents(spans)


def run_directory(data: bytes) -> None:
    """A run directory: a report that can be shown as text, Markdown, JSON and a page with no markup but its own."""
    parts = data.split(SEPARATOR)
    for name, part in zip(("manifest.json", "requests.jsonl", server_view.FILE), [*parts, b"", b""], strict=False):
        _file(name, part)
    try:
        report, table = reports.from_directory(_directory())
    except (rundir.RunError, records.RecordsError, files.ReportError) as error:
        shown(error)
        return
    assert all(
        line.isprintable()
        for line in (*texts.render(report).splitlines(), *markdown.render(texts.summary(report)).splitlines())
    )
    assert "<script" not in markdown.render(texts.summary(report))
    assert files.json_line(report).isascii()
    reports.write(_directory(), report, table)
    page = (_directory() / "report.html").read_text()
    assert page.count("<script") == page.count("</script>") == 3 and "<img" not in page


def sweep(data: bytes) -> None:
    """sweep.json: a sweep that can be shown, and gone on with where its options give the runs that it names."""
    directory = _directory() / "sweep"
    directory.mkdir(exist_ok=True)
    (directory / sweeps.FILE).write_bytes(data)
    try:
        swept = sweeps.read(directory)
        page = sweep_page.page(swept, {}, {}, "")
        shown_lines = (*terminal.render(page, 200).splitlines(), *markdown.render(page).splitlines())
        assert all(line.isprintable() for line in shown_lines)
        assert files.json_line(swept).isascii()
        _, runs = planned_runs(directory, swept)
    except rundir.RunError as error:
        shown(error)
        return
    assert [run.name for run in runs] == [run.directory for run in swept.runs]


def snapshot(data: bytes) -> None:
    """A run's snapshot beside a good one: the exporter's page always comes, and has the good one."""
    broken = _directory() / "runs" / "broken"
    good = _directory() / "runs" / "good"
    for directory in (broken, good):
        directory.mkdir(parents=True, exist_ok=True)
    rundir.write_snapshot(good, rundir.Snapshot(run_id="good", program="loadgen", state="running"))
    (broken / rundir.SNAPSHOT_FILE).write_bytes(data)
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        page, _ = Exporter(_directory() / "runs").page(accept)
        assert b"llm_dissect_exporter_runs" in page and b"good" in page


@functools.cache
def _setup(scheduler: str) -> Setup:
    model = find("7b")
    assert model is not None
    return Setup(scheduler=scheduler, model=model, gpu="h200")


def profile(data: bytes) -> None:
    """A hardware profile: a server that it is given to ends every request, at a finite time."""
    path = _file("profile.json", data)
    for scheduler in SCHEDULERS:
        try:
            emulated = emulate(msgspec.structs.replace(_setup(scheduler), profile=path))
            outcomes = virtual.simulate(emulated, [(0.0, 8, 3), (0.1, 600, 2)])
        except EmulationError as error:
            shown(error)
            continue
        assert all(math.isfinite(at_s) for outcome in outcomes for at_s in outcome.times_s)


def gpu(data: bytes) -> None:
    """A GPU in a file of the user's or of another's: what is let through can serve."""
    path = _file("gpu.json", data)
    try:
        emulated = emulate(msgspec.structs.replace(_setup("vllm@v1"), gpu=str(path), model=find("tiny") or find("7b")))
        outcomes = virtual.simulate(emulated, [(0.0, 8, 3)])
    except (EmulationError, hardware.HardwareError) as error:
        shown(error)
        return
    assert all(math.isfinite(at_s) for outcome in outcomes for at_s in outcome.times_s)


def model(data: bytes) -> None:
    """A config.json: a model that is let through has sizes."""
    try:
        config = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    if not isinstance(config, dict):
        return
    try:
        spec = from_config("a model", config)
        precision = spec.precision("bfloat16")
    except (UnknownModel, PrecisionError) as error:
        shown(error)
        return
    sizes = spec.weight_bytes(precision), spec.kv_bytes_per_token(precision), spec.state_bytes(precision)
    assert all(math.isfinite(size) and size >= 0 for size in (*sizes, spec.active_parameters))


def results(data: bytes) -> None:
    """A file of another load generator's results."""
    try:
        loads = others.read(_file("results.json", data))
    except others.ForeignResultsError as error:
        shown(error)
        return
    assert all(load.records for load in loads)
    for load in loads:
        records.table(load.records)


def fault_script(data: bytes) -> None:
    """A script of faults for the embedded server."""
    path = _file("faults.json", data)
    try:
        faults.read((str(path),), "vllm", 0).striking(1)
    except ValueError as error:
        shown(error)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "openai": functools.partial(codec, "openai"),
    "openai_chat": functools.partial(codec, "openai-chat"),
    "tgi": functools.partial(codec, "tgi"),
    "lightllm": functools.partial(codec, "lightllm"),
    "llamacpp": functools.partial(codec, "llamacpp"),
    "sglang": functools.partial(codec, "sglang"),
    "ollama": functools.partial(codec, "ollama"),
    "http": http,
    "metrics": metrics,
    "config": config,
    "dataset": dataset,
    "trace": traced,
    "traffic": traffic,
    "run_directory": run_directory,
    "sweep": sweep,
    "snapshot": snapshot,
    "profile": profile,
    "gpu": gpu,
    "model": model,
    "results": results,
    "faults": fault_script,
}
