"""The records of a run: one JSON line a request while it runs, numpy columns afterwards.

The file is the only source of every number that is reported: a run reads its own file back, so `loadgen report` on
the same directory, or on what a killed run left, gives the same numbers. Times are monotonic nanoseconds since the
start of the run (t = 0 is when the schedule begins); null, and -1 in the columns, means that it never happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA = "loadgen.requests/1"

OUTCOMES = (
    "ok",  # complete reply
    "http_error",  # a status other than 200
    "refused",  # no connection
    "reset",  # the connection broke before or within the reply
    "timeout",  # connect, first byte, idle or total
    "truncated",  # the reply ended cleanly but incomplete
    "protocol_error",  # bytes that the protocol does not allow
    "stream_error",  # an error inside a 200 reply
    "cancelled",  # in flight when the run was stopped
    "dropped",  # due, but never sent
)
PHASES = ("warmup", "measured")


class Record(msgspec.Struct, kw_only=True):
    """One request. `events` carried output; `itl_us` are the gaps between them, so len(itl_us) == events - 1.

    A gap is the difference of two arrival times, each rounded down to the microsecond since the run's start, so gaps add
    up without drift. Events that arrived in one read of the socket share its stamp: their gap is exactly 0.
    """

    id: int
    scheduled_ns: int
    sent_ns: int | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    done_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    asked_prompt_tokens: int
    asked_tokens: int
    cached_tokens: int | None = None
    events: int = 0
    status: int | None = None
    outcome: str
    phase: str = "measured"
    error: str | None = None
    itl_us: Sequence[int] = ()


class Header(msgspec.Struct, kw_only=True):
    """First line of requests.jsonl."""

    schema: str = SCHEMA
    run_id: str
    version: str


class ClientFacts(msgspec.Struct, kw_only=True):
    """What one client process saw of itself: the last line it writes, missing when it was killed.

    The window is from the first measured request due to the last reply. Lags are milliseconds.
    """

    state: str  # complete | interrupted
    wall_s: float
    cpu_s: float
    cpu_peak_ratio: float  # busiest second, 1.0 = one core
    peak_rss_bytes: int
    events: int
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    connections: int
    connect_p50_ms: float | None = None
    connect_max_ms: float | None = None
    receive_lag_p50_ms: float | None = None  # read stamp minus kernel stamp, with --kernel-timestamps
    receive_lag_p99_ms: float | None = None
    receive_lag_max_ms: float | None = None


class Footer(msgspec.Struct, kw_only=True):
    client: ClientFacts


class RecordsError(ValueError):
    """A records file that cannot be read. The message names the file and the line."""


@dataclass(frozen=True)
class Table:
    """The requests of one run as columns, in order of id. Shapes: (n,) except `itl_us`, flat, cut by `itl_offsets` (n+1,)."""

    id: NDArray[np.int64]
    scheduled_ns: NDArray[np.int64]
    sent_ns: NDArray[np.int64]
    headers_ns: NDArray[np.int64]
    first_token_ns: NDArray[np.int64]
    last_token_ns: NDArray[np.int64]
    done_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    asked_prompt_tokens: NDArray[np.int64]
    asked_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    events: NDArray[np.int64]
    status: NDArray[np.int64]
    outcome: NDArray[np.int8]  # index into OUTCOMES
    phase: NDArray[np.int8]  # index into PHASES
    itl_us: NDArray[np.uint32]
    itl_offsets: NDArray[np.int64]
    errors: dict[int, str]  # request id -> what went wrong

    def __len__(self) -> int:
        return len(self.id)

    @property
    def ok(self) -> NDArray[np.bool_]:
        return self.outcome == 0

    def select(self, mask: NDArray[np.bool_]) -> Table:
        """The rows where `mask` (n,) holds."""
        counts = np.diff(self.itl_offsets)
        columns = {name: getattr(self, name)[mask] for name in COLUMNS}
        ids = set(columns["id"].tolist())
        return Table(
            **columns,
            itl_us=self.itl_us[np.repeat(mask, counts)],
            itl_offsets=np.concatenate(([0], np.cumsum(counts[mask]))).astype(np.int64),
            errors={key: text for key, text in self.errors.items() if key in ids},
        )

    def measured(self) -> Table:
        return self.select(self.phase == PHASES.index("measured"))


_INTEGERS = (
    "id", "scheduled_ns", "sent_ns", "headers_ns", "first_token_ns", "last_token_ns", "done_ns", "prompt_tokens",
    "output_tokens", "asked_prompt_tokens", "asked_tokens", "cached_tokens", "events", "status",
)  # fmt: skip
COLUMNS = (*_INTEGERS, "outcome", "phase")


def table(records: Iterable[Record]) -> Table:
    """Columns from records in any order. Raises ValueError for an outcome or phase outside the closed lists."""
    rows = sorted(records, key=lambda record: (record.phase != "warmup", record.id))
    columns: dict[str, NDArray[np.int64]] = {}
    for name in _INTEGERS:
        values = (getattr(row, name) for row in rows)
        columns[name] = np.fromiter((-1 if value is None else value for value in values), np.int64, len(rows))
    counts = [len(row.itl_us) for row in rows]
    flat = [np.asarray(row.itl_us, np.uint32) for row in rows if row.itl_us]
    return Table(
        **columns,
        outcome=np.array([OUTCOMES.index(row.outcome) for row in rows], np.int8),
        phase=np.array([PHASES.index(row.phase) for row in rows], np.int8),
        itl_us=np.concatenate(flat) if flat else np.empty(0, np.uint32),
        itl_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        errors={row.id: row.error for row in rows if row.error},
    )


class RecordsFile:
    """Appends records to a JSONL file; every line is with the kernel when `write` returns, so kill -9 loses none."""

    def __init__(self, path: Path, run_id: str, version: str) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._file = path.open("xb", buffering=0)
        self._line(Header(run_id=run_id, version=version))

    def _line(self, value: msgspec.Struct) -> None:
        self._file.write(self._encode(value) + b"\n")

    def write(self, record: Record) -> None:
        self._line(record)

    def close(self, client: ClientFacts) -> None:
        self._line(Footer(client=client))
        self._file.close()


def read(directory: Path) -> tuple[Table, list[ClientFacts]]:
    """The table of a run directory and what each client process said of itself (none for a killed one).

    Reads `requests.jsonl` and, where workers were killed before they were merged, their `requests.*.jsonl`. A last
    line that a kill cut in two is left out; any other damage raises RecordsError.
    """
    paths = sorted(directory.glob("requests*.jsonl"))
    if not paths:
        raise RecordsError(f"{directory} holds no requests.jsonl; is it a run directory?")
    records: list[Record] = []
    facts: list[ClientFacts] = []
    record_of = msgspec.json.Decoder(Record).decode
    for path in paths:
        lines = path.read_bytes().split(b"\n")
        unfinished = lines.pop()  # b"" after a complete last line
        try:
            header = msgspec.json.decode(lines[0] if lines else unfinished, type=Header)
        except msgspec.DecodeError as error:
            raise RecordsError(f"{path} does not begin with a {SCHEMA} header: {error}") from None
        if header.schema != SCHEMA:
            raise RecordsError(f"{path} has schema {header.schema!r}, this version reads {SCHEMA!r}")
        for number, line in enumerate(lines[1:], 2):
            try:
                if line.startswith(b'{"client":'):
                    facts.append(msgspec.json.decode(line, type=Footer).client)
                else:
                    records.append(record_of(line))
            except msgspec.DecodeError as error:
                raise RecordsError(f"{path} line {number} is not a record: {error}") from None
    return table(records), facts


def merge(directory: Path) -> None:
    """Joins the workers' `requests.N.jsonl` into `requests.jsonl`, line for line, and removes them."""
    parts = sorted(directory.glob("requests.*.jsonl"))
    joined = directory / "requests.jsonl.part"
    with joined.open("wb") as out:
        for number, part in enumerate(parts):
            header, _, rest = part.read_bytes().partition(b"\n")
            out.write((header + b"\n" if number == 0 else b"") + rest)
    joined.rename(directory / "requests.jsonl")
    for part in parts:
        part.unlink()
