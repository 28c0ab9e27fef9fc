"""Conversations: a session's next turn is due its think time after its last reply ended, or after the turn before was
due, and repeats all that was said.

How many turns each session has, what each adds and how long people think are drawn beforehand, so every turn has its
number before the clock starts: turns are numbered session by session. Pure.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Protocol

import msgspec

from loadgen.load.lengths import Law, Lengths
from loadgen.load.shapes import Shape

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

EVERY = "every:"  # before the law of a think time that passes from when turns are due
_OF_TURNS = 1 << 62  # keys of what turns add and what is replied begin here; groups of a prefix are below


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """turns: how many each session has; None: as `counts` says, for conversations that somebody had. think_time: in
    milliseconds. from_due: it passes from when the turn before was due, but no turn is due before its reply has ended.
    left_out: what of these conversations is not sent, as a clause."""

    turns: Law | None
    think_time: Law
    from_due: bool = False
    counts: tuple[int, ...] = ()
    left_out: str = ""

    @property
    def pause(self) -> str:
        """The think time, as its option has it."""
        return f"{EVERY}{self.think_time}" if self.from_due else str(self.think_time)

    def drawn(self, sessions: int, seed: int) -> Turns:
        """The turns of so many sessions; where `counts` has fewer, they begin again."""
        import numpy as np

        if self.turns is not None:
            counts = Lengths(self.turns, seed, "turns").first(sessions)
        else:
            counts = np.resize(np.asarray(self.counts, np.int64), sessions)
        return Turns(counts, Lengths(self.think_time, seed, "think"), from_due=self.from_due)


class Turns:
    """Which turn of which session a request is, by its number. All counts begin at 0."""

    def __init__(self, counts: NDArray[np.int64], think_time_ms: Lengths, *, from_due: bool = False) -> None:
        """`counts` (sessions,): how many turns each session has."""
        import numpy as np

        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.total = int(self.first[-1])
        self._think_time_ms = think_time_ms
        self.from_due = from_due
        think_time_ms.at(0)  # the first of a law imports scipy for most of a second: now, not during the load
        self._first: list[int] = self.first.tolist()  # looked up one by one while the clock runs

    def begin(self, session: int) -> int:
        """The number of its first turn."""
        return self._first[session]

    def count(self, session: int) -> int:
        return self._first[session + 1] - self._first[session]

    def place(self, number: int) -> tuple[int, int]:
        """(session, turn)."""
        session = bisect.bisect_right(self._first, number) - 1
        return session, number - self._first[session]

    def is_last(self, number: int) -> bool:
        session, turn = self.place(number)
        return turn + 1 == self.count(session)

    def think_ns(self, number: int) -> int:
        """How long after the turn before it that turn is due: after its reply, or from when it was due."""
        return self._think_time_ms.at(number) * 1_000_000


class Added(Protocol):
    """What each turn adds to all that was said before it, by its number, as `DrawnShapes` has it."""

    def lengths(self, number: int) -> Shape: ...

    def shape(self, number: int, member: int | None = None) -> Shape: ...

    def total_tokens(self, requests: int) -> NDArray[np.int64]: ...


class SessionShapes:
    """What each turn asks for when every reply is as long as was asked: all that was said before it, and its own."""

    def __init__(self, turns: Turns, own: Added) -> None:
        self.turns = turns
        self._own = own

    def own(self, number: int) -> Shape:
        """What that turn adds. Only a session's first turn begins as those of other sessions do."""
        session, turn = self.turns.place(number)
        return self._own.lengths(number) if turn else self._own.shape(number, session)

    def shape(self, number: int) -> Shape:
        """Its segments go on into the reply, which is the beginning of later prompts."""
        turn = self.turns.place(number)[1]
        own = self.own(number - turn)
        tokens, shared, output = own.prompt_tokens, own.shared_tokens, own.output_tokens
        segments = [*own.segments, _added(number - turn, tokens - sum(size for _, size in own.segments))]
        for earlier in range(number - turn + 1, number + 1):
            segments.append(_reply(earlier - 1, output))
            shared = tokens + output
            own = self.own(earlier)
            tokens, output = shared + own.prompt_tokens, own.output_tokens
            segments.append(_added(earlier, own.prompt_tokens))
        return Shape(tokens, output, (*segments, _reply(number, output)), shared)

    def id(self, number: int) -> int:
        return number

    def longest_tokens(self) -> int:
        """Prompt and reply of the longest last turn."""
        import numpy as np

        sums = np.concatenate([[0], np.cumsum(self._own.total_tokens(self.turns.total))])
        return int(np.diff(sums[self.turns.first]).max(initial=0))


def _added(number: int, tokens: int) -> tuple[int, int]:
    return _OF_TURNS + 2 * number, tokens


def _reply(number: int, tokens: int) -> tuple[int, int]:
    return _OF_TURNS + 2 * number + 1, tokens
