"""Questions to the server before the load: what it is, whether its replicas are so many, and how it counts the tokens
of a text prompt."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

import backends
from backends.exit_codes import FailedError
from backends.protocol import Account, Backend, HttpRequest, OtherServer, Prompt, ProtocolError, ServerInfo
from backends.replies import error_text
from backends.untrusted import printable
from loadgen.client.engine import build_transport
from loadgen.client.exchange import Exchange
from loadgen.config import ConfigError
from loadgen.load.images import Images
from loadgen.load.prompts import ODD_RATIO, ODD_TOKENS, RandomText
from loadgen.load.request_body import advised, refused
from loadgen.plan import ClientPlan
from loadgen.rundir.emulation import TIMETABLE_PATH, Timetable
from loadgen.server.embedded import EMULATED_BODY, EMULATED_MARK
from loadgen.target import UNQUEUED_S, Target, TransportError, get


class ServerError(FailedError):
    """The server is not the one that the options describe. One sentence."""


_AFTER_AN = ("a", "e", "i", "o", "u", "lm", "sg")


class Identity(NamedTuple):
    """What a server says of itself. doubt: why nothing is known of it but what the options say, a clause; else empty.
    A first request must then show whether it is a server of that kind at all."""

    info: ServerInfo
    emulated: bool
    doubt: str = ""


def identify(backend: Backend, target: Target, *, named: bool) -> Identity:
    """The server's description of itself. named: whether the user names a model, so that a server that says nothing can
    be measured. Raises TransportError or ServerError."""
    reasons: list[str] = []
    others: list[str] = []  # reasons of those that say what they are
    emulated, well = False, True
    for path in backend.info_paths:
        status, headers, body = get(target, path)
        emulated = EMULATED_MARK in headers.get("server", "")
        if status == 401 or (status == 403 and not (named and (target.token or target.extra_headers))):
            raise ServerError(
                f"{target.url} refuses access (status {status} for {target.url_of(path)}); name the key's variable: "
                "--api-key-env or --header."
            )
        if status != 200:
            more = f" and redirects to {printable(headers['location'])}" if "location" in headers else ""
            if status >= 500 and (message := error_text(body)):  # of a router, which of its workers did not answer
                more = f" ({printable(message, 200)})"
            reasons.append(f"GET {target.url_of(path)} answers {status}{more}")
            well = well and status <= 501 and status != 500
            continue
        try:
            return Identity(backend.read_info(path, body), emulated or EMULATED_BODY in body)
        except ProtocolError as error:
            (others if isinstance(error, OtherServer) else reasons).append(str(error))
    if named and well and not others:
        return Identity(ServerInfo(), emulated, reasons[0])
    advice = ""
    if others:  # they say what it is, and the other paths no more than that it is that
        reasons = list(dict.fromkeys(others))
    elif not well:
        advice = " Look at its log, and wait until it is ready; of a router, see that its workers run."
    elif not named:
        advice = " If it has no list of models, name the one to ask for with --model."
    kind = f"{'an' if backend.name.startswith(_AFTER_AN) else 'a'} {backend.name}"
    raise ServerError(f"{target.url} does not look like {kind} server: {'; '.join(reasons)}.{advice}")


def account(backend: Backend, target: Target) -> Account:
    """What the server says of how it runs, where it says it. Never raises: a run needs none of it."""
    whole = Account()
    for path in backend.account_paths:
        with contextlib.suppress(TransportError):
            status, _, body = get(target, path)
            if status == 200:
                part = backend.read_account(path, body)
                whole = Account(
                    part.version or whole.version,
                    whole.kv_cache_tokens if part.kv_cache_tokens is None else part.kv_cache_tokens,
                    {**whole.settings, **part.settings},
                )
    return whole


# What no two processes show alike: when they and their series began, and sums of seconds with all their digits.
_OWN_VALUE = re.compile(
    r"^((?:process_start_time_seconds|\w[\w:]*(?:_created|_seconds_sum))(?:\{[^\n]*\})? \S+)", re.MULTILINE
)
_OWN_DIGITS = 8


def check_replicas(target: Target, urls: Sequence[str]) -> None:
    """That no two of these pages of metrics are one replica's, by whatever names. Those that do not answer, or show
    nothing of their own, pass. Raises ServerError."""
    seen: dict[str, str] = {}
    for url in urls if len(urls) > 1 else ():
        parts = urlsplit(url)
        root = f"{parts.scheme}://{parts.netloc}"
        same = parts[:2] == target.parts[:2]  # secrets go to the server itself alone
        at = msgspec.structs.replace(target, url=root) if same else Target(root, ca=target.ca, insecure=target.insecure)
        with contextlib.suppress(TransportError):
            status, _, body = get(at, parts.path)
            for shown in _OWN_VALUE.findall(body.decode(errors="replace")) if status == 200 else ():
                name, value = shown.rsplit(" ", 1)
                if len(re.sub("e.*|[^0-9]", "", value).strip("0")) < _OWN_DIGITS or seen.setdefault(shown, url) == url:
                    continue
                raise ServerError(
                    f"--metrics-url {url} is the same replica as {seen[shown]}: both show {printable(name, 100)} "
                    f"{printable(value, 30)}; name each once."
                )


def timetable(target: Target) -> Timetable | None:
    """What an emulated server says of its times since it was asked last. Never raises."""
    with contextlib.suppress(TransportError, msgspec.DecodeError):
        status, _, body = get(target, TIMETABLE_PATH)
        if status == 200:
            return msgspec.json.decode(body, type=Timetable)
    return None


async def first_request(plan: ClientPlan, doubt: str = "") -> tuple[ClientPlan, list[str]]:
    """The plan as the server's answers to first requests make it, and notes: text prompts that are exact as the server
    counts them, and the name that it has for the length of a reply. Sends at most two requests, two more where words
    are no tokens of that server, and one more where a field has to have another name; none where there is nothing to
    find out. doubt: whether it is such a server at all. Raises TransportError, ServerError or WorkloadError."""
    backend = backends.get(plan.backend)
    fits = plan.prompts.dataset is None and backend.prompt_kind == "text"
    if not (fits or doubt or backend.any_server or backend.may_lack_route):
        return plan, []
    first = _First(plan, backend)
    await first.transport.open(1)
    try:
        if fits:
            await first.fit()
            if plan.job.load.images is not None:
                await first.show(plan.job.load.images)
        else:
            await first.ask(Prompt(4, [1, 2, 3, 4], "Hello"))
    finally:
        await first.transport.close()
    return first.plan, first.notes


class _First:
    """First requests of a plan, which their replies may change."""

    def __init__(self, plan: ClientPlan, backend: Backend) -> None:
        self.plan = plan
        self.notes: list[str] = []
        self.transport = build_transport(plan, backend)
        self._backend = backend

    async def fit(self) -> None:
        """Text prompts have the length that is asked for, as the server counts them."""
        load, source = self.plan.job.load, self.plan.prompts
        like = msgspec.structs.replace(load, seed=load.seed + 1, batch=None, images=None)
        workload = source.build(self._backend, like, 0)
        assert isinstance(workload, RandomText)
        for attempt in range(2):
            prompt = workload.prompt("warmup", 0)
            prompt_tokens = await self.ask(prompt)
            if prompt_tokens is None or prompt_tokens == prompt.n_tokens:
                break
            added, asked = prompt_tokens - prompt.n_tokens, prompt.n_tokens
            odd = attempt and abs(added) > max(ODD_TOKENS, ODD_RATIO * asked)
            if source.tokenizer is None and (odd or not workload.takes(added)):
                await self._fit_words(workload, asked)
                break
            workload.fit_offset(asked, prompt_tokens)
        source = msgspec.structs.replace(
            source, offset=workload.offset, tokens_per_word=workload.tokens_per_word, by_bytes=workload.by_bytes
        )
        self.plan = msgspec.structs.replace(self.plan, prompts=source)

    async def show(self, images: Images) -> None:
        """That the server takes such images, and how it counts them. Raises ConfigError where it refuses them."""
        load = self.plan.job.load
        like = msgspec.structs.replace(load, seed=load.seed + 1)
        prompt = self.plan.prompts.build(self._backend, like, 0).prompt("warmup", 0)
        _, exchange = await self._send(prompt)
        if exchange.outcome != "ok":
            raise ConfigError(
                f"the server refuses --images {images.count}:{images.size} ({printable(exchange.error or '', 300)}); "
                "give smaller or fewer, or a model that takes images."
            )
        if exchange.prompt_tokens is not None:
            tokens = (exchange.prompt_tokens - prompt.n_tokens) / images.count
            self.notes.append(f"the server counts {tokens:g} tokens for an image of {images.size}")

    async def _fit_words(self, workload: RandomText, tokens: int) -> None:
        """Two texts of different lengths tell what a word counts and what the server adds."""
        counts: list[tuple[str, int]] = []
        for words in (max(4, tokens // 2), max(2, tokens // 4)):
            text = workload.probe(words)
            counted = await self.ask(Prompt(0, text=text))
            if counted is None:
                return
            counts.append((text, counted))
        self.notes.append(f"words are no tokens of this server: {workload.fit_words(*counts)}")

    async def ask(self, prompt: Prompt) -> int | None:
        """The prompt's tokens as the server counts them. Raises ServerError where the reply is not right."""
        request, exchange = await self._send(prompt)
        if exchange.outcome != "ok" and "max_tokens" in refused(exchange.error or "", request.body):
            edits = msgspec.structs.replace(self.plan.job.body_edits, length_field="max_completion_tokens")
            job = msgspec.structs.replace(self.plan.job, body_edits=edits)
            self.plan = msgspec.structs.replace(self.plan, job=job)
            self.notes.append("the server refuses max_tokens; max_completion_tokens says how long replies are to be")
            request, exchange = await self._send(prompt)
        if exchange.outcome != "ok":
            error, url = exchange.error or "", self.plan.target.url_of(request.path)
            raise ServerError(
                f"a first request failed ({exchange.outcome}): {request.method} {url}: {advised(error, request.body)}"
            )
        return exchange.prompt_tokens

    async def _send(self, prompt: Prompt) -> tuple[HttpRequest, Exchange]:
        done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        job, transport = self.plan.job, self.transport
        sampling = msgspec.structs.replace(job.sampling, max_tokens=0 if self._backend.pooled else 1)
        decoder = self._backend.decoder(sampling.stream)
        exchange = Exchange(0, "warmup", 0, prompt.n_tokens, sampling.max_tokens, decoder, done.set_result)
        request = job.request(self._backend, prompt, sampling)
        transport.send(exchange, transport.prepare(request, f"{job.run_id}-probe"))
        limit_s = min(UNQUEUED_S, job.timeouts.first_byte_s)
        try:
            async with asyncio.timeout(limit_s):
                await done
        except TimeoutError:
            raise ServerError(f"no reply to a first request within {limit_s:g} s; is the server ready?") from None
        return request, exchange
