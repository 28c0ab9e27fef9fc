"""The plan of a run: all that its client processes need, made of options and the server's description of itself.

A plan holds plain values, so that it can be sent to any process; all of it is checked before the clock starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import msgspec

from backends.exit_codes import lacking
from backends.protocol import Backend, HttpRequest, Prompt, Sampling, ServerInfo
from backends.untrusted import nearest
from loadgen import models, rundir
from loadgen.config import MOST_TURNS, Config, ConfigError
from loadgen.load.conversations import Conversations
from loadgen.load.datasets import Dataset
from loadgen.load.load import Load
from loadgen.load.prompts import RandomText, TokenIds, Workload, tokenizer_count
from loadgen.load.request_body import BodyEdits
from loadgen.models import ServedModel
from loadgen.target import Target

MOST_NAMES = 8  # of a server's models, in a message: routers have hundreds


class Progressing(Protocol):
    """A request under way, as its timeouts see it: monotonic ns, -1 where that has not happened yet."""

    sent_ns: int
    last_read_ns: int


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds. `idle_s` is the longest silence within a reply."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float

    def exceeded(self, exchange: Progressing, now: int) -> str | None:
        """Which limit `exchange` is over at monotonic `now` (ns), as a sentence."""
        sent, last = exchange.sent_ns, exchange.last_read_ns
        if sent >= 0 and now - sent > self.total_s * 1e9:
            return f"no complete reply within {self.total_s:g} s"
        if sent >= 0 and last < 0 and now - sent > self.first_byte_s * 1e9:
            return f"no first byte within {self.first_byte_s:g} s"
        if last >= 0 and now - last > self.idle_s * 1e9:
            return f"silent for {self.idle_s:g} s within the reply"
        return None


class ClientJob(msgspec.Struct, frozen=True, kw_only=True):
    """What one process sends: its share of the streams in a closed loop, else every `shards`-th request."""

    run_id: str
    version: str
    model: str
    sampling: Sampling
    load: Load
    warmup: int
    timeouts: Timeouts
    drain_warmup: bool = True  # else it hands its slots over where it can
    session_header: str | None = None  # names the conversation of a request
    retries: int = 0  # that a request has at the most when a server has no room
    body_edits: BodyEdits = BodyEdits()
    shard: int = 0
    shards: int = 1

    def request(
        self, backend: Backend, prompt: Prompt, sampling: Sampling, adapter: str = "", priority: int | None = None
    ) -> HttpRequest:
        """The request for a prompt, to the model or to that adapter of it, with what the user adds to it and leaves
        out."""
        by_name = adapter and backend.adapter_field == "model"
        request = backend.encode(adapter if by_name else self.model, prompt, sampling)
        body = self.body_edits.apply(request.body)
        if adapter and not by_name:
            body = BodyEdits(extra=_nested(backend.adapter_field, adapter)).apply(body)
        if priority is not None:
            body = BodyEdits(extra=_nested(backend.priority_field, priority)).apply(body)
        return request if body is request.body else msgspec.structs.replace(request, body=body)

    @property
    def hands_over(self) -> bool:
        """Whether the slots of a closed loop go over from the warm-up's requests to measured ones without a drain."""
        return not self.drain_warmup and self.load.hands_over(self.warmup)

    @property
    def streams(self) -> int:
        """How many requests of a closed loop this process keeps in flight at the most."""
        return 0 if self.load.streams is None else len(range(self.shard, self.load.streams.most, self.shards))

    def streams_at(self, elapsed_ns: int) -> int:
        """How many requests of a closed loop this process keeps in flight then."""
        assert self.load.streams is not None
        return len(range(self.shard, self.load.streams.at(elapsed_ns / 1e9), self.shards))

    def stream_start_ns(self, stream: int) -> int:
        """When the process' stream `stream` (from 0) sends its first request, since t = 0."""
        assert self.load.streams is not None
        return round(self.load.streams.start_s(self.shard + stream * self.shards) * 1e9)

    def numbers(self) -> Iterator[int]:
        """The numbers of its requests, ascending, without end."""
        cycle = self.shards if self.load.streams is None else self.load.streams.most
        return (number for number in itertools.count() if number % cycle % self.shards == self.shard)


def _nested(field: str, value: object) -> dict[str, object]:
    outer, _, inner = field.partition(".")
    return {outer: {inner: value} if inner else value}


class PromptSource(msgspec.Struct, frozen=True, kw_only=True):
    """How to build the workload of a load. repeat: whether prompts of the dataset may be sent more than once. offset:
    tokens that the server adds to a text prompt. tokens_per_word, by_bytes: as the server counts a text, where there is
    no tokenizer."""

    vocab_size: int | None = None
    dataset: str | None = None
    repeat: bool = False
    tokenizer: str | None = None
    offset: int = 0
    tokens_per_word: float = 1.0
    by_bytes: bool = False

    def build(self, backend: Backend, load: Load, warmup: int) -> Workload:
        """Raises WorkloadError."""
        if self.dataset is not None:
            path, reply_tokens = Path(self.dataset), load.output_tokens.least
            if (turns := load.turns()) is None:
                return Dataset(path, reply_tokens, backend.prompt_kind, warmup, repeat=self.repeat)
            held = Conversations(
                path, reply_tokens, warmup, repeat=self.repeat, tokenizer=self.tokenizer, sessions=load.requests
            )
            return held.played(turns)
        if backend.prompt_kind == "token_ids":
            return TokenIds(load) if self.vocab_size is None else TokenIds(load, self.vocab_size)
        text = RandomText(load, None if self.tokenizer is None else tokenizer_count(self.tokenizer))
        text.offset, text.tokens_per_word = self.offset, self.tokens_per_word
        if self.by_bytes:
            text.use_bytes()
        return text


class ClientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a client process needs to know; plain values, so that it can be sent to one."""

    job: ClientJob
    backend: str
    target: Target
    transport: str
    fresh: bool
    kernel_timestamps: bool
    prompts: PromptSource
    quick_acks: bool = False

    def share(self, shard: int, shards: int) -> ClientPlan:
        """The part of one of `shards` processes."""
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, shard=shard, shards=shards))


def choose_model(config: Config, backend: Backend, info: ServerInfo) -> str:
    """The model name to send: the one of --model if the server has it, or may have it; the server's own without
    --model. Raises ConfigError."""
    offered = offered_models(info)
    if config.model is None:
        if info.models and all("*" in name for name in offered):
            raise ConfigError(f"the server names no model, only patterns ({_some(offered)}); give --model.")
        if info.models:
            raise ConfigError(f"the server has several models: {_some(offered)}; name one with --model.")
        if info.model is None:
            raise ConfigError("the server does not name its model; give --model.")
        return info.model
    names = {config.model, *models.names(config.model)}
    listed = next((name for name in offered if name in names), None)
    if listed is not None or not offered or backend.any_server or _matches(config.model, offered):
        return listed or config.model
    if len(offered) > 1:
        raise ConfigError(f"the server has {_some(offered)}, not '{config.model}'; name one of them with --model.")
    raise ConfigError(f"the server has '{offered[0]}', not '{config.model}'; leave --model out or name that one.")


def with_adapters(load: Load, backend: Backend, info: ServerInfo) -> Load:
    """The load with its adapters by the server's own names. Raises ConfigError for what the server lacks."""
    if load.priorities is not None and not backend.priority_field:
        raise ConfigError(f"--priority: a request to {backend.name} cannot have one; leave it out.")
    asked, listed = load.adapters, info.adapters
    if asked is None:
        return load
    if not backend.adapter_field:
        raise ConfigError(f"--adapters: a request to {backend.name} cannot name an adapter; leave it out.")
    if asked.by_server and listed is not None:
        if len(listed) < len(asked.names):
            raise ConfigError(
                f"--adapters asks for {len(asked.names)} adapters, and the server {_has(listed)}; lower the number."
            )
        asked = msgspec.structs.replace(asked, names=listed[: len(asked.names)])
    if listed is not None and (lacking := [name for name in asked.own if name not in listed]):
        raise ConfigError(f"the server lacks the adapter '{lacking[0]}' of --adapters; it {_has(listed)}.")
    return msgspec.structs.replace(load, adapters=asked)


def _has(adapters: tuple[str, ...]) -> str:
    return f"has {_some(list(adapters))}" if adapters else "has none"


def unlisted(model: str, info: ServerInfo) -> str:
    """A note where the server's list lacks the model that is asked for; empty where it has it, or has no list."""
    offered = offered_models(info)
    if not offered or model in offered or _matches(model, offered):
        return ""
    near = nearest(model, offered)
    meant = f"; did you mean '{near}'?" if near else ""
    return (
        f"the server lists {_some(offered)}, not '{model}', which is asked for all the same: routers do not list every "
        f"name that they take{meant}"
    )


def unkept(load: Load, backend: Backend, info: ServerInfo) -> Iterator[str]:
    """What such a server will do otherwise than the load asks, as far as it says so before: notes, sentences without
    their end. Raises WorkloadError."""
    piece, longest = backend.piece_tokens, load.longest_reply_tokens()
    if piece is not None and longest is not None and longest > piece and not _in_pieces(load, piece):
        more, limit = -(-longest // piece) * piece, info.max_total_tokens
        beyond = "a piece that does not fit its limit" if limit is None else f"a piece that does not fit within {limit}"
        yield (
            f"{backend.name} generates replies of over {piece} tokens in whole pieces of {piece}, so one of {longest} "
            f"has {more} tokens, or ends before {beyond} tokens with its prompt; ask for at most {piece}, or for "
            f"{more} where that fits"
        )
    if info.max_requests is not None and load.at_once > info.max_requests:
        flag = f"start it with {backend.requests_flag} {load.at_once}" if backend.requests_flag else "have it hold more"
        yield (
            f"{load.at_once} requests at once are more than the {info.max_requests} that the server holds, which "
            f"refuses the others; {flag}, or send at most {info.max_requests} at once"
        )


def _in_pieces(load: Load, piece: int) -> bool:
    law = load.output_tokens
    return load.trace is None and law.kind == "fixed" and law.least % piece == 0


def offered_models(info: ServerInfo) -> list[str]:
    """The names, and patterns of names, that a server says it has; those of its adapters after its models'."""
    return [*([info.model] if info.model is not None else info.models), *(info.adapters or ())]


def _matches(model: str, offered: list[str]) -> bool:
    return any("*" in pattern and fnmatchcase(model, pattern.replace("[", "[[]")) for pattern in offered)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def plan_run(
    config: Config, backend: Backend, target: Target, info: ServerInfo, run_id: str, started: ServedModel | None = None
) -> ClientPlan:
    """Everything about the run that does not need the network. `started`: the model of a server that loadgen started.
    Raises ConfigError or WorkloadError."""
    _check_drawn(config, backend)
    load = with_adapters(_load(config, backend, info.max_total_tokens), backend, info)
    spec = started.spec if started is not None else models.spec(config.model or info.model or "")
    vocabulary = info.vocab_size or (spec.vocab_size if spec else None)
    if config.vocab_size is not None and vocabulary is not None and config.vocab_size > vocabulary:
        raise ConfigError(f"--vocab-size is {config.vocab_size} and the model has {vocabulary} tokens; lower it.")
    source = PromptSource(
        vocab_size=config.vocab_size or vocabulary,
        dataset=str(config.dataset) if config.dataset else None,
        repeat=config.repeat_dataset,
        tokenizer=config.tokenizer or (None if config.dataset is not None else _own_tokenizer(backend, started)),
    )
    job = ClientJob(
        run_id=run_id,
        version=rundir.package_version(),
        model=started.name if started is not None else choose_model(config, backend, info),
        sampling=Sampling(
            load.output_tokens.least,
            config.ignore_eos,
            seed=config.seed,
            stream=config.stream,
            prefix_caching=config.caches_prefixes,
            returns_token_ids=load.sessions is not None,
        ),
        load=load,
        warmup=config.warmup,
        drain_warmup=config.drains_warmup or backend.pooled,
        timeouts=Timeouts(config.connect_timeout, config.first_byte_timeout, config.idle_timeout, config.total_timeout),
        session_header=config.session_header,
        retries=config.retries,
        body_edits=config.body_edits,
    )
    _check_edits(job, backend)
    return ClientPlan(
        job=job,
        backend=config.kind,
        target=target,
        transport=config.transport,
        fresh=config.connect == "fresh",
        kernel_timestamps=config.kernel_timestamps,
        prompts=source,
        quick_acks=config.quick_acks,
    )


def _check_edits(job: ClientJob, backend: Backend) -> None:
    """Fields to be left out that no request has. Raises ConfigError."""
    if job.body_edits.omitted:
        prompt = Prompt(1, [0] if backend.prompt_kind == "token_ids" else None, "a")
        try:
            job.body_edits.check(backend.encode(job.model, prompt, job.sampling).body)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _load(config: Config, backend: Backend, limit: int | None) -> Load:
    """The load as a server with that limit on prompt and reply can take it. Raises ConfigError or WorkloadError."""
    load = planned_load(config, backend)
    if load.sessions is not None and backend.keeper is None:
        raise ConfigError(
            f"{backend.name} does not keep what a reply says, which a session's next prompt repeats; send it single "
            "requests."
        )
    if load.sessions is not None and config.dataset is None and not backend.returns_token_ids:
        raise ConfigError(
            f"{backend.name} returns no ids of its tokens, of which a session's next prompt is made; send it single "
            "requests, or take --backend openai, whose sessions are text."
        )
    if load.trace is not None:
        return load.within(limit)
    if config.dataset is not None:
        return load
    longest = load.longest_tokens()
    if limit is not None and longest > limit:
        raise ConfigError(
            f"{config.lengths_text(longest)} are more than the server's limit of {limit}; lower --input-tokens or "
            "--output-tokens, or take a --model of longer texts."
        )
    return load


def _check_drawn(config: Config, backend: Backend) -> None:
    """Options for prompts of one kind that are drawn, where the prompts are others. Raises ConfigError."""
    if config.images is not None and not backend.takes_images:
        raise ConfigError(
            f"--images: a request to {backend.name} holds no image; take --backend openai-chat or openai-responses."
        )
    if config.thinking_tokens is not None and not backend.limits_thinking:
        raise ConfigError(
            f"--thinking-tokens: a request to {backend.name} cannot say how long it may think; take --backend "
            "openai-chat."
        )
    for flag, value, kind in (
        ("--tokenizer", config.tokenizer, "text"), ("--vocab-size", config.vocab_size, "token_ids"),
    ):  # fmt: skip
        if value is not None and kind != ("text" if config.plays_conversations else backend.prompt_kind):
            kinds = {"text": "text", "token_ids": "token ids"}
            raise ConfigError(
                f"{flag} is for prompts of {kinds[kind]}, and {backend.name} is sent {kinds[backend.prompt_kind]}; "
                "leave it out."
            )


def read_dataset(config: Config, backend: Backend) -> Dataset | Conversations:
    """The prompts, or conversations, of --dataset. Raises WorkloadError."""
    assert config.dataset is not None
    reply_tokens, repeat = config.load.output_tokens.least, config.repeat_dataset
    if not config.plays_conversations:
        return Dataset(config.dataset, reply_tokens, backend.prompt_kind, config.warmup, repeat=repeat)
    return Conversations(
        config.dataset,
        reply_tokens,
        config.warmup,
        repeat=repeat,
        tokenizer=config.tokenizer,
        sessions=config.sessions,
    )


def planned_load(config: Config, backend: Backend) -> Load:
    """The load with as many requests, or sessions, as the dataset has. Raises ConfigError or WorkloadError."""
    if config.dataset is None:
        return config.load
    dataset = read_dataset(config, backend)
    if isinstance(dataset, Dataset):
        return msgspec.structs.replace(config.load, requests=_requests(config, len(dataset)))
    assert config.load.sessions is not None
    sessions = msgspec.structs.replace(
        config.load.sessions, counts=dataset.counts, left_out=str(dataset.left_out), delays_ms=dataset.delays_ms
    )
    load = msgspec.structs.replace(config.load, requests=dataset.sessions, sessions=sessions)
    if (load.planned or 0) > MOST_TURNS:
        raise ConfigError(f"--sessions {dataset.sessions} have over {MOST_TURNS} turns; lower their number.")
    return load


def _requests(config: Config, available: int) -> int | None:
    """Requests at the most: --requests, or as many prompts as the dataset has `available` beside the warm-up's. None:
    time ends the run. Raises ConfigError."""
    if config.repeat_dataset and config.duration is not None:
        return config.load.requests
    if config.requests is not None and config.requests > available and not config.repeat_dataset:
        raise ConfigError(
            f"the dataset has {available} prompt{'' if available == 1 else 's'} for {config.requests} requests, beside "
            "those of the warm-up; lower --requests, or send prompts again with --repeat-dataset, which measures the "
            "prefix cache."
        )
    return available if config.requests is None else config.requests


def _own_tokenizer(backend: Backend, started: ServedModel | None) -> str | None:
    """The tokenizer of a model that lies on this machine, for servers that take text only."""
    directory = started.directory if started is not None and backend.prompt_kind == "text" else None
    if directory is None or not (directory / "tokenizer.json").is_file() or lacking("tokenizers"):
        return None
    return str(directory)
