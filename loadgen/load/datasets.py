"""One's own prompts, from a file, one a line or as a JSON list."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from backends.protocol import Prompt
from backends.untrusted import UNDECODABLE, reason
from loadgen.load.dataset_files import FileStamp, counted, items, stamp
from loadgen.load.lengths import MOST_TOKENS, WorkloadError
from loadgen.load.shapes import Shape
from loadgen.load.turns import Turns

TokenCount = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


FORM = 'give one JSON object a line, such as {"prompt": "What is a cache?", "output_tokens": 64}'


class _Line(msgspec.Struct):
    prompt: str | list[int] | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET  # as some call it
    prompt_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    max_tokens: TokenCount | None = None  # as requests call it


class _Prompt(NamedTuple):
    prompt: str | list[int]
    prompt_tokens: int | None
    output_tokens: int | None


class Dataset:
    """One's own prompts, as JSON objects: {"prompt": text or token ids, "output_tokens"?, "prompt_tokens"?}.

    The last lines serve the warm-up, so that no measured prompt has been seen before. With `repeat` all lines are
    measured, as often as it takes, and the warm-up sends the last of them too. Text without `prompt_tokens` has an
    unknown length (`n_tokens` 0), which is then not checked. Raises WorkloadError.
    """

    turns: Turns | None = None

    def __init__(self, path: Path, output_tokens: int, prompt_kind: str, warmup: int, *, repeat: bool = False) -> None:
        self._output_tokens = output_tokens
        self._lines = read_lines(stamp(path), prompt_kind)
        self._reserved = 0 if repeat else warmup
        if not self._lines:
            raise WorkloadError(f"{path} holds no prompts; {FORM}, or name another --dataset.")
        if len(self._lines) <= self._reserved:
            raise WorkloadError(
                f"{path} holds {counted(len(self._lines), 'prompt')} and --warmup {warmup} takes as many; add prompts, "
                "or send these again with --repeat-dataset."
            )

    def __len__(self) -> int:
        """How many prompts are measured before one comes again."""
        return len(self._lines) - self._reserved

    def longest_tokens(self) -> int | None:
        """Tokens of the longest prompt and its reply, the warm-up's too; None where the length of one is not known."""
        lengths = [line.prompt_tokens if isinstance(line.prompt, str) else len(line.prompt) for line in self._lines]
        replies = [line.output_tokens or self._output_tokens for line in self._lines]
        known = [length + reply for length, reply in zip(lengths, replies, strict=True) if length]
        return max(known) if len(known) == len(lengths) else None

    def prompt(self, phase: str, number: int) -> Prompt:
        line = self._lines[(-1 - number if phase == "warmup" else number) % len(self._lines)]
        if isinstance(line.prompt, str):
            return Prompt(n_tokens=line.prompt_tokens or 0, text=line.prompt)
        return Prompt(n_tokens=len(line.prompt), token_ids=line.prompt)

    def shape(self, number: int) -> Shape:
        line = self._lines[number % len(self._lines)]
        known = line.prompt_tokens or 0 if isinstance(line.prompt, str) else len(line.prompt)
        return Shape(known, line.output_tokens or self._output_tokens)

    own = shape  # no line goes on from another

    def id(self, number: int) -> int:
        return number


@functools.lru_cache(maxsize=1)
def read_lines(file: FileStamp, prompt_kind: str) -> list[_Prompt]:
    prompts = []
    decode: Any = msgspec.json.Decoder(_Line | str).decode
    for item in items(file.path, "prompts"):
        where = f"{file.path} {'item' if item.in_list else 'line'} {item.number}"
        try:
            line = decode(item.encoded)
        except UNDECODABLE as error:
            raise WorkloadError(f"{where} is not a prompt: {reason(error)}; {FORM}.") from None
        line = _Line(line) if isinstance(line, str) else line
        prompt = line.text if isinstance(line.prompt, msgspec.UnsetType) else line.prompt
        if isinstance(prompt, msgspec.UnsetType):
            raise WorkloadError(f"{where} has no prompt; {FORM}.")
        if not prompt:
            raise WorkloadError(f"{where} has an empty prompt.")
        if prompt_kind == "text" and not isinstance(prompt, str):
            raise WorkloadError(f"{where} has token ids, but this backend takes text only.")
        prompts.append(_Prompt(prompt, line.prompt_tokens, line.output_tokens or line.max_tokens))
    return prompts
