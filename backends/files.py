"""Files as people have them: packed with gzip, zstd or xz whatever they are called, in UTF-16, with a byte order mark.

What is read is the plain bytes, in UTF-8 where they are text. A file that cannot be unpacked raises an OSError, as one
that cannot be read does, so a reader has one kind of error to name.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from backends.exit_codes import lacking


class PackedError(OSError):
    """A file that cannot be unpacked; strerror: why, a clause that begins with "it"."""


_GZIP, _ZSTD, _XZ = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00"
_BLOCK_BYTES = 1 << 16
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def opened(path: Path) -> BinaryIO:
    """A file to read, unpacked, behind its mark. Raises OSError, as its reading may."""
    return unpacked(path, path.open("rb"))


def unpacked(path: Path, file: BinaryIO) -> BinaryIO:
    """The same of a file that is open, which is closed with what this gives, or where this fails."""
    assert isinstance(file, io.BufferedReader)
    try:
        buffered: io.BufferedReader[Any] = file
        begins = buffered.peek(len(_XZ))
        unpacker = _unpacked(path, buffered, begins)
        if unpacker is not None:
            buffered = io.BufferedReader(_Unpacking(path, buffered, unpacker))
            begins = buffered.peek(len(codecs.BOM_UTF8))
        if begins.startswith(_WIDE):
            return io.BufferedReader(_Unpacking(path, buffered, cast(IO[bytes], _Utf16(path, buffered))))
        if begins.startswith(codecs.BOM_UTF8):
            buffered.read(len(codecs.BOM_UTF8))
    except BaseException:
        file.close()
        raise
    return buffered


def _unpacked(path: Path, file: BinaryIO, begins: bytes) -> IO[bytes] | None:
    """What unpacks a file that begins so; None where it is not packed. Raises OSError."""
    if begins.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if begins.startswith(_XZ):
        return lzma.LZMAFile(file)
    return cast(IO[bytes], _Zstd(path, file)) if begins.startswith(_ZSTD) else None


class _Zstd:
    """zstandard's own reader takes a file that was cut for one that ends."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        if (why := lacking("zstandard")) is not None:
            raise _wrong(path, f"it is packed with zstd, and {why}")
        import zstandard

        self.error = zstandard.ZstdError
        self._file = file
        self._start = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._start()
        self._unpacked = b""

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end. Raises EOFError for a file that was cut, and zstandard's error."""
        while not self._unpacked:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._file.read(_BLOCK_BYTES)
            if not packed:
                if not self._frame.eof:
                    raise EOFError("it ended before the end of its last frame")
                break
            if self._frame.eof:
                self._frame = self._start()
            self._unpacked = self._frame.decompress(packed)
        read, self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return read

    def close(self) -> None:
        """The file is closed by who opened it."""


class _Utf16:
    """Reads UTF-16 as UTF-8, a block at a time: a file may have no end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._decode = codecs.getincrementaldecoder("utf-16")().decode
        self._narrow = b""

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end. Raises PackedError."""
        wide = b"more"
        try:
            while wide and not self._narrow:
                wide = self._file.read(_BLOCK_BYTES)
                self._narrow = self._decode(wide, not wide).encode()
        except UnicodeError:
            raise _wrong(self._path, "it begins as UTF-16 and is none") from None
        read, self._narrow = self._narrow[:size], self._narrow[size:]
        return read

    def close(self) -> None:
        """The file is closed by who opened it."""


class _Unpacking(io.RawIOBase):
    """Reads what an unpacker gives, whose errors become those of a file."""

    def __init__(self, path: Path, packed: BinaryIO, unpacker: IO[bytes]) -> None:
        self._path, self._packed, self._unpacker = path, packed, unpacker
        self._errors = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, getattr(unpacker, "error", EOFError))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            read = self._unpacker.read(len(buffer))
        except self._errors as error:
            raise _wrong(self._path, f"it cannot be unpacked: {error}") from None
        buffer[: len(read)] = read
        return len(read)

    def close(self) -> None:
        self._unpacker.close()
        self._packed.close()
        super().close()


def _wrong(path: Path, why: str) -> PackedError:
    return PackedError(errno.EINVAL, why, str(path))
