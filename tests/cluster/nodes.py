"""A real Ray cluster of three "machines" on one: network namespaces on a bridge, each with a Ray node of its own, the
second with a monotonic clock far ahead of the others'. Needs root on Linux, iproute2 and util-linux."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NODES = 3
AHEAD = 1  # the node whose monotonic clock is ahead
AHEAD_S = 100_000
CPUS = 4  # that each node tells Ray it has
# Of nodes and drivers alike. With a token in the user's home Ray 2.60 protects the head and then keeps its nodes out.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
OBJECT_STORE_BYTES = 100_000_000
GCS_PORT = 6379
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 30.0
NEEDED = ("ip", "unshare", "nsenter", "umount")


class NodesError(Exception):
    """A node does not start or does not end, or its network cannot be made."""


@dataclass(frozen=True)
class Nodes:
    """The cluster; node 0 is the head, and without it there is no cluster. A test that cuts or kills a node heals or
    restarts it, for the tests after it see the same cluster.

    address: where Ray's control store answers, within the nodes. ips, namespaces: one each. directory: Ray's sessions
    and logs, and the clock of the node that is ahead. tmpdirs: TMPDIR of the nodes that have
    their own.
    """

    address: str
    ips: list[str]
    namespaces: list[str]
    bridge: str
    directory: Path
    tmpdirs: dict[int, Path]

    def command(self, index: int, *argv: str) -> list[str]:
        """What runs `argv` on a node: in its network, and by its clock."""
        clock = ["nsenter", f"--time={self.clock}"] if index == AHEAD else []
        return ["ip", "netns", "exec", self.namespaces[index], *clock, *argv]

    @property
    def clock(self) -> Path:
        return self.directory / "clock"

    def pids(self, index: int) -> list[int]:
        """All processes in a node's network, a driver that a test started there too."""
        return [int(pid) for pid in _output("ip", "netns", "pids", self.namespaces[index]).split()]

    def start(self, index: int, tmpdir: Path | None = None) -> None:
        """Starts a node's processes; they keep `tmpdir` as TMPDIR when the node is restarted. Raises NodesError."""
        if tmpdir is not None:
            self.tmpdirs[index] = tmpdir
        place = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"] if index == 0 else []
        argv = self.command(
            index, str(Path(sys.executable).with_name("ray")), "start", *(place or [f"--address={self.address}"]),
            f"--node-ip-address={self.ips[index]}", f"--num-cpus={CPUS}", "--disable-usage-stats",
            f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={self.directory / str(index)}",
        )  # fmt: skip
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= ENVIRONMENT
        if index in self.tmpdirs:
            env["TMPDIR"] = str(self.tmpdirs[index])
        log = self.directory / f"start-{index}.log"  # a file: Ray's daemons would hold a pipe open
        with log.open("wb") as out:
            # A session of its own: who ends the process group of a test does not end the node.
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                code: int | str = process.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = f"none in {START_TIMEOUT_S:.0f} s"
        if code != 0:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise NodesError(
                f"Node {index} did not start (exit status: {code}); the end of what `ray start` said:\n{end}"
            )

    def kill_raylet(self, index: int) -> None:
        """Kills Ray's own process on a node; its workers see that and end by themselves. Raises NodesError."""
        raylets = [pid for pid in self.pids(index) if _name(pid) == "raylet"]
        if not raylets:
            raise NodesError(f"Node {index} has no raylet to kill; start the node first.")
        for pid in raylets:
            _kill(pid)
        self._wait_gone(index, set(raylets))

    def kill_node(self, index: int) -> None:
        """Kills all processes of a node, a driver that a test started there too. Raises NodesError."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while pids := self.pids(index):  # again, for one may have started another meanwhile
            if time.monotonic() > deadline_s:
                raise NodesError(f"Processes of node {index} do not end within {END_TIMEOUT_S:.0f} s: {pids}.")
            for pid in pids:
                _kill(pid)
            time.sleep(0.05)

    def restart(self, index: int) -> None:
        """Starts a node again, after it ends what is left of it. The head comes back as a new cluster, which the
        other nodes join when they are restarted too. Raises NodesError."""
        self.kill_node(index)
        self.start(index)

    def cut(self, index: int) -> None:
        """Takes a node off the network, as a pulled cable does: no connection is closed, no packet arrives."""
        _output("ip", "link", "set", self.namespaces[index], "down")

    def heal(self, index: int) -> None:
        """Puts a node back on the network. Ray gives up a node that was cut for long: restart it then."""
        _output("ip", "link", "set", self.namespaces[index], "up")

    def _wait_gone(self, index: int, gone: set[int]) -> None:
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while left := gone & set(self.pids(index)):
            if time.monotonic() > deadline_s:
                raise NodesError(f"Processes of node {index} do not end within {END_TIMEOUT_S:.0f} s: {sorted(left)}.")
            time.sleep(0.05)


def problem() -> str | None:
    """Why no cluster can be made here, if so."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed beside this Python; run `make test-cluster`"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (Debian: iproute2 and util-linux)"
    tried = subprocess.run(["unshare", "--net", "--time", "--monotonic=1", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine refuses network or time namespaces: {tried.stderr.strip()}"
    return None


@contextlib.contextmanager
def three_nodes(tmpdirs: Mapping[int, Path] | None = None) -> Iterator[Nodes]:
    """A cluster whose three nodes have joined; it ends with the block, and so does all that runs in its networks.
    `tmpdirs` are the nodes' TMPDIR, by index, where a node has its own.

    Raises NodesError where a node does not start or its network cannot be made.
    """
    with contextlib.ExitStack() as stack:
        bridge, net = _bridge(stack)
        directory = Path(tempfile.mkdtemp(prefix=f"{bridge}-", dir="/tmp"))  # short: it holds Ray's Unix sockets
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        ips = [f"{net}.{index + 1}" for index in range(NODES)]
        names = [f"{bridge}-{index}" for index in range(NODES)]
        nodes = Nodes(f"{ips[0]}:{GCS_PORT}", ips, names, bridge, directory, dict(tmpdirs or {}))
        nodes.clock.touch()
        _output("unshare", f"--time={nodes.clock}", f"--monotonic={AHEAD_S}", "true")
        stack.callback(_output, "umount", str(nodes.clock))
        for index in range(NODES):
            _join(stack, nodes, index)
        for index in range(NODES):
            nodes.start(index)
        yield nodes


def _bridge(stack: contextlib.ExitStack) -> tuple[str, str]:
    """The bridge between the nodes and the first three numbers of its addresses; a left-over keeps what it has."""
    for number in ((os.getpid() + step) % 256 for step in range(256)):
        bridge, net = f"dissect{number}", f"10.77.{number}"
        if f" {net}." in _output("ip", "-4", "-oneline", "address") or f"{bridge}-" in _output("ip", "netns", "list"):
            continue
        if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True).returncode == 0:
            break
    else:
        raise NodesError("Every network from 10.77.0 to 10.77.255 is taken, or bridges are refused; see `ip address`.")
    stack.callback(_output, "ip", "link", "delete", bridge)
    _output("ip", "address", "add", f"{net}.254/24", "dev", bridge)
    _output("ip", "link", "set", bridge, "up")
    if shutil.which("iptables"):  # Docker lets nothing cross a bridge that is not its own
        rule = ["FORWARD", "--in-interface", bridge, "--out-interface", bridge, "--jump", "ACCEPT"]
        _output("iptables", "--wait", "--insert", *rule)
        stack.callback(_output, "iptables", "--wait", "--delete", *rule)
    return bridge, net


def _join(stack: contextlib.ExitStack, nodes: Nodes, index: int) -> None:
    """Makes a node's network and plugs it into the bridge."""
    name = nodes.namespaces[index]
    _output("ip", "netns", "add", name)
    stack.callback(_output, "ip", "netns", "delete", name)
    stack.callback(nodes.kill_node, index)
    _output("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    # Processes that end a moment later would keep the network, and with it the cable, for as long.
    stack.callback(_output, "ip", "link", "delete", name)
    _output("ip", "link", "set", name, "master", nodes.bridge, "up")
    _output("ip", "-netns", name, "address", "add", f"{nodes.ips[index]}/24", "dev", "eth0")
    _output("ip", "-netns", name, "link", "set", "eth0", "up")
    _output("ip", "-netns", name, "link", "set", "lo", "up")


def _output(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise NodesError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
