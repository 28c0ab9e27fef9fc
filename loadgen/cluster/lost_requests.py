"""The requests that a lost machine did not finish, or that never came home: records whose outcome is `node_lost`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import backends
from loadgen.client.engine import LiveCounters
from loadgen.plan import ClientPlan
from loadgen.rundir import records
from loadgen.rundir.records import Record, RecordsFile

ERROR = "the machine that was to send it was lost"


def write(
    path: Path, plan: ClientPlan, shards: int, shares: range, snapshots: Sequence[LiveCounters], t0_ns: int
) -> None:
    """Writes a record for each request of `shares` that has none in the directory of `path`. Of a closed loop those
    that the last snapshots counted as begun: when they were due is not known, and is that snapshot's time."""
    try:
        table, _ = records.read(path.parent)
        home = set(table.measured().id.tolist())
    except records.RecordsError:
        home = set()
    job = plan.job
    file = RecordsFile(path, job.run_id, job.version, t0_ns, model=job.model, at_once=False)
    for record in _begun(plan, shards, shares, snapshots):
        if record.id not in home:
            file.write(record)
    file.abandon()


def _begun(plan: ClientPlan, shards: int, shares: range, snapshots: Sequence[LiveCounters]) -> Iterator[Record]:
    job = plan.job
    workload = plan.prompts.build(backends.get(plan.backend), job.load, job.warmup)
    due_ns, closed = job.load.due_ns(), job.load.streams is not None
    for place, share in enumerate(shares):
        seen = snapshots[place] if place < len(snapshots) else None
        numbers = plan.share(share, shards).job.numbers()
        if closed:
            begun = 0 if seen is None else seen.done + seen.in_flight
            asked, at_ns = list(itertools.islice(numbers, begun)), 0 if seen is None else round(seen.elapsed_s * 1e9)
        else:
            asked, at_ns = list(itertools.takewhile(lambda number: number < len(due_ns), numbers)), 0
        for number in asked:
            first = number if workload.turns is None else workload.turns.begin(number)
            count = 1 if workload.turns is None else workload.turns.count(number)
            for turn in range(count):
                shape = workload.own(first + turn)
                record = Record(
                    id=workload.id(first + turn),
                    scheduled_ns=at_ns if closed else int(due_ns[number]),
                    asked_prompt_tokens=workload.prompt("measured", first + turn).n_tokens,
                    asked_tokens=shape.output_tokens,
                    outcome="node_lost",
                    error=ERROR,
                )
                if workload.turns is not None:
                    record.session, record.turn = number, turn + 1
                yield record
