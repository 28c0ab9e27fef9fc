"""The event loop of a run: uvloop where there is one, the signals that end a run in good order, a beat a second."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, TypeVar

from backends import exit_codes

T = TypeVar("T")

SAME_S = 0.2  # signals closer together are one: a terminal that is closed sends SIGHUP twice, once by its shell


def run_loop(main: Any) -> Any:
    """Runs a coroutine on uvloop where there is one."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


class StopSignals:
    """Within its block, the signals that end a program in good order: Ctrl-C, `kill`, and a terminal that is gone,
    unless `nohup` says that the program is to outlive it.

    The first signal is acted upon. The second one hurries what the first began, where it can be hurried; where not, and
    with any further one, the program ends at once: what it started ends with it, but for containers.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self._acts: list[Callable[[], object]] = []
        self._came_s = -SAME_S
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int | None:
        """The exit code of a program that was stopped, as a shell has it; None: it was not."""
        return None if self.number is None else exit_codes.SIGNALLED + self.number

    def on_signal(self, act: Callable[[], object] | None = None, hurry: Callable[[], object] | None = None) -> None:
        """From now on the first signal does `act`, nothing by itself, and the second one `hurry`; in the event loop
        where one runs."""
        self._acts = [] if act is None else [_in_loop(act)]
        if hurry is not None:
            self._acts.append(_in_loop(hurry))
        if self.number is not None:  # the first has come
            self._acts = self._acts[1:]

    def end(self) -> None:
        """Does what the first signal would do, without one."""
        if self._acts:
            self._acts[0]()

    def _take(self, number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        same, self._came_s = now_s - self._came_s < SAME_S, now_s
        if same:
            return
        first = self.number is None
        if first:
            self.number = number
        if self._acts:
            self._acts.pop(0)()
        elif not first:
            os._exit(exit_codes.SIGNALLED + number)


def _in_loop(act: Callable[[], object]) -> Callable[[], object]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return act
    return lambda: loop.call_soon_threadsafe(act)


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` gives, from a thread that the end of the process does not wait for."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # whoever waited for it may wait no longer, and it goes on

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(done)


async def every_second(act: Callable[[], None]) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(1.0)
        act()
