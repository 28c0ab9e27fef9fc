"""A server whose `/metrics` answers what a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """What a server answers to GET /metrics, and what it was sent."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    seen: list[dict[str, str]] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None


@contextmanager
def scripted() -> Iterator[Script]:
    script = Script(body=b"running 3\n")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            script.seen.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
            self.send_response(script.status)
            self.send_header("Content-Length", str(len(script.body)))
            self.end_headers()
            self.wfile.write(script.body)
            self.close_connection = stopped.is_set()

        def log_message(self, *_: Any) -> None: ...

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None: ...

    stopped = threading.Event()
    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            server.shutdown()
            server.server_close()
            thread.join()

    script.url, script.stop = f"http://127.0.0.1:{server.server_address[1]}", stop
    yield script
    stop()
