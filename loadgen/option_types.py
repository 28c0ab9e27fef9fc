"""The type of an option that is a whole number."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from cyclopts import Token


def _whole(kind: Any, tokens: Sequence[Token]) -> int:
    """The number as it is typed, also 1e6; no fraction is rounded in silence. Raises ValueError."""
    (token,) = tokens
    with contextlib.suppress(ValueError):
        return int(token.value)
    with contextlib.suppress(ValueError):
        number = float(token.value)
        if number.is_integer():
            return int(number)
    raise ValueError(f"'{token.value}' is not a whole number.")


Whole = Annotated[int, Parameter(converter=_whole)]
