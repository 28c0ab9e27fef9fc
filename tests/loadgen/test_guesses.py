"""What people type who know another tool."""

from __future__ import annotations

import shlex

import pytest

from loadgen import cli
from loadgen.config import Config, ConfigError
from loadgen.guesses import meant
from loadgen.option_types import latency_limit
from loadgen.search import objective

ALIKE = {
    "http://127.0.0.1:8000": "run --url http://127.0.0.1:8000",
    "run http://127.0.0.1:8000 -n 5": "run --url http://127.0.0.1:8000 --requests 5",
    "run --rate 4": "run --arrival poisson:4",
    "run --rps 10/s": "run --arrival poisson:10",
    "run --qps=2.5": "run --arrival poisson:2.5",
    "run --request-rate inf": "run --arrival burst",
    "run --request-rate 9 --burstiness 0.25": "run --arrival gamma:9:2",
    "run --num-prompts 100 --isl 512 --osl 128": "run --requests 100 --input-tokens 512 --output-tokens 128",
    "run --random-input-len=9 --random-output-len=7": "run --input-tokens 9 --output-tokens 7",
    "run -n 8 -c 2 -o x": "run --requests 8 --concurrency 2 --out x",
    "run --users 4": "run --concurrency 4",
    "run --max-concurrency 4": "run --concurrency 4",
    "run --base-url http://h": "run --url http://h",
    "run --duration 2m": "run --duration 120",
    "run -d 60s": "run --duration 60",
    "run -d 1h --total-timeout 90s --think-time=2s": "run --duration 3600 --total-timeout 90 --think-time 2",
    "run --arrival poisson:10/s": "run --arrival poisson:10",
    "run --slo ttft_ms=500,tpot_ms=50": "run --goodput ttft_ms=500,tpot_ms=50",
    "run --slo ttft<500ms": "run --goodput ttft<500ms",
    "run --server-arg --enforce-eager -n 5": "run --server-arg --enforce-eager --requests 5",
    "run --tensor-parallel-size 2": "run --tp 2",
    "sweep --rate 1,8,64": "sweep --rates 1 8 64",
    "sweep --rates 10/s 20/s": "sweep --rates 10 20",
    "sweep --rps=1/s,2/s": "sweep --rates 1 2",
    "sweep --concurrency 1 8 64": "sweep --concurrency 1 8 64",
    "sweep -c 1,8,64": "sweep --concurrency 1 8 64",
    "sweep --isl=128,512 --osl 8": "sweep --input-tokens 128 512 --output-tokens 8",
    "sweep --gpus 0,1 --arrival steps:1@5,2@5": "sweep --gpus 0,1 --arrival steps:1@5,2@5",
    "search --goodput ttft<500ms --budget-minutes 90s": "search --slo ttft<500ms --budget-minutes 1.5",
    "search --budget-minutes 5": "search --budget-minutes 5",
    "plan --rps 10/s --isl 5": "plan --rate 10 --input-tokens 5",
    "search --slo ttft_ms=500": "search --slo ttft_ms=500",
    "plan --rate 4 --slo ttft_ms=500": "plan --rate 4 --slo ttft_ms=500",
    "serve --host 127.0.0.1": "serve --host 127.0.0.1",
    "run --server-arg=-n": "run --server-arg=-n",
}


@pytest.mark.parametrize("typed", ALIKE)
def test_a_guess_is_taken_where_its_meaning_is_one(typed: str) -> None:
    assert meant(shlex.split(typed.replace("<", "\\<"))) == shlex.split(ALIKE[typed])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("run --timeout 5", "--total-timeout"), ("run --api-key x", "--api-key-env"),
        ("run --host x", "--url"), ("run -c 1,8", "loadgen sweep --concurrency 1,8"),
        ("run --qps 1,8", "sweep --rates 1,8"),
        ("search --rate 5", "finds the rate"), ("run --rate fast", "is no rate"),
    ],
)  # fmt: skip
def test_otherwise_the_right_name_is_told(typed: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        meant(shlex.split(typed))


def test_a_key_that_was_typed_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["run", "--api-key", "sk-secret"]) == 2
    assert "sk-secret" not in capsys.readouterr().err


def test_the_command_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["run", "--rate", "0"]) == 2
    assert "arrival 'poisson:0' needs a rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ttft<500ms", ("ttft", 500, None)),
        ("ttft_p99<0.5s", ("ttft", 500, 99)),
        ("tpot_p99.9 <= 50ms", ("tpot", 50, 99.9)),
        ("ttft_ms=500", ("ttft", 500, None)),
        ("e2el:1e+06", ("e2el", 1e6, None)),
        ("ttft=0.5", None),
        ("ttft<500", None),
        ("ttft_ms=5s", None),
        ("itl<5ms", None),
        ("ttft<0ms", None),
        ("ttft:.", None),
    ],
)
def test_a_limit_of_a_latency_is_read_so(typed: str, meant: tuple[str, float, float | None] | None) -> None:
    limit = latency_limit(typed)
    assert limit == meant


def test_one_spelling_serves_goodput_and_slo() -> None:
    assert Config(goodput=("ttft<500ms,tpot_ms=50", "e2el:5000")).slos == {"ttft": 500, "tpot": 50, "e2el": 5000}
    assert objective.parse("ttft_p95<500ms, tpot<0.05s") == {"ttft": 500, "tpot": 50}
    assert objective.share("ttft_p95<500ms,tpot_ms=50", "--attain", None) == 0.95
    with pytest.raises(ConfigError, match="several shares"):
        objective.share("ttft_p95<500ms", "--attain", 0.99)
