"""The truth about when events were sent, kept in memory and written as one file of numpy arrays at the end."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import BinaryIO

from servers.serve.reply import Reply


class StampsFile:
    """An `.npz` file, not compressed, requests in the order in which they were received:

    `request_id` (n,) the X-Request-Id header, "" where there was none; `received_ns` (n,); `sent_ns` flat, and
    `offsets` (n + 1,) into it: one time for each event that carried tokens, taken right before it was handed to the
    kernel. Times are CLOCK_MONOTONIC nanoseconds. Costs 8 bytes an event.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file at once, so that it is known to be writable. Raises OSError."""
        self._file: BinaryIO = path.open("wb")
        self._replies: list[tuple[int, str, int, array[int]]] = []

    def add(self, reply: Reply) -> None:
        self._replies.append((reply.index, reply.request_id, reply.received_ns, reply.stamps))

    def write(self) -> None:
        import numpy as np  # not before it is needed: it costs a tenth of a second and 25 MB

        replies = sorted(self._replies, key=lambda each: each[0])
        lengths = np.array([0] + [len(stamps) for *_, stamps in replies], dtype=np.int64)
        sent = b"".join(stamps.tobytes() for *_, stamps in replies)
        with self._file as file:
            np.savez(
                file,
                request_id=np.array([request_id for _, request_id, _, _ in replies], dtype=np.str_),
                received_ns=np.array([received_ns for _, _, received_ns, _ in replies], dtype=np.int64),
                offsets=np.cumsum(lengths),
                sent_ns=np.frombuffer(sent, dtype=np.int64),
            )
