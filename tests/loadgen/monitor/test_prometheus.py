"""What is picked out of a server's metrics: label sets, spellings of names, histograms, garbage."""

from __future__ import annotations

import asyncio
import contextlib

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from loadgen.monitor.messages import MetricsSource
from loadgen.monitor.prometheus import Metrics, SeriesPicker, Unreadable
from tests.loadgen.scripted import scripted


def test_several_label_sets_are_added_and_ratios_averaged() -> None:
    series = SeriesPicker(
        {"running": "vllm:running", "kv_cache_usage_ratio": "vllm:kv", "preemptions": "vllm:pre_total"}
    )
    text = """
# TYPE vllm:running gauge
vllm:running{model_name="a b}",engine="0"} 3.0
vllm:running{model_name="a b}",engine="1"} 4.0
# TYPE vllm:kv gauge
vllm:kv{engine="0"} 0.5
vllm:kv{engine="1"} 0.25
# TYPE vllm:pre_total counter
vllm:pre_total{engine="0"} 1e1
# TYPE vllm:pre_created gauge
vllm:pre_created{engine="0"} 1.7e9
vllm:running_more{engine="0"} 99
"""
    assert series.pick(text) == {"running": 7.0, "kv_cache_usage_ratio": 0.375, "preemptions": 10.0}


def test_adapters_are_counted_in_the_labels_of_the_latest_sample() -> None:
    """vLLM keeps every set of adapters that it ever ran on its page, each with the time at which it did last."""
    text = """
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b,c",waiting_lora_adapters=""} 1.7958e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.7958e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="d",waiting_lora_adapters="a,b"} 1.79581e+09
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1.79570e+09
"""
    series = SeriesPicker(backends.get("vllm").server_metrics)
    assert series.pick(text) == {"adapters_running": 1.0, "adapters_waiting": 2.0}
    assert series.pick("vllm:num_requests_running 3.0\n") == {"running": 3.0}


@pytest.mark.parametrize("declared", ["x:hits", "x:hits_total"])
@pytest.mark.parametrize("shown", ["x:hits", "x:hits_total"])
@pytest.mark.parametrize("typed", [True, False])
def test_a_counter_is_found_with_and_without_total(declared: str, shown: str, typed: bool) -> None:
    text = (f"# TYPE {shown} counter\n" if typed else "") + f"{shown} 5\n"
    assert SeriesPicker({"prefix_cache_hits": declared}).pick(text) == {"prefix_cache_hits": 5.0}


def test_the_exact_name_comes_first() -> None:
    assert SeriesPicker({"preemptions": "x_total"}).pick("x 1\nx_total 2\n") == {"preemptions": 2.0}
    assert SeriesPicker({"preemptions": "x"}).pick("x_total 2\nx 1\n") == {"preemptions": 1.0}


@pytest.mark.parametrize("shown", ["vllm:new", "vllm:old"])
def test_names_of_older_versions(shown: str) -> None:
    series = SeriesPicker(
        {"kv_cache_usage_ratio": "vllm:new vllm:old", "itl_seconds": "vllm:new_seconds vllm:old_seconds"}
    )
    text = f"{shown} 0.5\n{shown}_seconds_sum 3\n{shown}_seconds_count 2\n"
    assert series.pick(text) == {"kv_cache_usage_ratio": 0.5, "itl_seconds_sum": 3.0, "itl_seconds_count": 2.0}
    both = SeriesPicker({"kv_cache_usage_ratio": "vllm:new vllm:old"})
    assert both.pick("vllm:old 0.5\nvllm:new 0.25\n") == {"kv_cache_usage_ratio": 0.25}


def test_a_histogram_gives_its_sum_and_count_alone() -> None:
    text = """# TYPE lightllm_request_queue_duration_bucket histogram
lightllm_request_queue_duration_bucket_bucket{le="+Inf"} 9.0
lightllm_request_queue_duration_bucket_count 9.0
lightllm_request_queue_duration_bucket_sum 9.5
# TYPE first histogram
first_bucket{le="0.1"} 1.0
first_bucket{le="+Inf"} 2.0
first_count 2.0
first_sum 0.75
# TYPE first_created gauge
first_created 1.7e9
"""
    assert SeriesPicker({"ttft_seconds": "first"}).pick(text) == {"ttft_seconds_sum": 0.75, "ttft_seconds_count": 2.0}
    odd = SeriesPicker({"ttft_seconds": "lightllm_request_queue_duration_bucket"})
    assert odd.pick(text) == {"ttft_seconds_sum": 9.5, "ttft_seconds_count": 9.0}


def test_what_the_official_library_writes() -> None:
    registry = prometheus_client.CollectorRegistry()
    hits = prometheus_client.Counter("x:hits", "Hits.", ["engine"], registry=registry)
    usage = prometheus_client.Gauge("x:usage", "Usage.", ["engine"], registry=registry)
    first = prometheus_client.Histogram("x:first_seconds", "First.", ["engine"], registry=registry)
    for engine, tokens in (("0", 16), ("1", 32)):
        hits.labels(engine).inc(tokens)
        usage.labels(engine).set(tokens / 64)
        first.labels(engine).observe(tokens)
    series = SeriesPicker(
        {"prefix_cache_hits": "x:hits_total", "kv_cache_usage_ratio": "x:usage", "ttft_seconds": "x:first_seconds"}
    )
    assert series.pick(prometheus_client.generate_latest(registry).decode()) == {
        "prefix_cache_hits": 48.0,
        "kv_cache_usage_ratio": 0.375,
        "ttft_seconds_sum": 48.0,
        "ttft_seconds_count": 2.0,
    }


def test_what_is_not_a_number_is_left_out() -> None:
    series = SeriesPicker({"running": "a", "waiting": "b", "kv_cache_usage_ratio": "c"})
    assert series.pick("a NaN\nb +Inf\nc 0.5\n") == {"kv_cache_usage_ratio": 0.5}
    assert series.pick('a{x="1"} 1e308\na{x="2"} 1e308\nb 1\n') == {"waiting": 1.0}  # their sum is beyond a float


@pytest.mark.parametrize(
    "text",
    [
        "<!DOCTYPE html>\n<html>",
        '{"running": 3}',
        "running",
        "running three",
        'running{a="b 1',
        "running 1" + "0" * 400,
    ],
)
def test_garbage_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable, match="not Prometheus' text format"):
        SeriesPicker({"running": "running"}).pick(text)


@given(st.text(alphabet='running{}="\\, \n#1e.N\x00é_TYPEgauge'))
@settings(max_examples=300, deadline=None)
def test_any_text_is_picked_or_unreadable(text: str) -> None:
    with contextlib.suppress(Unreadable):
        picked = SeriesPicker({"running": "running"}).pick(text)
        assert all(isinstance(value, float) for value in picked.values())


def test_lightllms_own_names() -> None:
    """Its cache tells of hits in a histogram of tokens; versions before 1.2 count tokens in histograms alone."""
    text = """# TYPE lightllm_cache_length histogram
lightllm_cache_length_bucket{le="+Inf"} 2.0
lightllm_cache_length_count 2.0
lightllm_cache_length_sum 300.0
lightllm_request_input_length_sum 1024.0
lightllm_request_generated_tokens_sum 64.0
lightllm_batch_current_size 2.0
lightllm_batch_pause_size 1.0
lightllm_batch_current_max_tokens 1088.0
"""
    known = {
        "prefix_cache_hits": 300.0, "prefix_cache_queries": 1024.0, "prompt_tokens": 1024.0, "generation_tokens": 64.0,
        "running": 2.0, "paused": 1.0, "kv_reserved_tokens": 1088.0,
    }  # fmt: skip
    series = SeriesPicker(backends.get("lightllm").server_metrics)
    assert series.pick(text) == known
    newer = text + "lightllm_prompt_tokens_total 512.0\nlightllm_num_running_reqs 2.0\n"
    assert series.pick(newer) == {**known, "prompt_tokens": 512.0}


@pytest.mark.parametrize(
    ("location", "asked"), [("/metrics/", 3), ("http://127.0.0.1:1/metrics", 2), ("https://h/", 2), ("", 4)]
)
def test_one_redirect_on_the_same_host_is_followed_and_remembered(location: str, asked: int) -> None:
    async def story() -> None:
        def script(number: int) -> list[bytes]:
            if world.requests[number][0].split()[1] == b"/metrics/":
                return [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nup 1"]
            return [b"HTTP/1.1 307 x\r\nLocation: " + location.encode() + b"\r\nContent-Length: 0\r\n\r\n"]

        async with scripted(script) as world:
            metrics = Metrics(MetricsSource(world.url, "s3cret", series={"running": "up"}), 5.0)
            for _ in range(2):
                if asked == 3:
                    assert await metrics.read() == {"running": 1.0}
                else:
                    with pytest.raises(Unreadable, match="answers 307"):
                        await metrics.read()
            await metrics.close()
            assert len(world.requests) == asked

    asyncio.run(story())
