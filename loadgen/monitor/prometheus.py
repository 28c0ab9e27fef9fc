"""Reads a server's `/metrics` page and picks the wanted series out of Prometheus' text format."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping

from backends.protocol import HttpRequest
from backends.untrusted import printable
from loadgen.monitor.messages import MetricsSource
from loadgen.target import REDIRECTS

MAX_BODY_BYTES = 16 << 20


_LISTING = re.compile(r"([^{}]+)\{(\w+)\}")


class Unreadable(Exception):
    """The server gave no metrics this time. One clause, in our own words."""


class Absent(Unreadable):
    """The server has no metrics at all."""


class SeriesPicker:
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
    """One `/metrics` over one connection that is kept. TLS is verified as for the requests themselves."""

    def __init__(self, source: MetricsSource, url: str, timeout_s: float) -> None:
        import httpx

        self._source = source
        self._url = url
        self._series = SeriesPicker(source.series)
        self._timeout_s = timeout_s
        asked = (("Accept", "text/plain"), ("Accept-Encoding", "identity"))  # compressing would cost the server
        headers = source.headers_for(url, HttpRequest("GET", self._url, b"", asked))
        plain = url.lower().startswith("http://")
        verify = False if plain else source.tls_context()  # whose certificates take 20 ms to load
        # trust_env: the requests go to the server itself, without the environment's proxies or .netrc; so does this
        self._client = httpx.AsyncClient(headers=headers, timeout=self._timeout_s, trust_env=False, verify=verify)

    async def read(self) -> dict[str, float]:
        """The values now. Raises Unreadable, and nothing else whatever the server does."""
        import httpx

        try:
            async with asyncio.timeout(self._timeout_s):  # httpx's own limits begin anew with every read
                body = await self._body()
        except (TimeoutError, httpx.TimeoutException):
            raise Unreadable(f"GET /metrics was not answered within {self._timeout_s:g} s") from None
        except httpx.ConnectError as error:
            raise Unreadable(f"no connection for GET /metrics: {printable(str(error), 200)}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # their words may hold a header that we sent: names only
            raise Unreadable(f"GET /metrics failed: {type(error).__name__}") from None
        return self._series.pick(body.decode("utf-8", "replace"))

    async def _body(self, *, redirected: bool = False) -> bytes:
        """The page, after one redirect on the same host, which is remembered. Raises Unreadable, and as httpx does."""
        body = bytearray()
        async with self._client.stream("GET", self._url) as response:
            if response.status_code in (404, 405, 501):
                raise Absent(f"the server has no metrics: GET /metrics answers {response.status_code}")
            if response.status_code in REDIRECTS and not redirected:
                url = self._source.followed(self._url, response.headers.get("location", ""))
                if url is None:
                    raise Unreadable(f"GET /metrics answers {response.status_code} and leads to another host")
                self._url = url
            elif response.status_code != 200:
                raise Unreadable(f"GET /metrics answers {response.status_code}")
            else:
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_BODY_BYTES:
                        raise Unreadable(f"the answer to GET /metrics is over {MAX_BODY_BYTES >> 20} MiB")
                return bytes(body)
        return await self._body(redirected=True)

    async def close(self) -> None:
        await self._client.aclose()


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
