"""Traces of agents: sessions whose requests wait for each other, as somebody's agents sent them.

Weka's format (kv-cache-tester; InferenceX AgentX replays it) has a JSON object a session: alone in a file, one a line,
or a directory of such files. A session has `block_size` and `requests` in order; of a request are read `t` (s), `in`
and `out` (tokens), `hash_ids`, and `api_time` and `think_time` (s). An entry of type "subagent" has requests of its
own, which run beside the agent; the agent's first request after their end waits for them.

A request comes as long after the last of those that it waits for as it did in the trace, where `api_time` tells when
that one had ended; else after its `think_time`. The recorded prompts are sent, not the replies of this run. Hash ids
are local: sessions share nothing. Pure, but for the reading of files.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from backends.files import opened
from backends.untrusted import UNDECODABLE, reason
from loadgen.load.lengths import MOST_TOKENS, WorkloadError
from loadgen.load.turns import TurnDelay, Turns

BLOCK_TOKENS = 64
MOST_SESSION_BYTES = 1 << 28
_LOOKED_AT_BYTES = 1 << 20
_FILES = "*.json*"  # of a directory
MOST_S = 1e7  # of a time in a session
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]


class Pending(NamedTuple):
    """A request by its place in a file's columns, and those that it waits for: each with a delay after its end, or
    from_due: after when it was due."""

    row: int
    waits: tuple[tuple[int, int, bool], ...]


class WaitsForItself(ValueError):
    """row: of a request that waits, by others or itself, for itself."""

    def __init__(self, row: int) -> None:
        self.row = row


def planned(sessions: Sequence[Sequence[Pending]], speed: float = 1.0) -> tuple[list[int], Turns]:
    """The rows in the order of their numbers, each after those that it waits for, and the turns, `speed` times as fast.
    Of each session the first alone waits for nothing. Raises WaitsForItself, and WorkloadError for a wait without
    end."""
    most_ns = max((wait[1] for session in sessions for each in session for wait in each.waits), default=0)
    if most_ns > MOST_S * 1e9 * speed:
        raise WorkloadError(f"--trace-speed {speed:g} makes a turn wait for over {MOST_S:g} s; name a higher speed.")
    rows: list[int] = []
    waits: dict[int, tuple[TurnDelay, ...]] = {}
    for session in sessions:
        number_of: dict[int, int] = {}
        for place in _in_order(session):
            number_of[session[place].row] = len(rows) + len(number_of)
        for each in session:
            if each.waits:
                waits[number_of[each.row]] = tuple(
                    TurnDelay(number_of[row], round(delay_ns / speed), from_due)
                    for row, delay_ns, from_due in each.waits
                )
        rows.extend(number_of)
    counts = np.array([len(session) for session in sessions], np.int64)
    return rows, Turns(counts, waits=waits, whole=True)


def _in_order(session: Sequence[Pending]) -> Iterator[int]:
    """Places, as they stand but for those that wait for later ones."""
    left = [len(each.waits) for each in session]
    followers: dict[int, list[int]] = {}
    for place, each in enumerate(session):
        for row, *_ in each.waits:
            followers.setdefault(row, []).append(place)
    ready = [place for place, waits in enumerate(left) if not waits]
    found = 0
    while ready:
        place = heapq.heappop(ready)
        yield place
        found += 1
        for later in followers.get(session[place].row, ()):
            left[later] -= 1
            if not left[later]:
                heapq.heappush(ready, later)
    if found < len(session):
        raise WaitsForItself(min(session[place].row for place, waits in enumerate(left) if waits))


class _Call(msgspec.Struct, rename={"input_tokens": "in", "output_tokens": "out"}):
    """A request, or a sub-agent, which has its own."""

    t: _Seconds
    type: str = "n"
    input_tokens: _Tokens = 0
    output_tokens: _Tokens = 0
    hash_ids: list[int] = []
    api_time: float | None = None
    think_time: float | None = None
    duration_ms: float | None = None
    requests: list[_Call] = []

    @property
    def end_s(self) -> float:
        return self.t + _positive(self.api_time)


class _Session(msgspec.Struct):
    id: str
    requests: list[_Call]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = BLOCK_TOKENS
    hash_id_scope: str = "local"


def _positive(value: float | None) -> float:
    return min(value, MOST_S) if value is not None and math.isfinite(value) and value > 0 else 0.0


def _ints() -> array[int]:
    return array("q")


@dataclass
class Agents:
    """The requests of a trace of agents, session by session, as columns. empty: requests with no tokens in or out,
    which get one; overlapping: that began before the reply to the one before them had ended."""

    block_tokens: int = BLOCK_TOKENS
    sessions: list[list[Pending]] = field(default_factory=list)
    input_tokens: array[int] = field(default_factory=_ints)
    output_tokens: array[int] = field(default_factory=_ints)
    hash_ids: array[int] = field(default_factory=_ints)
    hash_offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    empty: int = 0
    overlapping: int = 0
    _ends_s: list[float] = field(default_factory=list)  # of each request, in its session
    _timed: list[bool] = field(default_factory=list)  # whether that is known
    _ids: int = 0  # different ones so far
    _own: dict[int, int] = field(default_factory=dict)  # of the session, by those that it has: sessions share none

    def notes(self) -> Iterator[str]:
        if self.empty:
            yield f"{self.empty} of its requests have no tokens in or out: they get one"
        if self.overlapping:
            yield (
                f"{self.overlapping} of its requests came before the reply to the one before them had ended: they are "
                "sent when it has"
            )

    def add(self, session: _Session) -> None:
        pending: list[Pending] = []
        self._own = {}
        self._agent(session.requests, pending, None)
        if pending:
            self.sessions.append(pending)
        self._ids += len(self._own)

    def _agent(self, calls: Sequence[_Call], pending: list[Pending], last: int | None) -> int | None:
        """Takes the requests of an agent that was begun by the request `last`, and gives back its last one."""
        running: list[tuple[float, int]] = []  # sub-agents: when each had ended, and its last request
        for call in calls:
            if call.type == "subagent":
                inner = call.requests
                if inner and inner[0].t < call.t:  # older files tell times from the sub-agent's own beginning
                    inner = [msgspec.structs.replace(each, t=call.t + each.t) for each in inner]
                ended = self._agent(inner, pending, last)
                if ended is not None and ended != last:
                    running.append((self._ends_s[ended], ended))
                continue
            over = [row for end_s, row in running if end_s <= call.t]
            running = [each for each in running if each[1] not in over]
            after = [*([] if last is None else [last]), *over]
            if not after and pending:  # nobody began it: it waits for the session's first
                after = [pending[0].row]
            last = self._put(call, pending, after)
        return last

    def _put(self, call: _Call, pending: list[Pending], after: Sequence[int]) -> int:
        row = len(self.input_tokens)
        ends_s = max((self._ends_s[each] for each in after), default=0.0)
        gap_s = call.t - ends_s
        self.overlapping += bool(after) and gap_s < 0
        delay_s = max(0.0, gap_s)
        if call.think_time is not None and after and not all(self._timed[each] for each in after):
            delay_s = _positive(call.think_time)
        pending.append(Pending(row, tuple((each, round(delay_s * 1e9), False) for each in after)))
        self.empty += not (call.input_tokens and call.output_tokens)
        self.input_tokens.append(max(1, call.input_tokens))
        self.output_tokens.append(max(1, call.output_tokens))
        self.hash_ids.extend(self._own.setdefault(each, self._ids + len(self._own)) for each in call.hash_ids)
        self.hash_offsets.append(len(self.hash_ids))
        self._ends_s.append(call.end_s)
        self._timed.append(call.api_time is not None)
        return row


def is_one(path: Path) -> bool:
    """Whether that looks like a trace of agents. Raises WorkloadError where it cannot be read."""
    if path.is_dir() and any(path.glob(_FILES)):
        return True
    try:
        with opened(path) as file:
            first = file.readline(_LOOKED_AT_BYTES).strip()
    except OSError as error:
        raise WorkloadError(_unreadable(path, error)) from None
    return first == b"{" or (first.startswith(b"{") and (b'"block_size"' in first or b'"requests"' in first))


def read(path: Path, limit: int | None = None) -> Agents:
    """Whole sessions, until there are `limit` requests. Raises WorkloadError."""
    files = sorted(path.glob(_FILES)) if path.is_dir() else [path]
    agents, decode, sizes = Agents(), msgspec.json.Decoder(_Session).decode, set[int]()
    for file in files:
        for number, text in _documents(file):
            try:
                session = decode(text)
            except UNDECODABLE as error:
                raise WorkloadError(f"{file} line {number} is no session of agents: {reason(error)}.") from None
            sizes.add(session.block_size)
            if len(sizes) > 1:
                raise WorkloadError(
                    f"{file} line {number} has a block_size of {session.block_size}, and earlier sessions have "
                    f"{agents.block_tokens}; play them as two traces."
                )
            agents.block_tokens = session.block_size
            agents.add(session)
            if limit is not None and len(agents.input_tokens) >= limit:
                return agents
    return agents


def _documents(file: Path) -> Iterator[tuple[int, bytes]]:
    """JSON objects, each with the line where it begins: the whole file, or one a line. Raises WorkloadError."""
    try:
        with opened(file) as lines:
            first = lines.readline(MOST_SESSION_BYTES)
            if first.strip() and not first.rstrip().endswith(b"}"):
                yield 1, _bounded(file, 1, first + lines.read(MOST_SESSION_BYTES))
                return
            number = 1
            while first:
                if first.strip():
                    yield number, _bounded(file, number, first)
                first, number = lines.readline(MOST_SESSION_BYTES), number + 1
    except OSError as error:
        raise WorkloadError(_unreadable(file, error)) from None


def _bounded(file: Path, number: int, text: bytes) -> bytes:
    if len(text) >= MOST_SESSION_BYTES:
        raise WorkloadError(f"{file} line {number} has over {MOST_SESSION_BYTES >> 20} MiB, as no session has.")
    return text


def _unreadable(path: Path, error: OSError) -> str:
    return f"cannot read the trace {path}: {str(error.strerror or error).rstrip('.')}; name another --trace."
