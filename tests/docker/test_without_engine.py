"""What the Docker launcher says and writes that needs no engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from backends import docker
from backends.docker import engine as docker_engine
from backends.docker import ownership as docker_owner
from backends.launch import LaunchError, Mount, ServerSpec
from loadgen import cli

START = ServerSpec(
    run_id="2026 a/b", backend="vllm", argv=("--model", "/models/m"), env={"A": "b c"}, port=8000, host_port=8123,
    log=Path("start.log"), image="vllm/vllm-openai:v1", gpu_ids=("0", "2"), secrets=("HF_TOKEN",),
    mounts=(Mount(Path("/m/llama"), "/models/m"), Mount(Path("/c"), "/cache", read_only=False)),
)  # fmt: skip


def test_the_command_line_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_value")
    assert docker.command_line(START) == [
        "docker", "run", "--detach", "--name", "llm-dissect-vllm-2026-a-b", "--label", "llm-dissect.run=2026 a/b",
        "--gpus", '"device=0,2"', "--ipc", "host",
        "--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--ulimit", "nofile=65535",
        "--cap-add", "SYS_NICE", "--sysctl", "net.core.somaxconn=4096",
        "--mount", "type=bind,source=/m/llama,target=/models/m,readonly",
        "--mount", "type=bind,source=/c,target=/cache",
        "--env", "A=b c", "--env", "HF_TOKEN", "--publish", "127.0.0.1:8123:8000",
        "vllm/vllm-openai:v1", "--model", "/models/m",
    ]  # fmt: skip


def test_without_gpus_none_are_asked_for() -> None:
    plain = ServerSpec(run_id="r", backend="tgi", argv=("x",), env={}, port=80, log=Path("l"), image="i")
    line = docker.command_line(plain)
    assert "--gpus" not in line and "--env" not in line and "--mount" not in line
    assert line[line.index("--publish") + 1] == "127.0.0.1::80"


def test_an_image_must_be_named() -> None:
    plain = ServerSpec(run_id="r", backend="tgi", argv=("x",), env={}, port=80, log=Path("l"))
    with pytest.raises(LaunchError, match="--image"):
        docker.command_line(plain)


@pytest.mark.parametrize("name", ["docker", "requests"])
def test_docker_costs_nothing_until_it_is_used(name: str) -> None:
    script = f"import sys, backends.docker; sys.exit({name!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_no_engine_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    problem = docker.problem()
    assert problem is not None
    assert problem.startswith("no engine is installed or running") and f"{tmp_path}/absent.sock" in problem
    start = ServerSpec(run_id="r", backend="tgi", argv=("x",), env={}, port=80, log=Path("l"), image="i")
    with pytest.raises(LaunchError, match=r"^Docker cannot be used: no engine is installed or running .*\.$"):
        docker.start(start, print, threading.Event())


def test_an_engine_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/left.sock")
        problem = docker.problem()
    assert problem is not None and problem.startswith("the engine is not running")


PERMITTED = """
import os, sys
from backends import docker
from backends.docker import engine as docker_engine
from backends.docker import ownership as docker_owner
path = os.environ.pop("TEST_SOCKET")
os.environ["DOCKER_HOST"] = "unix:///absent.sock"
docker.problem()  # everything is imported now
if os.geteuid() == 0:
    os.seteuid(65534)
os.environ["DOCKER_HOST"] = "unix://" + path
print(docker.problem())
"""


def test_an_engine_that_this_user_may_not_use() -> None:
    path = f"/tmp/llm-dissect-test-{os.getpid()}.sock"  # where every user may look
    with socket.socket(socket.AF_UNIX) as private:
        private.bind(path)
        try:
            private.listen()
            Path(path).chmod(0)
            ran = subprocess.run([sys.executable, "-c", PERMITTED], env={**os.environ, "TEST_SOCKET": path},
                                 capture_output=True, text=True)  # fmt: skip
        finally:
            Path(path).unlink()
    assert ran.stdout.startswith("this user may not talk to the engine; join its group"), ran.stderr


@pytest.mark.parametrize("host", ["tcp://x:abc", "http://[::1"])
def test_an_address_that_is_none(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    problem = docker.problem()
    assert problem is not None and host in problem and "\n" not in problem
    assert cli.invoke(["clean"]) == 3
    assert host in capsys.readouterr().err


def test_something_else_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.getsockname()[1]}")
        problem = docker.problem()
        thread.join()
    assert problem is not None and "does not answer as one" in problem and "\n" not in problem


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', "install the NVIDIA Container Toolkit"),
        ("failed to discover GPU vendor from CDI: no known GPU vendor found", "install the NVIDIA Container Toolkit"),
        (
            "failed to create task: OCI runtime create failed: error running hook #0: Auto-detected mode as 'legacy'\n"
            "nvidia-container-cli: device error: 2: unknown device: unknown",
            "Docker does not know every one of the GPUs 0, 2;",
        ),
        (
            "OCI runtime create failed: CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=2",
            "Docker does not know every one of the GPUs 0, 2;",
        ),
        (
            "nvidia-container-cli: initialization error: nvml error: driver not loaded",
            "the NVIDIA driver does not work",
        ),
        ("Bind for 127.0.0.1:8123 failed: port is already allocated", "port 8123 of 127.0.0.1 is taken"),
        ("listen tcp4 127.0.0.1:8123: bind: address already in use", "port 8123 of 127.0.0.1 is taken"),
        ("write /var/lib/docker/x: no space left on device", "Docker's disk is full"),
        (
            "something {new} went wrong.",
            "Docker did not start the image vllm/vllm-openai:v1: something {new} went wrong.",
        ),
    ],
)
def test_what_the_engine_says_becomes_advice(said: str, told: str) -> None:
    error = docker.not_started(APIError("500", explanation=said), docker.Description.of(START))
    assert str(error).startswith(told) or told in str(error)
    assert str(error).endswith(".") and not str(error).endswith("..") and "\n" not in str(error)


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        (
            "runc: error setting rlimits for ready process: error setting rlimit type 7: operation not permitted",
            "nofile",
        ),
        ("crun: setrlimit `RLIMIT_MEMLOCK`: Operation not permitted: OCI permission denied", "memlock"),
        ("error setting rlimit type 6: operation not permitted", None),
        ("port is already allocated", None),
    ],
)
def test_the_limit_that_was_refused_is_known(said: str, limit: str | None) -> None:
    refused = docker.refused_limit(APIError("500", explanation=said), docker.ULIMITS)
    assert (refused.name if refused else None) == limit


@pytest.mark.parametrize(
    ("info", "able"),
    [
        ({"Runtimes": {"runc": {}}}, False),
        ({"Runtimes": {"runc": {}, "nvidia": {"path": "nvidia-container-runtime"}}}, True),
        ({"Runtimes": {"runc": {}}, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}, True),
        ({"Runtimes": {"runc": {}}, "DiscoveredDevices": None, "CDISpecDirs": ["/absent"]}, False),
    ],
)
def test_gpus_are_known_from_what_the_engine_says(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], able: bool
) -> None:
    monkeypatch.setattr(docker_engine, "connect", lambda: SimpleNamespace(info=lambda: info))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert docker.has_nvidia() is able


def test_a_secret_must_be_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a\nb")
    start = ServerSpec(run_id="r", backend="tgi", argv=("x",), env={}, port=80, log=Path("l"), image="i",
                  secrets=("HF_TOKEN",))  # fmt: skip
    with pytest.raises(LaunchError, match="HF_TOKEN holds a line break") as refused:
        docker.start(start, print, threading.Event())
    assert "a\nb" not in str(refused.value)


def test_how_far_a_pull_is() -> None:
    progress = docker_engine._Progress()
    assert str(progress) == "waiting for the registry"
    for message in (
        {"status": "Pulling fs layer", "id": "a", "progressDetail": {}},
        {"status": "Downloading", "id": "a", "progressDetail": {"current": 1_000_000, "total": 6_000_000}},
        {"status": "Downloading", "id": "b", "progressDetail": {"current": 1_000_000, "total": 4_000_000}},
    ):
        progress.take(message)
    assert str(progress) == "2 of 10 MB (20%)"
    progress.take({"status": "Download complete", "id": "a", "progressDetail": {}})
    assert str(progress) == "7 of 10 MB (70%)"
    progress.take({"status": "Pull complete", "id": "b", "progressDetail": {}})
    assert str(progress) == "10 MB are here, unpacking"


class Left:
    """A container as the SDK shows it, with a removal that may fail."""

    def __init__(self, owner: str, refused: str = "") -> None:
        self.name, self.short_id, self.status = f"llm-dissect-{owner}", "1", "running"
        self.labels = {docker.LABEL: "r", docker.OWNER_LABEL: owner}
        self.attrs = {"Config": {"Image": "i"}}
        self.refused, self.removed = refused, False

    def remove(self, **_: Any) -> None:
        if self.refused:
            raise APIError("500", explanation=self.refused)
        self.removed = True


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Left]:
    """What an engine of ours would list."""
    listed: list[Left] = []
    engine = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: listed))
    monkeypatch.setattr(docker_owner, "connect", lambda: engine)
    monkeypatch.setattr(docker_owner, "SECRETS_ROOT", tmp_path)
    return listed


def gone() -> str:
    """A process that was here."""
    done = subprocess.run(
        [sys.executable, "-c", "from backends.docker import ownership as d; print(d.owner())"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_only_what_a_dead_process_of_this_namespace_owned_is_removed(left: list[Left], tmp_path: Path) -> None:
    host, namespace, _, began = docker_owner.owner().split(":")
    dead = gone()
    pid, started = dead.split(":")[2:]
    left += [
        Left(dead), Left(docker_owner.owner()), Left(f"{host}:{namespace}:{os.getpid()}:1"), Left(""), Left("nonsense"),
        Left(f"{host}:{int(namespace) + 1}:{pid}:{started}"), Left(f"elsewhere:{namespace}:{pid}:{started}"),
        Left(f"{host}:{namespace}:{'9' * 30}:1"),
    ]  # fmt: skip
    secrets = {
        name: tmp_path / f"llm-dissect-{name}-x"
        for name in (
            f"{namespace}-{pid}-{started}",
            f"{namespace}-{os.getpid()}-{began}",
            f"{namespace}1-{pid}-{started}",
        )
    }
    for directory in secrets.values():
        directory.mkdir()
    said: list[str] = []
    assert docker.clean(said.append) == 2
    assert [container.removed for container in left] == [True, False, True, False, False, False, False, False]
    assert [directory.exists() for directory in secrets.values()] == [False, True, True]
    assert any(f"in the PID namespace {int(namespace) + 1} lives cannot be seen" in sentence for sentence in said)
    assert any("on elsewhere lives cannot be seen" in sentence for sentence in said)


def test_an_owner_that_cannot_be_looked_at_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under hidepid: its entry in /proc is not there for us, and a signal is refused."""

    def refused(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(docker_owner, "began", lambda pid: None)
    assert not docker_owner.is_dead(os.getpid(), "1")
    monkeypatch.setattr(os, "kill", refused)
    assert not docker_owner.is_dead(1, "1")


def test_a_container_that_cannot_be_removed_is_an_error(left: list[Left], capsys: pytest.CaptureFixture[str]) -> None:
    stuck, other = Left(gone(), "device or resource busy"), Left(gone())
    left += [stuck, other]
    assert cli.invoke(["clean"]) == 3
    assert other.removed
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"loadgen: could not remove {stuck.name} (device or resource busy)")


class Stopping:
    """A container that ends well, but cannot be removed."""

    name = "c"

    def __init__(self) -> None:
        self.attrs = {"State": {"Status": "exited"}, "NetworkSettings": {}}
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(**_: Any) -> Any:
            self.asked.append(name)
            if name == "remove":
                raise APIError("500", explanation="busy")
            return []

        return ask


def test_nobody_need_hear_what_stop_says(tmp_path: Path) -> None:
    """With nobody to be told, all is ended first."""

    def say(_: str) -> None:
        raise BrokenPipeError

    lent = tmp_path / "lent"
    lent.mkdir()
    sdk = Stopping()
    unwritable = replace(START, log=Path("/dev/null/log"))
    container = docker.Container(sdk, unwritable, {}, say, {}, lent)  # type: ignore[arg-type]
    with pytest.raises(BrokenPipeError):
        container.stop()
    assert sdk.asked[-1] == "remove" and not lent.exists()
