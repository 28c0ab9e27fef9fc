"""The test cluster itself: what Ray sees of it, its clocks, and what cutting and killing its nodes does. Run by
`make test-cluster`, a minute or two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import nodes as cluster
from tests.cluster.nodes import AHEAD, AHEAD_S, GCS_PORT, Nodes, NodesError, three_nodes

pytestmark = pytest.mark.cluster

TIMEOUT_S = 180
CONNECT = f"import socket, sys; socket.create_connection((sys.argv[1], {GCS_PORT}), timeout=10).close()"
# The driver prints a line of JSON; Ray may print of lost nodes beside it. The driver waits until as many nodes live as
# it was told, for Ray sees a death late.
DRIVER = """
import json, os, sys, time, ray
address, ips, question = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
ray.init(address=address, log_to_driver=False)
alive = lambda: {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
while alive().keys() != set(ips):
    time.sleep(0.2)
def on(ip, task):
    return ray.get(ray.remote(task).options(num_cpus=0, resources={f"node:{ip}": 0.001}).remote())
def clock(ip):
    return time.monotonic(), on(ip, lambda: time.monotonic()), time.monotonic()
answers = {
    "alive": lambda: alive(),
    "clocks": lambda: [clock(ip) for ip in ips],
    "tmpdir": lambda: [on(ip, lambda: os.environ.get("TMPDIR")) for ip in ips],
}
print("answer:", json.dumps(answers[question]()))
"""


def ask(nodes: Nodes, question: str, ips: list[str] | None = None) -> Any:
    """What a driver on the head answers once exactly `ips` live, all three where none are named."""
    argv = nodes.command(
        0, sys.executable, "-c", DRIVER, nodes.address, json.dumps(nodes.ips if ips is None else ips), question
    )
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("answer:"))[7:])


def reaches_head(nodes: Nodes, index: int) -> bool:
    argv = nodes.command(index, sys.executable, "-c", CONNECT, nodes.ips[0])
    return subprocess.run(argv, stderr=subprocess.DEVNULL).returncode == 0


def assert_clocks(nodes: Nodes) -> None:
    for index, (before_s, there_s, after_s) in enumerate(ask(nodes, "clocks")):
        assert before_s < there_s - (AHEAD_S if index == AHEAD else 0) < after_s


def test_ray_sees_three_nodes(nodes: Nodes) -> None:
    assert len(set(ask(nodes, "alive").values())) == len(set(nodes.ips)) == 3


def test_the_clock_of_the_second_node_is_ahead(nodes: Nodes) -> None:
    assert_clocks(nodes)


def test_a_command_runs_by_the_clock_of_its_node(nodes: Nodes) -> None:
    argv = [sys.executable, "-c", "import time; print(time.monotonic())"]
    here_s, ahead_s, after_s = (
        float(subprocess.run(nodes.command(index, *argv), stdout=subprocess.PIPE, check=True).stdout)
        for index in (0, AHEAD, 2)
    )
    assert here_s < ahead_s - AHEAD_S < after_s


def test_the_end_of_a_tests_process_group_does_not_end_a_node(nodes: Nodes) -> None:
    for index in range(3):
        assert nodes.pids(index)
        assert os.getpgrp() not in {os.getpgid(pid) for pid in nodes.pids(index)}


def test_a_cut_node_reaches_nobody_until_it_is_healed(nodes: Nodes) -> None:
    assert reaches_head(nodes, 2)
    nodes.cut(2)
    try:
        assert not reaches_head(nodes, 2)
        assert reaches_head(nodes, 1)
    finally:
        nodes.heal(2)
    assert reaches_head(nodes, 2)
    assert len(ask(nodes, "alive")) == 3


def test_a_killed_node_comes_back(nodes: Nodes) -> None:
    old = ask(nodes, "alive")
    nodes.kill_node(2)
    assert nodes.pids(2) == []
    assert ask(nodes, "alive", nodes.ips[:2]) == {ip: old[ip] for ip in nodes.ips[:2]}
    nodes.restart(2)
    new = ask(nodes, "alive")
    assert {ip for ip in nodes.ips if new[ip] != old[ip]} == {nodes.ips[2]}


def test_a_node_whose_raylet_was_killed_comes_back_with_its_clock(nodes: Nodes) -> None:
    nodes.kill_raylet(AHEAD)
    with pytest.raises(NodesError, match="no raylet to kill"):
        nodes.kill_raylet(AHEAD)
    assert len(ask(nodes, "alive", [nodes.ips[0], nodes.ips[2]])) == 2
    nodes.restart(AHEAD)
    assert_clocks(nodes)


def test_a_node_keeps_its_tmpdir(nodes: Nodes, tmp_path: Path) -> None:
    nodes.kill_node(2)
    nodes.start(2, tmp_path)
    try:
        nodes.restart(2)
        assert ask(nodes, "tmpdir")[2] == str(tmp_path)
    finally:
        del nodes.tmpdirs[2]
        nodes.restart(2)
    assert ask(nodes, "tmpdir")[2] == os.environ.get("TMPDIR")


def test_a_cluster_that_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Nodes, subprocess.Popen[bytes]]] = []
    start = Nodes.start

    def start_beside_another(nodes: Nodes, index: int) -> None:
        seen.append((nodes, subprocess.Popen(nodes.command(AHEAD, "sleep", "1000"))))
        start(nodes, index)

    monkeypatch.setattr(Nodes, "start", start_beside_another)
    monkeypatch.setattr(cluster, "OBJECT_STORE_BYTES", "none")
    with pytest.raises(NodesError, match="Node 0 did not start"), three_nodes():
        pass
    [(nodes, sleep)] = seen
    assert sleep.wait(TIMEOUT_S) == -signal.SIGKILL
    listings = [["ip", "netns", "list"], ["ip", "-oneline", "link"], ["cat", "/proc/self/mounts"]]
    listings += [["iptables", "--wait", "--list-rules"]] if shutil.which("iptables") else []
    for argv in listings:
        assert nodes.bridge not in subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert not nodes.directory.exists()
