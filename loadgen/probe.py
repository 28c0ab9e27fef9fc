"""Questions to the server before the load: what it is, and how it counts the tokens of a text prompt."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

import backends
from backends.protocol import Account, Backend, Prompt, ProtocolError, ServerInfo
from backends.untrusted import printable
from loadgen.client.engine import build_transport
from loadgen.client.exchange import Exchange
from loadgen.client.transport import Transport
from loadgen.load.prompts import Text
from loadgen.plan import Plan
from loadgen.server.embedded import EMULATED_MARK
from loadgen.target import UNQUEUED_S, Target, TransportError, get


class ServerError(Exception):
    """The server is not the one that the options describe. One sentence."""


def identify(backend: Backend, target: Target) -> tuple[ServerInfo, bool]:
    """The server's description of itself, and whether it is emulated. Raises TransportError or ServerError."""
    reasons = []
    emulated = False
    for path in backend.info_paths:
        status, headers, body = get(target, path)
        emulated = EMULATED_MARK in headers.get("server", "")
        if status == 401 or status == 403:
            raise ServerError(
                f"{target.url} refuses access (status {status}); name the key's variable: --api-key-env or --header."
            )
        if status != 200:
            redirect = f" and redirects to {printable(headers['location'])}" if "location" in headers else ""
            reasons.append(f"GET {path} answers {status}{redirect}")
            continue
        try:
            return backend.read_info(path, body), emulated
        except ProtocolError as error:
            reasons.append(str(error))
    raise ServerError(f"{target.url} does not look like a {backend.name} server: {'; '.join(reasons)}.")


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


async def fit_text(plan: Plan) -> Plan:
    """The plan with text prompts that are exact as the server counts them; it is sent at most two prompts for that.
    Raises TransportError, ServerError or WorkloadError."""
    backend = backends.get(plan.backend)
    source = plan.prompts
    if source.dataset is not None or backend.prompt_kind != "text":
        return plan
    load = plan.job.load
    workload = source.build(backend, msgspec.structs.replace(load, seed=load.seed + 1), 0)
    assert isinstance(workload, Text)
    transport = build_transport(plan, backend)
    await transport.open(1)
    try:
        for _ in range(2):
            prompt = workload.prompt("warmup", 0)
            prompt_tokens = await _counted_by_server(plan, backend, transport, prompt)
            if prompt_tokens is None or prompt_tokens == prompt.n_tokens:
                break
            workload.fit_offset(prompt.n_tokens, prompt_tokens)
    finally:
        await transport.close()
    return msgspec.structs.replace(plan, prompts=msgspec.structs.replace(source, offset=workload.offset))


async def _counted_by_server(plan: Plan, backend: Backend, transport: Transport, prompt: Prompt) -> int | None:
    done: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    sampling = msgspec.structs.replace(plan.job.sampling, max_tokens=1)
    exchange = Exchange(0, "warmup", 0, prompt.n_tokens, 1, backend.decoder(sampling.stream), done.set_result)
    request = backend.encode(plan.job.model, prompt, sampling)
    transport.send(exchange, transport.prepare(request, f"{plan.job.run_id}-probe"))
    limit_s = min(UNQUEUED_S, plan.job.timeouts.first_byte_s)
    try:
        async with asyncio.timeout(limit_s):
            await done
    except TimeoutError:
        raise ServerError(f"no reply to a first request within {limit_s:g} s; is the server ready?") from None
    if exchange.outcome != "ok":
        raise ServerError(f"a first request failed ({exchange.outcome}): {exchange.error}")
    return exchange.prompt_tokens
