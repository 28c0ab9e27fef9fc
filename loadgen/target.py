"""The address that requests go to, and single requests to it beside the load, such as whether the server is ready."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import SplitResult, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from backends.exit_codes import FailedError
from backends.protocol import HttpRequest
from backends.untrusted import hide, masked, printable

MOST_REPLY_BYTES = 1 << 20
UNQUEUED_S = 600.0  # at most until a reply begins that waits for no other
HANDSHAKE_S = 2.0  # of TLS: longer, and it is worth a look whether the server speaks TLS at all
PLAIN_ON_TLS, TLS_ON_PLAIN = (
    "the server speaks plain HTTP on this port, not TLS: use http:// in the address",
    "the server speaks TLS on this port, not plain HTTP: use https:// in the address",
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
REDIRECTS = (301, 302, 307, 308)

_ROUTE = re.compile(
    r"((/chat)?/completions?|/models|/responses|/embeddings|/rerank|/score|/generate(_stream)?)$"
)  # of a whole endpoint's address
_VERSION = re.compile(r"/v[0-9]+[a-z0-9.]*(?=/|$)")  # of an API, as in /v1, /api/v3, /v1beta/openai


class TransportError(FailedError):
    """The server cannot be reached or the machine cannot hold the load. One sentence, with advice."""


class Target(msgspec.Struct, frozen=True):
    """Where requests go, what they carry besides, and whom TLS trusts. `token` is sent as a bearer token.

    secrets: what of all this must never be printed or written to disk; whoever holds a target masks them. ca: file of
    the certificates that TLS trusts; None: the machine's own. insecure: any certificate will do.
    """

    url: str
    token: str | None = None
    extra_headers: tuple[tuple[str, str], ...] = ()
    ca: str | None = None
    insecure: bool = False
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        hide(self.secrets)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({masked(self.url)!r})"

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def tls(self) -> bool:
        return self.parts.scheme == "https"

    @property
    def host(self) -> str:
        return self.parts.hostname or ""

    @property
    def port(self) -> int:
        return self.parts.port or (443 if self.tls else 80)

    @property
    def route(self) -> str:
        """What the address ends with where it is that of a whole endpoint, such as /chat/completions; else empty."""
        found = _ROUTE.search(self.parts.path.rstrip("/"))
        return found[0] if found else ""

    def path(self, path: str) -> str:
        """The path of a request that a backend sends to `path`, with the address' query. Routes of OpenAI's API, /v1/*,
        lie where the address says: beside the endpoint that it names, or below its version, whichever it is; else below
        /v1. The server's other routes lie above the version."""
        base, query = self.parts.path.rstrip("/"), self.parts.query
        api = base.removesuffix(self.route)
        *_, version = (None, *_VERSION.finditer(api))
        if not path.startswith("/v1/"):
            asked = api[: version.start() if version else None] + path
        elif version or self.route.endswith(("/completions", "/models", "/responses", "/embeddings")):
            asked = api + path.removeprefix("/v1")
        else:
            asked = api + path
        return f"{asked}?{query}" if query else asked

    def url_of(self, path: str) -> str:
        """The whole address of `path`."""
        return f"{self.parts.scheme}://{self.parts.netloc}{self.path(path)}"

    def followed(self, asked: str, location: str) -> str | None:
        """Where a redirect of `asked`, a whole address, leads to; None where that is another host, port or scheme."""
        try:
            url = urljoin(asked, location)
            same = urlsplit(url)[:2] == urlsplit(asked)[:2]
        except ValueError:
            return None
        return url if same and url.isascii() and url.isprintable() and " " not in url else None

    def headers(self, request: HttpRequest) -> dict[str, str]:
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {**dict(request.headers), **bearer, **dict(self.extra_headers)}

    def tls_context(self) -> ssl.SSLContext:
        """How TLS verifies the server. Raises OSError or ssl.SSLError for a `ca` that holds no certificates."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def get(
    target: Target, path: str, timeout_s: float = 10.0, method: str = "GET"
) -> tuple[int, Mapping[str, str], bytes]:
    """One plain request beside the load, without a body: status, headers, body of the reply, after one redirect on the
    same host. timeout_s: for the connection, and for all of the reply. Raises TransportError when the server is not
    there, or slower."""
    url = target.url_of(path)
    status, fields, body = _get(target, url, timeout_s, method)
    if status in REDIRECTS and (followed := target.followed(url, fields.get("location", ""))) not in (None, url):
        assert followed is not None
        return _get(target, followed, timeout_s, method)
    return status, fields, body


def _get(target: Target, url: str, timeout_s: float, method: str) -> tuple[int, Mapping[str, str], bytes]:
    connection = _connection(target, timeout_s)
    try:
        _connect(connection, target, timeout_s)
        path = urlsplit(url)._replace(scheme="", netloc="", fragment="").geturl()
        with _limited(connection.sock, timeout_s) as is_late:
            connection.request(method, path, headers=target.headers(HttpRequest(method, path, b"", ())))
            reply = connection.getresponse()
            body = reply.read(MOST_REPLY_BYTES)
            if is_late():
                raise TimeoutError
        if reply.status == 400 and not target.tls and _speaks_tls(target):  # the answer of nginx and of Go
            raise TransportError(f"cannot use {target.url}: {TLS_ON_PLAIN}.")
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, body
    except (OSError, ValueError, http.client.HTTPException) as error:
        closed = isinstance(error, (http.client.BadStatusLine, ConnectionResetError))  # an alert of TLS, or an end
        if closed and not target.tls and _speaks_tls(target):
            raise TransportError(f"cannot use {target.url}: {TLS_ON_PLAIN}.") from None
        raise TransportError(_unreachable(target, error)) from None
    finally:
        connection.close()


@contextlib.contextmanager
def _limited(sock: socket.socket, timeout_s: float) -> Iterator[Callable[[], bool]]:
    """Ends what is read from a socket after so long, however its bytes drip: a socket's own timeout begins anew with
    each. Gives whether it did. Raises TimeoutError for what the block raises then."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of TLS, too, without its goodbye

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield late.is_set
    except (OSError, ValueError, http.client.HTTPException):
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()


def no_connection(target: Target, error: Exception) -> str:
    """One sentence for what kept a connection to the target from opening, with what to do. It asks the server once
    more where the server may not speak TLS. Never raises."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"cannot trust {target.url}: {reason(error)}; name the file of its authority's certificate with --ca or in "
            "SSL_CERT_FILE, or take any certificate with --insecure."
        )
    unfinished = isinstance(error, (ssl.SSLError, TimeoutError, ConnectionResetError))
    alert = "ALERT" in (getattr(error, "reason", None) or "")  # of a server that speaks TLS, though not with us
    if target.tls and unfinished and not alert and _speaks_http(target):
        return f"cannot use {target.url}: {PLAIN_ON_TLS}."
    return _unreachable(target, error)


def reason(error: BaseException) -> str:
    """Why there is no connection, as a clause."""
    if isinstance(error, TimeoutError) and not error.strerror:
        return "timed out"
    if isinstance(error, ssl.SSLError):
        return str(getattr(error, "verify_message", "") or error.reason or error)
    if isinstance(error, OSError) and error.errno:
        return error.strerror or os.strerror(error.errno)
    return printable(str(error)) or type(error).__name__


def _unreachable(target: Target, error: Exception) -> str:
    return f"cannot reach {target.url}: {reason(error)}; is the server running there?{_unused_proxy(target)}"


def _unused_proxy(target: Target) -> str:
    """A sentence where the environment names a proxy for the target: the load never goes through one, whose times would
    be measured too. Empty where it names none. What the variable holds may be a secret."""
    proxies = getproxies()
    if target.host in ("", *LOOPBACK) or proxy_bypass(f"{target.host}:{target.port}"):
        return ""
    kind = next((kind for kind in (target.parts.scheme, "all") if proxies.get(kind)), None)
    if kind is None:
        return ""
    name = next((name for name in (f"{kind}_proxy", f"{kind}_proxy".upper()) if os.environ.get(name)), "a proxy")
    return (
        f" {name} is set in the environment, and loadgen does not use it: requests go to the server itself, and to no "
        "proxy; give an address that this machine reaches, such as the end of a tunnel."
    )


def _connection(target: Target, timeout_s: float) -> http.client.HTTPConnection:
    if target.tls:
        context = target.tls_context()
        return http.client.HTTPSConnection(target.host, target.port, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)


def _connect(connection: http.client.HTTPConnection, target: Target, timeout_s: float) -> None:
    """Connects. A server without TLS may wait for ever for the end of what it takes for a request: a slow handshake
    gets all the time only where the server does not answer plain HTTP. Raises TransportError."""
    brief_s = min(timeout_s, HANDSHAKE_S) if target.tls else timeout_s
    try:
        connection.timeout = brief_s
        try:
            connection.connect()
        except TimeoutError:
            if brief_s == timeout_s or _speaks_http(target):
                raise
            connection.timeout = timeout_s
            connection.connect()
    except OSError as error:
        raise TransportError(no_connection(target, error)) from None
    connection.sock.settimeout(timeout_s)


def _speaks_http(target: Target) -> bool:
    """Whether a plain request on the target's port is answered."""
    try:
        with socket.create_connection((target.host, target.port), HANDSHAKE_S) as sock:
            sock.sendall(f"GET / HTTP/1.1\r\nHost: {target.host}\r\nConnection: close\r\n\r\n".encode())
            return sock.recv(5) == b"HTTP/"
    except (OSError, ValueError):
        return False


def _speaks_tls(target: Target) -> bool:
    """Whether a TLS handshake succeeds on the target's port, with whatever certificate."""
    context = Target(target.url, insecure=True).tls_context()
    try:
        with socket.create_connection((target.host, target.port), HANDSHAKE_S) as sock, context.wrap_socket(sock):
            return True
    except (OSError, ValueError):
        return False
