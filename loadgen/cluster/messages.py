"""What the driver and the node processes say to each other. Never a token of a reply, a request or an event."""

from __future__ import annotations

import msgspec

from loadgen.client.engine import LiveCounters, WarmUp
from loadgen.cluster.digests import Digests
from loadgen.plan import ClientPlan
from loadgen.rundir import Ceiling
from loadgen.target import Target

SILENCE_S = 20.0  # without a word from the other side, it is gone
ALIVE_S = SILENCE_S / 4


# To a node.


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Ask the server whether it answers."""

    target: Target


class Calibrate(msgspec.Struct, frozen=True, tag=True):
    """Measure the client's ceiling in the shape of this plan."""

    plan: ClientPlan


class Draw(msgspec.Struct, frozen=True, tag=True):
    """Draw the whole load; `processes` clients play the shares from `first` on of `shards`. name: of the directory of
    their records."""

    plan: ClientPlan
    first: int
    processes: int
    shards: int
    name: str


class Arm(msgspec.Struct, frozen=True, tag=True):
    """Open connections, warm up, build requests."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """t = 0 is at this time of the node's own clock."""

    t0_ns: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Send nothing more; drain, or, the second time, do not."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The driver is there."""


Order = Reach | Calibrate | Draw | Arm | Start | Stop | Alive


# To the driver.


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The node process is up. echo_port, echo_key: of its clock."""

    hostname: str
    cpus: int
    version: str
    echo_port: int
    echo_key: bytes


class Reached(msgspec.Struct, frozen=True, tag=True):
    """problem: why the server cannot be reached; empty: it can."""

    problem: str = ""


class Calibrated(msgspec.Struct, frozen=True, tag=True):
    ceiling: Ceiling | None


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """directory: where the records of this play will lie."""

    digests: Digests
    directory: str


class Armed(msgspec.Struct, frozen=True, tag=True):
    warm_ups: list[WarmUp]


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Once a second, and at the end: a snapshot of each client process."""

    snapshots: list[LiveCounters]


class Finished(msgspec.Struct, frozen=True, tag="Over"):
    """Every client process has ended. problem: of the first that failed; writing: its records could be kept no more."""

    problem: str = ""
    writing: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An order could not be carried out. One sentence."""

    problem: str


Answer = Hello | Reached | Calibrated | Drawn | Armed | Beat | Finished | Failed

encode = msgspec.msgpack.Encoder().encode
order_of = msgspec.msgpack.Decoder(Order).decode
answer_of = msgspec.msgpack.Decoder(Answer).decode
