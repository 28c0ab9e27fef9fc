"""The whole truth table, and what it asks of the records of one case."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.report import build
from loadgen.rundir.records import Record, table
from tests.faults import cases_connections, cases_http, cases_stream
from tests.faults.case import Case, Expected
from tests.faults.play import TRANSPORTS, Seen
from tests.faults.protocols import OUTPUT_TOKENS
from tests.faults.server import LAST, STRUCK
from tests.loadgen.tables import facts, manifest

CASES: tuple[Case, ...] = (*cases_http.CASES, *cases_connections.CASES, *cases_stream.CASES)
PLAYS = [(case, protocol, transport) for case in CASES for protocol in case.protocols for transport in TRANSPORTS]
OF_THE_WORK = {"OUTPUT_LENGTH", "PROMPT_LENGTH", "NO_TOKEN_COUNT", "CACHED_TOKENS", "MERGED_EVENTS", "OTHER_MODEL"}


def expected(case: Case, transport: str) -> Expected:
    return case.aiohttp if transport == "aiohttp" and case.aiohttp is not None else case.expected


def differences(case: Case, transport: str, seen: Seen) -> list[str]:
    """What is not as the table has it, a line each."""
    want = expected(case, transport)
    found = [*of_the_struck(want, seen.records[STRUCK]), *_of_the_others(case, seen.records)]
    if seen.tries != want.tries or (seen.records[STRUCK].retried is True) != (want.tries > 1):
        found.append(f"tries: {seen.tries}, not {want.tries}; retried: {seen.records[STRUCK].retried}")
    return found


def of_the_struck(want: Expected, record: Record) -> Iterator[str]:
    if record.outcome != want.outcome:
        yield f"outcome: {record.outcome} ({record.error}), not {want.outcome}"
    elif want.error not in (record.error or ""):
        yield f"message: {record.error!r} without {want.error!r}"
    elif (record.error is None) != (want.outcome == "ok"):
        yield f"message: {record.error!r}"
    if record.error is not None and (not record.error.isprintable() or len(record.error) > 400):
        yield f"message: {record.error!r} is not one printable line"
    for name in ("tokens", "events", "prompt_tokens", "cached_tokens"):
        count, wanted = getattr(record, "output_tokens" if name == "tokens" else name), getattr(want, name)
        if wanted is not None and count != wanted:
            yield f"{name}: {count}, not {wanted}"
    if record.outcome == "ok":
        found = {finding.code for finding in build.build(manifest(), table([record]), [facts()]).verdict.findings}
        if found & OF_THE_WORK != set(want.findings):
            yield f"findings: {sorted(found & OF_THE_WORK)}, not {sorted(want.findings)}"


def _of_the_others(case: Case, records: dict[int, Record]) -> Iterator[str]:
    """Each neighbour is ok and has its exact counts, whatever became of the struck request."""
    if set(records) != set(range(LAST + 1)):
        yield f"records: {sorted(records)}"
    events = 0 if case.whole else OUTPUT_TOKENS
    for number, record in records.items():
        counts = (record.outcome, record.output_tokens, record.events, record.error)
        if number != STRUCK and counts != ("ok", OUTPUT_TOKENS, events, None):
            yield f"neighbour {number}: {counts}"
