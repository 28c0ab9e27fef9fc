"""The Docker launcher against a real engine, with images made here (images.py). Run by `make test-docker`, a minute."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker as sdk
import pytest

from backends import docker
from backends.docker import engine as docker_engine
from backends.docker import ownership as docker_owner
from backends.launch import Exit, LaunchError, Mount, ServerSpec, died
from tests.docker import images, registry
from tests.support.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("engine")]

READY_TIMEOUT_S = 30.0
SECRET = f"hf_{uuid.uuid4().hex}"


class Launches:
    """Starts containers for one test, and remembers what was said."""

    def __init__(self, client: sdk.DockerClient, directory: Path) -> None:
        self.client = client
        self.run_id = f"test-{uuid.uuid4().hex[:12]}"
        self.said: list[str] = []
        self.cancelled = threading.Event()
        self.running: list[docker.Container] = []
        self.log = directory / "run" / "start.log"

    def plan(self, kind: images.Kind = "vllm", behaviour: str = "", **changes: Any) -> ServerSpec:
        argv = {
            "vllm": ("--model", "m"),
            "lightllm": ("python", "-m", "lightllm.server.api_server", "--model_name", "m", "--host", "0.0.0.0",
                         "--port", "8080"),
            "tgi": ("--model-id", "m"),
        }[kind]  # fmt: skip
        plan = ServerSpec(
            run_id=self.run_id, backend=kind, argv=argv, env={}, port=images.PORTS[kind], log=self.log,
            image=None if "image" in changes else images.image(kind, behaviour),
        )  # fmt: skip
        return replace(plan, **changes)

    def start(self, plan: ServerSpec) -> docker.Container:
        self.running.append(docker.start(plan, self.said.append, self.cancelled))
        return self.running[-1]

    def containers(self) -> list[Any]:
        return list(self.client.containers.list(all=True, filters={"label": f"{docker.LABEL}={self.run_id}"}))

    def inspected(self) -> dict[str, Any]:
        (container,) = self.containers()
        attrs: dict[str, Any] = container.attrs
        return attrs


@pytest.fixture
def launches(engine: sdk.DockerClient, tmp_path: Path) -> Iterator[Launches]:
    made = Launches(engine, tmp_path)
    try:
        yield made
    finally:
        for container in made.containers():
            container.remove(force=True, v=True)
        for running in made.running:
            running.stop()


@dataclass(frozen=True)
class Recorded:
    """What the stand-in says that it was given."""

    argv: list[str]
    env: dict[str, str]
    secrets: dict[str, dict[str, Any]]
    limits: dict[str, list[int]]
    somaxconn: int


def recorded(log: str) -> Recorded:
    line = next(line for line in log.splitlines() if line.startswith("RECORDED "))
    return Recorded(**json.loads(line.removeprefix("RECORDED ")))


def fetch(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            body: bytes = reply.read()
            return body
    except OSError:
        return None


def ended(running: docker.Container) -> Exit:
    end = until(running.poll, "its end")
    assert isinstance(end, Exit)
    return end


def secret_directories() -> set[Path]:
    return set(docker.SECRETS_ROOT.glob("llm-dissect-*"))


@pytest.mark.parametrize("kind", images.ENTRYPOINTS)
def test_a_server_is_reached_by_both_addresses_and_leaves_only_its_log(launches: Launches, kind: images.Kind) -> None:
    running = launches.start(launches.plan(kind, env={"SOME": "words here", "OTHER": ""}))
    own, published = running.urls
    port = images.PORTS[kind]
    assert own.endswith(f":{port}") and published.startswith("http://127.0.0.1:")
    path = "/info" if kind == "tgi" else "/v1/models"
    for url in running.urls:
        assert until(functools.partial(fetch, url + path), "an answer") == fetch(published + path)
    assert running.poll() is None
    # a burst of connections waits in a queue as long as this
    seen = recorded(running.log_tail())
    assert seen.somaxconn == 4096
    assert seen.env["SOME"] == "words here" and seen.env["OTHER"] == ""
    assert seen.argv == list(launches.plan(kind).argv[3 if kind == "lightllm" else 0 :])
    inspected = launches.inspected()
    assert {binding["HostIp"] for binding in inspected["NetworkSettings"]["Ports"][f"{port}/tcp"]} == {"127.0.0.1"}
    assert inspected["Config"]["Labels"][docker.LABEL] == launches.run_id
    assert inspected["Config"]["Labels"][docker.OWNER_LABEL] == docker_owner.owner()
    assert inspected["Name"] == f"/llm-dissect-{kind}-{launches.run_id}"

    running.stop()
    assert launches.containers() == []
    assert running.poll() == Exit(0)  # SIGTERM reached the server itself, not a shell before it
    assert recorded(launches.log.read_text()) == seen
    assert recorded(running.log_tail()) == seen
    running.stop()


@pytest.mark.always
def test_the_facts_are_those_of_the_engine(launches: Launches, engine: sdk.DockerClient) -> None:
    plan = launches.plan()
    running = launches.start(plan)
    inspected = launches.inspected()
    assert running.facts["container_id"] == inspected["Id"]
    assert running.facts["image_id"] == inspected["Image"]
    assert running.facts["image"] == plan.image
    assert running.facts["image_digest"] is None  # it was never in a registry
    assert running.facts["engine_version"] == engine.version()["Version"]
    assert json.loads(json.dumps(running.facts)) == running.facts


def test_a_port_can_be_chosen_and_a_taken_one_is_named(launches: Launches) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"^port {port} of 127.0.0.1 is taken; .* --port.$"):
            launches.start(launches.plan(host_port=port))
        assert launches.containers() == []
    running = launches.start(launches.plan(host_port=port))
    assert running.urls[-1] == f"http://127.0.0.1:{port}"
    other = launches.plan(host_port=port, run_id=f"{launches.run_id}-second")
    with pytest.raises(LaunchError, match=f"^port {port} of 127.0.0.1 is taken"):  # by a container, said otherwise
        launches.start(other)


def test_a_name_that_exists_is_said(launches: Launches) -> None:
    launches.start(launches.plan())
    with pytest.raises(LaunchError, match="exists already; remove it with loadgen clean"):
        launches.start(launches.plan())
    assert len(launches.containers()) == 1


def test_mounts_are_seen_inside_and_a_missing_one_is_refused(launches: Launches, tmp_path: Path) -> None:
    (tmp_path / "mod,el").mkdir()
    mounts = (Mount(tmp_path / "mod,el", "/models/m"), Mount(tmp_path, "/cache", read_only=False))
    launches.start(launches.plan(mounts=mounts))
    seen = {mount["Destination"]: (mount["Source"], mount["RW"]) for mount in launches.inspected()["Mounts"]}
    assert seen == {"/models/m": (f"{tmp_path}/mod,el", False), "/cache": (str(tmp_path), True)}

    absent = tmp_path / "absent"
    with pytest.raises(LaunchError, match=f"^there is no {absent} to be mounted at /x; check the path.$"):
        launches.start(launches.plan(mounts=(Mount(absent, "/x"),)))
    assert not absent.exists()


@pytest.mark.parametrize(
    ("behaviour", "end", "log"),
    [
        ("exit:3", Exit(3), "RECORDED "),
        ("say:torch.OutOfMemoryError: CUDA out of memory. Tried $1", Exit(1), "memory. Tried $1\n"),
        ("die:3:139", Exit(-11), '"emulated":true'),
    ],
)
def test_how_a_server_ended_is_told(launches: Launches, behaviour: str, end: Exit, log: str) -> None:
    running = launches.start(launches.plan("tgi", behaviour))
    assert ended(running) == end
    assert log in running.log_tail()
    assert len(running.log_tail(1).splitlines()) == 1
    running.stop()
    assert running.poll() == end
    assert log in launches.log.read_text()


def test_a_flag_that_the_server_does_not_know_ends_it(launches: Launches) -> None:
    running = launches.start(launches.plan(argv=("--model", "m", "--bogus")))
    assert ended(running) == Exit(2)
    assert running.log_tail().endswith("vllm: error: unrecognized arguments: --bogus\n")


def test_one_that_ignores_sigterm_is_killed(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "STOP_TIMEOUT_S", 1)
    running = launches.start(launches.plan(behaviour="stubborn"))
    until(lambda: fetch(f"{running.urls[0]}/health") is not None, "its readiness")
    running.stop()
    assert launches.containers() == []
    assert running.poll() == Exit(-9)


def test_one_that_takes_more_memory_than_there_is(launches: Launches, engine: sdk.DockerClient) -> None:
    """The kernel kills it; the launcher itself sets no limit, so the test does once it runs."""
    if not engine.info()["MemoryLimit"]:
        pytest.skip("this engine cannot limit memory")
    running = launches.start(launches.plan(behaviour="hungry"))
    until(lambda: "waits" in running.log_tail(), "its last line")
    (container,) = launches.containers()
    container.update(mem_limit="64m", memswap_limit="64m")
    container.kill("SIGUSR1")
    end = until(running.poll, "its end")
    assert end == Exit(-9, oom_killed=True)
    said = str(died("vllm", end, running.log_tail(), ()))
    assert "the kernel killed it for want of host memory; free memory on the host" in said


def test_one_that_never_listens_is_stopped(launches: Launches) -> None:
    running = launches.start(launches.plan(behaviour="hang"))
    until(lambda: "hangs" in running.log_tail(), "its last line")
    assert running.poll() is None and fetch(running.urls[0]) is None
    running.stop()
    assert launches.containers() == []


def test_a_container_that_somebody_removed_is_no_accident(launches: Launches) -> None:
    running = launches.start(launches.plan())
    launches.containers()[0].remove(force=True)
    end = running.poll()
    assert end is not None and "removed" in end.error
    assert running.log_tail() == ""
    launches.said.clear()
    running.stop()
    assert launches.said == []


def test_a_long_log_is_kept_from_its_end(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "LOG_LIMIT_BYTES", 1000)
    text = "\n".join(f"line {number}" for number in range(1000))
    running = launches.start(launches.plan(behaviour=f"say:{text}"))
    ended(running)
    running.stop()
    kept = launches.log.read_text().splitlines()
    assert kept == text.splitlines()[-len(kept) :]
    assert 900 < launches.log.stat().st_size <= 1000


def test_a_log_that_cannot_be_read_keeps_nothing_alive(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    running = launches.start(launches.plan(behaviour="exit:0"))

    def unreadable(**_: Any) -> bytes:
        raise sdk.errors.APIError("501", explanation="configured logging driver does not support reading")

    monkeypatch.setattr(running.container, "logs", unreadable)
    running.stop()
    assert launches.containers() == []
    assert launches.said[-1] == ("could not read the server's log: configured logging driver does not support reading.")


def test_a_limit_that_the_engine_may_not_set_is_left_and_said(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = 2 * int(Path("/proc/sys/fs/nr_open").read_text())
    limits = (*docker.ULIMITS[:-1], docker._Ulimit("nofile", beyond, 7))
    monkeypatch.setattr(docker, "ULIMITS", limits)
    running = launches.start(launches.plan())
    until(lambda: "RECORDED" in running.log_tail(), "its first line")
    assert f"the Docker engine may not set the limit nofile to {beyond}; its own limit holds." in launches.said
    given = [word for word in shlex.split(running.facts["command"]) if "=" in word]
    assert f"nofile={beyond}" not in given and "stack=67108864" in given
    assert recorded(running.log_tail()).limits["stack"] == [67108864, 67108864]
    assert len(launches.containers()) == 1


def test_a_secret_reaches_the_server_and_nothing_else(
    launches: Launches, engine: sdk.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("EMPTY_TOKEN", "")
    before = secret_directories()
    running = launches.start(launches.plan("tgi", secrets=("HF_TOKEN", "EMPTY_TOKEN", "NO_TOKEN")))
    until(lambda: fetch(f"{running.urls[0]}/health") is not None, "its readiness")
    seen = recorded(running.log_tail())
    assert seen.secrets == {
        "HF_TOKEN": {"length": len(SECRET), "sha256": hashlib.sha256(SECRET.encode()).hexdigest()[:12]}
    }
    assert "EMPTY_TOKEN" not in seen.env and "NO_TOKEN" not in seen.env
    assert seen.argv == ["--model-id", "m"]

    (directory,) = secret_directories() - before
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [(file.name, file.stat().st_mode & 0o777) for file in directory.iterdir()] == [("HF_TOKEN", 0o600)]
    inspected = launches.inspected()
    assert SECRET not in json.dumps(inspected)
    assert SECRET not in json.dumps(running.facts)
    root = Path(engine.info()["DockerRootDir"])
    if os.access(root, os.R_OK):
        places = [root / "containers" / inspected["Id"]]
        places += [Path(inspected["GraphDriver"]["Data"]["UpperDir"])] if inspected.get("GraphDriver") else []
        files = [path for place in places for path in place.rglob("*") if path.is_file()]
        assert any(path.name == "config.v2.json" for path in files)
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

    running.stop()
    assert not directory.exists()
    assert running.poll() == Exit(0)  # the shell that read the secret is gone: the server got the signal
    assert SECRET not in launches.log.read_text()


def test_a_secret_that_the_server_prints_is_masked(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    running = launches.start(launches.plan("lightllm", "tell", secrets=("HF_TOKEN",)))
    until(lambda: "the token is ***" in running.log_tail(), "the word")
    assert SECRET not in running.log_tail()
    until(lambda: fetch(f"{running.urls[0]}/health") is not None, "its readiness")
    running.stop()
    assert "the token is ***\n" in launches.log.read_text()


def test_secrets_do_not_outlive_a_start_that_failed(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    before = secret_directories()
    with pytest.raises(LaunchError):
        launches.start(launches.plan(secrets=("HF_TOKEN",), gpu_ids=("99",)))
    assert secret_directories() == before
    assert launches.containers() == []


def test_gpus_need_the_toolkit(launches: Launches) -> None:
    if docker.has_nvidia():
        pytest.skip("this engine can give GPUs")
    with pytest.raises(LaunchError, match="install the NVIDIA Container Toolkit"):
        launches.start(launches.plan(gpu_ids=("0", "1")))
    assert launches.containers() == []


def test_a_command_that_the_image_lacks(launches: Launches) -> None:
    with pytest.raises(LaunchError, match=r"^Docker did not start the image .*no-such-program"):
        launches.start(launches.plan("lightllm", argv=("no-such-program",)))
    assert launches.containers() == []


def test_a_start_can_be_broken_off(launches: Launches) -> None:
    launches.cancelled.set()
    with pytest.raises(LaunchError, match="broken off"):
        launches.start(launches.plan())
    assert launches.containers() == []


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the docker command")
def test_the_command_line_makes_the_same_container(
    launches: Launches, engine: sdk.DockerClient, tmp_path: Path
) -> None:
    """What `docker create` makes of it, beside what the SDK makes of it, before either starts: GPUs need not exist."""
    (tmp_path / "a,b").mkdir()
    plan = launches.plan(
        env={"SOME": "words here", "EMPTY": ""}, gpu_ids=("0", "3"), host_port=18765,
        mounts=(Mount(tmp_path / "a,b", "/models/m"), Mount(tmp_path, "/cache", read_only=False)),
    )  # fmt: skip
    line = docker.command_line(plan)
    assert line[:3] == ["docker", "run", "--detach"]
    name = line.index("--name") + 1
    subprocess.run(["docker", "create", *line[3:name], f"{line[name]}-by-hand", *line[name + 1 :]],
                   check=True, capture_output=True)  # fmt: skip
    engine.containers.create(**docker.Description.of(plan).sdk())
    by_hand, by_sdk = sorted(
        (container.attrs for container in launches.containers()), key=lambda attrs: -len(attrs["Name"])
    )
    assert by_hand["Name"] == f"{by_sdk['Name']}-by-hand"

    def told(attrs: dict[str, Any]) -> dict[str, Any]:
        config, host = dict(attrs["Config"]), dict(attrs["HostConfig"])
        for key in ("Hostname", "AttachStdout", "AttachStderr"):  # the first differs always; we never attach
            config.pop(key, None)
        host.pop("ConsoleSize", None)  # of the terminal
        assert host.pop("RestartPolicy")["Name"] in ("", "no")  # both: never
        host["CapAdd"] = [capability.removeprefix("CAP_") for capability in host["CapAdd"]]
        for limit in host["Ulimits"], config["Env"], host["Mounts"], host["DeviceRequests"]:
            limit.sort(key=str)
        # absent, null and empty mean the same to the engine
        return {key: value for key, value in {**config, **host}.items() if value not in (None, "", [], {}, False, 0)}

    assert told(by_hand) == told(by_sdk)
    assert told(by_sdk)["DeviceRequests"][0]["DeviceIDs"] == ["0", "3"]


def test_the_command_line_tells_what_was_started(launches: Launches, tmp_path: Path) -> None:
    plan = launches.plan(env={"SOME": "words"}, mounts=(Mount(tmp_path, "/models/m"),))
    running = launches.start(plan)
    line, inspected = shlex.split(running.facts["command"]), launches.inspected()

    def values(option: str) -> list[str]:
        return [line[index + 1] for index, word in enumerate(line) if word == option]

    host, config = inspected["HostConfig"], inspected["Config"]
    assert values("--ulimit") == [f"{limit['Name']}={limit['Hard']}" for limit in host["Ulimits"]]
    assert values("--sysctl") == [f"{key}={value}" for key, value in host["Sysctls"].items()]
    assert values("--ipc") == [host["IpcMode"]] == ["host"]
    assert [capability.removeprefix("CAP_") for capability in host["CapAdd"]] == values("--cap-add") == ["SYS_NICE"]
    assert set(values("--env")) <= set(config["Env"])
    assert values("--label") == [f"{key}={value}" for key, value in config["Labels"].items() if key == docker.LABEL]
    assert values("--mount") == [f"type=bind,source={mount['Source']},target={mount['Target']},readonly"
                                 for mount in host["Mounts"]]  # fmt: skip
    assert line[line.index(str(plan.image)) + 1 :] == config["Cmd"] == list(plan.argv)
    assert (host["AutoRemove"], host.get("Init") or False) == (False, False)


CHILD = """
import sys, threading, time
from pathlib import Path
from backends import docker
from backends.launch import ServerSpec
start = ServerSpec(run_id=sys.argv[1], backend="vllm", argv=("--model", "m"), env={}, port=8000, log=Path(sys.argv[3]),
              image=sys.argv[2], secrets=("HF_TOKEN",))
docker.start(start, lambda said: None, threading.Event())
print("started", flush=True)
time.sleep(600)
"""


def test_what_a_killed_owner_left_is_found_and_removed(launches: Launches, tmp_path: Path) -> None:
    mine = launches.start(launches.plan())
    before = secret_directories()
    lost = f"{launches.run_id}-lost"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, lost, images.image("vllm"), str(tmp_path / "start.log")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_TOKEN": SECRET},
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "started\n"
        (left,) = secret_directories() - before
        assert [orphan for orphan in docker.orphans() if orphan.run_id in (lost, launches.run_id)] == []
        os.kill(child.pid, signal.SIGKILL)
        # the owner is gone even before its parent has taken note
        (found,) = until(lambda: [orphan for orphan in docker.orphans() if orphan.run_id == lost], "the orphan")
        assert found.name == f"llm-dissect-vllm-{lost}" and found.status == "running"
        assert found.image == images.image("vllm") and len(found.id) >= 10
        said: list[str] = []
        assert docker.clean(said.append) >= 1
        assert any(found.name in sentence for sentence in said)
        assert [orphan for orphan in docker.orphans() if orphan.run_id == lost] == []
        assert not left.exists()
    finally:
        child.kill()
        child.wait()
    assert [container.id for container in launches.containers()] == [mine.facts["container_id"]]
    assert mine.poll() is None


def test_another_process_with_the_owners_number_is_not_the_owner(launches: Launches, engine: sdk.DockerClient) -> None:
    host, namespace, pid, _ = docker_owner.owner().split(":")
    labels = {docker.LABEL: launches.run_id, docker.OWNER_LABEL: f"{host}:{namespace}:{pid}:12345"}
    stopped = engine.containers.create(images.image("vllm"), command=["x"], labels=labels)
    elsewhere = {docker.LABEL: launches.run_id, docker.OWNER_LABEL: "another-host:1:1:1"}
    kept = engine.containers.create(images.image("vllm"), command=["x"], labels=elsewhere)
    by_hand = engine.containers.create(images.image("vllm"), command=["x"], labels={docker.LABEL: launches.run_id})
    found = [orphan for orphan in docker.orphans() if orphan.run_id == launches.run_id]
    assert [(orphan.id, orphan.status) for orphan in found] == [(stopped.short_id, "created")]
    said: list[str] = []
    docker.clean(said.append)
    assert {container.id for container in launches.containers()} == {kept.id, by_hand.id}
    assert any(kept.name in sentence and "another-host" in sentence for sentence in said)


@pytest.fixture(scope="module")
def layer() -> bytes:
    return registry.compressed(images.packed_layer()[0])


@pytest.fixture
def pulled(engine: sdk.DockerClient, layer: bytes) -> Iterator[registry.Registry]:
    """To be asked for before `launches`: the image can go only after its containers."""
    held = registry.Registry(
        layer, images.config("vllm", images.packed_layer()[0]) + b" "
    )  # another id than the one here
    with registry.serving(held):
        yield held
        with contextlib.suppress(sdk.errors.ImageNotFound):
            engine.images.remove(held.image, force=True)


def test_a_missing_image_is_pulled_and_its_digest_kept(
    pulled: registry.Registry, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "PROGRESS_INTERVAL_S", 0.0)
    pulled.go_on.set()
    running = launches.start(launches.plan(image=pulled.image))
    assert running.facts["image_digest"] == f"{pulled.image.rpartition(':')[0]}@{registry.digest(pulled.manifest)}"
    assert until(lambda: fetch(f"{running.urls[0]}/v1/models"), "an answer")
    assert launches.said[0] == f"pulling {pulled.image}."
    assert all(sentence.startswith(f"pulling {pulled.image}") for sentence in launches.said if "limit" not in sentence)


def test_a_pull_says_how_far_it_is_and_can_be_broken_off(
    launches: Launches, engine: sdk.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "PROGRESS_INTERVAL_S", 0.0)
    unknown = os.urandom(8_000_000)  # no layer that the engine has
    held = registry.Registry(unknown, images.config("vllm", unknown))
    failed: list[Exception] = []

    def start() -> None:
        try:
            launches.start(launches.plan(image=held.image))
        except LaunchError as error:
            failed.append(error)

    with registry.serving(held):
        thread = threading.Thread(target=start)
        thread.start()
        until(lambda: any("of 8 MB (" in sentence for sentence in launches.said), "a word about the progress")
        launches.cancelled.set()
        thread.join(READY_TIMEOUT_S)
        assert not thread.is_alive()
    assert [str(error) for error in failed] == [f"the pull of {held.image} was broken off."]
    assert launches.containers() == []


@pytest.mark.parametrize(
    ("refuse", "why"), [(404, "not found|manifest unknown"), (401, "auth|denied"), (500, "500|unexpected")]
)
def test_an_image_that_cannot_be_had(launches: Launches, layer: bytes, refuse: int, why: str) -> None:
    with registry.serving(registry.Registry(layer, b"{}", refuse=refuse)) as refusing:
        image = refusing.image
        with pytest.raises(
            LaunchError, match=rf"^there is no image {image} here, .*({why}).*; name another with --image.$"
        ):
            launches.start(launches.plan(image=image))
    with pytest.raises(LaunchError, match=r"cannot be pulled: .*refused"):  # nobody listens there any more
        launches.start(launches.plan(image=image))


def test_no_image_has_such_a_name(launches: Launches) -> None:
    with pytest.raises(LaunchError, match=r"^there is no image NO//IMAGE here, .*; name another with --image.$"):
        launches.start(launches.plan(image="NO//IMAGE"))


@pytest.fixture
def mortal_engine(
    engine: sdk.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """A socket through which the engine is reached until the function is called: then it is as if it had died."""
    real = engine.api.base_url, "/var/run/docker.sock"
    path = tmp_path / "engine.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    ends: list[socket.socket] = [listener]

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(real[1])
                ends.extend((near, far))
                threading.Thread(target=copy, args=(near, far), daemon=True).start()
                threading.Thread(target=copy, args=(far, near), daemon=True).start()

    def die() -> None:
        path.unlink(missing_ok=True)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    yield die
    die()


def test_an_engine_that_dies_is_said_and_stop_does_not_raise(
    launches: Launches, mortal_engine: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    before = secret_directories()
    running = launches.start(launches.plan(secrets=("HF_TOKEN",)))
    assert running.poll() is None
    mortal_engine()
    with pytest.raises(LaunchError, match=r"^the Docker engine no longer answers: .*\.$"):
        running.poll()
    assert running.log_tail() == ""
    launches.said.clear()
    running.stop()
    assert "run loadgen clean later" in launches.said[-1]
    assert secret_directories() == before
    assert docker.problem() is not None
    with pytest.raises(LaunchError, match=r"^Docker cannot be used: no engine is installed or running"):
        docker.orphans()
