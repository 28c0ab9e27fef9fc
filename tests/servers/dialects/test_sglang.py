"""The embedded server as SGLang: its bytes, beside what a real SGLang 0.5.11 sent on an H200."""

from __future__ import annotations

import json

import pytest

from servers.dialects.sglang import SGLang
from servers.serve.wire import Refusal, Settings, Wire


def asked(stream: bool = True, **body: object) -> Wire:
    raw = json.dumps({"stream": stream, **body}).encode()
    (wire,) = SGLang(Settings("m", 100)).generations["/generate"](raw, "r1")
    return wire


def event(raw: bytes) -> dict[str, object]:
    assert raw.startswith(b"data: ") and raw.endswith(b"\n\n")
    value = json.loads(raw[6:])
    assert isinstance(value, dict)
    return value


def test_every_event_repeats_all_that_came_before() -> None:
    wire = asked(input_ids=[5, 9], sampling_params={"max_new_tokens": 3})
    texts, ids, counts = [], [], []
    for raw in (wire.event(1, 1, None), wire.token(2), wire.event(3, 1, "length")):
        each = event(raw)
        meta = each["meta_info"]
        assert isinstance(meta, dict)
        texts.append(each["text"])
        ids.append(each["output_ids"])
        counts.append(meta["completion_tokens"])
    assert counts == [1, 2, 3] and [len(each) for each in ids if isinstance(each, list)] == counts  # type: ignore[arg-type]
    assert str(texts[2]).startswith(str(texts[1])) and str(texts[1]).startswith(str(texts[0]))
    assert meta["finish_reason"] == {"type": "length", "length": 3} and "e2e_latency" in meta
    assert wire.tail(3) == b"data: [DONE]\n\n"


# Of a real SGLang, but for its limit of 8192 tokens (p_a/err_long_gen_stream, p_a/err_both_gen).
TOO_LONG = (
    b'data: {"error":{"message":"The input (120 tokens) is longer than the model\'s context length (100 tokens)."}}\n\n'
    b"data: [DONE]\n\n"
)
NOTHING = b"""data: {"error":{"message":"Either text, input_ids or input_embeds should be provided."}}

data: [DONE]

"""


@pytest.mark.parametrize(("body", "told"), [({"input_ids": [1] * 120}, TOO_LONG), ({}, NOTHING)])
def test_a_stream_tells_of_an_error_with_status_200(body: dict[str, object], told: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        asked(**body)
    assert (refused.value.page.status, refused.value.page.body) == (200, told)
    with pytest.raises(Refusal) as refused:
        asked(stream=False, **body)
    assert refused.value.page.status == 400


def test_a_full_queue_is_an_event_that_ends_with_an_abort() -> None:
    wire = asked(input_ids=[5, 9], sampling_params={"max_new_tokens": 3})
    page = wire.refused(SGLang(Settings("m", 100)).error(503))
    meta = event(page.body.removesuffix(b"data: [DONE]\n\n"))["meta_info"]
    assert page.status == 200 and isinstance(meta, dict)
    assert meta["finish_reason"] == {"type": "abort", "message": "The request queue is full.", "status_code": 503}
