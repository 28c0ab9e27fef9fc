"""Results of other load generators become run directories: the same latencies, and what was not kept is unknown. The
documents have the fields of real files (vLLM 0.32, SGLang 0.5.23, guidellm 0.8.1, aiperf 0.13.0), inference-perf's and
genai-perf's those of their sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen import cli
from loadgen.report import build
from loadgen.rundir import listing, others

DETAILED = {
    "model_id": "m", "duration": 1.0, "completed": 2, "request_rate": "inf", "max_concurrency": 2, "burstiness": 1.0,
    "start_times": [100.0, 100.1], "ttfts": [0.2, 0.3], "itls": [[0.01] * 4, [0.02] * 4], "latencies": [0.25, 0.39],
    "input_lens": [7, 8], "output_lens": [5, 5], "errors": ["", ""],
}  # fmt: skip
SGLANG = {
    "random_input_len": 8, "duration": 1.0, "completed": 2, "request_rate": "inf", "max_concurrency": 1, "backend": "s",
    "ttfts": [0.2, 0.3], "itls": [[0.01] * 4, [0.02] * 4], "input_lens": [7, 8], "output_lens": [5, 5],
    "errors": ["", ""],
}  # fmt: skip


def guidellm_row(sent: float, ttft: float, gap: float) -> dict[str, Any]:
    first = sent + ttft
    times = {"targeted_start": sent, "first_token_iteration": first, "last_token_iteration": first + 4 * gap}
    return {
        "request_start_time": sent, "request_end_time": first + 4 * gap + 0.01, "prompt_tokens": 7, "output_tokens": 5,
        "request_args": '{"body": {"model": "m"}}', "info": {"timings": times, "error": None},
    }  # fmt: skip


GUIDELLM = {
    "metadata": {"guidellm_version": "0.8.1"},
    "benchmarks": [{
        "config": {"strategy": {"type_": "concurrent", "streams": 2}},
        "requests": {"successful": [guidellm_row(100.0, 0.2, 0.01), guidellm_row(100.1, 0.3, 0.02)], "errored": []},
    }],
}  # fmt: skip


def aiperf_row(sent: float, ttft: float, gap: float) -> dict[str, Any]:
    metrics = {
        "time_to_first_token": 1e3 * ttft, "inter_chunk_latency": [1e3 * gap] * 4, "usage_prompt_tokens": 7,
        "usage_completion_tokens": 5,
    }  # fmt: skip
    about = {"request_start_ns": int(1e9 * sent), "request_end_ns": int(1e9 * (sent + ttft + 4 * gap + 0.01))}
    return {"metadata": about, "metrics": {name: {"value": value} for name, value in metrics.items()}}


AIPERF = [aiperf_row(100.0, 0.2, 0.01), aiperf_row(100.1, 0.3, 0.02)]
INFERENCE_PERF = [
    {
        "start_time": sent, "end_time": sent + ttft + 4 * gap + 0.01, "request": '{"model": "m"}', "error": None,
        "info": {
            "response_metrics": {
                "chunk_times": [sent + ttft + number * gap for number in range(5)], "output_tokens": 5,
                "server_usage": {"prompt_tokens": 7, "completion_tokens": 5},
            }
        },
    }
    for sent, ttft, gap in ((100.0, 0.2, 0.01), (100.1, 0.3, 0.02))
]  # fmt: skip
GENAI_PERF = {
    "experiments": [{
        "experiment": {"mode": "concurrency", "value": 2},
        "requests": [
            {"timestamp": sent, "response_timestamps": [sent + ttft + number * gap for number in range(5)]}
            for sent, ttft, gap in ((10**9, 200_000_000, 10_000_000), (11 * 10**8, 300_000_000, 20_000_000))
        ],
    }]
}  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("text", "tool", "has_itl", "has_tpot"),
    [
        (json.dumps(DETAILED), "vllm bench serve", True, True),
        (lines([SGLANG]), "SGLang's bench", True, True),
        (json.dumps(GUIDELLM), "guidellm 0.8.1", False, True),
        (lines(AIPERF), "aiperf", True, True),
        (json.dumps(INFERENCE_PERF), "inference-perf", True, True),
        (json.dumps(GENAI_PERF), "genai-perf", True, False),
    ],
)
def test_latencies_are_those_of_the_file(text: str, tool: str, has_itl: bool, has_tpot: bool, tmp_path: Path) -> None:
    file, out = tmp_path / "theirs", tmp_path / "runs" / "a"
    file.write_text(text)
    assert cli.invoke(["import", str(file), "--out", str(out)]) == 0
    report, _ = build.from_directory(out)
    assert report.imported == tool and report.requests.ok == 2
    ttft, tpot, itl = (report.metrics[name] for name in ("ttft_ms", "tpot_ms", "itl_ms"))
    assert (ttft.min, ttft.max) == pytest.approx((200, 300), abs=0.01)
    assert ((tpot.min, tpot.max) == pytest.approx((10, 20), abs=0.01)) if has_tpot else tpot.n == 0
    assert itl.n == (8 if has_itl else 0)
    assert [finding.code for finding in report.verdict.findings].count("IMPORTED") == 1
    (listed,) = listing.runs(out.parent)
    assert listed.valid is None  # nobody judged it


def test_requests_that_failed_stay_failed(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({**DETAILED, "errors": ["", "refused"], "ttfts": [0.2, 0.0], "itls": [[0.01] * 4, []]}))
    (load,) = others.read(file)
    assert [record.outcome for record in load.records] == ["ok", "http_error"]
    assert load.records[1].error == "refused" and load.records[1].first_token_ns is None


def test_what_sglang_does_not_keep_is_put_together_from_the_concurrency(tmp_path: Path) -> None:
    file = tmp_path / "result.jsonl"
    file.write_text(lines([SGLANG]))
    (load,) = others.read(file)
    assert [record.sent_ns for record in load.records] == [0, 240_000_000]  # one after the other
    assert "put together" in load.lacks


def test_a_rate_that_waited_for_a_limit_is_no_open_load(tmp_path: Path) -> None:
    """The tool sent a request when one before it had ended, so its times do not tell whether the server kept up."""
    file, out = tmp_path / "result.json", tmp_path / "a"
    file.write_text(json.dumps({**DETAILED, "request_rate": 60.0, "max_concurrency": 2}))
    assert cli.invoke(["import", str(file), "--out", str(out)]) == 0
    report, _ = build.from_directory(out)
    assert report.arrival == "concurrency:2" and (report.steady is None or report.steady.keeping_up is None)
    file.write_text(json.dumps({**DETAILED, "request_rate": 60.0, "max_concurrency": None}))
    (load,) = others.read(file)
    assert load.arrival == "poisson:60"


def test_what_guidellm_never_sent_is_no_request(tmp_path: Path) -> None:
    never = {**guidellm_row(100.2, 0.1, 0.01), "request_start_time": None, "request_end_time": None}
    file = tmp_path / "result.json"
    (benchmark,) = GUIDELLM["benchmarks"]
    requests = {**benchmark["requests"], "incomplete": [never]}
    file.write_text(json.dumps({**GUIDELLM, "benchmarks": [{**benchmark, "requests": requests}]}))
    (load,) = others.read(file)
    assert len(load.records) == 2 and load.model == "m"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_id": "m"', "is no JSON"),
        ('{"a": 1}', "is of no tool that is known here: vllm bench serve"),
        ("[]", "is of no tool"),
        (json.dumps({"model_id": "m", "duration": 1, "completed": 1}), "write them with --save-detailed"),
        (json.dumps({**DETAILED, "start_times": None}), "lacks what its tool's files have"),
        (json.dumps({**DETAILED, "ttfts": [0.1]}), "lacks what its tool's files have"),
        (json.dumps({**SGLANG, "request_rate": 4.0}), "at a rate that cannot be told"),
        (json.dumps({**GUIDELLM, "benchmarks": []}), "holds no request"),
        (json.dumps({"metadata": {}, "metrics": {}}), "lacks what its tool's files have"),
        (json.dumps({**DETAILED, "start_times": [1e400, 0]}).replace("Infinity", "1e400"), "is no JSON"),
    ],
)
def test_files_that_are_no_results(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(others.ForeignResultsError, match=says):
        others.read(file)
