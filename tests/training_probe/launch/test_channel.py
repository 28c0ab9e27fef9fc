"""A connection between two nodes: who has the token gets through, and what was changed on the way does not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training_probe.launch import channel
from training_probe.launch.channel import HEAD, MAGIC, NONCE_BYTES, TOKEN, Channel, ChannelError, UnprovenError

SECRET = "0123456789abcdef"
LONG_S = 30.0
OPENING = len(MAGIC) + NONCE_BYTES


@contextlib.contextmanager
def tcp() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection: of the side that was connected to, and of the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        listening, _ = listener.accept()
    caller.settimeout(LONG_S)
    listening.settimeout(LONG_S)
    with caller, listening:
        yield listening, caller


def opened(sockets: tuple[socket.socket, socket.socket], *tokens: str) -> tuple[Channel, Channel]:
    """Both sides; each waits for the other's opening."""
    made: list[Channel] = []
    thread = threading.Thread(target=lambda: made.append(Channel(sockets[1], tokens[-1], listens=False)))
    thread.start()
    listening = Channel(sockets[0], tokens[0], listens=True)
    thread.join(LONG_S)
    return listening, made[0]


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part
        data += part
    return data


def test_messages_pass_in_both_directions_and_in_order() -> None:
    with tcp() as sockets:
        listening, calling = opened(sockets, SECRET)
        for number in range(3):
            calling.send(b"there %d" % number)
            assert listening.receive(LONG_S) == b"there %d" % number
            listening.send(b"back %d" % number)
        assert [calling.receive(LONG_S) for _ in range(3)] == [b"back 0", b"back 1", b"back 2"]
        large = os.urandom(3 << 20)
        thread = threading.Thread(target=lambda: calling.send(large))
        thread.start()
        assert listening.receive(LONG_S) == large
        thread.join(LONG_S)
        assert not listening.is_over()
        sockets[1].close()
        assert listening.is_over()
        with pytest.raises(ChannelError, match="closed the connection"):
            listening.receive(LONG_S)


def test_another_token_is_refused() -> None:
    with tcp() as sockets:
        listening, calling = opened(sockets, SECRET, SECRET.upper())
        calling.send(b"let me in")
        with pytest.raises(UnprovenError, match=TOKEN):
            listening.receive(LONG_S)
        listening.send(b"welcome")  # whoever listens must prove itself as well
        with pytest.raises(UnprovenError, match=TOKEN):
            calling.receive(LONG_S)


class Between:
    """Whoever is on the way from the caller to the listener, and passes on what it likes."""

    def __init__(self, left: tuple[socket.socket, socket.socket], right: tuple[socket.socket, socket.socket]) -> None:
        self.calling_end, self.listening_end = left[0], right[1]

    def open(self) -> None:
        self.listening_end.sendall(read(self.calling_end, OPENING))
        self.calling_end.sendall(read(self.listening_end, OPENING))

    def message(self) -> bytes:
        head = read(self.calling_end, HEAD.size)
        return head + read(self.calling_end, HEAD.unpack(head)[0])


@contextlib.contextmanager
def tapped() -> Iterator[tuple[Channel, Channel, Between]]:
    with tcp() as left, tcp() as right:
        between = Between(left, right)
        thread = threading.Thread(target=between.open)
        thread.start()
        listening, calling = opened((right[0], left[1]), SECRET)
        thread.join(LONG_S)
        yield listening, calling, between


def test_what_is_altered_repeated_reordered_or_reflected_is_refused() -> None:
    with tapped() as (listening, calling, between):
        calling.send(b"start")
        first = between.message()
        between.listening_end.sendall(first)
        assert listening.receive(LONG_S) == b"start"
        between.listening_end.sendall(first)
        with pytest.raises(ChannelError):
            listening.receive(LONG_S)
    with tapped() as (listening, calling, between):
        calling.send(b"start")
        between.listening_end.sendall(between.message()[:-1] + b"T")
        with pytest.raises(ChannelError):
            listening.receive(LONG_S)
    with tapped() as (listening, calling, between):
        calling.send(b"one")
        calling.send(b"two")
        one, two = between.message(), between.message()
        between.listening_end.sendall(two + one)
        with pytest.raises(ChannelError):
            listening.receive(LONG_S)
    with tapped() as (_, calling, between):
        calling.send(b"mine")
        between.calling_end.sendall(between.message())
        with pytest.raises(ChannelError):
            calling.receive(LONG_S)


def test_nothing_of_another_connection_is_taken() -> None:
    with tapped() as (_, calling, between):
        calling.send(b"start")
        recorded = between.message()
    with tapped() as (listening, _, between):
        between.listening_end.sendall(recorded)
        with pytest.raises(UnprovenError):
            listening.receive(LONG_S)


def test_a_stranger_makes_nobody_read_or_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.2)
    with tcp() as (listening, caller):
        caller.sendall(MAGIC)
        with pytest.raises(ChannelError, match="no answer"):
            Channel(listening, SECRET, listens=True)
    with tcp() as (listening, caller):
        caller.sendall(MAGIC + bytes(NONCE_BYTES) + HEAD.pack(channel.FIRST_BYTES + 1, bytes(32)))
        with pytest.raises(UnprovenError, match="message of 4097 bytes"):
            Channel(listening, SECRET, listens=True).receive(LONG_S)
    with tcp() as (listening, caller):
        caller.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(100))
        with pytest.raises(UnprovenError, match="no training_probe"):
            Channel(listening, SECRET, listens=True)


def test_an_oversized_message_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with tcp() as sockets:
        listening, calling = opened(sockets, SECRET)
        calling.send(b"first")
        assert listening.receive(LONG_S) == b"first"
        calling.send(bytes(10_000))
        monkeypatch.setattr(channel, "MOST_BYTES", 9_999)
        with pytest.raises(ChannelError, match="message of 10000 bytes"):
            listening.receive(LONG_S)
        with pytest.raises(ChannelError, match="too large"):
            calling.send(bytes(10_000))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_end_in_one_kind_of_error(data: bytes, knows_the_opening: bool) -> None:
    with tcp() as (listening, caller):
        caller.sendall((MAGIC + bytes(NONCE_BYTES) if knows_the_opening else b"") + data)
        caller.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError):
            Channel(listening, SECRET, listens=True).receive(LONG_S)


def test_the_token_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    assert channel.take_token() == SECRET and TOKEN not in os.environ
    with pytest.raises(ValueError, match="is not set"):
        channel.take_token()
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(ValueError, match="too short"):
        channel.take_token()
