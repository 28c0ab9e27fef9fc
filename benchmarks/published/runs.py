"""One published measurement, played whole in virtual time: its server, its load, and the means its source prints."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from backends import catalog
from servers.schedulers import Rejected, Sequence
from servers.simulator.build import Emulated, EmulationError, Setup, emulate
from servers.simulator.engine import place_s

FILLING = 500  # unmeasured requests, for a load that another came before on the same server


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a source says of its servers; a row may say it itself. spare_tokens: in place of max_batched_tokens, a step
    computes at most a prompt, a token of each stream and so many more. v0_gpus: whose rows ran vLLM's V0 engine."""

    kv_cache_dtype: str = "auto"
    max_running: int = 1024
    max_batched_tokens: int | None = None
    spare_tokens: int | None = None
    max_model_len: int = 4096
    memory_ratio: float = 0.9
    prefix_caching: bool = False
    async_scheduling: bool = True
    long_prefill_token_threshold: int = 0
    v0_gpus: tuple[str, ...] = ()


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a source's rows are played, all of them alike.

    rounds: requests of a closed loop for each stream. shortest_ratio: lengths are drawn evenly from so much of the
    nominal ones up to these. in_step: all streams begin at once; else each begins somewhere in a reply, at random.
    timeout_s: when the client gives a request up. prompts: (groups, prompts of each) that are sent in turn.
    text_token_us: where prompts are text, what the server takes to find a token of it, beside its other work.
    prompt_lengths: (prompts, tokens) of the data set that open loops and bursts send, instead of the rows' own length:
    all its prompts in random order, again and again. template_tokens: what they all begin with. sorting: where the
    server sorts all logits to draw a token by top-k and top-p, what that adds: (us a step, ns a logit of each row).
    launch_row_us: what the CPU takes to schedule a row, instead of the profile's. launch_ratio: what launches take of
    what they take by the profile, which is of servers whose cores others share.
    """

    rounds: int = 10
    shortest_ratio: float = 1.0
    in_step: bool = True
    timeout_s: float = math.inf
    prompts: tuple[int, int] | None = None
    text_token_us: float = 0.0
    prompt_lengths: tuple[tuple[int, int], ...] = ()
    template_tokens: int = 0
    sorting: tuple[float, float] = (0.0, 0.0)
    launch_row_us: float | None = None
    launch_ratio: float = 1.0

    def mean_tokens(self, nominal: int) -> float:
        """Of a drawn length."""
        return (self.shortest_ratio + 1) / 2 * nominal

    def text_s(self, row: Row) -> float:
        """Until the tokens of a row's prompt are found, the same for all of them."""
        return self.mean_tokens(row.input_tokens) * self.text_token_us * 1e-6


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One published run and the means measured there: milliseconds, output tokens/s; None where it gives none.

    load: `closed:STREAMS`, `rate:REQUESTS_PER_S` or `burst`. requests: of the whole run, where its source gives them;
    failed: of these. stage: 1 where another load came before on the same server. shared_tokens: of a prompt, with its
    group. graph_tokens: of the largest CUDA graph, where that is not vLLM's own choice.
    """

    run: str
    model: str
    gpu: str
    tp: int
    quantization: str | None
    load: str
    input_tokens: int
    output_tokens: int
    requests: int = 0
    failed: int = 0
    stage: int = 0
    shared_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    output_tokens_per_s: float | None = None
    kv_cache_dtype: str | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    max_model_len: int | None = None
    memory_ratio: float | None = None
    graph_tokens: int | None = None

    def setup(self, server: Server) -> Setup:
        """The server that is modelled: what the row says, then what its source says of all."""
        chosen = msgspec.to_builtins(server)
        own = {name: getattr(self, name, None) for name in chosen}
        chosen |= {name: value for name, value in own.items() if value}
        spare = chosen.pop("spare_tokens")
        scheduler = "vllm@v1"
        options = {name: int(chosen.pop(name)) for name in ("async_scheduling", "long_prefill_token_threshold")}
        if self.gpu in chosen.pop("v0_gpus"):  # where a prefix cache is off by default
            scheduler, options = "vllm@v0", {"max_num_seqs": chosen["max_running"]}
            chosen["prefix_caching"] = False
        if spare is not None and self.max_batched_tokens is None:
            chosen["max_batched_tokens"] = self.input_tokens + self.streams + spare
        model = catalog.find(self.model)
        if model is None:
            raise EmulationError(f"{self.model} is not in the catalog.")
        return Setup(
            scheduler=scheduler, model=model, gpu=self.gpu, gpus=self.tp, tp=self.tp, dtype="bfloat16",
            quantization=self.quantization, options=tuple(options.items()), **chosen,
        )  # fmt: skip

    @property
    def streams(self) -> int:
        """Of a closed loop; 0 of other loads."""
        kind, _, value = self.load.partition(":")
        return int(value) if kind == "closed" else 0


class Means(NamedTuple):
    """What a source prints of a run; NaN where it is none of that load's."""

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    output_tokens_per_s: float


Prompt = tuple[int, tuple[tuple[int, int], ...]]  # tokens, and of these (segment, tokens) that others may share


class Request(NamedTuple):
    at_s: float
    prompt: int
    output: int
    segments: tuple[tuple[int, int], ...] = ()


def play(row: Row, server: Server, conditions: Conditions, seed: int) -> Means:
    """Raises EmulationError for a row that cannot be expressed."""
    emulated, draw = _as_run(emulate(row.setup(server)), row, conditions), np.random.default_rng(seed)
    kind, _, value = row.load.partition(":")
    if kind == "closed":
        return _closed(emulated, row, conditions, draw)
    if kind == "rate":
        return _open(emulated, row, conditions, float(value), draw)
    return _burst(emulated, row, conditions, draw)


def _as_run(emulated: Emulated, row: Row, conditions: Conditions) -> Emulated:
    """The server with its row's CUDA graphs, the pace of its launches, and with what sorting adds to its steps."""
    own, (step_us, logit_ns), ratio = emulated.profile.overheads, conditions.sorting, conditions.launch_ratio
    launch_row_us = own.launch_row_us if conditions.launch_row_us is None else conditions.launch_row_us
    overheads = msgspec.structs.replace(
        own,
        step_us=own.step_us + step_us,
        row_us=own.row_us + logit_ns * 1e-3 * emulated.setup.model.vocab_size,
        launch_us=own.launch_us * ratio,
        launch_row_us=launch_row_us * ratio,
        launch_layer_us=own.launch_layer_us * ratio,
        launch_eager_layer_us=own.launch_eager_layer_us * ratio,
        graph_tokens=row.graph_tokens or own.graph_tokens,
    )
    return emulated.with_profile(msgspec.structs.replace(emulated.profile, overheads=overheads))


def _closed(emulated: Emulated, row: Row, conditions: Conditions, draw: np.random.Generator) -> Means:
    """Out of step, a round of replies that are cut short comes before what counts."""
    streams, played = row.streams, conditions.rounds * row.streams
    before = [] if conditions.in_step else _mid_reply(row, streams, draw)
    lengths = (_drawn(draw, tokens, conditions, played) for tokens in (row.input_tokens, row.output_tokens))
    requests = [*before, *(Request(0.0, *pair) for pair in zip(*lengths, strict=True))]
    done = _Player(emulated, requests, conditions.text_s(row)).closed(streams)[len(before) :]
    return _means(done, conditions.mean_tokens(row.output_tokens))


def _mid_reply(row: Row, streams: int, draw: np.random.Generator) -> list[Request]:
    """A round of replies that end at any token of their length, evenly at random."""
    ends = draw.integers(1, row.output_tokens, size=streams, endpoint=True).tolist()
    return [Request(0.0, row.input_tokens, end) for end in ends]


def _drawn(draw: np.random.Generator, tokens: int, conditions: Conditions, requests: int) -> list[int]:
    low = max(1, int(conditions.shortest_ratio * tokens))
    drawn: list[int] = draw.integers(low, tokens, size=requests, endpoint=True).tolist()
    return drawn


def _open(emulated: Emulated, row: Row, conditions: Conditions, rate: float, draw: np.random.Generator) -> Means:
    """Before a later stage come unmeasured requests that fill the cache."""
    before = FILLING if row.stage else 0
    gaps = draw.exponential(1.0, before + row.requests)
    at_s = np.cumsum(gaps) * (len(gaps) / rate / gaps.sum())
    prompts = itertools.islice(prompts_of(conditions, row, draw), len(at_s))
    requests = [
        Request(at, tokens, row.output_tokens, segments)
        for at, (tokens, segments) in zip(at_s.tolist(), prompts, strict=True)
    ]
    done = _Player(emulated, requests, conditions.text_s(row)).open(conditions.timeout_s)
    return _means(done[before:], row.output_tokens)


def prompts_of(conditions: Conditions, row: Row, draw: np.random.Generator) -> Iterator[Prompt]:
    """In one random order, again and again; those of a data set in another order each time."""
    if conditions.prompt_lengths:
        template = conditions.template_tokens
        lengths = [tokens for prompts, tokens in conditions.prompt_lengths for _ in range(prompts)]
        while True:
            for prompt in draw.permutation(len(lengths)).tolist():
                yield lengths[prompt], ((0, template), (1 + prompt, lengths[prompt] - template)) if template else ()
    if conditions.prompts is None:
        while True:
            yield row.input_tokens, ()
    groups, each = conditions.prompts
    order = draw.permutation(groups * each).tolist()
    own_tokens = row.input_tokens - row.shared_tokens
    while True:
        for prompt in order:
            yield row.input_tokens, ((prompt // each, row.shared_tokens), (groups + prompt, own_tokens))


def _burst(emulated: Emulated, row: Row, conditions: Conditions, draw: np.random.Generator) -> Means:
    """Output tokens/s of all requests at once."""
    prompts = itertools.islice(prompts_of(conditions, row, draw), row.requests)
    requests = [Request(0.0, tokens, row.output_tokens, segments) for tokens, segments in prompts]
    makespan_s = max(ended for _, _, ended in _Player(emulated, requests).open(math.inf))
    return Means(math.nan, math.nan, math.nan, row.requests * row.output_tokens / makespan_s)


def _means(done: list[tuple[float, float, float]], output_tokens: float) -> Means:
    """Of (sent, first token, last token) in seconds, NaN for requests that were given up. tpot is that of the means, as
    some sources give only these."""
    sent, first, last = np.array(done).T
    served = ~np.isnan(last)
    if not served.any():
        return Means(*[math.nan] * 4)
    ttft_ms, e2e_ms = (1e3 * float((times - sent)[served].mean()) for times in (first, last))
    return Means(ttft_ms, (e2e_ms - ttft_ms) / (output_tokens - 1), e2e_ms, math.nan)


class _Player:
    """Plays requests on one server and keeps when each began and ended, and nothing of the tokens between. text_s: from
    a request sent to its tokens found, when the server's loop gets it."""

    def __init__(self, emulated: Emulated, requests: list[Request], text_s: float = 0.0) -> None:
        self._requests = requests
        self._text_s = text_s
        self._sent = [math.nan] * len(requests)
        self._first = [math.nan] * len(requests)
        self._last = [math.nan] * len(requests)
        self._freed: list[float] = []  # when the tokens of the next request of each free stream are found
        self._engine = emulated.engine(self._deliver)

    def _deliver(self, emits: list[Sequence], first_s: float, gap_s: float) -> None:
        first, last, freed = self._first, self._last, self._freed
        for place in self._engine.turning:
            sequence, at_s = emits[place], place_s(first_s, gap_s, place)
            if sequence.emitted == 1:
                first[sequence.index] = at_s
            if sequence.emitted == sequence.output:
                last[sequence.index] = at_s
                heapq.heappush(freed, at_s + self._text_s)

    def closed(self, streams: int) -> list[tuple[float, float, float]]:
        """(sent, first token, last token) of each, in seconds; a stream sends when its reply has ended."""
        engine, freed = self._engine, self._freed
        freed.extend([self._text_s] * streams)
        for index in range(len(self._requests)):
            while not freed or engine.next_s() < freed[0]:
                engine.advance(engine.next_s())
            self._send(index, max(heapq.heappop(freed), engine.now_s))
        engine.advance(math.inf)
        return self._done()

    def open(self, timeout_s: float) -> list[tuple[float, float, float]]:
        """The same at the requests' own times. The last token of one that was given up is NaN."""
        waiting: list[Sequence] = []
        ending = 0  # of those in `waiting`, the next to be given up
        for index, request in enumerate(self._requests):
            while ending < len(waiting) and self._sent[waiting[ending].index] + timeout_s <= request.at_s:
                self._give_up(waiting[ending], timeout_s)
                ending += 1
            waiting.append(self._send(index, request.at_s + self._text_s))
        if timeout_s < math.inf:
            for sequence in waiting[ending:]:
                self._give_up(sequence, timeout_s)
        self._engine.advance(math.inf)
        return self._done()

    def _send(self, index: int, at_s: float) -> Sequence:
        """at_s: when its tokens are found."""
        sequence = Sequence(index, *self._requests[index][1:])
        self._sent[index] = at_s - self._text_s
        try:
            self._engine.submit(sequence, at_s)
        except Rejected as refused:
            raise EmulationError(f"the modelled server refuses a request: {refused}") from None
        return sequence

    def _give_up(self, sequence: Sequence, timeout_s: float) -> None:
        at_s = self._sent[sequence.index] + timeout_s
        self._engine.advance(at_s)
        if not sequence.done:
            self._engine.cancel(sequence)

    def _done(self) -> list[tuple[float, float, float]]:
        return list(zip(self._sent, self._first, self._last, strict=True))
