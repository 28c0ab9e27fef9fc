"""Replays loads through Dynamo's mock engines in virtual time: no server, no clock. Needs .venv-dynamo.

    .venv-dynamo/bin/python tests/clients/drive_dynamo.py <loads.json >requests.jsonl

In: a list of {"name", "engine", "concurrency", "requests"}. "engine" is Dynamo's own description of a mock engine.
"requests" are [ms, prompt, output, blocks], the first of them at 0: "blocks" are those of BLOCK_TOKENS that its prompt
consists of, and equal numbers mean equal tokens. With "concurrency" the next is sent when one has ended, in this order,
and the times do not matter; without, no two have the same time.

Out: for each load a line {"name", "requests"}: [sent ms, first token's ms, last token's ms, output tokens, tokens of
the prompt that were cached when it was first let in, times it was let in], in the order in which they were given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dynamo.replay.api import run_trace_replay

BLOCK_TOKENS = 16


def replay(load: dict[str, Any], trace: Path) -> list[list[float]]:
    closed = load["concurrency"] is not None
    with trace.open("w") as lines:
        for number, (ms, prompt, output, blocks) in enumerate(load["requests"]):
            line = {"timestamp": ms, "input_length": prompt, "output_length": output, "hash_ids": blocks}
            print(json.dumps({"session_id": str(number), **line} if closed else line), file=lines)
    report = run_trace_replay(
        [str(trace)], extra_engine_args={"engine": load["engine"]}, trace_block_size=BLOCK_TOKENS,
        replay_concurrency=load["concurrency"], capture_per_request=True,
    )  # fmt: skip
    # only a session in a closed loop keeps its name
    told = sorted(report.per_request, key=lambda each: int(each["session_id"]) if closed else each["arrival_time_ms"])
    names = ("arrival_time_ms", "first_token_ms", "last_token_ms", "output_length")
    return [
        [*(each[name] for name in names), each["admission_history"][0]["reused_input_tokens"], each["admission_count"]]
        for each in told
    ]


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Dynamo prints is no answer
    with tempfile.TemporaryDirectory() as directory, out:
        for load in json.load(sys.stdin):
            print(
                json.dumps({"name": load["name"], "requests": replay(load, Path(directory) / "trace")}),
                file=out,
                flush=True,
            )


if __name__ == "__main__":
    main()
