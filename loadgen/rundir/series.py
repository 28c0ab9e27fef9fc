"""Several measurements in one directory, such as the runs of a sweep or the cells of a training sweep: which are done,
which go on, how long the others may take.

A measurement that ended is never made again. What one that was cut short left is put aside, in DIR/unfinished.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from loadgen.rundir import RunError

UNFINISHED = "unfinished"  # directory in that of the series


class MeasurementSeries:
    """noun: what a measurement of it is called. names: all of them, in their order. done: those that have ended.
    instant: those that will take no time."""

    def __init__(self, noun: str, names: Sequence[str], done: Collection[str] = ()) -> None:
        self._noun, self._names, self._done = noun, list(names), set(done)
        self.instant = set[str]()
        self._running: dict[str, _Running] = {}
        self._took_s: list[float] = []

    def __len__(self) -> int:
        return len(self._names)

    @property
    def waiting(self) -> list[str]:
        """The measurements that have not ended, in their order."""
        return [name for name in self._names if name not in self._done]

    def begin(self, name: str) -> None:
        self._running[name] = _Running()

    def progress(self, name: str, share: float) -> None:
        """So much of a measurement that runs is done."""
        self._running[name].share = share

    def end(self, name: str, *, again: bool = False) -> None:
        """A measurement is over, also one that was not begun. again: it is to be made again another time."""
        began = self._running.pop(name, None)
        if began is not None:
            self._took_s.append(began.age_s)
        if not again:
            self._done.add(name)

    @property
    def done_ratio(self) -> float:
        """The part of all measurements that is done."""
        return (len(self._done) + sum(each.share for each in self._running.values())) / max(1, len(self._names))

    @property
    def left_s(self) -> float | None:
        """Until the end, if measurements take as long as those that ended; None while there is nothing to go by."""
        known = self._took_s or [each.age_s / each.share for each in self._running.values() if each.share > 0]
        if not known:
            return None
        mean_s = statistics.fmean(known)
        present_s = max((each.left_s(mean_s) for each in self._running.values()), default=0.0)
        following = sum(name not in self._running and name not in self.instant for name in self.waiting)
        return present_s + mean_s * following / max(1, len(self._running))

    @property
    def left(self) -> str:
        """The same as a clause to follow another; empty while there is nothing to go by."""
        return "" if self.left_s is None else f"; about {duration(self.left_s)} left"

    def place(self, name: str) -> str:
        """`run 3 of 8`: of a measurement that runs, or the last that ended."""
        running = 1 + list(self._running).index(name) if name in self._running else 0
        return f"{self._noun} {len(self._done) + running} of {len(self._names)}"

    @property
    def resumed(self) -> str:
        """What to say where a series goes on."""
        return f"{len(self._done)} of {len(self._names)} {self._noun}s are done; going on with the rest"

    def remainder(self, command: str, directory: Path) -> str:
        """What to say where a series was stopped before its end."""
        left = f"{len(self.waiting)} of {len(self._names)} {self._noun}s"
        return f"{left} are left for `{command} --resume {directory}`"


class _Running:
    def __init__(self) -> None:
        self._began_s, self.share = time.monotonic(), 0.0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_s

    def left_s(self, mean_s: float) -> float:
        """Until its end, where a measurement takes `mean_s`."""
        return self.age_s * (1 / self.share - 1) if self.share > 0 else max(0.0, mean_s - self.age_s)


def put_aside(directory: Path) -> None:
    """Moves what a measurement that was cut short left to `unfinished` beside it, under the first number that is free;
    an empty directory stays where it is. Raises RunError."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    others = directory.parent / UNFINISHED
    names = (others / f"{directory.name}.{count}" for count in itertools.count(1))
    try:
        others.mkdir(exist_ok=True)
        directory.rename(next(name for name in names if not name.exists()))
    except OSError as error:
        raise RunError(f"cannot move {directory} to {others}: {error.strerror or error}.") from None


def duration(seconds: float) -> str:
    """In the unit that a person would use: 42 s, 3 min, 2 h 10 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
