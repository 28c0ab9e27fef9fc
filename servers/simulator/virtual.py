"""A run in virtual time: the same engine as behind the wire, as fast as it can be computed; and the manifest of a run
directory for what was computed and not sent."""

from __future__ import annotations

import heapq
import math
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from loadgen import rundir
from loadgen.config import Config
from loadgen.load.arrivals import Streams
from loadgen.load.load import Load
from servers.schedulers import Rejected, Sequence
from servers.simulator.build import Emulated, EmulationError

URL = "virtual time"  # in the place of an address


class Arrival(NamedTuple):
    """A request that is sent at `at_s`. `segments`: what it shares, as of servers.schedulers.Sequence."""

    at_s: float
    prompt: int
    output: int
    segments: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Outcome:
    """One request. `times_s`: when each of its tokens came; empty when the server refused it with `status`.
    `cached_tokens`: of its prompt, what the prefix cache had when it was first scheduled."""

    index: int
    prompt: int
    output: int
    sent_s: float
    times_s: array[float] = field(default_factory=lambda: array("d"))
    status: int = 200
    cached_tokens: int = 0


def simulate(
    emulated: Emulated, arrivals: Iterable[Arrival | tuple[float, int, int]], streams: Streams | None = None
) -> list[Outcome]:
    """Runs all of `arrivals`, or (seconds, prompt tokens, output tokens), in order of time. In a closed loop of
    `streams` their times do not matter: the next is sent when one has ended, or when a ramp begins a stream. A token
    has come when the server sent it; the way to the client is a part of the front end's latency. Raises EmulationError
    where the server keeps a request and never ends it."""
    outcomes: list[Outcome] = []
    feed = (Arrival(*arrival) for arrival in arrivals)
    # when each stream of a closed loop is free: an ascending list is a heap
    freed = [] if streams is None else [streams.start_s(stream) for stream in range(streams.most)]
    going = len(freed)

    def deliver(emits: list[Sequence], at_s: float, gap_s: float) -> None:
        for sequence in emits:
            outcomes[sequence.index].times_s.append(at_s)
            if sequence.emitted == sequence.output:
                outcomes[sequence.index].cached_tokens = sequence.cached
                if streams is not None:
                    heapq.heappush(freed, at_s)
            at_s += gap_s

    engine = emulated.engine(deliver)

    def send(at_s: float, arrival: Arrival) -> None:
        sequence = Sequence(len(outcomes), *arrival[1:])
        outcome = Outcome(sequence.index, sequence.prompt, sequence.output, at_s)
        outcomes.append(outcome)
        try:
            engine.submit(sequence, at_s)
        except Rejected as refused:
            outcome.status = refused.status
            if streams is not None:
                heapq.heappush(freed, at_s)

    if streams is None:
        for arrival in feed:
            send(arrival.at_s, arrival)
    else:
        for arrival in feed:
            while True:
                while not freed or engine.next_s() < freed[0]:
                    if engine.next_s() == math.inf:
                        raise _stuck(outcomes)
                    engine.advance(engine.next_s())
                at_s = max(heapq.heappop(freed), engine.now_s)
                if streams.last >= streams.first or going <= streams.at(at_s):
                    break
                going -= 1  # the ramp goes down, and this stream ends
            send(at_s, arrival)
    engine.advance(math.inf)
    if any(map(_lacks, outcomes)):
        raise _stuck(outcomes)
    return outcomes


def _lacks(outcome: Outcome) -> bool:
    return len(outcome.times_s) < outcome.output and outcome.status == 200


def _stuck(outcomes: Iterable[Outcome]) -> EmulationError:
    never = list(filter(_lacks, outcomes))
    longest = max(never, key=lambda each: each.prompt + each.output)
    return EmulationError(
        f"this server never ends {len(never)} of the requests, such as {longest.prompt} tokens in and {longest.output} "
        "out; change its --scheduler-arg settings or --max-running."
    )


def bounds(outcomes: Iterable[Outcome]) -> Iterator[tuple[float, float, float]]:
    """(sent, first token, last token) of those that were served, in seconds."""
    for outcome in outcomes:
        if outcome.times_s:
            yield outcome.sent_s, outcome.times_s[0], outcome.times_s[-1]


def manifest(
    config: Config, load: Load, emulated: Emulated, run_id: str, requests: int, dataset_prompts: int | None = None
) -> rundir.Manifest:
    """Of the command that is running, for what `emulated` would do with so many requests of `load`."""
    return rundir.Manifest(
        run_id=run_id,
        version=rundir.package_version(),
        started_unix_s=time.time(),
        argv=["loadgen", *sys.argv[1:]],
        config=config.as_dict(),
        backend=config.kind,
        model=emulated.setup.model.name,
        url=URL,
        emulated=True,
        server_version=emulated.setup.scheduler,
        requests_planned=requests,
        arrival=load.when,
        left_out=load.left_out,
        phases=tuple(load.phases()),
        machine=rundir.this_machine(),
        dataset_prompts=dataset_prompts,
        emulation=emulated.facts,
    )
