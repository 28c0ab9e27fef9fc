"""Traces of real traffic: when each request came, how long it and its reply were, and which blocks its prompt shared.

Five published formats are read, all but one with a request a line. What a line has besides the columns named here is
not looked at.

    mooncake  JSON lines, from Mooncake (FAST '25): timestamp (ms), input_length, output_length, hash_ids (512 tokens);
              of other tools also text_input for the length, session_id, and a delay (ms): then a session's turn
              waits for the reply to the one before it, or to those that `after` names by their `turn`
    bailian   JSON lines, Qwen on Alibaba's Bailian (ATC '25): as above, with timestamp in s, blocks of 16, a chat_id
    azure     CSV, from Azure in 2023 and 2024: TIMESTAMP (with or without a time zone), ContextTokens, GeneratedTokens
    weka      JSON, sessions of agents: `agent_traces`
    burstgpt  CSV, from BurstGPT (KDD '25): Timestamp (s), Request tokens, Response tokens; a failure has 0 of these

The columns of CSV are found by the heading: BurstGPT's third file has other ones between. A file may be packed.
Equal hash ids stand for equal tokens; the last block of a prompt may be a part of one; a line without them shares
nothing. Lines are decoded one by one into columns of numbers; nothing else is kept of them. What a careful reader of
the file would doubt, and what is played otherwise than it stands there, is in `Trace.notes`.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.files import opened
from backends.foreign_files import MOST_EMPTY_LINES
from backends.untrusted import UNDECODABLE, printable, reason
from loadgen.load import agent_traces
from loadgen.load.agent_traces import Pending, WaitsForItself, planned
from loadgen.load.lengths import MOST_TOKENS, WorkloadError
from loadgen.load.turns import Turns

MOST_LINE_BYTES = 1 << 24  # a million hash ids take half of it
MOST_SECONDS = 4e9  # of a timestamp, and between two of them: nanoseconds fit 64 bits
MOST_BACK_NS = 10**9  # that a request may stand behind a later one, as servers' logs have them: both are sorted
BYTES_A_TOKEN = 4  # of text whose length is not given: about what English has
# requests a second, above or below which a trace's unit of time is doubted: no published one comes near
MOST_RATE, LEAST_RATE = 50.0, 1 / 600

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS * 1e3)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
_HashId = Annotated[int, msgspec.Meta(ge=0)]  # below 2^64, which msgspec cannot bound


@dataclass(frozen=True)
class SkippedRequests:
    """How many requests cannot be played, by why: a prompt of 0 tokens, or else a reply of 0 tokens (a failure); or
    more tokens than the model takes, the first of them in data line `too_long_line`."""

    no_input: int = 0
    no_output: int = 0
    too_long: int = 0
    too_long_line: int | None = None

    def __str__(self) -> str:
        """A clause for each; empty for none."""
        first = "" if self.too_long_line is None else f" (the first is id {self.too_long_line})"
        reasons = (
            (self.no_input, "with no prompt"), (self.no_output, "with no reply"),
            (self.too_long, f"longer than the model takes{first}"),
        )  # fmt: skip
        return ", ".join(f"{count} {reason}" for count, reason in reasons if count)


@dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a trace by their times. Shapes: (n,), but for `hash_ids`, which is flat, and is cut by
    `hash_offsets` (n + 1,); ids of 2^63 and more are negative there. `left_out` counts what was read from `from_s` on
    and cannot be played. notes: sentences without their end. turns: where requests wait for each other; they then stand
    session by session, each at the time of its session."""

    format: str
    line: NDArray[np.int64]  # number of its data line in the file, from 0: a heading and empty lines do not count
    due_ns: NDArray[np.int64]  # since the first request that is played; ascending; the first is 0
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    block_tokens: int  # of one hash id; 0 where the format has none
    hash_ids: NDArray[np.int64]
    hash_offsets: NDArray[np.int64]
    left_out: SkippedRequests
    notes: tuple[str, ...] = ()
    turns: Turns | None = None

    def __len__(self) -> int:
        return len(self.line)

    def blocks(self, number: int) -> NDArray[np.int64]:
        """The hash ids of a request, in the order of its prompt; all but the last one stand for whole blocks."""
        return self.hash_ids[self.hash_offsets[number] : self.hash_offsets[number + 1]]

    def up_to(self, longest_tokens: int) -> Trace:
        """Without the requests whose prompt and reply are more tokens than that together. Raises WorkloadError where
        none is left."""
        fits = self.input_tokens + self.output_tokens <= longest_tokens
        if fits.all():
            return self
        if not fits.any():
            raise WorkloadError(
                f"every request of the trace has more tokens than the {longest_tokens} that the model takes; name a "
                "model, or a server, with a longer context."
            )
        if self.turns is not None:  # of a session all or nothing
            fits = self.turns.whole_sessions(fits)
            if not fits.any():
                raise WorkloadError(
                    f"every session of the trace has a request of more than the {longest_tokens} tokens that the model "
                    "takes; name a model, or a server, with a longer context."
                )
        counts = np.diff(self.hash_offsets)
        first_ns = self.due_ns[fits][0]
        too_long = self.line[~fits]
        return replace(
            self,
            turns=None if self.turns is None else self.turns.only(fits),
            line=self.line[fits],
            due_ns=self.due_ns[fits] - first_ns,
            input_tokens=self.input_tokens[fits],
            output_tokens=self.output_tokens[fits],
            hash_ids=self.hash_ids[np.repeat(fits, counts)],
            hash_offsets=np.concatenate(([0], np.cumsum(counts[fits]))),
            left_out=replace(self.left_out, too_long=len(too_long), too_long_line=int(too_long[0])),
        )

    def shared_tokens(self) -> NDArray[np.int64]:
        """How many tokens at the beginning of each prompt an earlier request of the trace has had, in whole blocks; a
        block counts as the same after the same blocks only. Shape (n,)."""
        return self._shared[0]

    def common_blocks(self) -> NDArray[np.int64]:
        """How many blocks at the beginning of each prompt any other request of the trace has had. Shape (n,)."""
        return self._shared[1]

    @functools.cached_property
    def _shared(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shared, common = np.zeros(len(self), np.int64), np.zeros(len(self), np.int64)
        begins, counts = self.hash_offsets[:-1], np.diff(self.hash_offsets)
        _, ids = np.unique(self.hash_ids, return_inverse=True)
        requests = np.flatnonzero(counts)  # those that may still share a block with another
        parents = np.zeros(len(requests), np.int64)  # the same number: the same blocks up to here
        depth = 0
        while len(requests):
            chains = parents * len(ids) + ids[begins[requests] + depth]
            _, first, parents, sizes = np.unique(chains, return_index=True, return_inverse=True, return_counts=True)
            shared[requests[first[parents] < np.arange(len(requests))]] += self.block_tokens
            depth += 1
            common[requests[sizes[parents] > 1]] = depth
            more = (sizes[parents] > 1) & (counts[requests] > depth)
            requests, parents = requests[more], parents[more]
        return np.minimum(shared, self.input_tokens), common


class _JsonLine(msgspec.Struct, kw_only=True):
    """What JSON lines of several tools have. images: themselves, or how many."""

    output_tokens: _Length = msgspec.field(name="output_length")
    length: _Length | None = msgspec.field(name="input_length", default=None)
    text: str | None = msgspec.field(name="text_input", default=None)
    ids: list[_HashId] | None = msgspec.field(name="hash_ids", default=None)
    session: str | int | None = msgspec.field(name="session_id", default=None)
    turn: str | int | None = None
    after: list[str | int] | None = None
    type: Any = None
    image: Any = None
    images: Any = None

    @property
    def input_tokens(self) -> int:
        """Raises csv.Error, which a line of any format may."""
        if self.length is not None:
            return self.length
        if self.text is None:
            raise csv.Error("it has neither input_length nor text_input")
        return -(-len(self.text.encode(errors="replace")) // BYTES_A_TOKEN)

    @property
    def hash_ids(self) -> Sequence[int]:
        return self.ids or ()

    @property
    def has_images(self) -> bool:
        return bool(self.images or self.image) or self.type == "image"


class _Mooncake(_JsonLine, kw_only=True):
    needed: ClassVar[tuple[str, ...]] = ("timestamp", "input_length", "output_length")
    timestamp: _Milliseconds | None = None
    delay: _Milliseconds | None = None

    def at_ns(self) -> int | None:
        return None if self.timestamp is None else round(self.timestamp * 1e6)

    def delay_ns(self) -> int | None:
        return None if self.delay is None else round(self.delay * 1e6)


class _Bailian(_JsonLine, kw_only=True):
    needed: ClassVar[tuple[str, ...]] = ("chat_id", "timestamp", "input_length", "output_length")
    chat_id: int  # tells the format from Mooncake's
    timestamp: _Seconds

    def at_ns(self) -> int:
        return round(self.timestamp * 1e9)


class _CsvLine(msgspec.Struct, kw_only=True):
    """text, session, turn, after, hash_ids: it has none of them."""

    text: ClassVar[None] = None
    session: ClassVar[None] = None
    turn: ClassVar[None] = None
    after: ClassVar[None] = None
    hash_ids: ClassVar[Sequence[int]] = ()
    images: _Length = msgspec.field(name="NumImages", default=0)  # of Azure's trace of 2025

    @property
    def has_images(self) -> bool:
        return self.images > 0


class _Azure(_CsvLine, kw_only=True):
    needed: ClassVar[tuple[str, ...]] = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    timestamp: datetime = msgspec.field(name="TIMESTAMP")
    input_tokens: _Length = msgspec.field(name="ContextTokens")
    output_tokens: _Length = msgspec.field(name="GeneratedTokens")

    def at_ns(self) -> int:
        """Since 1970. The seventh digit that 2023's fractions of a second have is always 0."""
        at = self.timestamp if self.timestamp.tzinfo else self.timestamp.replace(tzinfo=UTC)
        return (at - _EPOCH) // _MICROSECOND * 1000


class _BurstGpt(_CsvLine, kw_only=True):
    needed: ClassVar[tuple[str, ...]] = ("Timestamp", "Request tokens", "Response tokens")
    timestamp: _Seconds = msgspec.field(name="Timestamp")
    input_tokens: _Length = msgspec.field(name="Request tokens")
    output_tokens: _Length = msgspec.field(name="Response tokens")

    def at_ns(self) -> int:
        return round(self.timestamp * 1e9)


_Row = _Mooncake | _Bailian | _Azure | _BurstGpt
_AGENTS = "weka"
_ROWS: dict[str, type[_Row]] = {
    "mooncake": _Mooncake,
    "azure": _Azure,
    "burstgpt": _BurstGpt,
    "bailian": _Bailian,
}
_BLOCK_TOKENS = {"mooncake": 512, "bailian": 16, _AGENTS: agent_traces.BLOCK_TOKENS}
FORMATS = (*_ROWS, _AGENTS)


def read(
    path: Path, format: str | None = None, speed: float = 1.0, limit: int | None = None, from_s: float = 0.0,
    block_tokens: int | None = None,
) -> Trace:  # fmt: skip
    """The requests that come `from_s` seconds or more after the first of the trace, at most `limit` that can be played,
    with their times divided by `speed`. Without a `format` the file's first line tells it; block_tokens: of a hash id,
    where the format's own does not hold. Lines behind the last request that is played are not read. Raises
    WorkloadError."""
    _check(format, speed, limit, from_s, block_tokens)
    if format == _AGENTS or (format is None and agent_traces.is_one(path)):
        return _of_agents(path, speed, limit, from_s, block_tokens)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise WorkloadError(f"{path} is empty; name another --trace.")
    name = format or _recognised(path, *first)
    decode: Callable[[bytes], Any]
    if name in _BLOCK_TOKENS:
        decode, lines = msgspec.json.Decoder(_ROWS[name]).decode, itertools.chain([first], lines)
    else:
        decode = _csv_decoder(path, name, *first)
    played = _Played(path, name, limit, round(min(from_s, MOST_SECONDS) * 1e9))
    for number, text in lines:
        try:
            enough = played.add(number, decode(text))
        except (*UNDECODABLE, csv.Error) as error:
            raise WorkloadError(f"{path} line {number} is no request in format {name}: {reason(error)}.") from None
        if enough:
            break
    return played.trace(speed, block_tokens)


def _check(
    format: str | None, speed: float, limit: int | None, from_s: float, block_tokens: int | None
) -> None:  # fmt: skip
    if format is not None and format not in FORMATS:
        raise WorkloadError(f"there is no trace format '{format}'; the known ones are {', '.join(FORMATS)}.")
    if not (speed > 0 and math.isfinite(speed)):
        raise WorkloadError(f"--trace-speed {speed:g} must be a number above 0.")
    if limit is not None and limit < 1:
        raise WorkloadError(f"--trace-limit {limit} must be 1 or more.")
    if not from_s >= 0:
        raise WorkloadError(f"--trace-from {from_s:g} must be 0 or more seconds.")
    if block_tokens is not None and not 1 <= block_tokens <= MOST_TOKENS:
        raise WorkloadError(f"--trace-block-tokens {block_tokens} must be from 1 to {MOST_TOKENS}.")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1. Raises WorkloadError."""
    try:
        with opened(path) as file:
            empty = 0
            for number, line in enumerate(iter(partial(file.readline, MOST_LINE_BYTES), b""), 1):
                if len(line) == MOST_LINE_BYTES:
                    raise WorkloadError(
                        f"{path} line {number} has over {MOST_LINE_BYTES >> 20} MiB, as no line of a trace has."
                    )
                text = line.strip()
                empty = 0 if text else empty + 1
                if empty > MOST_EMPTY_LINES:
                    raise WorkloadError(f"{path} has over {MOST_EMPTY_LINES} empty lines in a row, as no trace has.")
                if text:
                    yield number, text
    except OSError as error:
        why = error.strerror or error
        raise WorkloadError(f"cannot read the trace {path}: {str(why).rstrip('.')}; name another --trace.") from None


def _heading(text: bytes) -> list[str]:
    """Raises csv.Error or UnicodeDecodeError."""
    return next(csv.reader([text.decode()], strict=True), [])


def _recognised(path: Path, number: int, text: bytes) -> str:
    """The format whose columns all stand in the first line; of two formats, that with more columns."""
    found: set[str] = set()
    with contextlib.suppress(*UNDECODABLE, csv.Error):
        found = set(msgspec.json.decode(text, type=dict[str, Any]) if text.startswith(b"{") else _heading(text))
    found |= {other for name, other in _INSTEAD.items() if name in found}
    missing = {name: [column for column in row.needed if column not in found] for name, row in _ROWS.items()}
    fitting = [name for name in _ROWS if not missing[name]]
    if fitting:
        return max(fitting, key=lambda name: len(_ROWS[name].needed))
    spelled = {_plain(column): column for column in found}
    near = min(_ROWS, key=lambda name: sum(_plain(column) not in spelled for column in missing[name]))
    if text.startswith(b"[") or all(_plain(column) not in spelled for column in _ROWS[near].needed):
        known = "; ".join(f"{name} ({', '.join(row.needed)})" for name, row in _ROWS.items())
        known += f"; {_AGENTS} (id, block_size, requests)"
        form = "; a trace of JSON has an object a line" if text.startswith((b"[", b"{")) else ""
        raise WorkloadError(f"{path} line {number} begins no trace of a known format, which are: {known}{form}.")
    there = [
        f"{each} (there is {spelled[_plain(each)]})" if _plain(each) in spelled else each for each in missing[near]
    ]
    raise WorkloadError(
        f"{path} line {number} begins no trace of a known format: the nearest is {near}, of which it lacks "
        f"{printable(', '.join(there))}; rename the columns, or add them."
    )


_INSTEAD = {"text_input": "input_length", "delay": "timestamp"}  # what stands for a column in a line of JSON


def _plain(column: str) -> str:
    """As people vary it: ContextTokens, context_tokens, Context tokens."""
    return "".join(filter(str.isalnum, column)).lower()


def _csv_decoder(path: Path, name: str, number: int, text: bytes) -> Callable[[bytes], Any]:
    """Decodes a line of a file with this heading. Raises WorkloadError; the decoder raises what UNDECODABLE has, or
    csv.Error."""
    try:
        heading = _heading(text)
    except (*UNDECODABLE, csv.Error) as error:
        raise WorkloadError(f"{path} line {number} is no heading in format {name}: {reason(error)}.") from None
    missing = next((column for column in _ROWS[name].needed if column not in heading), None)
    if missing is not None:
        raise WorkloadError(f"{path} line {number} is no heading in format {name}: there is no {missing}.")
    fields = [each.encode_name for each in msgspec.structs.fields(_ROWS[name])]
    places = [(column, heading.index(column)) for column in fields if column in heading]

    def decode(line: bytes) -> Any:
        fields = _heading(line)
        if len(fields) != len(heading):
            raise csv.Error(f"it has {len(fields)} fields, and the heading has {len(heading)}")
        return msgspec.convert({column: fields[place] for column, place in places}, _ROWS[name], strict=False)

    return decode


def _numbers() -> array[int]:
    return array("q")


class _Turn(NamedTuple):
    """A turn of a session: its row in the columns and its line, and what it waits for. after: names of turns."""

    row: int
    number: int
    delay_ns: int | None
    name: str | int | None
    after: list[str | int] | None


def _waits(turns: Sequence[_Turn]) -> bool:
    """Whether turns of a session wait for each other's replies."""
    return any(turn.after is not None or (turn.delay_ns is not None and place) for place, turn in enumerate(turns))


def _of_agents(path: Path, speed: float, limit: int | None, from_s: float, block_tokens: int | None) -> Trace:
    """Raises WorkloadError."""
    if from_s:
        raise WorkloadError("the sessions of a trace of agents have no time between them; leave --trace-from out.")
    agents = agent_traces.read(path, limit)
    played = _Played(path, _AGENTS, None, 0)
    played.number = played.line = array("q", range(len(agents.input_tokens)))
    played.at_ns = array("q", bytes(8 * len(agents.input_tokens)))
    played.input_tokens, played.output_tokens = agents.input_tokens, agents.output_tokens
    played.hash_ids, played.hash_offsets = array("Q", agents.hash_ids), agents.hash_offsets
    if not played.line:
        raise WorkloadError(f"{path} holds no requests; name another --trace.")
    rows, turns = planned(agents.sessions, speed)
    blocks = block_tokens or (agents.block_tokens if agents.hash_ids else None)
    return played._made(np.array(rows, np.int64), turns, speed, blocks, tuple(agents.notes()))


@dataclass
class _Played:
    """The columns of the requests that are played, as they are read."""

    path: Path
    format: str
    limit: int | None
    from_ns: int
    number: array[int] = field(default_factory=_numbers)  # of its line in an editor
    line: array[int] = field(default_factory=_numbers)
    at_ns: array[int] = field(default_factory=_numbers)  # since the first of the trace
    input_tokens: array[int] = field(default_factory=_numbers)
    output_tokens: array[int] = field(default_factory=_numbers)
    hash_ids: array[int] = field(default_factory=lambda: array("Q"))
    hash_offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    data_lines: int = 0
    begin_ns: int = 0
    latest_ns: int = 0
    back: int = 0  # requests that stand behind a later one, by most_back_ns at the most
    most_back_ns: int = 0
    no_input: int = 0
    no_output: int = 0
    text_alone: int = 0
    with_images: int = 0
    sessions: dict[str | int, int] = field(default_factory=dict)  # when the last turn of each came
    turns: dict[str | int, list[_Turn]] = field(default_factory=dict)  # of each, those that are played

    def add(self, number: int, row: _Row) -> bool:
        """Takes the next line, the editor's `number`; true when there are enough. Raises WorkloadError, and csv.Error
        for a row that says too little."""
        at_ns, input_tokens = self._at_ns(row), row.input_tokens
        if not self.data_lines:
            self.begin_ns = self.latest_ns = at_ns
        self._check(number, row, at_ns)
        self.latest_ns = max(self.latest_ns, at_ns)
        self.data_lines += 1
        if self.from_ns and at_ns - self.begin_ns < self.from_ns:
            return False
        if not (input_tokens and row.output_tokens):
            self.no_input += not input_tokens
            self.no_output += input_tokens > 0
            return False
        try:
            self.hash_ids.extend(row.hash_ids)
        except OverflowError:
            raise csv.Error("hash_ids: expected int below 2^64") from None
        self.number.append(number)
        self.line.append(self.data_lines - 1)
        self.at_ns.append(at_ns - self.begin_ns)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(row.output_tokens)
        self.hash_offsets.append(len(self.hash_ids))
        self.with_images += row.has_images
        self.text_alone += isinstance(row, _JsonLine) and row.length is None
        if row.session is not None:
            delay_ns = row.delay_ns() if isinstance(row, _Mooncake) else None
            self.turns.setdefault(row.session, []).append(
                _Turn(len(self.line) - 1, number, delay_ns, row.turn, row.after)
            )
        return len(self.line) == self.limit

    def _at_ns(self, row: _Row) -> int:
        """When it comes; of a session's later turn without a time, so long after the one before it."""
        at_ns = row.at_ns()
        if at_ns is None:
            delay_ns = row.delay_ns() if isinstance(row, _Mooncake) else None
            if (delay_ns is None and row.after is None) or row.session not in self.sessions:
                raise csv.Error("it has no timestamp, nor a delay after an earlier line of its session_id")
            at_ns = self.sessions[row.session] + (delay_ns or 0)
        if row.session is not None:
            self.sessions[row.session] = at_ns
        return at_ns

    def _check(self, number: int, row: _Row, at_ns: int) -> None:
        back_ns = self.latest_ns - at_ns
        if back_ns > MOST_BACK_NS and row.session is None:
            raise WorkloadError(
                f"{self.path} line {number} comes {back_ns / 1e9:g} s before a line above it; sort the trace by its "
                "timestamps."
            )
        self.back += back_ns > 0
        self.most_back_ns = max(self.most_back_ns, back_ns)
        if abs(at_ns - self.begin_ns) > MOST_SECONDS * 1e9:
            raise WorkloadError(f"{self.path} line {number} comes over {MOST_SECONDS:g} s after the first.")

    def trace(self, speed: float, block_tokens: int | None) -> Trace:
        """What was read, played `speed` times as fast. Raises WorkloadError where that is nothing."""
        if not self.line:
            raise WorkloadError(self._nothing())
        if any(map(_waits, self.turns.values())):
            rows, turns = self._in_sessions(speed)
            return self._made(np.array(rows, np.int64), turns, speed, block_tokens)
        return self._made(np.argsort(_column(self.at_ns), kind="stable"), None, speed, block_tokens)

    def _made(
        self,
        order: NDArray[np.int64],
        turns: Turns | None,
        speed: float,
        block_tokens: int | None,
        notes: Sequence[str] = (),
    ) -> Trace:
        """The trace of its rows in that order. Raises WorkloadError."""
        at_ns = _column(self.at_ns)[order]
        if turns is not None:
            at_ns = np.repeat(at_ns[turns.first[:-1]], np.diff(turns.first))
        if at_ns[-1] - at_ns[0] > MOST_SECONDS * 1e9 * speed:
            raise WorkloadError(
                f"--trace-speed {speed:g} makes {self.path} last over {MOST_SECONDS:g} s; name a higher speed."
            )
        due_ns = np.rint((at_ns - at_ns[0]) / speed).astype(np.int64)
        blocks = _Blocks(self, block_tokens)
        hash_ids, hash_offsets = blocks.ids(order)
        return Trace(
            format=self.format,
            line=_column(self.line)[order],
            due_ns=due_ns,
            input_tokens=_column(self.input_tokens)[order],
            output_tokens=_column(self.output_tokens)[order],
            block_tokens=blocks.tokens,
            hash_ids=hash_ids,
            hash_offsets=hash_offsets,
            left_out=SkippedRequests(self.no_input, self.no_output),
            notes=(*notes, *self._notes(), *blocks.notes, *(_unit(self.format, due_ns) if turns is None else ())),
            turns=turns,
        )

    def _in_sessions(self, speed: float) -> tuple[list[int], Turns]:
        """The rows session by session, each after those that it waits for, and which these are. Raises
        WorkloadError."""
        self.back = 0  # a session's own order counts
        in_one = {turn.row for turns in self.turns.values() for turn in turns}
        sessions = [[Pending(row, ())] for row in range(len(self.line)) if row not in in_one]
        sessions += [list(self._pending(session, turns)) for session, turns in self.turns.items()]
        sessions.sort(key=lambda session: self.at_ns[session[0].row])
        try:
            return planned(sessions, speed)
        except WaitsForItself as circle:
            raise WorkloadError(
                f"{self.path} line {self.number[circle.row]} waits for itself, through what its session's turns have "
                "as after; name earlier turns there."
            ) from None

    def _pending(self, session: str | int, turns: Sequence[_Turn]) -> Iterator[Pending]:
        row_of = {turn.name: turn.row for turn in turns if turn.name is not None}
        for place, turn in enumerate(turns):
            if turn.after is not None:
                for name in turn.after:
                    if name not in row_of:
                        raise WorkloadError(
                            f"{self.path} line {turn.number} waits for the turn '{printable(str(name))}', which is not "
                            f"among those of its session '{printable(str(session))}' that are played; name one of them."
                        )
                waits = tuple((row_of[name], turn.delay_ns or 0, False) for name in dict.fromkeys(turn.after))
            elif not place:
                waits = ()
            elif turn.delay_ns is not None:
                waits = ((turns[place - 1].row, turn.delay_ns, False),)
            else:
                waits = ((turns[place - 1].row, max(0, self.at_ns[turn.row] - self.at_ns[turns[place - 1].row]), True),)
            if place and not waits:
                raise WorkloadError(
                    f"{self.path} line {turn.number} waits for no turn, which only the first of a session may; name "
                    "one in its after."
                )
            yield Pending(turn.row, waits)

    def _notes(self) -> Iterator[str]:
        if self.back:
            yield (
                f"{self.back} of its lines come before a line above them, by {self.most_back_ns / 1e9:g} s at the "
                "most; they are sorted"
            )
        if self.text_alone:
            yield (
                f"{self.text_alone} of its requests have a text and no input_length: a token is counted for "
                f"{BYTES_A_TOKEN} bytes of it, and other text of that length is sent"
            )
        if self.with_images:
            yield f"{self.with_images} of its requests came with images, which are not sent: all their tokens are text"

    def _nothing(self) -> str:
        """Why there is nothing to play."""
        if not self.data_lines:
            return f"{self.path} holds no requests; name another --trace."
        span_ns = self.latest_ns - self.begin_ns
        if span_ns < self.from_ns:
            return (
                f"--trace-from {self.from_ns / 1e9:g} is beyond the end of {self.path}, whose last request comes "
                f"{span_ns / 1e9:g} s after its first."
            )
        return (
            f"{self.path} has no request that can be played: {self.no_input} have no input tokens, and "
            f"{self.no_output} others no output tokens."
        )


class _Blocks:
    """The hash ids of what was read, and how many tokens each stands for: the format's own number where the lengths
    allow it; else the one that they allow; or as an option says, whatever they allow. tokens: 0 where there are no
    ids. Raises WorkloadError."""

    def __init__(self, played: _Played, asked: int | None) -> None:
        self._played = played
        self._offsets = _column(played.hash_offsets)
        self._counts = np.diff(self._offsets)
        self._lengths = _column(played.input_tokens)
        self.notes: list[str] = []
        self.tokens = _BLOCK_TOKENS.get(played.format, 0) if len(played.hash_ids) else 0
        if not self.tokens:
            self.notes += ["it has no hash_ids, so --trace-block-tokens changes nothing"] if asked else []
            return
        wrong = self._wrong(self.tokens if asked is None else asked)
        if asked is not None:
            self.tokens = asked
            if len(wrong):
                self.notes.append(
                    f"{len(wrong)} of its requests have not one of their hash_ids for each {asked} tokens: ids beyond "
                    "a prompt's end are passed over, and what has none shares nothing"
                )
        elif len(wrong):
            self.tokens = self._only(int(wrong[0]))
            self.notes.append(f"its hash_ids stand for blocks of {self.tokens} tokens, as its lengths say")

    def _wrong(self, tokens: int) -> NDArray[np.int64]:
        """The requests whose ids are not as many as their blocks."""
        return np.flatnonzero((self._counts > 0) & (self._counts != -(-self._lengths // tokens)))

    def _only(self, wrong: int) -> int:
        """The one number, or else the one power of two, that all lengths allow."""
        own = self._counts > 0
        counts, lengths = self._counts[own], self._lengths[own]
        several = counts > 1
        least = int((-(-lengths // counts)).max())
        most = int(((lengths - 1)[several] // (counts - 1)[several]).min(initial=MOST_TOKENS))
        powers = [1 << power for power in range(31) if least <= 1 << power <= most]
        if least == most or len(powers) == 1:
            return least if least == most else powers[0]
        played = self._played
        fits = f"{least} to {most} fit its lines" if least <= most else "no number fits all of its lines"
        raise WorkloadError(
            f"{played.path} line {played.number[wrong]} has {self._counts[wrong]} hash_ids for its "
            f"{self._lengths[wrong]} input tokens, and blocks of {self.tokens} tokens, as of format {played.format}, "
            f"make {-(-int(self._lengths[wrong]) // self.tokens)}; say with --trace-block-tokens how many an id stands "
            f"for ({fits})."
        )

    def ids(self, order: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """They of the requests in that order, at most one for each block, and where each request's begin."""
        counts = self._counts if not self.tokens else np.minimum(self._counts, -(-self._lengths // self.tokens))
        begins, counts = self._offsets[:-1][order], counts[order]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], counts)
        return np.asarray(self._played.hash_ids, np.uint64).view(np.int64)[places], offsets


def _unit(format: str, due_ns: NDArray[np.int64]) -> Iterator[str]:
    """A doubt about the unit of the times, for a rate that no trace has."""
    span_s = float(due_ns[-1]) / 1e9
    rate = (len(due_ns) - 1) / span_s if span_s else 0.0
    if format == "mooncake" and rate > MOST_RATE:
        yield (
            f"its times make {rate:.4g} requests a second, as milliseconds, which format {format} has; if they are "
            "seconds, add --trace-speed 0.001"
        )
    elif format in ("bailian", "burstgpt") and len(due_ns) > 2 and 0 < rate < LEAST_RATE:
        yield (
            f"its times make a request in {1 / rate:.4g} seconds, which format {format} has; if they are milliseconds, "
            "add --trace-speed 1000"
        )


def _column(numbers: array[int]) -> NDArray[np.int64]:
    return np.asarray(numbers, np.int64)
