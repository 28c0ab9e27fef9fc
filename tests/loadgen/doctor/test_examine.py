"""What `loadgen doctor` finds on machines of every kind, what it advises, and that nothing makes it fall over."""

from __future__ import annotations

import dataclasses
import re
import resource
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from backends.gpus import Inventory
from backends.launch import LaunchError
from loadgen import cli
from loadgen.config import Config, ConfigError
from loadgen.doctor import examine as doctor
from loadgen.doctor import machine as own_machine
from loadgen.doctor.examine import examine, render, wire
from loadgen.doctor.machine import DoctorCheck, Observation
from loadgen.rundir import WireFacts
from servers.simulator.build import SCHEDULERS
from tests.loadgen.server.test_launch import A800, GIB, NOTHING, ONE_4090, RTX4090, cached, machine

FINE = {
    "/proc/sys/net/core/somaxconn": "4096",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
}
VLLM_70B = Config(backend="vllm", model="70b")


class FakeDocker(ModuleType):
    """The SDK, as far as it is asked for an image."""

    def __init__(self, images: tuple[str, ...], root: Path) -> None:
        super().__init__("docker")
        self.errors = SimpleNamespace(ImageNotFound=KeyError)
        self._images, self._root = dict.fromkeys(images, "there"), root

    def from_env(self) -> Any:
        return SimpleNamespace(
            images=SimpleNamespace(get=self._images.__getitem__),
            info=lambda: {"DockerRootDir": str(self._root)},
            close=lambda: None,
        )


@pytest.fixture(autouse=True)
def good_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[Path, tuple[int, int]]:
    """Nothing is wrong with it but its GPUs, which each test brings: the disks, which tests may change."""
    for name in ("HF_HUB_CACHE", "HF_TOKEN_PATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    monkeypatch.setattr(doctor.docker, "problem", lambda: None)
    monkeypatch.setattr(doctor.docker, "has_nvidia", lambda: True)
    monkeypatch.setitem(sys.modules, "docker", FakeDocker((), tmp_path))
    monkeypatch.setattr(own_machine, "text_of", FINE.__getitem__)
    monkeypatch.setattr(own_machine, "ephemeral_ports", lambda: 28232)
    monkeypatch.setattr(own_machine, "governor", lambda: Observation("ok", "performance"))
    monkeypatch.setattr(own_machine, "this_machine", lambda: SimpleNamespace(cpu_count=8))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 1048576))
    disks: dict[Path, tuple[int, int]] = {}
    monkeypatch.setattr(doctor, "space", lambda path: disks.get(path, (10**13, 10**12)))
    return disks


def by_name(config: Config, inventory: Inventory = A800) -> dict[str, DoctorCheck]:
    checks = examine(config, inventory)
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    assert all(check.advice for check in checks if check.state != "ok"), "who is told of trouble is told what to do"
    return found


def not_ok(config: Config, inventory: Inventory = A800) -> dict[str, str]:
    return {name: check.state for name, check in by_name(config, inventory).items() if check.state != "ok"}


def test_a_good_machine() -> None:
    found = by_name(VLLM_70B)
    assert {check.state for check in found.values()} == {"ok"}
    assert list(found) == [
        "Docker", "GPUs in Docker", "GPUs", "P2P", "plan", "/dev/shm", "model", "HF token", "image",
        "open files", "listen backlog", "local ports", "clock", "cores", "CPU governor",
    ]  # fmt: skip
    assert found["GPUs"].seen == "2 of 8: 2 x NVIDIA A800-SXM4-80GB (80 GiB), driver 580.1, CUDA unknown"
    assert found["P2P"].seen == "on: every pair reports P2P over NVLink (1 of 1 pairs report it)"
    assert "tensor parallel 2, GPUs 0, 1" in found["plan"].seen
    assert "138 GB of meta-llama/Llama-2-70b-hf will be downloaded" in found["model"].seen
    assert found["open files"].seen == "1048576 allowed, 1064 needed"


def test_p2p_is_of_the_gpus_that_would_be_used() -> None:
    check = by_name(VLLM_70B, RTX4090)["P2P"]
    assert check.state == "ok" and check.seen.startswith("off: NVML says") and "(0 of 28 pairs" in check.seen
    forced = by_name(Config(backend="vllm", model="13b", p2p="on", tp="2"), RTX4090)["P2P"]
    assert forced.state == "warning" and "although" in forced.seen and "(0 of 1 pairs" in forced.seen
    old = machine(2, "NVIDIA GeForce RTX 4090", 24, driver="545.29.06")  # it reports what it does not have
    forced = by_name(Config(backend="vllm", model="13b", p2p="on", tp="2"), old)["P2P"]
    assert forced.state == "warning" and "misreport" in forced.seen and "(1 of 1 pairs" in forced.seen
    assert by_name(Config(backend="vllm", model="13b", tp="2"), old)["P2P"].state == "ok"
    assert "P2P" not in by_name(Config(model="7b", gpus="0"))


def test_no_gpu_is_a_problem_for_a_launch_only() -> None:
    assert not_ok(VLLM_70B, NOTHING) == {"GPUs": "problem", "plan": "warning"}
    assert not_ok(Config(), NOTHING) == {"GPUs": "warning"}
    assert not_ok(Config(model="7b", gpus="none"), NOTHING) == {}
    assert "no NVIDIA driver" in by_name(VLLM_70B, NOTHING)["GPUs"].seen


def test_gpus_that_are_in_use_or_hidden_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = tuple(msgspec.structs.replace(gpu, used_bytes=30 * GIB * (gpu.index == 1)) for gpu in A800.gpus)
    inventory = msgspec.structs.replace(A800, gpus=busy)
    assert "in use (GPU 1: 30.0 GiB)" in by_name(VLLM_70B, inventory)["GPUs"].seen
    assert not_ok(Config(model="70b", gpus="2,3"), inventory) == {}
    assert not_ok(Config(model="70b", memory_ratio=0.5), inventory) == {}  # there is room for both
    lost = msgspec.structs.replace(A800, problem="GPU 8 cannot be used: lost")
    assert by_name(VLLM_70B, lost)["GPUs"].state == "warning"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert by_name(VLLM_70B)["GPUs"].seen == "8 here, all of them hidden"


@pytest.mark.parametrize(
    ("config", "inventory", "said", "advice"),
    [
        (VLLM_70B, ONE_4090, "does not fit", "--tp 8 would fit"),
        (Config(model="7b", gpus="9"), A800, "there is no GPU 9", "there are 0 to 7"),
        (Config(model="7b", tp="4"), RTX4090, "", ""),
        (Config(model="7b", input_tokens=5000), A800, "more than", "lower them"),
    ],
)
def test_the_plan_is_what_a_run_would_say(config: Config, inventory: Inventory, said: str, advice: str) -> None:
    check = by_name(config, inventory)["plan"]
    assert (check.state == "problem") == bool(said)
    assert said in check.seen and advice in check.advice


def test_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.docker, "has_nvidia", lambda: False)
    assert not_ok(VLLM_70B) == {"GPUs in Docker": "problem"}
    assert not_ok(Config()) == {"GPUs in Docker": "warning"}
    monkeypatch.setattr(doctor.docker, "problem", lambda: "the engine is not running; start it")
    found = by_name(VLLM_70B)
    assert found["Docker"] == DoctorCheck("Docker", "problem", "the engine is not running", "start it")
    assert "image" not in found and "GPUs in Docker" not in found  # there is nobody to ask
    assert not_ok(Config()) == {"Docker": "warning"}
    assert "Docker" not in by_name(Config(model="7b", launch="process", server_python=sys.executable))


def test_image_and_room_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good_machine: dict[Path, tuple[int, int]]
) -> None:
    good_machine[tmp_path] = (10**12, 19 * 10**9)
    check = by_name(VLLM_70B)["image"]
    assert check.state == "problem" and "19 GB are free" in check.seen and "docker system prune" in check.advice
    monkeypatch.setitem(sys.modules, "docker", FakeDocker(("mine:1",), tmp_path))
    assert by_name(Config(model="7b", image="mine:1"))["image"] == DoctorCheck("image", "ok", "mine:1 is here")


def test_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good_machine: dict[Path, tuple[int, int]]) -> None:
    good_machine[tmp_path / "hf"] = (10**12, 137 * 10**9)
    assert not_ok(VLLM_70B) == {"model": "problem"}
    assert not_ok(Config(model="70b", dummy_weights=True, dtype="bfloat16")) == {}
    assert not_ok(Config(backend="vllm", model="13b")) == {}
    found = by_name(Config(backend="lightllm", model="7b"))
    assert found["model"].state == "problem" and "hf download meta-llama/Llama-2-7b-hf" in found["model"].advice
    monkeypatch.delenv("HF_TOKEN")
    assert not_ok(Config(backend="vllm", model="13b")) == {"HF token": "problem"}
    assert "HF token" not in by_name(Config(model="mixtral-8x7b"))
    cached(tmp_path)
    found = by_name(Config(backend="lightllm", model="7b"))
    assert "HF token" not in found and str(tmp_path) in found["model"].seen


def test_shared_memory(good_machine: dict[Path, tuple[int, int]]) -> None:
    good_machine[Path("/dev/shm")] = (2 * GIB - 1, GIB)
    assert not_ok(VLLM_70B) == {"/dev/shm": "warning"}
    assert not_ok(Config(model="7b")) == {}


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1"])
def test_limits_of_the_client(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_machine, "text_of", {**FINE, "/proc/sys/net/core/somaxconn": "128"}.__getitem__)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(own_machine, "ephemeral_ports", lambda: 5000)
    backlog = {} if url else {"listen backlog": "warning"}
    assert not_ok(Config(url=url, concurrency=128)) == {}
    assert not_ok(Config(url=url)) == backlog
    assert not_ok(Config(url=url, requests=4032)) == backlog
    assert not_ok(Config(url=url, requests=4033)) == {"open files": "problem", **backlog}
    assert not_ok(Config(url=url, requests=5001)) == {"open files": "problem", "local ports": "problem", **backlog}
    if url is None:
        assert by_name(Config())["listen backlog"].advice == "sudo sysctl -w net.core.somaxconn=4096"


def test_enough_backlog_is_enough_for_any_burst() -> None:
    assert not_ok(Config(requests=20000)) == {}


def test_unlimited_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, resource.RLIM_INFINITY))
    assert by_name(Config())["open files"].seen == "unlimited, 1064 needed"


def test_clock_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    monkeypatch.setattr(own_machine, "text_of", {**FINE, source: "hpet"}.__getitem__)
    monkeypatch.setattr(own_machine, "this_machine", lambda: SimpleNamespace(cpu_count=1))
    assert not_ok(Config()) == {"clock": "warning", "cores": "warning"}
    monkeypatch.setattr(own_machine.time, "monotonic_ns", iter(range(0, 10**10, 10**6)).__next__)
    assert by_name(Config())["clock"].seen.startswith("CLOCK_MONOTONIC tells 1000000 ns apart")


def test_governor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(own_machine, "CPUS", tmp_path)
    assert own_machine.governor().state == "ok"
    for cpu, governor in enumerate(("performance", "powersave")):
        (tmp_path / f"cpu{cpu}/cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/cpufreq/scaling_governor").write_text(governor + "\n")
        assert own_machine.governor().state == ("ok", "warning")[cpu]


def test_an_installed_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexport PYTHONPATH='{tmp_path}'\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    config = Config(backend="vllm", model="7b", launch="process", server_python=sys.executable)
    assert by_name(config)["server"].state == "problem"
    has_it = dataclasses.replace(config, server_python=str(python))
    assert by_name(has_it)["server"] == DoctorCheck("server", "ok", "vllm is installed")
    absent = Config(backend="vllm", model="7b", launch="process", server_python="/no/such/python")
    assert "cannot be run" in by_name(absent)["server"].seen
    tgi = Config(backend="tgi", model="7b", launch="process")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "text-generation-launcher is not on the PATH" in by_name(tgi)["server"].seen
    (tmp_path / "text-generation-launcher").touch(mode=0o755)
    assert by_name(tgi)["server"].state == "ok"


def test_a_check_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise LaunchError("Docker cannot be used: nonsense.")

    good = set(by_name(VLLM_70B))
    for name in ("has_nvidia", "problem"):
        monkeypatch.setattr(doctor.docker, name, broken)
    monkeypatch.setattr(own_machine, "text_of", broken)
    monkeypatch.setattr(doctor, "space", broken)
    monkeypatch.setattr(resource, "getrlimit", broken)
    found = {check.name: check for check in examine(VLLM_70B, A800)}
    assert set(found) == good - {"GPUs in Docker", "image"}
    for name in ("Docker", "/dev/shm", "model", "open files", "listen backlog"):
        assert found[name] == DoctorCheck(name, "warning", "cannot be checked: Docker cannot be used: nonsense.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nosuch"}, "unknown model"),
        ({"backend": "openai", "model": "7b"}, "cannot start a server of kind 'openai'"),
    ],
)
def test_options_that_make_no_run_anywhere(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        examine(Config(**options), A800)


def test_rendered() -> None:
    checks = [DoctorCheck("GPUs", "ok", "8 x A"), DoctorCheck("local ports", "problem", "few\x1b[2J", "make\nmore")]
    assert render(checks) == "\n".join(
        ["ok  GPUs         8 x A", "!!  local ports  few\\x1b[2J", "                 make more"]
    )


@pytest.mark.parametrize(("inventory", "code", "mark"), [(machine(8, "NVIDIA H200", 141), 0, "ok"), (NOTHING, 3, "!!")])
def test_the_command(
    inventory: Inventory, code: int, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.gpus, "read", lambda: inventory)
    assert cli.invoke(["doctor", "--backend", "vllm", "--model", "70b"]) == code
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.isascii() and "s3cret" not in captured.out
    (line,) = [line for line in captured.out.splitlines() if line[4:].startswith("GPUs  ")]
    assert line.startswith(mark)


def test_the_command_on_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    assert cli.invoke(["doctor", "--launch", "embedded"]) in (0, 3)
    captured = capsys.readouterr()
    assert captured.err == "" and "open files" in captured.out and "Docker" not in captured.out


def test_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.invoke(["backends"]) == 0
    heads, *lines = capsys.readouterr().out.splitlines()
    columns = [(match.start(), match[0]) for match in re.finditer(r"\S+( \S+)*", heads)]
    bounds = [*(start for start, _ in columns), None]
    rows = {
        line.split()[0]: {
            name: line[begin:end].strip()
            for (begin, name), end in zip(columns, bounds[1:], strict=True)
        }
        for line in lines
    }  # fmt: skip
    assert {"vllm", "sglang", "llamacpp", "lightllm", "tgi", "openai", "openai-chat"} <= rows.keys()
    assert rows.keys() == set(doctor.backends.available())
    assert all(all(row.values()) for row in rows.values())
    ours = {name: row for name, row in rows.items() if row["from"] == "llm-dissect"}
    runs = {name: row["seen for real"].split("; ") for name, row in ours.items() if row["seen for real"] != "never"}
    form = re.compile(r"(vLLM |llama\.cpp )?\w[\w.-]+( with its mock engines)? on [\w ]+, (in CI|2026-\d\d-\d\d)")
    assert all(form.fullmatch(each) for several in runs.values() for each in several), runs
    told = (
        (Path(__file__).parents[3] / "docs" / "servers.md")
        .read_text()
        .partition("## Backends whose engines never ran here")[2]
    )
    no_engine = {name for name, seen in runs.items() if all("mock engines" in each for each in seen)}
    named = set(re.findall(r"^loadgen run --backend (\S+)", told, re.MULTILINE))
    assert ours.keys() - runs.keys() | no_engine == named
    tgi = rows["tgi"]
    assert (tgi["prompts as"], tgi["protocol"], tgi["metrics"]) == ("text", "its own", "yes")
    assert (tgi["started in"], tgi["seen for real"]) == ("docker, process", "3.3.6-dev0 on a CPU, 2026-11-29")
    assert tgi["image"] == "ghcr.io/huggingface/text-generation-inference:3.3.7"
    openai = rows["openai"]
    assert (openai["protocol"], openai["started in"], openai["image"], openai["server here"]) == (
        "OpenAI's",
        "no",
        "-",
        "-",
    )
    simulated = {name: row["simulated"] for name, row in rows.items() if row["simulated"] != "no"}
    modelled = {name.partition("@")[0] for name in SCHEDULERS}
    assert modelled <= simulated.keys()
    assert {name for name, how in simulated.items() if how == "timetable, GPUs"} == modelled | {
        "vllm-generate",
        "embeddings",
        "rerank",
        "score",
    }  # of one server
    assert rows["sglang"]["seen for real"] == "0.5.11 on H200s, 2026-11-30"
    assert rows["vllm"]["from"] == "llm-dissect" and rows["vllm"]["server here"] in ("yes", "no")


def test_a_broken_plugin_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.backends.get

    def get(name: str) -> Any:
        if name == "tgi":
            raise ImportError("no module named x\n")
        return real(name)

    monkeypatch.setattr(doctor.backends, "get", get)
    table = doctor.backends_table().splitlines()
    assert (
        len(table) == 1 + len(doctor.backends.available())
        and sum("cannot be loaded: no module named x" in line for line in table) == 1
    )


def test_clean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def clean(say: Any) -> int:
        say("removed the container c.")
        return 1

    monkeypatch.setattr(doctor.docker, "clean", clean)
    assert cli.invoke(["clean"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("removed 1 container\n", "removed the container c.\n")


def test_clean_without_docker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def clean(say: Any) -> int:
        raise LaunchError("Docker cannot be used: the engine is not running; start it.")

    monkeypatch.setattr(doctor.docker, "clean", clean)
    assert cli.invoke(["clean"]) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("loadgen: Docker cannot be used")


def test_the_file_of_the_load_is_looked_into(tmp_path: Path) -> None:
    def found(**options: Any) -> DoctorCheck:
        return next(check for check in examine(Config(**options), ONE_4090) if check.name in ("dataset", "trace"))

    prompts, chats, trace = (tmp_path / name for name in ("prompts.jsonl", "chats.jsonl", "trace.jsonl"))
    prompts.write_text('{"prompt": [1]}\n' * 10)
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 9 + '{"messages": []}\n')
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 0, "hash_ids": [1]}\n')
    for options in ({"url": "http://h"}, {"launch": "embedded"}, {"backend": "vllm"}, {}):
        assert found(dataset=prompts, **options)[:3] == ("dataset", "ok", f"{prompts}: 2 requests")
    left_out = "left out: 1 conversation without a user's message"
    assert found(dataset=chats).seen == f"{chats}: 1 conversation with 1 turn in all; {left_out}"
    too_many = found(dataset=prompts, warmup=10, backend="vllm", model="7b")
    assert (too_many.state, too_many.advice) == ("problem", "add prompts, or send these again with --repeat-dataset")
    assert found(trace=trace).state == "problem"
    assert found(trace=tmp_path / "none", url="http://h").seen.endswith("none: No such file or directory")
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    assert found(trace=trace).seen == f"{trace}: 1 request"


FACTS = WireFacts(
    ttft_ms=44.5, ttft_quick_ms=10.4, n=5, waits=True, events_per_read=4.0, events_per_read_quick=1.0
)  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "state", "seen"),
    [
        (FACTS, "warning", "44.5 ms, with quick ACKs after 10.4 ms: the server or a proxy does not set TCP_NODELAY"),
        (msgspec.structs.replace(FACTS, ttft_ms=10.5, waits=False), "ok", "10.5 ms, with quick ACKs after 10.4 ms, "),
        (None, "warning", "not measured"),
    ],
)
def test_what_the_wire_adds(facts: WireFacts | None, state: str, seen: str) -> None:
    check = wire(lambda: facts)
    assert (check.name, check.state) == ("wire", state) and seen in check.seen
