"""Conversations that somebody had, from a file: sessions whose turns are what a person said to an assistant.

Three formats are read, as a JSON list or one conversation a line, and told apart by their keys:

    ShareGPT  {"conversations": [{"from": "human" or "gpt" or "system", "value": text}, ...]}
    OpenAI    {"messages": [{"role": "user" or "assistant" or "system", "content": text, or parts of text}, ...]}
    MLPerf    a message a line, as of MLPerf Endpoints' agents: {"conversation_id": id, "role": "user" or "assistant" or
              "tool", "content": text, "system": text, "tools": [...], "tool_results": [{"content": text}, ...],
              "delay_seconds": s}; what tools gave is said by the user, that long after the reply before it

A turn is all that the person says before the assistant's next reply, with the system messages before it. The
assistant's words in the file are never sent: the history of a run holds what the server really replied. They only say
how long the reply is, where a tokenizer counts them and the conversation has no `output_tokens` (one number for every
turn, or a list with one for each). What else a conversation has is not looked at.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.protocol import Prompt
from backends.untrusted import UNDECODABLE, reason
from loadgen.load.dataset_files import FileStamp, counted, items, respelled, stamp
from loadgen.load.datasets import FORM, TokenCount
from loadgen.load.lengths import Law, WorkloadError
from loadgen.load.prompts import tokenizer_count
from loadgen.load.sessions import SessionShapes
from loadgen.load.shapes import Shape
from loadgen.load.turns import Turns

# Names of who speaks. ShareGPT's assistants have several, since people shared conversations of several services.
_USER, _ASSISTANT, _SYSTEM = "user", "assistant", "system"
_SPEAKERS = {
    "user": _USER, "human": _USER, "system": _SYSTEM, "developer": _SYSTEM,
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), _ASSISTANT),
}  # fmt: skip


MOST_DELAY_S = 1e6
_TEXTS = ("text", "input_text", "output_text")  # the latter two: of OpenAI's responses


class _Part(msgspec.Struct, gc=False):
    type: str = "text"
    text: str | None = None


class _Message(msgspec.Struct, rename={"sender": "from"}, gc=False):
    """A message in either format. content: null where an assistant calls tools. delay_s: before it is said."""

    sender: str | None = None
    role: str | None = None
    value: str | None = None
    content: str | list[_Part] | None = None
    delay_s: float | None = msgspec.field(name="delay_seconds", default=None)

    def text(self) -> str | None:
        """None where there is more than text."""
        content = self.content if self.value is None else self.value
        if not isinstance(content, list):
            return content or ""
        return "\n".join(part.text or "" for part in content) if all(part.type in _TEXTS for part in content) else None

    @property
    def has_images(self) -> bool:
        return isinstance(self.content, list) and any("image" in part.type for part in self.content)


class _Result(msgspec.Struct, gc=False):
    """What a tool gave."""

    content: str | list[_Part] | None = None


class _Row(msgspec.Struct, gc=False):
    """A message a line."""

    conversation_id: str | int
    role: str
    content: str | list[_Part] | None = None
    system: str | None = None
    tools: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_results: list[_Result] | None = None
    delay_seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_DELAY_S)] | None = None


class _Conversation(msgspec.Struct, gc=False):
    conversations: list[_Message] | None = None
    messages: list[_Message] | None = None
    output_tokens: TokenCount | list[TokenCount] | None = None
    conversation_id: Any = None  # with a role: it is one message, as `_Row` has it
    role: Any = None
    image: Any = None  # of LLaVA's files, whose text says where it stands
    images: Any = None


class Turn(msgspec.Struct, gc=False):
    """What is said before one reply. reply: the assistant's words in the file, kept where they are to be counted.
    output_tokens: as the file says; 0: it does not. delay_ms: after the reply before it; -1: the file does not say."""

    text: str
    system: str
    reply: str = ""
    output_tokens: int = 0
    delay_ms: int = -1

    @property
    def whole_text(self) -> str:
        """For a server that takes text and no messages."""
        return f"{self.system}\n{self.text}" if self.system else self.text


@dataclass
class SkippedConversations:
    """What of a file is not sent: conversations in which no user says anything, those with images or other things than
    text, those with a character that JSON does not have (the first of them in `strange_first`), and what assistants
    said before any user did."""

    no_user: int = 0
    images: int = 0
    more_than_text: int = 0
    strange: int = 0
    strange_first: str = ""
    beginnings: int = 0

    def __str__(self) -> str:
        """A clause for each; empty for none."""
        reasons = (
            (self.no_user, "{} without a user's message"),
            (self.images, "{} with images"),
            (self.more_than_text, "{} with tools, parts that are no text, or roles other than user, assistant, system"),
            (self.strange, f"{{}} with a character that is no text (the first is {self.strange_first})"),
            (self.beginnings, "what the assistant said first in {}"),
        )
        return ", ".join(text.format(counted(count, "conversation")) for count, text in reasons if count)


class _MoreThanText(Exception):
    """A conversation that cannot be sent as text; images: that is why."""

    def __init__(self, images: bool) -> None:
        self.images = images


@dataclass
class _File:
    """What was read of a file. count: of a tokenizer."""

    conversations: list[tuple[Turn, ...]] = field(default_factory=list)
    left_out: SkippedConversations = field(default_factory=SkippedConversations)
    count: Callable[[str], int] | None = None
    _lengths: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    _rows: tuple[str, str | int, list[_Message]] | None = (
        None  # of a message a line: where it begins, its id, what is said
    )

    def add(self, where: str, encoded: bytes | msgspec.Raw) -> None:
        """Takes one conversation. Raises WorkloadError, which says `where` that is."""
        try:
            conversation = _decoded(encoded)
        except UNDECODABLE as error:
            raise WorkloadError(f"{where} is none: {reason(error)}.") from None
        if conversation is None:
            first = where.partition(" of ")[0].removeprefix("the conversation in ")
            self.left_out.strange_first = self.left_out.strange_first or first
            self.left_out.strange += 1
            return
        alone = conversation.messages is None and conversation.conversations is None
        if alone and conversation.conversation_id is not None and conversation.role is not None:
            try:
                row = _decode_row(encoded)
            except UNDECODABLE as error:
                raise WorkloadError(f"{where} is none: {reason(error)}.") from None
            if self._rows is None or self._rows[1] != row.conversation_id:
                self.end()
                self._rows = (where, row.conversation_id, [])
            self._rows[2].extend(_said(row))
            return
        self.end()
        self._take(where, conversation)

    def end(self) -> None:
        """Takes a conversation that had a message a line. Raises WorkloadError."""
        if self._rows is not None:
            (where, _, messages), self._rows = self._rows, None
            self._take(where, _Conversation(messages=messages))

    def _take(self, where: str, conversation: _Conversation) -> None:
        messages = conversation.messages if conversation.conversations is None else conversation.conversations
        if messages is None:
            raise WorkloadError(
                f"{where} has neither conversations (ShareGPT) nor messages (OpenAI); of prompts, {FORM}."
            )
        try:
            if conversation.image or conversation.images:
                raise _MoreThanText(images=True)
            turns, begins_with_reply = _turns(where, messages, self.count is not None)
        except _MoreThanText as more:
            self.left_out.images += more.images
            self.left_out.more_than_text += not more.images
            return
        if not turns:
            self.left_out.no_user += 1
            return
        self.left_out.beginnings += begins_with_reply
        output_tokens = conversation.output_tokens
        if isinstance(output_tokens, list) and len(output_tokens) != len(turns):
            raise WorkloadError(
                f"{where} has {len(output_tokens)} output_tokens for {counted(len(turns), 'turn')}; give one number, "
                "or one for each turn."
            )
        if output_tokens is not None:
            for place, turn in enumerate(turns):
                turn.output_tokens = output_tokens[place] if isinstance(output_tokens, list) else output_tokens
        self.conversations.append(tuple(turns))

    def lengths(self, index: int) -> tuple[tuple[int, int], ...]:
        """Tokens that each turn of a conversation adds, and of the reply in the file; 0: not known."""
        turns = self.conversations[index]
        if self.count is None:
            return ((0, 0),) * len(turns)
        if index not in self._lengths:
            self._lengths[index] = tuple(
                (max(1, self.count(("\n" if place else "") + turn.whole_text)), self.count(turn.reply))
                for place, turn in enumerate(turns)
            )
        return self._lengths[index]


_decode = msgspec.json.Decoder(_Conversation).decode
_decode_row = msgspec.json.Decoder(_Row).decode


def _decoded(encoded: bytes | msgspec.Raw) -> _Conversation | None:
    """None for one with a character that is no text. Raises what UNDECODABLE has."""
    try:
        return _decode(encoded)
    except msgspec.ValidationError:
        raise
    except UNDECODABLE:
        again = respelled(encoded)
        if again is None:
            raise
    try:
        return _decode(again[0])
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return None


def _said(row: _Row) -> Iterator[_Message]:
    """The messages of a line that has one of its own."""
    beginning = [row.system or "", *([] if not row.tools else [msgspec.json.encode(row.tools).decode()])]
    if any(beginning):
        yield _Message(role=_SYSTEM, content="\n".join(filter(None, beginning)))
    if row.role == "tool":
        for result in row.tool_results or ():
            yield _Message(role=_USER, content=result.content, delay_s=row.delay_seconds)
    if row.role == _ASSISTANT:
        calls = "" if not row.tool_calls else msgspec.json.encode(row.tool_calls).decode()
        yield _Message(role=_ASSISTANT, content=calls if row.content is None else row.content)
    elif row.content is not None:
        yield _Message(role=_USER if row.role == "tool" else row.role, content=row.content, delay_s=row.delay_seconds)


def _turns(where: str, messages: list[_Message], keeps_replies: bool) -> tuple[list[Turn], bool]:
    """The turns, and whether the assistant spoke before any user did. Raises _MoreThanText, and WorkloadError."""
    turns: list[Turn] = []
    system: list[str] = []
    user: list[str] = []
    delays_s: list[float] = []
    begins_with_reply = False

    def ends_turn() -> None:
        if user:
            delay_ms = round(delays_s[0] * 1000) if delays_s else -1
            turns.append(Turn("\n".join(user), "\n".join(system), delay_ms=delay_ms))
            for part in (user, system, delays_s):
                part.clear()

    for number, message in enumerate(messages, 1):
        name = message.role if message.sender is None else message.sender
        if name is None:
            raise WorkloadError(f"{where} does not say who speaks in message {number}: it has neither from nor role.")
        speaker, text = _SPEAKERS.get(name), message.text()
        if speaker == _ASSISTANT:
            ends_turn()
            begins_with_reply |= not turns
            if keeps_replies and turns:
                turns[-1].reply += text or ""
        elif speaker is None or text is None:
            raise _MoreThanText(message.has_images)
        elif text.strip():
            (user if speaker == _USER else system).append(text)
            delays_s.extend([] if message.delay_s is None else [message.delay_s])
    ends_turn()
    return turns, begins_with_reply


@functools.lru_cache(maxsize=1)
def read_file(file: FileStamp, tokenizer: str | None) -> _File:
    """Raises WorkloadError."""
    found = _File(count=None if tokenizer is None else tokenizer_count(tokenizer))
    for item in items(file.path, "conversations"):
        place = f"conversation {item.number}" if item.in_list else f"the conversation in line {item.number}"
        found.add(f"{place} of {file.path}", item.encoded)
    found.end()
    return found


class Conversations:
    """Those of a file that a run holds, `sessions` of them (None: all).

    The last ones serve the warm-up, which sends their first turns. With `repeat` all are held, as often as it takes,
    and the warm-up sends the last of them too. output_tokens: of a reply whose length is not known otherwise.
    tokenizer: counts text, as a server counts it that adds nothing. Raises WorkloadError.
    """

    def __init__(
        self,
        path: Path,
        output_tokens: int,
        warmup: int,
        *,
        repeat: bool = False,
        tokenizer: str | None = None,
        sessions: int | None = None,
    ) -> None:
        self._file = read_file(stamp(path), tokenizer)
        self._output_tokens = output_tokens
        self._warmup = warmup
        self.left_out = self._file.left_out
        found = len(self._file.conversations)
        if not found:
            but = f" that can be sent; left out are {self.left_out}" if str(self.left_out) else ""
            raise WorkloadError(f"{path} holds no conversations{but}; name another --dataset.")
        self._held = found if repeat else found - warmup
        if self._held <= 0:
            raise WorkloadError(
                f"{path} holds {counted(found, 'conversation')} and --warmup {warmup} takes as many; add "
                "conversations, or hold these again with --repeat-dataset."
            )
        if sessions is not None and sessions > self._held and not repeat:
            raise WorkloadError(
                f"{path} holds {counted(self._held, 'conversation')} for {sessions} --sessions, beside those of the "
                "warm-up; lower --sessions, or hold conversations again with --repeat-dataset."
            )
        self.sessions = self._held if sessions is None else sessions
        self.knows_lengths = self._file.count is not None

    @property
    def counts(self) -> tuple[int, ...]:
        """Turns of each conversation that is held, before one comes again."""
        return tuple(len(self._file.conversations[index]) for index in range(min(self._held, self.sessions)))

    @property
    def delays_ms(self) -> tuple[int, ...]:
        """Before each turn of these, -1 where the file does not say; empty where it never does."""
        held = range(min(self._held, self.sessions))
        delays = tuple(turn.delay_ms for index in held for turn in self._file.conversations[index])
        return delays if any(delay >= 0 for delay in delays) else ()

    def __len__(self) -> int:
        """How many prompts are measured before one comes again."""
        return sum(map(len, self._file.conversations[: self._held]))

    def turn(self, phase: str, session: int, turn: int) -> Turn:
        """A turn of a conversation that is held again and again; the warm-up has those from the end of the file."""
        return self._file.conversations[self._index(phase, session)][turn]

    def lengths(self) -> list[Shape]:
        """What each turn adds, and how long its reply is, of one conversation after the other before one comes again;
        0 prompt tokens: not known."""
        return list(itertools.chain.from_iterable(map(self._lengths, range(min(self._held, self.sessions)))))

    def _lengths(self, index: int) -> list[Shape]:
        return [
            Shape(prompt_tokens, turn.output_tokens or reply_tokens or self._output_tokens)
            for turn, (prompt_tokens, reply_tokens) in zip(
                self._file.conversations[index], self._file.lengths(index), strict=True
            )
        ]

    def longest_tokens(self) -> int | None:
        """Tokens of the longest conversation with its replies, the warm-up's too; None where lengths are not known."""
        if not self.knows_lengths:
            return None
        held = set(range(min(self._held, self.sessions)))
        indices = held | {self._index("warmup", number) for number in range(self._warmup)}
        return max(sum(prompt + reply for prompt, reply, *_ in self._lengths(index)) for index in indices)

    def played(self, turns: Turns) -> PlayedConversations:
        return PlayedConversations(self, turns)

    def _index(self, phase: str, session: int) -> int:
        if phase == "warmup":
            return (-1 - session) % len(self._file.conversations)
        return session % self._held


class _Added:
    """What each turn of the conversations adds, and how long its reply is; 0 prompt tokens: not known."""

    first_tokens: Law | None = None

    def __init__(self, shapes: list[Shape]) -> None:
        """shapes: the conversations' before one comes again, one after the other."""
        self._shapes = shapes

    def lengths(self, number: int) -> Shape:
        return self._shapes[number % len(self._shapes)]

    def shape(self, number: int, member: int | None = None) -> Shape:
        """As `lengths`: conversations share nothing that is known."""
        return self.lengths(number)

    def total_tokens(self, requests: int) -> NDArray[np.int64]:
        """Prompt and reply of the first turns together; shape (requests,)."""
        return np.resize(np.array([prompt + reply for prompt, reply, *_ in self._shapes], np.int64), requests)


class PlayedConversations:
    """Conversations as the requests of a run. All lengths are known, or counted, before its clock starts."""

    def __init__(self, conversations: Conversations, turns: Turns) -> None:
        self.turns = turns
        self._conversations = conversations
        self._added = _Added(conversations.lengths())
        self._shapes = SessionShapes(turns, self._added) if conversations.knows_lengths else None

    def shape(self, number: int) -> Shape:
        """All that was said and the reply, when every reply is as long as was asked. 0 prompt tokens: not known. A
        warm-up that has more requests begins again."""
        number %= self.turns.total
        return self._added.lengths(number) if self._shapes is None else self._shapes.shape(number)

    def own(self, number: int) -> Shape:
        """What a turn adds, and its reply."""
        return self._added.lengths(number % self.turns.total)

    def prompt(self, phase: str, number: int) -> Prompt:
        """What a turn adds; of the warm-up's `number`-th conversation the first. Only the server knows how long it is:
        it adds tokens of its own."""
        session, turn = (number, 0) if phase == "warmup" else self.turns.place(number)
        added = self._conversations.turn(phase, session, turn)
        messages = (("system", added.system), ("user", added.text)) if added.system else ()
        return Prompt(n_tokens=0, text=added.whole_text, messages=messages)

    def id(self, number: int) -> int:
        return number
