"""`loadgen predict`: a run that nobody made, in virtual time, written and reported like one that somebody did."""

from __future__ import annotations

import itertools
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from cyclopts import Parameter

import backends
from loadgen import cli, exit_codes, models, rundir, terminal
from loadgen.config import OUTPUT, Config, ConfigError, ModelledOptions, PlacementOptions, flag
from loadgen.load.datasets import Dataset
from loadgen.load.load import Load
from loadgen.load.sessions import Turns
from loadgen.load.shapes import Shape, Shapes, TraceShapes
from loadgen.option_types import names, offers, option
from loadgen.page import html
from loadgen.page.content import Page
from loadgen.plan import planned_load, read_dataset
from loadgen.rundir import records
from loadgen.server import embedded
from servers.simulator.build import Emulated, EmulationError, emulate
from servers.simulator.hardware import HardwareError
from servers.simulator.options import Hardware
from servers.simulator.virtual import Arrival, Outcome, manifest, simulate, simulate_sessions, uncollected

WRITTEN_TOGETHER = 1024  # requests


@offers(
    "backend", "model", "workload", "requests", "duration", "input_tokens", "output_tokens", "arrival", "concurrency",
    "prefix", "sessions", "turns", "think_time", "trace", "trace_format", "trace_speed", "trace_limit", "trace_from",
    "warmup", "dataset", "repeat_dataset", "tokenizer", "seed", "goodput", "out", *names(PlacementOptions),
    *(name for name in names(ModelledOptions) if name != "speed"),
)  # fmt: skip
class PredictOptions(Config):
    """Of `run`, without those of a client, of its wire and of a server that is started."""


CLIENT_ONLY = (  # of a client and its wire, and of real time: a prediction has none of them
    "vocab_size", "warmup_load", "stream", "workers", "on", "nodes", "transport", "connect", "kernel_timestamps",
    "api_key_env", "header", "ca", "insecure", "connect_timeout", "first_byte_timeout", "idle_timeout", "total_timeout",
    "metrics_port", "speed", "repeat",
)  # fmt: skip


def predict(
    config: Annotated[PredictOptions | None, Parameter(name="*")] = None,
    *,
    preset: Annotated[
        Literal["paper", "published"] | None,
        option(
            OUTPUT,
            "paper: Section VI of arXiv 2311.03687, its figures and what it states beside what is predicted; "
            "published: what others measured and published, beside what is predicted. They take --out and --seed only.",
        ),
    ] = None,
) -> int:
    """Predict what `run` would measure on GPUs that you need not have: the same load, computed in virtual time.

    Takes the options of `run`, less those of the client; --gpu says which GPU. Writes a run directory like that of a
    run, marked as emulated, and prints beside the numbers how far off the model was on real runs that it was not fitted
    to.
    """
    config = config or PredictOptions()
    if preset is not None:
        return _preset(config, preset)
    if config.gpu is None:
        raise ConfigError("name the GPU to predict for, such as --gpu h200 (and --gpus 4).")
    given = config.given(CLIENT_ONLY if config.plays_conversations else (*CLIENT_ONLY, "tokenizer"))
    if given:
        raise ConfigError(f"{flag(given[0])} is for real requests, and predict sends none; leave it out.")
    began = time.perf_counter()
    load, shapes = drawn(config)
    if load.left_out:
        source = "dataset" if load.trace is None else "trace"
        terminal.say(f"note: of the {source} these are not sent: {load.left_out}.")
    sent = requests(load, shapes)
    run_id = rundir.new_run_id()
    directory = config.out or Path("runs") / run_id
    try:
        hardware = Hardware(**embedded.modelled(config))
        length = _length(config, _longest_tokens(load, shapes, sent))
        emulated = emulate(hardware.setup(config.kind, embedded.model_place(config), length))
        for note in emulated.facts.notes:
            terminal.say(f"note: {note}")
        made = rundir.create(directory, private=config.dataset is not None)
        try:
            with uncollected():
                outcomes = _played(emulated, load, sent)
        except EmulationError:
            rundir.remove_if_empty(directory, made)
            raise
    except (EmulationError, HardwareError) as error:
        raise ConfigError(str(error)) from None
    terminal.say(f"{len(outcomes)} requests in {time.perf_counter() - began:.2f} s of computing")
    run_manifest = manifest(config, load, emulated, run_id, len(outcomes), _prompts(config))
    write(directory, run_manifest, outcomes, shapes, load.turns())
    del outcomes, sent  # the report reads the records again, and needs as much memory
    return cli.report_one(directory, "loadgen")


def _preset(config: PredictOptions, preset: Literal["paper", "published"]) -> int:
    if config != PredictOptions(out=config.out, seed=config.seed):
        raise ConfigError(f"--preset {preset} decides on load, servers and GPUs; only --out and --seed go with it.")
    directory = config.out or Path("runs") / rundir.new_run_id()
    rundir.create(directory)
    began = time.perf_counter()
    runs, markdown, json = (_paper if preset == "paper" else _published)(config.seed, directory)
    (directory / f"{preset}.json").write_bytes(msgspec.json.format(json, indent=1) + b"\n")
    (directory / f"{preset}.md").write_text(markdown, encoding="utf-8")
    terminal.say(markdown)
    terminal.say(f"{runs} runs in {time.perf_counter() - began:.0f} s of computing")
    terminal.say(f"{directory}/: " + ", ".join(sorted(path.name for path in directory.iterdir())))
    sys.stdout.write(json.decode() + "\n")
    return exit_codes.OK


def _paper(seed: int, directory: Path) -> tuple[int, str, bytes]:
    """Writes figures and page; how many runs, and what the two other files hold."""
    from servers.predict import paper, paper_figures, paper_page  # with matplotlib

    results = paper.predict_all(seed)
    summary = paper.summary(results, seed)
    paper_figures.draw(paper.load(), results, directory)
    _write_page(directory / "paper.html", paper_page.page(summary, results, _argv()))
    return len(results), paper.markdown(summary), summary.as_json()


def _published(seed: int, directory: Path) -> tuple[int, str, bytes]:
    """Writes table, figure and page; how many rows, and what the two other files hold."""
    from servers.predict import published, published_figure, published_page  # with matplotlib

    predicted = published.predict_all(seed, terminal.say)
    results = list(predicted.all())
    (directory / "published.csv").write_text(published.table_csv(results), encoding="utf-8")
    published_figure.draw(results, directory)
    _write_page(directory / "published.html", published_page.page(predicted, _argv()))
    return len(results), published.markdown(predicted), published.as_json(predicted, seed)


def _argv() -> list[str]:
    return ["loadgen", *sys.argv[1:]]


def _write_page(path: Path, page: Page) -> None:
    path.write_text(html.render(page), encoding="utf-8")


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


def requests(load: Load, shapes: Shapes) -> list[Arrival] | Iterator[Arrival]:
    """Every request of a load, in the order of their numbers; those of a closed loop that time ends as they are asked
    for. In a closed loop their times do not matter, nor do those of a session's later turns."""
    if load.streams is not None and load.duration_s is not None:
        numbers = itertools.count() if load.requests is None else range(load.requests)
        return (Arrival(0.0, *shapes.shape(number)[:3]) for number in numbers)
    due_s = load.due_ns() / 1e9 if load.streams is None else np.zeros(load.requests or 0)
    if (turns := load.turns()) is not None:
        due_s = np.repeat(due_s, np.diff(turns.first)[: len(due_s)])
    asked: Iterator[Shape] = (shapes.shape(number) for number in range(len(due_s)))
    if isinstance(shapes, TraceShapes) and len(due_s) == len(shapes):
        asked = shapes.in_common()
    return [Arrival(at_s, *shape[:3]) for at_s, shape in zip(due_s.tolist(), asked, strict=True)]


def _longest_tokens(load: Load, shapes: Shapes, sent: list[Arrival] | Iterator[Arrival]) -> int:
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


def _played(emulated: Emulated, load: Load, sent: list[Arrival] | Iterator[Arrival]) -> list[Outcome]:
    """Raises EmulationError."""
    if (turns := load.turns()) is not None:
        assert isinstance(sent, list)  # time ends no sessions
        return simulate_sessions(emulated, sent, turns, load.streams)
    return simulate(emulated, sent, load.streams, math.inf if load.duration_s is None else load.duration_s)


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
    directory: Path, run_manifest: rundir.Manifest, outcomes: list[Outcome], shapes: Shapes, turns: Turns | None
) -> None:
    """The run directory: manifest and records. turns: of sessions."""
    rundir.write_manifest(directory, run_manifest)
    path = directory / "requests.jsonl"
    file = records.RecordsFile(path, run_manifest.run_id, run_manifest.version, 0, at_once=False)
    for first in range(0, len(outcomes), WRITTEN_TOGETHER):
        for record in _records(outcomes[first : first + WRITTEN_TOGETHER], shapes, turns):
            file.write(record)
    file.close(
        records.ClientFacts(
            state="complete",
            wall_s=max((each.times_s[-1] if each.times_s else each.sent_s for each in outcomes), default=0.0),
            cpu_s=0.0,
            cpu_peak_ratio=0.0,
            events=sum(len(each.times_s) for each in outcomes),
            connections=0,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            loop_lag_p50_ms=0.0,
            loop_lag_p99_ms=0.0,
            loop_lag_max_ms=0.0,
        )
    )


def _records(outcomes: list[Outcome], shapes: Shapes, turns: Turns | None) -> Iterator[records.Record]:
    """Their times are rounded down to microseconds together: for each by itself it would take longer."""
    times_s = np.concatenate([np.frombuffer(each.times_s) for each in outcomes])
    micros = (times_s * 1e6).astype(np.int64)
    gaps_us = np.diff(micros, append=0).tolist()
    times_us = micros.tolist()
    begin = 0
    for outcome in outcomes:
        end = begin + len(outcome.times_s)
        record = _record(outcome, shapes, turns)
        if end > begin:
            first_ns, last_ns = times_us[begin] * 1000, times_us[end - 1] * 1000
            record.headers_ns = record.first_token_ns = first_ns
            record.last_token_ns = record.done_ns = last_ns
            record.prompt_tokens = outcome.prompt
            record.cached_tokens = outcome.cached_tokens or None
            record.output_tokens = record.events = end - begin
            record.itl_us = gaps_us[begin : end - 1]
        yield record
        begin = end


def _record(outcome: Outcome, shapes: Shapes, turns: Turns | None) -> records.Record:
    """But for its tokens."""
    sent_ns = round(outcome.sent_s * 1e9)
    record = records.Record(
        id=shapes.id(outcome.index),
        scheduled_ns=sent_ns,
        asked_prompt_tokens=outcome.prompt,
        asked_tokens=outcome.output,
        outcome="ok",
    )
    if turns is not None:
        record.session, turn = turns.place(outcome.index)
        record.turn = turn + 1
    if outcome.dropped is not None:
        record.outcome, record.error, record.done_ns = "dropped", outcome.dropped, sent_ns
        return record
    record.sent_ns, record.status = sent_ns, outcome.status
    if isinstance(shapes, TraceShapes):  # without its segments
        record.shared_tokens = shapes.shared_tokens(outcome.index) or msgspec.UNSET
    else:
        record.shared_tokens = shapes.shape(outcome.index).shared_tokens or msgspec.UNSET
    if outcome.status != 200:
        record.outcome, record.error = "http_error", f"status {outcome.status} (emulated)"
        record.done_ns = sent_ns
        return record
    return record
