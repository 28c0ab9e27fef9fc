"""Runs of one server together: numbers by hand, runs that did not finish, and gates over directories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen import cli
from loadgen.document import content, files, terminal
from loadgen.report import compare, repeats
from loadgen.report.pages import repeat
from loadgen.rundir import RunError
from tests.loadgen.tables import facts, failure, manifest, request, write_run


def run(path: Path, first: float = 101, *, config: dict[str, object] | None = None, state: str = "complete") -> Path:
    """Forty requests one after the other, each with its first token after about `first` - 1 ms."""
    path.parent.mkdir(exist_ok=True)
    spread = np.random.default_rng(int(first * 1000)).normal(0, 1, 40)
    records = [
        request(at, scheduled=200 * at, sent=200 * at + 1, first=200 * at + first + float(spread[at]))
        for at in range(40)
    ]
    about = manifest(run_id=f"run-{path.name}", config={"requests": 40, **(config or {})}, requests_planned=40)
    return write_run(path, records, about, facts(state=state))


def many(path: Path, firsts: list[float], **more: object) -> Path:
    for number, first in enumerate(firsts, 1):
        run(path / str(number), first, config={"repeat": len(firsts), **more})
    return path


def test_numbers_by_hand(tmp_path: Path) -> None:
    repeated = repeats.read(many(tmp_path / "a", [101, 103, 105]))
    ttft = repeated.metrics["ttft_p50"]
    assert ttft.runs == pytest.approx([100, 102, 104], abs=0.5)
    assert ttft.mean == pytest.approx(np.mean(ttft.runs))
    assert ttft.std == pytest.approx(np.std(ttft.runs, ddof=1))
    reach = 4.303 * ttft.std / 3**0.5
    assert ttft.ci == pytest.approx([ttft.mean - reach, ttft.mean + reach])
    assert (repeated.planned, len(repeated.runs)) == (3, 3)
    text = terminal.render(repeat.of(tmp_path / "a", repeated), 200)
    assert "3 runs of vllm" in text and "ttft p50, ms" in text and "send_lag" not in text
    assert " ".join(map(content.number, ttft.runs)) in text
    repeats.write(tmp_path / "a", repeated)
    assert json.loads((tmp_path / "a" / "repeat.json").read_text()) == json.loads(files.json_line(repeated))


def test_runs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made = many(tmp_path / "a", [101.0 + at for at in range(11)])
    assert [path.name for path in repeats.directories(made)] == [str(number) for number in range(1, 12)]
    (made / "12").mkdir()  # begun, and stopped before its load
    assert len(repeats.directories(made)) == 11
    assert repeats.directories(made / "3") == [made / "3"]
    with pytest.raises(RunError, match=r"holds no manifest\.json"):
        repeats.read(tmp_path)


def test_a_run_that_was_stopped_is_in_no_mean(tmp_path: Path) -> None:
    many(tmp_path / "a", [101, 103])
    run(tmp_path / "a" / "3", 900, state="interrupted")
    repeated = repeats.read(tmp_path / "a")
    assert [each.finished for each in repeated.runs] == [True, True, False]
    assert len(repeated.metrics["ttft_p50"].runs) == 2
    assert repeats.UNFINISHED_NOTE in repeats.notes(repeated)


def test_a_directory_of_repeats_is_reported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = many(tmp_path / "a", [101, 103, 105])
    assert cli.invoke(["report", str(made)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["schema"] == repeats.SCHEMA
    assert (made / repeats.FILE).exists()
    assert cli.invoke(["report", str(made), "--convention", "vllm"]) == 2


# Gates.


def gate(a: Path, b: Path, *limits: str) -> int:
    return cli.invoke(["compare", str(a), str(b), *(word for limit in limits for word in ("--fail-if", limit))])


def test_a_gate_between_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, same = many(tmp_path / "a", [101, 103, 102]), many(tmp_path / "b", [102, 101.5, 103])
    slower = many(tmp_path / "c", [121, 123, 122])
    assert gate(a, same, "ttft_p99>+5%", "output_tokens_per_s<-3%") == 0
    assert "\nwarning: " not in capsys.readouterr().out
    assert gate(a, slower, "ttft_p99>+5%") == 5
    assert gate(a, slower, "ttft_p99>+5ms") == 5
    assert gate(a, slower, "ttft_p99>+50%") == 0
    assert gate(slower, a, "ttft_p99>+5%", "ttft_p50>+0%") == 0
    capsys.readouterr()
    assert gate(a, slower / "1", "ttft_mean>+5%") == 5  # the spread of A's runs serves for both
    assert compare.ONE_SIDED_NOTE in capsys.readouterr().out


def test_a_gate_between_two_runs_says_what_its_interval_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = run(tmp_path / "a", 101), run(tmp_path / "b", 101.3), run(tmp_path / "c", 131)
    assert gate(a, b, "ttft_p50>+5%", "e2el_mean>+5ms") == 0
    assert gate(a, b, "ttft_p99>+5%") == 4  # 40 requests bound no p99
    assert f"warning: {compare.WITHIN_RUN}" in " ".join(capsys.readouterr().out.split())
    assert gate(a, c, "ttft_p50>+5%") == 5
    assert "Exit code 5: B is worse than A by more than a limit allows." in capsys.readouterr().out


def loop(path: Path, requests: int, seed: int) -> Path:
    """A closed loop of 4, whose first four requests wait a second for their first token, and others 0.1 s. Replies have
    5 to 15 tokens, 20 ms apart."""
    path.parent.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    noise_ms, gaps = rng.normal(0, 3, requests), rng.integers(4, 15, requests)
    free_ms, records = [0.0] * 4, []
    for at in range(requests):
        sent = free_ms.pop(0)
        first = sent + (1000 if at < 4 else 100) + float(noise_ms[at])
        records.append(request(at, scheduled=sent, sent=sent, first=first, gaps=(20.0,) * int(gaps[at])))
        free_ms = sorted([*free_ms, first + 20 * int(gaps[at])])
    about = manifest(run_id=f"run-{path.name}", arrival="concurrency:4", requests_planned=requests)
    return write_run(path, records, about, facts())


def test_steady_windows_are_compared_where_all_runs_have_one(tmp_path: Path) -> None:
    """In whole runs the first wave is a hundredth of the requests, and their p99."""
    a, b, short = (loop(tmp_path / name, n, seed) for seed, (name, n) in enumerate((("a", 400), ("b", 400), ("c", 12))))
    compared = compare.compare(a, b)
    assert compared.steady and compare.STEADY_NOTE in compared.notes
    p99, rate = compared.metrics["ttft_ms"]["p99"], compared.throughput["requests_per_s"]
    assert p99.a == pytest.approx(107, abs=3) and p99.shows != "B is higher"
    assert rate.a == pytest.approx(4 / 0.28, rel=0.03) and rate.difference_ci is not None
    whole = compare.compare(a, short)
    assert not whole.steady and compare.STEADY_NOTE not in whole.notes
    assert whole.metrics["ttft_ms"]["p99"].a is not None and whole.metrics["ttft_ms"]["p99"].a > 110
    for name, seed in (("1", 3), ("2", 4)):
        loop(tmp_path / "d" / name, 400, seed)
    between = compare.compare(tmp_path / "d", b)
    assert between.steady and between.between_runs
    assert between.throughput["requests_per_s"].a == pytest.approx(4 / 0.28, rel=0.03)


def test_goodput_needs_the_same_limits_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (many(tmp_path / name, [101, 103, 102], goodput=["ttft:150"]) for name in "ab")
    late = many(tmp_path / "late", [181, 183, 182], goodput=["ttft:150"])
    other, none = many(tmp_path / "other", [101, 103], goodput=["ttft:200"]), many(tmp_path / "none", [101, 103])
    assert gate(a, b, "goodput_requests_per_s<-3%") == 0
    assert gate(a / "1", b / "2", "goodput_requests_per_s<-3%") == 0
    assert gate(a, late, "goodput_requests_per_s<-3%") in (4, 5)  # none is good: no ratio of logarithms
    capsys.readouterr()
    for odd in (other, none):
        assert gate(a, odd, "goodput_requests_per_s<-3%") == 4
        assert "give both the same limits" in capsys.readouterr().out


def test_what_cannot_be_trusted_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a")
    failed = write_run(tmp_path / "failed", [request(0), *(failure(at) for at in range(1, 40))], manifest(), facts())
    junit = tmp_path / "junit.xml"
    argv = ["compare", str(a), str(failed), "--fail-if", "ttft_p99>+500%", "--junit", str(junit)]
    assert cli.invoke(argv) == 4
    assert "INVALID. FAILED_REQUESTS" in capsys.readouterr().out
    assert "FAILED_REQUESTS" in junit.read_text()
    assert cli.invoke(["compare", str(a), str(failed)]) == 0  # no gate
