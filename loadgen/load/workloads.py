"""Loads that people know by name. Each is nothing but options of a run.

agentic: coding agents, whose laws METHODOLOGY has with their sources. paper: Section VI of arXiv 2311.03687.
llm-perf: one stream, as in the LLM-Perf leaderboard. inferencemax: the lengths of InferenceMAX's README, drawn from
80 % of each on, in a closed loop; it measures loops of 4 to 64. sharegpt-like: lognormal lengths whose means are those
of ShareGPT in Figure 11 of the vLLM paper (161 in, 338 out; arXiv 2309.06180).
"""

from __future__ import annotations

from typing import Literal

WorkloadName = Literal[
    "agentic", "paper", "llm-perf", "inferencemax:1k1k", "inferencemax:1k8k", "inferencemax:8k1k", "sharegpt-like"
]
_1K, _8K = "uniform:819:1024", "uniform:6553:8192"
_LOOP: dict[str, int | str] = {"requests": 640, "concurrency": 64}

OPTIONS: dict[WorkloadName, dict[str, int | str]] = {
    "agentic": {
        "sessions": 64, "concurrency": 8,
        "turns": "lognormal:16:1.7:1:200", "think_time": "lognormal:0.3:3:0:216",
        "prefix": "1:11000", "first_tokens": "normal:12367:450:11264:13744",
        "output_tokens": "lognormal:200:1.4:1:8192", "input_tokens": "lognormal:790:1.3:1:12800",
        "subagents": "0.02:2:8", "context_tokens": 131072,
    },
    "paper": {"requests": 1000, "input_tokens": 512, "arrival": "burst"},
    "llm-perf": {"requests": 10, "input_tokens": 256, "output_tokens": 1000, "concurrency": 1},
    "inferencemax:1k1k": {"input_tokens": _1K, "output_tokens": _1K, **_LOOP},
    "inferencemax:1k8k": {"input_tokens": _1K, "output_tokens": _8K, **_LOOP},
    "inferencemax:8k1k": {"input_tokens": _8K, "output_tokens": _1K, **_LOOP},
    "sharegpt-like": {
        "input_tokens": "lognormal:84:1.2:4:2048", "output_tokens": "lognormal:227:1:4:2048", "arrival": "poisson:4",
    },
}  # fmt: skip


def text() -> str:
    """Every name and the options that it stands for, for a help text."""
    lines = []
    for name, options in OPTIONS.items():
        words = [f"--{option.replace('_', '-')} {value}" for option, value in options.items()]
        lines.append(f"{name}: {' '.join(words)}.")
    return " ".join(lines)
