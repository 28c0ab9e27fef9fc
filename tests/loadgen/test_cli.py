"""The command line: every option reaches the run, and every mistake is one sentence with its exit code."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import pytest
from cyclopts import Parameter

import backends
from backends import gpus
from backends.protocol import ServerInfo
from loadgen import cli, run, terminal
from loadgen.config import (
    LAUNCH_ONLY,
    MODELLED_ONLY,
    ClientOptions,
    Config,
    ConfigError,
    LaunchOptions,
    ModelledOptions,
    PlacementOptions,
)
from loadgen.load import workloads
from loadgen.option_types import names
from loadgen.plan import choose_model
from loadgen.target import Target
from servers.predict.command import CLIENT_ONLY

# A value that differs from the default, as typed and as it must arrive.
VALUES: dict[str, tuple[list[str], Any]] = {
    "backend": (["tgi"], "tgi"),
    "model": (["70b"], "70b"),
    "url": (["http://h:1"], "http://h:1"),
    "launch": (["embedded"], "embedded"),
    "requests": (["7"], 7),
    "duration": (["2.5"], 2.5),
    "input_tokens": (["9"], 9),
    "output_tokens": (["3"], 3),
    "arrival": (["poisson:2"], "poisson:2"),
    "concurrency": (["5"], 5),
    "warmup": (["0"], 0),
    "dataset": (["d.jsonl"], Path("d.jsonl")),
    "tokenizer": (["dir"], "dir"),
    "vocab_size": (["100"], 100),
    "repeat_dataset": ([], True),
    "stop_when_overloaded": ([], True),
    "extra_body": (['{"top_k": 20}'], '{"top_k": 20}'),
    "omit_field": (["seed"], ("seed",)),
    "seed": (["3"], 3),
    "workers": (["2"], "2"),
    "transport": (["aiohttp"], "aiohttp"),
    "connect": (["fresh"], "fresh"),
    "kernel_timestamps": ([], True),
    "quick_acks": ([], True),
    "metrics_port": (["9464"], 9464),
    "api_key_env": (["KEY"], "KEY"),
    "metrics_url": (["http://h:2/metrics"], ("http://h:2/metrics",)),
    "session_header": (["X-Session-ID"], "X-Session-ID"),
    "header": (["X-Team=search"], ("X-Team=search",)),
    "prefix": (["4:64"], "4:64"),
    "prefix_caching": (["on"], "on"),
    "sessions": (["9"], 9),
    "turns": (["uniform:2:6"], "uniform:2:6"),
    "think_time": (["0.5"], 0.5),
    "first_tokens": (["1000"], 1000),
    "thinking_tokens": (["uniform:8:64"], "uniform:8:64"),
    "subagents": (["0.1:2:4"], "0.1:2:4"),
    "context_tokens": (["8192"], 8192),
    "cancel": (["0.05"], 0.05),
    "batch_size": (["8"], 8),
    "priority": (["0:0.8,10:0.2"], "0:0.8,10:0.2"),
    "images": (["1:512x512"], "1:512x512"),
    "retries": (["3"], 3),
    "adapters": (["a:0.5,base:0.5"], "a:0.5,base:0.5"),
    "warmup_load": ([], True),
    "drain_warmup": ([], True),
    "workload": (["paper"], "paper"),
    "trace": (["t.jsonl"], Path("t.jsonl")),
    "trace_format": (["azure"], "azure"),
    "trace_speed": (["2"], 2.0),
    "trace_limit": (["9"], 9),
    "trace_from": (["60"], 60.0),
    "trace_block_tokens": (["64"], 64),
    "ca": (["ca.pem"], Path("ca.pem")),
    "insecure": ([], True),
    "connect_timeout": (["1.5"], 1.5),
    "first_byte_timeout": (["1.5"], 1.5),
    "idle_timeout": (["1.5"], 1.5),
    "total_timeout": (["1.5"], 1.5),
    "goodput": (["ttft:5", "e2el:9"], ("ttft:5", "e2el:9")),
    "gpu_hour_price": (["2.50USD"], "2.50USD"),
    "on": (["ray:10.0.0.1:6379"], "ray:10.0.0.1:6379"),
    "nodes": (["4"], 4),
    "out": (["dir"], Path("dir")),
    "repeat": (["5"], 5),
    "tp": (["all"], "all"),
    "dp": (["2"], 2),
    "api_servers": (["4"], 4),
    "gpus": (["0,1"], "0,1"),
    "dtype": (["bfloat16"], "bfloat16"),
    "quantization": (["fp8"], "fp8"),
    "kv_cache_dtype": (["fp8"], "fp8"),
    "max_batched_tokens": (["4096"], 4096),
    "p2p": (["off"], "off"),
    "max_model_len": (["2048"], 2048),
    "max_running": (["256"], 256),
    "memory_ratio": (["0.8"], 0.8),
    "dummy_weights": ([], True),
    "image": (["repo/image:tag"], "repo/image:tag"),
    "server_python": (["python3.12"], "python3.12"),
    "server_arg": (["--enforce-eager"], ("--enforce-eager",)),
    "port": (["8123"], 8123),
    "ready_timeout": (["60"], 60.0),
    "dry_run": ([], True),
    "gpu": (["h200"], "h200"),
    "topology": (["host"], "host"),
    "scheduler": (["vllm@v1"], "vllm@v1"),
    "scheduler_arg": (["a=1"], ("a=1",)),
    "kv_tokens": (["100000"], 100000),
    "expert_imbalance": (["1.5"], 1.5),
    "profile": (["profile.json"], Path("profile.json")),
    "speed": (["2"], 2.0),
}
SWITCHES = {
    "ignore_eos": "--no-ignore-eos",
    "stream": "--no-stream",
    "calibrate": "--no-calibrate",
    "server_metrics": "--no-server-metrics",
}
NEEDS = {
    "batch_size": ["--backend", "embeddings"],
    "duration": ["--concurrency", "2"],
    "repeat_dataset": ["--dataset", "d.jsonl"],
    "stop_when_overloaded": ["--arrival", "poisson:9"],
    **{
        name: ["--trace", "t.jsonl"]
        for name in ("trace_format", "trace_speed", "trace_limit", "trace_from", "trace_block_tokens")
    },
    **{name: ["--sessions", "9"] for name in ("turns", "think_time", "first_tokens", "subagents", "context_tokens")},
    "ca": ["--url", "https://127.0.0.1:8000"],
    "insecure": ["--url", "https://127.0.0.1:8000"],
    "server_python": ["--launch", "process"],
    "on": ["--url", "http://h:1"],
    "metrics_url": ["--url", "http://h:1"],
    "nodes": ["--on", "ray", "--url", "http://h:1"],
    "image": ["--launch", "docker"],
    "dry_run": ["--backend", "vllm"],
    **{name: ["--gpu", "h200"] for name in MODELLED_ONLY},
    **{name: ["--launch", "docker"] for name in LAUNCH_ONLY if name not in ("server_python", "image")},
}


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Config]]:
    """What `run` is called with, instead of running."""
    seen: list[Config] = []

    def run(config: Annotated[Config | None, Parameter(name="*")] = None) -> int:
        seen.append(config or Config())
        return 0

    monkeypatch.setattr(cli, "run", run)
    yield seen


def test_the_list_above_is_complete() -> None:
    assert set(VALUES) | set(SWITCHES) == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("name", VALUES)
def test_every_flag_arrives(name: str, configs: list[Config]) -> None:
    typed, value = VALUES[name]
    assert cli.invoke(["run", "--" + name.replace("_", "-"), *typed, *NEEDS.get(name, [])]) == 0
    assert getattr(configs[0], name) == value != getattr(Config(), name)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_arrives(name: str, configs: list[Config]) -> None:
    assert cli.invoke(["run", SWITCHES[name]]) == 0
    assert getattr(configs[0], name) is False


def test_config_file_is_the_flags_and_flags_win(tmp_path: Path, configs: list[Config]) -> None:
    file = tmp_path / "c.toml"
    file.write_text('requests = 5\noutput_tokens = 4\nstream = false\ngoodput = ["ttft:5"]\nout = "x"\n')
    assert cli.invoke(["run", "--config", str(file), "--requests", "6"]) == 0
    (config,) = configs
    assert (config.requests, config.output_tokens, config.stream) == (6, 4, False)
    assert (config.goodput, config.out) == (("ttft:5",), Path("x"))


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        (
            'input_tokens = "lognormal:300:0.5:32:900"\noutput_tokens = "uniform:4:40"\narrival = "steps:5@2,9@3"\n'
            'prefix = "4:16:zipf=1.2"\nprefix_caching = "on"\ngpu = "h200"\n',
            "--input-tokens lognormal:300:0.5:32:900 --output-tokens uniform:4:40 --arrival steps:5@2,9@3 "
            "--prefix 4:16:zipf=1.2 --prefix-caching on --gpu h200",
        ),
        (
            'input_tokens = 99\narrival = "ramp:1:8:5"\nduration = 4\n',
            "--input-tokens 99 --arrival ramp:1:8:5 --duration 4",
        ),
        ('concurrency = "1:64:120"\nrequests = 9\n', "--concurrency 1:64:120 --requests 9"),
        ("concurrency = 64\n", "--concurrency 64"),
        (
            'trace = "t.csv"\ntrace_format = "azure"\ntrace_speed = 2\ntrace_limit = 9\ntrace_from = 1.5\n',
            "--trace t.csv --trace-format azure --trace-speed 2 --trace-limit 9 --trace-from 1.5",
        ),
        (
            'sessions = 5\nturns = "normal:4:1:1:9"\nthink_time = 1.5\narrival = "poisson:2"\n',
            "--sessions 5 --turns normal:4:1:1:9 --think-time 1.5 --arrival poisson:2",
        ),
        ("sessions = 5\nturns = 3\nthink_time = 2\n", "--sessions 5 --turns 3 --think-time 2"),
        ('workload = "inferencemax:1k8k"\n', "--workload inferencemax:1k8k"),
    ],
)
def test_a_load_in_a_config_file_is_that_of_the_flags(
    file: str, flags: str, tmp_path: Path, configs: list[Config]
) -> None:
    (tmp_path / "c.toml").write_text(file)
    assert cli.invoke(["run", "--config", str(tmp_path / "c.toml")]) == 0 == cli.invoke(["run", *flags.split()])
    of_the_file, of_the_flags = configs
    assert of_the_file == of_the_flags != Config()
    assert of_the_file.load == of_the_flags.load


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requets = 6", "Did you mean --requests"),
        ('requests = "x"', "not a whole number"), ("requests = 0", "--requests is 0"),
        ("requests = ", "is not TOML"), ("requests = \xff", "is not TOML"),
        pytest.param("requests = " + "[" * 100_000, "is not TOML", id="nested"),
    ],
)  # fmt: skip
def test_bad_config_file(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("latin-1"))
    assert one_sentence(["run", "--config", str(file)], 2, capsys, message)


def one_sentence(argv: list[str], code: int, capsys: pytest.CaptureFixture[str], message: str) -> str:
    assert cli.invoke(argv) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    said = [text for text in captured.err.splitlines() if text.startswith("loadgen: ")]
    assert len(said) == 1 and message in said[0], captured.err
    assert "Traceback" not in captured.err
    return said[0]


@pytest.mark.parametrize("name", [name for name, (_, value) in VALUES.items() if type(value) is int])
def test_no_fraction_is_rounded_in_silence(
    name: str, tmp_path: Path, configs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    said = "'2.5' is not a whole number"
    one_sentence(["run", f"--{name.replace('_', '-')}", "2.5"], 2, capsys, said)
    (tmp_path / "run.toml").write_text(f"{name} = 2.5\n")
    one_sentence(["run", "--config", str(tmp_path / "run.toml")], 2, capsys, said)
    assert cli.invoke(["run", f"--{name.replace('_', '-')}", "1e4", *NEEDS.get(name, [])]) == 0
    assert getattr(configs[0], name) == 10_000


@pytest.mark.parametrize(
    "argv",
    [
        ["export", "--port", "1.5"], ["serve", "--port", "1.5"], ["serve", "--max-running", "1.5"],
        ["plan", "--slo", "ttft_ms=5", "--rate", "1", "--max-running", "8", "1.5"],
        ["plan", "--slo", "ttft_ms=5", "--rate", "1", "--max-gpus", "1.5"],
        ["calibrate", "run", "--out", "p.json", "--tp", "1.5"],
    ],
)  # fmt: skip
def test_nor_in_other_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    one_sentence(argv, 2, capsys, "1.5")


def test_existing_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text("precious")
    one_sentence(["run", "--out", str(tmp_path)], 2, capsys, "nothing was overwritten")
    assert (tmp_path / "report.json").read_text() == "precious"


def test_unwritable_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    one_sentence(["run", "--out", str(tmp_path / "file" / "run")], 2, capsys, "cannot write")


def test_nobody_at_the_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        one_sentence(["run", "--url", url, "--out", str(tmp_path / "r")], 3, capsys, "cannot reach")
    assert not (tmp_path / "r").exists()


class OtherServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/info"
        body = json.dumps({"model_id": "m", "max_total_tokens": 9, "version": "3.3.7"}).encode() if found else b"<html>"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def tgi_like() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OtherServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("backend", ["vllm", "lightllm"])
def test_server_of_another_kind(
    backend: str, tgi_like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "--backend", backend, "--url", tgi_like, "--out", str(tmp_path / "r")]
    one_sentence(argv, 3, capsys, f"does not look like a {backend} server")


@pytest.mark.parametrize("backend", ["vllm", "openai", "openai-chat", "lightllm", "tgi"])
def test_no_model_server_at_all(
    backend: str, tgi_like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = f"{'an' if backend.startswith('o') else 'a'} {backend}"
    argv = ["run", "--backend", backend, "--url", tgi_like + "/elsewhere", "--out", str(tmp_path / "r")]
    assert "404" in one_sentence(argv, 3, capsys, f"does not look like {shown} server")


def test_no_host_is_not_every_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an unset variable gives it, `--host "$HOST"`."""
    one_sentence(["export", "--runs", str(tmp_path), "--host", ""], 2, capsys, "--host is empty")


def test_what_a_server_says_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say_error("loadgen", "model \x1b]0;owned\x07 \u202e\nnext")
    assert capsys.readouterr().err == "loadgen: model \\x1b]0;owned\\x07 \\u202e next\n"


def test_reports_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_sentence(["report", str(tmp_path)], 2, capsys, "manifest.json")
    one_sentence(["compare", str(tmp_path), str(tmp_path)], 2, capsys, "manifest.json")
    one_sentence(["compare", str(tmp_path)], 2, capsys, "requires an argument")


@pytest.mark.parametrize("schema", ["manifest", "micro_manifest"])
def test_reports_of_training(schema: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"platform": "GPU", "schema": f"training_probe.{schema}/1"}))
    said = f"{tmp_path} is a directory of training_probe; read it with `training_probe report {tmp_path}`."
    one_sentence(["report", str(tmp_path)], 2, capsys, said)
    one_sentence(["compare", str(tmp_path), str(tmp_path)], 2, capsys, said)


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"schema":"\xff"}', b'{"schema":7}', b"[]", b'{"schema":"loadgen.manifest/1"}',
        pytest.param(b'{"argv": ' + b"[" * 100_000, id="nested without end"),
        pytest.param(b'{"unknown": ' + b"[" * 100_000, id="nested without end, where nobody reads"),
    ],
)  # fmt: skip
def test_a_damaged_manifest(damaged: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_bytes(damaged)
    one_sentence(["report", str(tmp_path)], 2, capsys, "manifest.json is not a manifest of this version")


def test_a_run_does_not_wait_for_what_it_does_not_need() -> None:
    """Drawing, other transports and Docker are imported when used: the first request leaves within a second."""
    heavy = ["matplotlib", "aiohttp", "httpx", "docker", "tokenizers", "torch", "servers", "multiprocessing.spawn"]
    code = f"import sys, loadgen.cli, loadgen.run, loadgen.progress; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_command_line_does_not_wait_for_what_it_does_not_need() -> None:
    """Help and mistakes come at once: neither figures, Docker nor numpy are loaded."""
    heavy = ["matplotlib", "docker", "httpx", "scipy", "numpy", "aiohttp", "servers"]
    code = f"import sys, loadgen.cli; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def options_in_help(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[set[str], list[str]]:
    """The options that a command's help shows, by key, and the titles of their groups."""
    assert cli.invoke([command, "--help"]) == 0
    page = capsys.readouterr().out
    flags = re.findall(r"^│ [*]? *--([a-z0-9-]+)", page, re.MULTILINE)
    return {flag.replace("-", "_") for flag in flags}, re.findall(r"^╭─ (.*?) ─+╮$", page, re.MULTILINE)


def test_help_of_run_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    shown, groups = options_in_help("run", capsys)
    assert shown >= {field.name for field in dataclasses.fields(Config)}
    assert groups[:3] == ["The server", "The load", "The results"] and groups[-1] == "The client"


REFUSED_BY = {
    "predict": {"url", *CLIENT_ONLY, *names(LaunchOptions), "dry_run"} - {"dummy_weights"},
    "breakdown": {"url", "arrival", "duration", "requests", "dataset", "stream", "workers", "metrics_port"},
    "compose": {"url", "launch", *names(ModelledOptions)},
    "doctor": set(),
    "sweep": {"dry_run"},
}


@pytest.mark.parametrize("command", REFUSED_BY)
def test_help_shows_only_what_a_command_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown, groups = options_in_help(command, capsys)
    assert {"backend", "model", "input_tokens", "concurrency", *names(PlacementOptions)} <= shown
    assert not shown & REFUSED_BY[command]
    for title, options in (("The client", ClientOptions), ("Modelled hardware", ModelledOptions)):
        assert any(group.startswith(title) for group in groups) == bool(shown & set(names(options)))


def test_a_file_of_run_serves_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What their help does not show is understood all the same."""
    (tmp_path / "run.toml").write_text(
        'model = "7b"\ntransport = "aiohttp"\nignore_eos = false\nserver_metrics = false\n'
    )
    assert cli.invoke(["compose", "--config", str(tmp_path / "run.toml")]) == 0
    assert "image:" in capsys.readouterr().out
    said = "--transport is for real requests, and predict sends none; leave it out."
    one_sentence(["predict", "--gpu", "h200", "--config", str(tmp_path / "run.toml")], 2, capsys, said)


def test_config_is_checked_when_made() -> None:
    with pytest.raises(ConfigError, match="--seed"):
        Config(seed=-1)


def test_model_among_several() -> None:
    several = ServerInfo(models=("base", "adapter"))
    vllm = backends.get("vllm")
    assert choose_model(Config(model="adapter"), vllm, several) == "adapter"
    for config in (Config(), Config(model="7b")):
        with pytest.raises(ConfigError, match="base, adapter"):
            choose_model(config, vllm, several)


def test_gpus_of_a_server_that_runs_here_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight of a host would be charged with the energy of a server on one of them."""
    eight = gpus.Inventory(
        gpus=tuple(
            gpus.Gpu(index=at, name="x", uuid=f"GPU-{at}", memory_bytes=1, used_bytes=0) for at in range(8)
        )
    )  # fmt: skip
    monkeypatch.setattr(gpus, "read", lambda: eight)
    here = "http://127.0.0.1:9"
    served = run.Served(Target(here))
    assert served.gpu_indices(Config(url=here, gpus="3,1")) == (3, 1)
    assert served.gpu_indices(Config(url=here)) == tuple(range(8))
    assert served.gpu_indices(Config(url=here, gpus="none")) == ()
    assert served.gpu_indices(Config(url="http://elsewhere:9")) == ()
    with pytest.raises(gpus.GpuError, match="there is no GPU 9 here"):
        served.gpu_indices(Config(url=here, gpus="9"))


@pytest.mark.parametrize("name", workloads.OPTIONS)
def test_a_workload_is_the_options_it_stands_for(name: str, configs: list[Config]) -> None:
    options = workloads.OPTIONS[name]  # type: ignore[index]
    words = [word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", str(value))]
    assert cli.invoke(["run", "--workload", name]) == 0 == cli.invoke(["run", *words])
    by_name, typed = configs
    assert by_name.load == typed.load
    assert dataclasses.replace(by_name, workload=None) == typed


def test_options_beside_a_workload_win(configs: list[Config]) -> None:
    assert cli.invoke(["run", "--workload", "llm-perf", "--input-tokens", "99", "--arrival", "poisson:2"]) == 0
    (config,) = configs
    assert (config.input_tokens, config.output_tokens, config.concurrency) == (99, 1000, None)
    assert str(config.load.arrival) == "poisson:2"
