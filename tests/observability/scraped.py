"""A real Prometheus with the repository's own configuration, in a directory of its own, and its HTTP API."""

from __future__ import annotations

import json
import math
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.observability import names
from tests.observability.programs import program
from tests.support.waiting import free_ports, until

SCRAPE_S, LIMIT_S = 1, 60.0


class Series(NamedTuple):
    labels: dict[str, str]
    values: list[float]  # finite ones


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **words: str | float) -> Any:
        query = urllib.parse.urlencode(words)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as reply:
                return json.loads(reply.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{words}: {error.read().decode()}") from None

    def now(self, expr: str, at: float | None = None) -> list[Series]:
        """The expression at one moment; series without a finite value are left out."""
        result = self.get("query", query=expr, **({} if at is None else {"time": at}))
        return _finite([(series["metric"], [series["value"]]) for series in result["result"]])

    def over(self, expr: str, start: float, end: float) -> list[Series]:
        """The expression over time; series without a finite value are left out."""
        result = self.get("query_range", query=expr, start=start, end=end, step=SCRAPE_S)
        return _finite([(series["metric"], series["values"]) for series in result["result"]])

    def one(self, expr: str) -> float:
        ((_, (value,)),) = self.now(expr)
        return value


def _finite(result: list[tuple[dict[str, str], Any]]) -> list[Series]:
    series = [Series(labels, [float(v) for _, v in pairs if math.isfinite(float(v))]) for labels, pairs in result]
    return [each for each in series if each.values]


@contextmanager
def prometheus(directory: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """It scrapes `targets`, by job, every second; all else is as in compose/prometheus."""
    source = names.COMPOSE / "prometheus"
    config = yaml.safe_load((source / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = f"{SCRAPE_S}s"
    for job in config["scrape_configs"]:
        job["static_configs"][0]["targets"] = [targets[job["job_name"]]]
        job["scrape_interval"] = job["scrape_timeout"] = f"{SCRAPE_S}s"
    directory.mkdir()
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    (directory / "rules.yml").write_text((source / "rules.yml").read_text())
    port = free_ports(1)[0]
    words = [
        program("prometheus"), f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    log = directory / "log"
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out, cwd=directory) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(
                lambda: urllib.request.urlopen(f"{url}/-/ready", timeout=5).status == 200, f"Prometheus; its log: {log}"
            )
            yield Prometheus(url)
        finally:
            process.terminate()
            process.wait(LIMIT_S)
