"""Ray, the only module of loadgen that imports it: the machines of a cluster, and an agent on each.

An agent is an actor that starts a node process and passes its messages on. No token, event or request goes through it:
those stay between the node's client processes and the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.exit_codes import lacking
from backends.untrusted import printable
from loadgen import child_env
from loadgen.cluster import records_home
from loadgen.cluster.link import NodeLost
from loadgen.cluster.records_home import Written
from loadgen.config import ConfigError
from loadgen.target import TransportError

CONNECT_S = 5.0
PLACE_S = 60.0  # until the machines have a free core for the client
RECEIVE_S = 5.0
CALL_S = 20.0  # as long as a node process waits for the driver: messages.SILENCE_S
LENGTH = struct.Struct("!I")
INSTALL = "pip install 'llm-dissect[ray]'"


class ClusterError(TransportError):
    """The cluster cannot be used. One sentence, with what to do."""


@dataclass(frozen=True)
class RayMachine:
    """A machine of the cluster, as Ray knows it. busy: whether Ray has no free core there."""

    id: str
    host: str
    cpus: float
    gpus: float


def check_installed() -> None:
    """Raises ConfigError where Ray is not installed."""
    if (why := lacking("ray")) is not None:
        raise ConfigError(f"--on ray cannot be used: {why}.")


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Ray's driver is this process within the block. address: HOST:PORT; None: the cluster that this machine is part
    of. Raises ConfigError and ClusterError."""
    check_installed()
    if address is not None:
        _check_answers(address)
    import ray

    try:
        ray.init(
            address=address or "auto", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False,
            include_dashboard=False,
        )  # fmt: skip
    except Exception as error:  # Ray raises what it likes
        raise ClusterError(_why_not(address, error)) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
        raise ClusterError(
            f"there is no Ray cluster at {address} ({reason}); start one with `ray start --head`, or name its address "
            "as --on ray:HOST:PORT."
        ) from None


def _why_not(address: str | None, error: Exception) -> str:
    text = printable(" ".join(str(error).split()))[:300]
    if "ersion" in text and "mismatch" in text.lower():
        return f"this machine and the cluster have different versions of Ray or Python: {text}"
    if isinstance(error, ConnectionError) and address is None:
        return (
            "no Ray cluster runs on this machine; start one with `ray start --head`, or name one as --on ray:HOST:PORT."
        )
    where = "of this machine" if address is None else f"at {address}"
    return f"the Ray cluster {where} cannot be joined; run this on one of its machines ({text})."


def machines() -> list[RayMachine]:
    """Those that are alive, the driver's first, then by address. One that was started again may still be listed as it
    was before, too: the latest counts."""
    import ray

    own = ray.util.get_node_ip_address()
    alive = {}
    for node in ray.nodes():
        if node["Alive"]:
            host, has = node["NodeManagerAddress"], node["Resources"]
            alive[host] = RayMachine(node["NodeID"], host, has.get("CPU", 0.0), has.get("GPU", 0.0))
    return sorted(alive.values(), key=lambda machine: (machine.host != own, _by_number(machine.host)))


def _by_number(host: str) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        return tuple(socket.inet_aton(host))
    return tuple(host.encode())


# On each machine.


@dataclass
class Agent:
    """The actor. It serves one driver; several of its methods run at a time."""

    process: asyncio.subprocess.Process | None = None
    messages: list[bytes] = field(default_factory=list)
    errors: Any = None

    async def begin(self, host: str) -> None:
        """Starts the node process. Raises OSError."""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the actor lives
        self.news, self.over = asyncio.Event(), False
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadgen.cluster.node", host, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=self.errors, env={**os.environ, **child_env.environment(os.environ)},
            start_new_session=True,
        )  # fmt: skip
        self._task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = LENGTH.unpack(await self.process.stdout.readexactly(LENGTH.size))
                self.messages.append(await self.process.stdout.readexactly(size))
                self.news.set()
        await self.process.wait()
        self.over = True
        self.news.set()

    async def send(self, message: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(OSError):  # its end is told by `receive`
            self.process.stdin.write(LENGTH.pack(len(message)) + message)
            await self.process.stdin.drain()

    async def receive(self) -> tuple[list[bytes], str | None]:
        """What the node process has sent, and how it ended, a clause, once all that it sent is taken."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), RECEIVE_S)
        messages, self.messages = self.messages, []
        if self.over and not messages:
            return [], self._end()
        if not self.over:
            self.news.clear()
        return messages, None

    def _end(self) -> str:
        assert self.process is not None and self.process.returncode is not None
        code = self.process.returncode
        how = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        self.errors.seek(0)
        last = self.errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f"{how}: {printable(last[-1])}" if last else how

    async def written(self, directory: str) -> list[Written]:
        return await asyncio.to_thread(records_home.written, Path(directory))

    async def read(self, directory: str, name: str, offset: int) -> bytes:
        return await asyncio.to_thread(records_home.chunk, Path(directory), name, offset)

    async def remove(self, directory: str) -> None:
        await asyncio.to_thread(records_home.remove, Path(directory))


# On the driver.


@dataclass
class RayMember:
    """An agent as the driver sees it; `Member` of link.py."""

    name: str
    host: str
    actor: Any

    async def _call(self, method: str, *arguments: object, limit_s: float = CALL_S) -> Any:
        import ray

        try:
            return await asyncio.wait_for(getattr(self.actor, method).remote(*arguments), limit_s)
        except TimeoutError:
            raise NodeLost(f"no answer for {limit_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise NodeLost(_last_line(error)) from None
        except ray.exceptions.RayError as error:
            raise NodeLost(_how_lost(error)) from None

    async def begin(self) -> None:
        """Starts the node process. Raises NodeLost."""
        await self._call("begin", self.host, limit_s=PLACE_S)

    async def send(self, message: bytes) -> None:
        await self._call("send", message)

    async def receive(self) -> list[bytes]:
        messages, end = await self._call("receive")
        if end is not None:
            raise NodeLost(end)
        return list(messages)

    async def again(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.actor)
        found = {machine.host: machine for machine in await asyncio.to_thread(machines)}.get(self.host)
        if found is None:
            raise NodeLost("its machine has left the cluster")
        there = NodeAffinitySchedulingStrategy(found.id, soft=False)
        self.actor = _agent(0, there)

    async def written(self, directory: str) -> list[Written]:
        found: list[Written] = await self._call("written", directory)
        return found

    async def read(self, directory: str, name: str, offset: int) -> bytes:
        data: bytes = await self._call("read", directory, name, offset)
        return data

    async def remove(self, directory: str) -> None:
        await self._call("remove", directory)


def _last_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return printable(f"{type(cause).__name__}: {cause}".splitlines()[0])


def _how_lost(error: Exception) -> str:
    import ray

    if isinstance(error, ray.exceptions.ActorUnschedulableError):
        return "its machine has left the cluster"
    if isinstance(error, ray.exceptions.ActorDiedError):
        text = str(error)
        if "No module named" in text or "ModuleNotFoundError" in text:
            return f"llm-dissect is not installed there; install it there with {INSTALL}"
        return "its machine has left the cluster" if "node" in text and "died" in text.lower() else "its actor died"
    return f"Ray cannot reach it ({type(error).__name__})"


def _agent(cpus: float, there: Any) -> Any:
    """A new actor, placed by a scheduling strategy."""
    import ray

    return ray.remote(Agent).options(scheduling_strategy=there, num_cpus=cpus, max_restarts=0).remote()


@contextlib.asynccontextmanager
async def placed(chosen: Sequence[RayMachine], strategy: str) -> AsyncIterator[list[RayMember]]:
    """An agent on each of the machines, which may be there more than once; none is left behind. Raises ClusterError."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = [{"CPU": 1.0, f"node:{machine.host}": 0.001} for machine in chosen]
    group = await asyncio.to_thread(placement_group, bundles, strategy=strategy)
    members: list[RayMember] = []
    try:
        if not await asyncio.to_thread(group.wait, PLACE_S):
            raise ClusterError(
                f"the cluster has no free core on every one of {', '.join(m.host for m in chosen)} within "
                f"{PLACE_S:g} s; wait for what runs there, or name fewer --nodes."
            )
        for number, machine in enumerate(chosen):
            there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            actor = _agent(1, there)
            again = sum(other is machine for other in chosen) > 1
            name = f"{machine.host} ({number + 1})" if again else machine.host
            members.append(RayMember(name, machine.host, actor))
        for member, end in zip(
            members, await asyncio.gather(*(m.begin() for m in members), return_exceptions=True), strict=True
        ):
            if isinstance(end, NodeLost):
                raise ClusterError(f"the client cannot be started on {member.name}: {end}.")
            if end is not None:
                raise end
        yield members
    finally:
        for member in members:
            with contextlib.suppress(Exception):
                ray.kill(member.actor)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(remove_placement_group, group)


def at(machine: RayMachine) -> RayMember:
    """A machine's records, without a node process: for `collect`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(machine.id, soft=False)
    actor = _agent(0, there)
    return RayMember(machine.host, machine.host, actor)


def answer(reference: Any, limit_s: float) -> Any:
    """What a method of an actor returns. Raises NodeLost."""
    import ray

    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        raise NodeLost(f"no answer for {limit_s:g} s") from None
    except ray.exceptions.RayTaskError as error:
        raise NodeLost(_last_line(error)) from None
    except ray.exceptions.RayError as error:
        raise NodeLost(_how_lost(error)) from None


def own_address() -> str:
    """The address of the cluster that this process has joined."""
    import ray

    return str(ray.get_runtime_context().gcs_address)
