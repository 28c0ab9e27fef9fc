"""`loadgen plan`: a world in which more is never worse, prices that decide the order, and mistakes in one sentence."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from loadgen import cli
from loadgen.config import Config, ConfigError
from servers.plan import candidates
from servers.plan.candidates import Candidate, PlanRow, Prices, Requirements, Unmet, judge, ranked
from servers.plan.command import parse_slo
from servers.plan.sizing import STRETCH, Demand, LatencyLimits, SizedServer, trial
from servers.simulator import hardware
from servers.simulator.build import Emulated, emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import bounds, simulate

LIMITS = parse_slo("ttft_ms=500,tpot_ms=50")
PRICES = Prices(usd_per_gpu_hour={"h200": 4.0, "rtx4090": 0.5}, source="a test", date="2026-11")


def emulation(candidate: Candidate, model: str = "7b", **more: object) -> Emulated:
    options = Hardware(
        gpu=candidate.gpu, gpus=candidate.tp, tp=candidate.tp, max_running=candidate.max_running, max_requests=1 << 20,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return emulate(options.setup("vllm", model, 4096))


def load(rate: float = 1.0, requests: int = 120, **more: Any) -> Demand:
    described = Config(**{"output_tokens": 32, "requests": STRETCH * requests, **more}).load
    return Demand(rate=rate, load=described, requests=requests)


def highest(gpu: str, tp: int, limits: LatencyLimits = LIMITS) -> float:
    return SizedServer(emulation(Candidate(gpu=gpu, tp=tp)), load(), limits).highest()[0]


def judged(gpu: str, tp: int, rate: float, prices: Prices = PRICES, max_gpus: int = 64) -> PlanRow | Unmet:
    return judge(Candidate(gpu=gpu, tp=tp), requirements(load(rate), prices=prices, max_gpus=max_gpus))


def requirements(
    demand: Demand,
    limits: LatencyLimits = LIMITS,
    prices: Prices = PRICES,
    max_gpus: int = 64,
    emulated: Callable[[Candidate], Emulated] = emulation,
) -> Requirements:
    return Requirements(emulation=emulated, demand=demand, limits=limits, prices=prices, max_gpus=max_gpus)


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    usual = {
        "--requests": "60", "--output-tokens": "16", "--input-tokens": "128", "--rate": "5",
        "--slo": "ttft_ms=500,tpot_ms=50",
    }  # fmt: skip
    words = ["plan", *options]
    words += [word for option, value in usual.items() if option not in options for word in (option, value)]
    code = cli.invoke(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_more_and_faster_gpus_never_serve_less() -> None:
    by_tp = [highest("h200", tp) for tp in (1, 2, 4)]
    assert by_tp == sorted(by_tp)
    assert highest("rtx3090", 1) < highest("a100", 1) < highest("h200", 1)


def test_looser_limits_never_serve_less_and_without_any_in_reach_throughput_is_what_bounds() -> None:
    rates = [highest("rtx4090", 1, parse_slo(f"ttft_ms=500,tpot_ms={tpot}")) for tpot in (25, 50, 100)]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    server = SizedServer(emulation(Candidate(gpu="rtx4090", tp=1)), load(), parse_slo("e2el_ms=1e9"))
    assert server.highest() == (pytest.approx(0.95 * server.capacity), "throughput")
    by_percentile = [highest("rtx4090", 1, parse_slo("tpot_ms=35", percentile)) for percentile in (99, 50)]
    assert by_percentile[0] <= by_percentile[1]


def test_a_trial_agrees_with_the_virtual_run_of_the_same_load() -> None:
    emulated = emulation(Candidate(gpu="h100", tp=1))
    asked = load(requests=200)
    rate = 4.0
    seen = trial(emulated, asked, parse_slo("ttft_ms=1e6", 90.0), rate, 0.0)
    arrivals = [each._replace(at_s=each.at_s / rate) for each in asked.arrivals[:200]]
    ttft = sorted(first - sent for sent, first, _ in bounds(simulate(emulated, arrivals)))
    assert seen.missed is None
    assert seen.percentiles["ttft"] == pytest.approx(ttft[179], rel=0.001)


def test_laws_and_shared_prompts_are_planned_for() -> None:
    emulated = emulation(Candidate(gpu="h100", tp=1), prefix_caching="on")
    limits = parse_slo("ttft_ms=300,tpot_ms=40", 90.0)

    def highest_of(**more: Any) -> float:
        return SizedServer(emulated, load(**more), limits).highest()[0]

    fixed = highest_of(input_tokens=1024)
    assert highest_of(input_tokens="normal:1024:0") == fixed  # the same lengths by another name
    assert highest_of(input_tokens="lognormal:1024:0.8:16:4000") < fixed  # longer in the mean, and uneven
    assert highest_of(input_tokens=1024, prefix="2:960") > 1.5 * fixed  # nearly all of each prompt is known


def test_what_is_sustained_is_sustained_for_long() -> None:
    """Far more requests than the search used: the limits still hold a little below the rate that it found."""
    emulated = emulation(Candidate(gpu="rtx4090", tp=1))
    limits = parse_slo("e2el_ms=8000", 95.0)
    rate, _ = SizedServer(emulated, load(), limits).highest()
    arrivals = [(each.at_s / (0.9 * rate), 512, 32) for each in load(requests=400).arrivals]
    served = list(bounds(simulate(emulated, arrivals)))
    assert len(served) == 4000
    assert sum(last - sent <= 8.0 for sent, _, last in served) >= 0.95 * 4000
    assert served[-1][2] - served[-1][0] < 8.0


def test_a_row_holds_the_whole_load() -> None:
    for rate in (0.5, 30.0, 200.0):
        row = judged("rtx4090", 1, rate)
        assert isinstance(row, PlanRow)
        assert row.servers >= math.ceil(rate / row.server_rate)
        assert (row.gpus, row.usd_per_hour) == (row.servers, 0.5 * row.servers)
        assert row.trial.missed is None
        assert row.trial.percentiles["ttft"] <= 0.5 and row.trial.percentiles["tpot"] <= 0.05
    counts = [row.gpus for rate in (1, 10, 40, 160) if isinstance(row := judged("rtx4090", 1, rate), PlanRow)]
    assert counts == sorted(counts) and len(counts) == 4


def test_a_price_reorders_and_what_has_none_comes_last() -> None:
    def order(**dollars: float) -> list[tuple[str, float | None]]:
        prices = Prices(usd_per_gpu_hour=dollars, source="", date="")
        rows, unmet = ranked(judged(gpu, 1, 10.0, prices) for gpu in ("h200", "rtx4090", "a100"))
        assert not unmet
        return [(row.candidate.gpu, row.usd_per_hour) for row in rows]

    assert [name for name, _ in order(h200=9.0, rtx4090=0.1, a100=5.0)] == ["rtx4090", "a100", "h200"]
    assert order(h200=0.01, rtx4090=0.1, a100=5.0)[0][0] == "h200"
    assert order(h200=9.0, rtx4090=0.1)[-1] == ("a100", None)


def test_the_rate_of_the_first_row_has_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of other requests, and far more of them, keep the limits below the interval and miss them above it."""
    words = ("--gpu", "rtx4090", "--max-gpus", "2", "--slo", "tpot_ms=35", "--percentile", "90", "--json")
    _, out, err = plan(capsys, *words)
    first, second = json.loads(out)["rows"]
    low, high = first["rate_interval_per_s"]
    assert first["bound"] == "tpot" and low <= first["rate_per_s"] <= high and second["rate_interval_per_s"] is None
    assert "95 % between" in err and "searched for as loadgen search does" in err
    emulated = emulation(Candidate(gpu="rtx4090", tp=first["tp"]))

    def kept(rate: float) -> float:
        at_s = np.cumsum(np.random.default_rng(9).exponential(1 / rate, 4000)).tolist()
        times_s = [each.times_s for each in simulate(emulated, [(each, 128, 16) for each in at_s])]
        return float(np.mean([(times[-1] - times[0]) / 15 <= 0.035 for times in times_s[400:]]))

    assert kept(0.93 * low) > 0.9 > kept(1.07 * high)


def test_where_throughput_is_the_limit_no_rate_is_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpu", "rtx4090", "--max-gpus", "1", "--slo", "e2el_ms=1e7")
    assert "throughput" in out and "95 % between" not in out


def test_a_price_is_found_by_any_name_of_the_gpu() -> None:
    assert [candidates.price(PRICES, name) for name in ("4090", "RTX4090", "NVIDIA GeForce RTX 4090 24 GB")] == [
        0.5
    ] * 3
    by_name = Prices(usd_per_gpu_hour={"NVIDIA H200 SXM 141 GB": 2.0}, source="", date="")
    assert candidates.price(by_name, "h200-sxm") == 2.0
    assert set(candidates.read_prices(None).usd_per_gpu_hour) == set(hardware.known())


@pytest.mark.parametrize(
    ("gpu", "tp", "slo", "model", "max_gpus", "reason"),
    [
        ("rtx4090", 1, "ttft_ms=500", "70b", 64, r"does not fit: [\d.]+ GB are missing on 1 x .*4090"),
        ("rtx4090", 1, "ttft_ms=5", "7b", 64, r"ttft is [\d.]+ ms for a request that is alone"),
        ("rtx4090", 1, "tpot_ms=5", "7b", 64, r"tpot is [\d.]+ ms for a request that is alone"),
        (
            "rtx4090",
            1,
            "tpot_ms=50",
            "7b",
            3,
            r"takes less than [\d.]+ requests/s .* --max-gpus asks 167 of each",
        ),
    ],
)
def test_what_will_not_do_is_listed_with_the_reason(
    gpu: str, tp: int, slo: str, model: str, max_gpus: int, reason: str
) -> None:
    asked = requirements(load(500.0), parse_slo(slo), max_gpus=max_gpus, emulated=lambda each: emulation(each, model))
    unmet = judge(Candidate(gpu=gpu, tp=tp), asked)
    assert isinstance(unmet, Unmet)
    assert re.search(reason, unmet.reason)


def test_a_limit_that_only_a_lonely_request_keeps() -> None:
    emulated = emulation(Candidate(gpu="rtx4090", tp=1))
    ((_, first_s, _),) = bounds(simulate(emulated, [(0.0, 512, 32)]))
    unmet = judge(
        Candidate(gpu="rtx4090", tp=1), requirements(load(), LatencyLimits(seconds={"ttft": first_s * 1.001}))
    )
    assert isinstance(unmet, Unmet) and "ttft is missed even at" in unmet.reason


def test_a_request_that_the_server_refuses() -> None:
    asked = requirements(load(), emulated=lambda each: emulation(each, kv_tokens=256))
    unmet = judge(Candidate(gpu="h200", tp=1), asked)
    assert isinstance(unmet, Unmet) and "refuses a request of this length" in unmet.reason


def test_the_table_says_that_it_is_a_prediction_and_how_far_off(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--gpu", "h200", "rtx4090", "--max-gpus", "2", "--rate", "8")
    assert code == 0
    assert out.startswith("PREDICTIONS: emulated")
    assert "11 real runs of its kind (dense, open load, h200) that it was not fitted to" in out
    assert "none is of its kind (dense, open load, rtx4090), so nobody knows" in out
    assert "Operators of rtx4090, how far off" in out and "Operators of h200, how far off" in out
    assert "taken from no offer" in out
    head, *body = [re.split(r" {2,}", line.strip()) for line in out.splitlines()[3:8]]
    assert head[0] == "$/hour"
    dollars = [float(line[0]) for line in body]
    assert len(dollars) == 4 and dollars == sorted(dollars)


@pytest.mark.processes
def test_each_row_has_the_error_of_its_own_gpu_and_format(capsys: pytest.CaptureFixture[str]) -> None:
    """The median of those held-out runs alone that were on the row's GPU, with weights in its format, of a dense model
    under an open load."""
    _, out, _ = plan(
        capsys, "--gpu", "h200", "h100", "a100", "--max-gpus", "1", "--quantization", "none", "fp8", "--json"
    )
    rows = {(row["gpu"], row["quantization"]): row for row in json.loads(out)["rows"]}
    errors = json.loads((hardware.DATA / "profiles.json").read_text())["vllm@v1"]["held_out"]
    assert len(rows) == 6
    for (gpu, quantization), row in rows.items():
        asked = {"gpu": gpu, "quantization": quantization, "architecture": "dense", "load": "open load"}
        off = [100 * run["e2el_w1"] for run in errors if asked.items() <= run.items()]
        assert row["held_out_runs"] == len(off)
        if off:
            assert row["held_out_off_percent"]["e2el"] == {"median": median(off), "worst": max(off)}
    runs = {row: found["held_out_runs"] for row, found in rows.items()}
    assert runs == {
        ("h200", None): 11, ("h200", "fp8"): 4, ("h100", None): 3, ("h100", "fp8"): 2,
        ("a100", None): 0, ("a100", "fp8"): 0,
    }  # fmt: skip
    assert rows["a100", "fp8"]["notes"][0].startswith(
        "NVIDIA A100 SXM 80 GB does not compute in fp8: weights in fp8 are"
    )


@pytest.mark.processes
def test_any_quantization_is_each_that_the_gpu_has(capsys: pytest.CaptureFixture[str]) -> None:
    def tried(gpu: str, *models: str) -> list[tuple[str, str | None]]:
        words = ("--gpu", gpu, "--max-gpus", "1", "--quantization", "any", "--model", *models, "--json")
        code, out, _ = plan(capsys, *words, "--slo", "ttft_ms=5000")
        said = json.loads(out)
        assert code == 0 and not said["unmet"]
        return sorted(((row["model"], row["quantization"]) for row in said["rows"]), key=str)

    assert tried("a100", "7b") == [("7b", "awq"), ("7b", "int8"), ("7b", None)]  # no fp8 before Ada
    assert tried("h200", "7b") == [("7b", "awq"), ("7b", "fp8"), ("7b", "int8"), ("7b", None)]
    assert tried("b200", "7b") == [("7b", "awq"), ("7b", "fp8"), ("7b", "nvfp4"), ("7b", None)]  # vLLM refuses int8
    assert tried("h200", "gpt-oss-20b") == [("gpt-oss-20b", "mxfp4")]  # as its weights come
    assert len(tried("a100", "7b", "gpt-oss-20b")) == 4


def test_the_table_says_which_model_and_format_a_row_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu", "h200", "--max-gpus", "1", "--max-running", "64")
    _, plain, _ = plan(capsys, *words)
    assert "model" not in plain.splitlines()[3] and "weights" not in plain.splitlines()[3]
    _, out, _ = plan(capsys, *words, "--model", "7b", "13b", "--quantization", "none", "fp8")
    head, *body = [re.split(r" {2,}", line.strip()) for line in out.splitlines()[3:8]]
    model, weights = head.index("model"), head.index("weights")
    named = {(line[model], line[weights]) for line in body}
    assert named == {(name, format_) for name in ("7b", "13b") for format_ in ("float16", "fp8")}


def test_json_is_the_last_line_and_the_table_stays_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu", "rtx4090", "--max-gpus", "2", "--rate", "8", "--model", "7b")
    code, out, err = plan(capsys, *words, "--json")
    (line,) = out.splitlines()
    said = json.loads(line)
    assert code == 0 and "PREDICTIONS: emulated" in err
    assert (said["schema"], said["emulated"], said["rate_of"], said["percentile"]) == (
        "loadgen.plan/1", True, "requests", 99.0,
    )  # fmt: skip
    assert len(said["rows"]) + len(said["unmet"]) == 2
    for row in said["rows"]:
        assert row["gpus"] == row["servers"] * row["tp"] and row["bound"] in ("ttft", "tpot", "throughput")
        assert row["share_per_s"] == 8 / row["servers"] <= row["rate_per_s"]
        assert row["in_flight"] >= row["share_in_flight"] > 0
        assert row["share_percentiles_ms"]["ttft"] <= 500 and row["share_percentiles_ms"]["tpot"] <= 50
        assert row["usd_per_hour"] == pytest.approx(0.5 * row["gpus"])


def test_a_percentile_is_of_enough_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ten of them lie beyond it, whatever --requests says; more where --requests says more."""
    needed = [LatencyLimits(seconds={}, percentile=percentile).least_requests for percentile in (50, 90, 95, 99, 99.9)]
    assert needed == [20, 100, 200, 1000, 10_000]
    for options, least in ((("--requests", "60"), 1000), (("--requests", "60", "--percentile", "90"), 100),
                           (("--requests", "300", "--percentile", "90"), 300)):  # fmt: skip
        _, out, _ = plan(capsys, "--gpu", "h200", "--max-gpus", "1", "--json", *options)
        assert json.loads(out)["least_requests"] == least
    trace = tmp_path / "short.jsonl"
    lines = ({"timestamp": at * 100, "input_length": 60, "output_length": 9, "hash_ids": [at]} for at in range(150))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["plan", "--slo", "ttft_ms=500", "--gpu", "h200", "--max-gpus", "1", "--trace", str(trace)]
    assert cli.invoke(words) == 0
    assert "each p99 is of at least 150 requests, 1 of them beyond it, too few" in capsys.readouterr().out


@pytest.mark.processes
def test_nothing_that_was_asked_about_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "70b", "--gpu", "h200", "a40", "--max-running", "8", "256", "--slo", "e2el_ms=1e6")
    _, out, _ = plan(capsys, *words)
    for gpu in ("h200", "a40"):
        for tp in (1, 2, 4, 8):
            assert len(re.findall(rf"^ .*\b{tp} x {gpu}\b", out, re.MULTILINE)) == 2, (gpu, tp)
    code, out, _ = plan(capsys, "--model", "70b", "--gpu", "rtx3090", "--max-gpus", "1")
    assert code == 0
    assert out.startswith("PREDICTIONS") and "Nothing that was looked at would do." in out and "Held out:" in out


@pytest.mark.processes
def test_the_commands_that_it_names_are_understood(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--gpu", "rtx4090", "--p2p", "off", "--max-running", "64", "--slo", "e2el_ms=1e6")
    _, out, _ = plan(capsys, *words)
    predict, compose = re.findall(r": loadgen ((?:predict|compose) .*)$", out, re.MULTILINE)
    assert cli.invoke([*shlex.split(predict), "--requests", "50", "--out", "run"]) in (0, 4)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["emulation"]["max_running"] == 64
    assert cli.invoke(shlex.split(compose)) == 0
    assert "llama-2-7b" in capsys.readouterr().out.lower()


def test_uneven_experts_are_planned_for_as_they_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """A step reads fewer of the experts' weights where routing is uneven: a token takes a little less time."""
    tpot_ms, commands = [], []
    for imbalance in ("1", "6"):
        server = ("--model", "qwen3-30b-a3b", "--gpu", "h200", "--max-gpus", "1", "--expert-imbalance", imbalance)
        decode = ("--input-tokens", "16", "--output-tokens", "64", "--rate", "20", "--percentile", "90")
        _, out, err = plan(capsys, *server, *decode, "--json")
        (row,) = json.loads(out)["rows"]
        assert (row["servers"], "6 times the mean load" in " ".join(row["notes"])) == (1, imbalance == "6")
        tpot_ms.append(row["share_percentiles_ms"]["tpot"])
        commands.append("--expert-imbalance 6" in err)
    assert 0.8 < tpot_ms[1] / tpot_ms[0] < 0.97
    assert commands == [False, True]


def test_a_gpu_and_prices_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    h200 = json.loads((hardware.DATA / "gpus.json").read_text())["h200"]
    mine.write_text(json.dumps({**h200, "name": "Mine", "aliases": []}))
    prices = tmp_path / "prices.json"
    options = ("--gpu", str(mine), "--gpu", "h200", "--max-gpus", "1", "--prices", str(prices))
    prices.write_text('{"source": "me", "date": "today", "usd_per_gpu_hour": {"Mine": 1.25}}')
    code, out, _ = plan(capsys, *options)
    assert code == 0 and "Prices: me (today)" in out
    first, second = out.splitlines()[4:6]
    assert first.split()[0] == "1.25" and "no price" in second


def test_limits_are_read() -> None:
    assert parse_slo("ttft_ms=500, tpot_ms=2.5,e2el_ms=1e3", 95.0) == LatencyLimits(
        seconds={"ttft": 0.5, "tpot": 0.0025, "e2el": 1.0}, percentile=95.0
    )
    for wrong in ("", "ttft_ms", "ttft_ms=x", "ttft_ms=0", "ttft_ms=nan", "ttft_ms=1,"):
        with pytest.raises(ConfigError, match="is not understood; use ttft_ms=500,tpot_ms=50"):
            parse_slo(wrong)
    for wrong, meant in (("ttft=5", "ttft_ms"), ("itl_ms=3", "tpot_ms")):
        with pytest.raises(ConfigError, match=f"did you mean {meant}"):
            parse_slo(wrong)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--slo", "ttft_ms;5"), "--slo 'ttft_ms;5' is not understood"),
        (("--slo", "ttft_ms=5,ttft_ms=6"), "--slo limits ttft_ms twice"),
        (("--slo", "tpot_ms=5", "--output-tokens", "1"), "--slo limits tpot_ms and replies of one token have none"),
        (("--percentile", "100"), "--percentile is 100; it must be between 0 and 100."),
        (
            ("--percentile", "99.999"),
            "a p99.999 needs 1000000 requests, of which 10 are beyond it, and plan computes 100000",
        ),
        (
            ("--model", "gpt-oss-20b", "--quantization", "fp8"),
            "gpt-oss-20b comes quantized as mxfp4 and --quantization says",
        ),
        (("--quantization", "int4"), "int4"),
        (("--expert-imbalance", "2"), "llama-2-7b has no experts; leave --expert-imbalance out."),
        (("--model", "mixtral-8x7b", "7b", "--expert-imbalance", "2"), "llama-2-7b has no experts; leave --expert-"),
        (
            ("--model", "mixtral-8x7b", "--expert-imbalance", "4"),
            "--expert-imbalance is 4; for mixtral-8x7b it must be",
        ),
        (("--rate", "0"), "--rate is 0; it must be above 0 and at most 1e+09."),
        (("--rate", "-3"), "--rate is -3; it must be above 0 and at most 1e+09."),
        (("--rate", "nan"), "--rate is nan; it must be above 0 and at most 1e+09."),
        (("--rate", "1e300"), "--rate is 1e+300; it must be above 0 and at most 1e+09."),
        (
            ("--input-tokens", "5000"),
            "llama-2-7b takes 4096 tokens in all; --input-tokens and --output-tokens make 5016.",
        ),
        (("--gpu", "h300"), "there is no GPU 'h300' here; known are h200,"),
        (("--gpu", "missing.json"), "cannot read missing.json"),
        (("--model", "8x99b"), "unknown model '8x99b'"),
        (("--model", "some/model"), "the size of 'some/model' is not known here"),
        (("--backend", "openai"), "a server of kind 'openai' is not modelled"),
        (("--scheduler", "tgi@0"), "--scheduler tgi@0 is no server of kind 'vllm'"),
        (("--max-gpus", "0"), "--max-gpus is 0; it must be at least 1."),
        (("--max-running", "0"), "--max-running is 0; it must be at least 1."),
        (("--requests", "0"), "--requests is 0; it must be at least 1."),
        (("--memory-ratio", "1.5"), "--memory-ratio is 1.5"),
        (("--prices", "missing.json"), "cannot read missing.json"),
        (("--profile", "missing.json"), "cannot read missing.json"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], sentence: str) -> None:
    code, out, err = plan(capsys, *options)
    assert (code, out) == (2, "")
    assert sentence in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "sentence"), [("[]", "is no list of prices"), ('{"usd_per_gpu_hour": {"h200": -1}}', "prices")]
)
def test_prices_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "p.json").write_text(content)
    code, _, err = plan(capsys, "--prices", str(tmp_path / "p.json"))
    assert code == 2 and sentence in err and len(err.splitlines()) == 1
