"""Nodes of a Ray cluster: on each an actor, which starts a node process and passes orders on to it.

The processes of a run are not the actor's own children: Ray kills those at once when the driver is gone, and what they
had started would be nobody's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from backends.untrusted import printable
from loadgen import child_env
from loadgen.cluster import ray_cluster
from loadgen.cluster.link import NodeLost
from loadgen.cluster.ray_cluster import ClusterError, RayMachine
from training_probe.launch.node import Order, Reply
from training_probe.launch.nodes import Nodes
from training_probe.launch.runner import THREADS

BEGIN_S = 60.0  # until Ray has started a process for the actor
_REPLY: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class Actor:
    """On the node. It serves one driver, one order after another."""

    def __init__(self, host: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the actor lives
        ours = _users(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "training_probe.launch.node", host], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, env={**ours, **child_env.environment(ours)}, start_new_session=True,
        )  # fmt: skip

    def ask(self, order: bytes) -> bytes:
        """Raises RuntimeError when the node process is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # its end is told by what comes back
            self._process.stdin.write(order + b"\n")
            self._process.stdin.flush()
        if reply := self._process.stdout.readline():
            return reply
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"its process ended with {code}" + (f": {printable(lines[-1])}" if lines else ""))


def _users(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an actor's environment the user has set: Ray sets the number of threads to the actor's one core, which is
    not what the ranks are to have."""
    ours = dict(environ)
    with contextlib.suppress(OSError):
        if f"{THREADS}=".encode() not in Path(f"/proc/{os.getppid()}/environ").read_bytes():  # Ray's own process
            ours.pop(THREADS, None)
    return ours


@dataclass
class RayLink:
    """An actor as the driver sees it."""

    host: str
    actor: Any

    def ask(self, order: Order, limit_s: float) -> Reply:
        """Raises NodeLost."""
        return _REPLY.decode(ray_cluster.answer(self.actor.ask.remote(msgspec.json.encode(order)), limit_s))


@contextlib.contextmanager
def placed(chosen: Sequence[RayMachine], gpus_each: int) -> Iterator[Nodes]:
    """A node process on each of the machines, with so many GPUs of its own; nothing of it is left behind. Raises
    ClusterError and NodeLost."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = {"GPU": float(gpus_each)} if gpus_each else {}
    bundles = [{"CPU": 1.0, **gpus, f"node:{machine.host}": 0.001} for machine in chosen]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    links: list[RayLink] = []
    try:
        if not group.wait(ray_cluster.PLACE_S):
            needs = f"a free core and {gpus_each} free GPUs" if gpus_each else "a free core"
            raise ClusterError(
                f"the cluster has not {needs} on every one of {', '.join(m.host for m in chosen)} within "
                f"{ray_cluster.PLACE_S:g} s; wait for what runs there."
            )
        for number, machine in enumerate(chosen):
            there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            actor = ray.remote(Actor).options(scheduling_strategy=there, num_cpus=1, num_gpus=gpus_each, max_restarts=0)
            links.append(RayLink(machine.host, actor.remote(machine.host)))
        for link in links:
            try:
                ray_cluster.answer(link.actor.__ray_ready__.remote(), BEGIN_S)
            except NodeLost as lost:
                raise NodeLost(f"nothing can be started on node {link.host}: {lost}") from None
        yield Nodes(links)
    finally:
        for link in links:
            with contextlib.suppress(Exception):
                ray.kill(link.actor)
        with contextlib.suppress(Exception):
            remove_placement_group(group)
