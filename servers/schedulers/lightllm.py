"""LightLLM's schedulers: keys and values are kept token by token, and a request is let in when an estimate says that
the running ones and it will never need more than there are, given what each has still to generate.
"""

from __future__ import annotations

from bisect import insort

import msgspec

from servers.schedulers import Queues, Rejected, Sequence, Step
from servers.schedulers.radix import RadixNode, RadixTree, Stretch, cut, stretch


def _peak(requests: list[tuple[int, int]]) -> int:
    """The most tokens that requests will hold at once: of (-what it has still to generate, what it holds), sorted.

    A request grows by one token a step and leaves when it has generated all: the peak is when one of them leaves. While
    the same requests run and the same one wants to join them, it falls by at most one a step, since the new one then
    comes a step later. So after a refusal nobody can be let in for as many steps as the peak was too high.
    """
    peak = held = 0
    for size, (minus_left, holds) in enumerate(requests, 1):
        held += holds
        peak = max(peak, held - minus_left * size)
    return peak


class _Estimated(Queues):
    """Those let in have not ended; some of them may be paused."""

    def __init__(self, kv_tokens: int) -> None:
        super().__init__(kv_tokens)
        self.used_tokens = 0
        self._hopeless = 0  # steps in which the estimate will not let the next one in


class LightLLM2310(_Estimated):
    """LightLLM of October 2023: ten steps of decoding, then, if the estimate lets any in, a prefill of new requests.

    Source: lightllm/server/router/manager.py, req_queue.py, httpserver/manager.py and api_server.py of 08f28f95
    (2023-10-31), its defaults; there `kv_tokens` is --max_total_token_num, 6000 by default. A request that is too long
    raised an error that nothing handled: 500. Run beside the real router's loop and queue (47 loads, 41,007 steps): no
    step differs.
    """

    class Settings(msgspec.Struct, frozen=True, kw_only=True):
        batch_max_tokens: int | None = None
        running_max_req_size: int = 1000
        max_req_input_len: int = 2048
        max_req_total_len: int = 3072
        max_wait_tokens: int = 10

    depth = 1

    def __init__(self, kv_tokens: int, settings: Settings) -> None:
        super().__init__(kv_tokens)
        self._settings = settings
        self._batch_max_tokens = settings.batch_max_tokens or max(kv_tokens // 6, settings.max_req_total_len)
        self._decoded = 0  # steps since the last prefill

    def admit(self, sequence: Sequence) -> None:
        longest = min(self._settings.max_req_input_len, self._batch_max_tokens)
        if sequence.prompt > longest:
            raise Rejected(500, f"the prompt is longer than {longest}.")
        longest = min(self._settings.max_req_total_len, self.kv_tokens - 1)
        if sequence.prompt + sequence.output > longest:
            raise Rejected(500, f"the prompt and what it asks for are longer than {longest} tokens.")

    def cancel(self, sequence: Sequence) -> None:
        """One that runs leaves with its next token."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._hopeless = 0
        sequence.done = True

    def schedule(self) -> Step | None:
        if not self._running or self._decoded >= self._settings.max_wait_tokens:
            batch = self._let_in()
            if batch:
                self._decoded = 0
                return self._prefill(batch)
        if not self._running:
            return None
        self._decoded += 1
        self._hopeless -= 1
        return self._decode()

    def finish(self, step: Step) -> None:
        left = False
        for sequence in step.emits:
            sequence.emitted += 1
            if sequence.emitted == sequence.output or sequence.done:
                sequence.done = left = True
                self.used_tokens -= sequence.computed
                sequence.computed = 0
        if left:
            self._running = [sequence for sequence in self._running if sequence.computed]
            self._hopeless = 0

    def _let_in(self) -> list[Sequence]:
        batch: list[Sequence] = []
        if not self._waiting or len(self._running) >= self._settings.running_max_req_size or self._hopeless > 0:
            return batch
        requests = sorted((s.sampled + 1 - s.output, s.prompt + s.sampled) for s in self._running)
        tokens = 0
        while self._waiting:
            sequence = self._waiting[0]
            insort(requests, (1 - sequence.output, sequence.prompt + 1))
            tokens += sequence.prompt
            if tokens > self._batch_max_tokens or len(requests) > self._settings.running_max_req_size:
                break
            peak = _peak(requests)
            if peak >= self.kv_tokens:
                self._hopeless = 0 if batch else peak - self.kv_tokens + 1
                break
            batch.append(self._waiting.popleft())
        return batch

    def _prefill(self, batch: list[Sequence]) -> Step:
        step = Step(batch)
        for sequence in batch:
            sequence.computed = sequence.prompt
            self.used_tokens += sequence.prompt
            sequence.sampled = 1
            step.prefill(sequence.prompt, 0)
        self._running += batch
        return step

    def _decode(self) -> Step:
        context = 0
        for sequence in self._running:
            sequence.computed += 1
            sequence.sampled += 1
            context += sequence.computed
        self.used_tokens += len(self._running)
        return Step(list(self._running), len(self._running), context)


class LightLLMNow(_Estimated):
    """LightLLM 1.2: a router lets requests in, by an estimate, and the workers prefill all that are in, in chunks,
    before they decode again; two steps are under way at once.

    What follows from two steps under way: a request that has its last token under way is decoded once more, for
    nothing, and its memory comes free two steps after it ended. The router looks at what has been written down by the
    end of a step, which lags the steps under way; it lets in what makes twice `batch_max_tokens` with what is still to
    be prefilled. (Its clock, a look every 30 ms, is taken to be faster than the steps.) Where memory runs out after
    all, at most two requests a step pause: they lose their keys and values, and may come back every 100th step.

    `ignores_eos`: as in our loads, so that the router knows how long outputs will be; without, it goes by a running
    mean while less than `router_token_ratio` of the memory is used. `aggressive` and `router_max_wait_tokens`: without
    --disable_aggressive_schedule prefills always come first, with it after so many steps of decoding.

    A request longer than the cache is refused, as the real one refuses it if its prompt alone is longer; otherwise that
    cuts the output short. So is one whose estimate alone is over the cache: the real one would let in nobody after it.

    Source: lightllm/server/router/{manager,batch,stats}.py, req_queue/{base_queue,chunked_prefill/impl}.py,
    model_infer/{infer_batch,mode_backend/base_backend}.py, mode_backend/chunked_prefill/{control_state,impl}.py and
    server/core/objs/req.py of 87881ae7 (1.2.0), without prompt cache; defaults of api_cli.py and api_start.py.
    """

    depth = 2
    _ADDED_TOKENS = 16  # the estimate's margin
    _MARGIN_TOKENS = 36  # of the cache, which no request may use
    _MAX_PAUSES = 2
    _RECOVERY_STEPS = 100

    class Settings(msgspec.Struct, frozen=True, kw_only=True):
        batch_max_tokens: int = 16384
        chunked_prefill_size: int | None = None
        running_max_req_size: int = 256
        router_token_ratio: float = 0.85
        router_max_wait_tokens: int = 1
        aggressive: bool = True
        ignores_eos: bool = True

    def __init__(self, kv_tokens: int, settings: Settings) -> None:
        super().__init__(kv_tokens)
        self._settings = settings
        self._chunk_tokens = settings.chunked_prefill_size or settings.batch_max_tokens // 2
        self._max_wait_tokens = max(1, settings.router_max_wait_tokens)
        self._pausing: set[Sequence] = set()  # of the running, those that lose their memory in the next step
        self._paused: set[Sequence] = set()
        self._ended: list[Sequence] = []  # to be marked in the next step
        self._marked: list[Sequence] = []  # to lose their memory in the next step
        self._decoded: list[Sequence] = []  # by the last step
        self._prefilled: list[tuple[Sequence, int]] = []  # by the last step, so many tokens
        self._routed = False
        self._passes = 0
        self._left_decodes = self._max_wait_tokens
        self._mean_output = 2048
        self._mean_weight = 0.5

    def admit(self, sequence: Sequence) -> None:
        longest = self.kv_tokens - self._MARGIN_TOKENS
        if sequence.prompt + sequence.output > longest or _peak([self._estimate(sequence, True)]) >= self.kv_tokens:
            raise Rejected(400, "the request is longer than the KV cache.")

    def cancel(self, sequence: Sequence) -> None:
        sequence.done = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._hopeless = 0
        elif sequence in self._running:
            self._leave([sequence])

    def schedule(self) -> Step | None:
        if not self._routed:
            self._route()
        self._routed = False
        self._write_down()
        for _ in range(self._RECOVERY_STEPS + 1):
            step = self._pass()
            if step is not None or not (self._ended or self._marked or self._pausing or self._paused):
                return step
            self._route()
        return None

    def finish(self, step: Step) -> None:
        self._route()
        self._routed = True
        ended: list[Sequence] = []
        for sequence in step.emits:
            sequence.emitted += 1
            if sequence.emitted == sequence.output and not sequence.done:
                sequence.done = True
                ended.append(sequence)
        if ended:
            self._leave(ended)

    def _leave(self, sequences: list[Sequence]) -> None:
        self._ended += sequences
        self._running = [sequence for sequence in self._running if not sequence.done]
        self._pausing.difference_update(sequences)
        self._paused.difference_update(sequences)

    def _write_down(self) -> None:
        """What the last step computes, as soon as it is under way."""
        for sequence in self._decoded:
            sequence.computed += 1
            sequence.sampled += 1
        for sequence, tokens in self._prefilled:
            sequence.computed += tokens
            if sequence.computed == sequence.prompt + sequence.sampled:
                sequence.sampled += 1
        self._decoded, self._prefilled = [], []

    def _route(self) -> None:
        """The router lets requests in."""
        self._hopeless -= 1
        if not self._waiting or self._paused or self._hopeless > 0:
            return
        batch = self._running + self._ended + self._marked
        if len(batch) >= self._settings.running_max_req_size:
            return
        foreseen = self._settings.ignores_eos or self.used_tokens >= self._settings.router_token_ratio * self.kv_tokens
        requests = sorted(self._estimate(sequence, foreseen) for sequence in batch)
        rests = [s.prompt + s.emitted - s.computed for s in batch]
        tokens = sum(min(rest, self._chunk_tokens) for rest in rests)
        steady = self._settings.ignores_eos and not any(rests)
        while self._waiting:
            sequence = self._waiting[0]
            insort(requests, self._estimate(sequence, foreseen))
            tokens += min(sequence.prompt, self._chunk_tokens)
            if tokens > 2 * self._settings.batch_max_tokens or len(requests) > self._settings.running_max_req_size:
                return
            peak = _peak(requests)
            if peak >= self.kv_tokens:
                self._hopeless = peak - self.kv_tokens + 1 if steady else 0
                return
            self._running.append(self._waiting.popleft())
            steady = False

    def _estimate(self, sequence: Sequence, foreseen: bool) -> tuple[int, int]:
        """For `_peak`. Each chunk still to be prefilled counts as the steps that it may have to wait."""
        length = sequence.prompt + sequence.emitted
        output = sequence.output
        if not foreseen:
            output = min(output, max(int(1.1 * sequence.emitted), self._mean_output))
        chunks = -((sequence.computed - length) // self._chunk_tokens)
        left = chunks * (self._max_wait_tokens + 1) + output - sequence.emitted - 1
        return -max(0, left) - self._ADDED_TOKENS, max(length, sequence.computed) + 1

    def _pass(self) -> Step | None:
        """One turn of the workers' loop: who could run, who must pause, whose memory comes free; then the step."""
        recovers = self._passes % self._RECOVERY_STEPS == 0
        self._passes += 1
        freed, pausing = self._marked, self._pausing
        self._marked, self._ended, self._pausing = self._ended, [], set()
        out = pausing | self._paused if pausing or self._paused else None
        room = self.kv_tokens - self.used_tokens
        prefill_room = self._settings.batch_max_tokens
        decodes: list[Sequence] = []
        prefills: list[tuple[Sequence, int]] = []
        for sequence in self._running:
            if out and sequence in out:
                continue
            tokens = sequence.prompt + sequence.sampled - sequence.computed
            if tokens == 1:
                if room:
                    room -= 1
                    decodes.append(sequence)
                    continue
            else:
                tokens = min(tokens, self._chunk_tokens)
                if tokens > prefill_room:
                    continue
                if tokens <= room:
                    room -= tokens
                    prefill_room -= tokens
                    prefills.append((sequence, tokens))
                    continue
            if len(self._pausing) < self._MAX_PAUSES:
                self._pausing.add(sequence)
        for sequence in (*freed, *pausing):
            self._hopeless = 0
            self._free(sequence)
            if not sequence.done:
                sequence.preemptions += 1
                self.preemptions += 1
            elif sequence.emitted == sequence.output:
                self._learn(sequence.output)
        if out:
            self._paused |= pausing
            if recovers:
                self._recover(room)
        return self._run(decodes, prefills)

    def _recover(self, room: int) -> None:
        for sequence in self._running:
            if sequence in self._paused:
                room -= sequence.prompt + sequence.sampled
                if room < 0:
                    return
                self._paused.remove(sequence)
                self._look_up(sequence)

    def _look_up(self, sequence: Sequence) -> None:
        """What a prompt cache has of a request that is let in, or comes back."""

    def _free(self, sequence: Sequence) -> None:
        self.used_tokens -= sequence.blocks
        sequence.blocks = sequence.computed = 0

    def _run(self, decodes: list[Sequence], prefills: list[tuple[Sequence, int]]) -> Step | None:
        if decodes and not self._settings.aggressive and (self._left_decodes or not prefills):
            self._left_decodes = max(0, self._left_decodes - 1)
            prefills = []
        step = Step()
        emits = step.emits
        if prefills:
            self._left_decodes = self._max_wait_tokens
            self._prefilled = prefills
            for sequence, tokens in prefills:
                step.prefill(tokens, sequence.computed)
                sequence.blocks += tokens  # a block is a token here
                whole = sequence.computed + tokens == sequence.prompt + sequence.sampled
                if whole and sequence.sampled < sequence.output:
                    emits.append(sequence)
            self.used_tokens += step.prefill_tokens
            return step
        if not decodes:
            return None
        self._decoded = decodes
        self.used_tokens += len(decodes)
        context = 0
        for sequence in decodes:
            sequence.blocks += 1
            context += sequence.prompt + sequence.sampled
            if sequence.sampled < sequence.output:
                emits.append(sequence)
        step.decode_rows = len(decodes)
        step.decode_context = context
        return step

    def _learn(self, output: int) -> None:
        """The running mean of output lengths, quick at first."""
        output = max(64, output)
        self._mean_output = max(64, int(self._mean_output * (1 - self._mean_weight) + output * self._mean_weight))
        self._mean_weight = max(0.04, self._mean_weight * 0.8)


class CachingLightLLMNow(LightLLMNow):
    """With its prompt cache, a radix tree (on by default there): a request that ends or pauses leaves its tokens in the
    tree, prompt and reply, and one that is let in takes over what the tree has of it, to the token, except the last.

    `used_tokens` are those that requests have for themselves and those of the tree that they hold; the rest of the tree
    is given up when a step needs the room. The estimate that lets requests in knows nothing of the tree. What a request
    takes over when it comes back from a pause is not counted here; the real server's counter then holds that instead.

    Source: lightllm/server/router/dynamic_prompt/radix_cache.py, model_infer/infer_batch.py and generic_pre_process.py
    of 87881ae7. Nodes are never merged, as without LIGHTLLM_RADIX_TREE_MERGE_ENABLE. Beside the real RadixCache none of
    36,000 random matches, insertions, releases and evictions differs; no real router was run beside.
    """

    def __init__(self, kv_tokens: int, settings: LightLLMNow.Settings) -> None:
        super().__init__(kv_tokens, settings)
        self.tree = RadixTree()
        self._content: dict[Sequence, Stretch] = {}
        self._taken_over: dict[Sequence, tuple[RadixNode, int]] = {}

    def _pass(self) -> Step | None:
        for sequence in self._running:
            if sequence not in self._content:  # let in since the last
                self._content[sequence] = stretch(sequence)
                self._look_up(sequence)
                sequence.cached = sequence.computed
                self.queried_tokens += sequence.prompt
                self.cached_tokens += sequence.cached
        return super()._pass()

    def _look_up(self, sequence: Sequence) -> None:
        held_tokens = self.tree.held_tokens
        known = cut(self._content[sequence], sequence.prompt + sequence.sampled - 1)[0]
        node, sequence.computed = self.tree.match(known)
        self.tree.hold(node)
        self._taken_over[sequence] = node, sequence.computed
        self.used_tokens += self.tree.held_tokens - held_tokens

    def _free(self, sequence: Sequence) -> None:
        taken_over = self._taken_over.pop(sequence, None)
        if taken_over is not None:
            held_tokens = self.tree.held_tokens
            self.tree.insert(cut(self._content[sequence], sequence.computed)[0])
            self.tree.release(taken_over[0])
            self.used_tokens += self.tree.held_tokens - held_tokens
        super()._free(sequence)
        if sequence.done:
            self._content.pop(sequence, None)

    def _run(self, decodes: list[Sequence], prefills: list[tuple[Sequence, int]]) -> Step | None:
        step = super()._run(decodes, prefills)
        self.tree.evict(self.used_tokens + self.tree.idle_tokens - self.kv_tokens)
        return step
