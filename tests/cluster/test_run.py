"""Real runs from three machines: the same load as from one, and what is left when machines, networks and disks fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.rundir import records
from loadgen.rundir.records import RequestTable
from tests.cluster.nodes import AHEAD, AHEAD_S, Nodes

pytestmark = pytest.mark.cluster

LOADGEN = str(Path(sys.executable).with_name("loadgen"))
LAST = 2  # the node that tests harm; node 0 has the driver and Ray's head
SECRET = "sk-nobody-may-write-this-down"
LIMIT_S = 150.0
LOAD = ("--requests", "240", "--arrival", "constant:20", "--output-tokens", "8", "--no-calibrate", "--warmup", "3")


@pytest.fixture(scope="module")
def url(nodes: Nodes) -> Iterator[str]:
    """An emulated server outside the three machines, which all of them reach."""
    host = nodes.ips[0].rpartition(".")[0] + ".254"
    with serving([LOADGEN, "serve", "--host", host, "--port", "0", "--itl-ms", "100"]) as url:
        yield url


@contextlib.contextmanager
def serving(argv: list[str]) -> Iterator[str]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.kill()


@dataclass
class Going:
    """A command on node 0 that goes on."""

    process: subprocess.Popen[str]
    out: Path

    def end(self) -> tuple[int, str]:
        """Its exit code, and all that it said."""
        said, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said

    def wait_for_load(self, nodes: Nodes, seconds: float) -> None:
        """Until the load has gone on for so long on the last node."""
        wait(lambda: records_on_machines(nodes, self.out))
        time.sleep(seconds)


def begin(nodes: Nodes, out: Path, *arguments: str, command: str = "run") -> Going:
    argv = nodes.command(0, LOADGEN, command, *arguments)
    env = {**os.environ, "NODE_TEST_KEY": SECRET}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    return Going(process, out)


def on_three(nodes: Nodes, url: str, out: Path, *arguments: str, load: tuple[str, ...] = LOAD) -> Going:
    where = ("--on", f"ray:{nodes.address}", "--url", url, "--out", str(out), "--api-key-env", "NODE_TEST_KEY")
    return begin(nodes, out, *where, *load, *arguments)


def wait(seen: Callable[[], Any], limit_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (value := seen()):
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.1)
    return value


def processes(nodes: Nodes, index: int, *words: str) -> list[int]:
    """Those of a node whose command line has all the words."""
    found = []
    for pid in nodes.pids(index):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found += [pid] if all(word in line for word in words) else []
    return found


def clients(nodes: Nodes, index: int) -> list[int]:
    """The client processes of a node: children of its node process."""
    parents = processes(nodes, index, "loadgen.cluster.node")
    return [pid for pid in processes(nodes, index, "spawn_main") if _parent(pid) in parents]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def records_on_machines(nodes: Nodes, out: Path) -> bool:
    """Whether the last node has written a record of a measured request."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        there = Path(json.loads((out / "manifest.json").read_bytes())["cluster"]["nodes"][-1]["directory"])
        return any(b'"measured"' in path.read_bytes() for path in there.glob("requests*"))
    return False


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_bytes())
    return found


def codes(out: Path) -> set[str]:
    return {finding["code"] for finding in report(out)["verdict"]["findings"]}


def nothing_left(nodes: Nodes) -> None:
    """No process of a run stays on any node."""
    wait(lambda: not any(processes(nodes, index, "loadgen.cluster.node") for index in range(3)), 30.0)


def outcomes(out: Path) -> Counter[str]:
    return Counter(report(out)["requests"]["by_outcome"])


def share_of_last(table: RequestTable) -> RequestTable:
    return table.select(table.id % 3 == LAST)


@pytest.mark.always
def test_three_machines_and_one_process_play_the_same_load(nodes: Nodes, url: str, tmp_path: Path) -> None:
    load = (
        "--requests", "90", "--arrival", "poisson:60", "--output-tokens", "uniform:20:30", "--input-tokens",
        "uniform:20:60", "--seed", "5", "--warmup", "6",
    )  # fmt: skip
    three = on_three(nodes, url, tmp_path / "three", load=load)
    code, said = three.end()
    assert code == 0, said
    assert SECRET not in said
    one = begin(nodes, tmp_path / "one", "--url", url, "--out", str(tmp_path / "one"), *load)
    assert one.end()[0] == 0
    tables = [records.read(tmp_path / name)[0].measured() for name in ("three", "one")]
    for column in ("id", "scheduled_ns", "asked_prompt_tokens", "asked_tokens", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(tables[0], column), getattr(tables[1], column))
    _quantiles_are_of_all_records(tmp_path / "three")
    _clocks_are_right(tmp_path / "three", nodes)
    nothing_left(nodes)
    for root in (tmp_path, nodes.directory):
        files = [path for path in root.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if holds(path, SECRET.encode())]


def holds(path: Path, word: bytes) -> bool:
    with contextlib.suppress(OSError):  # the clock of a node is no ordinary file
        return word in path.read_bytes()
    return False


def _quantiles_are_of_all_records(out: Path) -> None:
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line.get("outcome") == "ok" and "id" in line and line["phase"] == "measured"]
    e2el_ms = [(line["done_ns"] - line["sent_ns"]) / 1e6 for line in measured]
    of_report = report(out)["metrics"]["e2el_ms"]
    assert of_report["n"] == len(measured) == 90
    assert [of_report[name] for name in ("p50", "p90", "p99")] == pytest.approx(
        np.percentile(e2el_ms, [50, 90, 99]).tolist(), rel=1e-14
    )  # the last bit goes by the order of additions
    assert sum("client" in line for line in lines) == 3


def _clocks_are_right(out: Path, nodes: Nodes) -> None:
    cluster = json.loads((out / "manifest.json").read_bytes())["cluster"]
    assert [node["name"] for node in cluster["nodes"]] == nodes.ips
    for index, node in enumerate(cluster["nodes"]):
        truth_ns = AHEAD_S * 10**9 if index == AHEAD else 0
        assert abs(node["clock_offset_ns"] - truth_ns) < 200_000
        assert node["together_events_per_s"] > 0 < node["alone_events_per_s"]
    assert cluster["strategy"] == "STRICT_SPREAD" and cluster["start_spread_ms"] >= 0


@pytest.mark.parametrize("what", ["actor", "node process"])
def test_a_machine_whose_process_is_killed_loses_no_finished_request(
    what: str, nodes: Nodes, url: str, tmp_path: Path
) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 3.0)
    word = "ray::Agent" if what == "actor" else "loadgen.cluster.node"
    for pid in processes(nodes, LAST, word):
        os.kill(pid, signal.SIGKILL)
    code, said = run.end()
    assert code == 4, said
    assert "NODE_LOST" in codes(run.out) and nodes.ips[LAST] in said
    counted = outcomes(run.out)
    assert sum(counted.values()) == 240 and counted["node_lost"] > 20
    last = share_of_last(records.read(run.out)[0].measured())
    assert last.ok.sum() > 5  # what it had finished came home all the same
    assert counted["ok"] - last.ok.sum() == 160  # the others finished
    assert not json.loads((run.out / "manifest.json").read_bytes())["cluster"]["nodes"][LAST]["left_there"]
    nothing_left(nodes)


def test_records_of_a_lost_machine_are_collected_when_it_is_back(nodes: Nodes, url: str, tmp_path: Path) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 3.0)
    nodes.kill_node(LAST)
    code, said = run.end()
    assert code == 4 and "NODE_LOST" in codes(run.out), said
    before = outcomes(run.out)
    assert before["node_lost"] == 80 and before["ok"] == 160
    nodes.restart(LAST)
    code, said = begin(nodes, run.out, str(run.out), "--on", f"ray:{nodes.address}", command="collect").end()
    assert code == 4 and "came home" in said, said
    after = outcomes(run.out)
    assert sum(after.values()) == 240
    assert after["ok"] > 165 and after["node_lost"] < 75
    assert "NODE_LOST" in codes(run.out)
    again, said = begin(nodes, run.out, str(run.out), "--on", f"ray:{nodes.address}", command="collect").end()
    assert again == 4 and "0 files" in said, said
    assert outcomes(run.out) == after


def test_a_killed_raylet_is_a_lost_machine(nodes: Nodes, url: str, tmp_path: Path) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 1.0)
    nodes.kill_raylet(LAST)
    code, said = run.end()
    assert code == 4 and "NODE_LOST" in codes(run.out), said
    assert outcomes(run.out)["ok"] >= 160
    nothing_left(nodes)
    nodes.restart(LAST)


def test_machines_stop_when_the_driver_is_killed_and_keep_their_records(nodes: Nodes, url: str, tmp_path: Path) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 3.0)
    for pid in processes(nodes, 0, "loadgen run", str(run.out)):
        os.kill(pid, signal.SIGKILL)
    run.process.communicate()
    nothing_left(nodes)
    code, said = begin(nodes, run.out, str(run.out), "--on", f"ray:{nodes.address}", command="collect").end()
    assert code == 4 and "3 files" in said, said
    assert outcomes(run.out)["ok"] > 30
    assert "KILLED" in codes(run.out)


def test_ctrl_c_ends_the_load_on_all_machines_in_good_order(nodes: Nodes, url: str, tmp_path: Path) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 2.0)
    for pid in processes(nodes, 0, "loadgen run", str(run.out)):
        os.kill(pid, signal.SIGINT)
    code, said = run.end()
    assert code == 130 and {"INTERRUPTED"} <= codes(run.out) and "NODE_LOST" not in codes(run.out), said
    assert 20 < outcomes(run.out)["ok"] < 240 and outcomes(run.out)["node_lost"] == 0
    nothing_left(nodes)


def test_a_cut_of_five_seconds_loses_nothing(nodes: Nodes, url: str, tmp_path: Path) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 1.0)
    nodes.cut(LAST)
    time.sleep(5.0)
    nodes.heal(LAST)
    code, said = run.end()
    assert code in (0, 4), said
    assert "NODE_LOST" not in codes(run.out)
    assert sum(outcomes(run.out).values()) == 240 and outcomes(run.out)["node_lost"] == 0


def test_a_machine_that_stays_cut_off_is_lost(nodes: Nodes, url: str, tmp_path: Path) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 1.0)
    nodes.cut(LAST)
    try:
        code, said = run.end()
    finally:
        nodes.heal(LAST)
        nodes.restart(LAST)
    assert code == 4 and "NODE_LOST" in codes(run.out), said
    assert outcomes(run.out)["ok"] >= 160 and sum(outcomes(run.out).values()) == 240
    nothing_left(nodes)


def test_a_slow_machine_is_told(nodes: Nodes, url: str, tmp_path: Path) -> None:
    run = on_three(nodes, url, tmp_path / "run")
    run.wait_for_load(nodes, 1.0)
    slow = clients(nodes, LAST)
    for number, seconds in ((signal.SIGSTOP, 2.0), (signal.SIGCONT, 0.0)):
        for pid in slow:
            os.kill(pid, number)
        time.sleep(seconds)
    code, said = run.end()
    assert slow and code in (0, 4), said
    assert outcomes(run.out)["ok"] == 240
    assert codes(run.out) & {"SEND_LAG", "LOOP_LAG"}


def test_a_full_disk_on_one_machine_stops_the_load_and_loses_nothing(nodes: Nodes, url: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine refuses to mount a tmpfs")
    try:
        nodes.kill_node(LAST)
        nodes.start(LAST, small)
        run = on_three(nodes, url, tmp_path / "run", load=("--requests", "3000", *LOAD[2:]))
        run.wait_for_load(nodes, 0.0)
        there = Path(json.loads((run.out / "manifest.json").read_bytes())["cluster"]["nodes"][LAST]["directory"])
        with contextlib.suppress(OSError), (there / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(4096))
                filler.flush()
        code, said = run.end()
        assert code == 2 and f"{nodes.ips[LAST]}: No space left on device" in said, said
        kept = records.read(run.out)[0].measured()
        assert all(int((kept.id % 3 == share).sum()) > 0 for share in range(3))
        nothing_left(nodes)
    finally:
        nodes.kill_node(LAST)
        subprocess.run(["umount", str(small)], check=True)
        del nodes.tmpdirs[LAST]
        nodes.start(LAST)


def test_a_sweep_and_a_search_use_the_same_machines(nodes: Nodes, url: str, tmp_path: Path) -> None:
    where = ("--on", f"ray:{nodes.address}", "--url", url, "--output-tokens", "4", "--nodes", "2")
    swept = begin(
        nodes, tmp_path / "sweep", "--rates", "10", "20", "--duration", "2", "--no-calibrate", "--out",
        str(tmp_path / "sweep"), *where, command="sweep",
    )  # fmt: skip
    code, said = swept.end()
    assert code == 0 and said.count("machines send the load") == 1, said
    for name in ("rate-10", "rate-20"):
        assert len(json.loads((tmp_path / "sweep" / name / "manifest.json").read_bytes())["cluster"]["nodes"]) == 2
    search = begin(
        nodes, tmp_path / "search", "--slo", "ttft_ms=2000", "--budget-minutes", "0.5", "--out",
        str(tmp_path / "search"), *where, command="search",
    )  # fmt: skip
    code, said = search.end()
    assert code == 0, said
    probes = json.loads((tmp_path / "search" / "search.json").read_bytes())["probes"]
    assert len(probes) >= 2 and said.count("machines send the load") == 1


@pytest.mark.parametrize(
    ("code", "arguments", "expected"),
    [
        (3, ("--on", "ray:10.77.255.9:6379", "--url", "http://h:1"), "there is no Ray cluster at 10.77.255.9:6379"),
        (3, ("--on", "ray:ADDRESS", "--url", "http://127.0.0.1:8123"), "does not reach the server"),
        (3, ("--on", "ray:ADDRESS", "--url", "URL", "--workers", "999"), "--workers is 999"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_no_actor(
    code: int, arguments: tuple[str, ...], expected: str, nodes: Nodes, url: str, tmp_path: Path
) -> None:
    typed = [{"ray:ADDRESS": f"ray:{nodes.address}", "URL": url}.get(word, word) for word in arguments]
    local = [LOADGEN, "serve", "--port", "8123"]  # as seen from the driver alone
    with serving(nodes.command(0, *local)):
        run = begin(nodes, tmp_path / "run", *typed, "--out", str(tmp_path / "run"), "--no-calibrate")
        got, said = run.end()
    errors = [line for line in said.splitlines() if line.startswith("loadgen: ")]
    assert got == code and len(errors) == 1 and expected in errors[0] and "Traceback" not in said, said
    assert not (tmp_path / "run").exists()
    nothing_left(nodes)
