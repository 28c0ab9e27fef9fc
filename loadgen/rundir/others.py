"""Results of other load generators as records of a run: `vllm bench serve --save-detailed`, SGLang's bench with
--output-details, guidellm, aiperf, inference-perf and genai-perf, each by the fields of its file.

What a tool did not keep stays unknown. SGLang's keeps no time at which a request was sent: that is put together from
the order of the requests and the concurrency, and the reader is told.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from backends import foreign_files
from backends.exit_codes import UserError
from backends.untrusted import UNDECODABLE, printable, reason
from loadgen import rundir
from loadgen.rundir import pace, records
from loadgen.rundir.records import Record

MOST_BYTES = 1 << 30  # of a file: one that keeps every token's text of 100,000 requests has about that
MOST_EVEN = 1e6  # a larger burstiness of vLLM's gamma arrivals is a constant rate
_NOT_KEPT = "it kept no lag of its client and no server's metrics"
_NOT_DUE = f"{_NOT_KEPT}, nor when requests were due (send_lag is shown as 0)"


class ForeignResultsError(UserError):
    """A file of results that cannot be read. The message names it."""


@dataclass
class Sent:
    """One request as another tool kept it. Seconds on the tool's own clock; gaps: between output events, None where it
    kept none. output_tokens: None where nobody counted."""

    sent_s: float
    done_s: float
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: Sequence[float] | None = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    asked_tokens: int | None = None
    due_s: float | None = None
    error: str | None = None
    warmup: bool = False


@dataclass
class ForeignLoad:
    """One load that another tool sent. arrival: in this program's words. lacks: what is not known of it, a clause."""

    tool: str
    version: str
    model: str
    arrival: str
    requests: list[Sent]
    url: str = ""
    lacks: str = _NOT_KEPT
    records: list[Record] = field(init=False)

    def __post_init__(self) -> None:
        begun_s = min((each.sent_s if each.due_s is None else each.due_s for each in self.requests), default=0.0)
        self.requests.sort(key=lambda each: (not each.warmup, each.sent_s))
        self.records = [_record(number, each, begun_s) for number, each in enumerate(self.requests)]


def read(path: Path) -> list[ForeignLoad]:
    """The loads in a file of another tool's results. Raises ForeignResultsError."""
    try:
        data = foreign_files.read_named(path, MOST_BYTES)
    except OSError as error:
        raise ForeignResultsError(
            f"{path} cannot be read ({error.strerror or error}); name a file of results."
        ) from None
    try:
        documents = _documents(data)
    except UNDECODABLE as error:
        raise ForeignResultsError(f"{path} is no JSON ({printable(reason(error), 100)}); was it cut off?") from None
    first = documents[0] if documents else None
    reader = next((reader for knows, reader in _TOOLS if isinstance(first, dict) and knows(first)), None)
    if reader is None:
        raise ForeignResultsError(f"{path} is of no tool that is known here: {KNOWN}.")
    try:
        loads = reader(documents, path)
        for load in loads:
            records.table(msgspec.json.decode(msgspec.json.encode(each), type=Record) for each in load.records)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        kind = type(error).__name__
        raise ForeignResultsError(
            f"{path} lacks what its tool's files have ({kind}: {printable(str(error), 80)}); known are {KNOWN}."
        ) from None
    if not any(load.requests for load in loads):
        raise ForeignResultsError(f"{path} holds no request.")
    return [load for load in loads if load.requests]


def _documents(data: bytes) -> list[Any]:
    """The JSON value of a file, as a list; or the values of its lines."""
    try:
        whole = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _record(number: int, each: Sent, begun_s: float) -> Record:
    def ns(at_s: float | None) -> int | None:
        if at_s is not None and not math.isfinite(at_s):
            raise ValueError("a time is no number")
        return None if at_s is None else round(1e9 * (at_s - begun_s))

    ok, gaps = each.error is None, each.gaps_s
    first_ns, last_s = ns(each.first_s), each.last_s
    itl_us: tuple[int, ...] = ()
    if first_ns is not None and gaps:
        at_us = [math.floor(first_ns / 1000 + 1e6 * done_s) for done_s in itertools.accumulate(gaps, initial=0.0)]
        itl_us = tuple(max(0, later - earlier) for earlier, later in itertools.pairwise(at_us))
        last_s = (each.first_s or 0.0) + sum(gaps)
    elif last_s is None:
        last_s = each.first_s
    tokens = each.output_tokens
    events = 0 if first_ns is None else len(itl_us) + 1 if gaps is not None else max(1, tokens or 1)
    first_tokens = pace.first_tokens(tokens, itl_us) if gaps is not None else 1 if (tokens or 0) > 1 else None
    return Record(
        id=number, scheduled_ns=ns(each.sent_s if each.due_s is None else each.due_s) or 0, sent_ns=ns(each.sent_s),
        first_token_ns=first_ns, last_token_ns=ns(last_s), done_ns=ns(each.done_s), prompt_tokens=each.prompt_tokens,
        output_tokens=tokens, first_tokens=first_tokens, asked_prompt_tokens=each.prompt_tokens or 0,
        asked_tokens=each.asked_tokens or tokens or 0, events=events, status=200 if ok else None,
        outcome="ok" if ok else "http_error", error=None if ok else printable(each.error or "", 200),
        phase="warmup" if each.warmup else "measured", itl_us=itl_us,
    )  # fmt: skip


def _arrival(rate: object, concurrency: object, burstiness: object = 1.0) -> str:
    """The words of `--arrival`. With both a rate in requests/s and a limit on what is in flight, the limit: where the
    tool waited for it, its times do not tell when requests were due, and so not whether the server kept up."""
    limit = int(str(concurrency)) if concurrency else None
    if limit:
        return f"concurrency:{limit}"
    try:
        per_s = float(str(rate))
    except ValueError:
        per_s = math.inf
    if not math.isfinite(per_s) or per_s <= 0:
        return "burst"
    shape = float(str(burstiness))
    if shape == 1:
        return f"poisson:{per_s:g}"
    return f"gamma:{per_s:g}:{shape:g}" if shape < MOST_EVEN else f"constant:{per_s:g}"


def _vllm(documents: list[Any], path: Path) -> list[ForeignLoad]:
    (result,) = documents
    if "ttfts" not in result:
        raise ForeignResultsError(f"{path} has no requests; let vllm bench serve write them with --save-detailed.")
    if "start_times" not in result:
        raise ForeignResultsError(f"{path} is of a vLLM that kept no start_times; 0.11 and newer do.")
    rows = zip(
        result["start_times"], result["ttfts"], result["itls"], result["input_lens"], result["output_lens"],
        result["errors"], strict=True,
    )  # fmt: skip
    latencies, requests = result.get("latencies"), []
    for number, (start, ttft, gaps, prompt, output, error) in enumerate(rows):
        done = start + (latencies[number] if latencies else ttft + sum(gaps))
        first = start + ttft if ttft > 0 and not error else None
        requests.append(Sent(start, done, first, None, gaps if first else (), prompt, output, error=error or None))
    arrival = _arrival(result.get("request_rate"), result.get("max_concurrency"), result.get("burstiness") or 1.0)
    return [ForeignLoad("vllm bench serve", "", result["model_id"], arrival, requests, lacks=_NOT_DUE)]


def _sglang(documents: list[Any], path: Path) -> list[ForeignLoad]:
    loads = []
    for result in documents:
        if not result.get("ttfts"):
            raise ForeignResultsError(f"{path} has no requests; let SGLang's bench write them with --output-details.")
        arrival = _arrival(result.get("request_rate"), result.get("max_concurrency"))
        if _arrival(result.get("request_rate"), None) != "burst":
            raise ForeignResultsError(
                f"{path} keeps no time at which a request was sent, and at a rate that cannot be told."
            )
        free = [0.0] * int(result.get("max_concurrency") or len(result["ttfts"]))
        requests = []
        rows = zip(
            result["ttfts"], result["itls"], result["input_lens"], result["output_lens"], result["errors"], strict=True
        )
        for ttft, gaps, prompt, output, error in rows:
            start = heapq.heappop(free)
            done = start + ttft + sum(gaps)
            heapq.heappush(free, done)
            first = start + ttft if ttft > 0 and not error else None
            requests.append(Sent(start, done, first, None, gaps if first else (), prompt, output, error=error or None))
        lacks = "it kept no time at which a request was sent: that is put together from their order and the concurrency"
        loads.append(ForeignLoad("SGLang's bench", "", "", arrival, requests, lacks=lacks))
    return loads


def _guidellm(documents: list[Any], path: Path) -> list[ForeignLoad]:
    (result,) = documents
    version = str(result.get("metadata", {}).get("guidellm_version", ""))
    return [_guidellm_load(each, version) for each in result["benchmarks"]]


def _guidellm_load(benchmark: Mapping[str, Any], version: str) -> ForeignLoad:
    strategy, requests, model = benchmark["config"]["strategy"], [], ""
    for status in ("successful", "errored", "incomplete"):
        for row in benchmark["requests"].get(status) or ():
            times = row["info"]["timings"]
            tokens, model = row.get("output_tokens"), model or _model_of(_object(row.get("request_args")).get("body"))
            due, start = times.get("targeted_start"), row["request_start_time"]
            if start is None:
                continue  # it was given up before it was sent
            requests.append(
                Sent(
                    start, row["request_end_time"] or start, times.get("first_token_iteration"),
                    times.get("last_token_iteration"), None, row.get("prompt_tokens"), tokens,
                    due_s=min(due, start) if due else None,
                    error=None if status == "successful" else str(row["info"].get("error") or status),
                )
            )  # fmt: skip
    kind, rate = strategy["type_"], strategy.get("rate")
    streams = strategy.get("streams") or strategy.get("max_concurrency")
    arrival = {"constant": f"constant:{rate}", "poisson": f"poisson:{rate}", "synchronous": "concurrency:1"}.get(
        kind, f"concurrency:{streams}" if kind == "concurrent" and streams else "burst"
    )
    lacks = f"it kept no gaps between tokens (itl is unknown); {_NOT_KEPT}"
    return ForeignLoad("guidellm", version, model, arrival, requests, lacks=lacks)


def _model_of(body: object) -> str:
    """The model that a request's body asks for."""
    return str(_object(body).get("model", ""))


def _aiperf(documents: list[Any], path: Path) -> list[ForeignLoad]:
    requests = []
    for row in documents:
        about, metrics = row["metadata"], row.get("metrics") or {}

        def value(name: str, metrics: Mapping[str, Any] = metrics) -> Any:
            return metrics.get(name, {}).get("value")

        start, done = about["request_start_ns"] / 1e9, about["request_end_ns"] / 1e9
        ttft, gaps = value("time_to_first_token"), value("inter_chunk_latency")
        error = row.get("error")
        if error is None and about.get("was_cancelled"):
            error = "cancelled"
        due = about.get("credit_issued_ns")
        requests.append(
            Sent(
                start, done, None if ttft is None or error else start + ttft / 1e3, None,
                [gap / 1e3 for gap in gaps] if gaps and not error else (),
                value("usage_prompt_tokens") or value("input_sequence_length"),
                value("usage_completion_tokens") or value("output_sequence_length"),
                due_s=None if due is None else min(due / 1e9, start),
                error=None if error is None else _text(error), warmup=about.get("benchmark_phase") == "warmup",
            )
        )  # fmt: skip
    beside = _beside(path.with_name("profile_export_aiperf.json"))
    asked = beside.get("input_config") or {}
    (phase,) = (asked.get("phases") or [{}])[-1:]
    names = [str(each.get("name", "")) for each in (asked.get("models") or {}).get("items") or ()]
    urls = (asked.get("endpoint") or {}).get("urls") or [""]
    arrival = _arrival(phase.get("rate") or phase.get("request_rate"), phase.get("concurrency"))
    return [
        ForeignLoad("aiperf", str(beside.get("aiperf_version", "")), ", ".join(names), arrival, requests, str(urls[0]))
    ]


def _beside(path: Path) -> Mapping[str, Any]:
    """A JSON object in a file of the same directory; empty where there is none."""
    try:
        return _object(foreign_files.read_bytes(path, path.parent, MOST_BYTES).decode())
    except (OSError, *UNDECODABLE):
        return {}


def _inference_perf(documents: list[Any], path: Path) -> list[ForeignLoad]:
    requests, model = [], ""
    for row in documents:
        info = row.get("info") or {}
        response = info.get("response_metrics") or info
        usage = response.get("server_usage") or {}
        at = response.get("chunk_times") or response.get("output_token_times") or []
        model = model or _model_of(row.get("request"))
        requests.append(
            Sent(
                row["start_time"], row["end_time"], at[0] if at else None, None,
                [later - earlier for earlier, later in itertools.pairwise(at)],
                usage.get("prompt_tokens") or info.get("input_tokens"),
                usage.get("completion_tokens") or response.get("output_tokens"),
                error=None if row.get("error") is None else _text(row["error"]),
            )
        )  # fmt: skip
    lacks = f"it kept neither arrivals nor concurrency; {_NOT_DUE}"
    return [ForeignLoad("inference-perf", "", model, "unknown", requests, lacks=lacks)]


def _genai_perf(documents: list[Any], path: Path) -> list[ForeignLoad]:
    (result,) = documents
    loads = []
    for each in result["experiments"]:
        mode, value = each["experiment"]["mode"], each["experiment"]["value"]
        requests = []
        for row in each["requests"]:
            start, at = row["timestamp"] / 1e9, [stamp / 1e9 for stamp in row["response_timestamps"]]
            gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
            done, error = (at[-1], None) if at else (start, "no response")
            requests.append(Sent(start, done, at[0] if at else None, None, gaps, error=error))
        arrival = f"constant:{value}" if mode == "request_rate" else f"concurrency:{value}"
        lacks = f"it kept no counts of tokens (tpot and tokens/s are unknown); {_NOT_DUE}"
        loads.append(ForeignLoad("genai-perf", str(result.get("version", "")), "", arrival, requests, lacks=lacks))
    return loads


def _object(value: object) -> Mapping[str, Any]:
    """A JSON object, or the text of one; empty for all else."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except UNDECODABLE:
            return {}
    return value if isinstance(value, dict) else {}


def _text(error: object) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error.get("error_msg") or error.get("type") or error
    return str(error)


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda document: all(name in document for name in names)


KNOWN = (
    "vllm bench serve (0.11 and newer, --save-detailed), SGLang's bench (--output-details), guidellm (0.4 and newer), "
    "aiperf (profile_export.jsonl), inference-perf (per_request_lifecycle_metrics.json), genai-perf "
    "(profile_export.json)"
)
_Reader = Callable[[list[Any], Path], list[ForeignLoad]]
_TOOLS: tuple[tuple[Callable[[Mapping[str, Any]], bool], _Reader], ...] = (
    (_has("model_id", "duration", "completed"), _vllm),
    (_has("random_input_len", "duration", "completed"), _sglang),
    (_has("benchmarks"), _guidellm),
    (_has("metadata", "metrics"), _aiperf),
    (_has("start_time", "end_time", "info"), _inference_perf),
    (_has("experiments"), _genai_perf),
)


def write(load: ForeignLoad, directory: Path, argv: list[str], read_from: Path) -> None:
    """Makes a run directory of a load, which report, compare and sweep read. Raises RunError, RecordsError."""
    rundir.create(directory)
    run_id = rundir.new_run_id()
    unknown = rundir.Machine(platform="unknown", python="unknown", cpu_count=0, hostname="unknown")
    manifest = rundir.Manifest(
        run_id=run_id, version=rundir.package_version(), started_unix_s=read_from.stat().st_mtime, argv=argv,
        config={"stream": True}, backend="openai", model=load.model or "unknown", url=load.url or "unknown",
        emulated=False, arrival=load.arrival, machine=unknown,
        imported=rundir.ForeignTool(tool=f"{load.tool} {load.version}".strip(), lacks=load.lacks),
    )  # fmt: skip
    rundir.write_manifest(directory, manifest)
    file = records.RecordsFile(directory / "requests.jsonl", run_id, manifest.version, 0)
    with contextlib.closing(file.file):
        for record in load.records:
            file.write(record)


def names(loads: Sequence[ForeignLoad]) -> list[str]:
    """The name of each load's directory, where a file has several."""
    return [f"{number:02}-{load.arrival.replace(':', '-')}" for number, load in enumerate(loads, start=1)]
