"""The server itself: one thread, one loop that waits for sockets or for the next token, whichever comes first.

What is due goes out before anything else is done, reads are taken and stamped before any is parsed, and no step holds
the loop for more than about half a millisecond. Nothing here knows how a reply looks; nothing here decides when it is
due.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import selectors
import socket
from collections import deque
from time import monotonic_ns

from loadgen.rundir.emulation import TIMETABLE_PATH
from loadgen.terminal import say
from servers.schedulers import Rejected
from servers.serve.between import CLEAN, Between
from servers.serve.faults import AT_ONCE, NO_FAULTS, Fault, Faults
from servers.serve.http import Request, ServerConnection
from servers.serve.lateness import Lateness
from servers.serve.reply import Reply
from servers.serve.stamps import StampsFile
from servers.serve.telemetry import Telemetry
from servers.serve.timing import Timing
from servers.serve.wire import Dialect, Finish, Page, Refusal, json_page

BACKLOG = 65535  # the kernel cuts it to net.core.somaxconn
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})  # need no API key
HEALTH_PATHS = frozenset({"/health", "/healthz", "/ping"})
_EMIT_AT_ONCE = 64
_PARSE_AT_ONCE = 8
IDLE_S = 2.0  # of a connection: where descriptors are short, it is closed then
_ACCEPT_AT_ONCE = 64


class Server:
    """Serves one dialect on one listening socket until `stop` is called."""

    def __init__(
        self,
        dialect: Dialect,
        timing: Timing,
        address: tuple[str, int] = ("127.0.0.1", 0),
        faults: Faults = NO_FAULTS,
        stamps: StampsFile | None = None,
        api_key: str | None = None,
        between: Between = CLEAN,
    ) -> None:
        """Listens at once on a host and a port. Raises OSError where the address cannot be had."""
        self.dialect = dialect
        self.telemetry = Telemetry(dialect.series, dialect.labels)
        self.unparsed: deque[tuple[ServerConnection, bytes, int]] = deque()
        self._timing = timing
        self.emulation = timing.facts
        self.telemetry.scheduler = timing.scheduler
        self._faults = faults
        self.healthy_ns = monotonic_ns() + int(faults.amount("slow_start", 0) * 1e9)
        self._stamps = stamps
        self._authorization = None if api_key is None else b"Bearer " + api_key.encode()
        self._requests = 0
        self._more_sequences = 0  # than requests
        self._late = Lateness()
        self._stopping = False
        self._woken_ns = 0
        self._ids = random.Random()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = socket.socketpair()
        self._between = between
        self._listener = _listen(*address, nagle=between.nagle)
        self._accepting = True
        host, port = address[0], self._listener.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._connections: set[ServerConnection] = set()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for end in (self._wakeup, self._waker):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._woken)

    def stop_at_end_of(self, fd: int) -> None:
        """Ends `run` when nothing more can be read from `fd`. Raises OSError for a plain file, which never ends."""
        self._selector.register(fd, selectors.EVENT_READ, lambda _mask, _now_ns: self._drain(fd))

    def stop(self) -> None:
        """Ends `run`. May be called from a signal or another thread."""
        self._stopping = True
        with contextlib.suppress(OSError):  # it has ended already
            self._waker.send(b"\0")

    def run(self) -> None:
        """Serves until stopped, then closes everything and writes the stamps. Raises SystemExit where a fault says that
        the server dies."""
        try:
            while not self._stopping:
                for key, mask in self._wait():
                    key.data(mask, self._woken_ns)
                self._emit_due()
                self._parse_some()
                if not self._accepting:
                    self._close_idle()
        finally:
            self._shut()

    def handle(self, connection: ServerConnection, request: Request) -> None:
        """Answers one request, or starts the reply that the timing will carry on."""
        page = self._page(request)
        if page is not None:
            connection.respond(page)
        else:
            self._generate(connection, request)

    def ended(self, reply: Reply, finish: Finish | None, failure: str) -> None:
        """A reply is over, complete for the reason `finish` or broken off by `failure`."""
        self._timing.cancel(reply)
        if reply in reply.together:
            reply.together.remove(reply)
        if not reply.together:
            reply.connection.on_close = None
        self.telemetry.ended(reply, finish, failure)
        if self._stamps is not None:
            self._stamps.add(reply)

    def watch(self, connection: ServerConnection, events: int) -> None:
        if connection.sock in self._selector.get_map():
            self._selector.unregister(connection.sock)
        if events:
            self._selector.register(connection.sock, events, connection.ready)

    def forget(self, connection: ServerConnection) -> None:
        """The connection is about to be closed."""
        self.watch(connection, 0)
        self._connections.discard(connection)
        if not self._accepting:  # there is a file descriptor again
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepting = True

    @staticmethod
    def log(sentence: str) -> None:
        say(f"llm-dissect server: {sentence}")

    def _page(self, request: Request) -> Page | None:
        """The whole answer to a request, or None: it asks for a generation."""
        dialect, path = self.dialect, request.path
        is_open = path in OPEN_PATHS or (dialect.open_pages and request.method != "POST" and path in dialect.pages)
        if (
            self._authorization is not None
            and not is_open
            and request.headers.get(b"authorization") != self._authorization
        ):
            return dialect.error(401)
        if request.method == "POST" and (path in dialect.generations or path in dialect.answers):
            media_type = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if media_type != b"application/json" and dialect.media_type_error is not None:
                return dialect.media_type_error
            return self._answer(request) if path in dialect.answers else None
        if request.method in ("GET", "HEAD"):
            if path in HEALTH_PATHS and path in dialect.pages and self._starting():
                return dialect.error(503)
            if path == "/metrics":
                return Page(200, self.telemetry.render(), content_type=dialect.metrics_content_type)
            if path == TIMETABLE_PATH:
                return self._timetable()
            if path in dialect.pages:
                return dialect.pages[path]()
        known = any(path in each for each in (dialect.generations, dialect.answers, dialect.pages, ("/metrics",)))
        return dialect.error(405 if known else 404)

    def _answer(self, request: Request) -> Page:
        try:
            return self.dialect.answers[request.path](request.body)
        except Refusal as refusal:
            return refusal.page

    def _generate(self, connection: ServerConnection, request: Request) -> None:
        self._requests += 1
        if self._starting():
            self.telemetry.failed["starting"] += 1
            connection.respond(self.dialect.error(503))
            return
        fault = self._faults.striking(self._requests)
        kind = fault.kind if fault else ""
        if kind == "die":
            self.log(f"request {self._requests} ends this server, as its faults say.")
            raise SystemExit(1)
        if fault is not None and kind in AT_ONCE:
            self.telemetry.failed[kind] += 1
            self._fail_at_once(connection, fault)
            return
        request_id = request.headers.get(b"x-request-id", b"").decode("latin-1")
        try:
            wires = self.dialect.generations[request.path](
                request.body, request_id or f"{self._ids.getrandbits(128):032x}"
            )
        except Refusal as refusal:
            self.telemetry.failed["validation"] += 1
            connection.respond(refusal.page)
            return
        number = self._requests + self._more_sequences
        self._more_sequences += len(wires) - 1
        replies = [Reply(self, connection, wire, number + k, request_id, fault) for k, wire in enumerate(wires)]
        first = wires[0]
        try:
            for reply in replies:
                self._timing.submit(reply)
        except Rejected as rejected:
            for reply in replies:
                self._timing.cancel(reply)
            self.telemetry.failed["overloaded" if rejected.status == 429 else "validation"] += 1
            connection.respond(first.refused(self.dialect.error(rejected.status, str(rejected))))
            return
        if len(replies) > 1:
            for reply in replies:
                reply.together = replies
        connection.on_close = replies[0].abandon
        self.telemetry.running.update(replies)
        if first.streaming:
            connection.begin_stream(first.content_type, first.headers)

    def _fail_at_once(self, connection: ServerConnection, fault: Fault) -> None:
        if fault.kind == "refuse":
            connection.close()
        elif fault.kind == "http_error":
            connection.respond(self.dialect.error(fault.status))
        elif fault.kind == "json_error":
            connection.respond(Page(200, self.dialect.error(500).body))
        else:
            connection.respond(Page(200, b""))

    def _starting(self) -> bool:
        """A slow start is not over. Once it is, no clock is read any more."""
        if self.healthy_ns and monotonic_ns() >= self.healthy_ns:
            self.healthy_ns = 0
        return self.healthy_ns > 0

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Sleeps until a socket is ready or a token is due, and stamps the moment.

        epoll counts in milliseconds; select on the epoll's own descriptor counts in microseconds and never ends early.
        """
        timeout_s: float | None = None
        due_ns = self._timing.next_due_ns()
        if self.unparsed:
            timeout_s = 0.0
        elif due_ns is not None:
            timeout_s = max(0.0, (due_ns - monotonic_ns()) / 1e9)
        if not self._accepting:
            timeout_s = IDLE_S / 4 if timeout_s is None else min(timeout_s, IDLE_S / 4)
        ready = select.select([self._selector], [], [], timeout_s)[0]
        self._woken_ns = monotonic_ns()
        return self._selector.select(0) if ready else []

    def _emit_due(self) -> None:
        timing, late = self._timing, self._late
        for _ in range(_EMIT_AT_ONCE):
            now_ns = monotonic_ns()
            reply = timing.pop(now_ns)
            if reply is None:
                return
            reply.emit()
            late.count(now_ns - timing.popped_due_ns)

    def _timetable(self) -> Page:
        """The times that are true, and how late tokens were sent since this was asked last."""
        late, self._late = self._late, Lateness()
        return json_page(200, late.timetable(self._timing.fixed))

    def _parse_some(self) -> None:
        for _ in range(min(_PARSE_AT_ONCE, len(self.unparsed))):
            connection, data, read_ns = self.unparsed.popleft()
            try:
                connection.parse(data, read_ns)
            except Exception as error:  # one request's trouble must not end everybody's stream
                self.log(f"a request could not be served ({type(error).__name__}: {error}); its connection is closed.")
                connection.close()

    def _accept(self, _mask: int, _now_ns: int) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                self.log(f"no more than {len(self._connections)} connections: {error.strerror}; raise `ulimit -n`.")
                self._selector.unregister(self._listener)
                self._accepting = False
                return
            sock.setblocking(False)
            connection = self._between.accepted(sock, self)
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection.ready)

    def _close_idle(self) -> None:
        """Where no file descriptor is left, those who ask nothing make room, the longest idle first."""
        until_ns = self._woken_ns - int(IDLE_S * 1e9)
        idle = [(since, id(each), each) for each in self._connections if (since := each.idle_since_ns()) is not None]
        for since, _, connection in sorted(idle)[:_ACCEPT_AT_ONCE]:
            if since <= until_ns:
                connection.close()

    def _drain(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        except OSError:  # a terminal that hung up
            data = b""
        self._stopping = self._stopping or not data

    def _woken(self, _mask: int, _now_ns: int) -> None:
        self._wakeup.recv(4096)

    def _shut(self) -> None:
        for connection in list(self._connections):  # first: one that closes may give the listener back to the selector
            connection.close()
        if self._accepting:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._selector.close()
        self._wakeup.close()
        self._waker.close()
        if self._stamps is not None:
            self._stamps.write()


def _listen(host: str, port: int, *, nagle: bool) -> socket.socket:
    """A listening socket. Its options are inherited by what it accepts: without Nagle's algorithm one event is one
    segment."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, not nagle)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
