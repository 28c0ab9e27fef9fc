"""The servers that the instrument can talk to, found by entry point: a plugin is no different from a built-in."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from backends.exit_codes import UserError
from backends.protocol import Backend
from backends.untrusted import nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

__all__ = ["Backend", "UnknownBackend", "available", "get", "installed"]

GROUP = "llm_dissect.backends"


class UnknownBackend(UserError, LookupError):
    """No backend of that name is installed. The message says which are."""


@functools.cache
def installed(group: str) -> EntryPoints:
    """The entry points of a group: read once, since that opens a file of every package."""
    from importlib.metadata import entry_points  # which takes 10 ms to load

    return entry_points(group=group)


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in installed(GROUP)}


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
