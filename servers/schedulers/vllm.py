"""vLLM's schedulers: paged KV cache in blocks of 16 tokens, first come first served, recomputation after preemption."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from servers.schedulers import Paged, Rejected, Sequence, Step
from servers.schedulers.blocks import BlockCache
from servers.schedulers.decoding import EVERY, Decoding, Held
from servers.schedulers.groups import BLOCK_TOKENS, LayerGroups


class _Recomputing(Paged):
    """What both have: what happens to a request that ends, leaves or is preempted."""

    def __init__(self, kv_tokens: int, blocks: int) -> None:
        super().__init__(kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS, blocks, BLOCK_TOKENS)

    def cancel(self, sequence: Sequence) -> None:
        sequence.done = True
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def finish(self, step: Step) -> None:
        ended = False
        for sequence in step.emits:
            sequence.emitted += 1
            if sequence.emitted == sequence.output and not sequence.done:
                sequence.done = ended = True
                self._release(sequence)
        if ended:
            self._running = [sequence for sequence in self._running if not sequence.done]
            if any(sequence.done for sequence in self._waiting):  # preempted with its last token on the way
                self._waiting = deque(sequence for sequence in self._waiting if not sequence.done)

    def _preempt(self) -> None:
        sequence = self._running.pop()
        self._start_over(sequence)
        self._waiting.appendleft(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.index


class VllmV1(_Recomputing):
    """vLLM's V1 scheduler: one budget of tokens a step for running requests and then waiting ones, prompts in chunks,
    blocks of 16 tokens; where blocks run out, the request that came last starts over (recomputation).

    Source: vllm/v1/core/sched/scheduler.py of 0.32, first come first served or by priority, without prefix cache and
    speculation. With asynchronous scheduling (vLLM's default from 0.14 on) the next step is put together while one is
    computed, and a request that has its last token under way is left out of it. Beside vLLM's own classes, sync and
    async, none of 66669 steps of 88 workloads with 2549 preemptions differs; by priority, with and without its prefix
    cache, none of 225,837 steps of 320 workloads with 5942 (tests/vllm/test_scheduler_v1.py).
    """

    class Settings(msgspec.Struct, frozen=True, kw_only=True):
        """long_prefill_token_threshold: of a prompt in a step at most, where there are others; 0: no such limit.
        max_loras: adapters that may run together, each in a slot of GPU memory; 0: all of them, at no cost. lora_rank:
        that slots have room for. lora_load_ms: to load an adapter that is in no slot.
        by_priority: 1: the policy is priority, not first come first served."""

        max_running: int = 1024
        budget_tokens: int = 8192
        async_scheduling: bool = True
        long_prefill_token_threshold: int = 0
        max_loras: int = 0
        lora_rank: int = 16
        lora_load_ms: float = 50.0
        by_priority: Literal[0, 1] = 0

    def __init__(self, kv_tokens: int, settings: Settings) -> None:
        self._slots: dict[str, None] = {}  # the adapters in them, the one that was used last at the end
        super().__init__(kv_tokens, kv_tokens // BLOCK_TOKENS - 1)  # one block is kept as the null block
        self.depth = 2 if settings.async_scheduling else 1
        self._settings = settings
        self._most = settings.budget_tokens  # tokens of one request in a step
        self._under_way: deque[Step] = deque()
        self._step = Step()  # the last one
        self._hold(EVERY)

    def _hold(self, held: Held) -> None:
        self._held = held
        self._decoding = self._counting(held)
        self._others: list[Sequence] = []  # that run and are not in there, in order; they came after those that are

    def _counting(self, held: Held) -> Decoding:
        return Decoding(held, BLOCK_TOKENS)

    def admit(self, sequence: Sequence) -> None:
        if self._blocks_needed(sequence.prompt + sequence.output) > self._total:
            raise Rejected(400, "the request is longer than the KV cache.")

    def _blocks_needed(self, tokens: int) -> int:
        """Blocks that must be free for so many tokens."""
        return -(-tokens // BLOCK_TOKENS)

    def cancel(self, sequence: Sequence) -> None:
        self._settle()
        super().cancel(sequence)
        self._others = list(self._running)

    def schedule(self) -> Step | None:
        budget = self._settings.budget_tokens
        decoding = self._decoding
        if self._settings.long_prefill_token_threshold:
            alone = len(self._running) + len(self._waiting) == 1
            self._most = budget if alone else self._settings.long_prefill_token_threshold
        rows, counted = decoding.rows, 0
        others = self._others or self._waiting
        preempted = False
        taking = decoding.missing()
        if self._suffices(budget, taking):
            counted = len(rows)
            step = Step(rows.copy() if others else rows, counted, decoding.context + counted)
            if taking:
                self._take(taking)
            step.ends = decoding.advance()
            budget -= counted
            if others:
                budget, _ = self._visit(step, self._others, budget)
        else:
            self._settle()
            step = Step()
            decoding.scheduled += 1
            visit = self._visit_by_priority if self._settings.by_priority else self._visit
            budget, preempted = visit(step, self._running, budget)
            self._others = list(self._running)
        self._let_in(step, 0 if preempted else budget, counted)
        if not (step.decode_rows or step.prefill_rows):
            decoding.scheduled -= 1
            return None
        step.turning = [rows.index(sequence) for sequence in step.ends] if step.ends else []
        if len(step.emits) > counted:
            self._count_on(step, counted)
        else:
            step.steady = counted > 0 and not step.ends
        self._under_way.append(step)
        self._step = step
        return step

    def repeats(self) -> tuple[Step, int] | None:
        rows = self._decoding.rows
        if not rows or self._waiting or self._others or len(self._under_way) != self.depth - 1:
            return None
        times = min(self._decoding.unchanged(), self._free // len(rows) * BLOCK_TOKENS)
        if not times or len(rows) > self._settings.budget_tokens:
            return None
        if self._step.emits is not rows:
            self._step = Step(rows, len(rows), self._decoding.context, turning=[], steady=True)
        return self._step, times

    def repeat(self, steps: int, over: int) -> None:
        if not steps:
            return
        if blocks := self._decoding.repeat(steps, over):
            self._take(blocks)
        self._under_way += [self._step] * steps
        for _ in range(over):
            self._under_way.popleft()

    def _suffices(self, budget: int, missing: int) -> bool:
        """Whether there are tokens for all that decode, and blocks for all that will run: then none is preempted.
        missing: blocks that those need who are counted."""
        budget -= len(self._decoding.rows)
        for sequence in self._others if budget > 0 else ():
            if sequence.sampled < sequence.output:
                tokens = min(sequence.prompt + sequence.sampled - sequence.computed, self._most, max(budget, 0))
                missing += self._held[-(-(sequence.computed + tokens) // BLOCK_TOKENS)] - sequence.blocks
                budget -= tokens
        return budget >= 0 and missing <= self._free

    def _count_on(self, step: Step, counted: int) -> None:
        """Moves requests that take one token in every step from now on into the group that is counted as one.
        counted: how many of the step's tokens belong to that group already."""
        step.singles = step.emits[counted:]
        assert step.turning is not None
        for place, sequence in enumerate(step.singles, counted):
            if sequence.sampled == 1:
                step.begun += sequence.prompt
            if sequence.sampled in (1, sequence.output):
                step.turning.append(place)
        joining: list[Sequence] = []
        passed = emitting = 0
        for sequence in self._others:
            if sequence.sampled < sequence.output:
                if emitting == len(step.singles) or step.singles[emitting] is not sequence:
                    break
                joining.append(sequence)
                emitting += 1
            elif emitting < len(step.singles) and step.singles[emitting] is sequence:
                emitting += 1
            passed += 1
        del self._others[:passed]
        if joining:
            self._decoding.join(joining)

    def _settle(self) -> None:
        """All are counted one by one again, also for the steps that are under way."""
        for step in self._under_way:
            self._decoding.settle(step.ends)
            step.singles, step.ends, step.steady = step.emits, [], False
        self._decoding.settle([])

    def finish(self, step: Step) -> None:
        self._under_way.popleft()
        self._decoding.finished += 1
        ended = step.ends
        for sequence in ended:
            sequence.counted = None
            sequence.emitted = sequence.output
        for sequence in step.singles:
            if sequence.counted is None:
                sequence.emitted += 1
                if sequence.emitted == sequence.output:
                    ended = [*ended, sequence]
        if ended:
            self._end(ended)

    def _end(self, ended: Iterable[Sequence]) -> None:
        for sequence in ended:
            if sequence.done:
                continue
            sequence.done = True
            self._release(sequence)
            if sequence.computed:
                self._running.remove(sequence)
            else:  # preempted with its last token on the way
                self._waiting.remove(sequence)
        if self._others:
            self._others = [sequence for sequence in self._others if not sequence.done]

    def _visit(self, step: Step, running: list[Sequence], budget: int) -> tuple[int, bool]:
        """Tokens for each of `running` in turn; what is left of the budget, and whether any was preempted."""
        emits, held, most = step.emits, self._held, self._most
        preempted = False
        rows = context = 0
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            if sequence.sampled == sequence.output:
                index += 1
                continue
            computed = sequence.computed
            tokens = sequence.prompt + sequence.sampled - computed
            if tokens > most:
                tokens = most
            if tokens > budget:
                tokens = budget
            missing = held[(computed + tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS] - sequence.blocks
            if missing:
                if missing > self._free:
                    preempted = True
                    while missing > self._free and running[-1] is not sequence:
                        self._preempt()
                    if missing > self._free:  # it is the last itself
                        self._preempt()
                        break
                self._take(missing)
                sequence.blocks += missing
            sequence.computed = computed = computed + tokens
            budget -= tokens
            if tokens == 1 and computed > sequence.prompt:
                rows += 1
                context += computed
            else:
                step.prefill(tokens, computed - tokens)
            if computed == sequence.prompt + sequence.sampled:
                sequence.sampled += 1
                emits.append(sequence)
            index += 1
        step.decode_rows += rows
        step.decode_context += context
        return budget, preempted

    def add(self, sequence: Sequence) -> None:
        if not self._settings.by_priority:
            super().add(sequence)
        elif not sequence.done:
            bisect.insort(self._waiting, sequence, key=_rank)

    def _visit_by_priority(self, step: Step, running: list[Sequence], budget: int) -> tuple[int, bool]:
        """As `_visit`, where blocks are taken from the last by rank, though the step has tokens of it already: these go
        back into the budget."""
        given: dict[Sequence, int] = {}
        preempted = False
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            index += 1
            tokens = min(sequence.prompt + sequence.sampled - sequence.computed, self._most, budget)
            if sequence.sampled == sequence.output:
                continue
            missing = self._held[-(-(sequence.computed + tokens) // BLOCK_TOKENS)] - sequence.blocks
            last = None
            while missing > self._free and last is not sequence:
                preempted = True
                last = max(running, key=_rank)
                index -= running.index(last) < index
                running.remove(last)
                budget += given.pop(last, 0)
                self._start_over(last)
                bisect.insort(self._waiting, last, key=_rank)
            if last is sequence:
                break
            self._take(missing)
            sequence.blocks += missing
            given[sequence] = tokens
            budget -= tokens
        for sequence, tokens in given.items():
            sequence.computed += tokens
            if tokens == 1 and sequence.computed > sequence.prompt:
                step.decode_rows += 1
                step.decode_context += sequence.computed
            else:
                step.prefill(tokens, sequence.computed - tokens)
            if sequence.computed == sequence.prompt + sequence.sampled:
                sequence.sampled += 1
                step.emits.append(sequence)
        return budget, preempted

    def _let_in(self, step: Step, budget: int, counted: int) -> None:
        """Requests that wait, and run then. counted: how many of the first tokens are of those that are counted."""
        if self._waiting:
            came = len(self._running)
            every = self._waiting
            if self._settings.max_loras:
                self._waiting = self._with_slots(step)
            self._admit(step, budget)
            if self._waiting is not every:
                self._waiting = self._put_back(step, every, self._running[came:])
            self._others += self._running[came:]

    def _with_slots(self, step: Step) -> deque[Sequence]:
        """Those that wait and whose adapters may run beside those of the step, if each of them is let in; the others
        are passed over."""
        held = self._adapters(step)
        passed: deque[Sequence] = deque()
        for sequence in self._waiting:
            if not sequence.adapter or sequence.adapter in held or len(held) < self._settings.max_loras:
                held |= {sequence.adapter: None} if sequence.adapter else {}
                passed.append(sequence)
        return passed

    def _adapters(self, step: Step) -> dict[str, None]:
        """Those of the step, as a set in order; who has its last token under way is in no step any more."""
        going = (sequence for sequence in self._running if sequence.sampled < sequence.output)
        return {sequence.adapter: None for sequence in (*step.emits, *going) if sequence.adapter}

    def _put_back(self, step: Step, every: deque[Sequence], came: list[Sequence]) -> deque[Sequence]:
        """All that wait on, in their order; adapters of those that came are loaded into the slots used longest ago."""
        for adapter in self._adapters(step):
            step.loads += adapter not in self._slots
            self._slots.pop(adapter, None)
            self._slots[adapter] = None
        while len(self._slots) > self._settings.max_loras:
            del self._slots[next(iter(self._slots))]
        let_in = set(came)
        return deque(sequence for sequence in every if sequence not in let_in) if came else every

    def _take(self, blocks: int) -> None:
        """For requests that run."""
        self._free -= blocks

    def _admit(self, step: Step, budget: int) -> None:
        """Lets waiting requests in, as many tokens as are left of the step's budget."""
        while self._waiting and budget > 0 and len(self._running) < self._settings.max_running:
            sequence = self._waiting[0]
            whole = sequence.prompt + sequence.sampled
            if self._blocks_needed(whole) > self._free:  # the whole must fit, though it comes in chunks
                return
            self._waiting.popleft()
            tokens = min(whole, self._most, budget)
            sequence.blocks = self._held[-(-tokens // BLOCK_TOKENS)]
            self._free -= sequence.blocks
            sequence.computed = tokens
            budget -= tokens
            step.prefill(tokens, 0)
            if tokens == whole:
                sequence.sampled += 1
                step.emits.append(sequence)
            self._running.append(sequence)


class WindowedVllmV1(VllmV1):
    """With layers that keep a window only, or a state of one size. Not followed: what a chunk of a prompt holds beyond
    its window while it is computed."""

    def __init__(self, kv_tokens: int, settings: VllmV1.Settings, groups: LayerGroups) -> None:
        super().__init__(kv_tokens, settings)
        self._groups = groups
        self._total = self._free = groups.blocks(kv_tokens) - 1
        self._hold(_HeldInGroups(groups))
        windows = (window.tokens for window in groups.windows if window is not None)
        self._least_window = min(windows, default=groups.max_model_len)

    @property
    def used_tokens(self) -> int:
        """In proportion to the blocks."""
        return round((self._total - self._free) / self._total * self.kv_tokens)

    def repeats(self) -> tuple[Step, int]:
        return self._step, 0  # what a step takes hangs on each length

    def schedule(self) -> Step | None:
        step = super().schedule()
        if step is not None and step.decode_context > self._least_window:
            finished, counted = self._decoding.finished, len(step.emits) - len(step.singles)
            lengths = [sequence.prompt + sequence.offset + finished for sequence in step.emits[:counted]]
            step.lengths = lengths + [sequence.prompt + sequence.emitted for sequence in step.singles]
        return step

    def _blocks_needed(self, tokens: int) -> int:
        return self._groups.blocks_needed(tokens)


class _HeldInGroups(dict[int, int]):
    """Worked out once for each length: looked up for every request in every step."""

    def __init__(self, groups: LayerGroups) -> None:
        self._groups = groups

    def __missing__(self, token_blocks: int) -> int:
        held = self[token_blocks] = self._groups.held(token_blocks)
        return held


class CachingVllmV1(VllmV1):
    """With automatic prefix caching: a request takes over the blocks that hold the beginning of its tokens.

    Only whole blocks are taken over, and one token at least is computed. A block can be found from when the step that
    fills it is scheduled, also one that a reply fills; with a step under way, the token that this step samples is not
    known yet. A preempted request looks its own blocks up when it comes back, and that is not counted.

    Source: vllm/v1/core/{kv_cache_manager,single_type_kv_cache_manager,block_pool}.py and sched/{scheduler,
    async_scheduler}.py of 0.32. Beside vLLM's own classes, sync and async, none of 108602 steps of 172 workloads with
    2351 preemptions and 643,152 cached tokens differs, nor how much can be found after each of them
    (tests/vllm/test_scheduler_v1.py).
    """

    def __init__(self, kv_tokens: int, settings: VllmV1.Settings) -> None:
        super().__init__(kv_tokens, settings)
        self._cache = BlockCache(self._total, BLOCK_TOKENS)

    @property
    def cache(self) -> BlockCache:
        self._publish_own()
        return self._cache

    def _counting(self, held: Held) -> Decoding:
        return Decoding(held, BLOCK_TOKENS, lambda sequence: self._cache.shares(sequence))

    def cancel(self, sequence: Sequence) -> None:
        super().cancel(sequence)
        self._cache.forget(sequence)

    def _settle(self) -> None:
        self._publish_own()
        super()._settle()

    def finish(self, step: Step) -> None:
        self._publish_known(self._decoding.finished + 1)
        for sequence in step.ends:
            self._cache.publish(sequence, sequence.computed)
        for sequence in step.singles:
            if sequence.counted is None and sequence.blocks and not sequence.done:
                self._cache.publish(sequence, sequence.computed + sequence.emitted + 1 - sequence.sampled)
        super().finish(step)

    def _end(self, ended: Iterable[Sequence]) -> None:
        super()._end(ended)
        for sequence in ended:
            self._cache.forget(sequence)

    def _publish_known(self, step: int) -> None:
        """Publishes the blocks whose last token is known by now, of the counted requests in the step with this
        number. At once only those that others find."""
        decoding = self._decoding
        decoding.asked = finished = decoding.finished
        if finished in decoding.whole:
            for sequence, tokens in decoding.known(finished, step):
                self._cache.publish(sequence, tokens)

    def _publish_own(self) -> None:
        """What nobody else finds: made up for when somebody looks or they are not counted any more."""
        for sequence in self._decoding.rows:
            self._cache.publish(
                sequence, sequence.prompt + sequence.offset + max(self._decoding.asked, sequence.joined)
            )

    def _take(self, blocks: int) -> None:
        self._free -= blocks
        self._cache.take(blocks)

    def _release(self, sequence: Sequence) -> None:
        self._free += self._cache.release(sequence)
        sequence.blocks = 0

    def _let_in(self, step: Step, budget: int, counted: int) -> None:
        """What the step fills can be found already by requests that it lets in."""
        self._publish_known(self._decoding.scheduled)
        for sequence in step.ends:
            self._cache.publish(sequence, sequence.prompt + sequence.emitted)
        if self._others:
            for sequence in step.emits[counted:]:
                self._cache.publish(sequence, min(sequence.computed, sequence.prompt + sequence.emitted))
            for sequence in self._others:
                if sequence.sampled == sequence.emitted:  # a part of its prompt
                    self._cache.publish(sequence, sequence.computed)
        super()._let_in(step, budget, counted)

    def _admit(self, step: Step, budget: int) -> None:
        cache = self._cache
        while self._waiting and budget > 0 and len(self._running) < self._settings.max_running:
            sequence = self._waiting[0]
            whole = sequence.prompt + sequence.sampled
            found, idle = cache.find(sequence, (whole - 1) // BLOCK_TOKENS)
            if -(-whole // BLOCK_TOKENS) - found + idle > self._free:
                return
            self._waiting.popleft()
            cache.hold(sequence, found)
            self._free -= idle
            cached = found * BLOCK_TOKENS
            if not sequence.preemptions:
                sequence.cached = cached
                self.queried_tokens += whole
                self.cached_tokens += cached
            tokens = min(whole - cached, self._most, budget)
            sequence.computed = cached + tokens
            sequence.blocks = -(-sequence.computed // BLOCK_TOKENS)
            self._take(sequence.blocks - found)
            cache.publish(sequence, sequence.computed)
            budget -= tokens
            step.prefill(tokens, cached)
            if sequence.computed == whole:
                sequence.sampled += 1
                step.emits.append(sequence)
            self._running.append(sequence)


class VllmV0(_Recomputing):
    """vLLM's V0 scheduler without chunked prefills: a step is either whole prompts, as many waiting ones as its limits
    let in, or one token for all that run; prompts come first.

    Source: vllm/core/scheduler.py and block_manager.py of 0.10.0, its defaults. Two quirks are kept: a request takes
    a free block even when it needs none, and 1 % of the blocks (the watermark) is not given to prompts. A request that
    only fits with the watermark would be ignored; here it is refused. Not modelled: with asynchronous output processing
    a request that has ended is computed once more. Beside the real Scheduler none of 107,991 steps of 60 loads with
    4295 preemptions differs (fe0b30b:benchmarks/vllm_v0_steps.py).
    """

    class Settings(msgspec.Struct, frozen=True, kw_only=True):
        max_model_len: int = 4096
        max_num_seqs: int = 256
        max_num_batched_tokens: int | None = None

    depth = 1

    def __init__(self, kv_tokens: int, settings: Settings) -> None:
        super().__init__(kv_tokens, kv_tokens // BLOCK_TOKENS)
        self._settings = settings
        given = settings.max_num_batched_tokens
        self._budget_tokens = max(settings.max_model_len, 2048) if given is None else given
        self._watermark = self._total // 100

    def admit(self, sequence: Sequence) -> None:
        if sequence.prompt + sequence.output > min(self._settings.max_model_len, self._budget_tokens):
            raise Rejected(
                400, f"the request is longer than the model's context of {self._settings.max_model_len} tokens."
            )
        if -(-(sequence.prompt + sequence.output - 1) // BLOCK_TOKENS) > self._total - self._watermark:
            raise Rejected(400, "the request is longer than the KV cache.")

    def schedule(self) -> Step | None:
        # the last is for a request that ran alone, was out of blocks and has just preempted itself
        return self._prompts() or self._decode() or self._prompts()

    def _prompts(self) -> Step | None:
        step = Step()
        lengths: list[int] = []
        while self._waiting:
            sequence = self._waiting[0]
            length = sequence.prompt + sequence.sampled
            blocks = -(-length // BLOCK_TOKENS)
            full = self._free - blocks < self._watermark or len(self._running) >= self._settings.max_num_seqs
            if full or not self._together([*lengths, length]):
                break
            lengths.append(length)
            self._waiting.popleft()
            self._free -= blocks
            sequence.blocks = blocks
            sequence.computed = length
            sequence.sampled += 1
            self._running.append(sequence)
            step.emits.append(sequence)
        for tokens in self._computed(lengths):
            step.prefill(tokens, 0)
        return step if lengths else None

    def _together(self, lengths: list[int]) -> bool:
        """Whether prompts of these lengths may be one step."""
        return sum(lengths) <= self._budget_tokens

    def _computed(self, lengths: list[int]) -> list[int]:
        """Tokens that are computed of each prompt of a step."""
        return lengths

    def _decode(self) -> Step | None:
        running = self._running
        context = index = 0
        while index < len(running):
            if not self._free:
                self._preempt()  # the last; where that is the one in need, none are left
                continue
            sequence = running[index]
            length = sequence.prompt + sequence.sampled
            if length > sequence.blocks * BLOCK_TOKENS:
                sequence.blocks += 1
                self._free -= 1
            sequence.computed = length
            sequence.sampled += 1
            context += length
            index += 1
        return Step(list(running), len(running), context) if running else None


class Vllm02(VllmV0):
    """vLLM 0.2: the same, but that prompts of one step are padded to the longest of them, and the padding is computed.

    Source: vllm/core/scheduler.py and block_manager.py of 0.2.2, its defaults. A request that only fits with the
    watermark would block 0.2.2's queue for good.
    Run beside the real Scheduler (47 loads, 69,653 steps, 4679 preemptions): no step and no preemption differs.
    """

    class Settings(VllmV0.Settings, frozen=True, kw_only=True):
        max_paddings: int = 256

    _settings: Settings

    def _together(self, lengths: list[int]) -> bool:
        padded = max(lengths) * len(lengths)
        return padded <= self._budget_tokens and padded - sum(lengths) <= self._settings.max_paddings

    def _computed(self, lengths: list[int]) -> list[int]:
        return [max(lengths, default=0)] * len(lengths)
