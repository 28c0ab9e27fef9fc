"""`loadgen serve --fault` and our own client: each kind that is offered, and what a client that notices makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.serve.faults import KINDS, UNKNOWN
from tests.faults import served, truth
from tests.faults.protocols import OUTPUT_TOKENS
from tests.servers.reader import running

CASES = [
    (dialect, backend, kind)
    for dialect, backends in served.DIALECTS.items()
    for backend in backends
    for kind in served.EXPECTED
    if kind not in UNKNOWN.get(dialect, ())
]


@pytest.mark.processes
@pytest.mark.parametrize(("dialect", "backend", "kind"), CASES)
def test_each_fault_is_noticed(tmp_path: Path, dialect: str, backend: str, kind: str) -> None:
    fault = f"{kind.replace('STATUS', '503')}:@{served.STRUCK + 1}"
    with running(tmp_path, dialect, fault, ttft_ms=1, itl_ms=1) as server:
        records = served.ask(server.server.url, backend, tmp_path)
    assert sorted(records) == list(range(served.REQUESTS))
    assert not list(truth.of_the_struck(served.EXPECTED[kind], records.pop(served.STRUCK)))
    for record in records.values():
        assert (record.outcome, record.output_tokens, record.events) == ("ok", OUTPUT_TOKENS, OUTPUT_TOKENS)


def test_all_that_the_server_offers_are_tested() -> None:
    assert set(KINDS) - set(served.EXPECTED) == {"die"}  # its test is with the server's own
    assert set(served.EXPECTED) <= set(KINDS)
