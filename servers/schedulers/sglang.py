"""SGLang's scheduler: prompts first and alone, as many as memory will probably hold; where it runs out after all, the
requests that have come least far go back to the queue."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from servers.schedulers import Queues, Rejected, Sequence, Step
from servers.schedulers.radix import RadixNode, RadixTree, Stretch, cut, stretch

_SMALL = 32  # tokens found of a prompt, up to which those that wait are compared with each other


class _Tree(RadixTree):
    """A look that ends within a node is a look at both of its parts."""

    def _meet(self, node: RadixNode, common: int, ends: bool) -> RadixNode:
        self._look_at(node)
        return self._split(node, common)


@dataclass(slots=True)
class _Batch:
    """A step and whose it is. `prompts`: (request, its tokens up to which it is then computed, whether that is all)."""

    step: Step
    prompts: list[tuple[Sequence, int, bool]]
    rows: list[Sequence]


class Sglang(Queues):
    """SGLang's scheduler. A step is either a chunk of prompts or one token for all that run, and prompts come first;
    with mixed_chunk the running ride along with prompts, and their tokens count as the chunk's.

    A prompt is let in where memory holds it, its whole reply, and of the running ones the share `new_token_ratio` of
    what is left of their replies. The share falls with every step of decoding, and rises to what was seen where memory
    runs out. Then the request that has the fewest tokens goes back, behind all that wait. Without the radix cache the
    replies' lengths are taken as known (ignore_eos): a prompt is let in where memory lasts until all have ended.
    `lpm`: those of whom the tree holds most come first, up to 128 that wait.

    With overlap the next step is put together while one is computed: a request whose last token is under way takes
    part once more, for nothing.

    Source: sglang/srt/managers/{scheduler,schedule_policy,schedule_batch,scheduler_output_processor_mixin}.py and
    mem_cache/{radix_cache,chunk_cache,common}.py of 0.5.11, pages of one token, without speculation and priorities.
    Beside SGLang's own loop and classes none of 164,338 steps of 64 workloads with 41 retractions differs
    (tests/vllm/test_scheduler_sglang.py). `newer`: with the rules of 0.5.23 by its source. A request that has ended
    leaves before others are let in, and one whose last token is under way takes part no more; a reply of known length
    counts whole; a prompt longer than what max_prefill_tokens leaves is computed in part.
    """

    class Settings(msgspec.Struct, frozen=True, kw_only=True):
        """By the names of SGLang's options. clip_max_new_tokens: of a reply, what counts at most."""

        chunked_prefill_size: int = 8192
        max_prefill_tokens: int = 16384
        max_running_requests: int = 1024
        context_length: int = 4096
        schedule_conservativeness: float = 1.0
        clip_max_new_tokens: int = 4096
        overlap_schedule: bool = True
        mixed_chunk: bool = False
        lpm: bool = False
        ignore_eos: bool = True
        newer: bool = False

    _FIRST_RATIO = 0.7
    _LEAST_OF_FIRST = 0.14
    _DECAY_STEPS = 600
    _RETRACT_STEPS = 20
    _MOST_SORTED = 128

    def __init__(self, kv_tokens: int, settings: Settings, caching: bool = False) -> None:
        super().__init__(kv_tokens)
        self.depth = 2 if settings.overlap_schedule else 1
        self.tree = _Tree()
        self.ratio = self._first_ratio = min(self._FIRST_RATIO * settings.schedule_conservativeness, 1.0)
        self._least_ratio = self._first_ratio * self._LEAST_OF_FIRST
        self._settings = settings
        self.caching = caching
        self._own = 0  # tokens of requests that are not in the tree
        self._full = False  # nobody is let in before one of the running leaves
        self._chunked: Sequence | None = None
        self._last: _Batch | None = None
        self._under_way: deque[_Batch] = deque()
        self._content: dict[Sequence, Stretch] = {}
        self._held: dict[
            Sequence, tuple[RadixNode, int]
        ] = {}  # where its tokens in the tree end, and how many these are

    @property
    def used_tokens(self) -> int:
        return self._own + self.tree.held_tokens

    @property
    def running(self) -> int:
        """Those of whom something is, or was, computed."""
        batch = self._last
        last = [sequence for sequence, _, _ in batch.prompts if not sequence.done] if batch is not None else []
        return len({*self._running, *last})

    def admit(self, sequence: Sequence) -> None:
        longest = min(self._settings.context_length, self.kv_tokens) - 1
        if sequence.prompt >= longest - 5:
            raise Rejected(400, f"the prompt is longer than the server's {longest - 5} tokens.")
        sequence.output = min(sequence.output, longest - sequence.prompt - 1)

    def cancel(self, sequence: Sequence) -> None:
        sequence.done = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._held:
            self._release(sequence, keeps=False)
            self._drop(sequence)
            if self._chunked is sequence:
                self._chunked = None

    def schedule(self) -> Step | None:
        batch = self._next()
        if batch is None and not self._under_way:
            self.ratio = self._first_ratio
            batch = self._next()  # the last of the running have just left
        if batch is None:
            return None
        self._under_way.append(batch)
        return batch.step

    def _next(self) -> _Batch | None:
        self._join_last()
        if self._settings.newer:
            before = len(self._running)
            self._running = [sequence for sequence in self._running if not sequence.done]
            if len(self._running) < before or not self._running:
                self._full = False
        self._last = self._prompts() or self._decode()
        return self._last

    def _join_last(self) -> None:
        """The prompts of the last step run from now on, but for one that goes on."""
        chunked, last = self._chunked, self._last
        if chunked is not None:
            self._keep(chunked, chunked.computed)
        if last is None or not last.prompts:
            return
        computed = [sequence for sequence, _, _ in last.prompts] + last.rows
        joining = [sequence for sequence in computed if not sequence.done and sequence is not chunked]
        if len(joining) < len(computed) or (joining and not self._running):
            self._full = False
        self._running += joining

    def _prompts(self) -> _Batch | None:
        settings, chunked = self._settings, self._chunked
        if chunked is None and (self._full or not self._waiting):
            return None
        most = settings.max_running_requests - len(self._running)
        if settings.newer:  # one whose last token is under way keeps its place until that is out
            most = settings.max_running_requests - len(self._held) + (chunked is not None)
        if most <= 0 and chunked is None:
            self._full = True
            return None
        if settings.lpm and self.caching and len(self._waiting) <= self._MOST_SORTED:
            self._sort()
        adder = _Adder(self, settings, len(self._running) if settings.mixed_chunk else 0)
        if chunked is not None:
            whole = chunked.prompt + chunked.sampled
            self._chunked = chunked if adder.go_on(chunked, whole - chunked.computed) else None
        for sequence in self._waiting:
            if settings.newer and adder.is_spent:
                break
            if len(adder.chosen) >= most:
                self._full = True
            if self._full or not adder.take(sequence):
                break
        if not adder.chosen:
            return None
        chosen = {sequence for sequence, _ in adder.chosen}
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in chosen)
        self._chunked = self._chunked or adder.chunked
        return self._prefill(adder.chosen)

    def refuse(self) -> bool:
        """There is no memory for another."""
        self._full = True
        return False

    def _prefill(self, chosen: list[tuple[Sequence, int]]) -> _Batch:
        self._allocate(sum(tokens for _, tokens in chosen))
        step = Step()
        batch = _Batch(step, [], [])
        for sequence, tokens in chosen:
            step.prefill(tokens, sequence.computed)
            sequence.computed += tokens
            whole = sequence is not self._chunked
            batch.prompts.append((sequence, sequence.computed, whole))
            if whole:
                sequence.sampled += 1
                step.emits.append(sequence)
        if self._settings.mixed_chunk and self._running:
            rows = self._continuing()
            self._full = self._full and not (self._settings.newer and len(rows) < len(self._running))
            self._running = []
            if self._settings.newer and not self._fits(len(rows)):
                self._running = rows  # they wait for the next step of decoding
            else:
                self._take_a_token(batch, rows)
        return batch

    def _continuing(self) -> list[Sequence]:
        """Those of the running that take part in the next step."""
        running = [sequence for sequence in self._running if not sequence.done]
        return [each for each in running if each.sampled < each.output] if self._settings.newer else running

    def _decode(self) -> _Batch | None:
        before = len(self._running)
        newer = self._settings.newer
        self._running = self._continuing()
        if not self._running:
            self._full = False
            return None
        fits = self._fits(len(self._running))
        if newer and not fits and len(self._running) < before:  # what ends with the step under way will do
            self._full = False
            return None
        if fits:
            decay = (self._first_ratio - self._least_ratio) / self._DECAY_STEPS
            self.ratio = max(self.ratio - decay, self._least_ratio)
        else:
            self._retract()
        if len(self._running) < before:
            self._full = False
        batch = _Batch(Step(), [], [])
        self._take_a_token(batch, list(self._running))
        return batch

    def _take_a_token(self, batch: _Batch, rows: list[Sequence]) -> None:
        self._allocate(len(rows))
        batch.rows = rows
        emits = batch.step.emits
        context = 0
        for sequence in rows:
            sequence.computed += 1
            context += sequence.computed
            if sequence.sampled < sequence.output:
                sequence.sampled += 1
                emits.append(sequence)
        batch.step.decode_rows = len(rows)
        batch.step.decode_context = context

    def _retract(self) -> None:
        """At least one goes back, and as many as the step needs; one stays."""
        order = sorted(self._running, key=lambda sequence: (sequence.emitted, -sequence.prompt), reverse=True)
        retracted: list[Sequence] = []
        while len(order) > 1 and (not retracted or not self._fits(len(order))):
            sequence = order.pop()
            retracted.append(sequence)
            self._release(sequence, keeps=False)
            self._fits(len(order) * self._RETRACT_STEPS)
            self._drop(sequence)
            sequence.sampled = sequence.emitted  # what is under way is lost
            sequence.computed = 0
            sequence.preemptions += 1
            self.preemptions += 1
        self._running = order
        decoded = sum(sequence.emitted for sequence in order)
        asked = sum(sequence.output for sequence in order)
        self.ratio = min(1.0, (decoded + self._RETRACT_STEPS * len(order)) / (asked + 1))
        self._waiting += retracted

    def finish(self, step: Step) -> None:
        batch = self._under_way.popleft()
        emits = set(step.emits)
        for sequence, computed, whole in batch.prompts:
            if whole and sequence in emits:
                self._emit(sequence)
                if not sequence.done:
                    self._keep(sequence, computed)
        for sequence in batch.rows:
            if sequence in emits:
                self._emit(sequence)

    def _emit(self, sequence: Sequence) -> None:
        sequence.emitted += 1
        if sequence.emitted == sequence.output:
            sequence.done = True
            self._release(sequence, keeps=True)

    def _drop(self, sequence: Sequence) -> None:
        """Nothing that is under way is its own any more."""
        for batch in self._under_way:
            if sequence in batch.step.emits:
                batch.step.emits.remove(sequence)

    @property
    def room(self) -> int:
        """Tokens that are free, or that the tree can give up."""
        return self.kv_tokens - self._own - self.tree.held_tokens

    def _fits(self, tokens: int) -> bool:
        """Whether so many are free; the tree gives up what is needed."""
        if self._free < tokens:
            self.tree.evict(tokens)
        return self._free >= tokens

    @property
    def _free(self) -> int:
        return self.kv_tokens - self._own - self.tree.total_tokens

    def _allocate(self, tokens: int) -> None:
        self._fits(tokens)
        self._own += tokens

    def find(self, sequence: Sequence, tokens: int) -> tuple[RadixNode, int]:
        """What the tree holds of its first tokens."""
        if not self.caching:
            return self.tree.match(())
        if sequence not in self._content:
            self._content[sequence] = stretch(sequence)
        return self.tree.match(cut(self._content[sequence], tokens)[0])

    def hold(self, sequence: Sequence, node: RadixNode, tokens: int) -> None:
        self.tree.hold(node)
        self._held[sequence] = node, tokens
        sequence.computed = tokens
        if not sequence.preemptions:
            sequence.cached = tokens
            self.queried_tokens += sequence.prompt
            self.cached_tokens += tokens

    def _keep(self, sequence: Sequence, tokens: int) -> None:
        """Its first tokens are in the tree from now on, for others to find."""
        if not self.caching:
            return
        known = cut(self._content[sequence], tokens)[0]
        node, held = self._held[sequence]
        self.tree.insert(known)
        self._own -= tokens - held  # of these the tree has its own now, or had before
        reached, _ = self.tree.match(known)
        self.tree.release(node)
        self.tree.hold(reached)
        self._held[sequence] = reached, tokens

    def _release(self, sequence: Sequence, keeps: bool) -> None:
        node, held = self._held.pop(sequence)
        if keeps and self.caching:
            self.tree.insert(cut(self._content[sequence], sequence.computed)[0])
        self._own -= sequence.computed - held
        self.tree.release(node)
        if sequence.done:
            self._content.pop(sequence, None)

    def expected(self, ignore_eos: bool) -> float:
        """Tokens that replies of the running will probably take."""
        clip = self._settings.clip_max_new_tokens
        ratio = 1.0 if ignore_eos and self._settings.newer else self.ratio
        return sum([min(sequence.output - sequence.emitted, clip) * ratio for sequence in self._running])

    def lasting(self) -> list[tuple[float, int]]:
        """Of the running: tokens still to come, and tokens that they hold."""
        return [self.lasts(sequence) for sequence in self._running]

    def lasts(self, sequence: Sequence) -> tuple[float, int]:
        return sequence.output - sequence.emitted, sequence.prompt + sequence.emitted

    def _sort(self) -> None:
        """Those first of whom the tree holds most; behind them those who share with one before them what it lacks."""
        among = _Tree()
        rank: dict[Sequence, int] = {}
        for sequence in self._waiting:
            tokens = sequence.prompt + sequence.sampled
            cached = self.find(sequence, tokens)[1]
            rank[sequence] = -cached
            if cached > _SMALL:
                continue
            known = cut(self._content[sequence], tokens)[0]
            if among.match(known)[1] >= _SMALL:
                rank[sequence] = 1
            else:
                among.insert(known)
        self._waiting = deque(sorted(self._waiting, key=rank.__getitem__))


class _Adder:
    """Chooses the prompts of one step. `chosen`: with how many tokens of each are computed."""

    def __init__(self, scheduler: Sglang, settings: Sglang.Settings, riding: int) -> None:
        self.chosen: list[tuple[Sequence, int]] = []
        self.chunked: Sequence | None = None
        self._scheduler = scheduler
        self._settings = settings
        self._input_left = settings.max_prefill_tokens - riding
        self._chunk_left = settings.chunked_prefill_size - riding
        self._now: float = riding  # tokens that the chosen take at once
        self._later: float = riding + scheduler.expected(settings.ignore_eos)  # and until they and the running end
        self._lasting: list[tuple[float, int]] | None = None

    @property
    def _room_now(self) -> float:
        return self._scheduler.room - self._now

    @property
    def _room_later(self) -> float:
        return self._scheduler.room - self._later

    @property
    def is_spent(self) -> bool:
        """There is memory for others, and no work left in this step."""
        return min(self._room_now, self._room_later) > 0 and min(self._input_left, self._chunk_left) <= 0

    def go_on(self, sequence: Sequence, tokens: int) -> bool:
        """With the prompt that the last step did not end; whether this one does not, either."""
        most = min(self._chunk_left, int(self._room_later))
        if most <= 0:
            most = self._chunk_left
        goes_on = tokens > most
        self._choose(sequence, min(tokens, most), 0 if goes_on else self._reply(sequence))
        return goes_on

    def take(self, sequence: Sequence) -> bool:
        """Lets it in if it may come; whether another may after it."""
        whole = sequence.prompt + sequence.sampled
        node, cached = self._scheduler.find(sequence, whole - 1)
        if self._settings.ignore_eos and not self._scheduler.caching:
            return self._take_lasting(sequence, node, whole)
        tokens = whole - cached
        reply = min(max(sequence.output - sequence.emitted, 0), self._settings.clip_max_new_tokens)
        if tokens + reply + 1 >= self._room_later:
            return self._scheduler.refuse()
        if tokens >= self._input_left and self.chosen and not self._settings.newer:
            return False
        self._scheduler.tree.hold(node)
        short = tokens + reply + 1 >= self._room_later
        self._scheduler.tree.release(node)
        if short:
            return self._scheduler.refuse()
        return self._let_in(sequence, node, cached, tokens)

    def _take_lasting(self, sequence: Sequence, node: RadixNode, tokens: int) -> bool:
        scheduler = self._scheduler
        if tokens > min(self._room_now, self._room_later):
            return scheduler.refuse()
        own = scheduler.lasts(sequence)
        if self._lasting is None:
            chosen = [scheduler.lasts(each) for each, _ in self.chosen]
            self._lasting = sorted((own, *scheduler.lasting(), *chosen), key=lambda each: each[0])
            self._lasting = [each for each in self._lasting if each[0] > 0]
        else:
            place = next((at for at, each in enumerate(self._lasting) if own[0] <= each[0]), None)
            # SGLang puts what would be the last before the last
            self._lasting.insert(max(len(self._lasting) - 1, 0) if place is None else place, own)
        if not _lasts(self._lasting, self._room_now - tokens):
            return scheduler.refuse()
        return self._let_in(sequence, node, 0, tokens)

    def _let_in(self, sequence: Sequence, node: RadixNode, cached: int, tokens: int) -> bool:
        reply = self._reply(sequence)
        if tokens > self._chunk_left:
            if self._chunk_left <= 0:
                return False
            tokens, reply = self._chunk_left, 0
            self.chunked = sequence
        self._scheduler.hold(sequence, node, cached)
        self._choose(sequence, tokens, reply)
        if self._room_later <= 0 or self._room_now <= 0:
            return self._scheduler.refuse()
        return self._input_left > 0 and self._chunk_left > 0

    def _choose(self, sequence: Sequence, tokens: int, reply: int) -> None:
        self.chosen.append((sequence, tokens))
        self._later += tokens + reply + 1
        self._now += tokens + 1
        self._input_left -= tokens
        self._chunk_left -= tokens

    def _reply(self, sequence: Sequence) -> int:
        return min(sequence.output, self._settings.clip_max_new_tokens)


def _lasts(lasting: list[tuple[float, int]], free: float) -> bool:
    """Whether memory lasts until all of them have ended, in this order, each giving back what it holds."""
    for number, (left, held) in enumerate(lasting):
        count = len(lasting) - number
        if free - left * count <= count:
            return False
        free += held
    return True
