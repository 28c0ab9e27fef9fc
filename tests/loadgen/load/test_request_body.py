"""What users add to requests and leave out of them, and what is advised where a server refuses a field. The messages
are those of the servers named beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import backends
from backends.protocol import Prompt, Sampling
from loadgen.config import Config, ConfigError
from loadgen.load.request_body import BodyEdits, advised, parse, refused
from loadgen.plan import plan_run
from loadgen.target import Target
from tests.loadgen.test_cli import ServerInfo

BODY: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": "seed is not supported"}], "max_tokens": 8,
    "temperature": 0.0, "seed": 3, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip


def sent(extra: str | None = None, *omitted: str, body: dict[str, Any] = BODY) -> dict[str, Any]:
    edited: dict[str, Any] = json.loads(parse(extra, omitted).apply(json.dumps(body).encode()))
    return edited


def test_fields_are_added_overridden_and_left_out() -> None:
    assert sent() == BODY
    assert sent('{"top_k": 20, "temperature": 1}') == BODY | {"top_k": 20, "temperature": 1}
    assert sent('{"stream_options": {"continuous_usage_stats": true}}') == BODY | {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    }
    assert sent('{"seed": {"a": null}}') == BODY | {"seed": {"a": None}}
    assert sent(None, "seed", "stream_options") == {
        k: v for k, v in BODY.items() if k not in ("seed", "stream_options")
    }
    assert sent(None, "stream_options.include_usage")["stream_options"] == {}
    tgi = {"inputs": "a", "parameters": {"max_new_tokens": 4, "seed": 0}}
    assert sent('{"parameters": {"top_n_tokens": 2}}', "parameters.seed", body=tgi) == {
        "inputs": "a", "parameters": {"max_new_tokens": 4, "top_n_tokens": 2},
    }  # fmt: skip
    renamed = json.loads(BodyEdits(length_field="max_completion_tokens").apply(json.dumps(BODY).encode()))
    assert renamed["max_completion_tokens"] == 8 and "max_tokens" not in renamed and list(renamed)[:2] == list(BODY)[:2]


def test_a_body_without_edits_is_the_backends_own() -> None:
    body = backends.get("vllm").encode("m", Prompt(1, [7]), Sampling(4)).body
    assert BodyEdits().apply(body) is body


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"extra_body": "{"}, "no JSON object"),
        ({"extra_body": "[1]"}, "no JSON object"),
        ({"extra_body": '{"model": "x"}'}, "--model names it"),
        ({"extra_body": '{"stream": false}'}, "--no-stream"),
        ({"extra_body": '{"parameters": {"max_new_tokens": 5}}'}, "--output-tokens"),
        ({"extra_body": '{"n": 2}'}, "several replies"),
        ({"extra_body": '{"api_key": "abc"}'}, "looks like a secret"),
        ({"extra_body": '{"user": "sk-123"}'}, "looks like a secret"),
        ({"omit_field": ("messages",)}, "no request does without it"),
        ({"omit_field": ("",)}, "names a field"),
        ({"omit_field": ("seeds",)}, "did you mean seed"),
        ({"omit_field": ("seed.x",)}, "no such field"),
    ],
)
def test_edits_that_make_no_request(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as raised:
        config = Config(backend="openai-chat", url="http://h", **options)
        plan_run(config, backends.get("openai-chat"), Target("http://h"), ServerInfo("m"), "r")
    assert "sk-123" not in str(raised.value) and "abc" not in str(raised.value)


def test_one_choice_and_names_like_those_of_secrets_may_be_asked_for() -> None:
    assert sent('{"n": 1, "min_tokens": 2, "skip_special_tokens": true, "prompt_cache_key": "a"}')["n"] == 1


@pytest.mark.parametrize(
    ("message", "fields", "options"),
    [
        (  # OpenAI
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' "
            "instead.",
            ["max_tokens"], "--omit-field max_tokens",
        ),
        (  # OpenAI
            "Unsupported value: 'temperature' does not support 0.0 with this model. Only the default (1) value is "
            "supported.", ["temperature"], "--omit-field temperature",
        ),
        ("Unrecognized request argument supplied: ignore_eos", ["ignore_eos"], "--no-ignore-eos"),  # Azure
        (  # pydantic's, of vLLM's first versions, Mistral and others
            "body.seed: Extra inputs are not permitted; body.stream_options: Extra inputs are not permitted",
            ["seed", "stream_options"], "--omit-field seed --omit-field stream_options",
        ),
        ("property 'ignore_eos' is unsupported", ["ignore_eos"], "--no-ignore-eos"),  # Groq
        (  # Gemini
            'Invalid JSON payload received. Unknown name "seed": Cannot find field.', ["seed"], "--omit-field seed",
        ),
        (  # serde's, of servers in Rust: what is known says nothing of what is not
            "unknown field `ignore_eos`, expected one of `model`, `messages`, `max_tokens`, `seed`",
            ["ignore_eos"], "--no-ignore-eos",
        ),
        (  # jsonschema's
            "Additional properties are not allowed ('ignore_eos', 'seed' were unexpected)",
            ["seed", "ignore_eos"], "--omit-field seed --no-ignore-eos",
        ),
        ("This model does not support stream", ["stream"], "--no-stream"),
        (  # LiteLLM
            "litellm.UnsupportedParamsError: bedrock does not support parameters: ['seed'], for model=x",
            ["seed"], "--omit-field seed",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_options_that_end_it(message: str, fields: list[str], options: str) -> None:
    body = json.dumps(BODY).encode()
    assert [name for name in refused(message, body) if name != "model"] == fields
    assert advised(message, body) == f"{message.rstrip('.')}; leave out what it refuses: {options}"


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens is too large: 9000. This model supports at most 4096 completion tokens",
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        "The model `m` does not exist or you do not have access to it.",
        "Model is overloaded",
        "Role 'user' is not supported: unseeded",
        "",
    ],
)
def test_other_errors_stay_as_they_are(message: str) -> None:
    assert advised(message, json.dumps(BODY).encode()) == message
