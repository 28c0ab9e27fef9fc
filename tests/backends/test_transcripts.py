"""Transcripts say the same however their bytes are cut into reads, and no bytes raise anything but ProtocolError."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from backends.protocol import Decoder, Delta, Kept, ProtocolError, ServerRecord
from tests.backends.frames import Transcript
from tests.backends.transcripts import TRANSCRIPTS
from tests.backends.transcripts_real import Seen, body, tgi

BACKENDS = {name: backends.get(name) for name in backends.available()}


def replay(decoder: Decoder, pieces: list[bytes]) -> tuple[list[Delta], ProtocolError | None]:
    """What a reader sees: the deltas until the end or until the first exception."""
    deltas: list[Delta] = []
    try:
        for piece in pieces:
            deltas += decoder.feed(piece)
        deltas += decoder.eof()
    except ProtocolError as error:
        return deltas, error
    return deltas, None


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:end] for start, end in pairwise(edges)]


def same(seen: tuple[list[Delta], ProtocolError | None], transcript: Transcript) -> None:
    deltas, error = seen
    assert tuple(deltas) == transcript.deltas
    assert type(error) is (transcript.error or type(None)), error
    assert transcript.says in str(error)


def decoder_of(transcript: Transcript) -> Decoder:
    return BACKENDS[transcript.backend].decoder(transcript.stream)


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.name)
class TestTranscript:
    def test_whole(self, transcript: Transcript) -> None:
        same(replay(decoder_of(transcript), [transcript.body]), transcript)

    def test_event_by_event(self, transcript: Transcript) -> None:
        events = [event + b"\n\n" for event in transcript.body.split(b"\n\n")]
        events[-1] = events[-1][:-2]
        same(replay(decoder_of(transcript), events), transcript)

    def test_bytewise(self, transcript: Transcript) -> None:
        same(replay(decoder_of(transcript), [bytes([byte]) for byte in transcript.body]), transcript)

    def test_kept(self, transcript: Transcript) -> None:
        """Keeping a reply changes nothing of what is read, and nothing is kept twice or lost between reads."""
        keeper = BACKENDS[transcript.backend].keeper
        if BACKENDS[transcript.backend].pooled:
            assert keeper is None
            return
        assert keeper is not None
        kept = []
        for pieces in ([transcript.body], [bytes([byte]) for byte in transcript.body]):
            kept.append(Kept())
            same(replay(keeper(transcript.stream, kept[-1]), pieces), transcript)
        assert kept[0] == kept[1]

    def test_in_two_reads(self, transcript: Transcript) -> None:
        for at in range(len(transcript.body)):
            same(replay(decoder_of(transcript), [transcript.body[:at], transcript.body[at:]]), transcript)


@pytest.mark.parametrize(
    ("name", "stream", "body", "said"),
    [
        ("openai", True,
         b'data: {"choices":[{"text":" a","token_ids":[7]}]}\n\ndata: {"choices":[{"text":"","token_ids":[8,9]}]}\n\n'
         b'data: {"choices":[{"text":" b","finish_reason":"length","token_ids":[5]}]}\n\ndata: [DONE]\n\n',
         Kept([" a", "", " b"], [7, 8, 9, 5])),
        ("openai", False,
         b'{"choices":[{"text":" a b","finish_reason":"stop","token_ids":[7,5]}],"usage":{"completion_tokens":2}}',
         Kept([" a b"], [7, 5])),
        ("openai-chat", True,
         b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
         b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'  # no client sends it back
         b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
         b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
         Kept(["", "a"])),
        ("openai-chat", False, b'{"choices":[{"message":{"role":"assistant","content":"a b"},"finish_reason":"stop"}]}',
         Kept(["a b"])),
        ("lightllm", True,
         b'data:{"token":{"id":7,"text":" a","count_output_tokens":1},"finished":false}\n\n'
         b'data:{"token":{"id":5,"text":" b","count_output_tokens":2},"finished":true,"finish_reason":"length"}\n\n',
         Kept([" a", " b"], [7, 5])),
        ("lightllm", False, b'{"generated_text":[" a b"],"count_output_tokens":2,"finish_reason":"length"}',
         Kept([" a b"])),
        ("tgi", True,
         b'data:{"token":{"id":7,"text":" a"}}\n\ndata:{"token":{"id":5,"text":" b"},"generated_text":" a b"}\n\n',
         Kept([" a", " b"])),
        ("tgi", False, b'{"generated_text":" a b"}', Kept([" a b"])),
        ("llamacpp", True, body("llamacpp_stream"),
         Kept([" w209", " w209", " w463", " w463", ""], [468, 468, 722, 722])),
        ("sglang", True, body("sglang_stream_interval"),
         Kept([" lexicon", *["STOP lexiconSTOP lexiconSTOP", " lexiconSTOP lexiconSTOP lexicon"] * 2],
              [31926, *[10566, 31926] * 10])),
        ("sglang", True, body("sglang_stream_incremental"), Kept(
            ["8859", *["GIC", "nametowidget"] * 7, "GIC"], [1333, *[7676, 10288] * 7, 7676])),
        ("sglang", True, body("sglang_stream_without_tokenizer"), Kept([""] * 16, [1333, *[7676, 10288] * 7, 7676])),
        ("sglang", False, b'{"text":" a b","output_ids":[7,5],"meta_info":{"completion_tokens":2}}',
         Kept([" a b"], [7, 5])),
        ("llamacpp", False, body("llamacpp_whole_cached"), Kept([" w209 w209 w463 w463"], [468, 468, 722, 722])),
    ],
)  # fmt: skip
def test_what_is_said(name: str, stream: bool, body: bytes, said: Kept) -> None:
    keeper, kept = BACKENDS[name].keeper, Kept()
    assert keeper is not None
    assert replay(keeper(stream, kept), [body])[1] is None
    assert kept == said


places = st.lists(st.integers(min_value=0, max_value=1 << 20), max_size=12)
events = st.sampled_from([each for each in TRANSCRIPTS if each.stream and each.backend != "ollama"])  # which has lines


@settings(max_examples=300, deadline=None)
@given(transcript=st.sampled_from(TRANSCRIPTS), places=places)
def test_in_any_reads(transcript: Transcript, places: list[int]) -> None:
    same(replay(decoder_of(transcript), cut(transcript.body, places)), transcript)


@settings(max_examples=300, deadline=None)
@given(transcript=events, line_end=st.sampled_from([b"\r\n", b"\r"]), places=places)
def test_other_line_ends(transcript: Transcript, line_end: bytes, places: list[int]) -> None:
    body = transcript.body.replace(b"\r\n", b"\n").replace(b"\n", line_end)
    same(replay(decoder_of(transcript), cut(body, places)), transcript)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A transcript with some bytes changed, taken away, repeated or put in."""
    body = bytearray(draw(st.sampled_from(TRANSCRIPTS)).body)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(body)))
        upto = min(len(body), at + draw(st.integers(0, 40)))
        body[at:upto] = draw(
            st.one_of(
                st.binary(max_size=4),
                st.just(bytes(body[at:upto]) * 2),
                st.sampled_from([b"\n\n", b"\r", b"data: ", b"null", b"-1", b"1e999", b"[]", b"{}", b'"', b"\\ud800"]),
            )
        )
    return bytes(body)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", list(BACKENDS))
class TestFuzz:
    @settings(max_examples=60, deadline=None)
    @given(
        body=st.one_of(mutated(), st.binary(max_size=200)),
        places=places,
    )
    def test_only_protocol_errors_and_the_same_for_every_cut(
        self, name: str, stream: bool, body: bytes, places: list[int]
    ) -> None:
        """`replay` lets every other exception through."""
        make = BACKENDS[name].decoder
        whole_deltas, whole_error = replay(make(stream), [body])
        for pieces in (cut(body, places), [bytes([byte]) for byte in body]):
            deltas, error = replay(make(stream), pieces)
            assert deltas == whole_deltas
            assert (type(error), str(error)) == (type(whole_error), str(whole_error))
        for delta in whole_deltas:
            assert delta.n_tokens >= 0
            assert delta.error is None or (len(delta.error) <= 300 and delta.error.isprintable())
        assert str(whole_error).isprintable()

    @settings(max_examples=30, deadline=None)
    @given(pieces=st.lists(mutated(), max_size=3))
    def test_calls_after_an_error(self, name: str, stream: bool, pieces: list[bytes]) -> None:
        decoder = BACKENDS[name].decoder(stream)
        for piece in pieces:
            try:
                decoder.feed(piece)
                decoder.eof()
            except ProtocolError:
                pass


# What this client never asks for: several prompts at once, and the routes that answer a list.
ASKED = {
    "/generate": "tgi",
    "/generate_stream": "tgi",
    "/v1/completions": "openai",
    "/v1/chat/completions": "openai-chat",
}
TGI = [seen for seen in tgi() if seen.method == "POST" and seen.path in ASKED and "two prompts" not in seen.case]


def test_headers_of_a_real_tgi_tell_the_prompt_and_the_times() -> None:
    (seen,) = (each for each in TGI if each.case == "generate whole, no details")
    whole: Any = BACKENDS["tgi"].decoder(False)
    whole.head("".join(f"{name}: {value}\r\n" for name, value in seen.headers.items()).encode() + b"\r\n{x")
    ((delta,), error) = replay(whole, [seen.reply])
    assert error is None
    assert delta.prompt_tokens == 3 and delta.server == ServerRecord(queue_us=0, e2el_us=16_000)


@pytest.mark.parametrize("seen", TGI, ids=lambda seen: seen.case)
def test_a_real_tgi_is_understood(seen: Seen) -> None:
    backend = BACKENDS[ASKED[seen.path]]
    if seen.status != 200:
        told = seen.reply.decode().partition('"error":"')[2].partition('"')[0] or seen.reply.decode()
        assert told[:60] in backend.error_message(seen.status, seen.reply)
        return
    deltas, error = replay(backend.decoder(seen.stream), [seen.reply])
    assert error is None
    failed = [delta.error for delta in deltas if delta.error is not None]
    if b'data: {"error"' in seen.reply:
        assert len(failed) == 1 and failed[0].encode() in seen.reply
        return
    assert not failed and sum(delta.finish is not None for delta in deltas) == (b"finish_reason" in seen.reply)
    made = seen.headers.get("x-generated-tokens")
    counts = [delta.output_tokens for delta in deltas if delta.output_tokens is not None]
    if made is not None and counts:
        assert counts == [int(made)]
    if seen.stream:
        roles = seen.reply.count(b'"content":""')  # a token of a character's first bytes looks like a role alone
        assert sum(delta.n_tokens for delta in deltas) == seen.reply.count(b'"index"') - roles
    if b"prompt_tokens" in seen.reply or b"input_length" in seen.reply:
        assert [delta.prompt_tokens for delta in deltas if delta.prompt_tokens is not None] == [
            4 if "no messages" in seen.case else 10 if "chat" in seen.path else 3
        ]
