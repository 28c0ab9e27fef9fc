"""What people type who know another tool."""

from __future__ import annotations

import shlex

import pytest

from loadgen import cli
from loadgen.config import ConfigError
from loadgen.guesses import meant

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
    "run --slo ttft_ms=500,tpot_ms=50": "run --goodput ttft:500 tpot:50",
    "run --slo ttft<500ms": "run --goodput ttft:500",
    "run --tensor-parallel-size 2": "run --tp 2",
    "sweep --rate 1,8,64": "sweep --rates 1 8 64",
    "sweep --concurrency 1 8 64": "sweep --concurrency 1 8 64",
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
        ("run --timeout 5", "--total-timeout"), ("run --api-key x", "--api-key-env"), ("run --json", "tail -n 1"),
        ("run --host x", "--url"), ("search --rate 5", "finds the rate"), ("run --rate fast", "is no rate"),
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
