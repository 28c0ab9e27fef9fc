"""The event loop of a run: uvloop where there is one, the signals that end a run in good order, a beat a second."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any


def run_loop(main: Any) -> Any:
    """Runs a coroutine on uvloop where there is one."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def on_stop(act: Callable[[], object]) -> None:
    """From now on the signals that end a run in good order do this, in the running loop: Ctrl-C, `kill`, and a terminal
    that is gone, unless `nohup` says that the run is to outlive it."""
    loop = asyncio.get_running_loop()
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        loop.add_signal_handler(number, act)


async def every_second(act: Callable[[], None]) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(1.0)
        act()
