"""Traces of real traffic: when each request came, how long it and its reply were, and which blocks its prompt shared.

Four published formats are read, one request a line. What a line has besides the columns named here is not looked at.

    mooncake  JSON lines, from Mooncake (FAST '25): timestamp (ms), input_length, output_length, hash_ids (512 tokens)
    bailian   JSON lines, Qwen on Alibaba's Bailian (ATC '25): as above, with timestamp in s, blocks of 16, a chat_id
    azure     CSV, from Azure in 2023 and 2024: TIMESTAMP (with or without a time zone), ContextTokens, GeneratedTokens
    burstgpt  CSV, from BurstGPT (KDD '25): Timestamp (s), Request tokens, Response tokens; a failure has 0 of these

The columns of CSV are found by the heading: BurstGPT's third file has other ones between. A file may be gzipped (.gz).
Equal hash ids stand for equal tokens; the last block of a prompt may be a part of one. Lines are decoded one by one
into columns of numbers; nothing else is kept of them.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import itertools
import math
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.untrusted import UNDECODABLE, reason
from loadgen.load.lengths import MOST_TOKENS, WorkloadError

MOST_LINE_BYTES = 1 << 24  # a million hash ids take half of it
MOST_SECONDS = 4e9  # of a timestamp, and between two of them: nanoseconds fit 64 bits

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS * 1e3)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
_HashId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True)
class LeftOut:
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
    """The requests of a trace in its order. Shapes: (n,), but for `hash_ids`, which is flat, and is cut by
    `hash_offsets` (n + 1,). `left_out` counts what was read from `from_s` on and cannot be played."""

    format: str
    line: NDArray[np.int64]  # number of its data line in the file, from 0: a heading and empty lines do not count
    due_ns: NDArray[np.int64]  # since the first request that is played; ascending; the first is 0
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    block_tokens: int  # of one hash id; 0 where the format has none
    hash_ids: NDArray[np.int64]
    hash_offsets: NDArray[np.int64]
    left_out: LeftOut

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
        counts = np.diff(self.hash_offsets)
        first_ns = self.due_ns[fits][0]
        too_long = self.line[~fits]
        return replace(
            self,
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


class _Mooncake(msgspec.Struct):
    timestamp: _Milliseconds
    input_tokens: _Length = msgspec.field(name="input_length")
    output_tokens: _Length = msgspec.field(name="output_length")
    hash_ids: list[_HashId]

    def at_ns(self) -> int:
        return round(self.timestamp * 1e6)


class _Bailian(msgspec.Struct):
    chat_id: int  # tells the format from Mooncake's
    timestamp: _Seconds
    input_tokens: _Length = msgspec.field(name="input_length")
    output_tokens: _Length = msgspec.field(name="output_length")
    hash_ids: list[_HashId]

    def at_ns(self) -> int:
        return round(self.timestamp * 1e9)


class _Azure(msgspec.Struct):
    timestamp: datetime = msgspec.field(name="TIMESTAMP")
    input_tokens: _Length = msgspec.field(name="ContextTokens")
    output_tokens: _Length = msgspec.field(name="GeneratedTokens")
    hash_ids: ClassVar[list[int]] = []

    def at_ns(self) -> int:
        """Since 1970. The seventh digit that 2023's fractions of a second have is always 0."""
        at = self.timestamp if self.timestamp.tzinfo else self.timestamp.replace(tzinfo=UTC)
        return (at - _EPOCH) // _MICROSECOND * 1000


class _BurstGpt(msgspec.Struct):
    timestamp: _Seconds = msgspec.field(name="Timestamp")
    input_tokens: _Length = msgspec.field(name="Request tokens")
    output_tokens: _Length = msgspec.field(name="Response tokens")
    hash_ids: ClassVar[list[int]] = []

    def at_ns(self) -> int:
        return round(self.timestamp * 1e9)


_Row = _Mooncake | _Bailian | _Azure | _BurstGpt
_ROWS: dict[str, type[_Row]] = {
    "mooncake": _Mooncake,
    "azure": _Azure,
    "burstgpt": _BurstGpt,
    "bailian": _Bailian,
}
_BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}
FORMATS = tuple(_ROWS)


def read(
    path: Path, format: str | None = None, speed: float = 1.0, limit: int | None = None, from_s: float = 0.0
) -> Trace:
    """The requests that come `from_s` seconds or more after the first of the trace, at most `limit` that can be played,
    with their times divided by `speed`. Without a `format` the file's first line tells it. Lines behind the last
    request that is played are not read. Raises WorkloadError."""
    _check(format, speed, limit, from_s)
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
            row = decode(text)
        except (*UNDECODABLE, csv.Error) as error:
            raise WorkloadError(f"{path} line {number} is no request in format {name}: {reason(error)}.") from None
        if played.add(number, row):
            break
    return played.trace(speed)


def _check(format: str | None, speed: float, limit: int | None, from_s: float) -> None:
    if format is not None and format not in FORMATS:
        raise WorkloadError(f"there is no trace format '{format}'; the known ones are {', '.join(FORMATS)}.")
    if not (speed > 0 and math.isfinite(speed)):
        raise WorkloadError(f"--trace-speed {speed:g} must be a number above 0.")
    if limit is not None and limit < 1:
        raise WorkloadError(f"--trace-limit {limit} must be 1 or more.")
    if not from_s >= 0:
        raise WorkloadError(f"--trace-from {from_s:g} must be 0 or more seconds.")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1. Raises WorkloadError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MOST_LINE_BYTES), b""), 1):
                if len(line) == MOST_LINE_BYTES:
                    raise WorkloadError(
                        f"{path} line {number} has over {MOST_LINE_BYTES >> 20} MiB, as no line of a trace has."
                    )
                text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
                if text:
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise WorkloadError(f"cannot read the trace {path}: {str(why).rstrip('.')}; name another --trace.") from None


def _columns(name: str) -> set[str]:
    """What a format must have, as its lines or heading name it."""
    return {column.encode_name for column in msgspec.structs.fields(_ROWS[name])}


def _heading(text: bytes) -> list[str]:
    """Raises csv.Error or UnicodeDecodeError."""
    return next(csv.reader([text.decode()], strict=True), [])


def _recognised(path: Path, number: int, text: bytes) -> str:
    """The format whose columns all stand in the first line; of two formats, that with more columns."""
    found: set[str] = set()
    with contextlib.suppress(*UNDECODABLE, csv.Error):
        found = set(msgspec.json.decode(text, type=dict[str, Any]) if text.startswith(b"{") else _heading(text))
    fitting = [name for name in FORMATS if _columns(name) <= found]
    if not fitting:
        known = "; ".join(f"{name} ({', '.join(sorted(_columns(name)))})" for name in FORMATS)
        raise WorkloadError(f"{path} line {number} begins no trace of a known format, which are: {known}.")
    return max(fitting, key=lambda name: len(_columns(name)))


def _csv_decoder(path: Path, name: str, number: int, text: bytes) -> Callable[[bytes], Any]:
    """Decodes a line of a file with this heading. Raises WorkloadError; the decoder raises what UNDECODABLE has, or
    csv.Error."""
    try:
        heading = _heading(text)
    except (*UNDECODABLE, csv.Error) as error:
        raise WorkloadError(f"{path} line {number} is no heading in format {name}: {reason(error)}.") from None
    missing = sorted(_columns(name) - set(heading))
    if missing:
        raise WorkloadError(f"{path} line {number} is no heading in format {name}: there is no {missing[0]}.")
    places = [(column, heading.index(column)) for column in _columns(name)]

    def decode(line: bytes) -> Any:
        fields = _heading(line)
        if len(fields) != len(heading):
            raise csv.Error(f"it has {len(fields)} fields, and the heading has {len(heading)}")
        return msgspec.convert({column: fields[place] for column, place in places}, _ROWS[name], strict=False)

    return decode


def _numbers() -> array[int]:
    return array("q")


@dataclass
class _Played:
    """The columns of the requests that are played, as they are read."""

    path: Path
    format: str
    limit: int | None
    from_ns: int
    line: array[int] = field(default_factory=_numbers)
    at_ns: array[int] = field(default_factory=_numbers)  # since the first of the trace
    input_tokens: array[int] = field(default_factory=_numbers)
    output_tokens: array[int] = field(default_factory=_numbers)
    hash_ids: array[int] = field(default_factory=_numbers)
    hash_offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    data_lines: int = 0
    begin_ns: int = 0
    last_ns: int = 0
    no_input: int = 0
    no_output: int = 0

    def add(self, number: int, row: _Row) -> bool:
        """Takes the next line, the editor's `number`; true when there are enough. Raises WorkloadError."""
        at_ns = row.at_ns()
        if not self.data_lines:
            self.begin_ns = self.last_ns = at_ns
        self._check(number, row, at_ns)
        self.last_ns = at_ns
        self.data_lines += 1
        if at_ns - self.begin_ns < self.from_ns:
            return False
        if not (row.input_tokens and row.output_tokens):
            self.no_input += not row.input_tokens
            self.no_output += row.input_tokens > 0
            return False
        self.line.append(self.data_lines - 1)
        self.at_ns.append(at_ns - self.begin_ns)
        self.input_tokens.append(row.input_tokens)
        self.output_tokens.append(row.output_tokens)
        self.hash_ids.fromlist(row.hash_ids)
        self.hash_offsets.append(len(self.hash_ids))
        return len(self.line) == self.limit

    def _check(self, number: int, row: _Row, at_ns: int) -> None:
        if at_ns < self.last_ns:
            raise WorkloadError(
                f"{self.path} line {number} comes {(self.last_ns - at_ns) / 1e9:g} s before the line above it; sort "
                "the trace by its timestamps."
            )
        if at_ns - self.begin_ns > MOST_SECONDS * 1e9:
            raise WorkloadError(f"{self.path} line {number} comes over {MOST_SECONDS:g} s after the first.")
        block_tokens = _BLOCK_TOKENS.get(self.format, 0)
        needed = -(-row.input_tokens // block_tokens) if block_tokens else 0
        if len(row.hash_ids) != needed:
            raise WorkloadError(
                f"{self.path} line {number} must have {needed} hash_ids for its {row.input_tokens} input tokens, one "
                f"for each block of {block_tokens}, and has {len(row.hash_ids)}."
            )

    def trace(self, speed: float) -> Trace:
        """What was read, played `speed` times as fast. Raises WorkloadError where that is nothing."""
        if not self.line:
            raise WorkloadError(self._nothing())
        if self.at_ns[-1] - self.at_ns[0] > MOST_SECONDS * 1e9 * speed:
            raise WorkloadError(
                f"--trace-speed {speed:g} makes {self.path} last over {MOST_SECONDS:g} s; name a higher speed."
            )
        return Trace(
            format=self.format,
            line=_column(self.line),
            due_ns=np.rint((_column(self.at_ns) - self.at_ns[0]) / speed).astype(np.int64),
            input_tokens=_column(self.input_tokens),
            output_tokens=_column(self.output_tokens),
            block_tokens=_BLOCK_TOKENS.get(self.format, 0),
            hash_ids=_column(self.hash_ids),
            hash_offsets=_column(self.hash_offsets),
            left_out=LeftOut(self.no_input, self.no_output),
        )

    def _nothing(self) -> str:
        """Why there is nothing to play."""
        if not self.data_lines:
            return f"{self.path} holds no requests; name another --trace."
        span_ns = self.last_ns - self.begin_ns
        if span_ns < self.from_ns:
            return (
                f"--trace-from {self.from_ns / 1e9:g} is beyond the end of {self.path}, whose last request comes "
                f"{span_ns / 1e9:g} s after its first."
            )
        return (
            f"{self.path} has no request that can be played: {self.no_input} have no input tokens, and "
            f"{self.no_output} others no output tokens."
        )


def _column(numbers: array[int]) -> NDArray[np.int64]:
    return np.asarray(numbers, np.int64)
