"""What a search says of its probes: what was in the way of more than the load it names."""

from __future__ import annotations

import msgspec
import pytest

from loadgen.document import markdown, terminal
from loadgen.search import page, results
from loadgen.search.highest import Prior
from loadgen.search.results import ProbeKind, ProbeRun, Range, SearchOptions, SearchResult
from tests.loadgen.search.test_highest import probe

OPTIONS = SearchOptions(slo_ms={"ttft": 500.0, "tpot": 50.0}, attain=0.9, axis="rate", budget_s=60.0, config={})


def run(kind: ProbeKind, load: float, met: int, misses: str = "ttft", *findings: str) -> ProbeRun:
    share = met / 100
    return ProbeRun(number=1, directory="1", kind=kind, probe=probe(load, 100, met), attained_ratio=share,
                    missed={misses: 1 - share}, findings=list(findings))  # fmt: skip


MET, MISSED = run("probe", 10.0, 100), run("probe", 14.0, 60)
CLOSED = run("saturation", 20.0, 1, "tpot")


@pytest.mark.parametrize(
    "probes, limit, lower_bound",
    [
        ([CLOSED, MET, MISSED], "ttft", False),
        ([CLOSED, MET, run("probe", 16.0, 10, "tpot"), MISSED], "ttft", False),  # the lowest that missed
        ([CLOSED, MET, run("probe", 14.0, 60, "ttft", "CLIENT_CPU")], "client", True),
        ([CLOSED, MET], "tpot", False),  # the time ended before a probe missed: the closed loop is known to
        ([run("saturation", 20.0, 1, "ttft", "CLIENT_CPU"), MET], "client", True),
        ([run("saturation", 20.0, 100), MET], None, False),
    ],
)
def test_what_was_in_the_way_of_more(probes: list[ProbeRun], limit: str | None, lower_bound: bool) -> None:
    search = SearchResult(version="1", options=OPTIONS, guess=Prior(load=12.0), probes=probes)
    result = results.with_answer(search, None)
    assert (result.limited_by, result.lower_bound) == (limit, lower_bound)


@pytest.mark.parametrize(
    "low, high, bounds",
    [(10.0, 14.0, "between 10.00 and 14.00"), (None, 14.0, "at most 14.00"), (10.0, None, "above 10.00")],
)
def test_a_side_without_a_bound_is_not_called_zero(low: float | None, high: float | None, bounds: str) -> None:
    known = Range(value=12.0, low=low, high=high)
    search = SearchResult(version="1", options=OPTIONS, guess=Prior(load=12.0), probes=[MET], rate_per_s=known)
    assert f"12.00 requests/s, {bounds} with 95 % confidence" in results.sentence(search)


def test_quick_acks_are_said() -> None:
    for given in (True, False):
        options = msgspec.structs.replace(OPTIONS, config={"quick_acks": True} if given else {})
        search = SearchResult(version="1", options=options, guess=Prior(load=12.0), probes=[MET])
        document = page.page(search, {}, "", [])
        for said in (terminal.render(document, 200), markdown.render(document)):
            assert ("--quick-acks" in said) == given
