"""The points of a sweep: what each run is, in what order, under what name; and lists that make no sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from cyclopts import Parameter
from hypothesis import given
from hypothesis import strategies as st

from loadgen import cli
from loadgen.config import Config, ConfigError
from loadgen.load.load import parse_arrival
from loadgen.option_types import names
from loadgen.search import command
from loadgen.search.points import LISTED, PointRun, SweepOptions, text


def test_rates_are_poisson_arrivals_with_seeds_apart() -> None:
    runs = SweepOptions(rates=(5.0, 20.0), requests=(60,), repeat=2, seed=7, goodput=("ttft:5",)).runs()
    assert [(run.name, run.seed) for run in runs] == [
        ("rate-5-run1", 7), ("rate-5-run2", 8), ("rate-20-run1", 9), ("rate-20-run2", 10),
    ]  # fmt: skip
    configs = [run.config(Path("d")) for run in runs]
    assert configs[3] == Config(
        arrival="poisson:20", requests=60, seed=10, goodput=("ttft:5",), out=Path("d/rate-20-run2"),
        stop_when_overloaded=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"rates": (2.0, 4.0)}, True),
        ({"rates": (2.0, 4.0), "stop_when_overloaded": False}, False),
        ({"input_tokens": (8, 16), "arrival": ("ramp:1:9:5",)}, True),
        ({"concurrency": (1, 64)}, None),
        ({"input_tokens": (8, 16)}, None),  # a burst
        ({"rates": (2.0, 4.0), "sessions": (9,)}, None),
    ],
)
def test_runs_that_fall_behind_end_early_unless_they_are_not_to(options: dict[str, Any], stops: bool | None) -> None:
    assert {point.load.stop_when_overloaded for point in SweepOptions(**options).points()} == {stops}


@pytest.mark.parametrize(
    ("law", "arrival"), [("constant", "constant:2.5"), ("poisson", "poisson:2.5"), ("gamma:2", "gamma:2.5:2")]
)
def test_the_law_of_the_rates(law: str, arrival: str) -> None:
    (point,) = SweepOptions(rates=(2.5,), arrival=(law,)).points()
    assert (point.name, point.load.arrival) == ("rate-2.5", arrival)


@pytest.mark.parametrize(
    ("options", "name", "values"),
    [
        ({"concurrency": (1, 64)}, "concurrency", [1, 64]),
        ({"input_tokens": (128, "uniform:8:64"), "concurrency": (4,)}, "input_tokens", [128, "uniform:8:64"]),
        ({"output_tokens": (8, 16), "rates": (3.0,)}, "output_tokens", [8, 16]),
        ({"prefix": ("4:64", "8:64")}, "prefix", ["4:64", "8:64"]),
        ({"arrival": ("poisson:2", "gamma:2:0.5")}, "arrival", ["poisson:2", "gamma:2:0.5"]),
        ({"sessions": (5, 9), "turns": (3,)}, "sessions", [5, 9]),
        ({"trace_speed": (1.0, 2.5), "trace": (Path("t"),)}, "trace_speed", [1.0, 2.5]),
        ({"workload": ("paper", "sharegpt-like")}, "workload", ["paper", "sharegpt-like"]),
    ],
)
def test_any_option_of_the_load_may_vary(
    options: dict[str, Any], name: str, values: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").write_text('{"timestamp": 0, "input_length": 8, "output_length": 4}\n')
    made = SweepOptions(**options)
    points = made.points()
    assert [getattr(point.load, name) for point in points] == values
    assert made.varies == name.replace("_", "-")
    assert all(point.name.startswith(f"{made.varies}-") and "/" not in point.name for point in points)
    if "rates" in options:
        assert {point.load.arrival for point in points} == {"poisson:3"}


def test_every_list_is_of_an_option_of_the_load() -> None:
    assert set(LISTED) <= set(names(Config)) and set(names(Config)) <= set(names(SweepOptions))


@given(
    count=st.integers(1, 30), repeat=st.integers(1, 5), seed=st.integers(0, 10**9),
)  # fmt: skip
def test_the_order_has_every_point_once_before_any_twice(count: int, repeat: int, seed: int) -> None:
    options = SweepOptions(rates=tuple(float(rate) for rate in range(1, count + 1)), repeat=repeat, seed=seed)
    runs = options.runs()
    order = options.order(runs)
    assert sorted(run.name for run in order) == sorted(run.name for run in runs)
    assert order == options.order(options.runs())  # of the seed alone
    assert len({run.seed for run in runs}) == len(runs)
    for begin in range(0, len(order), count):
        assert len({run.point.value for run in order[begin : begin + count]}) == count


def test_another_seed_is_another_order() -> None:
    def order(seed: int) -> list[str]:
        options = SweepOptions(concurrency=tuple(range(1, 20)), seed=seed)
        return [run.name for run in options.order(options.runs())]

    assert order(1) != order(2) != sorted(order(2))


@given(st.floats(1e-9, 1e12))
def test_a_rate_is_typed_without_loss(rate: float) -> None:
    assert float(text(rate)) == rate
    assert parse_arrival(f"poisson:{text(rate)}").rate == rate


@given(
    rates=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=5, unique_by=text), seed=st.integers(0, 9),
    header=st.lists(st.just("a=b"), max_size=1), law=st.sampled_from(["", "constant", "gamma:3"]),
)  # fmt: skip
def test_options_survive_the_file(rates: list[float], seed: int, header: list[str], law: str) -> None:
    laws = (law,) if law else ()
    more = {"arrival": laws} if laws else {}
    options = SweepOptions(rates=tuple(rates), seed=seed, header=tuple(header), **more)  # type: ignore[arg-type]
    assert SweepOptions.of_dict(json.loads(json.dumps(options.as_dict()))) == options


def test_what_was_typed_must_agree_also_a_default() -> None:
    own = SweepOptions(rates=(1.0, 2.0), seed=5, requests=(9,))
    assert SweepOptions().differing(own) == []
    assert SweepOptions(rates=(1.0, 2.0), requests=(9,)).differing(own) == []
    assert SweepOptions(seed=0).differing(own) == ["--seed"]
    assert SweepOptions(rates=(1.0,), concurrency=(4,)).differing(own) == ["--concurrencies", "--rates"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "a sweep varies one option of the load"),
        ({"input_tokens": (128,)}, "a sweep varies one option of the load"),
        ({"rates": (0.0, 1.0)}, "--rates has 0; a rate must be above zero"),
        ({"rates": (float("nan"),)}, "--rates has nan"),
        ({"rates": (float("inf"),)}, "--rates has inf"),
        ({"rates": (-1.0,)}, "--rates has -1"),
        ({"rates": ()}, "--rates is an empty list"),
        ({"prefix": ()}, "--prefix is an empty list"),
        ({"rates": (5.0, 20.0, 5.0)}, "--rates has 5 twice"),
        ({"concurrency": (8, 1, 8)}, "--concurrencies has 8 twice"),
        ({"rates": (1.0, 2.0), "concurrency": (1, 2)}, "--rates is an open loop and --concurrencies a closed one"),
        ({"rates": (1.0,), "concurrency": (1,)}, "--rates is an open loop and --concurrencies a closed one"),
        ({"rates": (1.0, 2.0), "input_tokens": (8, 9)}, "--rates and --input-tokens are both lists"),
        ({"rates": (1.0, 2.0), "arrival": ("burst",)}, "--arrival burst has no one rate"),
        ({"rates": (1.0, 2.0), "arrival": ("ramp:1:2:9",)}, "--arrival ramp has no one rate"),
        ({"rates": (1.0, 2.0), "arrival": ("poisson:3",)}, "--rates gives the rates; name a law without one"),
        ({"rates": (1.0, 2.0), "arrival": ("gamma:3:1",)}, "--rates gives the rates; name a law without one"),
        ({"rates": (1.0,), "arrival": ("gamma:x",)}, "is not understood"),
        ({"rates": (1.0,), "trace": (Path("t"),)}, "--trace decides when requests are sent; leave --rates out"),
        ({"concurrency": (0, 1)}, "--concurrency is 0; it must be at least 1"),
        ({"concurrency": (1, 2), "repeat": 0}, "--repeat is 0"),
        ({"rates": tuple(map(float, range(1, 99))), "repeat": 999}, "it may have 10000"),
        ({"concurrency": (1, 2), "dry_run": True}, "--dry-run is of `loadgen run`"),
        ({"concurrency": (1, 2), "dataset": (Path("d"),)}, "add --repeat-dataset if it is to"),
        ({"concurrency": (1, 2), "duration": (0.0,)}, "--duration is 0"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_no_sweep(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        SweepOptions(**options).runs()
    assert said in str(error.value)


def test_lists_on_the_command_line_and_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[PointRun]] = []

    def sweep(options: Annotated[SweepOptions | None, Parameter(name="*")] = None) -> int:
        seen.append((options or SweepOptions()).runs())
        return 0

    monkeypatch.setattr(command, "sweep", sweep)
    (tmp_path / "s.toml").write_text('input_tokens = [128, "uniform:9:90"]\nconcurrencies = 4\nstream = false\n')
    assert cli.invoke(["sweep", "--config", str(tmp_path / "s.toml")]) == 0
    line = ["sweep", "--input-tokens", "128", "uniform:9:90", "--no-stream", "--concurrency", "4"]
    assert cli.invoke(line) == 0
    assert seen[0] == seen[1] and len(seen[0]) == 2
    assert not seen[0][0].point.load.stream
