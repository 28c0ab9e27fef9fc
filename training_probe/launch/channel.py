"""Messages between two processes on different machines that share a secret, over one TCP connection.

Both sides open with a nonce. The key of the connection is an HMAC of both nonces under the secret, and every message
bears an HMAC under that key, of its direction, its number and its bytes. So each side knows with the first message that
the other has the secret, and nobody on the way can forge, alter, repeat or reorder one. Nothing is encrypted. The
secret itself is never sent. A peer that has proven nothing yet cannot make this side read more than a few kilobytes.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import sys
import time

TOKEN = "LLM_DISSECT_TOKEN"  # the variable of the environment with the secret
LEAST_TOKEN = 16  # characters: whoever hears a connection may try shorter ones at leisure
MAGIC = b"training_probe/1"
NONCE_BYTES = 32
HEAD = struct.Struct("!I32s")  # of a message: its length and its HMAC
FIRST_BYTES, MOST_BYTES = 4096, 256 << 20  # of a message: of the first one, of any later one
HANDSHAKE_S = 10.0
SEND_S = 60.0
QUIET_S, LOST_S = 10, 30  # TCP asks after so much silence whether the other machine is there, and gives it up then


class ChannelError(Exception):
    """The connection is of no use any more. A clause."""


class UnprovenError(ChannelError):
    """The other side is none of ours, or has another secret."""


def take_token() -> str:
    """The secret of the environment, from which it is removed: no process that is started later has it. Raises
    ValueError, a sentence."""
    token = os.environ.get(TOKEN, "")
    how = f"set it to the same {LEAST_TOKEN} or more random characters on every node, as `openssl rand -hex 32` prints."
    if not token:
        raise ValueError(f"{TOKEN} is not set in the environment; {how}")
    if len(token) < LEAST_TOKEN:
        raise ValueError(f"{TOKEN} is too short; {how}")
    del os.environ[TOKEN]
    return token


class Channel:
    """One side of a connection. It is used by one thread at a time, but for `abort`. listens: whether this is the side
    that was connected to. Raises ChannelError where the other side does not open as it should."""

    def __init__(self, connection: socket.socket, token: str, *, listens: bool) -> None:
        self._connection = connection
        self._own, self._other = (b"L", b"C") if listens else (b"C", b"L")
        self._sent = self._received = 0
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_a_lost_machine(connection)
        deadline = time.monotonic() + HANDSHAKE_S
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._send(MAGIC + nonce)
        opening = self._read(len(MAGIC) + NONCE_BYTES, deadline)
        if not opening.startswith(MAGIC):
            raise UnprovenError("what answers there is no training_probe of this version")
        theirs = opening[len(MAGIC) :]
        nonces = nonce + theirs if listens else theirs + nonce
        self._key = hmac.digest(token.encode("utf-8", "surrogateescape"), MAGIC + nonces, "sha256")

    @property
    def own_host(self) -> str:
        """The address of this machine that the connection uses."""
        return str(self._connection.getsockname()[0])

    @property
    def other_host(self) -> str:
        return str(self._connection.getpeername()[0])

    def send(self, message: bytes) -> None:
        """Raises ChannelError."""
        if len(message) > MOST_BYTES:
            raise ChannelError(f"a message of {len(message) >> 20} MiB is too large")
        self._send(HEAD.pack(len(message), self._mac(self._own, self._sent, message)) + message)
        self._sent += 1

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next message, within so many seconds; None: for ever. Raises ChannelError."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        size, mac = HEAD.unpack(self._read(HEAD.size, deadline))
        if size > (MOST_BYTES if self._received else FIRST_BYTES):
            raise (ChannelError if self._received else UnprovenError)(f"it announces a message of {size} bytes")
        message = self._read(size, deadline)
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, message)):
            raise UnprovenError(f"it has another {TOKEN}")
        self._received += 1
        return message

    def is_over(self) -> bool:
        """Whether the other side, which has nothing to say now, is gone."""
        try:
            self._connection.settimeout(0.0)
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def abort(self) -> None:
        """Makes whoever waits on this side wait no longer."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _mac(self, direction: bytes, number: int, message: bytes) -> bytes:
        return hmac.digest(self._key, direction + struct.pack("!Q", number) + message, "sha256")

    def _send(self, data: bytes) -> None:
        try:
            self._connection.settimeout(SEND_S)
            self._connection.sendall(data)
        except OSError as error:
            raise ChannelError(_how(error, SEND_S)) from None

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        begun = time.monotonic()
        while len(data) < size:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                if left is not None and left <= 0:
                    raise TimeoutError
                self._connection.settimeout(left)
                part = self._connection.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise ChannelError(_how(error, time.monotonic() - begun)) from None
            if not part:
                raise ChannelError("it closed the connection")
            data += part
        return bytes(data)


def _how(error: OSError, after_s: float) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return f"no answer for {after_s:.0f} s"
    return f"the connection broke: {error.strerror or error}"


def _notice_a_lost_machine(connection: socket.socket) -> None:
    """One that is switched off says no good-bye."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, QUIET_S // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)  # also of what was sent
