"""One server's life in time: requests come in, steps follow each other, tokens go out. No clock is read here.

The caller sets how far time may go (`advance`), as a wall clock or as fast as it can be computed; the events are the
same. Seconds since the start, as floats.

Before and after the scheduler stands the front end, one process whose loop takes requests in and hands tokens out. What
comes while it is busy with others holds those back too: it reads all that is there before it works on any of it, so of
a burst of 1000 nothing reaches the scheduler before a thousand times `request_us`. Then it hands them over one by one,
and the first step begins with the first of them. Tokens queue: those of a step are worked on together, at most CHUNK
at once, before the first of them goes out, and a request that comes meanwhile waits for them.

One thread of the CPU launches the steps and takes their results. While it launches a step, the GPU may still be at the
step before, whose tokens wait until the thread is free. A step begins on the GPU when it has been put together, which
a GPU that has nothing else to do waits for. It ends when the GPU has done it, and never before all of it is launched.

Most steps are like the one before: the same requests take a token each. Until a request comes, all steps are computed
in one loop, which asks the scheduler only where requests change. The live server needs each step by itself and does
without this loop.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable

import msgspec

from servers.schedulers import Scheduler, Sequence, Step

CHUNK = 128  # tokens that it works on before it hands out the first (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)

Steady = Callable[[list[Sequence], float], Callable[[float], None]]


class FrontEnd(msgspec.Struct, frozen=True, kw_only=True):
    """request_us: to take in a request; prompt_token_us: and each token of its prompt; handover_us: and then to hand it
    over to the scheduler's process. output_us: to take a token of a step in; token_us: to hand it out; first_token_us:
    before the first of a reply, for each token of its prompt. latency_us: between processes, each way. round_requests:
    that one round of its loop takes in at most, before it hands them over. behind_us: and more for each token of a step
    that ends before those of the step before it are out."""

    request_us: float = 0.0
    token_us: float = 0.0
    output_us: float = 0.0
    latency_us: float = 0.0
    prompt_token_us: float = 0.0
    first_token_us: float = 0.0
    handover_us: float = 0.0
    round_requests: int = 4096
    behind_us: float = 0.0


class Engine:
    """Runs a scheduler's steps, each of which takes the seconds of `takes`: on the GPU, where it begins at the second
    given; and, of the CPU, to be launched, and of that before its first kernel is.
    `deliver(emits, first_s, gap_s)` is called with the tokens of each step: the k-th of `emits` leaves the server at
    first_s + k * gap_s. Meanwhile `turning` has the places in `emits` of those whose first or last token it is.
    `deliver_steady(emits, gap_s)`, where given, is called instead for steps that follow each other and hold nobody's
    first or last token; what it returns is called with first_s of each of these steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        takes: tuple[Callable[[Step, float], float], Callable[[Step], tuple[float, float]]],
        deliver: Callable[[list[Sequence], float, float], None],
        front: FrontEnd,
        deliver_steady: Steady | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._step_s, self._launch_s = takes
        self._deliver = deliver
        self._deliver_steady = deliver_steady
        self._request_s = front.request_us * 1e-6
        self._handover_s = front.handover_us * 1e-6
        self._prompt_token_s = front.prompt_token_us * 1e-6
        self._slows = front.behind_us > 0
        self._pace = functools.cache(functools.partial(_pace, front))
        self._first_token_s = front.first_token_us * 1e-6
        self._latency_s = front.latency_us * 1e-6
        self.turning: list[int] = []
        self.now_s = 0.0
        self._round_requests = front.round_requests
        self._taking_in: list[Sequence] = []
        self._taken_in_s = math.inf  # when they are through
        self._handed_s = 0.0  # until when the front end is busy with those before them
        self._front_s = 0.0  # until when the front end hands out tokens
        self._cpu_s = 0.0  # until when the thread that launches is busy
        self._gpu_s = 0.0  # until when the GPUs are
        self._arriving: deque[tuple[float, Sequence]] = deque()
        self._under_way: deque[tuple[float, Step]] = deque()

    def submit(self, sequence: Sequence, at_s: float) -> None:
        """A request has come in, after all that were submitted before. Raises Rejected."""
        self.advance(at_s)
        self.scheduler.admit(sequence)
        if not self._taking_in:
            self._taken_in_s = max(at_s, self._handed_s, self._front_s)
        self._taking_in.append(sequence)
        self._taken_in_s += self._request_s + sequence.prompt * self._prompt_token_s
        if len(self._taking_in) >= self._round_requests:
            self._pass_on()

    def cancel(self, sequence: Sequence) -> None:
        """Its client has gone; nothing more of it is worked on."""
        sequence.done = True
        self.scheduler.cancel(sequence)

    def next_s(self) -> float:
        """When something happens next; infinity if nothing will."""
        comes = self._arriving[0][0] if self._arriving else math.inf
        return min(self._free_s(), comes, self._taken_in_s)

    def advance(self, until_s: float) -> None:
        """All that happens up to and including `until_s`."""
        arriving, under_way, scheduler = self._arriving, self._under_way, self.scheduler
        depth = scheduler.depth
        while True:
            now_s, cpu_s = self.now_s, self._cpu_s  # what follows is `next_s`, without its calls
            if cpu_s > now_s and len(under_way) < depth:
                now = cpu_s
            elif under_way:
                now = under_way[0][0]
                if now < cpu_s:
                    now = cpu_s
            else:
                now = math.inf
            comes = arriving[0][0] if arriving else math.inf
            if comes < now:
                now = comes
            taken = self._taken_in_s
            if taken < now:
                now = taken
            if now > until_s or now == math.inf:
                return
            if taken == now:
                self._pass_on()
                continue
            self.now_s = now
            if comes == now:
                while arriving and arriving[0][0] == now:
                    _, sequence = arriving.popleft()
                    if not sequence.done:  # its client may have gone
                        scheduler.add(sequence)
            elif now_s < cpu_s <= now and len(under_way) < depth and self._fill():
                continue  # the next step comes before the results of one that has just ended
            elif under_way and under_way[0][0] <= now:
                if (deliver := self._deliver_steady) is not None and len(under_way) == depth:
                    self._decode(until_s, deliver)
                    continue
                self._finish()
            if cpu_s <= now and len(under_way) < depth:
                self._fill()

    def _decode(self, until_s: float, deliver: Steady) -> None:
        """What `advance` does while nobody comes: one of `depth` steps ends, now the first, and the next is launched.
        Of steps like the last the scheduler hears when it has something else to do."""
        under_way, arriving, scheduler = self._under_way, self._arriving, self.scheduler
        step_s, latency_s = self._step_s, self._latency_s
        now_s, cpu_s, gpu_s, front_s, taken_s = self.now_s, self._cpu_s, self._gpu_s, self._front_s, self._taken_in_s
        comes = arriving[0][0] if arriving else math.inf
        (emits, behind), slows = (list[Sequence](), False), self._slows
        most = launched = over = 0  # steps like the last: that may be launched, that were, and that are over
        while True:
            end_s, ended = under_way[0]
            if end_s < cpu_s:
                end_s = cpu_s
            if end_s > until_s or end_s >= comes or end_s >= taken_s:
                break
            now_s = end_s
            if not ended.steady or launched == most:
                scheduler.repeat(launched, over)
                most, launched, over = most - launched, 0, 0
            if not ended.steady:
                self.now_s, self._front_s, self._taken_in_s = now_s, front_s, taken_s
                self._finish()
                front_s, taken_s = self._front_s, self._taken_in_s
                emits = []
            else:
                under_way.popleft()
                if most:
                    over += 1
                else:
                    scheduler.finish(ended)
                if ended.emits is not emits or (slows and (front_s > now_s) is not behind):
                    emits, behind = ended.emits, slows and front_s > now_s
                    in_s, gap_s = self._pace(len(emits), behind)
                    out_s, put = len(emits) * gap_s, deliver(emits, gap_s)
                begin_s = front_s if front_s > now_s else now_s
                first_s = begin_s + in_s
                front_s = first_s + out_s
                taken_s += front_s - begin_s
                put(first_s + gap_s + latency_s)
            if not most:
                if repeated := scheduler.repeats():
                    step, most = repeated
                elif scheduled := scheduler.schedule():
                    step = scheduled
                else:
                    break
                rows, (launch_s, prepare_s) = len(step.emits), self._launch_s(step)
            if launched < most:
                launched += 1
                step.decode_context += rows
            cpu_s = now_s + launch_s
            begin_s = now_s + prepare_s
            if begin_s < gpu_s:
                begin_s = gpu_s
            gpu_s = begin_s + step_s(step, begin_s)
            if gpu_s < cpu_s:
                gpu_s = cpu_s
            under_way.append((gpu_s, step))
        self.now_s, self._cpu_s, self._gpu_s, self._front_s, self._taken_in_s = now_s, cpu_s, gpu_s, front_s, taken_s
        scheduler.repeat(launched, over)

    def _finish(self) -> None:
        """The first step under way is over."""
        _, step = self._under_way.popleft()
        self.scheduler.finish(step)
        if step.emits:
            self._hand_out(step)

    def _free_s(self) -> float:
        """When the thread that launches can go on: with the results of a step, or with the next one."""
        under_way, cpu_s = self._under_way, self._cpu_s
        if cpu_s > self.now_s and len(under_way) < self.scheduler.depth:
            return cpu_s
        return max(under_way[0][0], cpu_s) if under_way else math.inf

    def _pass_on(self) -> None:
        """What was taken in together reaches the scheduler in a row."""
        at_s = self._taken_in_s
        for sequence in self._taking_in:
            at_s += self._handover_s
            self._arriving.append((at_s + self._latency_s, sequence))
        self._handed_s = at_s
        self._taking_in = []
        self._taken_in_s = math.inf

    def _fill(self) -> bool:
        """Launches steps while the thread is free; whether there was one."""
        filled = False
        now_s, under_way, scheduler = self.now_s, self._under_way, self.scheduler
        while self._cpu_s <= now_s and len(under_way) < scheduler.depth:
            step = scheduler.schedule()
            if step is None:
                break
            filled = True
            launch_s, prepare_s = self._launch_s(step)
            cpu_s, gpu_s = now_s + launch_s, self._gpu_s
            begin_s = now_s + prepare_s
            if begin_s < gpu_s:
                begin_s = gpu_s
            end_s = begin_s + self._step_s(step, begin_s)
            if end_s < cpu_s:
                end_s = cpu_s
            self._cpu_s, self._gpu_s = cpu_s, end_s
            under_way.append((end_s, step))
        return filled

    def _hand_out(self, step: Step) -> None:
        emits, turning, begun = step.emits, step.turning, step.begun
        if turning is None:
            turning = [place for place, each in enumerate(emits) if each.emitted == 1 or each.emitted == each.output]
            begun = sum([emits[at].prompt for at in turning if emits[at].emitted == 1])
        self.turning = turning
        count = len(emits)
        now_s, front_s = self.now_s, self._front_s
        behind = front_s > now_s
        begin_s = front_s if behind else now_s
        in_s, gap_s = self._pace(count, behind)
        first_s = begin_s + in_s
        if step.prefill_rows:
            first_s += self._first_token_s * begun
        self._front_s = front_s = first_s + count * gap_s
        if self._taking_in:
            self._taken_in_s += front_s - begin_s  # a request that came waits meanwhile
        self._deliver(emits, first_s + gap_s + self._latency_s, gap_s)


def _pace(front: FrontEnd, count: int, behind: bool) -> tuple[float, float]:
    """Seconds before the first of a step's `count` tokens is worked on alone, and from each to the next. behind: it
    still handed out others when the step ended."""
    output_s, gap_s = front.output_us * 1e-6, (front.token_us + front.behind_us * behind) * 1e-6
    if count > CHUNK:
        gap_s += output_s * (count - CHUNK) / count
    return output_s * min(count, CHUNK), gap_s


def place_s(first_s: float, gap_s: float, place: int) -> float:
    """When the token at `place` of a delivery leaves, added up one by one as for all of them."""
    for _ in range(place):
        first_s += gap_s
    return first_s
