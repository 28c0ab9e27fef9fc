"""The bodies that are sent, field for field: servers ignore a misspelt field without a word."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import backends
from backends.protocol import Prompt, Sampling

IDS = Prompt(n_tokens=3, token_ids=[1, 15043, 3186])
TEXT = Prompt(n_tokens=3, text="Hello 日\n")
CHAT = Prompt(n_tokens=0, text="Be brief.\nHello", messages=(("system", "Be brief."), ("user", "Hello")))
SEEN = Prompt(n_tokens=3, text="Hello", images=("data:x",))
SEVERAL = Prompt(n_tokens=6, text="a b c d", items=("a b c d", "e f"))
GREEDY = Sampling(max_tokens=128)
KEPT = Sampling(max_tokens=128, returns_token_ids=True)
WARM = Sampling(max_tokens=7, ignore_eos=False, temperature=0.5, seed=9, stream=False)


@pytest.mark.parametrize(
    ("name", "prompt", "sampling", "path", "body"),
    [
        ("vllm", IDS, GREEDY, "/v1/completions",
         {"model": "m", "prompt": [1, 15043, 3186], "max_tokens": 128, "temperature": 0.0, "seed": 0,
          "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
        ("vllm", TEXT, WARM, "/v1/completions",
         {"model": "m", "prompt": "Hello 日\n", "max_tokens": 7, "temperature": 0.5, "seed": 9}),
        ("vllm", IDS, KEPT, "/v1/completions",
         {"model": "m", "prompt": [1, 15043, 3186], "max_tokens": 128, "temperature": 0.0, "seed": 0,
          "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}),
        ("vllm-generate", IDS, KEPT, "/inference/v1/generate",
         {"model": "m", "token_ids": [1, 15043, 3186], "stream": True, "stream_options": {"include_usage": True},
          "sampling_params": {"max_tokens": 128, "temperature": 0.0, "seed": 0, "ignore_eos": True,
                              "detokenize": False}}),
        ("openai-chat", CHAT, KEPT, "/v1/chat/completions",
         {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
          "max_tokens": 128, "temperature": 0.0, "seed": 0, "ignore_eos": True, "stream": True,
          "stream_options": {"include_usage": True}}),
        ("openai", TEXT, GREEDY, "/v1/completions",
         {"model": "m", "prompt": "Hello 日\n", "max_tokens": 128, "temperature": 0.0, "seed": 0,
          "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
        ("openai-chat", TEXT, GREEDY, "/v1/chat/completions",
         {"model": "m", "messages": [{"role": "user", "content": "Hello 日\n"}], "max_tokens": 128, "temperature": 0.0,
          "seed": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
        ("lightllm", IDS, GREEDY, "/generate_stream",
         {"inputs": [1, 15043, 3186], "multimodal_params": {},
          "parameters": {"max_new_tokens": 128, "ignore_eos": True, "do_sample": False, "add_special_tokens": False,
                         "disable_prompt_cache": True}}),
        ("lightllm", TEXT, WARM, "/generate",
         {"inputs": "Hello 日\n", "multimodal_params": {},
          "parameters": {"max_new_tokens": 7, "ignore_eos": False, "do_sample": True, "temperature": 0.5,
                         "add_special_tokens": False, "disable_prompt_cache": True}}),
        ("llamacpp", IDS, KEPT, "/completion",
         {"prompt": [1, 15043, 3186], "n_predict": 128, "ignore_eos": True, "temperature": 0.0, "seed": 0,
          "stream": True, "cache_prompt": False, "return_tokens": True}),
        ("llamacpp", TEXT, WARM, "/completion",
         {"prompt": "Hello 日\n", "n_predict": 7, "ignore_eos": False, "temperature": 0.5, "seed": 9, "stream": False,
          "cache_prompt": False}),
        ("sglang", IDS, KEPT, "/generate",
         {"input_ids": [1, 15043, 3186], "stream": True,
          "sampling_params": {"max_new_tokens": 128, "temperature": 0.0, "ignore_eos": True}}),
        ("sglang", TEXT, WARM, "/generate",
         {"text": "Hello 日\n", "stream": False,
          "sampling_params": {"max_new_tokens": 7, "temperature": 0.5, "ignore_eos": False}}),
        *((name, IDS, KEPT, "/v1/completions",
           {"model": "m", "prompt": [1, 15043, 3186], "max_tokens": 128, "temperature": 0.0, "seed": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}})
          for name in ("dynamo", "lmdeploy", "trtllm")),
        ("ollama", TEXT, WARM, "/api/generate",
         {"model": "m", "prompt": "Hello 日\n", "raw": True, "stream": False,
          "options": {"num_predict": 7, "temperature": 0.5, "seed": 9}}),
        ("openai-chat", SEEN, WARM, "/v1/chat/completions",
         {"model": "m", "max_tokens": 7, "temperature": 0.5, "seed": 9,
          "messages": [{"role": "user", "content": [
              {"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {"url": "data:x"}}]}]}),
        ("openai-responses", SEEN, WARM, "/v1/responses",
         {"model": "m", "max_output_tokens": 7, "temperature": 0.5, "store": False,
          "input": [{"role": "user", "content": [
              {"type": "input_text", "text": "Hello"}, {"type": "input_image", "image_url": "data:x"}]}]}),
        ("openai-responses", TEXT, GREEDY, "/v1/responses",
         {"model": "m", "input": "Hello 日\n", "max_output_tokens": 128, "temperature": 0.0, "store": False,
          "ignore_eos": True, "stream": True}),
        ("openai-responses", CHAT, WARM, "/v1/responses",
         {"model": "m", "max_output_tokens": 7, "temperature": 0.5, "store": False,
          "input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}),
        ("embeddings", TEXT, GREEDY, "/v1/embeddings",
         {"model": "m", "input": ["Hello 日\n"], "encoding_format": "base64"}),
        ("embeddings", SEVERAL, GREEDY, "/v1/embeddings",
         {"model": "m", "input": ["a b c d", "e f"], "encoding_format": "base64"}),
        ("rerank", SEVERAL, GREEDY, "/v1/rerank", {"model": "m", "query": "a", "documents": ["b c d", "f"]}),
        ("tei-rerank", SEVERAL, GREEDY, "/rerank", {"query": "a", "texts": ["b c d", "f"]}),
        ("score", SEVERAL, GREEDY, "/score", {"model": "m", "text_1": "a", "text_2": ["b c d", "f"]}),
        ("tgi", TEXT, GREEDY, "/generate_stream",
         {"inputs": "Hello 日\n",
          "parameters": {"max_new_tokens": 128, "do_sample": False, "details": True, "seed": 0}}),
        ("tgi", TEXT, WARM, "/generate",
         {"inputs": "Hello 日\n",
          "parameters": {"max_new_tokens": 7, "do_sample": True, "temperature": 0.5, "details": True, "seed": 9}}),
    ],
)  # fmt: skip
def test_request(name: str, prompt: Prompt, sampling: Sampling, path: str, body: dict[str, Any]) -> None:
    request = backends.get(name).encode("m", prompt, sampling)
    assert request.path == path
    assert msgspec.json.decode(request.body) == body
