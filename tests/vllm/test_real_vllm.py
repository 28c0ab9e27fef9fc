"""loadgen against a real vLLM on the CPU, serving a tiny random Llama. Run by `make test-vllm`, a few minutes.

The server's own metrics are the second opinion: what it counted and timed for the same requests, read before and after
each run. Its times end where the token leaves the engine, so the client can only be later.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serve
from tiny_model import MAX_MODEL_LEN

from backends import exit_codes
from loadgen.rundir import records
from tests.lateness import Lateness, measured_lateness
from tests.support.programs import summed_samples

pytestmark = pytest.mark.vllm

TRANSPORTS = ("fast", "aiohttp")
# Of its own TTFT of 7.8 and 7.1 s, vLLM saw the clients 147 ms (fast) and 249 ms (aiohttp) later: docs/accuracy.md. It
# stamps an arrival when its API process has read the request, and of a burst the last waits for all others: where its
# own TTFT is 2.1 s, clients were 64 to 136 ms later, 0.3 to 0.7 ms a request.
LATER_RATIO, INTAKE_MS = 0.036, 1.0
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 200, 512, 32


@dataclass(frozen=True)
class Server:
    url: str
    model_dir: Path

    def sums(self) -> dict[str, float]:
        """Every `_sum`, `_count` and `_total` sample of /metrics, added over labels."""
        return summed_samples(self.url, r"^(vllm:\w+_(?:sum|count|total))\{[^}]*\} (\S+)$")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if "vllm" not in request.config.option.markexpr:
        pytest.skip("needs a real vLLM; run `make test-vllm`")
    directory = tmp_path_factory.mktemp("vllm")
    with serve.real_vllm(directory) as url:
        yield Server(url, directory / "tiny")
        if request.session.testsfailed:
            print(f"\nthe end of the server's log:\n{serve.log_end(directory)}")


def loadgen(server: Server, out: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`loadgen run` against the server; options by flag name, e.g. input_tokens=512."""
    given = {"url": server.url, "out": out, "seed": 1, **options}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [str(Path(sys.executable).parent / "loadgen"), "run", "--no-calibrate", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Measured:
    """One run: means in ms over every request sent, warm-up included, as the client and as the server saw them."""

    lateness: Lateness  # of the machine meanwhile

    table: records.RequestTable
    client_ttft_ms: float
    server_ttft_ms: float
    client_tpot_ms: float
    server_tpot_ms: float

    @property
    def later_ms(self) -> float:
        return self.client_ttft_ms - self.server_ttft_ms

    @property
    def most_later_ms(self) -> float:
        return self.most_later_on_the_way_ms + INTAKE_MS * len(self.table)

    @property
    def most_later_on_the_way_ms(self) -> float:
        """vLLM's API process and the client both wait for a core that vLLM's engine fills."""
        return LATER_RATIO * self.server_ttft_ms + 2 * self.lateness.mean_ms


@pytest.fixture(scope="module")
def runs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    return {transport: measure(server, transport, tmp_path_factory.mktemp(transport)) for transport in TRANSPORTS}


def measure(server: Server, transport: str, directory: Path) -> Measured:
    """A burst through one transport, between two looks at the server's metrics. Where others took the machine's cores
    meanwhile, the run says that it is not valid, and is made again, twice at most."""
    for attempt in range(3):
        out = directory / f"run-{attempt}"
        before = server.sums()
        with measured_lateness() as watched:
            done = loadgen(
                server, out, backend="vllm", requests=REQUESTS, input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS,
                transport=transport, warmup=0,  # its requests that measure the wire have no records
            )  # fmt: skip
        if done.returncode != exit_codes.INVALID:
            break
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    gained = {name: value - before.get(name, 0.0) for name, value in server.sums().items()}
    assert json.loads(done.stdout.splitlines()[-1])["requests"]["ok"] == REQUESTS

    table = records.read(out)[0]
    ttft_ms = (table.first_token_ns - table.sent_ns) / 1e6
    tpot_ms = (table.last_token_ns - table.first_token_ns) / (table.output_tokens - 1) / 1e6
    assert gained["vllm:time_to_first_token_seconds_count"] == len(table)
    assert gained["vllm:prompt_tokens_total"] == table.prompt_tokens.sum()
    assert gained["vllm:generation_tokens_total"] == table.output_tokens.sum()
    return Measured(
        watched.during(out),
        table,
        float(ttft_ms.mean()),
        gained["vllm:time_to_first_token_seconds_sum"] / len(table) * 1e3,
        float(tpot_ms.mean()),
        gained["vllm:request_time_per_output_token_seconds_sum"] / len(table) * 1e3,
    )


@pytest.mark.always
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_request_is_ok_with_exact_token_counts(transport: str, runs: dict[str, Measured]) -> None:
    table = runs[transport].table
    assert table.ok.all() and int((table.phase == records.PHASES.index("measured")).sum()) == REQUESTS
    assert (table.prompt_tokens == INPUT_TOKENS).all()
    assert (table.output_tokens == OUTPUT_TOKENS).all()
    # vLLM merges events when its API process lags, never splits them
    assert (table.events >= 1).all() and (table.events <= OUTPUT_TOKENS).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_client_is_as_late_as_it_was_seen_to_be_and_never_early(transport: str, runs: dict[str, Measured]) -> None:
    measured = runs[transport]
    print(
        f"\n{transport}: TTFT mean: client {measured.client_ttft_ms:.1f} ms, vLLM's own {measured.server_ttft_ms:.1f} "
        f"ms, client later by {measured.later_ms:.2f} ms; "
        f"TPOT mean: client {measured.client_tpot_ms:.2f} ms, vLLM's own {measured.server_tpot_ms:.2f} ms"
    )
    assert 0 <= measured.later_ms <= measured.most_later_ms
    # Both time the same tokens of the same requests, so the difference is that of two latenesses over all of a reply.
    between_ms = measured.most_later_on_the_way_ms / (OUTPUT_TOKENS - 1)
    assert measured.client_tpot_ms == pytest.approx(measured.server_tpot_ms, abs=between_ms)


def test_transports_agree(runs: dict[str, Measured]) -> None:
    """By how much each is later than the server's own TTFT: the server's time differs between two runs, and cancels."""
    fast, slow = (runs[transport] for transport in TRANSPORTS)
    assert abs(fast.later_ms - slow.later_ms) <= max(fast.most_later_ms, slow.most_later_ms)
    assert fast.table.output_tokens.sum() == slow.table.output_tokens.sum()


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_text_prompts_have_exactly_the_asked_length(backend: str, server: Server, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = loadgen(
        server, out, backend=backend, tokenizer=server.model_dir, requests=32, input_tokens=256, output_tokens=16
    )
    assert done.returncode in (0, 4), done.stdout[-3000:] + done.stderr[-3000:]  # 4: on a busy machine, times are poor
    table = records.read(out)[0].measured()
    assert table.ok.all()
    assert np.unique(table.prompt_tokens).tolist() == [256]
    assert np.unique(table.output_tokens).tolist() == [16]


def test_too_long_a_prompt_is_one_clear_sentence(server: Server, tmp_path: Path) -> None:
    done = loadgen(server, tmp_path / "run", backend="vllm", input_tokens=MAX_MODEL_LEN, output_tokens=32)
    assert done.returncode == 2
    assert str(MAX_MODEL_LEN) in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_another_kind_of_server_is_named(server: Server, tmp_path: Path) -> None:
    done = loadgen(server, tmp_path / "run", backend="tgi")
    assert done.returncode == 3
    assert "vLLM" in done.stderr and len(done.stderr.strip().splitlines()) == 1
