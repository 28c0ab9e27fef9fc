"""How far the monotonic clock of another machine is from this one's: a small UDP echo and its answers.

An answer carries when the other machine got the question. By the shortest round trip of many, that was half of it after
the question left, give or take that half (Cristian's algorithm). Offsets are other clock minus ours, nanoseconds.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loadgen.clock import now_ns

PINGS = 200
AGAIN_PINGS = 50  # of a look while a load goes on
ANSWER_S = 0.2  # how long one answer may take
LOST_PINGS = 5  # in a row: the way is cut, and the rest would take as long
KEY_BYTES = 16
FIT_S = 10.0  # looks that lie closer together show no drift
_QUESTION = struct.Struct(f"!{KEY_BYTES}sQ16x")  # as long as the answer: nobody gains by asking in another's name
_ANSWER = struct.Struct(f"!{KEY_BYTES}sQqq")


class ClockSample(NamedTuple):
    """One measurement: the offset at our time `at_ns`, known within `bound_ns`."""

    at_ns: int
    offset_ns: int
    bound_ns: int


class Echo:
    """Answers questions that carry its `key`, from a thread of its own, until it is closed."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of `host`. Raises OSError."""
        self.key = secrets.token_bytes(KEY_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                question, sender = self._socket.recvfrom(_QUESTION.size)
                came_ns = now_ns()
                key, number = _QUESTION.unpack(question)
                if secrets.compare_digest(key, self.key):
                    self._socket.sendto(_ANSWER.pack(key, number, came_ns, now_ns()), sender)
            except struct.error:
                continue
            except OSError:
                return


class Pinger:
    """Asks one echo."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._address, self._key, self._number = (host, port), key, 0
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.settimeout(ANSWER_S)

    def close(self) -> None:
        self._socket.close()

    def look(self, pings: int = PINGS) -> ClockSample | None:
        """The offset by the shortest of `pings` round trips; blocks. None: no answer came."""
        best: ClockSample | None = None
        lost = 0
        while pings and lost < LOST_PINGS:
            pings -= 1
            trip = self._trip()
            lost = lost + 1 if trip is None else 0
            if trip is not None and (best is None or trip.bound_ns < best.bound_ns):
                best = trip
        return best

    def _trip(self) -> ClockSample | None:
        self._number += 1
        try:
            asked_ns = now_ns()
            self._socket.sendto(_QUESTION.pack(self._key, self._number), self._address)
            while True:
                answer = self._socket.recv(_ANSWER.size)
                back_ns = now_ns()
                key, number, came_ns, left_ns = _ANSWER.unpack(answer)
                if key == self._key and number == self._number:  # else of a question that was given up
                    break
        except (OSError, struct.error):
            return None
        offset_ns = ((came_ns - asked_ns) + (left_ns - back_ns)) // 2
        bound_ns = ((back_ns - asked_ns) - (left_ns - came_ns) + 1) // 2
        return ClockSample((asked_ns + back_ns) // 2, offset_ns, max(1, bound_ns))


class RemoteClock:
    """Another machine's clock: a line through the looks at it. A look that is known better weighs more."""

    def __init__(self, looks: Sequence[ClockSample] = ()) -> None:
        self.looks: list[ClockSample] = []
        self._origin_ns = self._offset_ns = 0
        self._slope = 0.0
        self.bound_ns: int | None = None
        for look in looks:
            self.add(look)

    def add(self, look: ClockSample | None) -> None:
        """Takes one more look into account; None: nothing was seen."""
        if look is None:
            return
        self.looks.append(look)
        best = min(self.looks, key=lambda each: each.bound_ns)
        self._origin_ns, self._offset_ns, self._slope = best.at_ns, best.offset_ns, 0.0
        spread_s = (self.looks[-1].at_ns - self.looks[0].at_ns) / 1e9
        if len(self.looks) < 3 or spread_s < FIT_S:
            self.bound_ns = best.bound_ns
            return
        at = np.array([each.at_ns - best.at_ns for each in self.looks], float)
        offsets = np.array([each.offset_ns - best.offset_ns for each in self.looks], float)
        bounds = np.array([each.bound_ns for each in self.looks], float)
        slope, base = np.polyfit(at, offsets, 1, w=1 / bounds)
        self._slope, self._offset_ns = float(slope), best.offset_ns + round(float(base))
        self.bound_ns = round(float(np.median(np.abs(offsets - (slope * at + base)) + bounds)))

    @property
    def drift_ppm(self) -> float:
        """How much faster it goes than ours, in parts of a million; 0 until looks lie far enough apart."""
        return self._slope * 1e6

    def offset_ns(self, at_ns: int) -> int:
        """Its time minus ours, at our time `at_ns`."""
        return self._offset_ns + round(self._slope * (at_ns - self._origin_ns))
