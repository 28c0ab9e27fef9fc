"""Gates: limits that are typed wrong, limits that are broken by what the interval shows and by nothing else, what a CI
job reads."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import exit_codes
from loadgen.config import ConfigError
from loadgen.report import gate
from loadgen.report.compare import LIMITED
from loadgen.report.contrast import Contrast, as_it_is, contrast, mean_interval, of_runs
from loadgen.report.limits import Check, judge, parse

HOSTILE = "<b>]]>&\"' \x1b[2J\x00 |"


def state(limit: str, change: Contrast) -> str:
    return judge(parse([limit], LIMITED)[0], change).state


# Limits as they are typed.


@pytest.mark.parametrize("text", ["ttft_p99>+5%", "ttft_p99>5%", " ttft_p99 > +5 % ", "ttft_p99>+5.0%"])
def test_a_limit_may_be_written_so(text: str) -> None:
    (limit,) = parse([text], LIMITED)
    assert (limit.metric, limit.amount, limit.unit) == ("ttft_p99", 0.05, "%")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no limit; write such as 'ttft_p99>+5%'"),
        ("ttft_p99=5%", "is no limit"),
        ("ttft_p99>nan%", "is no limit"),
        ("ttft_p9>+5%", "did you mean 'ttft_p99'?"),
        ("output_tokens/s<-3%", "did you mean 'output_tokens_per_s'?"),
        ("tpot>+5%", "say which of it: tpot_mean, tpot_p50, tpot_p90, tpot_p95, tpot_p99."),
        ("send_lag_p99>+5%", "there is no metric 'send_lag_p99'"),
        ("ttft_p99>+5", "has no unit; write 'ttft_p99>+5%', or in % or ms."),
        ("ttft_p99>+5s", "is in 's'; write it in % or ms"),
        ("requests_per_s<-5ms", "is in 'ms'; write it in %, as in 'requests_per_s<-5%'"),
        ("ttft_p99<-5%", "would fail a better run, since less of ttft_p99 is better; write 'ttft_p99>+5%'"),
        ("ttft_p99>-5%", "would fail a better run"),
        ("requests_per_s>+3%", "would fail a better run, since more of requests_per_s is better"),
        ("requests_per_s<-100%", "can never fail"),
    ],
)
def test_a_limit_that_is_none_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^--fail-if") as error:
        parse([text], LIMITED)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("ttft_p99<500ms", 500, "ms"), ("ttft_p99 <= 0.5s", 500, "ms"), ("tpot_mean<50", 50, "ms"),
        ("requests_per_s>10/s", 10, ""), ("output_tokens_per_s>1000", 1000, ""),
    ],
)  # fmt: skip
def test_a_limit_on_b_alone_may_be_written_so(text: str, amount: float, unit: str) -> None:
    (limit,) = parse([text], LIMITED)
    assert (limit.amount, limit.unit, limit.of_b) == (amount, unit, True)


# When a limit is broken.


def test_a_limit_on_b_is_judged_by_b() -> None:
    steady = contrast(100, 100, (-4, 4), (0.96, 1.04))
    assert state("ttft_p99<95ms", steady) == "beyond" and state("ttft_p99<97ms", steady) == "ok"
    assert state("requests_per_s>105", steady) == "beyond" and state("requests_per_s>103", steady) == "ok"
    assert state("ttft_p99<500ms", contrast(100, 100)) == "unknown"


def test_the_near_end_of_the_interval_decides() -> None:
    def rose(low: float, high: float) -> Contrast:
        return contrast(100, 50 * (low + high), (100 * low - 100, 100 * high - 100), (low, high))

    assert state("ttft_p99>+5%", rose(1.06, 1.20)) == "beyond"
    assert state("ttft_p99>+5%", rose(1.04, 1.20)) == "ok"
    assert state("ttft_p99>+5ms", rose(1.06, 1.20)) == "beyond"
    assert state("ttft_p99>+7ms", rose(1.06, 1.20)) == "ok"
    assert state("requests_per_s<-3%", rose(0.90, 0.96)) == "beyond"
    assert state("requests_per_s<-3%", rose(0.90, 0.98)) == "ok"
    noisy = judge(parse(["ttft_p99>+5%"], LIMITED)[0], rose(0.9, 1.5))
    assert "not shown to be beyond the limit" in noisy.detail


values = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=6)


@given(values, values, st.floats(0, 99), st.sampled_from(["ttft_p99>+{}%", "ttft_p99>+{}ms", "requests_per_s<-{}%"]))
def test_a_better_run_never_fails(a: list[float], b: list[float], amount: float, form: str) -> None:
    change = of_runs(a, b)
    assert change.difference is not None
    better = change.difference <= 0 if form.startswith("ttft") else change.difference >= 0
    if better:
        assert state(form.format(f"{amount:.3f}"), change) != "beyond"


def test_what_is_not_known_does_not_pass() -> None:
    assert state("ttft_p99>+5%", contrast(None, 5)) == "unknown"
    assert state("ttft_p99>+5%", contrast(5, 5)) == "unknown"  # without an interval
    assert state("ttft_p99>+5%", as_it_is(0, 5)) == "unknown"  # 5 is no number of percent of 0
    assert state("ttft_p99>+4ms", as_it_is(0, 5)) == "beyond"


@pytest.mark.parametrize("limit", ["ttft_p99>+0%", "requests_per_s<-0%"])
def test_two_measurements_of_one_server_fail_rarely_and_a_loss_fails(limit: str) -> None:
    """Five runs a side with 2 % of noise between runs: at no allowance at all, and on a loss of 10 %."""
    rng = np.random.default_rng(11)
    factor = 1 / 0.9 if limit.startswith("ttft") else 0.9
    same = lost = 0
    for _ in range(200):
        a, b = (rng.lognormal(0, 0.02, 5).tolist() for _ in range(2))
        same += state(limit, of_runs(a, b)) == "beyond"
        lost += state(limit.replace("0%", "3%"), of_runs(a, [factor * value for value in b])) == "beyond"
    assert same <= 0.05 * 200
    assert lost >= 0.9 * 200


# Intervals between runs.


def test_intervals_between_runs_by_hand() -> None:
    change = of_runs([9.9, 10, 10.1], [11.88, 12, 12.12])
    assert change.ratio == pytest.approx(1.2)
    reach = 2.776 * np.sqrt(2 * 0.01**2 / 3)  # both: s = 1 %, n = 3; 4 degrees of freedom, t = 2.776
    assert change.ratio_ci == pytest.approx([1.2 * np.exp(-reach), 1.2 * np.exp(reach)])
    # variances 0.01 / 3 and 0.0144 / 3; 3.874 degrees of freedom, between 3 and 4: t = 2.8272
    apart = 2.827148 * np.sqrt((0.01 + 0.0144) / 3)
    assert change.difference_ci == pytest.approx([2 - apart, 2 + apart], rel=1e-5)
    assert mean_interval([9.9, 10, 10.1]) == pytest.approx([10 - 4.303 * 0.1 / 3**0.5, 10 + 4.303 * 0.1 / 3**0.5])
    assert mean_interval([1]) is None
    assert of_runs([1], [2]).difference_ci is None
    assert of_runs([2, 2], [3, 3]).ratio_ci == (1.5, 1.5)
    assert of_runs([0, 1], [1, 2]).ratio_ci is None


@pytest.mark.parametrize(("n_a", "n_b"), [(5, 5), (3, 8), (5, 1), (1, 5)])
def test_intervals_between_runs_cover_the_truth(n_a: int, n_b: int) -> None:
    """Also where one side has one run and takes the other's spread."""
    rng = np.random.default_rng(n_a * 10 + n_b)
    covered = 0
    for _ in range(2000):
        a, b = rng.normal(100, 2, n_a).tolist(), rng.normal(110, 2.2, n_b).tolist()
        interval = of_runs(a, b).ratio_ci
        assert interval is not None
        covered += interval[0] <= 1.1 <= interval[1]
    assert 0.93 <= covered / 2000 <= 0.975


# What a gate leaves.

OK = Check("limit", "ttft_p99>+5%", "ok", "fine.")
BEYOND = Check("limit", f"e2el_p50>+5% {HOSTILE}", "beyond", f"worse {HOSTILE}")
UNKNOWN = Check("limit", "tpot_p50>+5%", "unknown", "no value.")
VALID, INVALID = Check("run", "A: a", "ok", "VALID."), Check("run", "B: b", "unknown", "INVALID.")


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([VALID, OK], exit_codes.OK), ([VALID, OK, BEYOND], 5), ([VALID, UNKNOWN, OK], 4), ([UNKNOWN, BEYOND], 5),
        ([INVALID, OK], 4), ([INVALID, BEYOND], 4),
    ],
)  # fmt: skip
def test_exit_codes(checks: list[Check], code: int) -> None:
    assert gate.exit_code(checks) == code
    text, table = gate.section(checks, [], "").blocks
    assert text.text.startswith(f"Exit code {code}: ") and len(table.rows) == len(checks)


def test_junit_is_what_ci_reads(tmp_path: Path) -> None:
    checks = [VALID, INVALID, OK, BEYOND, UNKNOWN]
    section = gate.section(checks, ["w"], "")
    assert gate.finish(checks, section, "loadgen", tmp_path / "junit.xml", None) == exit_codes.INVALID
    suites = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suites.tag == "testsuites"
    (suite,) = suites
    assert suite.tag == "testsuite" and suite.get("name") == "loadgen compare"
    counts = {name: int(suite.get(name, "-1")) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 5, "failures": 1, "errors": 2, "skipped": 0}
    cases = list(suite)
    assert [case.tag for case in cases] == ["testcase"] * 5
    assert all(case.get("classname") and case.get("name") and float(case.get("time", "x")) >= 0 for case in cases)
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == 5
    assert [[child.tag for child in case] for case in cases] == [
        ["system-out"], ["error"], ["system-out"], ["failure"], ["error"],
    ]  # fmt: skip
    (failure,) = cases[3]
    assert failure.get("message") == failure.text and failure.get("type") == "beyond"
    assert "<b>]]>&\"' \\x1b[2J\\x00 |" in (failure.text or "")


def test_a_summary_is_added_to_what_is_there(tmp_path: Path) -> None:
    page = tmp_path / "summary.md"
    page.write_text("# Before\n")
    checks = [VALID, BEYOND]
    gate.finish(checks, gate.section(checks, ["not between runs"], "B is worse."), "loadgen", None, page)
    text = page.read_text()
    assert text.startswith("# Before\n# loadgen compare\n") and "B is worse." in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and "BEYOND" in rows[3] and "<b>" not in text and "\x1b" not in text
    assert all(row.replace("\\|", "").count("|") == 4 for row in rows)
    assert "warning: not between runs" in text


def test_files_that_cannot_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "such.xml"):
        with pytest.raises(ConfigError, match="cannot write --junit"):
            gate.check_options(["x"], path, None)
    with pytest.raises(ConfigError, match="--summary says what came of limits"):
        gate.check_options([], None, tmp_path / "s.md")
