"""One agentic trace, played by loadgen, aiperf and guidellm against the embedded server: how late is each turn?

    benchmarks/peers.sh                                     # the other two, into .venv-peers
    PYTHONPATH=benchmarks python -m side_by_side.agents     # prints the table of docs/lab/traffic.md

Four sessions in Weka's format. Each has two turns, then two sub-agents of two turns side by side, then two turns more.
A turn is due the recorded wait after the end of what it waits for, all by each tool's own stamps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from side_by_side.clients import PEERS, ROOT

sys.path.insert(0, str(ROOT))

from tests.vllm import tiny_model

SESSIONS, MODEL = 4, "llama-2-7b"
SNAPSHOT = "models--local--tiny/snapshots/0"  # in a cache of models: for a trace aiperf takes a tokenizer's id alone
LOADGEN = (sys.executable, "-c", "from loadgen.cli import main; main()")
# A turn, what it waits for, and the kind of wait. loadgen numbers the turns of a session in this order.
WAITS = {
    "main0": ((), "first of a session"),
    "main1": (("main0",), "after a tool"),
    "a0.0": (("main1",), "first of a sub-agent"),
    "a0.1": (("a0.0",), "after a sub-agent's tool"),
    "a1.0": (("main1",), "first of a sub-agent"),
    "a1.1": (("a1.0",), "after a sub-agent's tool"),
    "main2": (("a0.1", "a1.1"), "after the sub-agents"),
    "main3": (("main2",), "after a tool"),
}
Spans = dict[tuple[int, str], tuple[float, float]]  # session and turn: when it was sent and done, s


def tool_s(session: int) -> float:
    """How long a tool of that session takes."""
    return 0.2 + 0.1 * session


def wait_s(session: int, turn: str) -> float:
    """What the trace says, after the end of what the turn waits for."""
    kind = WAITS[turn][1]
    return {"after a tool": tool_s(session), "after a sub-agent's tool": 0.4, "after the sub-agents": 0.2}.get(
        kind, 0.0
    )


def trace(session: int) -> dict[str, Any]:
    def call(at_s: float, tokens: int, first_block: int = 0) -> dict[str, Any]:
        blocks = list(range(first_block, first_block + tokens // 64))
        return {"t": at_s, "type": "s", "model": "m", "in": tokens, "out": 16, "hash_ids": blocks, "api_time": 0.3}

    def agent(number: int, at_s: float) -> dict[str, Any]:
        first = 100 * (number + 1)
        return {
            "t": at_s, "type": "subagent", "agent_id": f"a{number}", "subagent_type": "Explore", "status": "completed",
            "duration_ms": 1000, "models": ["m"], "total_tokens": 0, "tool_use_count": 1,
            "requests": [call(at_s, 128, first), call(at_s + 0.7, 256, first)],
        }  # fmt: skip

    tool = tool_s(session)
    rows = [
        call(0.0, 256), call(0.3 + tool, 384), agent(0, 0.6 + tool), agent(1, 0.6 + tool), call(1.8 + tool, 512),
        call(2.1 + 2 * tool, 640),
    ]  # fmt: skip
    return {
        "id": f"s{session}", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 0,
        "system_tokens": 0, "requests": rows,
    }  # fmt: skip


def loadgen(url: str, work: Path) -> Spans:
    run(
        *LOADGEN,
        "run",
        "--url",
        url,
        "--trace",
        work / "traces",
        "--no-calibrate",
        "--warmup",
        "1",
        "--out",
        work / "run",
    )
    rows = [json.loads(line) for line in (work / "run/requests.jsonl").read_text().splitlines()[1:]]
    turns = tuple(WAITS)
    return {
        (row["session"], turns[row["id"] % len(turns)]): (row["sent_ns"] / 1e9, row["done_ns"] / 1e9)
        for row in rows
        if row.get("phase") == "measured"
    }


def aiperf(url: str, work: Path) -> Spans:
    run(
        PEERS / "aiperf/bin/aiperf", "profile", "--model", MODEL, "--tokenizer", "local/tiny", "--url", url,
        "--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--no-fixed-schedule",
        "--input-file", work / "traces", "--custom-dataset-type", "weka_trace",
        "--concurrency", SESSIONS, "--num-conversations", SESSIONS, "--output-artifact-dir", work / "aiperf",
    )  # fmt: skip
    spans: Spans = {}
    for line in (work / "aiperf/profile_export.jsonl").read_text().splitlines():
        row = json.loads(line)["metadata"]
        session, _, agent = row["conversation_id"].partition("::sa:")
        turn = f"{agent}.{row['turn_index']}" if agent else f"main{row['turn_index']}"
        spans[int(session[1:]), turn] = (row["request_start_ns"] / 1e9, row["request_end_ns"] / 1e9)
    return spans


def guidellm(url: str, work: Path) -> Spans:
    data = {
        "kind": "weka",
        "source": {"kind": "json_file", "path": str(work / "all.jsonl")},
        "duration_column": "api_time",
    }
    run(
        PEERS / "guidellm/bin/guidellm", "run",
        "--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/chat/completions",
        "--profile", "kind=replay", "--tokenizer", f"kind=huggingface_auto,model={work / SNAPSHOT}",
        "--data", json.dumps(data), "--output", f"kind=json,path={work / 'guidellm.json'}", "--disable-progress",
    )  # fmt: skip
    requests = json.loads((work / "guidellm.json").read_text())["benchmarks"][0]["requests"]
    graphs: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in requests["successful"]:
        info = row["info"]
        turn = info["node_id"].replace("main_", "main").replace("sa_", "a").replace("_", ".")
        times = info["timings"]
        graphs[info["conversation_id"]][turn] = (times["request_start"], times["request_end"])
    # It names sessions anew; their tools tell which is which.
    return {
        (round((spans["main1"][0] - spans["main0"][1] - tool_s(0)) * 10), turn): span
        for spans in graphs.values()
        for turn, span in spans.items()
    }


def run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{words[0]} failed: {(done.stderr or done.stdout)[-2000:]}")


def late_ms(spans: Spans) -> dict[str, list[float]]:
    """By kind of wait, how long after it was due each turn was sent, ms."""
    late: dict[str, list[float]] = defaultdict(list)
    for (session, turn), (sent_s, _) in spans.items():
        before, kind = WAITS[turn]
        if before:
            due_s = max(spans[session, each][1] for each in before) + wait_s(session, turn)
            late[kind].append((sent_s - due_s) * 1000)
    return late


def table(measured: dict[str, Spans]) -> Iterator[str]:
    yield "| turn, ms late: min, median, max | " + " | ".join(measured) + " |"
    yield "|---|" + "---|" * len(measured)
    late = {name: late_ms(spans) for name, spans in measured.items()}
    for kind in dict.fromkeys(kind for before, kind in WAITS.values() if before):
        cells = (np.quantile(each[kind], (0, 0.5, 1)) for each in late.values())
        yield f"| {kind} | " + " | ".join(", ".join(f"{value:.1f}" for value in cell) for cell in cells) + " |"
    yield (
        "| turns sent | " + " | ".join(f"{len(spans)} of {SESSIONS * len(WAITS)}" for spans in measured.values()) + " |"
    )


def main() -> None:
    tools: list[Callable[[str, Path], Spans]] = [loadgen, aiperf, guidellm]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "traces").mkdir()
        traces = [json.dumps(trace(session)) for session in range(SESSIONS)]
        for session, text in enumerate(traces):
            (work / f"traces/s{session}.json").write_text(text)
        (work / "all.jsonl").write_text("\n".join(traces) + "\n")
        (work / SNAPSHOT).mkdir(parents=True)
        tiny_model.write(work / SNAPSHOT)
        (work / "models--local--tiny/refs").mkdir()
        (work / "models--local--tiny/refs/main").write_text("0")
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": directory}
        serve = (*LOADGEN, "serve", "--port", "0", "--ttft-ms", "100", "--itl-ms", "10")
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            print("\n".join(table({tool.__name__: tool(url, work) for tool in tools})))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
