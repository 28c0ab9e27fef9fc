"""`loadgen run --launch docker` with a real vLLM on the CPU, in the image that it starts by itself (vllm_image.py):
measured, failing in the ways that vLLM has, killed, and started by its compose file. Run by `make test-vllm-docker`.

Each start takes about 40 s on two idle cores, so several tests look at one run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker as sdk
import pytest
import yaml

from backends import docker
from backends.process import free_port
from tests.docker import vllm_image
from tests.lateness import OF_A_BUSY_MACHINE
from tests.support.waiting import healthy, until

pytestmark = [pytest.mark.vllm_docker, pytest.mark.usefixtures("engine")]

ROOT = Path(__file__).resolve().parent.parent.parent
LOADGEN = [sys.executable, "-c", "from loadgen.cli import main; main()"]
SHARED_MEMORY = Path("/dev/shm")
TIMEOUT_S = 400
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 40, 64, 8


@dataclass(frozen=True)
class Place:
    """Where the tests' runs happen. home: theirs, so that nothing comes from the user's caches."""

    model: Path
    home: Path

    def server(self, *more: str, model: Path | None = None) -> list[str]:
        """The options of the server, for `run` and `compose`."""
        return [
            "--backend", "vllm", "--model", str(model or self.model), "--gpus", "none", "--dtype", "bfloat16",
            "--max-model-len", "1024", "--max-running", "64", "--server-arg=--enforce-eager",
            "--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS), *more,
        ]  # fmt: skip

    def popen(self, *argv: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
        return subprocess.Popen(
            [*LOADGEN, *argv], env=env | {"HOME": str(self.home)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def finish(self, *argv: str, expect: int | tuple[int, ...]) -> tuple[str, list[str]]:
        return finished(self.popen(*argv), expect)


def finished(process: subprocess.Popen[str], expect: int | tuple[int, ...]) -> tuple[str, list[str]]:
    """Its standard output, and the lines of its standard error. expect: its exit code, or those that it may have."""
    try:
        out, said = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode in (expect if isinstance(expect, tuple) else (expect,)), out[-2000:] + said[-5000:]
    assert "Traceback (most recent call last)" not in "".join(
        line
        for line in said.splitlines(keepends=True)
        if not line.startswith("  | ")  # the server's log
    )
    return out, said.splitlines()


@pytest.fixture(scope="module")
def place(engine: sdk.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    vllm_image.make()
    segments = shared_memory()
    directory = tmp_path_factory.mktemp("vllm")
    (directory / "home").mkdir()
    subprocess.run([sys.executable, str(ROOT / "tests/vllm/tiny_model.py"), str(directory / "tiny")], check=True)
    yield Place(directory / "tiny", directory / "home")
    for name in shared_memory() - segments:  # vLLM leaves some on this host even when it ends in good order
        (SHARED_MEMORY / name).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def nothing_stays(engine: sdk.DockerClient) -> Iterator[None]:
    before = containers(engine)
    yield
    assert containers(engine) == before


def containers(client: sdk.DockerClient) -> set[str]:
    return {container.id for container in client.containers.list(all=True, ignore_removed=True)}


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("psm_*")}


def early_end(process: subprocess.Popen[str]) -> Callable[[], str | None]:
    def over() -> str | None:
        if process.poll() is None:
            return None
        return f"it ended with exit code {process.returncode}: {process.communicate()[1][-5000:]}"

    return over


@dataclass(frozen=True)
class Measured:
    """A run that was measured to its end. attrs: of its container; devices: of /dev/shm in it and here; segments: of
    shared memory that it made, name -> bytes."""

    report: dict[str, Any]
    said: list[str]
    out: Path
    attrs: dict[str, Any]
    devices: tuple[int, int]
    segments: dict[str, int]


@pytest.fixture(scope="module")
def measured(place: Place, engine: sdk.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    out = tmp_path_factory.mktemp("measured") / "run"
    before = shared_memory()
    process = place.popen("run", *place.server("--dummy-weights"), "--requests", str(REQUESTS),
                          "--no-calibrate", "--out", str(out))  # fmt: skip
    try:
        (container,) = until(
            lambda: engine.containers.list(filters={"label": docker.LABEL}),
            timeout_s=TIMEOUT_S,
            over=early_end(process),
        )
        stat = ["stat", "--format=%d", "/dev/shm"]
        inside = int(until(lambda: container.exec_run(stat).output, timeout_s=TIMEOUT_S, over=early_end(process)))
        until(lambda: (out / "manifest.json").exists(), timeout_s=TIMEOUT_S, over=early_end(process))  # it serves
        segments = {name: (SHARED_MEMORY / name).stat().st_size for name in shared_memory() - before}
        stdout, said = finished(process, expect=(0, 4))  # 4: the server takes every core, and the run 0.2 s
    finally:
        process.terminate()
        process.wait(60)
    devices = (inside, SHARED_MEMORY.stat().st_dev)
    return Measured(json.loads(stdout.splitlines()[-1]), said, out, container.attrs, devices, segments)


def test_a_run_is_valid_but_for_what_a_busy_machine_does(measured: Measured) -> None:
    report = measured.report
    findings = report["verdict"]["findings"]
    assert {each["code"] for each in findings if each["severity"] == "invalid"} <= OF_A_BUSY_MACHINE
    assert report["requests"]["ok"] == REQUESTS
    assert report["tokens"] == {"prompt": REQUESTS * INPUT_TOKENS, "output": REQUESTS * OUTPUT_TOKENS}
    assert report["server"]["generation_tokens"] == REQUESTS * OUTPUT_TOKENS  # by its own count
    launch = report["launch"]
    assert (launch["image"], launch["image_id"]) == (vllm_image.ADAPTER.image, measured.attrs["Image"])
    assert launch["version"] == "0.32.0" and "ended" not in launch
    log = (measured.out / "server.log").read_text()
    (capacity,) = set(re.findall(r"KV cache size: ([\d,]+) tokens", log))
    assert launch["kv_cache_tokens"] == int(capacity.replace(",", ""))
    assert "Application startup complete" in log


def test_its_processes_share_the_hosts_memory(measured: Measured) -> None:
    """More than the 64 MB that a container has by itself."""
    assert measured.attrs["HostConfig"]["IpcMode"] == "host"
    assert measured.devices[0] == measured.devices[1]
    assert sum(measured.segments.values()) > 64 << 20


def failed(place: Place, out: Path, *more: str, **options: Any) -> list[str]:
    return place.finish("run", *place.server(*more, **options), "--requests", "8", "--no-calibrate",
                        "--out", str(out), expect=3)[1]  # fmt: skip


def test_a_bad_flag_is_named(place: Place, tmp_path: Path) -> None:
    said = failed(place, tmp_path / "run", "--dummy-weights", "--server-arg=--frobnicate")
    assert "exit code 2" in said[-1] and "--frobnicate" in said[-1] and "--server-arg" in said[-1]


def test_a_model_without_weights_is_told_by_the_process_that_missed_them(place: Place, tmp_path: Path) -> None:
    said = failed(place, tmp_path / "run")
    assert "vllm ended with exit code 1: RuntimeError: Cannot find any model weights" in said[-1]
    assert any("Cannot find any model weights" in line for line in said if line.startswith("  | "))


def test_a_model_that_the_hub_does_not_give(place: Place, tmp_path: Path) -> None:
    """The image is offline, as a machine behind a firewall is."""
    said = place.finish("run", "--backend", "vllm", "--model", "nobody/nothing", "--tp", "1", "--gpus", "none",
                        "--requests", "8", "--no-calibrate", "--out", str(tmp_path / "run"), expect=3)[1]  # fmt: skip
    assert "vllm ended with exit code 1: huggingface_hub.errors.LocalEntryNotFoundError: " in said[-1]


def test_one_that_takes_more_memory_than_there_is(place: Place, tmp_path: Path, engine: sdk.DockerClient) -> None:
    if not engine.info()["MemoryLimit"]:
        pytest.skip("this engine cannot limit memory")
    out = tmp_path / "run"
    process = place.popen("run", *place.server("--dummy-weights"), "--no-calibrate", "--out", str(out))
    (container,) = until(
        lambda: engine.containers.list(filters={"label": docker.LABEL}), timeout_s=TIMEOUT_S, over=early_end(process)
    )
    container.update(mem_limit="300m", memswap_limit="300m")
    said = finished(process, expect=3)[1]
    assert "the kernel killed it for want of host memory; free memory on the host" in said[-1]


def test_killed_and_cleaned(place: Place, tmp_path: Path, engine: sdk.DockerClient) -> None:
    """kill -9 of loadgen in the middle of a run: what finished is kept, the report says what happened, and the server
    lives until `loadgen clean`."""
    out = tmp_path / "run"
    process = place.popen("run", *place.server("--dummy-weights"), "--requests", "4000", "--arrival", "constant:4",
                          "--no-calibrate", "--out", str(out))  # fmt: skip
    try:
        until(lambda: has_measured(out / "requests.jsonl"), timeout_s=TIMEOUT_S, over=early_end(process))
        (container,) = engine.containers.list(filters={"label": docker.LABEL})
        assert place.finish("clean", expect=0)[0] == "removed 0 containers\n"  # its owner lives
    finally:
        process.kill()
        process.communicate()
    container.reload()
    assert container.status == "running"
    lines = (
        (out / "requests.jsonl").read_text().split("\n")[:-1]
    )  # what follows the last line break was cut by the kill
    assert place.finish("clean", expect=0)[0] == "removed 1 container\n"
    report = json.loads(place.finish("report", str(out), expect=4)[0].splitlines()[-1])
    assert "KILLED" in {finding["code"] for finding in report["verdict"]["findings"]}
    records = [json.loads(line) for line in lines]
    kept = [record for record in records if record.get("phase") == "measured" and record["outcome"] == "ok"]
    assert report["requests"]["ok"] == len(kept) == len({record["id"] for record in kept}) > 0


def has_measured(records: Path) -> bool:
    return records.exists() and b'"phase":"measured"' in records.read_bytes()


def essence(attrs: dict[str, Any]) -> dict[str, Any]:
    """What a container was told, but for its name, its labels and what the engine chose."""
    config, host = attrs["Config"], attrs["HostConfig"]
    return {
        "image": attrs["Image"],
        "argv": [*config["Entrypoint"], *config["Cmd"]],
        "env": sorted(config["Env"]),
        "ipc": host["IpcMode"],
        "capabilities": [name.removeprefix("CAP_") for name in host["CapAdd"]],
        "sysctls": host["Sysctls"],
        "limits": sorted((limit["Name"], limit["Soft"], limit["Hard"]) for limit in host["Ulimits"]),
        "mounts": sorted((mount["Source"], mount["Destination"], mount["RW"]) for mount in attrs["Mounts"]),
        "ports": {port: {each["HostIp"] for each in bound} for port, bound in host["PortBindings"].items()},
        "gpus": host["DeviceRequests"] or [],
    }


def test_the_compose_file_starts_the_same(
    measured: Measured, place: Place, tmp_path: Path, engine: sdk.DockerClient
) -> None:
    program = subprocess.run([str(ROOT / "tests/docker/compose.sh")], stdout=subprocess.PIPE, text=True, check=True)
    port = free_port()
    text, _ = place.finish("compose", *place.server("--dummy-weights", "--port", str(port)), expect=0)
    document = yaml.safe_load(text)
    (service,) = document["services"].values()
    for limit in re.findall(r"may not set the limit (\w+) to", "\n".join(measured.said)):
        del service["ulimits"][limit]  # loadgen went on without it, which a compose file cannot
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))

    def compose(*argv: str) -> None:
        done = subprocess.run(
            [program.stdout.strip(), "--file", str(file), *argv],
            env=os.environ | {"HOME": str(place.home)}, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]

    try:
        compose("up", "--detach", "--pull", "never")
        label = f"com.docker.compose.project={document['name']}"
        (container,) = engine.containers.list(all=True, filters={"label": label})
        assert essence(container.attrs) == essence(measured.attrs)
        url = f"http://127.0.0.1:{port}"
        until(lambda: healthy(url) or container.reload() or container.status != "running", timeout_s=TIMEOUT_S)
        out, _ = place.finish("run", "--backend", "vllm", "--url", url, "--requests", "8", "--input-tokens", "16",
                              "--output-tokens", "4", "--no-calibrate", "--out", str(tmp_path / "run"),
                              expect=(0, 4))  # fmt: skip  # as in `measured`
        assert json.loads(out.splitlines()[-1])["tokens"] == {"prompt": 8 * 16, "output": 8 * 4}
    finally:
        compose("down", "--timeout", "20")
