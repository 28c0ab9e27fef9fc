"""What a request's body holds beside what its backend puts there: fields that a user adds, overrides or leaves out; and
which options end a server's refusal of a field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from backends.untrusted import UNDECODABLE, nearest, reason

_INPUTS = ("inputs", "input", "query", "documents", "texts", "text_1", "text_2")
_DECIDED = {  # what other options decide on, and what is no option's
    "model": "--model names it",
    "stream": "--no-stream turns it off",
    "max_tokens": "--output-tokens says how many",
    "max_new_tokens": "--output-tokens says how many",
    "max_output_tokens": "--output-tokens says how many",
    "n_predict": "--output-tokens says how many",
    "prompt": "the load makes it",
    "messages": "the load makes them",
    **dict.fromkeys(_INPUTS, "the load makes them"),
}
_KEPT = ("stream", "prompt", "messages", *_INPUTS)  # no request does without these
_CHOICES = ("n", "best_of")
_SECRET_NAME = re.compile(r"api_?key|passw|secret|credential|authorization|(auth|access)_?token", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(bearer|basic)\s|sk-|hf_|gh[a-z]_", re.IGNORECASE)
_REFUSAL = re.compile(
    r"not (supported|permitted|allowed|recogni[sz]ed|accepted|a valid)|un(supported|recogni[sz]ed|expected|known)"
    r"|extra (input|field|propert)|(does not|doesn't) support|cannot find field|no such field"
    r"|invalid (field|parameter|argument)",
    re.IGNORECASE,
)
_OTHERS = re.compile(r"expected one of|did you mean|valid (fields|parameters) are|instead", re.IGNORECASE)


class BodyEdits(msgspec.Struct, frozen=True):
    """How bodies differ from what the backend makes. extra: merged into the body, objects field by field. omitted:
    names of fields, those of an inner object with dots. length_field: what max_tokens is called instead."""

    extra: dict[str, Any] = {}
    omitted: tuple[str, ...] = ()
    length_field: str | None = None

    def apply(self, body: bytes) -> bytes:
        if not (self.extra or self.omitted or self.length_field):
            return body
        fields = _fields(body)
        if self.length_field is not None and "max_tokens" in fields:
            fields = {self.length_field if name == "max_tokens" else name: fields[name] for name in fields}
        for name in self.omitted:
            _omit(fields, name.split("."))
        return msgspec.json.encode(_merged(fields, self.extra))

    def check(self, body: bytes) -> None:
        """Raises ValueError where a field is to be left out that no request has."""
        for name in self.omitted:
            fields = _fields(body)
            if not _omit(fields, name.split(".")):
                near = nearest(name, fields)
                others = f"did you mean {near}?" if near else f"they have {', '.join(fields)}."
                raise ValueError(f"--omit-field {name}: requests have no such field; {others}")


def parse(extra_body: str | None, omit_field: Iterable[str]) -> BodyEdits:
    """The edits of --extra-body and --omit-field. Raises ValueError, a sentence that never holds a secret."""
    try:
        extra = {} if extra_body is None else msgspec.json.decode(extra_body, type=dict[str, Any])
    except UNDECODABLE as error:
        raise ValueError(f"--extra-body is no JSON object ({reason(error)}); such as '{{\"top_k\": 20}}'.") from None
    _check_extra(extra)
    omitted = tuple(name.strip() for name in omit_field)
    for name in omitted:
        if not all(name.split(".")):
            raise ValueError("--omit-field names a field of the requests' body, such as seed or parameters.seed.")
        if name in _KEPT:
            raise ValueError(f"--omit-field {name}: no request does without it; {_DECIDED[name]}.")
    return BodyEdits(extra, omitted)


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if isinstance(value, dict):
            _check_extra(value)
        if _SECRET_NAME.search(name) or (isinstance(value, str) and _SECRET_VALUE.match(value)):
            raise ValueError(
                "a field of --extra-body looks like a secret and would be written down; send it as a header, --header "
                "NAME=env:VARIABLE."
            )
        if name in _DECIDED:
            raise ValueError(f"--extra-body holds {name}, which is not for it: {_DECIDED[name]}.")
        if name in _CHOICES and value != 1:
            raise ValueError(
                f"--extra-body asks for several replies at once ({name}), whose tokens cannot be told apart."
            )


def refused(error: str, body: bytes) -> list[str]:
    """The fields of a request that a server's error message refuses; none where it is about something else."""
    if not _REFUSAL.search(error):
        return []
    refusal = _OTHERS.split(error)[0]
    return [name for name in _fields(body) if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", refusal)]


def advised(error: str, body: bytes) -> str:
    """A server's error message, with the options that leave out what it refuses, if it refuses a field."""
    names = [name for name in refused(error, body) if name not in _DECIDED or name in ("stream", "max_tokens")]
    own = {"ignore_eos": "--no-ignore-eos", "stream": "--no-stream"}
    options = [own.get(name, f"--omit-field {name}") for name in names]
    return f"{error.rstrip('.')}; leave out what it refuses: {' '.join(options)}" if options else error


def _fields(body: bytes) -> dict[str, Any]:
    """The members of the outermost object, each as it stands: prompts may be long."""
    return dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


def _omit(fields: dict[str, Any], path: list[str]) -> bool:
    """Removes a field, and says whether it was there."""
    name, *inner = path
    if not inner or name not in fields:
        return fields.pop(name, None) is not None
    try:
        within = _fields(bytes(fields[name]))
    except UNDECODABLE:
        return False
    found = _omit(within, inner)
    fields[name] = msgspec.Raw(msgspec.json.encode(within))
    return found


def _merged(fields: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in extra.items():
        if isinstance(value, dict) and name in fields:
            try:
                fields[name] = _merged(_fields(bytes(fields[name])), value)
                continue
            except UNDECODABLE:
                pass  # what it overrides is no object
        fields[name] = value
    return fields
