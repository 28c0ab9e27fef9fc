"""`loadgen predict`: a run that nobody made, in virtual time, written and reported like one that somebody did."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

import backends
from backends import exit_codes
from backends.protocol import ServerInfo
from loadgen import cli, models, rundir, terminal
from loadgen.config import OUTPUT, Config, ConfigError, ModelledOptions, PlacementOptions, flag
from loadgen.load.choices import WeightedChoice
from loadgen.load.datasets import Dataset
from loadgen.load.lengths import residual
from loadgen.load.load import Load
from loadgen.load.shapes import Shapes, TraceShapes
from loadgen.load.turns import Turns
from loadgen.option_types import ShownOptions, names, offers, option
from loadgen.plan import planned_load, read_dataset, unkept
from loadgen.rundir import records
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.server import embedded
from servers.simulator.build import Emulated, emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import ArrivingRequest, Outcome, manifest, simulate, simulate_sessions, uncollected

T = TypeVar("T")
COUNTED_TOGETHER = 4096  # requests


@offers(
    "backend", "model", "workload", "requests", "duration", "input_tokens", "output_tokens", "arrival", "concurrency",
    "prefix", "sessions", "turns", "think_time", "first_tokens", "thinking_tokens", "subagents", "context_tokens",
    "cancel", "adapters", "priority", "trace", "trace_format", "trace_speed", "trace_limit", "trace_from",
    "trace_block_tokens", "dummy_weights", "warmup", "drain_warmup", "dataset", "repeat_dataset", "tokenizer", "seed",
    "goodput", "gpu_hour_price", "out",
    *names(PlacementOptions),
    *(name for name in names(ModelledOptions) if name != "speed"),
)  # fmt: skip
class PredictOptions(Config):
    """Of `run`, without those of a client, of its wire and of a server that is started."""


CLIENT_ONLY = (  # of a client and its wire, and of real time: a prediction has none of them
    "vocab_size", "warmup_load", "stop_when_overloaded", "stream", "workers", "on", "nodes",
    "transport", "connect", "kernel_timestamps", "api_key_env", "header", "session_header", "ca", "insecure",
    "connect_timeout", "first_byte_timeout", "idle_timeout", "total_timeout", "metrics_url", "metrics_port", "speed",
    "repeat", "retries", "batch_size", "images",
)  # fmt: skip


def predict(
    config: Annotated[PredictOptions | None, Parameter(name="*")] = None,
    *,
    preset: Annotated[
        Literal["paper"] | None,
        option(
            OUTPUT,
            "paper: Section VI of arXiv 2311.03687, its figures and what it states beside what is predicted. "
            "It takes --out and --seed only.",
        ),
    ] = None,
    shown: ShownOptions | None = None,
) -> int:
    """Predict what `run` would measure on GPUs that you need not have: the same load, computed in virtual time.

    Takes the options of `run`, less those of the client; --gpu says which GPU. Writes a run directory like that of a
    run, marked as emulated, and prints beside the numbers how far off the model was on real runs that it was not fitted
    to.
    """
    terminal.use(shown)
    config = config or PredictOptions()
    if preset is not None:
        return _paper(config)
    _check(config)
    began = time.perf_counter()
    load, shapes = drawn(config)
    if load.left_out:
        source = "dataset" if load.trace is None else "trace"
        terminal.note(f"note: of the {source} these are not sent: {load.left_out}.")
    for note in load.notes:
        terminal.note(f"note: of the trace: {note}.")
    sent, warm_up = requests(load, shapes), filling(config, load, shapes)
    run_id = rundir.new_run_id()
    directory = config.out or Path("runs") / run_id
    hardware = Hardware(**embedded.modelled(config))
    length = _length(config, longest_request_tokens(load, shapes, sent))
    emulated = emulate(hardware.setup(config.kind, embedded.model_place(config), length))
    for note in emulated.facts.notes:
        terminal.note(f"note: {note}")
    if load.adapters is not None and not emulated.settings.get("max_loras"):
        terminal.note("note: adapters cost nothing here but with --scheduler-arg max_loras=N (vllm@v1).")
    if load.priorities is not None and not emulated.settings.get("by_priority"):
        terminal.note("note: priorities change nothing here but with --scheduler-arg by_priority=1 (vllm@v1).")
    if emulated.setup.scheduler == "tgi@3":
        for note in unkept(load, backends.get("tgi"), ServerInfo(max_total_tokens=length)):
            terminal.note(f"note: {note}; predicted so{', but for prompts of later turns' if load.sessions else ''}.")
    with rundir.measuring(directory, private=config.dataset is not None):
        with uncollected():
            outcomes = play(emulated, load, sent, warm_up)
        terminal.note(f"{len(outcomes)} requests in {time.perf_counter() - began:.2f} s of computing")
        run_manifest = manifest(config, load, emulated, run_id, len(outcomes) - len(warm_up), _prompts(config))
        del sent, emulated  # the report needs the memory
        written = write(directory, run_manifest, outcomes, shapes, load.turns(), RequestChoices.of(load))
    return cli.report_one(directory, "loadgen", written=written)


def _check(config: PredictOptions) -> None:
    """Raises ConfigError for what is not predicted."""
    if config.gpu is None:
        raise ConfigError("name the GPU to predict for, such as --gpu h200 (and --gpus 4).")
    if config.pooled:
        raise ConfigError(
            f"--backend {config.backend} is not predicted; measure it on the embedded server: loadgen run --launch "
            f"embedded --gpu {config.gpu}."
        )
    given = config.given(CLIENT_ONLY if config.plays_conversations else (*CLIENT_ONLY, "tokenizer"))
    if given:
        raise ConfigError(f"{flag(given[0])} is for real requests, and predict sends none; leave it out.")


def _paper(config: PredictOptions) -> int:
    if config != PredictOptions(out=config.out, seed=config.seed):
        raise ConfigError("--preset paper decides on load, servers and GPUs; only --out and --seed go with it.")
    from loadgen import summary
    from loadgen.document import files
    from servers.predict import paper, paper_page

    directory = config.out or Path("runs") / rundir.new_run_id()
    rundir.create(directory)
    began = time.perf_counter()
    results = paper.predict_all(config.seed)
    found = paper.summary(results, config.seed)
    terminal.note(f"{len(results)} runs in {time.perf_counter() - began:.0f} s of computing")
    page, json = paper_page.page(found, results, ["loadgen", *sys.argv[1:]]), found.as_json().decode()

    def write() -> None:
        files.save(directory, {"paper.json": msgspec.json.format(json, indent=1) + "\n"})
        files.write(directory / "paper.html", page, "paper.md", figures=True)

    summary.publish(directory, summary.rendered(page), write, json, unasked="")
    return exit_codes.OK


def drawn(config: Config) -> tuple[Load, Shapes]:
    """The load that a run with these options would send, and what its requests ask for. Raises ConfigError or
    WorkloadError."""
    backend = backends.get(config.kind)
    load = planned_load(config, backend)
    if load.trace is not None:
        load = load.within(config.max_model_len or models.find(config.model or "7b").max_position)
    if config.dataset is None:
        return load, load.shapes()
    dataset = read_dataset(config, backend)
    if not isinstance(dataset, Dataset):
        if not dataset.knows_lengths:
            raise ConfigError("the dataset's conversations are text, whose length is not known; name a --tokenizer.")
        turns = load.turns()
        assert turns is not None
        return load, dataset.played(turns)
    unknown = sum(dataset.shape(number).prompt_tokens == 0 for number in _looked_at(load, dataset))
    if unknown:
        raise ConfigError(
            f"{unknown} prompts of the dataset are text, whose length is not known; give token ids or prompt_tokens."
        )
    return load, dataset


class RequestChoices(NamedTuple):
    """What each request asks for, by its number: an adapter, empty for none, and a priority."""

    adapter: Callable[[int], str] = lambda number: ""
    priority: Callable[[int], int] = lambda number: 0

    @classmethod
    def of(cls, load: Load) -> RequestChoices:
        turns, chosen = load.turns(), cls()
        if load.adapters is not None:
            chosen = chosen._replace(adapter=_by_session(load.adapters.drawn(load.seed), turns))
        if load.priorities is not None:
            chosen = chosen._replace(priority=_by_session(load.priorities.drawn(load.seed), turns))
        return chosen


def _by_session(drawn: WeightedChoice[T], turns: Turns | None) -> Callable[[int], T]:
    return drawn.at if turns is None else lambda number: drawn.at(turns.place(number)[0])


def requests(load: Load, shapes: Shapes) -> list[ArrivingRequest] | Iterator[ArrivingRequest]:
    """As `_requests` has them, each with its adapter and its priority."""
    sent = _requests(load, shapes)
    if load.adapters is None and load.priorities is None:
        return sent
    adapter, priority = RequestChoices.of(load)
    named = (each._replace(adapter=adapter(number), priority=priority(number)) for number, each in enumerate(sent))
    return list(named) if isinstance(sent, list) else named


def _requests(load: Load, shapes: Shapes) -> list[ArrivingRequest] | Iterator[ArrivingRequest]:
    """Every request of a load, in the order of their numbers; those of a trace, and of a closed loop that time ends, as
    they are asked for. In a closed loop their times do not matter, nor do those of a session's later turns."""
    if load.streams is not None and load.duration_s is not None:
        numbers = itertools.count() if load.requests is None else range(load.requests)
        return (ArrivingRequest(0.0, *shapes.shape(number)[:3]) for number in numbers)
    due_s = load.due_ns() / 1e9 if load.streams is None else np.zeros(load.requests or 0)
    if (turns := load.turns()) is not None:
        due_s = np.repeat(due_s, np.diff(turns.first)[: len(due_s)])
    if isinstance(shapes, TraceShapes) and len(due_s) == len(shapes):
        arrivals = (
            ArrivingRequest(at_s, *shape[:3]) for at_s, shape in zip(map(float, due_s), shapes.in_common(), strict=True)
        )
        return arrivals if turns is None else list(arrivals)
    return [ArrivingRequest(at_s, *shapes.shape(number)[:3]) for number, at_s in enumerate(due_s.tolist())]


def filling(config: Config, load: Load, shapes: Shapes) -> list[ArrivingRequest]:
    """The warm-up that hands its slots over: its first requests ask for what is left of replies at some moment of a
    steady loop. Empty for one that drains, which leaves an idle server, as a prediction begins with."""
    if load.streams is None or config.drains_warmup or not load.hands_over(config.warmup):
        return []
    asked, slots = [shapes.shape(number) for number in range(config.warmup)], load.streams.last
    left = residual([shape.output_tokens for shape in asked[:slots]])
    outputs = (*left, *(shape.output_tokens for shape in asked[slots:]))
    return [ArrivingRequest(0.0, shape.prompt_tokens, tokens) for shape, tokens in zip(asked, outputs, strict=True)]


def longest_request_tokens(load: Load, shapes: Shapes, sent: list[ArrivingRequest] | Iterator[ArrivingRequest]) -> int:
    """Prompt and reply of the longest request, at the most. Raises WorkloadError where nothing bounds it."""
    if isinstance(sent, list):
        return max((arrival.prompt + arrival.output for arrival in sent), default=0)
    if isinstance(shapes, Dataset):
        return max(sum(shapes.shape(number)[:2]) for number in _looked_at(load, shapes))
    return load.longest_tokens()


def _looked_at(load: Load, dataset: Dataset) -> range:
    """The requests of a dataset whose lengths matter; where time ends a run, all that there are before one comes
    again."""
    return range(load.requests or len(dataset) if load.planned is None else load.planned)


def play(
    emulated: Emulated,
    load: Load,
    sent: list[ArrivingRequest] | Iterator[ArrivingRequest],
    warm_up: Sequence[ArrivingRequest] = (),
) -> list[Outcome]:
    """Raises EmulationError."""
    if (turns := load.turns()) is not None:
        assert isinstance(sent, list)  # time ends no sessions
        return simulate_sessions(emulated, sent, turns, load.streams)
    until_s = math.inf if load.duration_s is None else load.duration_s
    return simulate(emulated, sent, load.streams, until_s, load.cancels(), warm_up)


def _length(config: Config, longest: int) -> int:
    if config.max_model_len is not None and longest > config.max_model_len:
        raise ConfigError(f"--max-model-len is {config.max_model_len} and the longest request has {longest} tokens.")
    model = models.find(config.model or "7b")
    limit = model.max_position
    if limit is not None and longest > limit:
        raise ConfigError(f"the longest request has {longest} tokens and {model.name} ends at {limit}; lower it.")
    return config.max_model_len or max(4096, longest)


def _prompts(config: Config) -> int | None:
    return len(read_dataset(config, backends.get(config.kind))) if config.repeat_dataset else None


def write(
    directory: Path,
    run_manifest: rundir.Manifest,
    outcomes: list[Outcome],
    shapes: Shapes,
    turns: Turns | None,
    asked: RequestChoices | None = None,
) -> records.Recorded:
    """Writes the run directory, manifest and records, and gives back what would be read from it. Empties `outcomes`.
    turns: of sessions; asked: of requests. Raises RecordsError, before it writes, for times that no record
    can have."""
    wall_s = max((each.times_s[-1] if each.times_s else each.sent_s for each in outcomes), default=0.0)
    caches = run_manifest.emulation is None or run_manifest.emulation.prefix_caching
    asked, measured = asked or RequestChoices(), [each for each in outcomes if each.index >= 0]
    adapters = {shapes.id(each.index): name for each in measured if (name := asked.adapter(each.index))}
    priorities = {shapes.id(each.index): value for each in measured if (value := asked.priority(each.index))}
    del measured  # outcomes are let go of
    table = record_table(outcomes, shapes, turns, caches=caches)
    table = dataclasses.replace(table, adapters=adapters, priorities=priorities)
    gc.collect()  # empties Python's lists of freed objects as well: a few of them keep hundreds of MB from the system
    _give_back()
    rundir.write_manifest(directory, run_manifest)
    path = directory / "requests.jsonl"
    file = records.RecordsFile(
        path, run_manifest.run_id, run_manifest.version, 0, model=run_manifest.model, at_once=False
    )
    file.write_table(table)
    facts = records.ClientFacts(
        state="complete",
        wall_s=wall_s,
        cpu_s=0.0,
        cpu_peak_ratio=0.0,
        events=int(table.measured().events.sum()),
        connections=0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        loop_lag_p50_ms=0.0,
        loop_lag_p99_ms=0.0,
        loop_lag_max_ms=0.0,
    )
    file.close(facts)
    return table, [facts]


def record_table(
    outcomes: list[Outcome], shapes: Shapes, turns: Turns | None, *, caches: bool = True
) -> records.RequestTable:
    """Empties `outcomes`, which take more than twice the memory of the table. caches: whether the server keeps prompts;
    one that does not says of each prompt that others begin like that nothing of it was warm. Raises RecordsError."""
    count = len(outcomes)
    index, prompt, output, cached = (
        np.fromiter(map(attrgetter(name), outcomes), np.int64, count)
        for name in ("index", "prompt", "output", "cached_tokens")
    )
    begun_ns = np.rint(np.fromiter((each.sent_s for each in outcomes), np.float64, count) * 1e9).astype(np.int64)
    status = np.fromiter((-1 if each.status is None else each.status for each in outcomes), np.int64, count)
    failed = {each.index: each.dropped or f"status {each.status} (emulated)" for each in outcomes if each.status != 200}
    given_up = [each.abandoned for each in outcomes]
    tokens = _tokens(outcomes)
    numbers, warms = index.tolist(), index < 0
    ids = [shapes.id(number) if number >= 0 else number + int(warms.sum()) for number in numbers]
    came, sent = tokens.counts > 0, status != -1
    abandoned = np.fromiter(given_up, np.bool_, count)
    whole = came & ~abandoned
    session = turn = np.full(count, -1)
    if turns is not None:
        session, turn = np.array([turns.place(number) for number in numbers], np.int64).reshape(-1, 2).T
    shared_tokens, shares = _shared_tokens(shapes), (sent & ~warms).tolist()
    shared = [shared_tokens(number) if may else 0 for number, may in zip(numbers, shares, strict=True)]
    first_ns, last_ns = (np.where(came, 1000 * at_us, -1) for at_us in (tokens.first_us, tokens.last_us))
    if max(np.abs(begun_ns).max(initial=0), last_ns.max(initial=0)) > records.MOST_NS:
        raise records.RecordsError(f"This cannot be recorded: {records.FAR}.")
    return records.RequestTable(
        id=np.array(ids, np.int64),
        scheduled_ns=begun_ns,
        sent_ns=np.where(sent, begun_ns, -1),
        headers_ns=first_ns,
        first_token_ns=first_ns,
        last_token_ns=last_ns,
        done_ns=np.where(came, last_ns, begun_ns),
        prompt_tokens=np.where(whole, prompt, -1),
        output_tokens=np.where(whole, tokens.counts, -1),
        first_tokens=np.where(whole & (tokens.counts > 1), 1, -1),
        asked_prompt_tokens=prompt,
        asked_tokens=output,
        cached_tokens=np.where(whole & ((cached > 0) | (not caches and any(shared))), cached, -1),
        shared_tokens=np.array(shared, np.int64),
        session=session,
        turn=turn + 1,
        events=tokens.counts,
        status=status,
        outcome=np.select(
            [abandoned, status == 200, sent],
            [OUTCOMES.index("abandoned"), OUTCOMES.index("ok"), OUTCOMES.index("http_error")],
            OUTCOMES.index("dropped"),
        ).astype(np.int8),
        phase=np.where(warms, *map(records.PHASES.index, ("warmup", "measured"))).astype(np.int8),
        itl_us=tokens.gaps_us,
        itl_offsets=np.concatenate(([0], np.cumsum(np.maximum(tokens.counts - 1, 0)))),
        errors={shapes.id(number): why for number, why in failed.items() if number >= 0},
        afters={} if turns is None else {shapes.id(each): of for each in numbers if (of := turns.after(each))},
    )


class _Tokens(NamedTuple):
    """Of each request (n,) how many tokens came, and when the first and the last; and all gaps between them, flat.
    Times are rounded down to microseconds."""

    counts: NDArray[np.int64]
    first_us: NDArray[np.int64]
    last_us: NDArray[np.int64]
    gaps_us: NDArray[np.uint32]


def _tokens(outcomes: list[Outcome]) -> _Tokens:
    """Empties `outcomes`, so that they are let go of as the gaps grow. Raises RecordsError."""
    counts = np.fromiter((len(each.times_s) for each in outcomes), np.int64, len(outcomes))
    gaps_us = np.empty(int(np.maximum(counts - 1, 0).sum()), np.uint32)  # the system gives a page when it is written
    first_us, last_us = np.zeros_like(counts), np.zeros_like(counts)
    outcomes.reverse()  # a list is shortened at its end
    row = gap = 0
    while outcomes:
        together = outcomes[: -COUNTED_TOGETHER - 1 : -1]
        del outcomes[-COUNTED_TOGETHER:]
        times_us = np.floor(np.frombuffer(b"".join([each.times_s for each in together])) * 1e6).astype(np.int64)
        rows = row + np.flatnonzero(counts[row : row + len(together)])
        ends = np.cumsum(counts[rows])
        begins = ends - counts[rows]
        first_us[rows], last_us[rows] = times_us[begins], times_us[ends - 1]
        gaps = np.delete(np.diff(times_us), begins[1:] - 1)
        if gaps.max(initial=0) > records.MOST_GAP_US:
            raise records.RecordsError(
                f"This cannot be recorded: tokens of a reply come over {records.MOST_GAP_US / 1e6:.0f} s apart."
            )
        gaps_us[gap : gap + len(gaps)] = gaps
        row, gap = row + len(together), gap + len(gaps)
        del together
        _give_back()
    return _Tokens(counts, first_us, last_us, gaps_us)


def _give_back() -> None:
    """Gives memory that was freed back to the system: glibc keeps what is not at its heap's end, and others have no
    such call."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _shared_tokens(shapes: Shapes) -> Callable[[int], int]:
    if isinstance(shapes, TraceShapes):  # without its segments
        return shapes.shared_tokens
    return lambda number: shapes.shape(number).shared_tokens
