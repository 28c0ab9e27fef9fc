"""Replies that think before they answer: how much of them is thought, when the answer begins, and how fast it comes.
Pure: the table in, numbers out.

How many tokens were thought is the server's own count; without one, the events that it told apart. The pace of an
answer is that of its tokens after those of the read with which it began, as `tpot` is of a whole reply.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.report import metrics
from loadgen.report.metrics import Convention, Summary
from loadgen.report.schema import Reasoning
from loadgen.rundir.records import RequestTable


def ttft_answer(measured: RequestTable, rules: Convention) -> Summary | None:
    """None where no reply told its reasoning apart."""
    if not measured.answers_ns:
        return None
    answer_ns = _column(measured, measured.answers_ns)
    answered = measured.ok & (answer_ns != -1) & (measured.sent_ns != -1)
    return metrics.summary_of((answer_ns - measured.sent_ns)[answered] / 1e6, rules)


def build(measured: RequestTable, rules: Convention) -> Reasoning | None:
    """None where no reply that ended ok says that it thought."""
    thought, answer_ns = _column(measured, measured.reasoning), _column(measured, measured.answers_ns)
    chosen = measured.ok & (thought > 0) & (measured.output_tokens >= thought)
    if not chosen.any():
        return None
    apart = chosen & (answer_ns != -1) & (measured.first_token_ns != -1)
    return Reasoning(
        replies=int(chosen.sum()),
        thinking_tokens_mean=float(thought[chosen].mean()),
        thinking_ratio=float(thought[chosen].sum() / measured.output_tokens[chosen].sum()),
        thinking_ms=metrics.summary_of((answer_ns - measured.first_token_ns)[apart] / 1e6, rules),
        answer_tpot_ms=_answer_tpot(measured, np.flatnonzero(apart & (measured.first_tokens != -1)), thought, rules),
    )


def _answer_tpot(
    measured: RequestTable, rows: NDArray[np.int64], thought: NDArray[np.int64], rules: Convention
) -> Summary:
    each_ms = []
    for row in rows.tolist():
        answer_ns = measured.answers_ns[int(measured.id[row])]
        arrivals_ns = measured.arrivals_ns(row)
        begun = int((arrivals_ns == answer_ns // 1000 * 1000).sum())  # tokens of the read that began it
        rest = int(measured.output_tokens[row] - thought[row]) - max(1, begun)
        if rest > 0:
            each_ms.append((int(measured.last_token_ns[row]) - answer_ns) / 1e6 / rest)
    return metrics.summary_of(np.array(each_ms, np.float64), rules)


def _column(measured: RequestTable, counts: dict[int, int]) -> NDArray[np.int64]:
    """What a few requests have, of each (n,); -1 where it has none."""
    return np.array([counts.get(number, -1) for number in measured.id.tolist()], np.int64)
