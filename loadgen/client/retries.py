"""When a request that a server had no room for is sent again: Retry-After where the server says it, else backing off.

RFC 9110 (10.2.3) has Retry-After as seconds or as a date; it goes with 503, and RFC 6585 gives it to 429. Where it is
not there, or asks for more than a minute, OpenAI's own client (openai-python, _base_client.py) backs off by 0.5 s, 1 s,
2 s and so on up to 8 s; so does this one, but without its jitter, so that a run can be repeated.
"""

from __future__ import annotations

import email.utils
import time

from loadgen.client.exchange import Exchange

STATUSES = (429, 503)
MOST_RETRY_AFTER_S = 60.0
FIRST_S, MOST_S = 0.5, 8.0


def wait_s(exchange: Exchange, most: int) -> float | None:
    """How long to wait before it is sent again; None: it is over. most: how many times a request is sent again."""
    done = len(exchange.refusals_ns)
    if exchange.outcome != "http_error" or exchange.status not in STATUSES or done >= most:
        return None
    retry_after_s = _retry_after_s(exchange.retry_after.strip())
    if retry_after_s is not None and 0 <= retry_after_s <= MOST_RETRY_AFTER_S:
        return retry_after_s
    return min(FIRST_S * float(2**done), MOST_S)


def _retry_after_s(text: str) -> float | None:
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
