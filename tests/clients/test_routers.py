"""Real routers in front of three embedded servers: a load goes through, conversations stay together, an uneven split, a
replica that dies and a router without any are told as what they are."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import embedded, program
from tests.support.waiting import free_ports

PYTHON = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
SESSIONS, TURNS = 9, 5
ALIKE = 14  # requests of one conversation
DIES_AT = SESSIONS * TURNS + ALIKE + 1  # no replica is asked so often before the run in which one dies


@dataclass(frozen=True)
class Router:
    backend: str
    module: str
    policy: str
    header: str  # that names a conversation to it
    url: str = ""
    replicas: tuple[str, ...] = ()


VLLM = Router("vllm", "vllm_router", "consistent_hash", "X-Session-ID")
SGLANG = Router("sglang", "sglang_router", "manual", "X-SMG-Routing-Key")


@contextlib.contextmanager
def started(router: Router, replicas: contextlib.ExitStack) -> Iterator[Router]:
    """The router, and three replicas, which `replicas` ends; the third dies at a request."""
    faults = ((), (), ("--fault", f"die:@{DIES_AT}"))
    urls = [replicas.enter_context(embedded(router.backend, 20, 5, *more)) for more in faults]
    port, metrics = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    words = [str(PYTHON), "-m", f"{router.module}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(metrics), "--policy", router.policy, "--log-level", "error"]
    words += ["--worker-startup-check-interval", "1", "--disable-retries", "--worker-urls", *urls]
    with program(words, url, "/health"):
        yield Router(router.backend, router.module, router.policy, router.header, url, tuple(urls))


def run(router: Router, out: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was said, and the report, of a run through the router."""
    words = [sys.executable, "-m", "loadgen", "run", "--url", router.url, "--backend", router.backend, "--no-calibrate"]
    words += ["--input-tokens", "32", "--output-tokens", "16", "--warmup", "0", "--out", str(out), *options]
    for each in router.replicas:
        words += ["--metrics-url", each]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    report = out / "report.json"
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text()) if report.exists() else {}


def found(report: dict[str, Any]) -> dict[str, str]:
    return {each["code"]: each["message"] for each in report["verdict"]["findings"]}


@pytest.mark.clients
@pytest.mark.parametrize("kind", [VLLM, SGLANG], ids=lambda kind: kind.module)
def test_what_stands_behind_a_router(kind: Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as replicas, started(kind, replicas) as router:
        # conversations stay together
        said = run(router, tmp_path / "sessions", "--sessions", str(SESSIONS), "--turns", str(TURNS), "--concurrency",
                   "4", "--think-time", "0.02", "--session-header", router.header)  # fmt: skip
        report = said[2]
        assert report["requests"]["ok"] == SESSIONS * TURNS, said[1]
        tokens = [each["generation_tokens"] for each in report["server"]["replicas"]]
        assert sum(tokens) == SESSIONS * TURNS * 16 and not any(each % (TURNS * 16) for each in tokens)
        assert sum(map(bool, tokens)) > 1

        # one conversation is one replica's
        monkeypatch.setenv("CONVERSATION", "one")
        said = run(
            router, tmp_path / "alike", "--requests", str(ALIKE), "--header", f"{router.header}=env:CONVERSATION"
        )
        tokens = [each["generation_tokens"] for each in said[2]["server"]["replicas"]]
        assert sorted(tokens) == [0, 0, ALIKE * 16]
        assert found(said[2])["IMBALANCE"].startswith("Of 3 replicas, the busiest generated 3.00 times the mean")

        # a replica dies
        _, text, report = run(router, tmp_path / "dies", "--arrival", "poisson:100", "--duration", "4",
                              "--session-header", router.header)  # fmt: skip
        outcomes: Counter[tuple[str, str]] = Counter()
        for line in (tmp_path / "dies" / "requests.jsonl").read_text().splitlines()[1:]:
            record = json.loads(line)
            outcomes[(record.get("outcome", ""), record.get("error") or "")] += 1
        dead = router.replicas[2]
        assert any(outcome == "ok" for outcome, _ in outcomes), text
        for outcome, error in outcomes:
            assert (
                outcome in ("", "ok")
                or (
                    outcome == "truncated" and error == "the reply ended before the server had said that it is complete"
                )
                or (outcome == "http_error" and error.startswith("HTTP 5") and (dead in error or "orker" in error))
            ), (outcome, error)
        lost = found(report)["REPLICA_LOST"]
        assert lost.startswith(f"Of 3 replicas, {dead}/metrics answered last "), lost

        # none is left
        replicas.close()
        code, text, report = run(router, tmp_path / "none", "--requests", "5")
        assert code == 3 and not report
        assert "answers 5" in text and "of a router, see that its workers run" in text and "Traceback" not in text
