"""Conversations and agents: a session's next turn is due when people have thought, or a tool has run, and repeats all
that was said.

How many turns each session has, what each adds, how long people think and which agents begin others are drawn
beforehand. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

import msgspec

from backends.untrusted import escaped
from loadgen.load.lengths import Law, Lengths
from loadgen.load.shapes import Shape
from loadgen.load.turns import Base, TurnDelay, Turns

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

EVERY = "every:"  # before the law of a think time that passes from when turns are due
MOST_SUBAGENTS, MOST_SUBAGENT_TURNS = 100, 10_000
_SUBAGENTS = 0x1E9B  # among the streams of `lengths`
_OF_TURNS = 1 << 62  # keys of what turns add and what is replied begin here; groups of a prefix are below


class Subagents(msgspec.Struct, frozen=True):
    """After that share of an agent's replies, so many others begin, each with a prompt of its own and so many turns;
    the agent goes on when all of them have ended."""

    ratio: float
    count: int
    turns: int

    def __str__(self) -> str:
        return f"{self.ratio:g}:{self.count}:{self.turns}"


def parse_subagents(text: str) -> Subagents:
    """'SHARE:COUNT:TURNS'. Raises ValueError with one sentence."""
    match = re.fullmatch(r"(\d(?:\.\d*)?|\.\d+):(\d{1,9}):(\d{1,9})", text)
    if match is None:
        raise ValueError(f"--subagents '{escaped(text)}' is not understood; use SHARE:COUNT:TURNS, as 0.1:2:4.")
    found = Subagents(float(match[1]), int(match[2]), int(match[3]))
    fits = 1 <= found.count <= MOST_SUBAGENTS and 1 <= found.turns <= MOST_SUBAGENT_TURNS
    if not (0 < found.ratio <= 1 and fits):
        raise ValueError(
            f"--subagents '{text}' needs a share above 0 and up to 1, 1 to {MOST_SUBAGENTS} agents, and 1 to "
            f"{MOST_SUBAGENT_TURNS} turns."
        )
    return found


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """turns: how many each session has, without those of sub-agents; None: as `counts` says, for conversations that
    somebody had. think_time: in milliseconds. from_due: it passes from when the turn before was due, but no turn is due
    before its reply has ended. delays_ms: what passes before each turn of these conversations in place of it; negative:
    it does not. context_tokens: a turn that would take prompt and reply beyond that goes on from its agent's first
    prompt. left_out: what of these conversations is not sent, as a clause."""

    turns: Law | None
    think_time: Law
    from_due: bool = False
    subagents: Subagents | None = None
    context_tokens: int | None = None
    counts: tuple[int, ...] = ()
    delays_ms: tuple[int, ...] = ()
    left_out: str = ""

    @property
    def pause(self) -> str:
        """The think time, as its option has it."""
        return f"{EVERY}{self.think_time}" if self.from_due else str(self.think_time)

    def drawn(self, sessions: int, seed: int, own: Added | None = None) -> Turns:
        """The turns of so many sessions; where `counts` has fewer, they begin again. own: what each turn adds."""
        import numpy as np

        think_time = Lengths(self.think_time, seed, "think")
        if self.turns is not None:
            counts = Lengths(self.turns, seed, "turns").first(sessions)
        else:
            counts = np.resize(np.asarray(self.counts, np.int64), sessions)
        waits: dict[int, tuple[TurnDelay, ...]] = {}
        bases: dict[int, Base | None] = {}
        if self.delays_ms:
            waits = self._delays(counts)
        if self.subagents is not None:
            counts = self._with_subagents(counts, seed, think_time, waits, bases)
        turns = Turns(counts, think_time, from_due=self.from_due, waits=waits, bases=bases)
        if self.context_tokens is None or own is None:
            return turns
        _cut_back(turns, own, self.context_tokens, bases)
        return Turns(counts, think_time, from_due=self.from_due, waits=waits, bases=bases)

    def _delays(self, counts: NDArray[np.int64]) -> dict[int, tuple[TurnDelay, ...]]:
        """What the turns wait for that have a delay of their own. A session's first turn waits for nothing."""
        import numpy as np

        firsts = {0, *np.cumsum(counts).tolist()}
        delays_ms = np.resize(self.delays_ms, int(counts.sum())).tolist()
        return {
            number: (TurnDelay(number - 1, delay_ms * 1_000_000),)
            for number, delay_ms in enumerate(delays_ms)
            if delay_ms >= 0 and number not in firsts
        }

    def _with_subagents(
        self,
        counts: NDArray[np.int64],
        seed: int,
        think_time_ms: Lengths,
        waits: dict[int, tuple[TurnDelay, ...]],
        bases: dict[int, Base | None],
    ) -> NDArray[np.int64]:
        """How many turns each session has with those of its sub-agents, which are numbered after the turn that begins
        them. Fills what turns wait for and go on with, where that is not the turn before them."""
        import numpy as np

        assert self.subagents is not None
        each, number, whole = self.subagents, 0, []
        for session, count in enumerate(counts.tolist()):
            begins = np.random.default_rng((seed, _SUBAGENTS, session)).random(count) < each.ratio
            begin = number
            for turn, begins_others in enumerate(begins.tolist()):
                number += 1
                if begins_others and turn + 1 < count:
                    agents = range(number, number + each.count * each.turns, each.turns)
                    for first in agents:
                        waits[first], bases[first] = (TurnDelay(number - 1, 0),), None
                    joined = number + each.count * each.turns
                    think = TurnDelay(number - 1, think_time_ms.at(joined) * 1_000_000, self.from_due)
                    waits[joined] = (think, *(TurnDelay(first + each.turns - 1, 0) for first in agents))
                    bases[joined], number = Base(number - 1), joined
            whole.append(number - begin)
        return np.array(whole, np.int64)


class Added(Protocol):
    """What each turn adds to all that was said before it, by its number, as `DrawnShapes` has it. shape: where nothing
    was said before; first_tokens: the law of such prompts, where it is another one."""

    first_tokens: Law | None

    def lengths(self, number: int) -> Shape: ...

    def shape(self, number: int, member: int | None = None) -> Shape: ...

    def total_tokens(self, requests: int) -> NDArray[np.int64]: ...


def _cut_back(turns: Turns, own: Added, most_tokens: int, bases: dict[int, Base | None]) -> None:
    """Has turns go on from their agent's first prompt where prompt and reply would be more than that."""
    shapes = SessionShapes(turns, own)
    prompts: list[int] = []  # of each turn
    firsts: list[int] = []  # of the agent that each turn is of
    for number in range(turns.total):
        added, base = shapes.own(number), turns.base(number)
        if base is None:
            prompts.append(added.prompt_tokens)
            firsts.append(number)
            continue
        firsts.append(firsts[base.turn])
        tokens = prompts[base.turn] + shapes.own(base.turn).output_tokens + added.prompt_tokens
        if tokens + added.output_tokens > most_tokens:
            bases[number] = Base(firsts[number], reply=False)
            tokens = prompts[firsts[number]] + added.prompt_tokens
        prompts.append(tokens)


class SessionShapes:
    """What each turn asks for when every reply is as long as was asked: all that was said before it, and its own."""

    def __init__(self, turns: Turns, own: Added) -> None:
        self.turns = turns
        self._own = own

    def own(self, number: int) -> Shape:
        """What that turn adds. Only an agent's first turn begins as those of other sessions do."""
        if self.turns.base(number) is not None:
            return self._own.lengths(number)
        session, turn = self.turns.place(number)
        shape = self._own.shape(number, session)
        shared = sum(tokens for _, tokens in shape.segments) if turn else shape.shared_tokens
        return shape._replace(shared_tokens=shared)

    def shape(self, number: int) -> Shape:
        """Its segments go on into the reply, which is the beginning of later prompts."""
        chain = [Base(number)]
        while (base := self.turns.base(chain[-1].turn)) is not None:
            chain.append(base)
        first = chain.pop()
        own = self.own(first.turn)
        tokens, shared = own.prompt_tokens, own.shared_tokens
        segments = [*own.segments, _added(first.turn, tokens - sum(size for _, size in own.segments))]
        earlier = first
        for later in reversed(chain):
            if earlier.reply:
                segments.append(_reply(earlier.turn, own.output_tokens))
                tokens += own.output_tokens
            own, shared, earlier = self.own(later.turn), tokens, later
            segments.append(_added(later.turn, own.prompt_tokens))
            tokens += own.prompt_tokens
        return Shape(tokens, own.output_tokens, (*segments, _reply(number, own.output_tokens)), shared)

    def id(self, number: int) -> int:
        return number

    def longest_tokens(self) -> int:
        """Prompt and reply of the longest turn."""
        import numpy as np

        if self.turns.follow_each_other and self._own.first_tokens is None:
            sums = np.concatenate([[0], np.cumsum(self._own.total_tokens(self.turns.total))])
            return int(np.diff(sums[self.turns.first]).max(initial=0))
        wholes = np.zeros(self.turns.total + 1, np.int64)
        for number in range(self.turns.total):
            own, base = self.own(number), self.turns.base(number)
            wholes[number] = own.prompt_tokens + own.output_tokens
            if base is not None:
                wholes[number] += wholes[base.turn] - (0 if base.reply else self.own(base.turn).output_tokens)
        return int(wholes.max())


def _added(number: int, tokens: int) -> tuple[int, int]:
    return _OF_TURNS + 2 * number, tokens


def _reply(number: int, tokens: int) -> tuple[int, int]:
    return _OF_TURNS + 2 * number + 1, tokens
