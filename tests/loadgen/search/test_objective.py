"""Objectives: what is understood, what is refused with the right name, and who meets them."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.config import ConfigError
from loadgen.report.metrics import CONVENTIONS, good
from loadgen.rundir.records import Record, table
from loadgen.search.objective import Times, lateness, parse
from loadgen.search.watch import worst


def test_limits_are_milliseconds_by_metric() -> None:
    assert parse("ttft_ms=500, tpot_ms=2.5,e2el_ms=1e3") == {"ttft": 500.0, "tpot": 2.5, "e2el": 1000.0}


@pytest.mark.parametrize(
    ("slo", "meant"),
    [("ttft_s=0.5", "ttft_ms"), ("ttft=500", "ttft_ms"), ("e2e_ms=5", "e2el_ms"), ("itl_ms=5", "tpot_ms"),
     ("tptot_ms=5", "tpot_ms")],
)  # fmt: skip
def test_another_name_or_unit_is_told_the_right_one(slo: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        parse(slo)


@pytest.mark.parametrize(
    "slo", ["", "x=5", "ttft_ms", "ttft_ms=0", "ttft_ms=nan", "ttft_ms=inf", "tpot_ms=1,tpot_ms=2"]
)
def test_what_is_no_objective_is_refused(slo: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse(slo)


def test_who_meets_an_objective_is_who_is_good_in_a_report() -> None:
    rng = np.random.default_rng(4)
    records = []
    for number in range(400):
        sent, first = int(rng.integers(0, 1e9)), int(rng.integers(1e6, 1e9))
        last = first + int(rng.integers(0, 1e9))
        tokens = int(rng.integers(0, 5))
        ok = rng.random() < 0.9
        records.append(
            Record(
                id=number, scheduled_ns=sent, sent_ns=sent, first_token_ns=sent + first if tokens else None,
                last_token_ns=sent + last if tokens else None, done_ns=sent + last + 1000, events=tokens,
                output_tokens=tokens if rng.random() < 0.9 else None, outcome="ok" if ok else "timeout",
                asked_prompt_tokens=1, asked_tokens=tokens, first_tokens=2 if tokens > 2 else None,
            )
        )  # fmt: skip
    columns = table(records)
    times = Times(columns.sent_ns, columns.first_token_ns, columns.last_token_ns, columns.done_ns,
                  columns.output_tokens, columns.first_tokens, columns.ok)  # fmt: skip
    for limits in ({"ttft": 500.0}, {"tpot": 150.0}, {"ttft": 700.0, "tpot": 400.0, "e2el": 1200.0}):
        met = worst(lateness(limits, times)) <= 1
        np.testing.assert_array_equal(met, good(columns, limits, CONVENTIONS["loadgen"]))
        assert 0 < met.sum() < len(met)
