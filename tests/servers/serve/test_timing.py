"""When tokens fall due: known answers, and what holds for any schedule."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from servers.serve.timing import FixedTiming


@dataclass
class Note:
    """A reply that only notes when it was called."""

    index: int
    received_ns: int
    n_tokens: int
    due_ns: list[int] = field(default_factory=list)

    def emit(self) -> None:
        raise AssertionError("the timing does not emit")


def drain(timing: FixedTiming) -> list[tuple[int, int]]:
    """Runs the schedule on a clock that jumps from one due time to the next: (time, reply) in order."""
    out = []
    while (due_ns := timing.next_due_ns()) is not None:
        assert timing.pop(due_ns - 1) is None  # never early
        reply = timing.pop(due_ns)
        if isinstance(reply, Note):
            reply.due_ns.append(due_ns)
            out.append((due_ns, reply.index))
    return out


def test_first_token_after_ttft_and_each_further_one_itl_later() -> None:
    timing = FixedTiming(ttft_ns=100, itl_ns=10)
    first, second = Note(1, 1000, 3), Note(2, 1005, 2)
    timing.submit(first)
    timing.submit(second)
    assert drain(timing) == [(1100, 1), (1105, 2), (1110, 1), (1115, 2), (1120, 1)]


def test_ties_go_by_the_number_of_the_request() -> None:
    timing = FixedTiming(ttft_ns=50, itl_ns=0)
    for index in (3, 1, 2):
        timing.submit(Note(index, 0, 2))
    assert drain(timing) == [(50, 1), (50, 1), (50, 2), (50, 2), (50, 3), (50, 3)]


def test_what_goes_out_late_does_not_push_the_rest_back() -> None:
    timing = FixedTiming(ttft_ns=100, itl_ns=10)
    note = Note(1, 0, 4)
    timing.submit(note)
    assert [timing.pop(125) for _ in range(4)] == [note, note, note, None]
    assert timing.next_due_ns() == 130


def test_a_cancelled_reply_is_not_heard_of_again() -> None:
    timing = FixedTiming(ttft_ns=100, itl_ns=10)
    kept, cancelled = Note(1, 0, 2), Note(2, 0, 1_000_000)
    timing.submit(kept)
    timing.submit(cancelled)
    assert timing.pop(100) is kept
    timing.cancel(cancelled)
    timing.cancel(cancelled)
    assert timing.pop(1_000_000) is kept
    assert timing.pop(1_000_000) is None
    assert timing.next_due_ns() is None


def due_times(seed: int, index: int, *, among: int = 0) -> list[int]:
    timing = FixedTiming(ttft_ns=1_000_000, itl_ns=10_000, jitter_ratio=0.2, seed=seed)
    note = Note(index, 0, 50)
    timing.submit(note)
    for other in range(among):
        timing.submit(Note(1000 + other, 0, 50))
    drain(timing)
    return note.due_ns


def test_jitter_depends_on_seed_and_number_alone() -> None:
    assert due_times(7, 3) == due_times(7, 3, among=5)
    assert due_times(7, 3) != due_times(7, 4)
    assert due_times(7, 3) != due_times(8, 3)


@given(
    st.integers(0, 10**9), st.integers(0, 10**8), st.floats(0, 0.99), st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 20)), min_size=1, max_size=20),
)  # fmt: skip
def test_every_token_once_in_order_within_the_jitter(
    ttft_ns: int, itl_ns: int, jitter: float, seed: int, asked: list[tuple[int, int]]
) -> None:
    timing = FixedTiming(ttft_ns, itl_ns, jitter, seed)
    notes = [Note(index, received_ns, n_tokens) for index, (received_ns, n_tokens) in enumerate(asked)]
    for note in notes:
        timing.submit(note)
    times = drain(timing)
    assert times == sorted(times)
    for note in notes:
        assert len(note.due_ns) == note.n_tokens
        starts = [note.received_ns, *note.due_ns]
        for number, (start, end) in enumerate(itertools.pairwise(starts)):
            interval = itl_ns if number else ttft_ns
            assert int(interval * (1 - jitter)) - 1 <= end - start <= interval * (1 + jitter)
