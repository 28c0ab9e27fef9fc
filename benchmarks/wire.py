"""What proxies between do to times: the embedded server behind each of them, with its defaults and mended.

    benchmarks/proxies.sh                               # Debian: unpacks HAProxy and lighttpd, installs nothing
    apt-get install nginx-light                         # a part that is not there is left out, and named
    python benchmarks/wire.py                           # prints the table of docs/reliability.md
    python benchmarks/wire.py haproxy nginx             # of these parts alone

The server's own times are known: ttft 10 ms, a token every 4 ms, 32 tokens. One request at a time, then eight.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TTFT_MS, ITL_MS, TOKENS, REQUESTS = 10, 4, 32, 60
UNPACKED = Path(__file__).resolve().parent.parent / "build/proxies"
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")

HAPROXY = """\
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  {more}
frontend front
  bind 127.0.0.1:{port}
  default_backend back
backend back
  server one 127.0.0.1:{server}
"""
LIGHTTPD = """\
server.document-root = "{directory}"
server.bind = "127.0.0.1"
server.port = {port}
server.modules = ("mod_proxy")
proxy.server = ("" => (("host" => "127.0.0.1", "port" => {server})))
proxy.forwarded = ()
{more}
"""
NGINX = """\
daemon off;
pid {directory}/pid;
error_log {directory}/errors;
events {{}}
http {{
  access_log off;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{server}; proxy_http_version 1.1; {more} }}
  }}
}}
"""


@dataclass(frozen=True)
class Part:
    """program: what must be installed; empty: the server itself, over the wire `more`."""

    name: str
    program: str = ""
    arguments: tuple[str, ...] = ()
    config: str = ""
    more: str = ""


PARTS = (
    Part("none"),
    *(Part(f"none, `--wire {wire}`", more=wire) for wire in ("nagle", "whole", "lumps:60")),
    Part("HAProxy", "haproxy", ("-db", "-f"), HAPROXY),
    Part("HAProxy, `option http-no-delay`", "haproxy", ("-db", "-f"), HAPROXY, "option http-no-delay"),
    Part("lighttpd", "lighttpd", ("-D", "-f"), LIGHTTPD),
    Part("lighttpd, `server.stream-response-body = 1`", "lighttpd", ("-D", "-f"), LIGHTTPD,
         "server.stream-response-body = 1"),
    Part("nginx, `proxy_http_version 1.1`", "nginx", ("-c",), NGINX),
    Part("nginx, `tcp_nodelay off`", "nginx", ("-c",), NGINX, "tcp_nodelay off;"),
)  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def process(*words: str, port: int) -> Iterator[None]:
    """A program that listens on that port, until the block ends."""
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield
    finally:
        started.terminate()
        started.wait()


def program_of(part: Part) -> str | None:
    """Where its program is; None where it is not installed."""
    places = (UNPACKED / "usr/sbin" / part.program, Path("/usr/sbin") / part.program)
    return shutil.which(part.program) or next((str(place) for place in places if place.exists()), None)


@contextlib.contextmanager
def served(part: Part, directory: Path) -> Iterator[int]:
    """The port at which the server answers, through the part."""
    server, port = free_port(), free_port()
    words = [*LOADGEN, "serve", "--dialect", "openai", "--port", str(server), "--ttft-ms", str(TTFT_MS)]
    words += ["--itl-ms", str(ITL_MS), "--wire", part.more if not part.program and part.more else "clean"]
    with process(*words, port=server):
        if not part.program:
            yield server
            return
        file = directory / "config"
        file.write_text(part.config.format(port=port, server=server, directory=directory, more=part.more))
        program, modules = program_of(part) or part.program, UNPACKED / "usr/lib" / part.program
        more = ("-m", str(modules)) if program.startswith(str(UNPACKED)) and modules.is_dir() else ()
        with process(program, *more, *part.arguments, str(file), port=port):
            yield port


def measured(port: int, out: Path, *more: str) -> Any:
    words = [*LOADGEN, "run", "--backend", "openai", "--url", f"http://127.0.0.1:{port}", "--requests", str(REQUESTS)]
    words += ["--input-tokens", "32", "--output-tokens", str(TOKENS), "--no-calibrate", "--out", str(out), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stderr)
    return json.loads((out / "report.json").read_text())


def cell(report: Any, metric: str) -> str:
    value = report["metrics"][metric]["p50"]
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def row(part: Part) -> str:
    with tempfile.TemporaryDirectory() as name, served(part, Path(name)) as port:
        runs = [measured(port, Path(name) / flight, "--concurrency", flight) for flight in ("1", "8")]
        quick = measured(port, Path(name) / "quick", "--concurrency", "1", "--quick-acks")
    cells = [" / ".join(cell(run, metric) for run in runs) for metric in ("ttft_ms", "tpot_ms", "itl_ms")]
    told = {each["code"] for run in runs for each in run["verdict"]["findings"] if each["severity"] == "invalid"}
    verdict = " / ".join("VALID" if run["verdict"]["valid"] else "INVALID" for run in runs)
    why = f": {', '.join(sorted(told))}" if told else ""
    return f"| {' | '.join([part.name, *cells, cell(quick, 'ttft_ms'), verdict + why])} |"


def main() -> None:
    print("| between | ttft p50, one / eight in flight | tpot p50 | itl p50 | ttft p50, `--quick-acks` | verdict |")
    print("|---|---|---|---|---|---|", flush=True)
    chosen = sys.argv[1:]
    for part in PARTS:
        if chosen and part.program not in chosen:
            continue
        if part.program and program_of(part) is None:
            print(f"{part.name} is left out: {part.program} is not installed.", file=sys.stderr)
            continue
        print(row(part), flush=True)


if __name__ == "__main__":
    main()
