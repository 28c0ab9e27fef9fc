"""A registry on 127.0.0.1 that holds one image, as much of the protocol as an engine needs to pull it.

Engines take registries on 127.0.0.0/8 without TLS. The layer can be held back halfway, and every answer can be a
refusal.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPOSITORY = "some/server"


@dataclass
class Registry:
    """`refuse`: the status of every answer. `go_on`: while it is not set, only half of the layer is sent."""

    layer: bytes
    config: bytes
    refuse: int | None = None
    port: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.blobs = {digest(self.layer): self.layer, digest(self.config): self.config}
        kind = "application/vnd.docker"
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": f"{kind}.distribution.manifest.v2+json",
                "config": {
                    "mediaType": f"{kind}.container.image.v1+json",
                    "size": len(self.config),
                    "digest": digest(self.config),
                },
                "layers": [
                    {
                        "mediaType": f"{kind}.image.rootfs.diff.tar.gzip",
                        "size": len(self.layer),
                        "digest": digest(self.layer),
                    }
                ],
            }
        ).encode()

    @property
    def image(self) -> str:
        return f"127.0.0.1:{self.port}/{REPOSITORY}:1"


def compressed(layer: bytes) -> bytes:
    return gzip.compress(layer, compresslevel=1, mtime=0)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextlib.contextmanager
def serving(registry: Registry) -> Iterator[Registry]:
    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            if registry.refuse is not None and (self.path != "/v2/" or registry.refuse != 404):
                self.fail(registry.refuse)
            elif self.path == "/v2/":
                self.answer(200, b"{}", "application/json")
            elif "/manifests/" in self.path and name in ("1", digest(registry.manifest)):
                kind = "application/vnd.docker.distribution.manifest.v2+json"
                self.answer(200, registry.manifest, kind)
            elif "/blobs/" in self.path and name in registry.blobs:
                self.answer(200, registry.blobs[name], "application/octet-stream")
            else:
                self.fail(404)

        def fail(self, status: int) -> None:
            code = {401: "UNAUTHORIZED", 404: "MANIFEST_UNKNOWN"}.get(status, "UNKNOWN")
            error = {"code": code, "message": code.replace("_", " ").lower()}
            self.answer(status, json.dumps({"errors": [error]}).encode(), "application/json")

        def answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", digest(body))
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="test"')
            self.end_headers()
            if self.command == "HEAD":
                return
            half = len(body) // 2 if body is registry.layer else 0
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[:half])
                if half:
                    registry.go_on.wait()
                self.wfile.write(body[half:])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    registry.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield registry
    finally:
        registry.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
