"""The live view of both programs: a picture of a few lines that is kept up to date at the end of a terminal, and what
its lines are made of. It knows no kind of measurement.

A thread of its own draws, because a terminal may be stopped. The cursor stays below the picture, where the terminal
puts what a user types and where a shell goes on if everything here is killed: so nothing has to be restored.

A line is made of fields, such as `p99 412 ms`, and breaks between two of them; a field that fits on no line is left
out, so no number is ever cut.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.text import Text

from loadgen.terminal import in_foreground, styled

MAX_LINES = 15
LABEL_COLUMNS = 10
BARS = "▁▂▃▄▅▆▇█"
MIN_SPARK, MAX_SPARK = 8, 60  # columns
FORGOTTEN_S = 10.0  # after so long without a picture something else is on the screen: the next one begins below it
END_TIMEOUT_S = 1.0  # for a terminal that takes nothing

Draw = Callable[[int, int], Sequence[Text]]  # lines of at most so many columns, at most so many of them


class Picture:
    """Keeps a picture on a terminal up to date, in its own thread. every_s: draws it so often, while this program has
    the terminal; None: whenever it is shown another."""

    def __init__(self, fd: int, every_s: float | None = None) -> None:
        self._fd, self._every_s = fd, every_s
        self._wanted: Draw | None = None
        self._changed, self._over = threading.Event(), False
        self._drawing = threading.Lock()
        self._widths: list[int] = []  # of the lines on the screen, in columns
        self._drawn_s = -math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def show(self, draw: Draw) -> None:
        self._wanted = draw
        if self._every_s is None:
            self._changed.set()

    def clear(self) -> None:
        """Takes the picture off the screen, for a line that is to stay there; the next one is drawn below it."""
        self._wanted = None
        if self._drawing.acquire(timeout=END_TIMEOUT_S):
            if not self._forgotten():
                self._write(self._back(self._size()[0]) + "\x1b[J")
            self._widths = []
            self._drawing.release()

    def end(self, erase: bool) -> None:
        """No picture comes any more. erase: and the last one goes; otherwise the screen is left as it is."""
        self._wanted = None
        self._over = True
        self._changed.set()
        self._thread.join(END_TIMEOUT_S)
        if erase and not self._thread.is_alive():
            self.clear()

    def _run(self) -> None:
        while not self._over:
            self._changed.wait(self._every_s)
            self._changed.clear()
            with self._drawing:
                if (draw := self._wanted) is not None and (self._every_s is None or in_foreground(self._fd)):
                    self._draw(draw)

    def _draw(self, draw: Draw) -> None:
        columns, rows = self._size()
        if self._forgotten():
            self._widths = []
        shown = draw(columns - 1, min(rows - 1, MAX_LINES))  # a full line could wrap
        back = self._back(columns)
        self._widths = [line.cell_len for line in shown]
        self._write(back + "".join(f"{text}\x1b[K\n" for text in styled(shown)) + "\x1b[J")
        self._drawn_s = time.monotonic()

    def _forgotten(self) -> bool:
        return time.monotonic() - self._drawn_s > FORGOTTEN_S

    def _back(self, columns: int) -> str:
        """To the beginning of the picture. Where the terminal became narrower, it has wrapped its lines since."""
        rows = sum(max(1, math.ceil(width / columns)) for width in self._widths)
        return f"\r\x1b[{rows}A" if rows else "\r"

    def _size(self) -> tuple[int, int]:
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(self._fd)
            if size.columns > 1 and size.lines > 1:
                return size
        return 80, MAX_LINES + 1

    def _write(self, text: str) -> None:
        data = text.encode()
        with contextlib.suppress(OSError):  # the terminal is gone, and the measurement goes on
            while data:
                data = data[os.write(self._fd, data) :]


def bar(ratio: float | None, elapsed_s: float, left_s: float | None, width: int) -> Text:
    """How much is over, and how long it may still take; None: not known."""
    elapsed = f"{clock(elapsed_s)} gone"
    left = f", about {clock(left_s)} left" if left_s is not None else ""
    percent = "" if ratio is None else f"{int(100 * ratio):3d} %  "
    tail = next(
        (t for t in (f"  {percent}{elapsed}{left}", f"  {percent}{elapsed}", f"  {elapsed}") if len(t) < width), ""
    )
    columns = width - len(tail)
    filled = 0 if ratio is None else round(columns * ratio)
    return Text.assemble(("━" * filled, "green"), ("─" * (columns - filled), "dim"), tail)


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def row(
    label: str, fields: Sequence[str], width: int, history: Sequence[float | None] = (), style: str = ""
) -> list[Text]:
    """The fields behind their label, on as many lines as they need; behind them what happened before, where there is
    room. Nothing without fields."""
    rows: list[str] = []
    for each in (each for each in fields if LABEL_COLUMNS + cell_len(each) < width):
        if rows and LABEL_COLUMNS + cell_len(rows[-1]) + 2 + cell_len(each) < width:  # less one: a comma may follow
            rows[-1] += f", {each}"
        else:
            rows.append(each)
    shown = [
        Text.assemble((f"{'' if number else label:<{LABEL_COLUMNS}}", "dim"), (text, style))
        for number, text in enumerate(rows)
    ]
    for earlier in shown[:-1]:
        earlier.append(",")
    if shown and history and (room := min(width - max(24, shown[-1].cell_len + 2), MAX_SPARK)) >= MIN_SPARK:
        shown[-1].pad_right(max(0, 24 - shown[-1].cell_len - 2))
        shown[-1].append("  " + sparkline(history[-room:]), style="cyan")
    return shown


def sparkline(values: Sequence[float | None]) -> str:
    """A bar for each value, from 0 to the largest; a space for None."""
    most = max((value for value in values if value is not None), default=0.0)
    return "".join(
        " " if value is None else BARS[round((len(BARS) - 1) * value / most) if most > 0 else 0] for value in values
    )
