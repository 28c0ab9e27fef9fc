"""Modelled hardware as a whole: one engine under two clocks, predictions beside real runs, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from loadgen.cli import invoke, main
from loadgen.config import Config, ConfigError
from loadgen.document import markdown
from loadgen.load import conversations
from loadgen.load.lengths import WorkloadError
from loadgen.load.load import Streams, parse_streams
from loadgen.report import text as texts
from loadgen.report.schema import Report
from loadgen.rundir import records
from loadgen.server import embedded
from servers.calibrate import command as calibrate
from servers.predict import command as predict
from servers.serve.modelled_timing import SimulatedTiming
from servers.simulator import virtual
from servers.simulator.build import SCHEDULERS, EmulationError, emulate, profiles
from servers.simulator.options import Hardware
from tests.lateness import Lateness, measured_lateness


def emulated(backend: str = "vllm", model: str = "7b", **options: Any) -> Any:
    return emulate(Hardware(**{"gpu": "h200", **options}).setup(backend, model, 4096))


class FakeReply:
    def __init__(self, index: int, received_ns: int, prompt: int, output: int) -> None:
        self.index, self.received_ns, self.n_prompt_tokens, self.n_tokens = index, received_ns, prompt, output
        self.segments: tuple[tuple[int, int], ...] = ()
        self.adapter = ""
        self.priority = 0
        self.cached_tokens = 0
        self.at_ns: list[int] = []

    def found(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens


loads = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=40)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(load=loads, speed=st.sampled_from([0.5, 1.0, 8.0]))
@settings(max_examples=15, deadline=None)
def test_the_wall_clock_and_virtual_time_agree(scheduler: str, load: list[tuple[int, int, int]], speed: float) -> None:
    """To the nanoseconds of rounding, token by token."""
    world = emulated(scheduler.partition("@")[0], scheduler=scheduler, kv_tokens=6000)
    at_s = np.cumsum([gap / 1000 for gap, _, _ in load])
    arrivals = [(float(at), prompt, output) for at, (_, prompt, output) in zip(at_s, load, strict=True)]
    truth = virtual.simulate(world, [(at - arrivals[0][0], p, o) for at, p, o in arrivals])
    timing = SimulatedTiming(world, speed)
    replies = [FakeReply(i, int(at / speed * 1e9) + 1, p, o) for i, (at, p, o) in enumerate(arrivals)]
    coming = list(replies)
    while coming or timing.next_due_ns() is not None:
        due = timing.next_due_ns()
        if coming and (due is None or coming[0].received_ns <= due):
            timing.submit(coming.pop(0))
            continue
        assert due is not None
        reply = timing.pop(due)
        if reply is not None:
            reply.at_ns.append(timing.popped_due_ns)
    for reply, outcome in zip(replies, truth, strict=True):
        modelled = (np.array(reply.at_ns) - replies[0].received_ns) / 1e9 * speed
        assert modelled == pytest.approx(np.array(outcome.times_s), abs=2e-6 * speed + 1e-6)


def test_a_client_that_goes_frees_its_memory() -> None:
    timing = SimulatedTiming(emulated(kv_tokens=6000))
    replies = [FakeReply(i, 0, 500, 1000) for i in range(30)]
    for reply in replies:
        timing.submit(reply)
    now_ns = 0
    for _ in range(200):
        now_ns = timing.next_due_ns() or now_ns
        timing.pop(now_ns)
    for reply in replies:
        timing.cancel(reply)
    while (due := timing.next_due_ns()) is not None:
        assert timing.pop(due) is None
    scheduler = timing.scheduler
    assert (scheduler.running, scheduler.waiting, scheduler.used_tokens) == (0, 0, 0)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["vllm", "tgi", "lightllm", "sglang"])
def test_the_wire_gives_the_times_of_virtual_time(backend: str, tmp_path: Path) -> None:
    """The real server and client; virtual time is given the moments at which the client really sent. Beyond the model a
    token waits for the server's timer and for the client's loop, as late as the machine is on average."""
    run = tmp_path / "run"
    flags = f"--backend {backend} --gpu h200 --requests 40 --arrival poisson:20 --output-tokens 60 --warmup 0"
    command = [sys.executable, "-c", "from loadgen.cli import main; main()", "run", *flags.split()]
    command += ["--no-calibrate", "--no-server-metrics", "--out", str(run)]
    with measured_lateness() as watched:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["emulated"] is True and report["requests"]["ok"] == 40, done.stderr
    assert report["emulation"]["scheduler"].startswith(backend)
    table, lateness = records.read(run)[0].measured(), watched.during(run)
    sent_s = (table.sent_ns - table.sent_ns[0]) / 1e9
    outcomes = virtual.simulate(emulated(backend), [(at, 512, 60) for at in sent_s.tolist()])
    e2el_ms = (table.last_token_ns - table.sent_ns) / 1e6
    model_ms = np.array([outcome.times_s[-1] - outcome.sent_s for outcome in outcomes]) * 1e3
    (alone,) = virtual.simulate(emulated(backend), [(0.0, 512, 60)])
    assert e2el_ms.min() >= alone.times_s[-1] * 1e3  # never early: company makes no step shorter
    assert_as_modelled(np.sort(e2el_ms) - np.sort(model_ms), model_ms, lateness)


@pytest.mark.processes
def test_a_trace_is_played_as_it_is_predicted(tmp_path: Path) -> None:
    """Request by request: what is asked, when, and what the prefix cache holds of it; and when it is done, but for the
    wire, which sends and receives as late as the machine is. A moment's lateness can move a request into the next step,
    or a block into the cache too late."""
    trace, maker = tmp_path / "trace.jsonl", Path(__file__).parents[3] / "benchmarks" / "make_trace.py"
    made = f"--requests 45 --rate 2 --input-tokens 3000 --output-tokens 60 --most-tokens 4096 --out {trace}"
    subprocess.run([sys.executable, str(maker), *made.split()], check=True, capture_output=True, timeout=60)
    flags = f"--gpu h200 --trace {trace} --trace-speed 3 --trace-limit 40".split()
    program = [sys.executable, "-c", "from loadgen.cli import main; main()"]
    run, prediction = tmp_path / "run", tmp_path / "prediction"
    here = ["--no-calibrate", "--no-server-metrics", "--out", str(run)]
    with measured_lateness() as watched:
        done = subprocess.run([*program, "run", *flags, *here], capture_output=True, text=True, timeout=120)
    assert (run / "report.json").exists(), done.stderr
    assert invoke(["predict", *flags, "--out", str(prediction)]) in (0, 4)  # both have a verdict of their own
    played, modelled = measured_lines(run), measured_lines(prediction)
    assert len(played) == 40 and {line["outcome"] for line in played + modelled} == {"ok"}
    for name in ("id", "scheduled_ns", "asked_prompt_tokens", "asked_tokens", "prompt_tokens", "output_tokens",
                 "shared_tokens"):  # fmt: skip
        assert [line.get(name) for line in played] == [line.get(name) for line in modelled], name
    assert sum("shared_tokens" in line for line in modelled) >= 10
    cached = [(one["cached_tokens"], other["cached_tokens"]) for one, other in zip(played, modelled, strict=True)]
    assert sum(one == other for one, other in cached) >= 38, cached
    lateness = watched.during(run)
    pairs = zip(played, modelled, strict=True)
    late_ms = np.array([one["done_ns"] - other["done_ns"] for one, other in pairs]) / 1e6
    modelled_ms = np.array([line["done_ns"] - line["scheduled_ns"] for line in modelled]) / 1e6
    assert np.median(late_ms) >= -0.02 * modelled_ms.mean()  # a later step can hold more, never all of them
    assert_as_modelled(late_ms, modelled_ms, lateness)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["vllm", "lightllm", "tgi", "sglang"])
def test_sessions_are_played_as_they_are_predicted(backend: str, tmp_path: Path) -> None:
    """Turn by turn: what is asked, what of it is known, and how long it takes; a turn's own lateness moves the next."""
    flags = f"--backend {backend} --gpu h200 --sessions 12 --turns uniform:1:5 --think-time uniform:0:0.5 --warmup 0 "
    flags += "--arrival poisson:6 --input-tokens uniform:20:200 --output-tokens 60"
    command = [sys.executable, "-c", "from loadgen.cli import main; main()", "run", *flags.split()]
    run, prediction = tmp_path / "run", tmp_path / "prediction"
    with measured_lateness() as watched:
        done = subprocess.run(
            [*command, "--no-calibrate", "--no-server-metrics", "--out", str(run)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert (run / "report.json").exists(), done.stderr
    assert invoke(["predict", *flags.split(), "--out", str(prediction)]) in (0, 4)
    played, modelled = measured_lines(run), measured_lines(prediction)
    assert len(played) > 24 and {line["outcome"] for line in played + modelled} == {"ok"}, done.stderr
    same = ["id", "session", "turn", "output_tokens"]
    if backend != "tgi":  # its prompts are text, whose later turns have the tokens that the server counts
        same += ["shared_tokens", "asked_prompt_tokens", "prompt_tokens"]
    for name in same:
        assert [line.get(name) for line in played] == [line.get(name) for line in modelled], name
    if backend == "vllm":  # which alone tells
        pairs = [(one["cached_tokens"], other["cached_tokens"]) for one, other in zip(played, modelled, strict=True)]
        assert sum(one == other for one, other in pairs) >= len(pairs) - 2, pairs
        assert sum(cached or 0 for _, cached in pairs) > 2000
    lateness = watched.during(run)
    taken_ms, modelled_ms = (
        np.array([line["done_ns"] - line["scheduled_ns"] for line in lines]) / 1e6 for lines in (played, modelled)
    )
    assert_as_modelled(taken_ms - modelled_ms, modelled_ms, lateness)


def assert_as_modelled(off_ms: NDArray[np.float64], modelled_ms: NDArray[np.float64], lateness: Lateness) -> None:
    """Within 2 % and what the machine adds, for most requests: a single stall of the machine falls on all requests of
    its moment, some of a hundred, while the control, which it meets once, hardly tells it. A model that the wire does
    not keep to is off for all of them."""
    allowed_ms = 0.02 * modelled_ms.mean() + 4 * lateness.mean_ms
    assert np.median(np.abs(off_ms)) <= allowed_ms, (off_ms, modelled_ms.mean(), lateness.mean_ms)


def measured_lines(directory: Path) -> list[dict[str, Any]]:
    """The records of a run as they are on disk, by id."""
    lines = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
    return sorted((line for line in lines if line.get("phase") == "measured"), key=lambda line: int(line["id"]))


@pytest.mark.parametrize(
    ("model", "gpus", "tokens"), [("7b", 1, 229_904), ("7b", 2, 485_264), ("7b", 4, 996_768), ("70b", 4, 1_211_232)]
)
def test_kv_capacity_as_vllm_logged_it(model: str, gpus: int, tokens: int) -> None:
    """vLLM 0.25.1 on H200s with 0.9 of their memory."""
    assert emulated(model=model, gpus=gpus, tp=gpus).kv_tokens == pytest.approx(tokens, rel=0.015)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu": "rtx4090", "model": "70b"}, r"does not fit: 1\d\d\.\d GB are missing on 1 x .*--tp 8 would fit"),
        ({"gpu": "rtx4090", "model": "70b", "gpus": 4}, r"does not fit: .* on 4 x .*--tp 8 would fit"),
        ({"tp": 3, "gpus": 4}, r"32 attention heads, which --tp 3 does not divide"),
        ({"tp": 8, "gpus": 4}, "--tp 8 needs 8 GPUs and --gpus says 4"),
        ({"scheduler": "tgi@3"}, "is no server of kind 'vllm'; there are vllm@v1, vllm@v0, vllm@0.2[.]"),
        ({"backend": "openai"}, "a server of kind 'openai' is not modelled"),
        ({"model": "gpt-5"}, "unknown model 'gpt-5'; known are 7b, "),
    ],
)
def test_what_cannot_be_emulated(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EmulationError, match=said):
        emulated(**options)


def test_settings_of_the_scheduler() -> None:
    """TGI at its own limit of requests turns away what comes on top (429)."""
    world = emulated("tgi", scheduler_arg=("max_concurrent_requests=128",))
    statuses = [outcome.status for outcome in virtual.simulate(world, [(0.0, 512, 8)] * 200)]
    assert statuses == [200] * 128 + [429] * 72
    with pytest.raises(EmulationError, match=r"tgi@3 has no setting 'x'; it has max_batch_prefill_tokens, "):
        virtual.simulate(emulated("tgi", scheduler_arg=("x=1",)), [])
    with pytest.raises(EmulationError, match="must be NAME=NUMBER"):
        emulated(scheduler_arg=("max_running",))


def test_a_profile_of_another_server(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    calibrate.write(msgspec.structs.replace(profiles()["vllm@v1"], scheduler="tgi@3"), path)
    with pytest.raises(EmulationError, match=r"was fitted to tgi@3 and this is vllm@v1; .*--scheduler tgi@3"):
        emulated(profile=path)
    path.write_text("[]")
    with pytest.raises(EmulationError, match="is no hardware profile"):
        emulated(profile=path)


@pytest.mark.parametrize(
    ("runs", "measured"),
    [
        (["h100_7b_burst_o128", "h100x2_7b_burst"], ["h100"]),
        (["h200/serving/7b_burst_o64"], ["h200"]),
        (["h200x4_70b_burst", "h100/serving/7b_burst"], ["h100", "h200"]),
        (["serving/h200_7b_burst", "h2000_7b_burst"], []),
    ],
)
def test_gpus_of_a_profile_are_those_of_its_runs(tmp_path: Path, runs: list[str], measured: list[str]) -> None:
    path = tmp_path / "p.json"
    error = profiles()["vllm@v1"].held_out[0]
    held_out = tuple(msgspec.structs.replace(error, run=run, gpu="") for run in runs)
    calibrate.write(msgspec.structs.replace(profiles()["vllm@v1"], gpu="", held_out=held_out), path)
    facts = emulated(profile=path).facts  # of an H200
    assert sorted(facts.profile_gpus) == measured
    assert facts.profile_assumed is (measured == ["h100"])


def test_a_prediction_without_errors_of_its_kind_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no error of other models stands beside a number."""
    out = tmp_path / "run"
    predicted(capsys, out, "--gpu", "h200", "--model", "deepseek-v3", "--gpus", "8")
    page = (out / "report.md").read_text()
    told = page.index("no real run of its kind to say how far off it is")
    assert told < page.index("## Verdict") and "off by" not in page
    assert "of 61 real runs none is of its kind (mixture with latent attention, burst, " in page


def test_operators_that_were_never_measured_leave_a_range(tmp_path: Path) -> None:
    def told(model: str) -> list[str]:
        notes: tuple[str, ...] = emulated(model=model, gpus=4).facts.notes
        return [note for note in notes if note.startswith("never measured")]

    assert not told("7b")
    decoders = json.loads((Path(__file__).parents[2] / "backends/decoders.json").read_text())
    config = next(each["config"] for each in decoders if each["config"]["model_type"] == "qwen3_next")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (note,) = told(str(tmp_path))
    operators = "linear attention"
    found = re.search(rf"{operators}; a step of 64 .* takes ([\d.]+) ms .*, and ([\d.]+) to ([\d.]+) if", note)
    assert found
    likely_ms, low_ms, high_ms = map(float, found.groups())
    assert high_ms - likely_ms == pytest.approx(2 * (likely_ms - low_ms), abs=0.2) and low_ms < likely_ms


def test_predict_writes_a_run_that_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    sys.argv = ["loadgen", "predict", "--backend", "vllm", "--model", "70b", "--gpu", "h200", "--gpus", "4",
                "--requests", "50", "--out", str(out)]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["emulated"] is True and report["requests"]["ok"] == 50
    assert report["emulation"]["tensor_parallel"] == 2 and report["emulation"]["held_out"]
    assert json.loads((out / "report.json").read_text()) == report
    page = (out / "report.md").read_text()
    assert "EMULATED" in page and "held out, off by" in page and "(held out: off by" in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "h20"], "there is no GPU 'h20'"),
        ([], "name the GPU to predict for"),
        (["--gpu", "h200", "--gpus", "0,1"], "with --gpu it is how many"),
        (["--gpu", "h200", "--launch", "docker"], "--gpu models hardware in the embedded server"),
        (["--kv-tokens", "500"], "--kv-tokens is for modelled hardware"),
        (["--gpu", "h200", "--profile", "/nonexistent.json"], "cannot read /nonexistent.json"),
        (["--gpu", "h200", "--workers", "4"], "--workers is for real requests, and predict sends none; leave it out."),
        (["--gpu", "h200", "--no-stream"], "--no-stream is for real requests"),
        (["--gpu", "h200", "--speed", "2"], "--speed is for real requests"),
        (["--gpu", "h200", "--tokenizer", "dir"], "--tokenizer is for real requests"),
        (["--gpu", "h200", "--sessions", "4", "--duration", "5"], "--duration does not go with --sessions"),
        (["--gpu", "h200", "--turns", "4"], "--turns is for --sessions"),
    ],
)
def test_bad_input_is_one_sentence(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv = ["loadgen", "predict", *flags]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("command", ["run", "predict", "breakdown"])
def test_all_gpus_are_as_many_as_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke([command, "--gpu", "h200", "--tp", "all"]) == 2
    assert "--tp all uses every GPU there is; say with --gpus how many" in capsys.readouterr().err
    all_of_four = embedded.modelled(Config(gpu="h200", tp="all", gpus="4"))
    assert (all_of_four["gpus"], all_of_four["tp"]) == (4, 4)


def dataset(path: Path, rows: list[dict[str, Any]]) -> Config:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(gpu="h200", dataset=path)


@pytest.mark.parametrize("scheduler", ["vllm@v1", "tgi@3", "lightllm@1.2", "sglang@0.5.11"])
def test_the_prefix_cache_behind_the_wire_finds_what_virtual_time_finds(scheduler: str) -> None:
    """Prompts of 3 groups, one every 200 ms: the wire's timing is told of the same pieces."""
    world = emulated(scheduler.partition("@")[0], scheduler=scheduler, prefix_caching="on", kv_tokens=20_000)
    load = [virtual.ArrivingRequest(0.2 * n, 300, 4, ((n % 3, 160),)) for n in range(12)]
    outcomes = virtual.simulate(world, load)
    assert [each.cached_tokens for each in outcomes] == [0] * 3 + [160] * 9
    timing = SimulatedTiming(world)
    replies = [FakeReply(n, 1000 + int(2e8 * n), 300, 4) for n in range(12)]
    for reply, arrival in zip(replies, load, strict=True):
        reply.segments = arrival.segments
        timing.submit(reply)
        while (due := timing.next_due_ns()) is not None:
            timing.pop(due)
    assert [reply.cached_tokens for reply in replies] == [each.cached_tokens for each in outcomes]


def test_a_closed_loop_in_virtual_time_follows_its_ramp() -> None:
    world = emulated("vllm")
    outcomes = virtual.simulate(world, [(0.0, 64, 20)] * 200, parse_streams("1:8:2"))
    for stream in range(8):
        start_s = 2 * stream / 7
        assert any(abs(each.sent_s - start_s) < 1e-9 for each in outcomes)
        in_flight = sum(each.sent_s <= start_s < each.times_s[-1] for each in outcomes)
        assert in_flight <= stream + 1
    down = virtual.simulate(world, [(0.0, 64, 20)] * 200, parse_streams("8:1:1"))
    late = sorted(each.sent_s for each in down if each.sent_s > 1.5)
    ends = sorted(each.times_s[-1] for each in down if each.sent_s > 1.5)
    assert len(late) > 5 and all(end <= sent for end, sent in zip(ends, late[1:], strict=False))  # one at a time


def drawn(config: Config) -> list[virtual.ArrivingRequest]:
    return list(predict.requests(*predict.drawn(config)))


def test_a_dataset_is_predicted_as_it_is_run(tmp_path: Path) -> None:
    """Less what serves the warm-up, and never less than was asked for."""
    rows = [{"prompt": list(range(10 + n)), "output_tokens": 2 + n} for n in range(12)]
    config = dataset(tmp_path / "prompts.jsonl", rows)
    assert [request[:3] for request in drawn(config)] == [(0.0, 10 + n, 2 + n) for n in range(4)]
    assert len(drawn(dataclasses.replace(config, warmup=0))) == 12
    assert len(drawn(dataclasses.replace(config, warmup=2, requests=9, concurrency=3))) == 9
    timed = dataclasses.replace(config, warmup=2, arrival="constant:1", duration=3.5)
    assert [request.prompt for request in drawn(timed)] == [10, 11, 12, 13]
    with pytest.raises(ConfigError, match="the dataset has 4 prompts for 5 requests"):
        drawn(dataclasses.replace(config, requests=5))
    with pytest.raises(WorkloadError, match="--warmup 12 takes as many"):
        drawn(dataclasses.replace(config, warmup=12))


def test_text_of_unknown_length_is_not_predicted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a b"}, {"prompt": "a b", "prompt_tokens": 7}, {"prompt": [1, 2, 3]}]
    config = dataclasses.replace(dataset(tmp_path / "prompts.jsonl", rows), warmup=0)
    with pytest.raises(ConfigError, match="1 prompts of the dataset are text, whose length is not known"):
        drawn(config)
    endless = dataclasses.replace(config, concurrency=2, duration=1.0, repeat_dataset=True)
    with pytest.raises(ConfigError, match="1 prompts of the dataset are text, whose length is not known"):
        drawn(endless)
    config = dataclasses.replace(dataset(tmp_path / "prompts.jsonl", rows[1:]), warmup=0)
    assert [request.prompt for request in drawn(config)] == [7, 3]
    load, shapes = predict.drawn(dataclasses.replace(config, concurrency=2, duration=1.0, repeat_dataset=True))
    sent = predict.requests(load, shapes)
    assert predict.longest_request_tokens(load, shapes, sent) == 7 + 128
    assert [request.prompt for request in itertools.islice(sent, 5)] == [7, 3, 7, 3, 7]


def test_conversations_are_predicted_where_a_tokenizer_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": role, "content": said} for role, said in zip(("user", "assistant") * 2, row, strict=True)
            ]
        }
        for row in (("a b c", "d e", "f", "g h i"), ("j", "", "k l", "m"))
    ]
    config = dataclasses.replace(dataset(tmp_path / "chats.jsonl", rows), warmup=0, output_tokens=7)
    with pytest.raises(ConfigError, match="whose length is not known; name a --tokenizer"):
        predict.drawn(config)
    monkeypatch.setattr(conversations, "tokenizer_count", lambda source: lambda text: len(text.split()))
    load, shapes = predict.drawn(dataclasses.replace(config, tokenizer="words"))
    assert (load.requests, load.planned) == (2, 4)
    asked = [shapes.shape(number) for number in range(4)]
    assert [(each.prompt_tokens, each.output_tokens, each.shared_tokens) for each in asked] == [
        (3, 2, 0), (3 + 2 + 1, 3, 5), (1, 7, 0), (1 + 7 + 2, 1, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 4, "model": "70b"}, ["2 of the 4 GPUs hold llama-2-70b and the rest do nothing; --tp 4 uses all."]),
        ({"gpus": 3}, ["1 of the 3 GPUs holds llama-2-7b and the rest do nothing."]),  # which 3 cannot share
        ({"tp": 4, "model": "70b"}, []),
        ({"gpus": 4, "tp": 4}, []),
        ({}, []),
    ],
)
def test_gpus_that_do_nothing_are_told(options: dict[str, Any], said: list[str]) -> None:
    assert emulated(**options).facts.notes == tuple(said)


@pytest.mark.parametrize("command", ["predict", "breakdown", "run"])
def test_gpus_that_do_nothing_are_told_by(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = () if command == "breakdown" else ("--requests", "2", "--output-tokens", "2")
    more = ("--no-calibrate", "--no-server-metrics", "--warmup", "0") if command == "run" else ()
    out = tmp_path / "out"
    invoke([command, "--gpu", "h200", "--gpus", "2", "--out", str(out), *flags, *more])
    said = capsys.readouterr()
    sentence = "1 of the 2 GPUs holds llama-2-7b and the rest do nothing; --tp 2 uses all."
    lines = [line for line in said.err.splitlines() if sentence in line]
    assert len(lines) == (1 if command == "breakdown" else 2)  # before it begins, and in the report
    assert "modelled for 2 x" not in said.err
    assert (out / "report.md").read_text().count(sentence) == 1
    assert json.loads((out / "manifest.json").read_text())["emulation"]["notes"] == [sentence]


def test_a_burst_is_predicted_quickly_enough_to_search_with() -> None:
    """No timing assert: that a thousand requests are computed in steps, not in tokens, shows in their number."""
    began = time.process_time()
    outcomes = virtual.simulate(emulated(), [(0.0, 512, 256)] * 1000)
    print(f"{time.process_time() - began:.2f} s")
    assert sum(len(outcome.times_s) for outcome in outcomes) == 256_000


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_setting_of_a_scheduler_makes_it_fall_or_hang(scheduler: str) -> None:
    """Each at its least, and below: either it serves, or one sentence says why not."""
    backend = scheduler.partition("@")[0]
    with pytest.raises(EmulationError, match=" has no setting 'x'; it has ") as said:
        emulated(backend, scheduler=scheduler, scheduler_arg=("x=1",))
    settings = str(said.value).partition("; it has ")[2].rstrip(".").split(", ")
    assert "depth" not in settings and "kv_tokens" not in settings
    for name in settings:
        with pytest.raises(EmulationError, match=f"--scheduler-arg {name} has 5000 digits"):
            emulated(backend, scheduler=scheduler, scheduler_arg=(f"{name}={'9' * 5000}",))
        for value in (0, 1, 2, 999_999_999):
            for streams in (None, Streams(2, 2)):
                try:
                    world = emulated(backend, scheduler=scheduler, scheduler_arg=(f"{name}={value}",), kv_tokens=9000)
                    outcomes = virtual.simulate(world, [(0.0, 700, 9)] * 5, streams)
                except EmulationError:
                    continue
                assert all(len(each.times_s) == 9 for each in outcomes if each.status == 200)


@pytest.mark.parametrize(
    ("backend", "setting", "said"),
    [
        ("vllm", "max_running=0", "max_running is 0; it must be at least 1"),
        ("vllm", "budget_tokens=0", "budget_tokens is 0; it must be at least 1"),
        (
            "vllm",
            "depth=0",
            "has no setting 'depth'; it has max_running, budget_tokens, async_scheduling, "
            "long_prefill_token_threshold, max_loras, lora_rank, lora_load_ms, by_priority\\.$",
        ),
        ("tgi", "block_tokens=0", "block_tokens is 0; it must be at least 1"),
        ("tgi", "chunking=2", "chunking is 2; it must be 0 or 1"),
        ("tgi", "chunking=0.5", "chunking is 0.5; it must be a whole number[.]"),
        ("tgi", "max_batch_size=1.5", "max_batch_size is 1.5; it must be a whole number, at least 1"),
        ("tgi", "waiting_served_ratio=1.2.3", "must be NAME=NUMBER"),
        ("tgi", "waiting_served_ratio=-1", "must be NAME=NUMBER"),
        ("tgi", "waiting_served_ratio=1.000000000", "has 10 digits; a number may have 9"),
        ("lightllm", "running_max_req_size=0", "running_max_req_size is 0; it must be at least 1"),
        ("lightllm", "batch_max_tokens=1", "lightllm@1.2 cannot serve with these settings .*batch_max_tokens=1"),
    ],
)
def test_settings_that_no_scheduler_can_have(backend: str, setting: str, said: str) -> None:
    with pytest.raises(EmulationError, match=said):
        emulated(backend, scheduler_arg=(setting,))


def test_a_burst_on_tgi_begins_with_a_batch_of_one() -> None:
    """Its router takes requests in one by one, and begins with the first."""
    world = emulated("tgi", scheduler_arg=("chunking=0", "max_batch_prefill_tokens=4096"))
    outcomes = virtual.simulate(world, [(0.0, 512, 8)] * 40)
    first = sorted(outcome.times_s[0] for outcome in outcomes)
    begins = [place for place, (before, at) in enumerate(itertools.pairwise(first), 1) if at - before > 1e-3]
    assert begins[:3] == [1, 9, 17]


def test_a_setting_may_be_a_fraction() -> None:
    """With 1.2 a batch of less than 1.2 times the running waits for steps to go by, with 0.3 it does not."""

    def batches(ratio: str) -> int:
        settings = ("chunking=0", "max_batch_prefill_tokens=1024", f"waiting_served_ratio={ratio}")
        outcomes = virtual.simulate(emulated("tgi", scheduler_arg=settings), [(0.0, 256, 40)] * 24)
        return len({outcome.times_s[0] for outcome in outcomes if outcome.times_s[0] < outcomes[0].times_s[-1]})

    assert emulated("tgi", scheduler_arg=("waiting_served_ratio=1.2",)).settings["waiting_served_ratio"] == 1.2
    assert batches("1.2") < batches("0.3")


@pytest.mark.parametrize("streams", [None, Streams(2, 2)])
def test_a_server_that_never_ends_a_request(streams: Streams | None) -> None:
    """Its chunks are larger than a batch may be: such a prompt is never prefilled."""
    world = emulated("lightllm", scheduler_arg=("batch_max_tokens=64", "chunked_prefill_size=100"))
    assert virtual.simulate(world, [(0.0, 50, 3)])[0].times_s
    with pytest.raises(EmulationError, match=r"never ends \d of the requests, such as 200 tokens in and 3 out"):
        virtual.simulate(world, [(0.0, 200, 3)] * 2 + [(0.0, 50, 3)], streams)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_ratio": 5.0}, "--memory-ratio is 5; it must be above 0 and at most 1"),
        ({"memory_ratio": float("nan")}, "--memory-ratio is nan"),
        ({"max_running": 0}, "--max-running is 0; it must be at least 1"),
        ({"max_requests": 0}, "--max-requests is 0; it must be at least 1"),
        ({"speed": float("inf")}, "--speed is inf"),
        ({"speed": float("nan")}, "--speed is nan"),
        ({"topology": "nvlink", "p2p": False}, "P2P is off and --topology is 'nvlink', which do not agree"),
        ({"topology": "host", "p2p": True}, "P2P is on and --topology is 'host'"),
    ],
)
def test_options_of_the_hardware_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EmulationError, match=said):
        emulated(**options)


@pytest.mark.parametrize(
    ("gpu", "p2p", "topology"), [("rtx4090", None, "host"), ("rtx4090", True, "pcie"), ("h200", False, "host")]
)
def test_p2p_on_is_not_through_host_memory(gpu: str, p2p: bool | None, topology: str) -> None:
    assert emulated(gpu=gpu, gpus=2, tp=2, p2p=p2p).facts.topology == topology


def test_budget_of_vllm_by_gpu() -> None:
    """As vLLM's API server chooses it: by memory, and less on an A100."""
    expected = {"h100": 8192, "h200": 8192, "b200": 16384, "a800": 8192, "a100": 2048, "a40": 2048}
    assert {gpu: emulated(gpu=gpu, gpus=2).settings["budget_tokens"] for gpu in expected} == expected
    assert emulated(gpu="a40", scheduler_arg=("budget_tokens=512",)).settings["budget_tokens"] == 512


@pytest.mark.parametrize(("part", "name"), [("overheads", "step_us"), ("front", "token_us")])
def test_a_profile_with_impossible_times(part: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    written = msgspec.to_builtins(profiles()["vllm@v1"])
    written[part][name] = -5.0
    path.write_text(json.dumps(written))
    with pytest.raises(EmulationError, match=f"p.json: {name} is -5; it must be a number of at least 0"):
        emulated(profile=path)


def predicted(capsys: pytest.CaptureFixture[str], out: Path, *flags: str) -> str:
    assert invoke(["predict", "--requests", "20", "--output-tokens", "8", "--out", str(out), *flags]) == 0
    capsys.readouterr()
    return (out / "report.md").read_text().replace("**", "")


def test_a_prediction_says_whose_errors_it_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for gpu in ("h200", "h100"):  # both were compared with real runs
        said = predicted(capsys, tmp_path / gpu, "--gpu", gpu)
        assert re.search(r"Operators of NVIDIA H\d00 .*, how far off: mean absolute relative error: GEMM", said)
        assert "assumed here" not in said
    said = predicted(capsys, tmp_path / "l40s", "--gpu", "l40s")
    assert re.search(r"Operators of NVIDIA L40S 48 GB, how far off: .*Guesses: .*element-wise", said)
    assert "The software's times are of h200, h100; assumed here." in said


def test_a_prediction_takes_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('gpu = "h100"\nscheduler_arg = ["budget_tokens=1024"]\n')
    assert "on 1 x NVIDIA H100" in predicted(capsys, tmp_path / "run", "--config", str(path))


def test_sped_up_times_are_not_the_hardwares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    predicted(capsys, out, "--gpu", "h200")
    report = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    assert report.emulation is not None and report.emulation.speed == 1
    assert "Speed:" not in texts.render(report) and "held out, off by" in texts.render(report)
    sped_up = msgspec.structs.replace(report.emulation, speed=8.0)  # as the wire's has it, where --speed is given
    report = msgspec.structs.replace(report, emulation=sped_up)
    for said in (texts.render(report), markdown.render(texts.summary(report))):
        assert "times here are 8 times shorter than modelled" in said
        assert not re.search("held out", said, re.IGNORECASE)


@pytest.mark.parametrize("scheduler", ["tgi@3", "tgi@1"])
def test_a_place_is_free_once_its_request_is_over(scheduler: str) -> None:
    """What was over before a request came is over for the scheduler that decides about it."""
    world = emulated("tgi", scheduler=scheduler, scheduler_arg=("max_concurrent_requests=1",))
    apart = virtual.simulate(world, [(10.0 * at, 100, 20) for at in range(5)])
    assert [(outcome.status, len(outcome.times_s)) for outcome in apart] == [(200, 20)] * 5
    together = virtual.simulate(world, [(0.0, 100, 20), (0.0, 100, 20)])
    assert [outcome.status for outcome in together] == [200, 429]
