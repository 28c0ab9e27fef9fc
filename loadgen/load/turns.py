"""Which request waits for which: the turns of sessions, when each is due, and whose conversation it goes on with.

A turn waits for turns of its own session. It is due when the last of these waits is over; each begins with a reply's
end and lasts as long as a person thinks, or as a tool runs. Most turns wait for the one before them and repeat all that
was said there. Where an agent begins others beside itself, theirs wait for its reply, and its next turn waits for them.
All of it is known before the clock starts, so every turn has its number: turns are numbered session by session, each
after those that it waits for. Pure.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from loadgen.load.lengths import Lengths

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray


class TurnDelay(NamedTuple):
    """For the end of a turn, by its number, and so long after it. from_due: so long after that turn was due, but at
    least until it has ended."""

    turn: int
    delay_ns: int
    from_due: bool = False


class Base(NamedTuple):
    """The turn whose conversation another one goes on with: all that was said, or without the reply its prompt alone,
    where a history was cut back."""

    turn: int
    reply: bool = True


class Turns:
    """The turns of some sessions, by their numbers. All counts begin at 0."""

    def __init__(
        self,
        counts: NDArray[np.int64],
        think_time_ms: Lengths | None = None,
        *,
        from_due: bool = False,
        waits: Mapping[int, tuple[TurnDelay, ...]] | None = None,
        bases: Mapping[int, Base | None] | None = None,
        whole: bool = False,
    ) -> None:
        """`counts` (sessions,): how many turns each session has. think_time_ms: before each turn that is not in
        `waits`. bases: of turns that do not go on with the one before them. whole: each turn has its whole prompt, and
        repeats nothing that was replied."""
        import numpy as np

        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.total = int(self.first[-1])
        self.whole = whole
        self._think_time_ms, self._from_due = think_time_ms, from_due
        if think_time_ms is not None:
            think_time_ms.at(0)  # the first of a law imports scipy for most of a second: now, not during the load
        self._first: list[int] = self.first.tolist()  # looked up one by one while the clock runs
        self._waits, self._bases = waits or {}, bases or {}
        # where all turns follow the one before them nothing is looked up
        self._followers = _reversed(self.total, self._waiting_for) if self._waits else None
        self._repeats = None if whole or not self._bases else _reversed(self.total, self._repeating)

    @property
    def follow_each_other(self) -> bool:
        """Whether every turn waits for the one before it alone, and repeats all that was said there."""
        return not (self.whole or self._waits or self._bases)

    def whole_sessions(self, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Keeps of a choice among the turns (total,) those whose session is chosen as a whole."""
        import numpy as np

        whole = np.logical_and.reduceat(kept, self.first[:-1])
        chosen: NDArray[np.bool_] = np.repeat(whole, np.diff(self.first))
        return chosen

    def only(self, kept: NDArray[np.bool_]) -> Turns:
        """Some whole sessions of turns that say themselves what they wait for."""
        import numpy as np

        counts = np.diff(self.first)[kept[self.first[:-1]]]
        number_of = (np.cumsum(kept) - 1).tolist()
        waits = {
            number_of[number]: tuple(wait._replace(turn=number_of[wait.turn]) for wait in own)
            for number, own in self._waits.items()
            if kept[number]
        }
        return Turns(counts, waits=waits, whole=self.whole)

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
        """How long before that turn somebody thinks, where it waits for the one before it."""
        return 0 if self._think_time_ms is None else self._think_time_ms.at(number) * 1_000_000

    def waits(self, number: int) -> tuple[TurnDelay, ...]:
        """What that turn waits for; nothing where it is its session's first."""
        if (own := self._waits.get(number)) is not None:
            return own
        return (TurnDelay(number - 1, self.think_ns(number), self._from_due),) if self.place(number)[1] else ()

    def followers(self, number: int) -> Sequence[int]:
        """The turns that wait for that one."""
        if self._followers is not None:
            return self._followers.get(number, ())
        return () if self.is_last(number) else (number + 1,)

    def after(self, number: int) -> tuple[int, ...]:
        """Which turns of its session it waits for, the first being 1; empty where that is the one before it."""
        session, turn = self.place(number)
        places = tuple(wait.turn - self._first[session] + 1 for wait in self._waits.get(number, ()))
        return () if places == (turn,) else places

    def base(self, number: int) -> Base | None:
        """Whose conversation it goes on with; None where its prompt is new."""
        if self.whole or number in self._bases:
            return self._bases.get(number)
        return Base(number - 1) if self.place(number)[1] else None

    def repeated_by(self, number: int) -> Sequence[int]:
        """The turns that go on with that one's conversation."""
        if self.whole:
            return ()
        if self._repeats is not None:
            return self._repeats.get(number, ())
        return () if self.is_last(number) else (number + 1,)

    def _waiting_for(self, number: int) -> Iterable[int]:
        return (wait.turn for wait in self.waits(number))

    def _repeating(self, number: int) -> Iterable[int]:
        base = self.base(number)
        return () if base is None else (base.turn,)


def _reversed(total: int, of: Callable[[int], Iterable[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number in range(total):
        for earlier in of(number):
            found[earlier].append(number)
    return dict(found)


class ActiveSessions:
    """The sessions under way: which turns may be sent as others end. Times are ns, or seconds where so asked."""

    def __init__(self, turns: Turns, *, in_seconds: bool = False) -> None:
        self._turns = turns
        self._delay_unit = 1e9 if in_seconds else 1
        self._left: dict[int, int] = {}  # by session: how many of its turns are not over
        self._waiting: dict[int, tuple[int, float]] = {}  # by turn: for how many more it waits, and its due time so far
        self._lost: set[int] = set()  # turns that can no longer be sent, of sessions under way

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, session: int) -> bool:
        return session in self._left

    def begin(self, session: int) -> None:
        self._left[session] = self._turns.count(session)

    def ended(self, number: int, due: float, done: float) -> list[tuple[int, float]]:
        """The turns that wait for nothing any more, now that this one has ended, and when each is due."""
        ready = []
        for later in self._turns.followers(number):
            if later in self._lost:
                continue
            waits = self._turns.waits(later)
            wait = next(each for each in waits if each.turn == number)
            delay = wait.delay_ns if self._delay_unit == 1 else wait.delay_ns / self._delay_unit
            at = max((due if wait.from_due else done) + delay, done)
            left, so_far = self._waiting.pop(later, (len(waits), at))
            if left > 1:
                self._waiting[later] = (left - 1, max(so_far, at))
            else:
                ready.append((later, max(so_far, at)))
        self._over(number, 1)
        return ready

    def failed(self, number: int) -> list[int]:
        """The turns that can no longer be sent, now that this one has failed: all that wait for it, or for one that
        does."""
        reached, lost = [number], list[int]()
        while reached:
            for later in self._turns.followers(reached.pop()):
                if later not in self._lost:
                    self._lost.add(later)
                    self._waiting.pop(later, None)
                    reached.append(later)
                    lost.append(later)
        self._over(number, 1 + len(lost))
        return sorted(lost)

    def _over(self, number: int, turns: int) -> None:
        session = self._turns.place(number)[0]
        self._left[session] -= turns
        if not self._left[session]:
            del self._left[session]
            if self._lost:
                begin = self._turns.begin(session)
                self._lost.difference_update(range(begin, begin + self._turns.count(session)))
