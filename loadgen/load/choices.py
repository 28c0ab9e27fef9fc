"""What a client decides of each request beside its lengths: at which token it gives the reply up. Pure.

As lengths are, it is drawn by the seed and the request's number alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 4096  # requests that are drawn at once
_CANCELS = 0x1E96  # among the streams of `lengths`


class _Drawn:
    """Numbers evenly from 0 to 1, `columns` of them for each request."""

    def __init__(self, seed: int, stream: int, columns: int) -> None:
        self._seed, self._stream, self._columns = seed, stream, columns
        self._block = -1
        self._rows: NDArray[np.float64]

    def at(self, number: int) -> list[float]:
        import numpy as np

        block, within = divmod(number, BLOCK)
        if block != self._block:
            self._rows = np.random.default_rng((self._seed, self._stream, block)).random((BLOCK, self._columns))
            self._block = block
        row: list[float] = self._rows[within].tolist()
        return row


class Cancels:
    """Which requests the client gives up, and when."""

    def __init__(self, ratio: float, seed: int) -> None:
        self._ratio = ratio
        self._drawn = _Drawn(seed, _CANCELS, 2)

    def token(self, number: int, output_tokens: int) -> int | None:
        """The token after which it gives that reply of so many up, any but the last; None: it reads it to its end."""
        chosen, place = self._drawn.at(number)
        return 1 + int(place * (output_tokens - 1)) if chosen < self._ratio and output_tokens > 1 else None
