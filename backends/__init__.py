"""The servers that the instrument can talk to, found by entry point: a plugin is no different from a built-in."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from backends.exit_codes import UserError
from backends.protocol import Backend
from backends.untrusted import nearest

__all__ = ["Backend", "UnknownBackend", "available", "get"]

GROUP = "llm_dissect.backends"


class UnknownBackend(UserError, LookupError):
    """No backend of that name is installed. The message says which are."""


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def available() -> list[str]:
    """Names of the installed backends, sorted."""
    return sorted(_entries())


def get(name: str) -> Backend:
    """The backend called `name`. Raises UnknownBackend with a suggestion."""
    entries = _entries()
    if name not in entries:
        near = nearest(name, entries)
        hint = f"did you mean '{near}'?" if near else f"installed are {', '.join(sorted(entries))}."
        raise UnknownBackend(f"unknown backend '{name}'; {hint}")
    backend: Backend = entries[name].load()
    return backend
