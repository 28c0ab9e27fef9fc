"""Asks a server as people do, with the client named, and prints what came back as JSON: `ask.py CLIENT URL`.

Run by the clients' own Python (.venv-clients), which has nothing of this project.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL = "llama-2-7b"
SAID = [{"role": "user", "content": "one two"}]


def openai_completions(url: str) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": MODEL, "max_tokens": 3}
    whole = client.completions.create(prompt=["a b", "c"], n=2, logprobs=1, **asked)
    stream = client.completions.create(prompt="a b", stream=True, stream_options={"include_usage": True}, **asked)
    events = list(stream)
    return {
        "models": [model.id for model in client.models.list()],
        "whole": [(choice.index, choice.text, choice.logprobs.tokens) for choice in whole.choices],
        "whole tokens": whole.usage.completion_tokens,
        "stream": [choice.text for event in events for choice in event.choices],
        "stream tokens": events[-1].usage.completion_tokens,
    }


def openai_chat(url: str) -> dict[str, Any]:
    from openai import NotFoundError, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 3}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **asked)
    stream = client.chat.completions.create(stream=True, **asked)
    try:
        client.chat.completions.create(model="another", messages=SAID)
        error = ""
    except NotFoundError as refused:
        error = str(refused.message)
    return {
        "whole": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "candidates": [len(token.top_logprobs) for token in whole.choices[0].logprobs.content],
        "fingerprint": whole.system_fingerprint,
        "stream": "".join(choice.delta.content or "" for event in stream for choice in event.choices),
        "another model": error,
    }


def openai_responses(url: str) -> dict[str, Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client.responses.stream(model=MODEL, input=SAID, max_output_tokens=3) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        last = stream.get_final_response()
    return {"stream": texts, "whole": last.output_text, "tokens": last.usage.output_tokens}


def openai_chat_alone(url: str) -> dict[str, Any]:
    """What every server between has."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 3}
    whole = client.chat.completions.create(**asked)
    events = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    return {
        "whole": whole.choices[0].message.content,
        "fingerprint": whole.system_fingerprint,
        "stream": "".join(choice.delta.content or "" for event in events for choice in event.choices),
        "tokens": events[-1].usage.completion_tokens,
    }


def huggingface_hub(url: str) -> dict[str, Any]:
    from huggingface_hub import InferenceClient

    client = InferenceClient(url)
    details = client.text_generation("a b", max_new_tokens=3, details=True, return_full_text=False)
    chat = client.chat_completion(SAID, max_tokens=3, stream=True)
    return {
        "whole": client.text_generation("a b", max_new_tokens=3),
        "tokens": [token.text for token in details.details.tokens],
        "stream": list(client.text_generation("a b", max_new_tokens=3, stream=True)),
        "chat": "".join(event.choices[0].delta.content for event in chat),
    }


def text_generation(url: str) -> dict[str, Any]:
    from text_generation import Client

    client = Client(url)
    whole = client.generate("a b", max_new_tokens=3)
    return {
        "whole": whole.generated_text,
        "finish": whole.details.finish_reason.value,
        "stream": [event.token.text for event in client.generate_stream("a b", max_new_tokens=3)],
        "chat": client.chat(messages=SAID, max_tokens=3).choices[0].message.content,
    }


def litellm(url: str) -> dict[str, Any]:
    from litellm import completion

    asked = {"model": f"openai/{MODEL}", "messages": SAID, "max_tokens": 3, "api_base": f"{url}/v1", "api_key": "none"}
    stream = completion(stream=True, **asked)
    return {
        "whole": completion(**asked).choices[0].message.content,
        "stream": "".join(event.choices[0].delta.content or "" for event in stream),
    }


ASK = {
    each.__name__: each
    for each in (
        openai_completions,
        openai_chat,
        openai_responses,
        openai_chat_alone,
        huggingface_hub,
        text_generation,
        litellm,
    )
}

if __name__ == "__main__":
    print(json.dumps(ASK[sys.argv[1]](sys.argv[2])))
