"""LoRA adapters in a load: how each server is asked for one, and what is told when a server lacks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import backends
from backends.protocol import Prompt, Sampling, ServerInfo
from loadgen.cli import invoke
from loadgen.config import Config, ConfigError
from loadgen.plan import choose_model, with_adapters
from tests.loadgen.client.test_engine import plan
from tests.servers.reader import running


def body(backend: str, adapter: str) -> dict[str, Any]:
    job = plan("http://h:1").job
    prompt = Prompt(2, [5, 6], "a b") if backends.get(backend).prompt_kind == "token_ids" else Prompt(2, None, "a b")
    asked: dict[str, Any] = json.loads(job.request(backends.get(backend), prompt, Sampling(3), adapter).body)
    return asked


@pytest.mark.parametrize(
    ("backend", "changed"),
    [
        ("vllm", {"model": "a"}),
        ("openai", {"model": "a"}),
        ("openai-chat", {"model": "a"}),
        ("sglang", {"lora_path": "a"}),
        ("tgi", {"parameters": {"adapter_id": "a"}}),
    ],
)
def test_a_request_names_its_adapter_as_its_server_wants_it_and_is_else_the_same(
    backend: str, changed: dict[str, Any]
) -> None:
    plain, asked = body(backend, ""), body(backend, "a")
    (field,) = changed
    inner = changed[field]
    expected = {**plain.get(field, {}), **inner} if isinstance(inner, dict) else inner
    assert asked == {**plain, field: expected} != plain


def load(text: str) -> Any:
    return Config(adapters=text).load


LISTED = ServerInfo(model="m", adapters=("x", "y", "z"))


@pytest.mark.parametrize(
    ("asked", "backend", "info", "sentence"),
    [
        ("x:1,q:1", "vllm", LISTED, "the server lacks the adapter 'q' of --adapters; it has x, y, z."),
        ("q:1", "sglang", ServerInfo(adapters=()), "the server lacks the adapter 'q' of --adapters; it has none."),
        ("zipf=1:4", "vllm", LISTED, "--adapters asks for 4 adapters, and the server has x, y, z; lower the number."),
        ("x:1", "lightllm", LISTED, "--adapters: a request to lightllm cannot name an adapter; leave it out."),
        ("x:1", "llamacpp", LISTED, "--adapters: a request to llamacpp cannot name an adapter; leave it out."),
    ],
)
def test_what_a_server_lacks_is_told(asked: str, backend: str, info: ServerInfo, sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        with_adapters(load(asked), backends.get(backend), info)
    assert str(told.value) == sentence


def test_zipf_takes_the_servers_first_and_a_server_that_lists_none_is_asked_all_the_same() -> None:
    named = with_adapters(load("zipf=1:2"), backends.get("vllm"), LISTED).adapters
    assert named is not None and named.names == ("x", "y")
    assert with_adapters(load("q:1,base:1"), backends.get("tgi"), ServerInfo(model="m")) == load("q:1,base:1")


def test_of_models_with_parents_the_base_is_chosen_and_the_others_are_its_adapters() -> None:
    models = [("m", None), ("x", "m"), ("y", "m")]
    listed = [{"id": name, "owned_by": "vllm", "parent": parent, "max_model_len": 99} for name, parent in models]
    info = backends.get("vllm").read_info("/v1/models", msgspec.json.encode({"data": listed}))
    assert (info.model, info.adapters, info.max_total_tokens) == ("m", ("x", "y"), 99)
    assert choose_model(Config(), backends.get("vllm"), info) == "m"
    assert choose_model(Config(model="y"), backends.get("vllm"), info) == "y"  # one may be measured alone


def test_nothing_is_sent_to_a_server_that_lacks_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path) as server:
        assert invoke(["run", "--url", f"http://127.0.0.1:{server.port}", "--adapters", "q:1", "--no-calibrate"]) == 2
        assert "the server lacks the adapter 'q' of --adapters; it has none." in capsys.readouterr().err
        assert not server.server.telemetry.finished.total()
