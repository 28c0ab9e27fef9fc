"""Which kind of server answers, from what it says of itself: measuring another kind than the one named would be a lie.

Three requests tell them apart. `/v1/models` names an owner: "vllm", "sglang", "llamacpp", "lightllm" (from 1.2 on), the
model's own id in TGI, something else elsewhere. `/info` is TGI's, `/get_model_name` LightLLM's (before 1.2 all that it
has). A router may answer the first itself, and then `/get_model_info`, which is SGLang's, comes from behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from backends.protocol import OtherServer, ProtocolError, ServerInfo
from backends.replies import Count, quoted
from backends.untrusted import UNDECODABLE, printable

MOST_SETTINGS, MOST_CHARS = 64, 60
TGI_NAME = "tgi"  # what TGI calls its model on OpenAI's routes, whichever it is
PATHS = ("/v1/models", "/info", "/get_model_name")
ROUTER = "local"  # the owner of sglang-router's models

_LIST_ADAPTERS = ("vllm", "sglang")  # among their models, each with its parent
_TITLES = {"vllm": "vLLM", "lightllm": "LightLLM", "tgi": "TGI", "llamacpp": "llama.cpp", "sglang": "SGLang"}


class _Meta(msgspec.Struct):
    """What llama.cpp says of a model beside its name. n_ctx: of one slot."""

    n_vocab: Count | None = None
    n_ctx: Count | None = None


class _Model(msgspec.Struct):
    id: str
    owned_by: object = None  # routers write what they like into what the standard has not
    max_model_len: object = None
    parent: object = None  # of an adapter, the model that it is for
    meta: object = None

    @property
    def owner(self) -> str:
        return self.owned_by if isinstance(self.owned_by, str) else ""

    @property
    def limit(self) -> int | None:
        return _whole(self.max_model_len)

    @property
    def own(self) -> _Meta:
        try:
            return msgspec.convert(self.meta, _Meta)
        except msgspec.ValidationError:
            return _Meta()


def _whole(value: object) -> int | None:
    """What a server gives as a number, where it is one."""
    return value if type(value) is int and 0 < value < 1 << 53 else None


class _Identity(msgspec.Struct):
    """The reply to any of the three requests; what the other two have is missing."""

    data: list[_Model] | None = None
    model_id: str | None = None
    max_total_tokens: object = None
    max_concurrent_requests: object = None
    max_input_length: object = None
    version: str | None = None
    model_name: str | None = None
    model_path: str | None = None
    served_model_name: str | None = None
    is_generation: object = None


def _identify(path: str, body: bytes) -> tuple[str, ServerInfo]:
    """Backend name of the server, or the owner that it names, and what it says. Raises ProtocolError."""
    try:
        identity = msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"), type=_Identity)
    except UNDECODABLE:
        identity = _Identity()
    if identity.data:
        bases = [model for model in identity.data if not isinstance(model.parent, str)] or identity.data
        first = bases[0]
        kind = "tgi" if first.owner and first.owner == first.id else first.owner
        names = tuple(dict.fromkeys(printable(model.id) for model in bases))
        own = tuple(printable(model.id) for model in identity.data if model not in bases)
        adapters = own if own or kind in _LIST_ADAPTERS else None
        limits = {model.limit for model in identity.data if model.limit is not None}
        limit = limits.pop() if len(limits) == 1 else None
        if len(names) > 1 or "*" in first.id:  # several names or adapters: it is not for us to choose
            return kind, ServerInfo(max_total_tokens=limit, models=names, adapters=adapters)
        meta = first.own
        return kind, ServerInfo(
            first.id or None,
            meta.n_ctx if limit is None else limit,
            vocab_size=meta.n_vocab or None,
            adapters=adapters,
        )
    if identity.model_id is not None and identity.max_total_tokens is not None:
        limit, most = _whole(identity.max_total_tokens), _whole(identity.max_concurrent_requests)
        return "tgi", ServerInfo(identity.model_id, limit, identity.version, max_requests=most)
    if identity.model_id is not None and identity.max_input_length is not None:  # Text Embeddings Inference
        return "tei", ServerInfo(identity.model_id, _whole(identity.max_input_length), identity.version)
    if identity.model_name is not None:
        return "lightllm", ServerInfo(model=identity.model_name)
    if identity.model_path is not None and identity.is_generation is not None:
        return "sglang", ServerInfo(model=identity.served_model_name or identity.model_path)
    raise ProtocolError(f"{path} answers {quoted(body)}, which is no LLM server's answer")


def _one(kind: str) -> str:
    return f"{'an' if kind == 'sglang' else 'a'} {_TITLES[kind]} server"


def read_as(name: str) -> Callable[[str, bytes], ServerInfo]:
    """`read_info` of the backend `name`, which refuses every other kind of server and says which backend it needs."""

    def read(path: str, body: bytes) -> ServerInfo:
        kind, info = _identify(path, body)
        if kind == name:
            return info
        if kind in _TITLES:
            raise OtherServer(f"this is {_one(kind)}, not {_TITLES[name]}; use --backend {kind}")
        if kind == ROUTER and name == "sglang":
            raise ProtocolError(f"{path} is answered by a router")
        owner = f"'{printable(kind, 60)}' as the models' owner" if kind else "no owner of its models"
        raise OtherServer(f"this is not {_one(name)} ({path} names {owner}); use --backend openai")

    return read


def read_unlike(title: str) -> Callable[[str, bytes], ServerInfo]:
    """`read_info` of a server that names no owner of its own: it refuses the kinds that do."""

    def read(path: str, body: bytes) -> ServerInfo:
        kind, info = _identify(path, body)
        if kind in _TITLES:
            raise OtherServer(f"this is {_one(kind)}, not {title}; use --backend {kind}")
        return info

    return read


def settings_of(fields: Mapping[str, object]) -> dict[str, str]:
    """What a server says of its settings, as text that a report can have; the first of very many."""
    shown = list(fields.items())[:MOST_SETTINGS]
    return {printable(name, MOST_CHARS): printable(str(value), MOST_CHARS) for name, value in shown}


def read_any(path: str, body: bytes) -> ServerInfo:
    """`read_info` of a backend that takes any server with the OpenAI routes."""
    kind, info = _identify(path, body)
    if kind == "tgi":  # takes every other name on these routes for an adapter to load
        return msgspec.structs.replace(info, model=TGI_NAME)
    return info
