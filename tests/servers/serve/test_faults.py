"""Every fault, seen from the client's side of the socket."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from servers.app import FAULT_HELP
from servers.schedulers import Sequence
from servers.serve import faults
from servers.simulator.build import Emulated, EmulationError, emulate
from servers.simulator.options import Hardware
from servers.simulator.virtual import simulate
from tests.servers.reader import TIMEOUT_S, Running, ask_on, http_request, running, stamps
from tests.servers.test_app import connection_to, fails, start

DIALECTS = ("vllm", "tgi", "lightllm", "sglang")
PATHS = {"vllm": "/v1/completions", "tgi": "/generate_stream", "lightllm": "/generate_stream", "sglang": "/generate"}
WHOLE_PATHS = PATHS | {"tgi": "/generate", "lightllm": "/generate"}


def body(dialect: str, n_tokens: int = 10, stream: bool = True) -> dict[str, Any]:
    if dialect == "vllm":
        options = {"stream_options": {"include_usage": True}} if stream else {}
        return {"prompt": "a b c d", "max_tokens": n_tokens, "stream": stream} | options
    if dialect == "sglang":
        return {"text": "a b c d", "sampling_params": {"max_new_tokens": n_tokens}, "stream": stream}
    return {"inputs": "a b c d", "parameters": {"max_new_tokens": n_tokens, "details": True}}


def stream_of(server: Running, dialect: str, n_tokens: int = 10) -> Any:
    return server.post(PATHS[dialect], body(dialect, n_tokens))


def raw_stream(server: Running, dialect: str, n_tokens: int = 10) -> bytes:
    return server.raw(http_request(PATHS[dialect], body(dialect, n_tokens), "Connection: close"))


def texts(dialect: str, data: list[Any]) -> list[str]:
    if dialect == "vllm":
        return [event["choices"][0]["text"] for event in data if event.get("choices")]
    if dialect == "sglang":  # each has what came before it, too
        said = ["", *(event["text"] for event in data if "text" in event)]
        return [after.removeprefix(before) for before, after in itertools.pairwise(said)]
    return [event["token"]["text"] for event in data if "token" in event]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_reset_midway(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "reset:1", itl_ms=20) as server, pytest.raises(ConnectionResetError):
        raw_stream(server, dialect)
    assert [len(sent) for _, sent in stamps(server.stamps_path).values()] == [5]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_truncate_midway(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "truncate:1") as server:
        received = raw_stream(server, dialect)
        assert received.count(b"data:") == 5
        assert not received.endswith(b"0\r\n\r\n")
        with pytest.raises(http.client.IncompleteRead):
            server.post(WHOLE_PATHS[dialect], body(dialect, stream=False))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_stall_midway_keeps_the_connection_open(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "stall:1") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.3) as sock:
            sock.sendall(http_request(PATHS[dialect], body(dialect)))
            received = b""
            with pytest.raises(TimeoutError):
                while data := sock.recv(65536):
                    received += data
            assert received.count(b"data:") == 5
        assert server.ask("GET", "/health").status == 200


@pytest.mark.parametrize(
    ("dialect", "status", "expected"),
    [
        ("vllm", 429, {"error": {"message": "Rate limit reached.", "type": "Too Many Requests", "param": None,
                                 "code": 429}}),
        ("vllm", 503, {"error": {
            "message": "The engine is currently busy and cannot accept new requests. Please try again later or on a "
                       "different instance.", "type": "ServiceUnavailableError", "param": None, "code": 503}}),
        ("tgi", 424, {"error": "Request failed during generation: Server error: CANCELLED",
                      "error_type": "generation"}),
        ("tgi", 429, {"error": "Model is overloaded", "error_type": "overloaded"}),
        ("tgi", 503, {"error": "unhealthy", "error_type": "healthcheck"}),
        ("lightllm", 429, {"error": {"message": "Server is busy, please try again later.", "type": "RateLimitError",
                                     "param": None, "code": 429}}),
        ("sglang", 503, {"object": "error", "message": "The request queue is full.", "type": "503", "param": None,
                         "code": 503}),
        ("lightllm", 500, {"error": {"message": "Internal Server Error", "type": "InternalServerError", "param": None,
                                     "code": 500}}),
    ],
)  # fmt: skip
def test_http_errors_have_the_servers_own_body(tmp_path: Path, dialect: str, status: int, expected: Any) -> None:
    with running(tmp_path, dialect, f"http_error:{status}:1") as server:
        answer = stream_of(server, dialect)
    assert (answer.status, answer.json) == (status, expected)


def test_stream_error_of_vllm_comes_midway_and_is_followed_by_done(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "stream_error:1") as server:
        answer = stream_of(server, "vllm")
    assert answer.status == 200
    assert len(texts("vllm", answer.data)) == 5
    assert answer.data[-1]["error"]["code"] == 500
    assert answer.events[-1] == b"data: [DONE]\n\n"
    assert "usage" not in answer.data[-1]


def test_stream_error_of_tgi_is_the_only_event(tmp_path: Path) -> None:
    with running(tmp_path, "tgi", "stream_error:1") as server:
        answer = stream_of(server, "tgi")
    assert answer.status == 200
    assert answer.body == b'data: {"error":"Model is overloaded","error_type":"overloaded"}\n\n'


def test_stream_error_of_lightllm_ends_the_stream_midway(tmp_path: Path) -> None:
    with running(tmp_path, "lightllm", "stream_error:1") as server:
        answer = stream_of(server, "lightllm")
    assert len(texts("lightllm", answer.data)) == 5
    assert answer.data[-1]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("dialect", "stop"),
    [("vllm", '"stop"'), ("tgi", '"eos_token"'), ("lightllm", '"stop"'), ("sglang", '{"type":"stop"')],
)
def test_short_stops_halfway_and_says_so(tmp_path: Path, dialect: str, stop: str) -> None:
    with running(tmp_path, dialect, "short:1") as server:
        answer = stream_of(server, dialect)
        assert len(texts(dialect, answer.data)) == 5
        assert f'"finish_reason":{stop}'.encode() in answer.body
        whole = server.post(WHOLE_PATHS[dialect], body(dialect, stream=False))
        assert f'"finish_reason":{stop}'.encode() in whole.body
        assert b" in" in whole.body and b" is" not in whole.body


@pytest.mark.parametrize("dialect", ["vllm", "tgi", "sglang"])
@pytest.mark.parametrize("n_tokens", [1, 2, 9, 10])
def test_merge_carries_two_tokens_an_event(tmp_path: Path, dialect: str, n_tokens: int) -> None:
    with running(tmp_path, dialect, "merge:2") as server:
        plain, merged = (stream_of(server, dialect, n_tokens) for _ in range(2))
    pieces = texts(dialect, plain.data)
    assert len(pieces) == n_tokens
    assert texts(dialect, merged.data) == ["".join(pieces[at : at + 2]) for at in range(0, n_tokens, 2)]
    assert sorted(len(sent) for _, sent in stamps(server.stamps_path).values()) == [(n_tokens + 1) // 2]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_coalesce_writes_four_events_at_once(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "coalesce:1") as server:
        answer = server.post(PATHS[dialect], body(dialect), X_Request_Id="r")
    assert len(texts(dialect, answer.data)) == 10
    sent = stamps(server.stamps_path)["r"][1]
    assert [len([each for each in sent if each == time]) for time in sorted(set(sent))] == [4, 4, 2]


def test_no_done(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "no_done:1") as server:
        answer = stream_of(server, "vllm")
    assert b"[DONE]" not in answer.body
    assert answer.data[-1]["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("dialect", DIALECTS)
def test_refuse_closes_before_any_byte(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "refuse:1") as server:
        assert raw_stream(server, dialect) == b""


def test_cached_tokens_are_reported_and_counted(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "cached:1") as server:
        usage = stream_of(server, "vllm").data[-1]["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        whole = server.post("/v1/completions", body("vllm", stream=False)).json
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert server.metrics()['vllm:prefix_cache_hits_total{model_name="m",engine="0"}'] == 4


def test_wrong_prompt_tokens_are_reported_one_too_many(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "wrong_prompt_tokens:1") as server:
        assert stream_of(server, "vllm").data[-1]["usage"]["prompt_tokens"] == 5
    with running(tmp_path, "tgi", "wrong_prompt_tokens:1") as server:
        assert stream_of(server, "tgi").data[-1]["details"]["input_length"] == 6
    with running(tmp_path, "lightllm", "wrong_prompt_tokens:1") as server:
        assert {event["token"]["prompt_tokens"] for event in stream_of(server, "lightllm").data} == {5}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_garbage_midway_is_no_json(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "garbage:1") as server:
        events = stream_of(server, dialect).events
    with pytest.raises(ValueError):
        json.loads(events[5].removeprefix(b"data:"))
    assert len(events) == {"vllm": 13, "sglang": 12}.get(dialect, 11)  # it goes on after that


def received(server: Running, dialect: str, *ends: bytes) -> bytes:
    """What comes back on a connection that stays open, until all of `ends` have come one after the other, or until the
    server closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as sock:
        sock.sendall(http_request(PATHS[dialect], body(dialect)))
        data, at = b"", 0
        for end in ends or (None,):
            while end is None or end not in data[at:]:
                if not (more := sock.recv(65536)):
                    return data
                data += more
            at = data.index(end, at) + len(end)
        return data


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_error_body_with_200(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "json_error:1") as server:
        answer = stream_of(server, dialect)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert "error" in (*answer.json, answer.json.get("object"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_empty_body(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "empty:1") as server:
        answer = stream_of(server, dialect)
    assert (answer.status, answer.body) == (200, b"")


def test_nothing_but_done(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "done_only:1") as server:
        assert stream_of(server, "vllm").body == b"data: [DONE]\n\n"
        assert server.post(PATHS["vllm"], body("vllm", stream=False)).body == b""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_token_after_the_end(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "late_token:2") as server:
        right, late = (stream_of(server, dialect) for _ in range(2))
    assert [len(texts(dialect, answer.data)) for answer in (right, late)] == [10, 11]
    assert [len(answer.events) for answer in (right, late)] == [len(right.events), len(right.events) + 1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_follows_the_last_chunk(tmp_path: Path, dialect: str) -> None:
    end = b"\r\n0\r\n\r\n"
    with running(tmp_path, dialect, "junk_after:@1", "unasked_reply:@2", "close_idle:@3") as server:
        assert received(server, dialect, end, b"junk\r\n").endswith(end + b"junk\r\n")
        first, _, second = received(server, dialect, end, end).partition(end)
        assert first.startswith(b"HTTP/1.1 200 OK") and second.startswith(b"HTTP/1.1 200 OK")
        closed = received(server, dialect)
    assert closed.endswith(end) and b"onnection: close" not in closed


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_follows_a_whole_page(tmp_path: Path, dialect: str) -> None:
    asked = http_request(WHOLE_PATHS[dialect], body(dialect, stream=False), "Connection: close")
    with running(tmp_path, dialect, "junk_after:@1", "unasked_reply:@2") as server:
        assert server.raw(asked).endswith(b"}junk\r\n")
        assert server.raw(asked).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_chunk_size_that_is_no_number(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "bad_chunk:1") as server:
        data = received(server, dialect, b"zz\r\n")
    assert data.count(b"data:") == 5
    assert data.endswith(b"\n\n\r\nzz\r\n")


def test_every_counts_requests_and_the_first_named_wins(tmp_path: Path) -> None:
    with running(tmp_path, "vllm", "http_error:503:3", "http_error:429:2") as server:
        statuses = [stream_of(server, "vllm", 1).status for _ in range(6)]
    assert statuses == [200, 429, 503, 429, 200, 503]


@pytest.mark.parametrize("kind", ["reset", "truncate", "stream_error", "garbage", "short", "merge", "coalesce"])
def test_a_reply_of_one_token_can_break_too(tmp_path: Path, kind: str) -> None:
    with running(tmp_path, "vllm", f"{kind}:2") as server:
        assert len(stream_of(server, "vllm", 1).data) == 2
        try:
            stream_of(server, "vllm", 1)
        except (http.client.HTTPException, OSError):
            assert kind in ("reset", "truncate")
        assert len(stream_of(server, "vllm", 1).data) == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("explode:3", "there is no fault 'explode'"),
        ("reset", "not of the form reset:WHEN"),
        ("reset:0", "not of the form reset:WHEN"),
        ("reset:2:3", "not of the form reset:WHEN"),
        ("http_error:3", "http_error:STATUS:WHEN"),
        ("http_error:x:3", "http_error:STATUS:WHEN"),
        ("reset:0%", "not of the form reset:WHEN"),
        ("reset:101%", "not of the form reset:WHEN"),
        ("reset:nan%", "not of the form reset:WHEN"),
        ("reset:@0", "not of the form reset:WHEN"),
        ("slow_start:0", "slow_start:SECONDS, above 0"),
        ("slow_start:soon", "slow_start:SECONDS"),
        ("slow_rank:1", "slow_rank:FACTOR, above 1"),
        ("slow_rank:2%", "slow_rank:FACTOR"),
        ("kv_exhaustion:0.5", "kv_exhaustion:SHARE%, above 0 and at most 100%"),
        ("kv_exhaustion:120%", "kv_exhaustion:SHARE%"),
        ("http_error:200:3", "200 is no error status"),
        ("", "there is no fault ''"),
    ],
)
def test_faults_that_make_no_sense(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        faults.parse(text, "vllm")


def test_what_a_dialect_cannot_say_is_refused() -> None:
    for kind in ("cached", "done_only"):
        with pytest.raises(ValueError, match="the tgi protocol has nothing of the kind"):
            faults.parse(f"{kind}:2", "tgi")


def test_the_help_has_each_kind() -> None:
    assert all(kind in FAULT_HELP for kind in (*faults.KINDS, *faults.CONDITIONS))


def test_a_share_is_drawn_from_seed_and_number_alone(tmp_path: Path) -> None:
    three, again, four = (faults.read(["reset:5%"], "vllm", seed) for seed in (3, 3, 4))
    struck = [number for number in range(1, 10_001) if three.striking(number)]
    assert 430 < len(struck) < 570
    assert struck == [number for number in range(1, 10_001) if again.striking(number)]
    assert struck != [number for number in range(1, 10_001) if four.striking(number)]
    expected = [429 if faults.read(["http_error:429:50%"], "vllm", 7).striking(n) else 200 for n in range(1, 9)]
    assert set(expected) == {200, 429}
    with running(tmp_path, "vllm", "http_error:429:50%", seed=7) as server:
        assert [stream_of(server, "vllm", 1).status for _ in range(8)] == expected


def test_shares_of_several_kinds_are_drawn_apart() -> None:
    both = faults.read(["http_error:429:50%", "http_error:503:50%", "reset:50%"], "vllm")
    kinds = [fault.status if fault else None for n in range(1, 4001) if [fault := both.striking(n)]]
    assert [round(kinds.count(each) / 4000, 1) for each in (429, 503, 0, None)] == [0.5, 0.2, 0.1, 0.1]


def test_a_script_names_single_requests(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('[{"request": 2, "kind": "http_error:503"}, {"request": 4, "kind": "stream_error"}]')
    with running(tmp_path, "vllm", str(script), "http_error:429:@5") as server:
        answers = [stream_of(server, "vllm", 2) for _ in range(6)]
    assert [answer.status for answer in answers] == [200, 503, 200, 200, 429, 200]
    assert "error" in answers[3].data[-1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[{]", "is no script of faults"),
        ('[{"request": 1}]', "is no script of faults"),
        ('[{"request": 1, "kind": "reset", "every": 2}]', "is no script of faults"),
        ('[{"request": 0, "kind": "reset"}]', "not of the form reset:WHEN"),
        ('[{"request": 1, "kind": "explode"}]', "there is no fault 'explode'"),
        ('[{"request": 1, "kind": "slow_start"}]', "slow_start:SECONDS"),
    ],
)
def test_scripts_that_make_no_sense(tmp_path: Path, text: str, sentence: str) -> None:
    script = tmp_path / "script.json"
    script.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        faults.read([str(script)], "vllm")


def test_a_script_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    code, said = fails("--fault", str(tmp_path / "none.json"))
    assert (code, "cannot read" in said) == (2, True)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_slow_start_refuses_until_it_is_over(tmp_path: Path, dialect: str) -> None:
    with running(tmp_path, dialect, "slow_start:3600") as server:
        assert [server.ask("GET", path).status for path in ("/health", "/metrics", "/nowhere")] == [503, 200, 404]
        assert stream_of(server, dialect).status == 503
        server.server.healthy_ns = 1  # long ago
        assert server.ask("GET", "/health").status == 200
        assert stream_of(server, dialect).status == 200


def test_the_process_dies_at_the_request_that_says_so() -> None:
    process, ready = start("--fault", "die:3", "--ttft-ms", "0", "--itl-ms", "0")
    for _ in range(2):
        assert ask_on(connection_to(ready["url"]), "POST", PATHS["vllm"], body("vllm", 2)).status == 200
    with pytest.raises((http.client.HTTPException, OSError)):
        ask_on(connection_to(ready["url"]), "POST", PATHS["vllm"], body("vllm", 2))
    _, said = process.communicate(timeout=10)
    assert process.returncode == 1
    assert said == "llm-dissect server: request 3 ends this server, as its faults say.\n"


def modelled(kv_share: float = 1.0, slow_rank: float = 1.0, gpus: int = 1) -> Emulated:
    setup = Hardware(gpu="h200", gpus=gpus, tp=gpus, kv_tokens=60_000).setup("vllm", "llama-2-7b", 4096)
    return emulate(setup).degraded(kv_share, slow_rank)


def test_kv_exhaustion_makes_preemptions_storm() -> None:
    load = [(0.0, 512, 256)] * 60
    preempted, makespans = [], []
    for share in (1.0, 0.1):
        emulated = modelled(share)
        engine = emulated.engine(lambda _emits, _first_s, _gap_s: None)
        outcomes = simulate(emulated, load)
        makespans.append(max(outcome.times_s[-1] for outcome in outcomes))
        assert [len(outcome.times_s) for outcome in outcomes] == [256] * 60
        for index, (_, prompt, output) in enumerate(load):
            engine.submit(Sequence(index, prompt, output), 0.0)
        engine.advance(float("inf"))
        preempted.append(engine.scheduler.preemptions)
    assert preempted[0] == 0 < preempted[1]
    assert makespans[1] > 2 * makespans[0]


def test_a_slow_rank_slows_every_step_by_its_factor() -> None:
    last_s = [simulate(modelled(1.0, factor, gpus=2), [(0.0, 512, 256)])[0].times_s[-1] for factor in (1.0, 3.0)]
    assert last_s[1] / last_s[0] == pytest.approx(3, rel=0.01)
    with pytest.raises(EmulationError, match="on several GPUs"):
        modelled(1.0, 2.0, gpus=1)
    with pytest.raises(EmulationError, match="leave 256"):
        modelled(0.001)


@pytest.mark.parametrize("fault", ["kv_exhaustion:10%", "slow_rank:2"])
def test_faults_of_modelled_hardware_need_one(fault: str) -> None:
    code, said = fails("--fault", fault)
    assert (code, "needs modelled hardware" in said) == (2, True)
