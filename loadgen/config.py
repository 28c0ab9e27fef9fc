"""Every option of a run, declared once: its flag, its key in `--config FILE.toml`, its default, help and limits.

The options lie in a dataclass for each subject. Config is all of them together: flat, checked, and what a manifest
keeps. A command that takes some of them is a subclass with `offers`, whose help shows those alone. Annotations are
evaluated here: in a subclass of another module cyclopts would look for their names there.
"""

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from cyclopts import Group

import backends
from backends.exit_codes import UserError, check_least
from backends.untrusted import hide, printable
from loadgen.load import request_body, workloads
from loadgen.load.workloads import WorkloadName
from loadgen.option_types import OUTPUT, NumberOrText, Whole, WholeOrText, is_host, latency_limit, names, option

if TYPE_CHECKING:
    from loadgen.load.load import Load
    from loadgen.load.shapes import Prefix

__all__ = ["OUTPUT", "Config", "ConfigError"]

DEFAULT_REQUESTS = 1000
MOST_REPEATS = 10_000
MOST_SESSIONS, MOST_TURNS = 10**6, 10**7  # their lengths are held in memory
DEFAULT_TURNS, DEFAULT_THINK_TIME = 4, 1  # seconds
CANCELS_SINGLE = "--cancel is for single requests: a session needs its replies; leave one out."
MOST_REQUESTS = 10**8  # their times are drawn beforehand, 8 bytes each
LEAST_KV_TOKENS = 256  # of a modelled server: some blocks of its cache
LEAST = {
    0: "warmup seed retries",
    1: "requests input_tokens output_tokens batch_size concurrency dp api_servers max_running max_batched_tokens port "
    "metrics_port trace_limit sessions repeat nodes first_tokens context_tokens thinking_tokens",
    2: "vocab_size max_model_len",
    LEAST_KV_TOKENS: "kv_tokens",
}  # what a whole number of an option is at least


# options of replies that are texts, and of requests for one
OF_REPLIES = (
    "workload", "output_tokens", "ignore_eos", "cancel", "prefix", "sessions", "turns", "think_time", "trace",
)  # fmt: skip


class ConfigError(UserError):
    """Options that make no run. One sentence that says what is wrong and what to do."""


SERVER = Group("The server", sort_key=1)
LOAD = Group("The load", sort_key=2)
MODELLED = Group("Modelled hardware (--gpu): emulated, no GPU needed", sort_key=4)
SETTINGS = Group("Settings of a server that is started or modelled", sort_key=5)
LAUNCH = Group("Starting a server (--launch docker or process)", sort_key=6)
PROMPTS = Group("Prompts and replies", sort_key=7)
CLIENT = Group("The client", sort_key=8)

_server, _load, _output, _modelled, _settings, _launch, _prompts, _client = (
    partial(option, group) for group in (SERVER, LOAD, OUTPUT, MODELLED, SETTINGS, LAUNCH, PROMPTS, CLIENT)
)
_PRICE = re.compile(r"(?P<sign>[$€£]?)\s*(?P<amount>\d+(\.\d+)?)\s*(?P<code>[A-Z]{3})?")
_SIGNS = {"$": "USD", "€": "EUR", "£": "GBP"}


def price_of(text: str) -> tuple[float, str]:
    """The amount and the currency of --gpu-hour-price. Raises ValueError."""
    found = _PRICE.fullmatch(text.strip())
    if found is None or bool(found["sign"]) == bool(found["code"]):
        raise ValueError(
            f"--gpu-hour-price '{text}' is not understood; write an amount and its currency, as in 2.50USD."
        )
    return float(found["amount"]), found["code"] or _SIGNS[found["sign"]]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ServerOptions:
    """Which server is measured."""

    backend: Annotated[
        str | None, _server("Kind of server: vllm (default), llamacpp, openai, ...: `loadgen backends` lists them.")
    ] = None
    model: Annotated[
        str | None, _server("Model: 7b, 13b, 70b, ..., a Hugging Face id, a directory, or the name it is served under.")
    ] = None
    url: Annotated[
        str | None,
        _server("Measure the server at this address: its root, the base of its API (.../v1), or a whole endpoint."),
    ] = None
    launch: Annotated[
        Literal["docker", "process", "embedded"] | None,
        _server("Start a server for the run: docker when a backend or model is named, else the embedded one."),
    ] = None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LoadOptions:
    """What is sent, and when. Units: tokens, seconds, requests per second."""

    workload: Annotated[
        WorkloadName | None,
        _load(f"A load by its name: options that may be given beside it. {workloads.text()}", show_choices=False),
    ] = None
    requests: Annotated[Whole | None, _load("How many requests (default 1000, or the dataset's length).")] = None
    duration: Annotated[float | None, _load("Send for this many seconds, then wait for the replies.")] = None
    input_tokens: Annotated[
        WholeOrText,
        _load(
            "Length of every prompt, as the server counts it: a number, uniform:MIN:MAX, normal:MEAN:SD[:MIN:MAX], "
            "lognormal:MEDIAN:SIGMA[:MIN:MAX] or file:PATH (a prompt and a reply length a line)."
        ),
    ] = 512
    output_tokens: Annotated[
        WholeOrText, _load("Length of every reply, forced where the server can; the same laws.")
    ] = 128
    thinking_tokens: Annotated[
        WholeOrText | None,
        _load(
            "Tokens that each reply may think before an answer of --output-tokens; the same laws. For servers that can "
            "be told (openai-chat: thinking_token_budget)."
        ),
    ] = None
    arrival: Annotated[
        str | None,
        _load(
            "burst (default), constant:R, poisson:R, gamma:R:CV, ramp:R0:R1:SECONDS or steps:R@S,R@S,...; R in "
            "requests per second."
        ),
    ] = None
    concurrency: Annotated[
        WholeOrText | None,
        _load("Closed loop instead: keep this many requests in flight; FIRST:LAST:SECONDS for a ramp."),
    ] = None
    prefix: Annotated[
        str | None,
        _load("Prompts of a group begin alike: GROUPS:TOKENS, or GROUPS:TOKENS:zipf=A; TOKENS of --input-tokens."),
    ] = None
    sessions: Annotated[
        Whole | None,
        _load(
            "Conversations instead of single requests: so many sessions, which --arrival or --concurrency begins. A "
            "turn's prompt is all that was said before and --input-tokens more."
        ),
    ] = None
    turns: Annotated[WholeOrText | None, _load("Turns of each session: a number (default 4), or a law.")] = None
    think_time: Annotated[
        NumberOrText | None,
        _load(
            "Seconds from the end of a reply to the session's next turn: a number (default 1), or a law; every:LAW: "
            "from when the turn before was due, or at its reply's end where that is later."
        ),
    ] = None
    first_tokens: Annotated[
        WholeOrText | None,
        _load(
            "Length of a session's first prompt, and a sub-agent's, where it is not as --input-tokens; the same laws."
        ),
    ] = None
    subagents: Annotated[
        str | None,
        _load(
            "Agents in sessions: SHARE:COUNT:TURNS; after that share of the replies COUNT others begin side by side, "
            "each of TURNS turns with a prompt of its own, and the session goes on when all have ended."
        ),
    ] = None
    context_tokens: Annotated[
        Whole | None,
        _load("A session's turn that would take prompt and reply beyond that goes on from the first prompt alone."),
    ] = None
    cancel: Annotated[
        float, _load("Share of the requests whose replies the client gives up, at a token drawn evenly.")
    ] = 0.0
    trace: Annotated[
        Path | None,
        _load(
            "Arrivals, lengths and shared prompts of real traffic: a Mooncake, Azure, BurstGPT or Bailian file; or "
            "sessions of agents, as Weka has them (a file or a directory), which begin together or by --concurrency."
        ),
    ] = None
    trace_format: Annotated[
        Literal["mooncake", "azure", "burstgpt", "bailian", "weka"] | None,
        _load("The trace's format (default: as its first line tells)."),
    ] = None
    trace_speed: Annotated[float, _load("Play the trace so many times as fast.")] = 1.0
    trace_limit: Annotated[Whole | None, _load("Play at most this many of its requests.")] = None
    trace_from: Annotated[float, _load("Begin so many seconds after its first request.")] = 0.0
    trace_block_tokens: Annotated[
        Whole | None, _load("Tokens that each of its hash_ids stands for (default: the format's, or as lengths say).")
    ] = None
    priority: Annotated[
        str | None,
        _load(
            "Priorities that requests ask for, drawn by their shares: 0:0.8,10:0.2. vLLM takes the lower first, SGLang "
            "the higher, where they schedule by priority, as those that loadgen starts then do."
        ),
    ] = None
    batch_size: Annotated[
        WholeOrText,
        _load("Texts of each request for embeddings, ranks or scores, each of --input-tokens: a number, or a law."),
    ] = 1
    images: Annotated[
        str | None,
        _load("Images beside each prompt of a chat, drawn as PNG: COUNT:WIDTHxHEIGHT; their tokens come on top."),
    ] = None
    adapters: Annotated[
        str | None,
        _load(
            "LoRA adapters that requests ask for, drawn by their shares: a:0.5,b:0.3,base:0.2, or zipf=A:N for the "
            "first N that the server lists."
        ),
    ] = None
    warmup: Annotated[Whole, _load("Requests with other prompts, sent before the measurement.")] = 8
    warmup_load: Annotated[
        bool, _load("Warm up with the load's own first seconds too, until step times settle.", show_default=False)
    ] = False
    drain_warmup: Annotated[
        bool,
        _load(
            "Let every warm-up request end before a closed loop begins, as other tools do. Otherwise a warm-up with a "
            "request for each slot hands its slots over, and the loop begins in its steady state.",
            show_default=False,
        ),
    ] = False
    dataset: Annotated[
        Path | None,
        _load(
            'Your own prompts, one JSON object a line: {"prompt": text or ids, "output_tokens": n}. Or conversations, '
            "as ShareGPT or as OpenAI messages: each is a session, of the real replies."
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        _prompts(
            "Model directory, tokenizer.json or Hugging Face id, for exact lengths of text prompts; it counts the "
            "replies in a dataset's conversations too."
        ),
    ] = None
    vocab_size: Annotated[Whole | None, _prompts("Token ids are drawn below this (default: the model's, or 4000).")] = (
        None
    )
    stream: Annotated[bool, _prompts("Stream the replies.", negative="--no-stream")] = True
    ignore_eos: Annotated[
        bool,
        _prompts("Ask for the full output length; OpenAI's own servers refuse the field.", negative="--no-ignore-eos"),
    ] = True
    extra_body: Annotated[
        str | None,
        _prompts("JSON object whose fields every request has, in place of its own of these names: '{\"top_k\": 20}'."),
    ] = None
    omit_field: Annotated[
        tuple[str, ...],
        _prompts("Field that no request has, repeatable: for servers that refuse seed, temperature or stream_options."),
    ] = ()
    repeat_dataset: Annotated[
        bool, _load("Send the dataset's prompts again where there are fewer than requests.", show_default=False)
    ] = False
    seed: Annotated[Whole, _load("Fixes prompts and arrivals.")] = 0


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ClientOptions:
    """How the client sends and waits. Units: seconds."""

    workers: Annotated[
        str,
        _client("Client processes: a number, or auto: by the load, the client's ceiling and the cores that are free."),
    ] = "auto"
    on: Annotated[
        str | None,
        _client("Send from the machines of a Ray cluster: ray (this machine is part of it), or ray:HOST:PORT."),
    ] = None
    nodes: Annotated[
        Whole | None, _client("From how many of them (default: all but those that the server runs on).")
    ] = None
    transport: Annotated[
        Literal["fast", "aiohttp"], _client("fast is the measuring client; aiohttp an independent check.")
    ] = "fast"
    connect: Annotated[
        Literal["before", "fresh"], _client("Open connections before the clock starts, or one inside each request.")
    ] = "before"
    kernel_timestamps: Annotated[
        bool, _client("Stamp arrivals in the kernel and report the client's own lag (Linux, no TLS).")
    ] = False
    quick_acks: Annotated[
        bool,
        _client(
            "Acknowledge each read at once, as ordinary clients do not: takes away what a server or proxy without "
            "TCP_NODELAY waits for (Linux)."
        ),
    ] = False
    stop_when_overloaded: Annotated[
        bool | None,
        _client(
            "End a run early once the server is seen to fall behind the arrivals; of a sweep each such run "
            "(--no-stop-when-overloaded: none), else none that does not ask for it.",
            negative="--no-stop-when-overloaded",
            show_default=False,
        ),
    ] = None
    calibrate: Annotated[bool, _client("Measure the client's own ceiling first.", negative="--no-calibrate")] = True
    api_key_env: Annotated[
        str | None, _client("Environment variable that holds the API key; the key is never written or logged.")
    ] = None
    header: Annotated[
        tuple[str, ...],
        _client("One more header for every request, repeatable: NAME=VALUE; a secret as NAME=env:VARIABLE."),
    ] = ()
    session_header: Annotated[
        str | None,
        _client("Header that names the conversation of a request, for a router that keeps its turns together."),
    ] = None
    ca: Annotated[
        Path | None, _client("PEM file of the authority whose certificates TLS trusts, in place of the machine's own.")
    ] = None
    insecure: Annotated[bool, _client("Take any TLS certificate: whoever answers is measured.")] = False
    retries: Annotated[
        Whole,
        _client(
            "Send a request again, at most so many times, that was answered by 429 or 503: after its Retry-After, else "
            "after 0.5, 1, 2, ... 8 s."
        ),
    ] = 0
    connect_timeout: Annotated[float, _client("Seconds to open a connection.")] = 10.0
    # A burst of 1000 took a 70B on RTX 4090s 1600 s in the paper; a reply that a full server preempted is silent until
    # its turn comes again, seen to take over 120 s.
    first_byte_timeout: Annotated[float, _client("Seconds until a reply begins.")] = 1800.0
    idle_timeout: Annotated[float, _client("Longest silence within a reply, in seconds.")] = 1800.0
    total_timeout: Annotated[float, _client("Seconds for a whole reply.")] = 3600.0


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class OutputOptions:
    """What a run leaves and shows."""

    goodput: Annotated[
        tuple[str, ...],
        _output(
            "Limits that a good request meets: 'ttft<500ms' 'tpot<50ms' 'e2el<5s'; also ttft:500, in ms.",
            consume_multiple=1,
            negative=None,
        ),
    ] = ()
    gpu_hour_price: Annotated[
        str | None,
        _output("What an hour of one GPU costs, as in 2.50USD: then the report has what a million tokens cost."),
    ] = None
    out: Annotated[Path | None, _output("Run directory to create (default runs/<run id>).")] = None
    repeat: Annotated[
        Whole,
        _output(
            "So many runs on one start of the server, with seeds apart, in 1, 2, ... of the directory; with the noise "
            "between them."
        ),
    ] = 1
    server_metrics: Annotated[
        bool, _output("Sample the server's /metrics and local GPUs once a second.", negative="--no-server-metrics")
    ] = True
    metrics_url: Annotated[
        tuple[str, ...],
        _output("Sample this /metrics instead, repeatable: of each replica where --url is a router in front of them."),
    ] = ()
    metrics_port: Annotated[
        Whole | None,
        _output(
            "Serve this run's metrics for Prometheus on this port of 127.0.0.1 while it lasts; "
            "loadgen export does so at any time."
        ),
    ] = None
    dry_run: Annotated[
        bool, _output("Print the server's exact command and the first request; start and send nothing.")
    ] = False


# Of a server that loadgen starts or models; commands of other packages share them.
DtypeOption = Annotated[Literal["float16", "bfloat16", "float32"], _settings("Number format of weights and KV cache.")]
QuantizationName = Literal["fp8", "int8", "awq", "gptq", "nvfp4"]
QuantizationOption = Annotated[
    QuantizationName | None,
    _settings("Quantized weights (default: as the model's config.json says)."),
]
KvCacheDtype = Literal["auto", "fp8"]
KvCacheDtypeOption = Annotated[KvCacheDtype, _settings("Number format of the KV cache; auto: as --dtype.")]
MaxRunningOption = Annotated[Whole, _settings("Most requests in a batch.")]
MemoryRatioOption = Annotated[float, _settings("Part of each GPU's memory that it may use.")]
SchedulerOption = Annotated[
    str | None, _modelled("Which version of the server: vllm@v1, vllm@v0, vllm@0.2, tgi@3, tgi@1, lightllm@1.2, ...")
]
ExpertImbalanceOption = Annotated[
    float, _modelled("Of a mixture: the load of its busiest expert over the mean; 1: tokens choose evenly.")
]
ProfileOption = Annotated[Path | None, _modelled("Profile from `loadgen calibrate` (default: the built-in one).")]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class PlacementOptions:
    """How a server that loadgen starts, or that is modelled, uses its GPUs."""

    tp: Annotated[
        str | None, _settings("Tensor parallel size, or all (default: the smallest power of two that fits).")
    ] = None
    gpus: Annotated[
        str | None,
        _settings(
            "GPUs that the server may use, as 0,1,2 or GPU-uuids, or none (default: all). With a --url of this "
            "machine: those whose memory and energy are the server's. Of modelled GPUs: how many."
        ),
    ] = None
    dtype: DtypeOption = "float16"
    quantization: QuantizationOption = None
    kv_cache_dtype: KvCacheDtypeOption = "auto"
    p2p: Annotated[
        Literal["auto", "on", "off"], _settings("Peer-to-peer traffic between GPUs; auto asks the driver.")
    ] = "auto"
    max_model_len: Annotated[
        Whole | None, _settings("Longest prompt plus output (default: 4096, or what the run and the model need).")
    ] = None
    max_running: MaxRunningOption = 1024
    max_batched_tokens: Annotated[
        Whole | None, _settings("Most tokens that a step computes, of prompts at least (default: the server's own).")
    ] = None
    memory_ratio: MemoryRatioOption = 0.9
    prefix_caching: Annotated[
        Literal["on", "off"] | None,
        _settings(
            "Whether it keeps the KV of prompts for later ones (default: on where the load's prompts begin alike)."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LaunchOptions:
    """A server that loadgen starts with --launch docker or process."""

    dp: Annotated[
        Whole, _launch("Data parallel: so many replicas of the model, each on --tp GPUs of its own (vllm, sglang).")
    ] = 1
    api_servers: Annotated[
        Whole | None, _launch("Processes of its HTTP front end (vllm; default: its own choice, one a replica).")
    ] = None
    dummy_weights: Annotated[
        bool, _launch("Random weights, nothing loaded (vllm, sglang, llamacpp; modelled: how tokens choose experts).")
    ] = False
    image: Annotated[str | None, _launch("Docker image instead of the backend's own.")] = None
    server_python: Annotated[
        str | None, _launch("Interpreter that has the server installed, for --launch process (default: this one).")
    ] = None
    server_arg: Annotated[
        tuple[str, ...],
        _launch(
            "One more argument for the server, repeatable: --server-arg=--enforce-eager.", allow_leading_hyphen=True
        ),
    ] = ()
    port: Annotated[Whole | None, _launch("Port of this host for the server (default: a free one).")] = None
    ready_timeout: Annotated[float, _launch("Seconds that the server may take to be ready.")] = 1800.0


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ModelledOptions:
    """Hardware that is modelled, for `run`, `predict`, `breakdown` and the embedded server alike."""

    gpu: Annotated[
        str | None,
        _modelled("GPU to model: h200, h100, a800, rtx4090, ..., or a JSON file; --gpus N says how many may be used."),
    ] = None
    topology: Annotated[
        Literal["nvlink", "nvlink-pairs", "pcie", "host"] | None,
        _modelled("Links between the GPUs (default: as usual for this GPU; without P2P: host)."),
    ] = None
    scheduler: SchedulerOption = None
    scheduler_arg: Annotated[
        tuple[str, ...], _modelled("A setting of the scheduler, repeatable: max_concurrent_requests=128.")
    ] = ()
    kv_tokens: Annotated[Whole | None, _modelled("Tokens in the KV cache (default: what memory leaves).")] = None
    expert_imbalance: ExpertImbalanceOption = 1.0
    profile: ProfileOption = None
    speed: Annotated[float, _modelled("Modelled seconds that pass in a real one.")] = 1.0


SHARED_SETTINGS = (*names(PlacementOptions), "dummy_weights")
LAUNCH_ONLY = (*names(PlacementOptions), *names(LaunchOptions))
MODELLED_ONLY = names(ModelledOptions)[1:]


# Fields are in the order of their bases from the last to the first.
@dataclass(frozen=True, kw_only=True)
class Config(
    ModelledOptions, LaunchOptions, PlacementOptions, OutputOptions, ClientOptions, LoadOptions, ServerOptions
):
    """All options of `loadgen run`, checked. Raises ConfigError."""

    def __post_init__(self) -> None:
        self._take_workload()
        self._take_endpoint()
        for least, limited in LEAST.items():
            limits = {name: getattr(self, name) for name in limited.split()}
            if self.pooled:
                limits.pop("output_tokens", None)
            check_least(ConfigError, least, **limits)
        if self.requests is not None and self.requests > MOST_REQUESTS:
            raise ConfigError(f"--requests is {self.requests}; it must be at most {MOST_REQUESTS}, or several runs.")
        for name in (
            "duration", "trace_speed", "connect_timeout", "first_byte_timeout", "idle_timeout", "total_timeout",
            "ready_timeout",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{flag(name)} is {value:g}; it must be above zero.")
        if self.workers != "auto" and not (self.workers.isdecimal() and int(self.workers) >= 1):
            raise ConfigError(f"--workers is '{self.workers}'; it must be auto or a number of at least 1.")
        self._check_on()
        self._check_together()
        self._check_images()
        self._check_launch()
        self._check_modelled()

    def _take_workload(self) -> None:
        """The options that a workload's name stands for, where they are not given. A closed loop takes the place of its
        arrivals, and the other way round; sessions that of its requests."""
        options = {} if self.workload is None else workloads.OPTIONS[self.workload]
        for name, value in options.items():
            other = {"arrival": "concurrency", "concurrency": "arrival", "requests": "sessions"}.get(name)
            if not self.given([name]) and (other is None or not self.given([other])):
                object.__setattr__(self, name, value)

    def _take_endpoint(self) -> None:
        """Replies that are no texts have no tokens, and none is streamed: options of such replies do not go with it."""
        if not self.pooled:
            if self.given(["batch_size"]):
                raise ConfigError(
                    "--batch-size is for requests of several texts; name --backend embeddings, rerank or score, or "
                    "leave it out."
                )
            return
        given = self.given(OF_REPLIES)
        if "output_tokens" in given and self.output_tokens == 0:  # as it is set here
            given.remove("output_tokens")
        if given:
            raise ConfigError(
                f"{flag(given[0])} does not go with --backend {self.backend}, whose replies are no texts but a vector "
                "or a score for each text of a request; leave it out."
            )
        object.__setattr__(self, "stream", False)
        object.__setattr__(self, "output_tokens", 0)

    def _check_together(self) -> None:
        if self.url is not None:
            hide(keys_of_url(self.url))
            try:
                parts = urlsplit(self.url)
                complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                complete = False
            if not complete:
                raise ConfigError(f"--url is '{self.url}'; it must look like http://HOST:PORT or https://HOST.")
            if parts.fragment or not (self.url.isascii() and self.url.isprintable()) or " " in self.url:
                raise ConfigError("--url may hold a host, a port, a path and a query, in ASCII, and nothing else.")
            if parts.username is not None:
                raise ConfigError("--url holds a user name, which would be written down; use --api-key-env instead.")
            if not is_host(parts.hostname or ""):
                raise ConfigError(
                    f"'{printable(parts.hostname or '', 80)}' is no host name; --url must look like http://HOST:PORT."
                )
            if any(
                _SECRET_NAME.search(name) or name == "sig" or _SECRET_VALUE.match(value)
                for name, value in parse_qsl(parts.query, keep_blank_values=True)
            ):
                raise ConfigError(
                    "the query of --url looks like it holds a secret, which would be written down; send it as a "
                    "header, --header NAME=env:VARIABLE."
                )
            if self.launch is not None:
                raise ConfigError("--url measures a running server and --launch starts one; give one of them.")
        if self.concurrency is not None and self.arrival is not None:
            raise ConfigError("--concurrency is a closed loop and --arrival an open one; give one of them.")
        self._check_wire()
        self._check_replicas()
        drawn = self.given(("input_tokens", "prefix", "tokenizer", "vocab_size"))
        if self.plays_conversations and "tokenizer" in drawn:  # it counts what was replied to them
            drawn.remove("tokenizer")
        if drawn and self.dataset is not None:
            raise ConfigError(
                f"{flag(drawn[0])} is for prompts that are drawn, and --dataset has its own; leave one out."
            )
        self._check_trace()
        self._check_sessions()
        self._check_cancel()
        self._check_repeat()
        if self.warmup_load and self.dataset is not None:
            raise ConfigError("--warmup-load draws prompts of its own, and --dataset has no others; leave one out.")
        if self.repeat_dataset and self.dataset is None:
            raise ConfigError("--repeat-dataset is for the prompts of a --dataset; name one or leave it out.")
        if self.kernel_timestamps and sys.platform != "linux":
            raise ConfigError("--kernel-timestamps needs Linux.")
        if self.kernel_timestamps and (self.transport != "fast" or (self.url or "").startswith("https:")):
            raise ConfigError("--kernel-timestamps needs --transport fast and a plain http:// server.")
        if self.quick_acks and sys.platform != "linux":
            raise ConfigError("--quick-acks needs Linux; leave it out to measure with ordinary ACKs.")
        if self.quick_acks and self.transport != "fast":
            raise ConfigError("--quick-acks needs --transport fast.")
        try:
            self.slos, self.price, self.body_edits  # noqa: B018
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._check_load(self.load)

    def _check_on(self) -> None:
        if self.on is None:
            if self.nodes is not None:
                raise ConfigError("--nodes is for the machines of a cluster; name it with --on ray, or leave it out.")
            return
        ray_address(self.on)
        if self.url is None:
            raise ConfigError(
                "--on sends from several machines to a server that all of them reach; name it with --url (one that "
                "loadgen starts listens on 127.0.0.1)."
            )

    def _check_repeat(self) -> None:
        if self.repeat == 1:
            return
        if self.repeat > MOST_REPEATS:
            raise ConfigError(f"--repeat is {self.repeat}; it must be at most {MOST_REPEATS}.")
        if self.dry_run:
            raise ConfigError("--dry-run starts nothing, so there is nothing to --repeat; leave one out.")
        if self.dataset is not None and not self.repeat_dataset:
            raise ConfigError(
                "--repeat sends the prompts of a --dataset again, to a server that may have kept them; add "
                "--repeat-dataset if it is to, or leave one out."
            )

    def _check_trace(self) -> None:
        if self.trace is None:
            given = self.given(("trace_format", "trace_speed", "trace_limit", "trace_from", "trace_block_tokens"))
            if given:
                raise ConfigError(f"{flag(given[0])} is for a --trace; name one or leave it out.")
            return
        given = self.given(
            (
                "workload", "dataset", "input_tokens", "output_tokens", "arrival", "prefix", "requests", "duration",
                "sessions",
            )
        )  # fmt: skip
        if given:
            instead = "; --trace-limit says how many" if given[0] == "requests" else ""
            raise ConfigError(f"--trace decides what is sent and when; leave {flag(given[0])} out{instead}.")
        if not 0 <= self.trace_from < float("inf"):
            raise ConfigError(f"--trace-from is {self.trace_from:g}; it must be at least 0.")

    def _check_sessions(self) -> None:
        own = self.given(("turns", "first_tokens", "subagents", "context_tokens"))
        if own and self.dataset is not None:
            raise ConfigError(
                f"{flag(own[0])} is for sessions that are drawn, and --dataset has its own; leave one out."
            )
        given = self.given(("sessions", "think_time"))
        if given and self.dataset is not None and not self.plays_conversations:
            self._check_dataset()
            raise ConfigError(
                f"{flag(given[0])} is for conversations, and {self.dataset} holds single prompts; leave it out."
            )
        if self.sessions is None and not self.plays_conversations:
            given = self.given(("think_time",)) + own if self.dataset is None else []
            if given:
                raise ConfigError(f"{flag(given[0])} is for --sessions; say how many there are, or leave it out.")
            return
        if self.sessions is not None and self.sessions > MOST_SESSIONS:
            raise ConfigError(f"--sessions is {self.sessions}; it must be at most {MOST_SESSIONS}, or several runs.")
        of = "--sessions" if self.dataset is None else "the conversations of --dataset"
        how_many = "--sessions and --turns decide" if self.dataset is None else "--sessions says how many are held"
        for name, instead in (("requests", how_many), ("duration", "sessions end by themselves")):
            if getattr(self, name) is not None:
                raise ConfigError(f"{flag(name)} does not go with {of}: {instead}; leave it out.")

    def _check_images(self) -> None:
        if self.images is not None and (self.sessions is not None or self.dataset is not None):
            other = "--sessions" if self.sessions is not None else "--dataset"
            raise ConfigError(f"--images is for single prompts that are drawn, and {other} has others; leave one out.")

    def _check_cancel(self) -> None:
        if not 0 <= self.cancel < 1:
            raise ConfigError(f"--cancel is {self.cancel:g}; it must be a share of the requests, from 0 to below 1.")
        if self.cancel and not self.stream:
            raise ConfigError("--cancel gives replies up at a token, and --no-stream shows none; leave one out.")
        if self.cancel and (self.sessions is not None or self.plays_conversations):
            raise ConfigError(CANCELS_SINGLE)

    def _check_dataset(self) -> None:
        from loadgen.load.dataset_files import stamp

        assert self.dataset is not None
        try:
            stamp(self.dataset)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _check_load(self, load: "Load") -> None:
        if self.thinking_tokens is not None and (
            self.dataset or self.trace or self.sessions is not None or self.pooled
        ):
            raise ConfigError("--thinking-tokens is for single replies to prompts that are drawn; leave it out.")
        if self.cancel and load.in_sessions:
            raise ConfigError(CANCELS_SINGLE)
        if load.sessions is not None and (load.planned or 0) > MOST_TURNS:
            raise ConfigError(f"--sessions {self.sessions} have over {MOST_TURNS} turns; lower their number.")
        if self.dataset is not None and load.output_tokens.kind != "fixed":
            raise ConfigError("--output-tokens is one number beside --dataset; give each line its own output_tokens.")
        mean = sum(each.requests for each in load.arrival.stretches) or load.arrival.rate * (self.duration or 0)
        if mean > MOST_REQUESTS and self.requests is None:
            raise ConfigError(
                f"--arrival {self.arrival} has over {MOST_REQUESTS} requests; lower its rate or its time, or give "
                "--requests."
            )
        if load.prefix is not None:
            self._check_prefix(load, load.prefix)
        if self.stop_when_overloaded and not load.keeps_arriving:
            raise ConfigError("--stop-when-overloaded is for requests that arrive at a rate; leave it out.")
        if self.duration is None:
            return
        if load.arrival.kind == "burst" and load.streams is None:
            raise ConfigError("--duration needs --concurrency or an --arrival with a rate; a burst has no duration.")
        ends_s = load.arrival.lasts_s
        if ends_s is not None and self.duration > ends_s:
            raise ConfigError(
                f"--duration is {self.duration:g} and --arrival {self.arrival} ends after {ends_s:g} s; leave "
                "--duration out, or lower it."
            )

    def _check_prefix(self, load: "Load", prefix: "Prefix") -> None:
        try:
            shortest = load.shortest_prompt_tokens(self.warmup)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if prefix.tokens >= shortest:
            raise ConfigError(
                f"--prefix {prefix} is no shorter than the shortest prompt, of {shortest} tokens; lengthen "
                "--input-tokens (a law may have a minimum), or shorten the prefix."
            )

    def _check_wire(self) -> None:
        for name in self.given(("ca", "insecure")):
            if not (self.url or "").startswith("https:"):
                raise ConfigError(f"{flag(name)} is for a server with TLS; give --url https://HOST, or leave it out.")
        if self.ca is not None and self.insecure:
            raise ConfigError("--ca names whom to trust and --insecure trusts anybody; give one of them.")
        if self.api_key_env is not None:
            check_variable("--api-key-env", self.api_key_env)
        names = ["authorization"] if self.api_key_env is not None else []
        for name, _, _ in self.headers:
            if name.lower() in names:
                raise ConfigError(f"the header {name} is given twice; give it once (--api-key-env is Authorization).")
            names.append(name.lower())
        if (own := self.session_header) is not None:
            if not _HEADER_NAME.fullmatch(own):
                raise ConfigError(f"--session-header is '{own}'; it must be the name of a header, as X-Session-ID.")
            if own.lower() in (*names, *_OWN_HEADERS, "authorization"):
                raise ConfigError(f"--session-header {own} is set otherwise; name another header.")

    def _check_replicas(self) -> None:
        if not self.metrics_url:
            return
        if self.url is None or not self.server_metrics:
            reason = "is of a server that runs; name it with --url" if self.url is None else "samples it"
            other = "" if self.url is None else "; leave --no-server-metrics out"
            raise ConfigError(f"--metrics-url {reason}{other}.")
        seen: dict[str, str] = {}
        for given, url in zip(self.metrics_url, self.replicas, strict=True):
            try:
                parts = urlsplit(url)
                host, port = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
            except (ValueError, KeyError):
                host = None
            if not host or parts.username is not None or parts.query or not url.isascii() or " " in url:
                raise ConfigError(f"--metrics-url is '{given}'; it must look like http://HOST:PORT/metrics.")
            replica = f"{'localhost' if host in _THIS_MACHINE else host}:{port}{re.sub('/+', '/', parts.path)}"
            if replica in seen:
                raise ConfigError(f"--metrics-url {given} is the same replica as {seen[replica]}; name each once.")
            seen[replica] = given

    def _check_modelled(self) -> None:
        if self.gpu is None:
            given = self.given(MODELLED_ONLY)
            if given:
                raise ConfigError(f"{flag(given[0])} is for modelled hardware; name the GPU to model with --gpu.")
            return
        if self.where != "embedded":
            raise ConfigError("--gpu models hardware in the embedded server; leave --url and --launch out.")
        if self.gpus is not None and not (self.gpus.isdecimal() and int(self.gpus) >= 1):
            raise ConfigError(f"--gpus is '{self.gpus}'; with --gpu it is how many of them there are.")
        if self.tp == "all" and self.gpus is None:
            raise ConfigError("--tp all uses every GPU there is; say with --gpus how many of them there are.")
        if self.kv_tokens is not None and self.dataset is None:
            longest = self.longest_tokens()
            if longest > self.kv_tokens:
                one = "every" if self.load.is_plain else "the longest"
                raise ConfigError(f"--kv-tokens is {self.kv_tokens} and {one} request has {longest} tokens; name more.")
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"--speed is {self.speed:g}; it must be above 0.")

    def _check_launch(self) -> None:
        if self.where in ("url", "embedded"):
            taken = SHARED_SETTINGS if self.gpu is not None else ("gpus",) if self.url_is_local else ()
            given = self.given(name for name in LAUNCH_ONLY if name not in taken)
            if given:
                modelled_too = ", or name the GPU to model with --gpu" if given[0] in SHARED_SETTINGS else ""
                raise ConfigError(
                    f"{flag(given[0])} is for a server that loadgen starts; add --launch docker or --launch "
                    f"process{modelled_too}."
                )
            if self.dry_run and self.url is None:
                raise ConfigError("--dry-run shows how a server would be started; name a --backend and a --model.")
        if self.tp is not None and self.tp != "all" and not (self.tp.isdecimal() and int(self.tp) >= 1):
            raise ConfigError(f"--tp is '{self.tp}'; it must be all or a number of at least 1.")
        if not 0 < self.memory_ratio <= 1:
            raise ConfigError(f"--memory-ratio is {self.memory_ratio:g}; it must be above 0 and at most 1.")
        for name in ("port", "metrics_port"):
            if (port := getattr(self, name)) is not None and port > 65535:
                raise ConfigError(f"{flag(name)} is {port}; it must be at most 65535.")
        if self.image is not None and self.where != "docker":
            raise ConfigError("--image is for --launch docker.")
        if self.server_python is not None and self.where != "process":
            raise ConfigError("--server-python is for --launch process.")
        if any(map(_is_secret, self.server_arg)):
            raise ConfigError("a key in --server-arg would be written into the run directory; leave it out.")

    def given(self, names: Iterable[str]) -> list[str]:
        """Those of these options that are not at their defaults."""
        return [name for name in names if getattr(self, name) != getattr(Config, name)]

    @property
    def where(self) -> Literal["url", "embedded", "docker", "process"]:
        """Which server is measured: one that runs, or one that is started how."""
        if self.url is not None:
            return "url"
        if self.launch is not None:
            return self.launch
        if self.gpu is not None:
            return "embedded"
        return "embedded" if self.backend is None and self.model is None else "docker"

    @property
    def drains_warmup(self) -> bool:
        """Whether every warm-up request ends before the load begins. A workload repeats what others measure; of several
        machines the barrier before t = 0 would empty slots."""
        return self.drain_warmup or self.workload is not None or self.on is not None

    @property
    def caches_prefixes(self) -> bool:
        """Whether a server that is started or modelled has its prefix cache on. Raises WorkloadError."""
        return self.load.shares if self.prefix_caching is None else self.prefix_caching == "on"

    @property
    def cluster_address(self) -> str | None:
        """The Ray cluster of --on; None: the one that this machine is part of."""
        return None if self.on is None else ray_address(self.on)

    @property
    def headers(self) -> list[tuple[str, str, str | None]]:
        """What --header adds: name, value, and the variable that holds the value where it is a secret. Raises
        ConfigError."""
        return [_header(item) for item in self.header]

    @property
    def replicas(self) -> tuple[str, ...]:
        """What --metrics-url names, each with its path."""
        plain = (url.rstrip("/").removesuffix("/v1") for url in self.metrics_url)
        return tuple(url if urlsplit(url).path else f"{url}/metrics" for url in plain)

    @property
    def body_edits(self) -> request_body.BodyEdits:
        """What requests have beside what the backend makes of them. Raises ValueError."""
        return request_body.parse(self.extra_body, self.omit_field)

    @property
    def secret_variables(self) -> list[str]:
        """The environment variables that hold what must never be written."""
        variables = [self.api_key_env, *(variable for _, _, variable in self.headers)]
        return [variable for variable in variables if variable is not None]

    @property
    def url_is_local(self) -> bool:
        """Whether the server of --url runs on this machine, with its GPUs."""
        return urlsplit(self.url or "").hostname in ("localhost", "127.0.0.1", "::1")

    @property
    def gpu_names(self) -> list[str] | None:
        """What --gpus names."""
        return None if self.gpus is None else [word.strip() for word in self.gpus.split(",") if word.strip()]

    @property
    def kind(self) -> str:
        """Name of the backend."""
        return "vllm" if self.backend is None else self.backend

    @functools.cached_property
    def pooled(self) -> bool:
        """Whether replies of the backend are no texts; false for one that is not installed, which is found later."""
        try:
            return self.backend is not None and backends.get(self.backend).pooled
        except backends.UnknownBackend:
            return False

    @functools.cached_property
    def plays_conversations(self) -> bool:
        """Whether --dataset holds conversations, which are sessions, and no single prompts."""
        from loadgen.load.dataset_files import holds_conversations

        return self.dataset is not None and holds_conversations(self.dataset)

    @functools.cached_property
    def load(self) -> "Load":
        """What is sent, and when; of a dataset all but its prompts, and how many there are. Raises ConfigError."""
        from loadgen.load import choices, images, lengths  # not before the options are read
        from loadgen.load.load import Load, TraceSource, parse_arrival, parse_streams
        from loadgen.load.sessions import EVERY, Sessions, parse_subagents
        from loadgen.load.shapes import parse_prefix

        try:
            arrival = parse_arrival(self.arrival or "burst")
            open_end = self.duration is None and arrival.lasts_s is None and self.trace is None
            requests = DEFAULT_REQUESTS if self.requests is None and open_end else self.requests
            sessions = None
            if self.sessions is not None or self.plays_conversations:
                requests = self.sessions
                think_time = DEFAULT_THINK_TIME if self.think_time is None else self.think_time
                from_due = isinstance(think_time, str) and think_time.startswith(EVERY)
                sessions = Sessions(
                    turns=lengths.parse(DEFAULT_TURNS if self.turns is None else self.turns, lengths.TURNS)
                    if self.dataset is None
                    else None,
                    think_time=lengths.parse(
                        str(think_time).removeprefix(EVERY) if from_due else think_time, lengths.THINK_TIME
                    ),
                    from_due=from_due,
                    subagents=None if self.subagents is None else parse_subagents(self.subagents),
                    context_tokens=self.context_tokens,
                )
            return Load(
                arrival=arrival,
                input_tokens=lengths.parse(self.input_tokens),
                output_tokens=lengths.fixed(0) if self.pooled else lengths.parse(self.output_tokens),
                first_tokens=None if self.first_tokens is None else lengths.parse(self.first_tokens),
                thinking_tokens=None if self.thinking_tokens is None else lengths.parse(self.thinking_tokens),
                batch=lengths.parse(self.batch_size, lengths.BATCH) if self.given(["batch_size"]) else None,
                images=None if self.images is None else images.parse(self.images),
                requests=requests,
                duration_s=self.duration,
                streams=None if self.concurrency is None else parse_streams(self.concurrency),
                prefix=None if self.prefix is None else parse_prefix(self.prefix),
                trace=None
                if self.trace is None
                else TraceSource(
                    path=str(self.trace.absolute()),
                    format=self.trace_format,
                    speed=self.trace_speed,
                    limit=self.trace_limit,
                    from_s=self.trace_from,
                    block_tokens=self.trace_block_tokens,
                ),
                sessions=sessions,
                cancel_ratio=self.cancel,
                adapters=None if self.adapters is None else choices.parse_adapters(self.adapters),
                priorities=None if self.priority is None else choices.parse_priorities(self.priority),
                seed=self.seed,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def longest_tokens(self) -> int:
        """Prompt and reply of the longest request that is drawn. Raises ConfigError."""
        try:
            return self.load.longest_tokens()
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def lengths_text(self, longest: int) -> str:
        """The lengths as a sentence begins with them; `longest`: prompt and reply of the longest request."""
        if self.load.is_plain and self.load.output_tokens.kind == "fixed":
            return f"{self.input_tokens} input and {self.output_tokens} output tokens"
        return f"the {longest} tokens of the longest request"

    @property
    def slos(self) -> dict[str, float]:
        """Goodput limits in milliseconds by metric."""
        slos: dict[str, float] = {}
        for item in (part.strip() for text in self.goodput for part in text.split(",")):
            limit = latency_limit(item)
            if limit is None:
                raise ValueError(
                    f"--goodput '{item}' is not understood; write it as 'ttft<500ms', or ttft:MS, tpot:MS or e2el:MS."
                )
            if self.pooled and limit.metric != "e2el":
                raise ValueError(
                    f"--goodput limits {limit.metric}, and replies of --backend {self.backend} are not streamed; limit "
                    "e2el."
                )
            slos[limit.metric] = limit.limit_ms
        return slos

    @property
    def price(self) -> tuple[float, str] | None:
        """What an hour of one GPU costs, and the currency."""
        if self.gpu_hour_price is None:
            return None
        return price_of(self.gpu_hour_price)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        plain = dataclasses.asdict(self)
        return {key: str(value) if isinstance(value, Path) else value for key, value in plain.items()}


# Those that HTTP, the body and the records need as they are.
_OWN_HEADERS = {
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "transfer-encoding", "upgrade", "x-request-id",
}  # fmt: skip
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SECRET_NAME = re.compile(r"auth|key|token|secret|cookie|passw|credential|session|signature", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(bearer|basic)\s|sk-|hf_|gh[a-z]_", re.IGNORECASE)


def _header(item: str) -> tuple[str, str, str | None]:
    """Name, value and variable of a --header. Its message never holds the value. Raises ConfigError."""
    name, equals, value = (part.strip() for part in item.partition("="))
    if not equals or not _HEADER_NAME.fullmatch(name):
        raise ConfigError("--header must be NAME=VALUE, with letters, digits and hyphens in the name.")
    if name.lower() in _OWN_HEADERS:
        raise ConfigError(f"--header {name} is set by loadgen itself; leave it out.")
    if value.startswith("env:"):
        return name, "", check_variable(f"--header {name}=env:", value.removeprefix("env:"))
    if _SECRET_NAME.search(name) or _SECRET_VALUE.match(value):
        raise ConfigError(
            f"the value of --header {name} looks like a secret and would be written down; put it into an environment "
            f"variable and give --header {name}=env:VARIABLE."
        )
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"the value of --header {name} holds a character that no header can carry.")
    return name, value, None


# What is started, where it is sent, and with which secrets and files: a directory's word for these is not its owner's.
OWNERS_WORD = (
    "url", "launch", "image", "server_python", "server_arg", "on", "api_key_env", "header", "ca", "insecure", "dataset",
    "trace", "tokenizer", "profile",
)  # fmt: skip


def check_owners_word(directory: Path, kept: object, typed: Container[str], given_as: Callable[[str], str]) -> None:
    """That what decides on programs, addresses, secrets and files was typed again. kept: the options that the directory
    holds. given_as: an option as it is typed. Raises ConfigError."""
    own = ("embedded",)  # starts nothing but this program
    missing = [name for name in OWNERS_WORD if getattr(kept, name) not in (None, False, (), *own) and name not in typed]
    if missing:
        shown = ", ".join(f"{given_as(name)} {_shown(getattr(kept, name))}" for name in missing)
        raise ConfigError(
            f"{directory} may be another's, and it says what is started, sent or read: give that again beside --resume "
            f"if it is what you want: {shown}."
        )


def _shown(value: object) -> str:
    if value is True:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def check_variable(flag: str, name: str) -> str:
    """The name of a variable that holds a secret. Raises ConfigError for what is no name, and may be the secret."""
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or (_is_key(name) and not name.isupper()):
        raise ConfigError(
            f"{flag} must name an environment variable, and what was given is no name of one (it is not shown, since "
            "it may be the key); put the key into a variable and name that."
        )
    return name


def keys_of_url(url: str) -> list[str]:
    """The parts of an address's path that look like keys: gateways take one there, and it must not be written down."""
    return [part for part in url.partition("://")[2].split("/")[1:] if _is_key(unquote(part))]


def _is_key(word: str) -> bool:
    """Whether it begins as keys do, or has 20 letters and digits in a row, mixed as in no name of a model."""
    runs = re.findall("[A-Za-z0-9]{20,}", word)
    return bool(_SECRET_VALUE.match(word)) or any(len(re.findall("[0-9]+", run)) > 1 for run in runs)


def from_environment(variable: str, flag: str) -> str:
    """A secret, which only the environment may hold. Raises ConfigError, which names no variable that may be a key."""
    value = os.environ.get(variable)
    if not value:
        named = f" {variable}" if variable.isupper() else ""
        raise ConfigError(f"the environment variable{named} named by {flag} is not set.")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{variable} holds a line break or another character that no header can carry.")
    return value


def _is_secret(word: str) -> bool:
    """Whether it gives a key or token: servers take `_` for `-`, and the beginning of a flag for the flag."""
    flag = re.split(r"[=\s]", word, maxsplit=1)[0].lower().replace("_", "-")
    return any(
        flag.startswith(secret) or (secret.startswith(flag) and flag.startswith(least))
        for secret, least in (("--api-key", "--api"), ("--hf-token", "--hf-t"))
    )


def ray_address(on: str, others: str = "") -> str | None:
    """The Ray cluster that --on names; None: the one that this machine is part of. others: what else --on may be, for
    the sentence. Raises ConfigError."""
    given = re.fullmatch(r"ray(?::(?:\[([^\]]*:[^\]]*)\]|([^:]+)):[0-9]{1,5})?", on)
    if not given or not (on == "ray" or is_host(given[1] or given[2])):
        raise ConfigError(f"--on is '{on}'; it must be {others}ray, or ray:HOST:PORT, the address of a Ray cluster.")
    return on.removeprefix("ray").removeprefix(":") or None


def flag(name: str) -> str:
    """As it is typed to differ from its default."""
    return ("--no-" if getattr(Config, name) is True else "--") + name.replace("_", "-")


def check_text(tokens: Iterable[str]) -> None:
    """Raises ConfigError for bytes that are no text, which no file of a run could hold."""
    for token in tokens:
        if any("\ud800" <= char <= "\udfff" for char in token):
            raise ConfigError(f"'{token}' holds bytes that are no UTF-8; give it another name.")


def check_file(flag: str, path: Path | None, *, new: bool = False) -> None:
    """Raises ConfigError for a file that could not be written at the end; new: or that is there."""
    if path is None:
        return
    if new and path.exists():
        raise ConfigError(f"{path} exists; name another {flag}, nothing was overwritten.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {flag} {path}; name a file in a directory that is there.")
