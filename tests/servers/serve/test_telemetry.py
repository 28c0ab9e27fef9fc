"""`/metrics` says what was served, in each server's names and in Prometheus' text format."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from servers.serve.telemetry import Buckets, Histogram, Sample, Telemetry, labels_of
from tests.servers.reader import http_request, running

LABELS = '{model_name="m",engine="0"}'


def test_histogram_bounds_are_included_and_counts_cumulate() -> None:
    histogram = Histogram((0.1, 0.5, 1.0), unit=1000)
    for value in (0, 100, 101, 500, 999, 1000, 1001, 10**9):
        histogram.observe(value)
    assert histogram.lines("h", 'a="b"') == [
        'h_bucket{a="b",le="0.1"} 2.0',
        'h_bucket{a="b",le="0.5"} 4.0',
        'h_bucket{a="b",le="1.0"} 6.0',
        'h_bucket{a="b",le="+Inf"} 8.0',
        'h_count{a="b"} 8.0',
        'h_sum{a="b"} 1000003.701',
    ]


def test_text_format() -> None:
    telemetry = Telemetry(
        [
            Sample("runs_total", "counter", "Runs.", lambda _: {"": 3}),
            Sample("by_kind", "gauge", "By kind.", lambda _: {'a"b': 1.5, "c\\d": 2}, label="kind"),
            Buckets("wait_seconds", "Waits.", "queue", (1.0,)),
        ],
        labels_of(model='x"y'),
    )
    assert telemetry.render().decode().splitlines() == [
        "# HELP runs_total Runs.",
        "# TYPE runs_total counter",
        'runs_total{model="x\\"y"} 3.0',
        "# HELP by_kind By kind.",
        "# TYPE by_kind gauge",
        'by_kind{model="x\\"y",kind="a\\"b"} 1.5',
        'by_kind{model="x\\"y",kind="c\\\\d"} 2.0',
        "# HELP wait_seconds Waits.",
        "# TYPE wait_seconds histogram",
        'wait_seconds_bucket{model="x\\"y",le="1.0"} 0.0',
        'wait_seconds_bucket{model="x\\"y",le="+Inf"} 0.0',
        'wait_seconds_count{model="x\\"y"} 0.0',
        'wait_seconds_sum{model="x\\"y"} 0.0',
    ]


@pytest.mark.parametrize("dialect", ["vllm", "openai", "tgi", "lightllm", "sglang"])
def test_every_line_is_prometheus_text(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect) as server:
        text = server.ask("GET", "/metrics").body.decode()
    assert text.endswith("\n")
    line = re.compile(r'[a-z0-9_:]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? (-?\d+\.\d+|\d+(\.\d+)?e[-+]\d+)')
    families = []
    for each in text.splitlines():
        if each.startswith("# TYPE "):
            families.append(each.split()[2])
        elif not each.startswith("#"):
            assert line.fullmatch(each), each
            assert each.startswith(families[-1])
    assert len(families) == len(set(families)) > 10


def test_vllm_counts_what_was_served(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", ttft_ms=30, itl_ms=10) as server:
        for n_prompt, n_tokens, stream in ((3, 1, True), (5, 4, True), (7, 6, False)):
            server.post("/v1/completions", {"prompt": [0] * n_prompt, "max_tokens": n_tokens, "stream": stream})
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 0}).status == 400
        samples = server.metrics()
    expected = {
        "vllm:prompt_tokens_total": 15,
        "vllm:generation_tokens_total": 11,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:time_to_first_token_seconds_count": 3,
        "vllm:inter_token_latency_seconds_count": 0 + 3 + 5,
        "vllm:e2e_request_latency_seconds_count": 3,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 15,
        "vllm:request_generation_tokens_sum": 11,
        "vllm:request_params_max_tokens_sum": 11,
    }
    assert {name: samples[name + LABELS] for name in expected} == expected
    success = "vllm:request_success_total" + LABELS[:-1] + ',finished_reason="%s"}'
    assert [samples[success % reason] for reason in ("length", "stop", "abort")] == [3, 0, 1]
    # Never early, so never less than the truth; above it by what a busy machine adds.
    assert samples["vllm:time_to_first_token_seconds_sum" + LABELS] >= 3 * 0.030
    assert samples['vllm:time_to_first_token_seconds_bucket{model_name="m",engine="0",le="0.02"}'] == 0
    assert samples["vllm:e2e_request_latency_seconds_sum" + LABELS] >= 3 * 0.030 + (3 + 5) * 0.010


def test_tokens_of_a_running_request_count_as_they_are_sent(tmp_path: Path) -> None:
    request = http_request("/v1/completions", {"prompt": "a b", "max_tokens": 8, "stream": True})
    with (
        running(tmp_path, "vllm", "stall:1", ttft_ms=1, itl_ms=1) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock,
    ):
        sock.sendall(request)
        received = b""
        while received.count(b"data: ") < 4:
            received += sock.recv(65536)
        samples = server.metrics()
    assert samples["vllm:generation_tokens_total" + LABELS] == 4
    assert samples["vllm:prompt_tokens_total" + LABELS] == 2


def test_tgi_counts_what_was_served(tmp_path: Path) -> None:
    with running(tmp_path, "tgi", "stream_error:3") as server:
        for route in ("/generate", "/generate_stream", "/generate_stream"):
            server.post(route, {"inputs": "a b", "parameters": {"max_new_tokens": 4}})
        server.post("/generate_stream", {"inputs": "", "parameters": {"max_new_tokens": 4}})
        samples = server.metrics()
    assert samples["tgi_request_count"] == 4
    assert samples["tgi_request_success"] == 2
    assert samples['tgi_request_failure{err="validation"}'] == 1
    assert samples['tgi_request_failure{err="stream_error"}'] == 1
    assert samples["tgi_request_generated_tokens_sum"] == 8
    assert samples["tgi_request_input_length_sum"] == 6
    assert samples["tgi_queue_size"] == 0
    assert samples["tgi_request_duration_count"] == 2


def test_lightllm_counts_what_was_served(tmp_path: Path) -> None:
    with running(tmp_path, "lightllm") as server:
        for route in ("/generate", "/generate_stream"):
            server.post(route, {"inputs": [1, 2, 3], "parameters": {"max_new_tokens": 4}})
        answer = server.ask("GET", "/metrics")
        samples = server.metrics()
    assert "content-type" not in answer.headers
    label = '{model_name="m"}'
    assert samples["lightllm_request_count_total" + label] == 2
    assert samples["lightllm_request_success_total" + label] == 2
    assert samples["lightllm_prompt_tokens_total" + label] == 6
    assert samples["lightllm_generation_tokens_total" + label] == 8
    assert samples["lightllm_request_first_token_duration_count" + label] == 2
    assert samples['lightllm_request_queue_duration_bucket_bucket{model_name="m",le="+Inf"}'] == 2
