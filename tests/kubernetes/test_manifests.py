"""The manifests of compose/kubernetes: every field exists and has its type, by Kubernetes' own schemas, and what they
start is a command that loadgen takes. No Kubernetes runs here."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from loadgen.cli import build_app
from loadgen.config import Config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "compose/kubernetes").glob("*.yaml"))
RAYJOB = json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())
VERSIONS = ("1.31", "1.37")  # of Kubernetes
GROUPS = ["headgroup", "senders"]  # KubeRay's name for the head, and ours
Change = Callable[[dict[str, Any]], object]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "compose/kubernetes" / name).read_text()))


def last(name: str) -> dict[str, Any]:
    """The Job or RayJob; the claim stands before it."""
    return documents(name)[-1]


def check(document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    if document["kind"] == "RayJob":
        jsonschema.validate(document, RAYJOB)
        for _, group in groups(document):
            check({"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]})
        return
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def groups(rayjob: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    cluster = rayjob["spec"]["rayClusterSpec"]
    yield "headgroup", cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] == "Job":
        return [document["spec"]["template"]["spec"]]
    return [group["template"]["spec"] for _, group in groups(document)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_field_is_one_of_kubernetes(file: Path) -> None:
    kinds = [document["kind"] for document in documents(file.name)]
    assert kinds == ["PersistentVolumeClaim", {"job.yaml": "Job", "rayjob.yaml": "RayJob"}[file.name]]
    for document in documents(file.name):
        check(document)


def head(rayjob: dict[str, Any]) -> dict[str, Any]:
    head: dict[str, Any] = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]
    return head


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("job.yaml", lambda job: job["spec"].update(backofLimit=0), "backofLimit"),
        ("job.yaml", lambda job: job["spec"].update(backoffLimit="none"), "none"),
        ("job.yaml", lambda job: pods(job)[0]["containers"][0].update(arg=[]), "arg"),
        ("job.yaml", lambda job: pods(job)[0]["securityContext"].update(runAsNonRoot="yes"), "yes"),
        ("rayjob.yaml", lambda job: job["spec"].update(entryPoint="x"), "entryPoint"),
        ("rayjob.yaml", lambda job: job["spec"].update(shutdownAfterJobFinishes="yes"), "yes"),
        ("rayjob.yaml", lambda job: head(job)["rayStartParams"].update({"num-cpus": 0}), "0 is not of type"),
        ("rayjob.yaml", lambda job: head(job).update(replicas=1), "replicas"),
        ("rayjob.yaml", lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("maxReplicas"), "maxR"),
        ("rayjob.yaml", lambda job: pods(job)[0].update(affinities={}), "affinities"),
        ("rayjob.yaml", lambda job: pods(job)[1]["containers"][0].update(image=1), "1 is not of type"),
    ],
)
def test_a_mistake_is_found(name: str, change: Change, named: str) -> None:
    document = copy.deepcopy(last(name))
    change(document)
    with pytest.raises(jsonschema.ValidationError) as raised:
        check(document)
    assert named in raised.value.message


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_runs_as_root(file: Path) -> None:
    for pod in pods(last(file.name)):
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 1000
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False and rights["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def config(name: str) -> Config:
    """What loadgen understands of the command that a manifest starts."""
    document = last(name)
    if document["kind"] == "RayJob":
        program, *argv = shlex.split(document["spec"]["entrypoint"])
        assert program == "loadgen"
    else:
        argv = pods(document)[0]["containers"][0]["args"]
    command, bound, _ = build_app().parse_args(argv, exit_on_error=False, print_error=False)
    assert command.__name__ == "run"
    understood: Config = bound.arguments["config"]
    return understood


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_key_and_the_claim_are_those_of_the_command(file: Path) -> None:
    container, command = pods(last(file.name))[0]["containers"][0], config(file.name)
    assert command.api_key_env in {variable["name"] for variable in container["env"]}
    (mount,) = container["volumeMounts"]
    assert command.out is not None and command.out.is_relative_to(mount["mountPath"])


def test_as_many_senders_as_nodes_and_no_two_on_one_machine() -> None:
    rayjob, command = last("rayjob.yaml"), config("rayjob.yaml")
    assert command.on == "ray"
    assert [name for name, _ in groups(rayjob)] == GROUPS
    _, (_, senders) = groups(rayjob)
    assert senders["replicas"] == senders["minReplicas"] == senders["maxReplicas"] == command.nodes
    assert head(rayjob)["rayStartParams"]["num-cpus"] == "0"
    for pod in pods(rayjob):
        (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert rule["labelSelector"]["matchExpressions"] == [
            {"key": "ray.io/group", "operator": "In", "values": GROUPS}
        ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_core_for_each_client_process_and_one_more(file: Path) -> None:
    cores = pods(last(file.name))[-1]["containers"][0]["resources"]["requests"]["cpu"]
    assert int(cores) == int(config(file.name).workers) + 1
