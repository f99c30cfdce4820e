"""A call while it runs, and how it ended. What is written down of it is ``types.trajectory.Call``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.clients.base import Client, Request
from ramify.sandbox.context import SharedContext
from ramify.types.message import Message, Reply, encodable
from ramify.types.trajectory import CallKind, ContextRef, Parent, Stop


class Outcome(msgspec.Struct, frozen=True):
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
        self.num_children = 0
        self._known: tuple[int, int] | None = None

    @property
    def is_branch(self) -> bool:
        return ":" in self.id

    def next_child(self) -> str:
        """Ids are dealt out by order of issue, which a replay repeats; completion has no order."""
        self.num_children += 1
        return f"{self.id}.{self.num_children - 1}"

    def max_input_tokens(self, request: Request, reused: int) -> int:
        """An upper bound on the request's prompt: what the server counted of what it has seen, bytes for the rest."""
        by_bytes = request.max_input_tokens()
        if self._known is None or self._known[0] != reused:
            return by_bytes
        new = msgspec.structs.replace(request, messages=request.messages[reused:])
        # 4 per message: a template may put its role markers differently around a reply than the server counted them.
        return min(by_bytes, self._known[1] + 4 * reused + new.max_input_tokens())

    def go_on_from(self, call: LiveCall) -> None:
        """Begin with the conversation of ``call``, as the next question over the same session does."""
        self.messages, self._known = list(call.messages), call._known

    def known_tokens(self) -> int:
        """Tokens of the conversation so far as the server counted them; 0 where it did not."""
        return self._known[1] if self._known else 0

    def advance(self, prompt: Sequence[Message], reply: Reply) -> None:
        self.messages = [*prompt, reply.message]
        self.turn += 1
        self._known = None if reply.usage.unknown_calls else (len(self.messages), reply.usage.total_tokens)


def context_ref(context: SharedContext | None) -> ContextRef | None:
    return None if context is None else ContextRef(context.digest, context.chars, context.kind)


def jsonable(value: Any) -> Any:
    """``value`` as it is written down: what JSON has no form for becomes text."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_dumped)
    except (TypeError, ValueError):
        return str(value)


def _dumped(value: Any) -> Any:
    """A pydantic model's fields; msgspec knows all else that has a form."""
    if not hasattr(value, "model_dump"):
        raise NotImplementedError
    return value.model_dump(mode="json")
