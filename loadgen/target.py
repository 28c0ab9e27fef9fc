"""The address that requests go to, and single requests to it beside the load, such as whether the server is ready."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

import msgspec

from backends.protocol import HttpRequest

UNQUEUED_S = 600.0  # at most until a reply begins that waits for no other


class TransportError(Exception):
    """The server cannot be reached or the machine cannot hold the load. One sentence, with advice."""


class Target(msgspec.Struct, frozen=True):
    """Where requests go. `token` is sent as a bearer token and must never be printed or written to disk."""

    url: str
    token: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

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
    def base_path(self) -> str:
        return self.parts.path.rstrip("/").removesuffix("/v1")  # as OpenAI clients are given their base URL

    def headers(self, request: HttpRequest) -> dict[str, str]:
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {**dict(request.headers), **bearer}


def get(
    target: Target, path: str, timeout_s: float = 10.0, method: str = "GET"
) -> tuple[int, Mapping[str, str], bytes]:
    """One plain request beside the load, without a body: status, headers, body of the reply. Raises TransportError when
    the server is not there."""
    kind = http.client.HTTPSConnection if target.tls else http.client.HTTPConnection
    connection = kind(target.host, target.port, timeout=timeout_s)
    try:
        headers = target.headers(HttpRequest(method, path, b"", ()))
        connection.request(method, target.base_path + path, headers=headers)
        reply = connection.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read(1 << 20)
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a host name that cannot be one
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TransportError(f"cannot reach {target.url}: {reason}; is the server running there?") from None
    finally:
        connection.close()
