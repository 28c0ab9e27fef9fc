"""Reads a server's `/metrics` page and picks the wanted series out of Prometheus' text format."""

from __future__ import annotations

import asyncio
import http.client
import math
import re
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from backends.protocol import HttpRequest
from backends.untrusted import printable
from loadgen.event_loop import in_thread
from loadgen.monitor.messages import MetricsSource
from loadgen.target import REDIRECTS, connection_to, limited, reason

MAX_BODY_BYTES = 16 << 20


_LISTING = re.compile(r"([^{}]+)\{(\w+)\}")


class Unreadable(Exception):
    """The server gave no metrics this time. One clause, in our own words."""


class Absent(Unreadable):
    """The server has no metrics at all."""


class Series:
    """Picks the wanted series out of Prometheus' text format.

    Histograms (neutral names in `_seconds`) give `_sum` and `_count`. A counter is found with and without `_total`. Of
    several names the first that is there counts. Values of several label sets are added up; ratios are averaged. Of a
    name with a label in braces, whose values are times, it is how many names the label of the latest one lists.
    """

    def __init__(self, series: Mapping[str, str]) -> None:
        self._spellings: dict[str, tuple[str, ...]] = {}  # neutral name -> sample names, best first
        self._listing: dict[str, list[str]] = {}  # sample name -> labels that list names
        for neutral, known in series.items():
            names = known.split()
            for name, label in (found.groups() for found in map(_LISTING.fullmatch, names) if found is not None):
                self._listing.setdefault(name, []).append(label)
            if neutral.endswith("_seconds"):
                self._spellings |= {neutral + part: tuple(name + part for name in names) for part in ("_sum", "_count")}
            else:
                self._spellings[neutral] = tuple(
                    spelling for name in names for spelling in (name, _other_spelling(name))
                )
        self._wanted = {name.partition("{")[0] for names in self._spellings.values() for name in names}

    def pick(self, text: str) -> dict[str, float]:
        """Neutral name -> value, for the series that are there. Raises Unreadable when this is no such text."""
        from prometheus_client.parser import text_string_to_metric_families

        # The parser reads character by character, and most of the text is histogram buckets: it gets our lines only,
        # or everything when there are none of them, to see whether this is Prometheus' format at all.
        lines = text.split("\n")
        ours = [line for line in lines if re.split(r"[{\s]", line, maxsplit=1)[0] in self._wanted]
        shown: dict[str, list[float]] = {}
        latest: dict[str, float] = {}
        try:
            for family in text_string_to_metric_families("\n".join(ours or lines) + "\n"):
                for sample in family.samples:
                    if math.isfinite(sample.value):  # a mean of nothing is NaN in some servers
                        shown.setdefault(sample.name, []).append(float(sample.value))
                        if sample.name in self._listing and sample.value >= latest.get(sample.name, 0.0):
                            latest[sample.name] = float(sample.value)
                            for label in self._listing[sample.name]:
                                listed = [each for each in sample.labels.get(label, "").split(",") if each.strip()]
                                shown[f"{sample.name}{{{label}}}"] = [float(len(listed))]
        except (ValueError, IndexError, KeyError, OverflowError):
            raise Unreadable("the answer to GET /metrics is not Prometheus' text format") from None
        values = {}
        for neutral, names in self._spellings.items():
            numbers = next((shown[name] for name in names if name in shown), None)
            if numbers is not None:
                values[neutral] = sum(numbers) / (len(numbers) if neutral.endswith("_ratio") else 1)
        return {neutral: value for neutral, value in values.items() if math.isfinite(value)}


def _other_spelling(name: str) -> str:
    return name.removesuffix("_total") if name.endswith("_total") else f"{name}_total"


class _Page:
    """One `/metrics` over one connection that is kept. TLS is verified as for the requests themselves; no proxy of the
    environment is used, as the requests use none."""

    def __init__(self, source: MetricsSource, url: str, timeout_s: float) -> None:
        self._source, self._url, self._timeout_s = source, url, timeout_s
        self._series = Series(source.series)
        plain = (("Accept", "text/plain"), ("Accept-Encoding", "identity"))  # compressing would cost the server
        self._headers = source.headers_for(url, HttpRequest("GET", url, b"", plain))
        self._connection: http.client.HTTPConnection | None = None

    async def read(self) -> dict[str, float]:
        """The values now. Raises Unreadable, and nothing else whatever the server does."""
        return self._series.pick((await in_thread(self._read)).decode("utf-8", "replace"))

    def _read(self) -> bytes:
        try:
            return self._body(time.monotonic() + self._timeout_s)
        except TimeoutError:
            raise Unreadable(f"GET /metrics was not answered within {self._timeout_s:g} s") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # whose words may hold a header that we sent
            raise Unreadable(f"GET /metrics failed: {type(error).__name__}") from None

    def _body(self, until_s: float, *, redirected: bool = False) -> bytes:
        """The page, after one redirect on the same host, which is remembered. Raises Unreadable and what `_read` takes
        for such."""
        status, location, body = self._get(until_s)
        if status in (404, 405, 501):
            raise Absent(f"the server has no metrics: GET /metrics answers {status}")
        if status in REDIRECTS and not redirected:
            if (url := self._source.followed(self._url, location)) is None:
                raise Unreadable(f"GET /metrics answers {status} and leads to another host")
            self._url = url
            return self._body(until_s, redirected=True)
        if status != 200:
            raise Unreadable(f"GET /metrics answers {status}")
        if len(body) > MAX_BODY_BYTES:
            raise Unreadable(f"the answer to GET /metrics is over {MAX_BODY_BYTES >> 20} MiB")
        return body

    def _get(self, until_s: float) -> tuple[int, str, bytes]:
        """Status, location and body, over the connection that was kept, or a new one where the server has closed it."""
        kept, self._connection = self._connection, None
        connection = kept or self._connected(until_s)
        path = urlsplit(self._url)._replace(scheme="", netloc="", fragment="").geturl()
        try:
            with limited(connection.sock, until_s - time.monotonic()) as is_late:
                connection.request("GET", path, headers=self._headers)
                reply = connection.getresponse()
                body = reply.read(MAX_BODY_BYTES + 1)
                if is_late():
                    raise TimeoutError
        except BaseException as error:
            connection.close()
            if kept is not None and isinstance(error, (ConnectionError, http.client.CannotSendRequest)):
                return self._get(until_s)
            raise
        if reply.isclosed() and connection.sock is not None:
            self._connection = connection
        else:
            connection.close()
        return reply.status, reply.headers.get("location", ""), body

    def _connected(self, until_s: float) -> http.client.HTTPConnection:
        target = msgspec.structs.replace(self._source, url=self._url)
        made = connection_to(target, max(1e-3, until_s - time.monotonic()))
        try:
            made.connect()
        except TimeoutError:
            raise
        except OSError as error:
            raise Unreadable(f"no connection for GET /metrics: {printable(reason(error), 200)}") from None
        return made

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Metrics:
    """The `/metrics` of a server, or of all its replicas together: sums, but of ratios the largest.

    each: what every replica showed at the last read, empty for one that did not. trouble: why one did not, a clause.
    """

    def __init__(self, source: MetricsSource, timeout_s: float) -> None:
        self._pages = [_Page(source, url, timeout_s) for url in source.metrics_urls]
        self.each: list[dict[str, float]] = []
        self.trouble: str | None = None

    async def read(self) -> dict[str, float]:
        """The values now. Raises Unreadable where nothing is shown at all, and nothing else whatever the servers do."""
        read = await asyncio.gather(*(page.read() for page in self._pages), return_exceptions=True)
        failed = {place: values for place, values in enumerate(read) if isinstance(values, BaseException)}
        if len(failed) == len(read):
            raise failed[0]
        self.each = [values if isinstance(values, dict) else {} for values in read]
        self.trouble = "; ".join(f"replica {place + 1}: {why}" for place, why in failed.items()) or None
        whole: dict[str, float] = {}
        for values in self.each:
            for name, value in values.items():
                held = whole.get(name, 0.0)
                whole[name] = max(held, value) if name.endswith("_ratio") else held + value
        return whole

    async def close(self) -> None:
        await asyncio.gather(*(page.close() for page in self._pages))
