"""From options to a plan: what every client process needs to know, checked against what the server says of itself."""

from __future__ import annotations

from importlib.util import find_spec

from backends import catalog
from backends.protocol import Backend, Sampling, ServerInfo
from loadgen import rundir
from loadgen.config import DEFAULT_REQUESTS, Config, ConfigError
from loadgen.load.job import Job, Plan, PromptSource, Timeouts
from loadgen.load.prompts import Dataset
from loadgen.models import Model
from loadgen.rundir import usable_cpus
from loadgen.target import Target

STREAMS_PER_WORKER = 2000  # --workers auto


def choose_model(config: Config, info: ServerInfo) -> str:
    """The name to send: what was asked for if the server has it, its own when nothing was asked."""
    if config.model is None:
        if info.models:
            raise ConfigError(f"the server has several models: {', '.join(info.models)}; name one with --model.")
        if info.model is None:
            raise ConfigError("the server does not name its model; give --model.")
        return info.model
    spec = catalog.find(config.model)
    names = {config.model} if spec is None else {config.model, spec.name, spec.hf_id}
    offered = [info.model] if info.model is not None else list(info.models)
    if not offered:
        return config.model
    for name in offered:
        if name in names:
            return name
    if len(offered) > 1:
        raise ConfigError(f"the server has {', '.join(offered)}, not '{config.model}'; name one of them with --model.")
    raise ConfigError(f"the server has '{info.model}', not '{config.model}'; leave --model out or name that one.")


def plan_run(
    config: Config, backend: Backend, target: Target, info: ServerInfo, run_id: str, started: Model | None = None
) -> Plan:
    """Everything about the run that does not need the network. `started`: the model of a server that loadgen started.
    Raises ConfigError or WorkloadError."""
    limit = info.max_total_tokens
    if config.dataset is None and limit is not None and config.input_tokens + config.output_tokens > limit:
        raise ConfigError(
            f"{config.input_tokens} input and {config.output_tokens} output tokens are more than the server's limit "
            f"of {limit}; lower --input-tokens or --output-tokens."
        )
    _check_drawn(config, backend)
    spec = started.spec if started is not None else catalog.find(config.model or info.model or "")
    source = PromptSource(
        input_tokens=config.input_tokens,
        output_tokens=config.output_tokens,
        vocab_size=config.vocab_size or (spec.vocab_size if spec else None),
        dataset=str(config.dataset) if config.dataset else None,
        tokenizer=config.tokenizer or _own_tokenizer(backend, started),
    )
    job = Job(
        run_id=run_id,
        version=rundir.package_version(),
        model=started.name if started is not None else choose_model(config, info),
        sampling=Sampling(config.output_tokens, config.ignore_eos, seed=config.seed, stream=config.stream),
        requests=most_requests(config, backend),
        duration_s=config.duration,
        concurrency=config.concurrency,
        warmup=config.warmup,
        seed=config.seed,
        timeouts=Timeouts(config.connect_timeout, config.first_byte_timeout, config.idle_timeout, config.total_timeout),
    )
    return Plan(
        job=job,
        backend=config.kind,
        target=target,
        transport=config.transport,
        fresh=config.connect == "fresh",
        kernel_timestamps=config.kernel_timestamps,
        arrival=config.law,
        prompts=source,
    )


def _check_drawn(config: Config, backend: Backend) -> None:
    """Options for prompts of one kind that are drawn, where the prompts are others. Raises ConfigError."""
    for flag, value, kind in (
        ("--tokenizer", config.tokenizer, "text"), ("--vocab-size", config.vocab_size, "token_ids"),
    ):  # fmt: skip
        if value is not None and kind != backend.prompt_kind:
            kinds = {"text": "text", "token_ids": "token ids"}
            raise ConfigError(
                f"{flag} is for prompts of {kinds[kind]}, and {backend.name} is sent {kinds[backend.prompt_kind]}; "
                "leave it out."
            )


def most_requests(config: Config, backend: Backend) -> int | None:
    """Requests at the most, as asked or as prompts are there beside those of the warm-up; None: only time ends the run.
    Raises ConfigError or WorkloadError."""
    if config.dataset is None:
        return DEFAULT_REQUESTS if config.requests is None and config.duration is None else config.requests
    available = len(Dataset(config.dataset, config.output_tokens, backend.prompt_kind, config.warmup))
    if config.requests is not None and config.requests > available:
        raise ConfigError(
            f"the dataset has {available} prompts for {config.requests} requests; repeating them would measure the "
            f"prefix cache: use --requests {available} or more prompts."
        )
    return available if config.requests is None else config.requests


def _own_tokenizer(backend: Backend, started: Model | None) -> str | None:
    """The tokenizer of a model that lies on this machine, for servers that take text only."""
    directory = started.directory if started is not None and backend.prompt_kind == "text" else None
    if directory is None or not (directory / "tokenizer.json").is_file() or find_spec("tokenizers") is None:
        return None
    return str(directory)


def worker_count(config: Config, plan: Plan) -> int:
    """How many client processes share the load."""
    if config.workers != "auto":
        return min(int(config.workers), plan.job.concurrency or int(config.workers))
    return max(1, min(len(usable_cpus()), -(-plan.streams_at_once // STREAMS_PER_WORKER)))
