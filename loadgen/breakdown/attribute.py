"""From the steps in a server's trace to the tables of a breakdown.

Order identifies the parts: layers repeat, attention marks each, and norms bound its blocks. An attention block begins
with the norm before its first matrix product, its FFN block with the first norm after the product that follows
attention, and what comes after the transformer with the norm that ends the last FFN block. A step whose order is
another stays unassigned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from loadgen import trace
from loadgen.breakdown.kernels import COMMUNICATION
from loadgen.breakdown.steps import Activity, EngineStep, Steps
from loadgen.breakdown.tables import AFTER, ATTENTION, BEFORE, BETWEEN, FFN, IDLE, KINDS, PARTS, UNASSIGNED, Kernel

SHOWN_KERNELS = 40


class Dissected(msgspec.Struct, frozen=True):
    """The average of all steps, in milliseconds; what of it is not here, the trace does not know."""

    step_ms: float
    kinds: dict[str, float]
    parts: dict[str, float]
    hidden_ms: float
    layers: int | None
    kernels: tuple[Kernel, ...]


def dissect(decoded: Steps) -> Dissected:
    """The average step."""
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    hidden_s = 0.0
    layers: set[int | None] = set()
    for step in decoded.steps:
        shares, hidden = _kinds(step)
        for kind, seconds in shares.items():
            kinds[kind] += seconds
        hidden_s += hidden
        cut, count = _parts(step)
        layers.add(count)
        for part, seconds in cut.items():
            parts[part] += seconds
        for each in step.activities:
            if each.start_s >= step.start_s:  # what reaches over from the step before was counted there
                by_name[each.name, each.kind].append(each.end_s - each.start_s)
    scale = 1000 / len(decoded.steps)
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN_KERNELS]
    return Dissected(
        step_ms=sum(step.end_s - step.start_s for step in decoded.steps) * scale,
        kinds={kind: seconds * scale for kind, seconds in kinds.items()},
        parts={part: seconds * scale for part, seconds in parts.items()},
        hidden_ms=hidden_s * scale,
        layers=layers.pop() if len(layers) == 1 else None,
        kernels=tuple(
            Kernel(name, kind, sum(took) * scale, len(took) / len(decoded.steps)) for (name, kind), took in largest
        ),
    )


def _kinds(step: EngineStep) -> tuple[dict[str, float], float]:
    """Seconds of each kind, which add up to the step, and of communication that something else hid."""
    shares: dict[str, float] = defaultdict(float)
    clipped = [(max(each.start_s, step.start_s), min(each.end_s, step.end_s), each) for each in step.activities]
    clipped.sort(key=lambda item: item[:2])
    reached_s = step.start_s
    for start_s, end_s, each in clipped:  # where two compute at once, the one that began first has the time
        if each.kind not in COMMUNICATION and end_s > reached_s:
            shares[each.kind] += end_s - max(start_s, reached_s)
            reached_s = end_s
    computing = trace.union((start, end) for start, end, each in clipped if each.kind not in COMMUNICATION)
    computing_s = sum(end - start for start, end in computing)
    taken = computing
    hidden_s = 0.0
    for start_s, end_s, each in clipped:
        if each.kind not in COMMUNICATION or end_s <= start_s:
            continue
        alone = trace.minus([(start_s, end_s)], taken)
        shares[each.kind] += sum(end - start for start, end in alone)
        hidden_s += trace.seconds_within(computing, start_s, end_s)
        taken = trace.union([*taken, (start_s, end_s)])
    communicating_s = sum(shares[kind] for kind in COMMUNICATION)
    shares[IDLE] = step.end_s - step.start_s - computing_s - communicating_s
    return dict(shares), hidden_s


def _parts(step: EngineStep) -> tuple[dict[str, float], int | None]:
    """Seconds of each part, which add up to the step, and how many layers were seen; None: its order is another."""
    length_s = step.end_s - step.start_s
    blocks = _blocks(step.order)
    if blocks is None:
        return {UNASSIGNED: length_s}, None
    cut: dict[str, float] = defaultdict(float)
    reached_s, part = step.start_s, BEFORE
    for at, following in blocks:
        start_s = step.order[at].start_s
        cut[part] += start_s - reached_s
        reached_s, part = start_s, following
    last_s = min(step.end_s, max(each.end_s for each in step.activities))
    cut[part] += last_s - reached_s
    cut[BETWEEN] = step.end_s - last_s
    return dict(cut), sum(following == ATTENTION for _, following in blocks)


def _blocks(order: Sequence[Activity]) -> list[tuple[int, str]] | None:
    """Where each block begins, by index; None where norms and attention do not alternate as in a transformer."""
    groups = _attention_groups(order)
    norms = [at for at, each in enumerate(order) if each.norm and (at == 0 or not order[at - 1].norm)]
    products = [at for at, each in enumerate(order) if each.kind == "GEMM"]

    def product_between(first: int, last: int) -> bool:
        return any(first < at < last for at in products)

    blocks: list[tuple[int, str]] = []
    for number, (first, last) in enumerate(groups):
        since = groups[number - 1][1] if number else -1
        until = groups[number + 1][0] if number + 1 < len(groups) else len(order)
        before = [at for at in norms if since < at < first and product_between(at, first)]
        ffn = next((at for at in norms if last < at < until and product_between(last, at)), None)
        if not before or ffn is None or (blocks and before[-1] <= blocks[-1][0]):
            return None
        blocks += [(before[-1], ATTENTION), (ffn, FFN)]
    if not blocks:
        return None
    after = next((at for at in norms if at > blocks[-1][0] and product_between(blocks[-1][0], at)), None)
    return None if after is None else [*blocks, (after, AFTER)]


def _attention_groups(order: Sequence[Activity]) -> list[tuple[int, int]]:
    """First and last index of the attention of each layer: kernels of attention without a matrix product between."""
    groups: list[tuple[int, int]] = []
    together = False
    for at, each in enumerate(order):
        if each.kind == "Attention":
            if together:
                groups[-1] = (groups[-1][0], at)
            else:
                groups.append((at, at))
            together = True
        elif each.kind == "GEMM":
            together = False
    return groups
