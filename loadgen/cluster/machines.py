"""Which machines of a cluster send the load, and the fleet on them."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from loadgen.cluster import ray_cluster
from loadgen.cluster.fleet import Fleet
from loadgen.cluster.ray_cluster import ClusterError, RayMachine
from loadgen.config import Config, ConfigError
from loadgen.target import Target

Strategy = Literal["STRICT_SPREAD", "SPREAD"]


class Chosen(NamedTuple):
    machines: list[RayMachine]
    strategy: Strategy
    notes: list[str]


@contextlib.asynccontextmanager
async def fleet(config: Config, target: Target) -> AsyncIterator[Fleet]:
    """Node processes on the machines that --on and --nodes name; they are up and reach the server. Raises ConfigError
    and TransportError."""
    with ray_cluster.connected(config.cluster_address):
        there = ray_cluster.machines()
        chosen = choose(there, hosts_of(target, there), config.nodes)
        async with ray_cluster.placed(chosen.machines, chosen.strategy) as members:
            address = config.cluster_address or ray_cluster.own_address()
            async with Fleet(members, address, chosen.strategy, chosen.notes).begun(target) as begun:
                yield begun


def choose(there: Sequence[RayMachine], server_hosts: set[str], wanted: int | None) -> Chosen:
    """So many machines, or all; those of the server only where there are too few others. Raises ConfigError and
    ClusterError."""
    notes = [f"{each.host} has no core for Ray's actors and is left out" for each in there if each.cpus < 1]
    usable = [each for each in there if each.cpus >= 1]
    if not usable:
        raise ClusterError("no machine of the Ray cluster has a core for the client; start one with --num-cpus 1.")
    others = [each for each in usable if each.host not in server_hosts]
    of_server = [each for each in usable if each.host in server_hosts]
    if wanted is None:
        if not others:
            raise ConfigError(
                f"the server runs on the cluster's only machine, {usable[0].host}; to send from there all the same, "
                "ask for it with --nodes 1."
            )
        notes += [f"{each.host} runs the server and sends nothing" for each in of_server]
        return Chosen(others, "STRICT_SPREAD", notes)
    chosen = [*others, *of_server][:wanted]
    notes += [f"{each.host} runs the server and sends too" for each in chosen if each in of_server]
    if len(chosen) == wanted:
        return Chosen(chosen, "STRICT_SPREAD", notes)
    notes.append(f"--nodes is {wanted} and the cluster has {len(usable)} machines for them: some machines have several")
    return Chosen(list(itertools.islice(itertools.cycle(chosen), wanted)), "SPREAD", notes)


def hosts_of(target: Target, there: Sequence[RayMachine]) -> set[str]:
    """The addresses of the server's machine, as far as its name tells."""
    with contextlib.suppress(OSError):
        hosts = {str(found[4][0]) for found in socket.getaddrinfo(target.host, None)}
        if hosts & {"127.0.0.1", "::1"} and there:
            hosts.add(there[0].host)  # the driver's own
        return hosts
    return set()
