"""The records of a run: one JSON line a request while it runs, numpy columns afterwards.

The files (`parts` has their names) are the only source of every number that is reported: a run reads its own files
back, so `loadgen report` on the same directory, or on what a killed run left, gives the same numbers. A prediction has
as columns already what would be read, and writes its files from them. Times are monotonic nanoseconds since the start
of the run (t = 0 is when the schedule begins); null, and -1 in the columns, means that it never happened.

Reading is incremental and never holds the records as objects: a table is 154 bytes a request and 4 bytes a gap, and
reading one that finished nearly in order takes little more.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import lzma
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from backends import foreign_files
from backends.exit_codes import UserError
from backends.protocol import ServerRecord
from backends.untrusted import UNDECODABLE, printable, reason, without_secrets
from loadgen.rundir import pace, parts, replace, replacing
from loadgen.rundir.outcomes import OUTCOMES
from loadgen.rundir.parts import JOINED, OF_THE_RUN, RecordsPart

SCHEMA = "loadgen.requests/1"

PHASES = ("warmup", "measured")
TICK_NS = 10_000_000  # how often a client takes its event loop's lag: a stall began up to that before it is seen to

MOST_TURNS = 1 << 31  # of a session
_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # as a column takes it
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Turn = Annotated[int, msgspec.Meta(ge=1, le=MOST_TURNS)]


class Record(msgspec.Struct, kw_only=True):
    """One request. `events` carried output; `itl_us` are the gaps between them, so len(itl_us) == events - 1.

    A gap is the difference of two arrival times, each rounded down to the microsecond since the run's start, so gaps
    add up without drift. Events that arrived in one read of the socket share its stamp: their gap is exactly 0.
    first_tokens: as `pace` has it; without it the record is of an older version. answer_ns: the first event of the
    answer, where reasoning that is told apart came before it.
    """

    id: _Count
    scheduled_ns: int
    sent_ns: int | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    done_ns: int | None = None
    prompt_tokens: _Count | None = None
    output_tokens: _Count | None = None
    first_tokens: _Count | msgspec.UnsetType | None = msgspec.UNSET
    answer_ns: int | msgspec.UnsetType = msgspec.UNSET
    asked_prompt_tokens: _Count
    asked_tokens: _Count
    cached_tokens: _Count | None = None
    events: _Count = 0
    status: _Count | None = None
    outcome: str
    phase: str = "measured"
    error: str | None = None
    server: ServerRecord | msgspec.UnsetType = msgspec.UNSET  # by its own clock
    model: str | msgspec.UnsetType = msgspec.UNSET  # that the reply names, where it is not the one asked for
    adapter: str | msgspec.UnsetType = msgspec.UNSET  # of the model, that was asked for
    reasoning_tokens: _Count | msgspec.UnsetType = msgspec.UNSET  # of the output, thought before the answer
    priority: _Whole | msgspec.UnsetType = msgspec.UNSET  # that was asked for
    retried: bool | msgspec.UnsetType = msgspec.UNSET  # sent twice: its first connection, a reused one, had died
    resent_ns: Sequence[int] | msgspec.UnsetType = (
        msgspec.UNSET
    )  # when it was sent again, after a server that had no room; sent_ns is the first time
    shared_tokens: _Count | msgspec.UnsetType = msgspec.UNSET  # of the prompt, sent before by an earlier request
    session: _Count | msgspec.UnsetType = msgspec.UNSET  # of a conversation, and which turn of it, the first being 1
    turn: _Turn | msgspec.UnsetType = msgspec.UNSET
    after: Sequence[_Turn] | msgspec.UnsetType = msgspec.UNSET  # turns that it waited for, if not the one before it
    items: _Count | msgspec.UnsetType = msgspec.UNSET  # texts that were to be answered, each with a vector or a score
    itl_us: Sequence[int] = ()


class Header(msgspec.Struct, kw_only=True):
    """First line of every file of records."""

    schema: str = SCHEMA
    run_id: str
    version: str
    t0_monotonic_ns: int  # the machine's monotonic clock at t = 0, to lay other processes' stamps beside ours
    model: str = ""  # that was asked for; empty in files of older versions


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
    stalls: tuple[tuple[float, float], ...] = ()  # when its event loop stood still: from, to, in seconds of the run
    steal_ratio: float | None = None  # of this machine's CPU time, what its hypervisor gave to others meanwhile
    busy_cores: float | None = None  # of this machine in the mean, whoever used them
    cores: int | None = None  # of this machine


class Footer(msgspec.Struct, kw_only=True):
    client: ClientFacts


class RecordsError(UserError, ValueError):
    """A records file that cannot be read. The message names the file and the line."""


@dataclass(frozen=True, eq=False)
class RequestTable:
    """The requests of one run as columns: warm-up first, then in order of id.

    Shapes: (n,) except `itl_us`, flat, cut by `itl_offsets` (n+1,), which begins at 0.
    """

    id: NDArray[np.int64]
    scheduled_ns: NDArray[np.int64]
    sent_ns: NDArray[np.int64]
    headers_ns: NDArray[np.int64]
    first_token_ns: NDArray[np.int64]
    last_token_ns: NDArray[np.int64]
    done_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    first_tokens: NDArray[np.int64]  # -1: the reply's pace is not known
    asked_prompt_tokens: NDArray[np.int64]
    asked_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    shared_tokens: NDArray[np.int64]  # 0 where the record has none
    session: NDArray[np.int64]  # -1 where the request is no turn of a session
    turn: NDArray[np.int64]  # of its session, from 1; 0 where it is none
    events: NDArray[np.int64]
    status: NDArray[np.int64]
    outcome: NDArray[np.int8]  # index into OUTCOMES
    phase: NDArray[np.int8]  # index into PHASES
    itl_us: NDArray[np.uint32]
    itl_offsets: NDArray[np.int64]
    warmup_error: str | None = None  # outcome and error of the first warm-up request that failed
    # by the id of a measured request that has it: its fields as `BY_ID` says
    errors: dict[int, str] = field(default_factory=dict)
    retried: dict[int, bool] = field(default_factory=dict)
    resent_ns: dict[int, Sequence[int]] = field(default_factory=dict)
    server: dict[int, ServerRecord] = field(default_factory=dict)
    answers_ns: dict[int, int] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=dict)
    afters: dict[int, Sequence[int]] = field(default_factory=dict)
    reasoning: dict[int, int] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    items: dict[int, int] = field(default_factory=dict)
    odd: dict[str, tuple[int, int]] = field(default_factory=dict)  # what contradicts itself -> first id, how many
    tells_pace: bool = True  # some record has first_tokens; else they are inferred

    def __len__(self) -> int:
        return len(self.id)

    @property
    def ok(self) -> NDArray[np.bool_]:
        ok: NDArray[np.bool_] = self.outcome == _OUTCOME_CODE["ok"]
        return ok

    @property
    def abandoned(self) -> NDArray[np.bool_]:
        """Those that the client gave up, as it was to: neither ok nor failed."""
        abandoned: NDArray[np.bool_] = self.outcome == _OUTCOME_CODE["abandoned"]
        return abandoned

    def select(self, mask: NDArray[np.bool_]) -> RequestTable:
        """The rows where `mask` (n,) holds: as a view where they follow each other, else as a copy."""
        chosen = np.flatnonzero(mask)
        if len(chosen) and chosen[-1] - chosen[0] < len(chosen):
            return self.rows(int(chosen[0]), int(chosen[-1]) + 1)
        counts = np.diff(self.itl_offsets)
        offsets = np.concatenate(([0], np.cumsum(counts[mask]))).astype(np.int64)
        return self._part(mask, self.itl_us[np.repeat(mask, counts)], offsets)

    def rows(self, first: int, last: int) -> RequestTable:
        """Rows `first` to `last` (exclusive), as a view."""
        begin, end = int(self.itl_offsets[first]), int(self.itl_offsets[last])
        offsets = self.itl_offsets[first : last + 1] - begin
        return self._part(slice(first, last), self.itl_us[begin:end], offsets)

    def _part(
        self, chosen: slice | NDArray[np.bool_], itl_us: NDArray[np.uint32], itl_offsets: NDArray[np.int64]
    ) -> RequestTable:
        by_id = {name: of for name in BY_ID if (of := getattr(self, name))}
        kept = self.id[chosen].tolist() if by_id else ()
        held: Mapping[str, Any] = {
            **{name: getattr(self, name)[chosen] for name in COLUMNS},
            **{name: {key: of[key] for key in kept if key in of} for name, of in by_id.items()},
        }
        return RequestTable(
            **held,
            itl_us=itl_us,
            itl_offsets=itl_offsets,
            warmup_error=self.warmup_error,
            odd=self.odd,
            tells_pace=self.tells_pace,
        )

    def blocks(self) -> Iterator[RequestTable]:
        """The rows in views of a few thousand, for work whose arrays would be larger than the gaps themselves."""
        for first in range(0, len(self), ROWS_A_BLOCK):
            yield self.rows(first, min(first + ROWS_A_BLOCK, len(self)))

    def arrivals_ns(self, row: int) -> NDArray[np.int64]:
        """When each event of a streamed reply arrived, rounded down to the microsecond; shape (events,)."""
        gaps_us = self.itl_us[self.itl_offsets[row] : self.itl_offsets[row + 1]]
        micros: NDArray[np.int64] = np.cumsum([self.first_token_ns[row] // 1000, *gaps_us], dtype=np.int64)
        return micros * 1000

    def measured(self) -> RequestTable:
        """The requests that count, as a view."""
        return self.rows(int((self.phase != _PHASE_CODE["measured"]).sum()), len(self))

    def written(self) -> Iterator[Any]:
        """The rows as records are written; of a warm-up without its errors."""
        columns = {name: _fields(name, getattr(self, name)) for name in _INTEGERS}
        columns["outcome"] = [OUTCOMES[code] for code in self.outcome.tolist()]
        columns["phase"] = [PHASES[code] for code in self.phase.tolist()]
        gaps_us, offsets = self.itl_us.tolist(), self.itl_offsets.tolist()
        columns["itl_us"] = [gaps_us[begin:end] for begin, end in itertools.pairwise(offsets)]
        for name in (*BY_ID.values(), *(() if self.tells_pace else ("first_tokens",))):
            columns[name] = [None if name == "error" else msgspec.UNSET] * len(self)
        for name, field_name in BY_ID.items():
            if of := getattr(self, name):
                for row in np.flatnonzero(self.phase == _PHASE_CODE["measured"]).tolist():
                    columns[field_name][row] = of.get(columns["id"][row], columns[field_name][row])
        return map(_Written, *(columns[name] for name in Record.__struct_fields__))


_Written = msgspec.defstruct("_Written", Record.__struct_fields__)  # a Record by place, made in a tenth of the time
Recorded = tuple[RequestTable, list[ClientFacts]]  # what a run directory holds, as `read` gives it

_INTEGERS = (
    "id", "scheduled_ns", "sent_ns", "headers_ns", "first_token_ns", "last_token_ns", "done_ns", "prompt_tokens",
    "output_tokens", "first_tokens", "asked_prompt_tokens", "asked_tokens", "cached_tokens", "shared_tokens",
    "session", "turn", "events", "status",
)  # fmt: skip
_NONE = {"shared_tokens": 0, "session": -1, "turn": 0}  # in the column, where the record has no such field
_OWN = [name for name in _INTEGERS if name != "first_tokens"]
_OWN_INTEGERS = attrgetter(*_OWN)
_ALWAYS = ("id", "scheduled_ns", "asked_prompt_tokens", "asked_tokens", "events")  # fields that are never null
COLUMNS = (*_INTEGERS, "outcome", "phase")
# what few requests have: by the names of a table, the field of a record
BY_ID = {
    "errors": "error", "retried": "retried", "resent_ns": "resent_ns", "server": "server", "answers_ns": "answer_ns",
    "models": "model", "adapters": "adapter", "afters": "after", "reasoning": "reasoning_tokens", "items": "items",
    "priorities": "priority",
}  # fmt: skip
_OF_FEW = attrgetter(*BY_ID.values())
_NOTHING_TOLD = (None, *(UNSET for _ in range(len(BY_ID) - 1)))
_OUTCOME_CODE = {name: code for code, name in enumerate(OUTCOMES)}
_PHASE_CODE = {name: code for code, name in enumerate(PHASES)}
DAY_NS = 86_400_000_000_000
MOST_NS = 30 * DAY_NS  # of a run
MOST_GAP_US = (1 << 32) - 1
SLACK_NS = 1_000_000  # that stamps of two clocks, the kernel's and ours, may differ by
FAR = f"a time is more than {MOST_NS / DAY_NS:g} days from the run's start"
MOST_LINE_BYTES = 1 << 26  # of a record: eight million gaps; a packed file may hold a line without end
GAPS_A_BLOCK = 1 << 19
ROWS_A_BLOCK = 1 << 12
ROWS_SUMMED = 64
WRITTEN_TOGETHER = 256  # records: of more the numbers would leave the processor's cache


def _fields(name: str, column: NDArray[np.int64]) -> list[Any]:
    """The values of a record's field from those of its column."""
    values: list[Any] = column.tolist()
    if name not in _ALWAYS:
        absent, none = (msgspec.UNSET, _NONE[name]) if name in _NONE else (None, -1)
        for row in np.flatnonzero(column == none).tolist():
            values[row] = absent
    return values


def _wrong(record: Record) -> str | None:
    """What no request can be like, as a clause; a run directory may be another's, and a report counts by seconds."""
    first, last = record.first_token_ns, record.last_token_ns
    if (first is None) != (last is None) or (first is not None and last is not None and first > last):
        return "its first token and its last do not come in that order"
    answer = None if record.answer_ns is msgspec.UNSET else record.answer_ns
    stamps = (record.scheduled_ns, record.sent_ns, record.headers_ns, first, last, answer, record.done_ns)
    for stamp in stamps:
        if stamp is not None and not -MOST_NS <= stamp <= MOST_NS:
            return FAR
    if (record.session is msgspec.UNSET) != (record.turn is msgspec.UNSET):
        return "it has only one of session and turn"
    return None


def _spans_us(gaps_us: NDArray[np.uint32], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of each row's gaps (n,). A few rows at a time, since numpy makes wider copies of what it sums up."""
    spans_us = np.zeros(len(offsets) - 1, np.int64)
    for row in range(0, len(spans_us), ROWS_SUMMED):
        begins = offsets[row : row + ROWS_SUMMED + 1]
        filled = np.flatnonzero(np.diff(begins))
        if len(filled):
            part = gaps_us[begins[0] : begins[-1]]
            spans_us[row + filled] = np.add.reduceat(part, begins[filled] - begins[0], dtype=np.int64)
    return spans_us


Integers = NDArray[np.int64]


def _contradictions(
    columns: Mapping[str, Integers], gaps_us: NDArray[np.uint32], offsets: Integers, answer_ns: Integers
) -> dict[str, tuple[int, int]]:
    """What records say that contradicts itself, as the end of a sentence: the first id, and how many. All else of them
    can be reported. answer_ns: (n,), -1 where the reply has no answer apart from its beginning."""
    sent, headers, first, last = (columns[f"{name}_ns"] for name in ("sent", "headers", "first_token", "last_token"))
    counts, came = np.diff(offsets), (first != -1) & (last != -1)
    spans_us, filled = _spans_us(gaps_us, offsets), counts > 0
    contradictions = {
        "has more or fewer gaps than its events have between them": filled & (columns["events"] != counts + 1),
        "has gaps that do not add up to the time from its first token to its last": came
        & filled
        & (np.abs(1000 * spans_us - (last - first)) > SLACK_NS),
        "has its headers before it was sent": (headers != -1) & (sent != -1) & (headers < sent - SLACK_NS),
        "has its headers after its first token": came & (headers != -1) & (headers > first + SLACK_NS),
        "has an answer that does not begin between its first token and its last": came
        & (answer_ns != -1)
        & ((answer_ns < first - SLACK_NS) | (answer_ns > last + SLACK_NS)),
    }
    found: dict[str, tuple[int, int]] = {}
    for sentence, holds in contradictions.items():
        rows = np.flatnonzero(holds)
        if len(rows):
            found[sentence] = int(columns["id"][rows[0]]), len(rows)
    return found


class _Columns:
    """A table that grows by one record at a time, in any order."""

    def __init__(self) -> None:
        self._integers = {name: array("q") for name in _INTEGERS}
        self._rows: list[tuple[Any, ...]] = []  # integers of records that are in no column yet: together they are quick
        self._first: list[int | None] = []
        self._outcome, self._phase = array("b"), array("b")
        self._gaps = [array("I")]  # blocks, so that growing never copies and ordering can free them one by one
        self._gap_counts = array("I")
        self._by_id: dict[str, dict[int, Any]] = {name: {} for name in BY_ID}
        self._warmup_error: str | None = None
        self._tells_pace = False
        self._texts: dict[str, str] = {}  # ten thousand refusals share one message

    def append(self, record: Record) -> None:
        """Raises ValueError for an outcome or phase outside the closed lists and for a number out of range."""
        if record.outcome not in _OUTCOME_CODE:
            raise ValueError(f"unknown outcome {record.outcome!r}")
        if record.phase not in _PHASE_CODE:
            raise ValueError(f"unknown phase {record.phase!r}")
        if wrong := _wrong(record):
            raise ValueError(wrong)
        if len(self._gaps[-1]) >= GAPS_A_BLOCK:
            self._gaps.append(array("I"))
        try:
            self._gaps[-1].extend(record.itl_us)
        except OverflowError as error:
            raise ValueError(f"a number is out of range: {error}") from None
        self._rows.append(_OWN_INTEGERS(record))
        self._first.append(self._first_tokens(record))
        if len(self._rows) >= WRITTEN_TOGETHER:
            self._flush()
        self._gap_counts.append(len(record.itl_us))
        self._outcome.append(_OUTCOME_CODE[record.outcome])
        self._phase.append(_PHASE_CODE[record.phase])
        if record.phase == "warmup" and record.outcome != "ok" and self._warmup_error is None:
            self._warmup_error = f"{record.outcome}, {record.error}"
        rare = _OF_FEW(record)
        if record.phase == "measured" and rare != _NOTHING_TOLD:
            for name, value in zip(BY_ID, rare, strict=True):
                if isinstance(value, str):
                    shown = printable(value) if name in ("models", "adapters") else value
                    value = self._texts.setdefault(shown, shown)
                if value is not UNSET and value not in (None, "", False):
                    self._by_id[name][record.id] = value

    def _flush(self) -> None:
        columns = dict(zip(_OWN, zip(*self._rows, strict=True), strict=False)) | {"first_tokens": tuple(self._first)}
        self._rows.clear()
        self._first.clear()
        for name, values in columns.items():
            try:
                whole = array("q", values)
            except TypeError:  # some have no such field, or nothing in it
                absent = _NONE.get(name, -1)
                whole = array("q", [-1 if each is None else absent if each is UNSET else each for each in values])
            except OverflowError as error:  # what was read is in range: these were made here
                raise ValueError(f"a number is out of range: {error}") from None
            self._integers[name].extend(whole)

    def _first_tokens(self, record: Record) -> int | None:
        """A record without them tells them by its gaps; where the gaps were left out too, they are taken to be one."""
        if record.first_tokens is msgspec.UNSET:
            if not record.itl_us and record.events > 1:
                return 1
            return pace.first_tokens(record.output_tokens, record.itl_us)
        self._tells_pace = True
        return record.first_tokens

    def table(self) -> RequestTable:
        """Empties the columns into a table. Raises ValueError when a request is there twice."""
        self._flush()
        ids = np.asarray(self._integers["id"])
        phase = np.asarray(self._phase)
        order = np.lexsort((ids, phase))
        repeated = np.flatnonzero((np.diff(ids[order]) == 0) & (np.diff(phase[order]) == 0))
        if len(repeated):
            raise ValueError(f"request {ids[order[repeated[0]]]} is recorded twice")
        del ids
        columns: dict[str, NDArray[np.int64]] = {}
        for name in _INTEGERS:  # each array is freed as soon as it is put in order
            columns[name] = np.asarray(self._integers.pop(name))[order]
        gaps, offsets = self._ordered_gaps(order)
        answers_ns = np.full(len(order), -1, np.int64)
        if answers := self._by_id["answers_ns"]:
            measured = phase[order] == _PHASE_CODE["measured"]
            answers_ns[measured] = [answers.get(number, -1) for number in columns["id"][measured].tolist()]
        held: Mapping[str, Any] = {**columns, **self._by_id}
        return RequestTable(
            **held,
            outcome=np.asarray(self._outcome)[order],
            phase=phase[order],
            itl_us=gaps,
            itl_offsets=offsets,
            warmup_error=self._warmup_error,
            odd=_contradictions(columns, gaps, offsets, answers_ns),
            tells_pace=self._tells_pace,
        )

    def _ordered_gaps(self, order: NDArray[np.int64]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All gaps, those of row order[0] first, and their offsets. Frees every block as soon as it is copied."""
        counts = np.asarray(self._gap_counts)
        offsets = np.zeros(len(order) + 1, np.int64)
        np.cumsum(counts[order], out=offsets[1:])
        begins = np.empty(len(order), np.int64)
        begins[order] = offsets[:-1]
        out = np.empty(int(offsets[-1]), np.uint32)
        targets = zip(begins.tolist(), counts.tolist(), strict=True)
        self._gaps.reverse()
        while self._gaps:
            block = np.asarray(self._gaps.pop())
            at = 0
            while at < len(block):
                begin, count = next(targets)
                out[begin : begin + count] = block[at : at + count]
                at += count
        return out, offsets


def table(records: Iterable[Record]) -> RequestTable:
    """Columns from records in any order.

    Raises ValueError for an outcome or phase outside the closed lists, a number out of range, a request recorded twice.
    """
    columns = _Columns()
    for record in records:
        columns.append(record)
    return columns.table()


class RecordsFile:
    """Appends records to a JSONL file, and goes on in the next one where it is full; every line is with the kernel when
    `write` returns, so kill -9 loses none. Not `at_once`: what can be computed again is written when there is much."""

    def __init__(
        self, path: Path, run_id: str, version: str, t0_monotonic_ns: int, *, model: str = "", at_once: bool = True
    ) -> None:
        self._at_once = at_once
        encoder = msgspec.json.Encoder()
        self._encode, self._encode_lines = encoder.encode, encoder.encode_lines
        self._path, self._number = path, 1
        header = Header(run_id=run_id, version=version, t0_monotonic_ns=t0_monotonic_ns, model=model)
        self._header = without_secrets(header)  # as the manifest is written
        self.file = path.open("xb")
        self._size_bytes = 0
        self._line(self._header)

    def _line(self, value: msgspec.Struct) -> None:
        line = self._encode(value) + b"\n"
        self.file.write(line)
        if self._at_once:
            self.file.flush()  # whole lines only, or an OSError
        self._size_bytes += len(line)

    def _next_part(self) -> None:
        """Begins the next file. It gets its name with its header in it: no reader meets a file without one."""
        self.file.close()
        self._number += 1
        path = parts.following(self._path, self._number)
        header = self._encode(self._header) + b"\n"
        replace(path, header)
        self.file = path.open("ab")
        self._size_bytes = len(header)

    def is_removed(self) -> bool:
        """Whether somebody has removed it: what is written goes nowhere then."""
        return os.fstat(self.file.fileno()).st_nlink == 0

    def abandon(self) -> None:
        """Gives it up after an OSError."""
        with contextlib.suppress(OSError):
            self.file.close()

    def write(self, record: msgspec.Struct) -> None:
        if self._size_bytes >= parts.PART_BYTES:
            self._next_part()
        self._line(record)

    def write_table(self, table: RequestTable) -> None:
        """Writes a record for each row, many together; the files are full at the same records as from `write`."""
        for first in range(0, len(table), WRITTEN_TOGETHER):
            rows = list(table.rows(first, min(first + WRITTEN_TOGETHER, len(table))).written())
            lines = self._encode_lines(rows)
            if self._size_bytes + len(lines) < parts.PART_BYTES:
                self.file.write(lines)
                self._size_bytes += len(lines)
            else:
                for record in rows:
                    self.write(record)
        self.file.flush()

    def close(self, client: ClientFacts) -> None:
        self._line(Footer(client=client))
        self.file.close()


def _parts(directory: Path) -> list[RecordsPart]:
    """The files that hold the records of a run: its own, or its workers'. Raises RecordsError where one is missing.

    Both are there only when the merge was killed between its last two steps; the workers' are then copies.
    """
    found = {(part.worker, part.number): part for part in reversed(parts.find(directory))}  # plain before packed
    whose = {worker for worker, _ in found}
    whose = {OF_THE_RUN} if OF_THE_RUN in whose else whose
    chosen = sorted(part for part in found.values() if part.worker in whose)
    if not chosen:
        raise RecordsError(f"{directory} holds no {JOINED}; is it a run directory?")
    for part in chosen:
        if part.number > 1 and (part.worker, part.number - 1) not in found:
            raise RecordsError(f"{part.path} is there and the file before it is not; put it back.")
    return chosen


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """To read, unpacked. Raises RecordsError, also in its block, for what cannot be opened or unpacked."""
    unpack: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        stored = foreign_files.opened(path)
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror or error}.") from None
    with stored, unpack.get(path.suffix, contextlib.nullcontext)(stored) as file:
        try:
            yield file
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
            raise RecordsError(f"{path} cannot be unpacked: {error}") from None


def _line(path: Path, file: BinaryIO) -> bytes:
    """The next line; the last may have no end. Raises RecordsError for one that is too long to be a record."""
    line = file.readline(MOST_LINE_BYTES)
    if len(line) == MOST_LINE_BYTES:
        raise RecordsError(f"{path} has a line of over {MOST_LINE_BYTES >> 20} MiB, which is no record")
    return line


def _read_header(path: Path, file: BinaryIO) -> Header:
    try:
        header = msgspec.json.decode(_line(path, file), type=Header)
    except UNDECODABLE as error:
        raise RecordsError(f"{path} does not begin with a {SCHEMA} header: {reason(error)}.") from None
    if header.schema != SCHEMA:
        raise RecordsError(f"{path} has schema {header.schema!r}, this version reads {SCHEMA!r}")
    return header


def read_header(directory: Path) -> Header:
    """The header of a run's records. Raises RecordsError, also when its files are of different runs."""
    first, *others = _parts(directory)
    with _open(first.path) as file:
        header = _read_header(first.path, file)
    for part in others:
        with _open(part.path) as file:
            if _read_header(part.path, file) != header:
                raise RecordsError(
                    f"{part.path} and {first.path} are of different runs; keep the files of one run in a directory."
                )
    return header


def read(directory: Path) -> Recorded:
    """The table of a run directory and each client process' facts about itself (none for a killed one).

    Reads the run's own files or, where workers were killed before they were merged, the workers'. A last line that a
    kill cut in two is left out; any other damage raises RecordsError.
    """
    read_header(directory)
    columns = _Columns()
    facts: list[ClientFacts] = []
    chosen = _parts(directory)
    full = {(part.worker, part.number - 1) for part in chosen}
    for part in chosen:
        _read_part(part, columns, facts, full=(part.worker, part.number) in full)
    try:
        return columns.table(), facts
    except ValueError as error:
        raise RecordsError(f"{directory}: {error}; were its files copied by hand?") from None


def _read_part(part: RecordsPart, columns: _Columns, facts: list[ClientFacts], full: bool) -> None:
    """Adds what a file holds to `columns` and `facts`. full: its writer went on in another. Raises RecordsError."""
    record_of = msgspec.json.Decoder(Record).decode
    with _open(part.path) as file:
        _line(part.path, file)
        number = 1
        while line := _line(part.path, file):
            number += 1
            if not line.endswith(b"\n"):
                if full:
                    raise RecordsError(
                        f"{part.path} ends within line {number} and another file follows; copy it again."
                    )
                break
            try:
                if line.startswith(b'{"client":'):
                    facts.append(msgspec.json.decode(line, type=Footer).client)
                else:
                    columns.append(record_of(line))
            except (*UNDECODABLE, ValueError) as error:  # ValueError: a value that no column takes
                raise RecordsError(f"{part.path} line {number} is not a record: {reason(error)}.") from None


def merge(directory: Path) -> None:
    """Joins the workers' files into `requests.jsonl`, line for line, and removes them; leaves them as they are where
    they are more than one file holds.

    Raises RecordsError when there are none or they are of different runs. Killed at any point, it loses no record and
    doubles none.
    """
    chosen = _parts(directory)
    read_header(directory)
    if chosen[0].worker == OF_THE_RUN:
        raise RecordsError(f"{chosen[0].path} is there already; nothing was merged.")
    if sum(part.path.stat().st_size for part in chosen) > parts.PART_BYTES:
        return
    with replacing(directory / JOINED) as out:  # on a full disk it raises, and the files are still whole
        for number, part in enumerate(chosen):
            with _open(part.path) as file:
                header = file.readline()
                if number == 0:
                    out.write(header)
                # a line that a kill cut in two would run into the next worker's first
                out.writelines(line for line in file if line.endswith(b"\n"))
    for part in chosen:
        part.path.unlink()


def ids(path: Path) -> list[int]:
    """The measured requests in one file of records. Raises RecordsError."""
    columns = _Columns()
    _read_part(RecordsPart(OF_THE_RUN, 1, path), columns, [], full=False)
    measured: list[int] = columns.table().measured().id.tolist()
    return measured


def without(path: Path, left_out: set[int], out: Path) -> None:
    """Writes one file of records anew, without those measured requests. Raises OSError."""
    record_of = msgspec.json.Decoder(Record).decode
    with foreign_files.opened(path) as file, replacing(out) as kept:
        kept.write(file.readline())
        for line in file:
            if not line.endswith(b"\n"):
                break
            record = None if line.startswith(b'{"client":') else record_of(line)
            if record is None or record.phase != "measured" or record.id not in left_out:
                kept.write(line)
