"""What has no end is given up, before it takes memory without end."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from loadgen import trace
from loadgen.client.connection import HEADER_LIMIT_BYTES
from tests.fuzz.targets import backend_of, exchanged

LONG = 2 * HEADER_LIMIT_BYTES // 1000


@pytest.mark.parametrize(
    "unit",
    [b"X-A: " + b"a" * 993 + b"\r\n", b"a" * 1000, b"HTTP/1.1 100 Continue\r\n\r\n" * 40],
    ids=["lines", "one line", "1xx"],
)
def test_headers_without_end(unit: bytes) -> None:
    start = b"" if unit.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\nA: "
    assert exchanged(backend_of("vllm"), [start, *[unit] * LONG])[0] == "protocol_error"


def test_a_packed_trace_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_BYTES", 1000)
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(b" " * 100_000))
    with pytest.raises(trace.TraceError, match="when it is unpacked"):
        trace.read(path)


@pytest.mark.parametrize("times", ['"ts": "nan", "dur": 1', '"ts": 0, "dur": "inf"', '"ts": 0, "dur": -1'])
def test_a_trace_whose_times_are_none(times: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{{"ph": "X", "name": "a", "cat": "kernel", {times}}}]}}')
    with pytest.raises(trace.TraceError, match="an event begins at"):
        trace.read(path)
