"""Several replicas behind one address: their metrics together and apart, and what a router's split says."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import UNSET

import backends
from loadgen.config import Config, ConfigError
from loadgen.monitor.messages import MetricsSource
from loadgen.monitor.server_view import ReplicaStats, read
from loadgen.probe import ServerError, check_replicas
from loadgen.target import Target
from tests.loadgen.monitor.metrics_server import Script, scripted
from tests.loadgen.monitor.test_server_view import RUN, at, seen, write
from tests.loadgen.monitor.test_sidecar import TOKEN, monitored

A, B = "http://a:1/metrics", "http://b:1/metrics"
SERIES = {"running": "running", "kv_cache_usage_ratio": "kv", "generation_tokens": "tokens_total"}


def both(at_s: float, first: dict[str, float], second: dict[str, float], error: str | None = None) -> object:
    whole = {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
    sample = at(at_s, error=error, **whole)
    sample.replicas = [first, second]
    return sample


def test_sums_largest_values_and_each_replica(tmp_path: Path) -> None:
    samples = [
        both(9.5, {"running": 0, "generation_tokens": 100}, {"running": 0, "generation_tokens": 5}),
        both(11, {"running": 7, "generation_tokens": 150}, {"running": 2, "generation_tokens": 20}),
        both(13, {"running": 0, "generation_tokens": 190}, {"running": 0, "generation_tokens": 35}),
    ]
    write(tmp_path, samples, replicas=[A, B])  # type: ignore[arg-type]
    found = seen(tmp_path)
    assert (found.running_max, found.generation_tokens) == (9, 120)
    assert found.replicas == [
        ReplicaStats(url=A, silent=0, running_max=7, generation_tokens=90),
        ReplicaStats(url=B, silent=0, running_max=2, generation_tokens=30),
    ]


def test_a_replica_that_dies_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """The sum of what is shown falls then; what both have done until then stays."""
    samples = [
        both(9.5, {"generation_tokens": 100}, {"generation_tokens": 50}),
        both(11, {"generation_tokens": 150}, {"generation_tokens": 70}),
        both(13, {"generation_tokens": 190}, {}, "replica 2: no connection"),
    ]
    write(tmp_path, samples, replicas=[A, B])  # type: ignore[arg-type]
    found = seen(tmp_path)
    assert found.generation_tokens == 90 + 20
    assert [(each.silent, each.generation_tokens) for each in found.replicas] == [(0, 90), (1, 20)]
    assert [each.lost_s for each in found.replicas] == [UNSET, 1.0]  # the run begins at 10 s
    assert found.failed == 1 and found.failure == "replica 2: no connection"


def test_what_is_sampled_of_two_of_which_one_ends(tmp_path: Path) -> None:
    with scripted() as one, scripted() as other:
        one.body = b"running 3\nkv 0.25\ntokens_total 10\n"
        other.body = b"running 4\nkv 0.5\ntokens_total 20\n"

        def inside() -> None:
            other.status, one.body = 503, b"running 1\nkv 0.125\ntokens_total 15\n"

        replicas = tuple(f"{each.url}/metrics" for each in (one, other))
        monitored(tmp_path, "http://router:1", inside, series=SERIES, replicas=replicas, token=TOKEN)
        view = read(tmp_path, RUN, 0, 1 << 62)
    assert view is not None and view.server is not None
    found = view.server
    assert (found.running_max, found.kv_cache_usage_max_ratio, found.generation_tokens) == (7, 0.5, 5)
    assert [each.url for each in found.replicas] == list(replicas)
    assert found.replicas[1].silent >= 1 and found.failure == "replica 2: GET /metrics answers 503"
    assert not any("authorization" in request for each in (one, other) for request in each.seen)  # the router's alone


DCGM = """\
# HELP DCGM_FI_DEV_THERMAL_VIOLATION Throttling duration due to thermal constraints (in ns).
# TYPE DCGM_FI_DEV_THERMAL_VIOLATION counter
DCGM_FI_DEV_THERMAL_VIOLATION{{gpu="0",UUID="GPU-a",Hostname="h"}} {0}
DCGM_FI_DEV_THERMAL_VIOLATION{{gpu="1",UUID="GPU-b",Hostname="h"}} 7000000000
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-a",Hostname="h"}} 87
"""


def test_a_page_of_gpus_is_no_replica(tmp_path: Path) -> None:
    with scripted() as server, scripted() as gpus:
        server.body, gpus.body = b"running 3\ntokens_total 10\n", DCGM.format(1_000_000_000).encode()
        replicas = tuple(f"{each.url}/metrics" for each in (server, gpus))
        source = MetricsSource.of(Target("http://r:1"), backends.get("vllm"), replicas)

        def inside() -> None:
            gpus.body = DCGM.format(3_500_000_000).encode()

        series = {**SERIES, **{name: each for name, each in source.series.items() if name.startswith("gpu_")}}
        monitored(tmp_path, "http://router:1", inside, series=series, replicas=replicas, token=TOKEN)
        view = read(tmp_path, RUN, 0, 1 << 62)
    assert view is not None and view.server is not None
    assert view.server.gpu_thermal_s == pytest.approx(2.5) and view.server.gpu_power_s is UNSET
    assert [each.url for each in view.server.replicas] == [f"{server.url}/metrics"]
    assert "gpu_thermal_ns" not in MetricsSource.of(Target("http://r:1"), backends.get("vllm"), ()).series


def test_secrets_go_to_the_server_itself(tmp_path: Path, script: Script) -> None:
    monitored(tmp_path, script.url, series=SERIES, replicas=(f"{script.url}/metrics",), token=TOKEN)
    assert {request["authorization"] for request in script.seen} == {f"Bearer {TOKEN}"}


def test_addresses() -> None:
    config = Config(url="http://r:1", metrics_url=("http://a:8000", "http://b:8000/v1/", "http://c:1/engine/metrics"))
    assert config.replicas == ("http://a:8000/metrics", "http://b:8000/metrics", "http://c:1/engine/metrics")
    strange = MetricsSource.of(Target("http://r:1/v1"), backends.get("trtllm"), ())
    assert strange.metrics_urls == ("http://r:1/prometheus/metrics",)  # its /metrics is no Prometheus text
    source = MetricsSource(url="http://r:1/v1", series={})
    assert source.metrics_urls == ("http://r:1/metrics",)


PAGE = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 512
vllm:prompt_tokens_created{engine="0"} %s
vllm:gpu_ratio{engine="0"} 0.123456789
vllm:time_to_first_token_seconds_sum{engine="0"} %s
"""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("1.7960477911234e+09", "0"), ("1.7960477911234e+09", "0.1"), 'vllm:prompt_tokens_created{engine="0"} 1.796'),
        (("0", "0.10300874710083"), ("0", "0.10300874710083"), "vllm:time_to_first_token_seconds_sum"),
        (("1.7960477911234e+09", "0.5"), ("1.7960477911235e+09", "0.5"), ""),  # half a second may be anybody's
    ],
)
def test_a_replica_under_two_names_is_known_by_its_page(
    one: tuple[str, ...], other: tuple[str, ...], same: str
) -> None:
    """When its series began, and sums of seconds with all their digits, are no two processes'."""
    with scripted() as first, scripted() as second, scripted() as silent:
        first.body, second.body, silent.status = (PAGE % one).encode(), (PAGE % other).encode(), 503
        urls = [f"{each.url}/metrics" for each in (silent, first, second)]
        target = Target("http://router:1", TOKEN)
        if not same:
            check_replicas(target, urls)
            return
        with pytest.raises(ServerError) as raised:
            check_replicas(target, urls)
    assert str(raised.value).startswith(f"--metrics-url {urls[2]} is the same replica as {urls[1]}: both show {same}")
    assert not any("authorization" in request for each in (first, second) for request in each.seen)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics_url": ("http://a:1",)}, "is of a server that runs; name it with --url"),
        ({"url": "http://r:1", "server_metrics": False, "metrics_url": ("http://a:1",)},
         "samples it; leave --no-server-metrics out"),
        ({"url": "http://r:1", "metrics_url": ("a:1",)}, "must look like http://HOST:PORT/metrics"),
        ({"url": "http://r:1", "metrics_url": ("http://u:p@a:1",)}, "must look like http://HOST:PORT/metrics"),
        ({"url": "http://r:1", "metrics_url": ("http://localhost:1", "http://127.0.0.1:1/metrics/")},
         "--metrics-url http://127.0.0.1:1/metrics/ is the same replica as http://localhost:1; name each once."),
        ({"url": "http://r:1", "metrics_url": ("http://[::1]:80", "http://localhost//metrics")},
         "--metrics-url http://localhost//metrics is the same replica as http://[::1]:80; name each once."),
    ],
)  # fmt: skip
def test_addresses_that_make_no_sense(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(**options)  # type: ignore[arg-type]
    assert said in str(raised.value)
