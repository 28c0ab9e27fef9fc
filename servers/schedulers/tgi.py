"""TGI's schedulers: a router that puts waiting requests into batches, each with room for all it may generate, so that
nothing is ever preempted. At the door a request takes one of `max_concurrent_requests` permits, or is refused (429).

A client that goes is noticed where TGI notices it: in the queue when its turn comes, in the batch with its next token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import msgspec

from servers.schedulers import Paged, Rejected, Sequence, Step
from servers.schedulers.radix import BlockTree, RadixNode, Stretch, cut, stretch

PIECE_TOKENS = 1024  # that version 3 generates of a reply before the text so far queues again as a prompt


def reply_tokens(prompt: int, asked: int, limit: int | None) -> int:
    """What version 3 generates where so many are asked for: of a long reply whole pieces, until what was asked for is
    there or the next does not fit within `limit`, as the first is known to."""
    if asked <= PIECE_TOKENS:
        return asked
    pieces = -(-asked // PIECE_TOKENS)
    return PIECE_TOKENS * (pieces if limit is None else max(1, min(pieces, (limit - prompt) // PIECE_TOKENS)))


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What both versions can be set to, by the names of their command lines."""

    max_batch_prefill_tokens: int = 4096
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_concurrent_requests: int = 128


class _Router(Paged, ABC):
    """The loop of both: new requests are prefilled in a step of their own, then join the batch, which decodes.

    Before each step of decoding new ones are taken from the queue, except after new ones have just been prefilled
    beside a running batch. While a batch runs the queue gives them only if there are `waiting_served_ratio` as many as
    are running, or if `max_waiting_tokens` steps have gone since the last came.
    """

    depth = 1
    _settings: _Settings

    def __init__(self, kv_tokens: int, blocks: int, block_tokens: int) -> None:
        super().__init__(kv_tokens, blocks, block_tokens)
        self._permitted: set[Sequence] = set()
        self._waited = 0  # steps since the last prefill, it included
        self._takes_new = True  # whether new ones are taken from the queue before the next step

    def admit(self, sequence: Sequence) -> None:
        if len(self._permitted) >= self._settings.max_concurrent_requests:
            raise Rejected(429, "Model is overloaded")
        self._validate(sequence)
        self._permitted.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        sequence.done = True
        self._permitted.discard(sequence)

    def schedule(self) -> Step | None:
        if not self._running:
            self._takes_new = True
            return self._start(self._take(0))
        if self._takes_new:
            step = self._start(self._take(self._least()))
            if step is not None:
                self._takes_new = False
                return step
        self._takes_new = True
        self._waited += 1
        return self._forward()

    def finish(self, step: Step) -> None:
        left = False
        for sequence in step.emits:
            sequence.emitted += 1
            if sequence.done:
                left = True
            elif sequence.emitted == sequence.output:
                sequence.done = left = True
                self._permitted.remove(sequence)
            elif self._piece_ends(sequence):
                left = True
                self._waiting.append(sequence)
            else:
                continue
            self._release(sequence)
        if left:
            self._running = [sequence for sequence in self._running if sequence.blocks]

    @abstractmethod
    def _validate(self, sequence: Sequence) -> None:
        """Raises Rejected (422). Sets how much it will have generated, where that is not what was asked for."""

    @abstractmethod
    def _take(self, least: int) -> list[Sequence]:
        """New requests from the queue, with their blocks; none if there are not as many as `least`."""

    def _piece_ends(self, sequence: Sequence) -> bool:
        return False

    def _least(self) -> int:
        if self._waited >= self._settings.max_waiting_tokens:
            return 0
        return math.floor(len(self._running) * self._settings.waiting_served_ratio)

    def _padded(self, tokens: int) -> int:
        """To whole blocks."""
        return -(-tokens // self._block_tokens) * self._block_tokens

    def _start(self, batch: list[Sequence]) -> Step | None:
        """Their prefill."""
        if not batch:
            return None
        step = Step(batch)
        for sequence in batch:
            length, cached = sequence.prompt + sequence.sampled, sequence.computed
            step.prefill(length - cached, cached)
            sequence.computed = length
            sequence.sampled += 1
        self._running += batch
        self._waited = 1
        return step

    def _forward(self) -> Step:
        context = 0
        for sequence in self._running:
            sequence.computed = length = sequence.prompt + sequence.sampled
            sequence.sampled += 1
            context += length
        return Step(list(self._running), len(self._running), context)


class Tgi1(_Router):
    """TGI 1.1. `kv_tokens` is its max_batch_total_tokens.

    Source: router/src/queue.rs, infer.rs and validation.rs, launcher defaults, and the blocks of
    server/.../flash_causal_lm.py, of v1.1.1. With prompts of 512 tokens a prefill holds 8, which is fewer than 1.2
    times the running from 8 on: then 8 more come every 20 steps.
    """

    class Settings(_Settings, frozen=True, kw_only=True):
        waiting_served_ratio: float = 1.2
        max_input_length: int = 1024
        max_total_tokens: int = 2048

    def __init__(self, kv_tokens: int, settings: Settings) -> None:
        super().__init__(kv_tokens, kv_tokens // 16, block_tokens=16)
        self._settings: Tgi1.Settings = settings

    def _validate(self, sequence: Sequence) -> None:
        own = self._settings
        if sequence.prompt + sequence.output > own.max_total_tokens:
            raise Rejected(422, f"`inputs` tokens + `max_new_tokens` must be at most {own.max_total_tokens}.")
        if sequence.prompt > own.max_input_length:
            raise Rejected(422, f"`inputs` must have at most {own.max_input_length} tokens.")
        prompt = self._padded(sequence.prompt)
        if prompt > own.max_batch_prefill_tokens or prompt + self._padded(sequence.output) > self.kv_tokens:
            raise Rejected(422, "the request is longer than a batch can be.")

    def _take(self, least: int) -> list[Sequence]:
        if len(self._waiting) < least:
            return []
        batch: list[Sequence] = []
        budget_tokens = self.kv_tokens - self.used_tokens
        prompts = outputs = 0
        while self._waiting:
            sequence = self._waiting[0]
            if not sequence.done:
                prompts += self._padded(sequence.prompt)
                outputs += self._padded(sequence.output)
                if prompts > self._settings.max_batch_prefill_tokens or prompts + outputs > budget_tokens:
                    break
                batch.append(sequence)
            self._waiting.popleft()
        if len(batch) < least:
            self._waiting.extendleft(reversed(batch))
            return []
        for sequence in batch:
            sequence.blocks = max(1, -(-(sequence.prompt + sequence.output - 1) // self._block_tokens))
            self._free -= sequence.blocks
        return batch


class Tgi3(_Router):
    """TGI 3.x without prefix cache. `kv_tokens` is what its log calls max batch total tokens.

    With `chunking`, its default, waiting_served_ratio and max_waiting_tokens mean nothing: before every second step the
    prefill budget that the batch leaves is filled from the queue, the last prompt in part, and those prompts go in one
    step with the batch's next tokens. `block_tokens` is 1 with flashinfer (its default, with which and flashdecoding,
    256, it has chunking), 16 with paged attention. max_batch_prefill_tokens is 4096 by default for Llama-2, as its
    launcher takes it from model and GPU.

    Outputs over 1024 tokens are reserved and generated 1024 at a time: after each the request queues again, its text so
    far as its prompt. The last reserves and generates as much as the first, or is left out where it does not fit within
    max_total_tokens: a request that is admitted has what it will be given as its `output`.

    Source: backends/v3/src/{queue,backend,block_allocator}.rs, router/src/{validation,infer/mod}.rs, launcher defaults
    and server/.../flash_causal_lm.py, of v3.3.7.
    """

    class Settings(_Settings, frozen=True, kw_only=True):
        max_total_tokens: int | None = None
        max_batch_size: int | None = None
        chunking: bool = True
        block_tokens: int = 1

    def __init__(self, kv_tokens: int, settings: Settings) -> None:
        blocks = kv_tokens // settings.block_tokens - 1  # block 0 is kept for health checks
        super().__init__(kv_tokens, blocks, settings.block_tokens)
        self._settings: Tgi3.Settings = settings
        self._chunks: dict[Sequence, int] = {}  # what the next step prefills of each that is not through

    def _validate(self, sequence: Sequence) -> None:
        sequence.output = reply_tokens(sequence.prompt, sequence.output, self._settings.max_total_tokens)
        last = (sequence.output - 1) // PIECE_TOKENS * PIECE_TOKENS
        longest = sequence.prompt + last
        if self._blocks(longest, sequence.output) > self._total:
            raise Rejected(422, f"`inputs` tokens + `max_new_tokens` must be at most {self.kv_tokens}.")
        if not self._settings.chunking and longest > self._padded(self._settings.max_batch_prefill_tokens):
            raise Rejected(422, f"`inputs` must have at most {self._settings.max_batch_prefill_tokens} tokens.")

    def _limits(self, least: int) -> tuple[int, int, int | None] | None:
        """The fewest requests that are taken, the tokens of their prefill, the most requests; None: none are taken."""
        budget = self._settings.max_batch_prefill_tokens
        most = self._settings.max_batch_size
        if self._running and self._settings.chunking:
            least, most = 0, None
            budget -= len(self._running) - len(self._chunks) + sum(self._chunks.values())
        elif self._running and most is not None:
            most = max(0, most - len(self._running))
        if most == 0 or len(self._waiting) < least:
            return None
        return least, self._padded(max(0, budget)), most

    def _take(self, least: int) -> list[Sequence]:
        limits = self._limits(least)
        if limits is None:
            return []
        least, budget, most = limits
        if not budget:
            return []
        batch: list[Sequence] = []
        free = self._free
        while self._waiting and len(batch) != most:
            sequence = self._waiting[0]
            if not sequence.done:
                length = sequence.prompt + sequence.sampled
                blocks = self._blocks(length, sequence.output)
                if blocks > free or (length > budget and not self._settings.chunking) or budget == 0:
                    break
                free -= blocks
                batch.append(sequence)
                if self._settings.chunking:
                    self._chunks[sequence] = min(length, budget)
                budget -= min(length, budget)
            self._waiting.popleft()
        if len(batch) < least:
            self._waiting.extendleft(reversed(batch))
            return []
        for sequence in batch:
            sequence.blocks = self._blocks(sequence.prompt + sequence.sampled, sequence.output)
            sequence.computed = 0
        self._free = free
        return batch

    def _start(self, batch: list[Sequence]) -> Step | None:
        if not self._settings.chunking:
            return super()._start(batch)
        if not batch:
            return None
        self._running += batch
        return self._forward()

    def _forward(self) -> Step:
        if not self._chunks:
            return super()._forward()
        step = Step()
        unfinished: list[Sequence] = []
        for sequence in self._running:
            chunk = self._chunks.get(sequence)
            length = sequence.prompt + sequence.sampled
            if chunk is None:
                step.decode_rows += 1
                step.decode_context += length
                sequence.computed = length
            else:
                step.prefill(chunk, sequence.computed)
                sequence.computed += chunk
                if sequence.computed < length:
                    unfinished.append(sequence)
                    continue
            sequence.sampled += 1
            step.emits.append(sequence)
        # the shards fix the next chunks now, so that all others have room for a token
        budget = self._settings.max_batch_prefill_tokens - (len(self._running) - 1)
        self._chunks = {}
        for sequence in reversed(unfinished):
            chunk = max(min(sequence.prompt + sequence.sampled - sequence.computed, budget), 1)
            self._chunks[sequence] = chunk
            budget -= chunk
        return step

    def _piece_ends(self, sequence: Sequence) -> bool:
        return sequence.emitted % PIECE_TOKENS == 0

    def _blocks(self, length: int, output: int) -> int:
        """For a request that has `length` tokens when it comes and may generate another piece, or its output."""
        return -(-(length + min(output, PIECE_TOKENS) - 1) // self._block_tokens)


class CachingTgi3(Tgi3):
    """With its prefix cache, a radix trie of blocks (on by default there with flashinfer and flashdecoding): a request
    whose blocks come free leaves those of its prompt in the trie, but not those of its reply, and one that is taken
    from the queue gets what the trie has of its prompt. The last token is computed again where all are known.

    A quirk is kept: the first of the queue gets its blocks before the room in the prefill is looked at. Where there is
    none it stays in the queue, and its blocks come free like others: its prompt is then in the trie although nobody has
    computed it, and next time only its last token is computed. So it is with the ninth of a burst of 512-token prompts,
    whose first eight fill a prefill of 4096, and with whatever waits while a prompt is prefilled in chunks.
    Where blocks are short, what was given up for a request that then does not fit is given up all the same.

    Source: backends/v3/src/{radix,block_allocator,queue}.rs of db931fcf (after v3.3.7). Beside the real RadixAllocator
    none of 45,000 random allocations, of which 7138 fail, and releases differs; no real router was run beside. TGI
    counts no hits: `cached_tokens` are counted here when a request is first taken.
    """

    def __init__(self, kv_tokens: int, settings: Tgi3.Settings) -> None:
        super().__init__(kv_tokens, settings)
        self.tree = BlockTree(settings.block_tokens)
        self._blank = self._total  # blocks that are neither in the trie nor any request's
        self._content: dict[Sequence, Stretch] = {}
        self._taken_over: dict[Sequence, tuple[RadixNode, int, int]] = {}  # how many tokens, of how many known ones

    def _take(self, least: int) -> list[Sequence]:
        limits = self._limits(least)
        if limits is None:
            return []
        least, budget, most = limits
        batch: list[Sequence] = []
        while self._waiting and len(batch) != most:
            sequence = self._waiting[0]
            if sequence.done:
                self._waiting.popleft()
                self._content.pop(sequence, None)
                continue
            if not self._allocate(sequence):
                break
            rest = sequence.prompt + sequence.sampled - sequence.computed
            if rest > budget and not (budget and self._settings.chunking):
                self._release(sequence)
                break
            batch.append(self._waiting.popleft())
            if self._settings.chunking:
                self._chunks[sequence] = min(rest, budget)
            if rest > budget:
                break
            budget -= rest
        if len(batch) < least:
            for sequence in reversed(batch):
                self._waiting.appendleft(sequence)
                self._release(sequence)
            return []
        for sequence in batch:
            if not sequence.sampled:
                sequence.cached = sequence.computed
                self.queried_tokens += sequence.prompt
                self.cached_tokens += sequence.cached
        return batch

    def _allocate(self, sequence: Sequence) -> bool:
        """Its blocks, those of the trie among them; False: there are not enough."""
        if sequence not in self._content:
            self._content[sequence] = stretch(sequence)
        known = sequence.prompt + sequence.sampled
        node, found = self.tree.match(cut(self._content[sequence], known)[0])
        self.tree.hold(node)
        blocks = self._blocks(known, sequence.output)
        own = blocks - found // self._block_tokens
        if self._blank < own:
            self._blank += self.tree.evict((own - self._blank) * self._block_tokens) // self._block_tokens
        fits = self._blank >= own
        if fits:
            self._blank -= own
            sequence.blocks = blocks
            sequence.computed = min(found, known - 1)
            self._taken_over[sequence] = node, found, known
        else:
            self.tree.release(node)
        self._count()
        return fits

    def _release(self, sequence: Sequence) -> None:
        node, found, known = self._taken_over.pop(sequence)
        self.tree.release(node)
        if known > found:
            kept = self.tree.insert(cut(self._content[sequence], known // self._block_tokens * self._block_tokens)[0])
            self._blank += (kept - found) // self._block_tokens  # others have brought the same meanwhile
        self._blank += sequence.blocks - known // self._block_tokens
        sequence.blocks = sequence.computed = 0
        self._count()
        if sequence.done:
            del self._content[sequence]

    def _count(self) -> None:
        self._free = self._blank + self.tree.idle_tokens // self._block_tokens
