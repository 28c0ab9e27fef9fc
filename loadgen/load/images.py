"""Synthetic images beside the prompts of a chat: PNG of an asked size, no two alike, fixed by the seed and the request.

An image is coloured squares, drawn anew for each, so that no server finds one in a cache of images. A server decodes
and computes it as any other of its size; as a file it is small, so that the client can send many.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from typing import TYPE_CHECKING

import msgspec

from backends.untrusted import escaped

if TYPE_CHECKING:  # numpy is loaded to draw: options are read without it
    import numpy as np
    from numpy.typing import NDArray

SQUARE = 32  # pixels
MOST_IMAGES, MOST_SIDE = 64, 16_384  # of a request; pixels
_IMAGES = 0x1E9B  # among the streams of `lengths`
_PREFIX = "data:image/png;base64,"


class Images(msgspec.Struct, frozen=True):
    """So many images of each request, all of one size in pixels."""

    count: int
    width: int
    height: int

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    def urls(self, seed: int, phase: str, number: int) -> tuple[str, ...]:
        """Those of a request, as data: URLs."""
        import numpy as np

        rng = np.random.default_rng((seed, _IMAGES, int(phase == "warmup"), number))
        across, down = -(-self.width // SQUARE), -(-self.height // SQUARE)
        drawn = rng.integers(0, 256, (self.count, down, across, 3), np.uint8)
        return tuple(_PREFIX + base64.b64encode(self._png(squares)).decode() for squares in drawn)

    def _png(self, squares: NDArray[np.uint8]) -> bytes:
        """The file of an image with these squares (down, across, 3)."""
        rows = squares.repeat(SQUARE, axis=1)[:, : self.width].reshape(len(squares), -1)
        packer, left = zlib.compressobj(1), self.height
        packed = []
        for row in rows:
            packed.append(packer.compress((b"\0" + row.tobytes()) * min(SQUARE, left)))
            left -= SQUARE
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue each
        chunks = ((b"IHDR", header), (b"IDAT", b"".join(packed) + packer.flush()), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def parse(text: str) -> Images:
    """'COUNT:WIDTHxHEIGHT'. Raises ValueError with one sentence."""
    match = re.fullmatch(r"(\d{1,3}):(\d{1,6})x(\d{1,6})", text)
    if match is None:
        raise ValueError(f"--images '{escaped(text)}' is not understood; use COUNT:WIDTHxHEIGHT, as in 1:512x512.")
    images = Images(*map(int, match.groups()))
    if not 1 <= images.count <= MOST_IMAGES or not min(images.width, images.height):
        raise ValueError(f"--images '{text}' needs 1 to {MOST_IMAGES} images, of at least one pixel.")
    if max(images.width, images.height) > MOST_SIDE:
        raise ValueError(f"--images '{text}' is wider or higher than {MOST_SIDE} pixels; make it smaller.")
    return images
