"""The fields of a config.json, read with their meaning checked: a leaf of what knows the families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from backends.untrusted import printable

T = TypeVar("T")

MOST = 1 << 40  # of anything that a config.json counts


class UnknownModel(ValueError):
    """A config.json that describes no decoder that is known here. A clause, with the field that stopped it."""


class MalformedConfig(UnknownModel):
    """One that describes no model at all: a size is missing or makes no sense."""


class Fields:
    """A config.json, whose values may be anything, over what its family has by default. given: without the latter."""

    def __init__(self, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._config = config
        self._given = given

    def given(self, name: str) -> Any:
        """As the file has it; None where it does not."""
        return self._given.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As it is there; the default where it is not, or null."""
        value = self._config.get(name)
        return default if value is None else value

    def stated(self, name: str, default: Any) -> Any:
        """As it is there, null too; the default where it is not."""
        return self._config.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """A number above 0. Raises UnknownModel."""
        value = self.get(name, default)
        if value is None:
            raise MalformedConfig(f"{name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MOST:
            raise MalformedConfig(f"{name} is {printable(repr(value), 40)} and must be a whole number above 0")
        return value

    def either(self, name: str, other: str, default: int | None = None) -> int:
        """As `size`, of a field that files may also call otherwise."""
        return self.size(other if self.given(name) is None and self.given(other) is not None else name, default)

    def numbers(self, name: str) -> list[int] | None:
        """A list of layers' numbers. Raises UnknownModel."""
        return self._listed(name, int, "layers")

    def named(self, name: str) -> list[str] | None:
        """A list of names, one for each layer. Raises UnknownModel."""
        return self._listed(name, str, "names")

    def _listed(self, name: str, kind: type[T], what: str) -> list[T] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise MalformedConfig(f"{name} is no list of {what}")
        return value
