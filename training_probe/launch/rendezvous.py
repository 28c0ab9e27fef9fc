"""Several nodes without a cluster: the same command is started on each of them, as with torchrun, and they meet at an
address of node 0.

Node 0 decides, measures and keeps the results (`gathered`); the others do what it orders and tell what their processes
wrote (`follow`). The orders are those of node.py. Whatever a follower is ordered, it starts nothing but the workers of
this package.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from backends import exit_codes
from backends.exit_codes import Stopped
from backends.gpus import Gpu
from backends.launch import WITHOUT_P2P
from backends.untrusted import UNDECODABLE, printable
from loadgen.cluster.link import NodeLost
from loadgen.cluster.ray_cluster import ClusterError
from loadgen.config import ConfigError
from loadgen.event_loop import StopSignals
from loadgen.rundir import package_version
from training_probe.grid import Cell, GridError
from training_probe.launch import node
from training_probe.launch.channel import HANDSHAKE_S, TOKEN, Channel, ChannelError, take_token
from training_probe.launch.cluster import Placed, RunCell, check_able, gpus_of
from training_probe.launch.node import Facts, Inspect, Node, Order, Reply, StartRanks, Status
from training_probe.launch.nodes import Nodes
from training_probe.launch.runner import INTERPRETED, ONE_QUEUE, PROCESSES_A_CORE, NodeRank, torchrun

JOIN_S = 300.0  # people start the commands one after another
RETRY_S, CONNECT_S = 0.5, 5.0
GREETED_AT_ONCE = 64
REFUSED_CHARACTERS = 900  # the sentence may be the first message, which is short
MODULES = ("training_probe.worker", "training_probe.worker.micro")  # what a follower starts
VARIABLES = {ONE_QUEUE, INTERPRETED, *WITHOUT_P2P}  # and what it sets for them

Say = Callable[[str], None]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a follower. asked: a digest of the options that must be equal on all nodes."""

    rank: int
    version: str
    asked: str


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Its answer."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="Over"):
    """Node 0 needs the follower no more. refused: why it measures nothing, a sentence."""

    refused: str | None = None


_FOR_FOLLOWERS: msgspec.msgpack.Decoder[Order | Welcome | Goodbye] = msgspec.msgpack.Decoder(Order | Welcome | Goodbye)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_HELLO = msgspec.msgpack.Decoder(Hello)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One node's part in it. address: of node 0, as numbers; token: what they share; asked: as in Hello."""

    nodes: int
    rank: int
    address: str
    port: int
    token: str = field(repr=False)
    asked: str

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def meeting(nodes: int, rank: int, endpoint: tuple[str, int], asked: str) -> Meeting:
    """A node's part, with the token of its environment. endpoint: host and port; asked: the options that must be equal
    on all nodes. Raises ConfigError."""
    host, port = endpoint
    try:
        address = str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"{host} of --rdzv-endpoint has no IPv4 address here ({error.strerror or error}); name one of node 0."
        ) from None
    try:
        token = take_token()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    digest = hashlib.sha256(f"{nodes} {asked}".encode()).hexdigest()
    return Meeting(nodes=nodes, rank=rank, address=address, port=port, token=token, asked=digest)


# On node 0.


class _Local:
    """Node 0 itself."""

    def __init__(self, here: Node, host: str) -> None:
        self.host = host
        self._here = here

    def ask(self, order: Order, limit_s: float) -> Reply:
        try:
            return self._here.answer(order)
        except OSError as error:
            raise NodeLost(f"{error.filename or 'input or output'}: {error.strerror or error}") from None


class _Remote:
    """A follower."""

    def __init__(self, channel: Channel) -> None:
        self.host = channel.other_host
        self._channel = channel

    def ask(self, order: Order, limit_s: float) -> Reply:
        try:
            self._channel.send(_encode(order))
            reply = _REPLY.decode(self._channel.receive(limit_s))
        except ChannelError as error:
            self._channel.close()
            raise NodeLost(str(error)) from None
        except UNDECODABLE:
            raise NodeLost("its answer cannot be read") from None
        names = () if isinstance(reply, Facts) else (*reply.grown, *reply.files)
        if isinstance(reply, Facts) != isinstance(order, Inspect) or not all(map(is_plain, names)):
            raise NodeLost("its answer is none to what it was asked")
        return reply


class MetNodes:
    """The nodes that met. Each cell runs on all of them, one cell after another."""

    def __init__(self, nodes: Nodes) -> None:
        """Raises NodeLost."""
        self.nodes, self._found = nodes, nodes.look()
        self.nodes_per_cell = len(self._found)

    def gpus(self) -> int:
        """The most that a cell may have: on each node as many as on the poorest."""
        return self.nodes_per_cell * min(len(facts.gpu_ids) for facts in self._found)

    def gpus_of(self, ranks: int) -> list[Gpu]:
        """Those that so many ranks get, in their order."""
        return gpus_of(self._found, ranks // self.nodes_per_cell)

    def devices(self) -> list[Gpu]:
        return gpus_of(self._found, max(len(facts.gpu_ids) for facts in self._found))

    def check(self, packages: tuple[str, ...]) -> None:
        """That every node has these modules. Raises ConfigError and ClusterError."""
        try:
            found = self.nodes.look(packages)
        except NodeLost as lost:
            raise ClusterError(f"{lost}.") from None
        for host, facts in zip(self.nodes.hosts, found, strict=True):
            check_able(host, facts)

    def check_cells(self, cells: Sequence[Cell]) -> None:
        """That every node has the GPUs, or the cores, that each cell needs. Raises GridError."""
        for cell in cells:
            self.check_ranks(cell.gpus, on_cpu=cell.device == "cpu")

    def check_ranks(self, ranks: int, *, on_cpu: bool) -> None:
        """The same of so many processes. Raises GridError."""
        each = ranks // self.nodes_per_cell
        for number, (host, facts) in enumerate(zip(self.nodes.hosts, self._found, strict=True)):
            has = PROCESSES_A_CORE * facts.cores if on_cpu else len(facts.gpu_ids)
            if each > has:
                cores = f"{facts.cores} core{'' if facts.cores == 1 else 's'}"
                can = f"its {cores} can take {has}" if on_cpu else f"it has {has or 'none'} that can be used"
                what = ("process" if each == 1 else "processes") if on_cpu else ("GPU" if each == 1 else "GPUs")
                raise GridError(
                    f"--gpus {ranks} is {each} {what} on each of {self.nodes_per_cell} nodes; node {number} ({host}) "
                    f"cannot give them: {can}. Name fewer."
                )

    def each(self, cells: Sequence[Cell], run: RunCell, cancelled: threading.Event) -> None:
        """Raises Stopped when cancelled, and NodeLost where cells are left that would need a lost node."""
        for cell in cells:
            if cancelled.is_set():
                raise Stopped
            if self.nodes.lost:
                raise NodeLost(f"{', '.join(sorted(self.nodes.lost))} is lost, and the cells need all nodes")
            run(cell, Placed(self.nodes, self.gpus_of(cell.gpus) if cell.device == "cuda" else []))


@contextlib.contextmanager
def gathered(meeting: Meeting, say: Say) -> Iterator[MetNodes]:
    """All nodes, once they are there. They are let go at the end, and told of an error that ended the block. Raises
    ConfigError and ClusterError."""
    proven: list[Channel] = []
    refused: str | None = None
    with node.here(meeting.address) as here:
        try:
            channels = _gather(meeting, proven, say)
            try:
                fleet = MetNodes(Nodes([_Local(here, meeting.address), *map(_Remote, channels)]))
            except NodeLost as lost:
                raise ClusterError(f"{lost}.") from None
            yield fleet
        except Exception as error:
            refused = str(error)[:REFUSED_CHARACTERS]
            raise
        finally:
            for channel in proven:
                with contextlib.suppress(ChannelError):
                    channel.send(_encode(Goodbye(refused=refused)))
                channel.close()


def _gather(meeting: Meeting, proven: list[Channel], say: Say) -> list[Channel]:
    """The followers, in the order of ranks; `proven` gets each channel whose other side has the token."""
    came: dict[int, Channel] = {}
    met: queue.SimpleQueue[tuple[Channel, Hello] | tuple[str, str]] = queue.SimpleQueue()
    greeted, strangers = 0, set[str]()
    deadline = time.monotonic() + JOIN_S
    with _listening(meeting) as listener:
        here = " (which only this machine reaches)" if ipaddress.ip_address(meeting.address).is_loopback else ""
        say(f"node 0 waits at {meeting.where}{here} for {_ranks(set(range(1, meeting.nodes)))}")
        while len(came) < meeting.nodes - 1:
            if time.monotonic() > deadline:
                missing = _ranks(set(range(1, meeting.nodes)) - set(came))
                raise ClusterError(
                    f"{missing} did not come to {meeting.where} within {JOIN_S:g} s; start the same command "
                    "there, with its own --node-rank."
                )
            if greeted < GREETED_AT_ONCE and select.select([listener], [], [], RETRY_S / 10)[0]:
                with contextlib.suppress(TimeoutError, ConnectionError):  # it may have thought better of it
                    connection, _ = listener.accept()
                    greeted += 1
                    threading.Thread(target=_greet, args=(connection, meeting.token, met), daemon=True).start()
            with contextlib.suppress(queue.Empty):
                first, second = met.get(timeout=RETRY_S / 10)
                greeted -= 1
                if isinstance(first, Channel):
                    assert isinstance(second, Hello)
                    proven.append(first)
                    _let_in(meeting, came, first, second)
                    say(f"node {second.rank} is {first.other_host}")
                elif first not in strangers:
                    strangers.add(first)
                    say(f"refused a connection from {first}: {second}")
    return [channel for _, channel in sorted(came.items())]


@contextlib.contextmanager
def _listening(meeting: Meeting) -> Iterator[socket.socket]:
    """Raises ConfigError."""
    try:
        listener = socket.create_server((meeting.address, meeting.port), backlog=meeting.nodes)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen on {meeting.where} ({os.strerror(error.errno or 0)}); --rdzv-endpoint must be an "
            "address of the machine with --node-rank 0, and a port that is free there."
        ) from None
    with listener:
        listener.settimeout(RETRY_S)
        yield listener


def _greet(
    connection: socket.socket, token: str, met: queue.SimpleQueue[tuple[Channel, Hello] | tuple[str, str]]
) -> None:
    """In a thread of its own: whoever says nothing holds up nobody else."""
    host = "?"
    try:
        host = str(connection.getpeername()[0])
        channel = Channel(connection, token, listens=True)
        met.put((channel, _HELLO.decode(channel.receive(HANDSHAKE_S))))
    except (ChannelError, OSError, *UNDECODABLE) as error:
        connection.close()
        met.put((host, str(error) if isinstance(error, ChannelError) else "its greeting cannot be read"))


def _let_in(meeting: Meeting, came: dict[int, Channel], channel: Channel, hello: Hello) -> None:
    """Raises ConfigError for a node that was started wrongly."""
    host = channel.other_host
    if hello.version != package_version():
        raise ConfigError(
            f"node {host} has llm-dissect {printable(hello.version, 40)} and node 0 {package_version()}; install the "
            "same version on both."
        )
    if hello.asked != meeting.asked:
        raise ConfigError(
            f"node {host} was started with other options than node 0; start the same command on every node, with "
            "another --node-rank."
        )
    if not 0 < hello.rank < meeting.nodes or (hello.rank in came and not came[hello.rank].is_over()):
        raise ConfigError(
            f"node {host} came with --node-rank {hello.rank}, which another one has; give each node its own."
        )
    try:
        channel.send(_encode(Welcome()))
    except ChannelError:
        return  # it is gone, and may come again
    came[hello.rank] = channel


def _ranks(numbers: set[int]) -> str:
    return f"node{'' if len(numbers) == 1 else 's'} {', '.join(map(str, sorted(numbers)))}"


# On the others.


def follow(meeting: Meeting, say: Say) -> int:
    """Does what node 0 orders, until it needs this node no more; the exit code. Raises ConfigError and ClusterError."""
    with contextlib.closing(join(meeting, say)) as channel, StopSignals() as stop:
        stop.on_signal(channel.abort)
        say(f"joined node 0 at {meeting.where} as node {meeting.rank} of {meeting.nodes}; results are kept there")
        try:
            with node.here(channel.own_host) as here:
                refused = obey(channel, here, meeting)
        except (ChannelError, *UNDECODABLE) as error:
            if stop.exit_code is not None:
                say("stopped; what ran here was ended")
                return stop.exit_code
            why = str(error) if isinstance(error, ChannelError) else "what it says cannot be read"
            raise ClusterError(f"node 0 at {meeting.where} was lost: {why}; what ran here was ended.") from None
    if refused is not None:
        raise ConfigError(f"node 0 ended: {refused}")
    say("node 0 is done")
    return exit_codes.OK


def obey(channel: Channel, here: Node, meeting: Meeting) -> str | None:
    """Until the end; why node 0 measures nothing, a sentence."""
    while True:
        order = _FOR_FOLLOWERS.decode(channel.receive())
        if isinstance(order, Goodbye):
            return order.refused
        if isinstance(order, Welcome):
            continue
        if isinstance(order, StartRanks) and not is_ours(order, here, meeting):
            channel.send(_encode(Status(problem="it starts nothing but the workers of training_probe")))
        else:
            channel.send(_encode(here.answer(order)))


def is_ours(order: StartRanks, here: Node, meeting: Meeting) -> bool:
    """Whether an order starts what this node would start by itself: a worker of this package under torchrun, in a
    directory of its own, as this node of so many."""
    if not all(map(is_plain, (order.name, *order.files))) or not VARIABLES.issuperset(order.env):
        return False
    try:
        master, port = (order.argv[order.argv.index(flag) + 1] for flag in ("--master-addr", "--master-port"))
        this = NodeRank(rank=meeting.rank, nodes=meeting.nodes, master=str(ipaddress.ip_address(master)))
        known = [
            torchrun(
                python=sys.executable, processes=order.ranks, port=int(port), module=module,
                directory=here.root / order.name, node=this,
            )
            for module in MODULES
        ]  # fmt: skip
    except (ValueError, IndexError):
        return False
    return order.argv in known


def is_plain(name: str) -> bool:
    """Whether a name of a file stays in its directory."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def join(meeting: Meeting, say: Say) -> Channel:
    """Raises ConfigError and ClusterError."""
    connection = connected(meeting, say)
    hello = Hello(rank=meeting.rank, version=package_version(), asked=meeting.asked)
    try:
        channel = Channel(connection, meeting.token, listens=False)
        channel.send(_encode(hello))
        answer = _FOR_FOLLOWERS.decode(channel.receive(JOIN_S))
    except (ChannelError, *UNDECODABLE) as error:
        connection.close()
        why = str(error) if isinstance(error, ChannelError) else "its answer cannot be read"
        raise ConfigError(
            f"node 0 at {meeting.where} did not let this node in: {why}; {TOKEN} must be the same on every node."
        ) from None
    if isinstance(answer, Goodbye):
        channel.close()
        raise ConfigError(f"node 0 ended: {answer.refused or 'it needs this node no more.'}")
    return channel


def connected(meeting: Meeting, say: Say) -> socket.socket:
    """As soon as node 0 listens. Raises ClusterError."""
    deadline, waits = time.monotonic() + JOIN_S, False
    while True:
        try:
            connection = socket.create_connection((meeting.address, meeting.port), CONNECT_S)
            if connection.getsockname() != connection.getpeername():  # a port of this machine can meet itself
                return connection
            connection.close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"node 0 does not answer at {meeting.where} ({error.strerror or error}) since {JOIN_S:g} s; start "
                    "the same command there with --node-rank 0."
                ) from None
        if not waits:
            say(f"node {meeting.rank} waits for node 0 at {meeting.where}")
            waits = True
        time.sleep(RETRY_S)
