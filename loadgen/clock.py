"""Time for the instrument: the monotonic clock, and an alarm that rings on time.

uvloop's own timers count in milliseconds and may ring up to 1.3 ms early; a Linux timerfd rings 0.05-0.2 ms late and
never early. Elsewhere the loop's timers are used, early ones being sent back to wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable

now_ns = time.monotonic_ns

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME = 1


class Alarm:
    """Calls `ring()` on the event loop at, never before, the monotonic time it was set to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._fd = -1
        self._handle: asyncio.TimerHandle | None = None
        self._at_ns = 0
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._readable)

    def set(self, at_ns: int) -> None:
        """Rings once at monotonic `at_ns`, at once if that has passed; replaces what was set before."""
        self._at_ns = at_ns
        if self._fd >= 0:
            seconds, nanoseconds = divmod(max(at_ns, 1), 1_000_000_000)
            spec = struct.pack("qqqq", 0, 0, seconds, nanoseconds)
            self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0.0, (at_ns - now_ns()) / 1e9), self._timer)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew between ringing and this callback
            return
        self._ring()

    def _timer(self) -> None:
        if now_ns() < self._at_ns:
            self.set(self._at_ns)
        else:
            self._ring()
