"""Metrics against numbers worked out by hand, on requests whose every time is a whole millisecond."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report import metrics
from loadgen.report.metrics import CONVENTIONS, METRICS
from loadgen.report.pages import series
from loadgen.rundir.records import Record, RequestTable, table
from tests.loadgen.tables import MS, failure, request

# id  sent  first  last  done  tokens   ttft  gaps         e2el
#  0     1    101   401   402       4    100  50 100 150    401
#  1     3    203   303   303       2    200  100           300
#  2     5    305   305   306       1    300  none          301
#  3     6  failed at 506
HAND = [
    request(0, sent=1, first=101, gaps=(50, 100, 150), done=402),
    request(1, sent=3, first=203, gaps=(100,)),
    request(2, sent=5, first=305, gaps=(), done=306),
    failure(3, sent=6, done=506),
]
WARMUP = request(0, scheduled=-900, sent=-900, first=-100, gaps=(1, 1), done=-90, phase="warmup")


def hand() -> RequestTable:
    return table([WARMUP, *HAND]).measured()


def values(metric: str, convention: str = "loadgen") -> list[float]:
    sample = metrics.sample(hand(), metric, CONVENTIONS[convention])
    return [value * sample.unit_ms for value in np.asarray(sample.values).tolist()]


@pytest.mark.parametrize("broke", [False, True])
def test_gaps_of_a_reply_that_broke_do_not_count(broke: bool) -> None:
    rows = [request(0, gaps=(50, 100)), request(1, gaps=(70,), outcome="reset" if broke else "ok")]
    pooled = np.asarray(metrics.sample(table(rows), "itl_ms", CONVENTIONS["loadgen"]).values)
    assert pooled.tolist() == ([50_000, 100_000] if broke else [50_000, 70_000, 100_000])


def test_gaps_short_and_long_of_many_requests_are_in_order() -> None:
    draw = np.random.default_rng(1)
    most = draw.integers(7, 33, size=9000)
    lengths_us = [draw.integers(100, 1 << int(each), size=3).tolist() for each in most]
    lengths_us[5000] = [metrics.COUNTED_US, metrics.COUNTED_US - 1, (1 << 32) - 1]
    rows = [failure(number) if number % 5 == 1 else request(number, gaps=(1, 1, 1)) for number in range(9000)]
    drawn = table(
        msgspec.structs.replace(row, itl_us=gaps) if row.outcome == "ok" else row
        for row, gaps in zip(rows, lengths_us, strict=True)
    )
    expected = sorted(gap for number, gaps in enumerate(lengths_us) if number % 5 != 1 for gap in gaps)
    for some in (drawn, drawn.select(drawn.ok)):
        assert np.asarray(metrics.sample(some, "itl_ms", CONVENTIONS["loadgen"]).values).tolist() == expected


@pytest.mark.parametrize(
    ("convention", "metric", "expected"),
    [
        ("loadgen", "ttft_ms", [100, 200, 300]),
        ("loadgen", "tpot_ms", [100, 100]),  # one token has no time per token
        ("loadgen", "itl_ms", [50, 100, 100, 150]),
        ("loadgen", "e2el_ms", [300, 301, 401]),
        ("loadgen", "send_lag_ms", [1, 3, 5]),
        ("loadgen", "ttft_from_schedule_ms", [101, 203, 305]),
        ("loadgen", "e2el_from_schedule_ms", [303, 306, 402]),
        ("vllm", "ttft_ms", [100, 200, 300]),
        ("vllm", "tpot_ms", [100, 100]),
        ("vllm", "itl_ms", [50, 100, 100, 150]),
        ("vllm", "e2el_ms", [300, 300, 400]),  # until the last output
        ("guidellm", "ttft_ms", [100, 200, 300]),
        ("guidellm", "tpot_ms", [400 / 4, 300 / 2, 300 / 1]),  # includes ttft
        ("guidellm", "itl_ms", [100, 100, 100, 100]),  # a request's mean, once a gap
        ("guidellm", "e2el_ms", [300, 301, 401]),
        ("aiperf", "ttft_ms", [100, 200, 300]),
        ("aiperf", "tpot_ms", []),
        ("aiperf", "itl_ms", [100, 100]),  # a request's mean, once
        ("aiperf", "e2el_ms", [300, 300, 400]),
        ("mlperf", "ttft_ms", [101, 203, 305]),  # from the instant it was due
        ("mlperf", "tpot_ms", [100 / 1, 301 / 3]),
        ("mlperf", "itl_ms", []),
        ("mlperf", "e2el_ms", [303, 306, 402]),
    ],
)
def test_every_convention_on_the_same_records(convention: str, metric: str, expected: list[float]) -> None:
    assert values(metric, convention) == expected


def test_every_convention_has_what_differs() -> None:
    assert list(CONVENTIONS) == ["loadgen", "vllm", "guidellm", "aiperf", "mlperf"]
    for name, convention in CONVENTIONS.items():
        assert convention.name == name
        assert "\n" not in convention.differs
        assert name == "loadgen" or "Not reproducible:" in convention.differs


def test_statistics_of_one_two_three_hundred() -> None:
    summary = metrics.summary(metrics.sample(hand(), "ttft_ms", CONVENTIONS["loadgen"]), "linear")
    assert msgspec.to_builtins(summary) == {
        "n": 3,
        "mean": 200,
        "std": 100,  # sqrt((100^2 + 0 + 100^2) / 2)
        "min": 100,
        "max": 300,
        "p50": 200,
        "p90": 280,  # 0.9 * 2 = 1.8: 200 + 0.8 * 100
        "p95": 290,
        "p99": 298,
        "p99_9": pytest.approx(299.8, abs=1e-12),
    }


@pytest.mark.parametrize(
    ("method", "p50", "p90"),
    [("linear", 200, 280), ("nearest_rank", 200, 300), ("index_floor", 200, 300)],
)
def test_percentile_methods_on_three(method: metrics.PercentileMethod, p50: float, p90: float) -> None:
    ascending = np.array([100.0, 200.0, 300.0])
    assert metrics.percentile(ascending, 500, method) == p50
    assert metrics.percentile(ascending, 900, method) == p90


def test_percentile_methods_disagree_where_the_rank_is_whole() -> None:
    ascending = np.arange(1.0, 11.0)
    assert metrics.percentile(ascending, 500, "nearest_rank") == 5  # rank ceil(10 * 0.5) = 5, counted from 1
    assert metrics.percentile(ascending, 500, "index_floor") == 6  # index floor(10 * 0.5) = 5, counted from 0
    assert metrics.percentile(ascending, 500, "linear") == 5.5


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.sampled_from([500, 900, 950, 990, 999]))
def test_percentiles_agree_with_numpy(numbers: list[int], thousandths: int) -> None:
    ascending = np.sort(np.array(numbers, np.uint32))
    for method, numpys in (("linear", "linear"), ("nearest_rank", "inverted_cdf")):
        got = metrics.percentile(ascending, thousandths, method)  # type: ignore[arg-type]
        # numpy's inverted_cdf multiplies in floating point: one rank further where n * p should be whole
        wanted = {
            float(np.percentile(ascending, percent, method=numpys))  # type: ignore[call-overload]
            for percent in (thousandths / 10, math.nextafter(thousandths / 10, 0) - 1e-9)
        }
        assert any(got == pytest.approx(value, rel=1e-6, abs=1e-6) for value in wanted)


@given(st.lists(st.floats(0, 1e7), min_size=2, max_size=50))
def test_mean_and_std_agree_with_numpy(numbers: list[float]) -> None:
    summary = metrics.summary(metrics.Distribution(np.sort(np.array(numbers)), 1.0), "linear")
    assert summary.mean == pytest.approx(np.mean(numbers))
    assert summary.std == pytest.approx(np.std(numbers, ddof=1), abs=1e-6)


def test_std_of_many_gaps() -> None:
    gaps = np.sort(np.tile(np.array([10, 30], np.uint32), 200_000))
    n = len(gaps)
    for values in (gaps, metrics.Counted(*np.unique(gaps, return_counts=True))):
        assert metrics.summary(metrics.Distribution(values, 1e-3), "linear").std == pytest.approx(
            0.01 * math.sqrt(n / (n - 1))
        )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80))
def test_counted_numbers_are_those_that_were_counted(numbers: list[int]) -> None:
    ascending = np.sort(np.array(numbers))
    counted = metrics.Counted(*np.unique(ascending, return_counts=True))
    assert [int(each) for each in counted] == np.asarray(counted).tolist() == ascending.tolist()
    assert counted[-1] == ascending[-1] and len(counted) == len(numbers)
    assert counted.at_most(np.arange(-1, 52)).tolist() == [
        sum(each <= most for each in numbers) for most in range(-1, 52)
    ]
    whole, kept = (metrics.summary(metrics.Distribution(each, 1e-3), "linear") for each in (ascending, counted))
    assert msgspec.structs.astuple(kept) == pytest.approx(msgspec.structs.astuple(whole), nan_ok=True)
    x, share = series.cdf(metrics.Distribution(counted, 1.0), steps=20)
    assert [x.tolist(), share.tolist()] == [
        each.tolist() for each in series.cdf(metrics.Distribution(ascending, 1.0), 20)
    ]


def test_what_is_undefined_is_none() -> None:
    empty = metrics.summary(metrics.Distribution(np.empty(0), 1.0), "linear")
    assert empty.n == 0
    assert all(getattr(empty, name) is None for name in empty.__struct_fields__ if name != "n")
    single = metrics.summary(metrics.Distribution(np.array([7.0]), 1.0), "linear")
    assert single.std is None
    assert single.mean == single.p50 == single.p99_9 == single.max == 7


def test_unknown_token_counts_leave_tpot_undefined() -> None:
    uncounted = [msgspec.structs.replace(record, output_tokens=None) for record in HAND]
    measured = table(uncounted)
    assert metrics.sample(measured, "tpot_ms", CONVENTIONS["loadgen"]).values.tolist() == []
    assert metrics.sample(measured, "ttft_ms", CONVENTIONS["loadgen"]).values.tolist() == [100, 200, 300]
    assert metrics.total(measured.output_tokens) is None
    assert metrics.total(table(HAND).output_tokens[:3]) == 7


@given(st.permutations(HAND), st.integers(0, 10**12))
def test_order_of_the_file_and_start_of_the_schedule_change_nothing(records: list[Record], shift_ns: int) -> None:
    names = ("scheduled_ns", "sent_ns", "headers_ns", "first_token_ns", "last_token_ns", "done_ns")
    later = [
        msgspec.structs.replace(
            record,
            **{name: value + shift_ns // MS * MS for name in names if (value := getattr(record, name)) is not None},
        )
        for record in records
    ]
    for metric in METRICS:
        sample = metrics.sample(table(later), metric, CONVENTIONS["loadgen"])
        assert [value * sample.unit_ms for value in np.asarray(sample.values).tolist()] == values(metric)
    assert metrics.duration_s(table(later), CONVENTIONS["loadgen"]) == 0.505


def test_duration_is_from_the_first_sent_to_the_last_ended_failures_included() -> None:
    assert metrics.duration_s(hand(), CONVENTIONS["loadgen"]) == 0.505  # 506 - 1 ms
    assert metrics.duration_s(hand(), CONVENTIONS["mlperf"]) == 0.506  # from t = 0
    assert metrics.duration_s(table([failure(sent=None, outcome="dropped")]), CONVENTIONS["loadgen"]) is None
    assert metrics.duration_s(table([]), CONVENTIONS["loadgen"]) is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 200}, [True, True, False, False]),  # a limit that is met exactly is met
        ({"ttft": 199.9}, [True, False, False, False]),
        ({"tpot": 100}, [True, True, True, False]),  # one token meets any tpot
        ({"tpot": 99}, [False, False, True, False]),
        ({"e2el": 350}, [False, True, True, False]),
        ({"ttft": 200, "tpot": 100, "e2el": 350}, [False, True, False, False]),
    ],
)
def test_goodput(limits: dict[str, float], good: list[bool]) -> None:
    assert metrics.good(hand(), limits, CONVENTIONS["loadgen"]).tolist() == good


def test_goodput_without_counts_and_with_an_unknown_limit() -> None:
    uncounted = table([msgspec.structs.replace(HAND[0], output_tokens=None)])
    assert metrics.good(uncounted, {"tpot": 1e9}, CONVENTIONS["loadgen"]).tolist() == [False]
    with pytest.raises(ValueError, match="goodput has no limit on 'itl'; use ttft, tpot, e2el"):
        metrics.good(hand(), {"itl": 5}, CONVENTIONS["loadgen"])


def test_send_spread_is_that_of_the_requests_due_at_zero() -> None:
    assert metrics.send_spread_ms(hand()) == (4, 5.0)  # sent at 1, 3, 5 and 6 ms
    later = request(9, scheduled=50, sent=80, first=90)
    assert metrics.send_spread_ms(table([*HAND, later])) == (4, 5.0)
    assert metrics.send_spread_ms(table([HAND[0], later])) == (1, None)
    never = failure(8, "refused", sent=None)
    assert metrics.send_spread_ms(table([HAND[0], HAND[1], never])) == (3, 2.0)


def test_events_of_the_busiest_second() -> None:
    slow = request(0, sent=0, first=100, gaps=(500, 500, 500, 500))  # at 0.1, 0.6, 1.1, 1.6, 2.1 s
    other = request(1, sent=0, first=1200, gaps=(100,))  # at 1.2, 1.3 s; seconds begin with the first event
    assert metrics.peak_events_per_s(table([slow])) == 2
    assert metrics.peak_events_per_s(table([slow, other, failure(2)])) == 4
    short = request(0, first=100, gaps=(100, 100))
    assert metrics.peak_events_per_s(table([short])) == 3 / 0.2
    assert metrics.peak_events_per_s(table([request(0, gaps=())])) == 1 / 0.1
    assert metrics.peak_events_per_s(table([failure(0)])) is None


@given(st.lists(st.lists(st.integers(1, 3000), max_size=20), min_size=1, max_size=12))
def test_no_event_is_lost_in_the_count_of_seconds(gaps: list[list[int]]) -> None:
    records = [request(at, first=10 * at + 5, gaps=tuple(row)) for at, row in enumerate(gaps)]
    times = sorted(10 * at + 5 + sum(row[:k]) for at, row in enumerate(gaps) for k in range(len(row) + 1))
    by_second = np.bincount([(time - times[0]) // 1000 for time in times])
    busiest = by_second[0] / max((times[-1] - times[0]) / 1000, 0.1) if len(by_second) == 1 else by_second.max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadgen.rundir.records.ROWS_A_BLOCK", 3)
        assert metrics.peak_events_per_s(table(records)) == pytest.approx(busiest)


def test_a_reply_in_one_event_has_no_tpot() -> None:
    whole = msgspec.structs.replace(request(0, sent=1, first=101, gaps=(), done=102), output_tokens=64)
    sample = metrics.sample(table([whole]), "tpot_ms", CONVENTIONS["loadgen"])
    assert sample.values.tolist() == []
