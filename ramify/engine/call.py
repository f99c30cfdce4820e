"""A call while it runs, and how it ended. What is written down of it is
``types.trajectory.Call``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.clients.base import Client, KnownPrefix, Request
from ramify.sandbox.context import SharedContext
from ramify.types.message import Message, Reply, encodable
from ramify.types.trajectory import CallKind, ContextRef, Parent, Stop


class CallOutcome(msgspec.Struct, frozen=True):
    """How a call ended."""

    stop: Stop
    answer: Any = None
    error: str | None = None
    failure: BaseException | None = None
    """What was raised, where that ended the call."""


class LiveCall:
    """A call while it runs: its conversation so far and what is known about its length."""

    def __init__(
        self,
        id: str,
        kind: CallKind,
        client: Client,
        depth: int,
        question: str,
        *,
        parent: Parent | None = None,
        context: SharedContext | None = None,
    ) -> None:
        self.id = id
        self.kind = kind
        self.client = client
        self.depth = depth
        self.question = encodable(question)
        self.parent = parent
        self.context = context
        self.messages: list[Message] = []
        """Prompt and reply of every turn so far."""
        self.turn = 0
        """Index of the next turn."""
        self.num_turns_before = 0
        """Turns of the call that this one is a branch of, up to where they part."""
        self.num_children = self.num_forks = 0
        self._counted: tuple[int, int] | None = None
        """(messages, their tokens as the server counted them) up to the last reply."""
        self._ids: tuple[int, ...] = ()
        """The path: ids of the whole conversation so far, as the model was given and sampled them;
        empty where the last reply came without."""
        self._replies: list[tuple[int, int]] = []
        """(messages, ids) up to and including each reply of the path."""

    @property
    def is_branch(self) -> bool:
        return ":" in self.id

    def next_child(self) -> str:
        """Ids are dealt out by order of issue, which a replay repeats; completion has no order."""
        self.num_children += 1
        return f"{self.id}.{self.num_children - 1}"

    def next_fork(self) -> str:
        self.num_forks += 1
        return f"{self.id}:{self.num_forks}"

    def max_input_tokens(self, request: Request, reused: int) -> int:
        """An upper bound on the request's prompt: what the server counted of what it has seen,
        bytes for the rest."""
        by_bytes = request.max_input_tokens()
        if self._counted is None or self._counted[0] != reused:
            return by_bytes
        new = msgspec.structs.replace(request, messages=request.messages[reused:])
        # 4 per message: a template may put its role markers differently around a reply than the
        # server counted them.
        return min(by_bytes, self._counted[1] + 4 * reused + new.max_input_tokens())

    def go_on_from(self, call: LiveCall) -> None:
        """Begin with the conversation of ``call``, as the next question over the same session
        does."""
        self.messages, self._counted = list(call.messages), call._counted
        self._ids, self._replies = call._ids, list(call._replies)

    def known_tokens(self) -> int:
        """Tokens of the conversation so far as the server counted them; 0 where it did not."""
        return self._counted[1] if self._counted else 0

    def known_ids(self, reused: int) -> KnownPrefix | None:
        """The ids of as many of the first ``reused`` messages as end with a reply."""
        for num_messages, num_ids in reversed(self._replies):
            if num_messages <= reused:
                return KnownPrefix(num_messages, self._ids[:num_ids])
        return None

    def without_path(self, reply: Reply) -> tuple[Reply, int]:
        """(``reply`` with only the prompt ids that are new, how many of the path so far its prompt
        begins with)."""
        if reply.prompt_ids is None:
            return reply, 0
        reused_ids = _num_common(self._ids, reply.prompt_ids)
        return msgspec.structs.replace(reply, prompt_ids=reply.prompt_ids[reused_ids:]), reused_ids

    def advance(self, reused: int, new: Sequence[Message], reply: Reply, reused_ids: int) -> None:
        """A turn is over: its prompt was the first ``reused`` messages and ``new``; ``reply`` is as
        ``without_path`` gives it."""
        self.messages = [*self.messages[:reused], *new, reply.message]
        self.turn += 1
        self._counted = (
            None if reply.usage.unknown_calls else (len(self.messages), reply.usage.total_tokens)
        )
        if reply.prompt_ids is None or reply.token_ids is None:
            self._ids, self._replies = (), []
            return
        self._ids = (*self._ids[:reused_ids], *reply.prompt_ids, *reply.token_ids)
        kept = [
            (messages, ids)
            for messages, ids in self._replies
            if messages <= reused and ids <= reused_ids
        ]
        self._replies = [*kept, (len(self.messages), len(self._ids))]


def _num_common(path: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """How many ids both begin with."""
    if prompt[: len(path)] == path:
        return len(path)
    return next(index for index, (a, b) in enumerate(zip(path, prompt, strict=False)) if a != b)


def context_ref(context: SharedContext | None) -> ContextRef | None:
    return None if context is None else ContextRef(context.digest, context.chars, context.kind)


def jsonable(value: Any) -> Any:
    """``value`` as it is written down: what JSON has no form for becomes text."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_dumped)
        msgspec.json.decode(msgspec.json.encode(plain))  # as whoever reads a journal will
    except UnicodeEncodeError:  # half a surrogate pair: a journal writes its escape
        return plain
    except Exception:  # noqa: BLE001 -- a model chose the value, which may be anything
        return _text_of(value)
    return plain


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 -- such as an integer of more digits than Python writes
        return f"(a value of type {type(value).__name__} that has no text: {type(error).__name__})"


def _dumped(value: Any) -> Any:
    """A pydantic model's fields; msgspec knows all else that has a form."""
    if not hasattr(value, "model_dump"):
        raise NotImplementedError
    return value.model_dump(mode="json")
