"""What prompts share, and what the server kept of it: by hand, and as a report shows it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from loadgen.document import markdown
from loadgen.load import lengths
from loadgen.load.load import Load, parse_arrival
from loadgen.load.shapes import Prefix
from loadgen.monitor.server_view import ServerStats, ServerView
from loadgen.report import build, sharing, text
from loadgen.report.schema import Report
from loadgen.rundir.records import Record, table
from tests.loadgen.tables import facts, failure, manifest, request


def report(records: list[Record], convention: str = "loadgen", hits: int | None = None) -> Report:
    seen = ServerView(server=ServerStats(prefix_cache_hits=hits))
    return build.build(manifest(), table(records), [facts()], convention=convention, seen=seen)


def asked(number: int, ttft: float, shared: int = 0, cached: int | None = None) -> Record:
    """A request of 100 prompt tokens with that ttft in ms."""
    told = {"shared_tokens": shared or msgspec.UNSET, "cached_tokens": cached}
    return request(number, sent=1, first=1 + ttft, prompt_tokens=100, asked_prompt_tokens=100, **told)


def test_a_load_that_shares_nothing_has_no_word_on_it() -> None:
    built = report([request(number, cached_tokens=5) for number in range(4)], hits=0)
    assert built.sharing is None
    assert "hared" not in text.render(built) and "warm" not in markdown.render(text.summary(built)).replace(
        "warm cache", ""
    )


def test_numbers_by_hand_where_replies_tell() -> None:
    records = [
        asked(0, 100),
        asked(1, 30, 80, 64),
        asked(2, 90, 80),
        asked(3, 50, 80, 80),
        failure(4, shared_tokens=80),
    ]
    found = report(records, hits=999).sharing  # the replies' count comes first
    assert found is not None
    assert (found.prompt_tokens, found.shareable_tokens, found.cached_tokens) == (400, 240, 144)
    assert (found.cached_of_prompt_ratio, found.cached_of_shareable_ratio) == (144 / 400, 144 / 240)
    assert (found.cached_by, found.warm_by) == ("replies", "cached_tokens")
    cold, warm = found.ttft_cold_ms, found.ttft_warm_ms
    assert (cold.n, cold.mean, cold.p50, cold.min, cold.max) == (2, 95, 95, 90, 100)
    assert (warm.n, warm.mean, warm.p50, warm.p90, warm.p99) == (2, 40, 40, 48, 49.8)


def test_numbers_by_hand_where_the_server_alone_or_nobody_tells() -> None:
    records = [asked(0, 100), asked(1, 30, 80), asked(2, 90, 80)]
    for hits in (128, 0, None):
        found = report(records, hits=hits).sharing
        assert found is not None
        assert (found.cached_tokens, found.warm_by) == (hits, "shared_tokens")
        assert found.cached_by == (None if hits is None else "server")
        assert found.cached_of_shareable_ratio == (None if hits is None else hits / 160)
        assert (found.ttft_cold_ms.n, found.ttft_cold_ms.mean) == (1, 100)
        assert (found.ttft_warm_ms.n, found.ttft_warm_ms.mean) == (2, 60)


def test_ttft_is_that_of_the_convention() -> None:
    late = [request(at, scheduled=0, sent=10, first=110, shared_tokens=at or msgspec.UNSET) for at in range(2)]
    for convention, ttft in (("loadgen", 100), ("mlperf", 110)):
        found = report(late, convention).sharing
        assert found is not None and found.ttft_cold_ms.mean == found.ttft_warm_ms.mean == ttft


def test_nothing_that_ended_well_still_makes_a_report() -> None:
    found = report([failure(at, shared_tokens=80) for at in range(2)]).sharing
    assert found is not None and found.cached_of_shareable_ratio is None and found.ttft_warm_ms.n == 0
    text.render(report([failure(at, shared_tokens=80) for at in range(2)], hits=0))


def test_what_the_text_says() -> None:
    records = [asked(0, 100), asked(1, 30, 80, 64), asked(2, 50, 80, 80)]
    shown = text.render(report(records))
    line = (
        "Shared prefixes: 144 of the 160 prompt tokens that could be shared came from the prefix cache by the replies' "
    )
    assert line + "count (90.0 %, 48.0 % of all prompt tokens)." in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["ttft,", "cold", "1", "100.0"] in [row[:4] for row in rows]
    assert ["ttft,", "warm", "2", "40.00"] in [row[:4] for row in rows]
    assert "| ttft, warm | 2 | 40.00 |" in markdown.render(text.summary(report(records)))
    assert "by the server's counters (40.0 %," in text.render(report([asked(0, 9), asked(1, 9, 80)], hits=32))
    untold = text.render(report([asked(0, 9), asked(1, 9, 80)]))
    assert "the server does not tell" in untold and "ttft, warm" in untold
    off = text.render(report([asked(0, 9), asked(1, 9, 80)], hits=0))
    assert "0 of the 80 prompt tokens" in off and "ttft, warm" not in off  # nothing was warm


@given(st.integers(1, 5), st.integers(1, 40), st.randoms(use_true_random=False), st.integers(0, 9))
def test_no_order_of_requests_finds_more_than_could_be_shared(groups: int, n: int, random: object, seed: int) -> None:
    """A cache without limits that meets some of the requests in any order."""
    load = Load(arrival=parse_arrival("burst"), input_tokens=lengths.parse(50), output_tokens=lengths.parse(4),
                requests=n, prefix=Prefix(groups, 20), seed=seed)  # fmt: skip
    shapes = load.shapes()
    order = list(range(n))
    random.shuffle(order)  # type: ignore[attr-defined]
    order = order[: n - n // 4]
    seen: set[int] = set()
    hits, records = 0, []
    for number in order:
        shape = shapes.shape(number)
        ((group, tokens),) = shape.segments
        hits += tokens if group in seen else 0
        seen.add(group)
        records.append(request(number, shared_tokens=shape.shared_tokens or msgspec.UNSET))
    measured = table(records).measured()
    assert hits <= sharing.shareable_tokens(measured)
    if order == list(range(n)):
        assert hits == sharing.shareable_tokens(measured)
