"""The image of compose/client.Dockerfile: by itself, and as the machines of a Ray cluster, each a container."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import docker as sdk
import pytest

from backends import exit_codes
from loadgen import rundir
from tests.docker import client_image
from tests.support.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("engine")]

TIMEOUT_S = 120
SENDERS, REQUESTS = 2, 40
MAY_END = (exit_codes.OK, exit_codes.INVALID)  # on a machine with other work the client may be late
# As KubeRay starts and asks them; before its 1.4 in a login shell.
HEAD = "ray start --head --num-cpus=0 --dashboard-host=0.0.0.0 --object-store-memory=100000000 --block"
SENDER = "ray start --address={head}:6379 --num-cpus=1 --object-store-memory=100000000 --block"
HEALTHY = "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success"


@pytest.fixture(scope="module")
def image(engine: sdk.DockerClient) -> str:
    return client_image.make()


def ran(
    engine: sdk.DockerClient, image: str, *argv: str, entrypoint: str | None = None, expect: Sequence[int] = (0,)
) -> str:
    """Its standard output. expect: the exit codes that it may have."""
    container = engine.containers.run(image, list(argv), entrypoint=entrypoint, detach=True)
    try:
        code = container.wait(timeout=TIMEOUT_S)["StatusCode"]
        assert code in expect, container.logs().decode()[-5000:]
        return str(container.logs(stderr=False).decode())
    finally:
        container.remove(force=True)


def test_it_is_loadgen(engine: sdk.DockerClient, image: str) -> None:
    assert ran(engine, image, "--version").strip() == rundir.package_version()


def test_a_run(engine: sdk.DockerClient, image: str) -> None:
    """Against the embedded server, where a run in a container lies as well."""
    options = ["--requests", "8", "--output-tokens", "4", "--no-calibrate"]
    report = json.loads(ran(engine, image, "run", *options, expect=MAY_END).splitlines()[-1])
    assert report["requests"]["ok"] == 8 and report["tokens"]["output"] == 8 * 4


def test_it_is_not_root(engine: sdk.DockerClient, image: str) -> None:
    """By number: runAsNonRoot of Kubernetes refuses a name."""
    assert engine.images.get(image).attrs["Config"]["User"] == "1000:1000"
    assert ran(engine, image, "-u", entrypoint="id") == "1000\n"


def test_programs_are_found_in_a_login_shell(engine: sdk.DockerClient, image: str) -> None:
    said = ran(engine, image, "-lc", "ray --version && loadgen --version && training_probe --version",
               entrypoint="bash")  # fmt: skip
    version = rundir.package_version()
    ray, *own = said.splitlines()
    assert ray.startswith("ray, version ") and own == [version, version]


@pytest.fixture
def machines(engine: sdk.DockerClient, image: str) -> Iterator[list[Any]]:
    """Containers in a network of their own: the server, the head, the senders. As many nodes as that are in Ray."""
    network = engine.networks.create(f"llm-dissect-test-{os.getpid()}")
    there: list[Any] = []

    def begin(name: str, *argv: str) -> None:
        entrypoint, *rest = argv
        container = engine.containers.run(
            image, rest, entrypoint=entrypoint, name=f"{network.name}-{name}", network=network.name, detach=True,
            shm_size="200m",
        )  # fmt: skip
        there.append(container)

    try:
        begin("server", "loadgen", "serve", "--host", "0.0.0.0", "--port", "8000", "--ttft-ms", "50", "--itl-ms", "5")
        begin("head", "bash", "-lc", HEAD)
        for number in range(SENDERS):
            until_healthy(there[1])
            begin(f"sender{number}", "bash", "-lc", SENDER.format(head=there[1].name))
        until_joined(there[1])
        yield there
    finally:
        for container in there:
            container.remove(force=True)
        network.remove()


def until_healthy(container: Any) -> None:
    until(lambda: container.exec_run(["bash", "-c", HEALTHY]).exit_code == 0, over=lambda: ended(container))


def until_joined(head: Any) -> None:
    joined = b" 1 node_"
    until(lambda: head.exec_run(["ray", "status"]).output.count(joined) == 1 + SENDERS, over=lambda: ended(head))


def ended(container: Any) -> str | None:
    container.reload()
    return None if container.status == "running" else container.logs().decode()[-5000:]


def test_a_job_of_a_ray_cluster_sends_from_all_machines(machines: list[Any]) -> None:
    """As a RayJob does it: the job is submitted to the head, which sends nothing itself."""
    server, head, *senders = machines
    submit = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--"]
    run = ["loadgen", "run", "--on", "ray", "--nodes", str(SENDERS), "--url", f"http://{server.name}:8000",
           "--requests", str(REQUESTS), "--output-tokens", "4", "--arrival", "constant:20", "--no-calibrate",
           "--out", "/tmp/run"]  # fmt: skip
    said = head.exec_run([*submit, *run]).output.decode()  # its exit code is 1 whatever loadgen's was, but for 0
    assert re.search(r"' succeeded|exit code 4", said), said[-5000:]
    report, manifest = (
        json.loads(head.exec_run(["cat", f"/tmp/run/{name}.json"]).output) for name in ("report", "manifest")
    )
    assert report["requests"]["by_outcome"] == {"ok": REQUESTS}
    for container in senders:
        container.reload()
    addresses = {next(iter(each.attrs["NetworkSettings"]["Networks"].values()))["IPAddress"] for each in senders}
    assert {node["name"] for node in manifest["cluster"]["nodes"]} == addresses
