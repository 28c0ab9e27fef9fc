"""The faults of `loadgen serve --fault`, and what our own client makes of each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec

from loadgen.client.engine import run_here
from loadgen.event_loop import run_loop
from loadgen.plan import ClientJob, ClientPlan, PromptSource, Sampling, Timeouts
from loadgen.rundir.records import Record
from loadgen.target import Target
from tests.faults.case import OK, Expected
from tests.faults.protocols import OUTPUT_TOKENS
from tests.loadgen.load.loads import load

HALF = OUTPUT_TOKENS // 2
STRUCK, REQUESTS = 2, 6  # the third request, one after the other on one connection
IDLE_S, PATIENT_S = 1.0, 20.0
DIALECTS = {  # and the backends that ask
    "vllm": ("vllm", "vllm-generate", "openai-chat"), "tgi": ("tgi",), "lightllm": ("lightllm",),
    "sglang": ("sglang", "openai", "openai-chat"),
}  # fmt: skip

EXPECTED = {
    "reset": Expected(outcome="reset", events=HALF),
    "truncate": Expected(outcome="truncated", events=HALF),
    "stall": Expected(outcome="timeout", events=HALF),
    "http_error:STATUS": Expected(outcome="http_error", events=0),
    "json_error": Expected(outcome="stream_error", events=0),
    "stream_error": Expected(outcome="stream_error"),
    "empty": Expected(outcome="truncated", events=0),
    "done_only": Expected(outcome="truncated", events=0),
    "short": Expected(outcome="ok", tokens=HALF, events=HALF, findings=("OUTPUT_LENGTH",)),
    "merge": Expected(outcome="ok", tokens=OUTPUT_TOKENS, events=HALF, findings=("MERGED_EVENTS",)),
    "coalesce": OK,
    "no_done": OK,
    "late_token": Expected(outcome="protocol_error", events=OUTPUT_TOKENS),
    "junk_after": OK,
    "unasked_reply": OK,
    "close_idle": OK,
    "unnoticed": OK,
    "refuse": replace(OK, tries=2),  # on a reused connection: sent again on a fresh one
    "cached": Expected(outcome="ok", tokens=OUTPUT_TOKENS, events=OUTPUT_TOKENS, findings=("CACHED_TOKENS",)),
    "wrong_prompt_tokens": Expected(
        outcome="ok", tokens=OUTPUT_TOKENS, events=OUTPUT_TOKENS, findings=("PROMPT_LENGTH",)
    ),
    "garbage": Expected(outcome="protocol_error", events=HALF),
    "bad_chunk": Expected(outcome="protocol_error", events=HALF),
}


def ask(url: str, backend: str, directory: Path) -> dict[int, Record]:
    """The records of six requests, sent one after the other."""
    job = ClientJob(
        run_id="served", version="0", model="m", sampling=Sampling(OUTPUT_TOKENS), warmup=0,
        load=load(requests=REQUESTS, concurrency=1, seed=1, input_tokens=16, output_tokens=OUTPUT_TOKENS),
        timeouts=Timeouts(PATIENT_S, PATIENT_S, IDLE_S, PATIENT_S),
    )  # fmt: skip
    plan = ClientPlan(
        job=job, backend=backend, target=Target(url), transport="fast", fresh=False, kernel_timestamps=False,
        prompts=PromptSource(offset=_added(backend)),
    )  # fmt: skip

    async def story() -> None:
        async with asyncio.timeout(2 * PATIENT_S):
            await run_here(plan, directory, lambda snapshots: None)

    run_loop(story())
    lines = (directory / "requests.jsonl").read_bytes().splitlines()[1:-1]
    records = [msgspec.json.decode(line, type=Record) for line in lines]
    return {record.id: record for record in records}


def _added(backend: str) -> int:
    """Prompt tokens that the embedded server adds to a text: those of a chat's template, or TGI's first."""
    return {"openai-chat": 5, "tgi": 1}.get(backend, 0)
