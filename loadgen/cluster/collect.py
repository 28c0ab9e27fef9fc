"""`loadgen collect`: records that stayed on the machines of a run, because its driver or the way to one was gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from backends.untrusted import printable
from loadgen import rundir
from loadgen.cluster import ray_cluster, records_home
from loadgen.cluster.link import NodeLost
from loadgen.rundir import parts, records
from loadgen.rundir.cluster_facts import ClusterFacts, NodeFacts
from loadgen.rundir.parts import JOINED

Say = Callable[[str], None]


def collect(directory: Path, address: str | None, say: Say) -> int:
    """Brings home what lies on the machines of the run in `directory`, joins it with what is there, and gives the
    number of files that came. address: of the Ray cluster, None being that of this machine; never the directory's own
    word, which may be another's. Raises RunError, RecordsError, ConfigError and ClusterError."""
    manifest = rundir.read_manifest(directory)
    facts = manifest.cluster
    if facts is None:
        raise rundir.RunError(f"{directory} is a run of one machine: there is nothing to collect.")
    if facts.t0_ns is None:
        raise rundir.RunError(f"the run in {directory} ended before it sent anything: there is nothing to collect.")
    try:
        with ray_cluster.connected(address):
            came = asyncio.run(_brought(directory, facts, say))
    except OSError as error:
        raise rundir.RunError(f"cannot write to {directory}: {error.strerror or error}.") from None
    if came:
        _join(directory, came)
    rundir.write_manifest(directory, msgspec.structs.replace(manifest, cluster=facts))
    return len(came)


async def _brought(directory: Path, facts: ClusterFacts, say: Say) -> list[str]:
    """Names of the files that came; they have their own names, beside the joined one."""
    there = {machine.host: machine for machine in ray_cluster.machines()}
    came = []
    for node in facts.nodes:
        host = node.name.partition(" ")[0]
        if host not in there:
            say(f"note: {host} is not in the cluster; what lies there in {node.directory} stays.")
            continue
        try:
            came += await _from(ray_cluster.at(there[host]), node, directory, facts.t0_ns or 0)
            node.left_there = False
        except (NodeLost, records_home.HomeError) as error:
            say(f"note: the records on {host} did not come home: {error}.")
    return came


async def _from(member: ray_cluster.RayMember, node: NodeFacts, directory: Path, t0_ns: int) -> list[str]:
    files = await member.written(node.directory)
    for file in files:
        if not parts.is_name(file.name):
            raise records_home.HomeError(f"'{printable(file.name)}' is no file of records")
        came = directory / f"{file.name}.home"
        await records_home.bring(file, lambda name, offset: member.read(node.directory, name, offset), came)
        await asyncio.to_thread(records_home.settle, came, directory / file.name, t0_ns, None)
    await member.remove(node.directory)
    return [file.name for file in files]


def _join(directory: Path, came: list[str]) -> None:
    """Makes one run of the files that came and those that were there, which may have the same requests as lost."""
    home: set[int] = set()
    for name in came:
        home.update(records.ids(directory / name))
    before = [part for part in parts.find(directory) if part.path.name not in came]
    free = max((part.worker for part in parts.find(directory)), default=0) + 1
    for part in before:
        joined = part.path.name == JOINED
        path = directory / f"requests.{free}.jsonl" if joined else part.path
        records.without(part.path, home, path)
        if joined:
            part.path.unlink()
    records.merge(directory)
