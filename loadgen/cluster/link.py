"""How the driver reaches a node process on another machine, whatever carries the messages between them."""

from __future__ import annotations

from typing import Protocol

from loadgen.cluster.records_home import Written


class NodeLost(Exception):
    """The node process, its machine or the way to it is gone. A clause: how that showed."""


class Member(Protocol):
    """One machine of a cluster, with a node process on it. Its methods raise NodeLost."""

    name: str  # for sentences: its address
    host: str  # where its clock answers

    async def send(self, message: bytes) -> None:
        """To the node process."""

    async def receive(self) -> list[bytes]:
        """What the node process has said since; waits a few seconds for the first message, and may have none."""

    async def again(self) -> None:
        """After the node process was lost: a new way to its machine, for its records alone."""

    async def written(self, directory: str) -> list[Written]:
        """The files of records in a directory of that machine."""

    async def read(self, directory: str, name: str, offset: int) -> bytes:
        """A chunk of such a file."""

    async def remove(self, directory: str) -> None:
        """Takes such a directory away."""
