"""What real parts between do to times: the embedded server behind each, by its defaults and mended; what loadgen says
of it, and what two other tools say.

    benchmarks/proxies.sh           # Debian: unpacks HAProxy and lighttpd, installs nothing; nginx is the machine's own
    benchmarks/peers.sh             # sglang-router, vllm bench serve and guidellm, 6 GB
    python benchmarks/wire.py       # prints the table of docs/reliability.md; what is not there is left out, and named
    python benchmarks/wire.py haproxy nginx             # of these parts alone

The server's own times are known: ttft 10 ms, a token every 4 ms, 32 tokens. One request at a time, then eight.
"""

from __future__ import annotations

import contextlib
import json
import os
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

import numpy as np
from side_by_side.clients import CLIENTS, PEERS, ROOT, Client, Shape, Work

TTFT_MS, ITL_MS, TOKENS, REQUESTS = 10, 4, 32, 60
INPUT_TOKENS, MODEL = 32, "llama-2-7b"  # the router lists no name, and the server wants its own
UNPACKED = ROOT / "build/proxies"
OTHERS = [client for client in CLIENTS if client.name in ("vllm", "guidellm")]
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
    """program: what must be installed; empty: the server itself, over the wire `more`. arguments: with the places of
    its ports and, where it has a `config`, of that file."""

    name: str
    program: str = ""
    arguments: tuple[str, ...] = ()
    config: str = ""
    more: str = ""


PARTS = (
    Part("none"),
    *(Part(f"none, `--wire {wire}`", more=wire) for wire in ("nagle", "whole", "lumps:60")),
    Part("HAProxy", "haproxy", ("-db", "-f", "{file}"), HAPROXY),
    Part("HAProxy, `option http-no-delay`", "haproxy", ("-db", "-f", "{file}"), HAPROXY, "option http-no-delay"),
    Part("lighttpd", "lighttpd", ("-D", "-f", "{file}"), LIGHTTPD),
    Part("lighttpd, `server.stream-response-body = 1`", "lighttpd", ("-D", "-f", "{file}"), LIGHTTPD,
         "server.stream-response-body = 1"),
    Part("nginx, `proxy_http_version 1.1`", "nginx", ("-c", "{file}"), NGINX),
    Part("nginx, `tcp_nodelay off`", "nginx", ("-c", "{file}"), NGINX, "tcp_nodelay off;"),
    Part("sglang-router", "sglang-router", (
        "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "error",
        "--prometheus-port", "{metrics}", "--worker-urls", "http://127.0.0.1:{server}")),
)  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def process(*words: str, port: int) -> Iterator[None]:
    """A program that listens on that port, until the block ends, and answers there."""
    libraries = ":".join(map(str, (UNPACKED / "usr/lib").glob("*-linux-gnu*")))  # of what was unpacked
    unpacked = {"LD_LIBRARY_PATH": libraries} if words[0].startswith(str(UNPACKED)) else {}
    started = subprocess.Popen(
        words, env={**os.environ, **unpacked}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
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
    places = (
        UNPACKED / "usr/sbin" / part.program,
        Path("/usr/sbin") / part.program,
        PEERS / part.program / "bin/python",
    )
    return shutil.which(part.program) or next((str(place) for place in places if place.exists()), None)


@contextlib.contextmanager
def behind(part: Part, server: int, directory: Path) -> Iterator[int]:
    """The port at which the part passes on what a server at that port says."""
    port = free_port()
    places = {"port": port, "server": server, "file": directory / "config", "metrics": free_port()}
    (directory / "config").write_text(part.config.format(directory=directory, more=part.more, **places))
    program, modules = program_of(part) or part.program, UNPACKED / "usr/lib" / part.program
    more = ("-m", str(modules)) if program.startswith(str(UNPACKED)) and modules.is_dir() else ()
    with process(program, *more, *(each.format(**places) for each in part.arguments), port=port):
        yield port


@contextlib.contextmanager
def served(part: Part, directory: Path) -> Iterator[int]:
    """The port at which the server answers, through the part."""
    server, wire = free_port(), part.more if not part.program and part.more else "clean"
    words = [*LOADGEN, "serve", "--dialect", "openai", "--port", str(server), "--ttft-ms", str(TTFT_MS)]
    with process(*words, "--itl-ms", str(ITL_MS), "--wire", wire, port=server):
        if not part.program:
            yield server
            return
        with behind(part, server, directory) as port:
            yield port


def command(port: int, out: Path, requests: int, *more: str) -> list[str]:
    """What loadgen is told."""
    words = ["run", "--backend", "openai", "--url", f"http://127.0.0.1:{port}", "--requests", str(requests), *more]
    words += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(TOKENS)]
    return [*words, "--no-calibrate", "--out", str(out)]


def measured(port: int, out: Path, *more: str) -> Any:
    words = [*LOADGEN, *command(port, out, REQUESTS, "--model", MODEL, *more)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stderr)
    return json.loads((out / "report.json").read_text())


def written(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def by_another(client: Client, port: int, directory: Path) -> str:
    """ttft, then tpot as that tool has them in the median, each one at a time and eight."""
    pairs = []
    for concurrency in (1, 8):
        out = directory / f"{client.name}{concurrency}"
        out.mkdir()
        shape = Shape(REQUESTS, TOKENS, TTFT_MS, ITL_MS, input_tokens=INPUT_TOKENS, concurrency=concurrency)
        words = client.command(Work(shape, f"http://127.0.0.1:{port}", MODEL, ROOT / "build/tiny_model", out))
        done = subprocess.run(words, env=os.environ | client.env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{client.name}: {done.stderr[-2000:]}")
        said = client.read(out)
        assert said.tpot_ms is not None
        pairs.append([float(np.median(each)) for each in (said.ttft_ms, said.tpot_ms)])
    return "; ".join(" / ".join(map(written, values)) for values in zip(*pairs, strict=True))


def row(part: Part, others: list[Client]) -> str:
    with tempfile.TemporaryDirectory() as name, served(part, Path(name)) as port:
        runs = [measured(port, Path(name) / flight, "--concurrency", flight) for flight in ("1", "8")]
        quick = measured(port, Path(name) / "quick", "--concurrency", "1", "--quick-acks")
        beside = [by_another(client, port, Path(name)) for client in others]
    cells = [" / ".join(written(run["metrics"][metric]["p50"]) for run in runs) for metric in ("ttft_ms", "tpot_ms")]
    told = {each["code"] for run in runs for each in run["verdict"]["findings"] if each["severity"] == "invalid"}
    verdict = " / ".join("VALID" if run["verdict"]["valid"] else "INVALID" for run in runs)
    why = f": {', '.join(sorted(told))}" if told else ""
    quick_ms = written(quick["metrics"]["ttft_ms"]["p50"])
    return f"| {' | '.join([part.name, *cells, quick_ms, verdict + why, *beside])} |"


def main() -> None:
    others = [client for client in OTHERS if client.needs.exists()]
    for client in OTHERS:
        if client not in others:
            print(f"{client.title} is left out: it is not installed.", file=sys.stderr)
    if others and not (ROOT / "build/tiny_model/config.json").exists():
        subprocess.run(
            [sys.executable, str(ROOT / "tests/vllm/tiny_model.py"), str(ROOT / "build/tiny_model")], check=True
        )
    columns = ["between", "ttft p50, ms, one / eight in flight", "tpot p50", "ttft p50, `--quick-acks`", "verdict"]
    columns += [f"{client.title}: ttft; tpot" for client in others]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    chosen = sys.argv[1:]
    for part in PARTS:
        if chosen and part.program not in chosen:
            continue
        if part.program and program_of(part) is None:
            print(f"{part.name} is left out: {part.program} is not installed.", file=sys.stderr)
            continue
        print(row(part, others), flush=True)


if __name__ == "__main__":
    main()
