"""A call in progress, and its outcome. The recorded form is ``types.trajectory.Call``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.clients.base import Client, KnownPrefix, Request
from ramify.errors import SandboxError
from ramify.sandbox.base import SharedContext
from ramify.types.message import Message, Reply, encodable
from ramify.types.trajectory import CallKind, ContextRef, Parent, Stop


class CallOutcome(msgspec.Struct, frozen=True):
    """Outcome of a call."""

    stop: Stop
    answer: Any = None
    error: str | None = None
    failure: BaseException | None = None
    """Exception that ended the call, if any."""


class LiveCall:
    """A call in progress: its conversation so far and what is known about its length in tokens."""

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
        """For a branch: turns of the original call before the branch point."""
        self.num_children = 0
        self.num_forks = 0
        self._counted: tuple[int, int] | None = None
        """(number of messages, their tokens as counted by the server) up to the last reply."""
        self._ids: tuple[int, ...] = ()
        """Token path: ids of the whole conversation so far, as the model received and sampled them.
        Empty if the last reply came without ids."""
        self._replies: list[tuple[int, int]] = []
        """(number of messages, number of ids) up to and including each reply of the path."""

    @property
    def is_branch(self) -> bool:
        return ":" in self.id

    def next_child(self) -> str:
        """Return the id of the next child. Ids follow the order of creation, which a replay
        repeats; the order of completion is not reproducible."""
        self.num_children += 1
        return f"{self.id}.{self.num_children - 1}"

    def peek_child(self) -> str:
        """Return what ``next_child`` would."""
        return f"{self.id}.{self.num_children}"

    def forked(self) -> LiveCall:
        """Return a new call that continues this one from here, as another branch of it."""
        self.num_forks += 1
        call = LiveCall(
            f"{self.id}:{self.num_forks}",
            "rlm",
            self.client,
            self.depth,
            self.question,
            context=self.context,
        )
        call.continue_from(self)
        call.num_turns_before = self.num_turns_before + self.turn
        return call

    def max_input_tokens(self, request: Request, reused: int) -> int:
        """Upper bound on the request's prompt: the server's own count for the messages it has seen,
        and bytes for the new ones."""
        by_bytes = request.max_input_tokens()
        if self._counted is None or self._counted[0] != reused:
            return by_bytes
        new = msgspec.structs.replace(request, messages=request.messages[reused:])
        # 4 per message: a template may place its role markers around a reply differently from how
        # the server counted them.
        return min(by_bytes, self._counted[1] + 4 * reused + new.max_input_tokens())

    def continue_from(self, call: LiveCall) -> None:
        """Start with the conversation of ``call``, as the next question in the same session
        does."""
        self.messages = list(call.messages)
        self._counted = call._counted
        self._ids = call._ids
        self._replies = list(call._replies)

    def known_tokens(self) -> int:
        """Tokens of the conversation so far as counted by the server; 0 if it did not report
        them."""
        return self._counted[1] if self._counted else 0

    def known_ids(self, reused: int) -> KnownPrefix | None:
        """Ids of the longest prefix of the first ``reused`` messages that ends with a reply."""
        for num_messages, num_ids in reversed(self._replies):
            if num_messages <= reused:
                return KnownPrefix(num_messages, self._ids[:num_ids])
        return None

    def without_path(self, reply: Reply) -> tuple[Reply, int]:
        """Return (``reply`` with only the new prompt ids, number of ids of the path that its prompt
        reuses)."""
        if reply.prompt_ids is None:
            return reply, 0
        reused_ids = _num_common(self._ids, reply.prompt_ids)
        return msgspec.structs.replace(reply, prompt_ids=reply.prompt_ids[reused_ids:]), reused_ids

    def advance(self, reused: int, new: Sequence[Message], reply: Reply, reused_ids: int) -> None:
        """Finish a turn. Its prompt was the first ``reused`` messages followed by ``new``;
        ``reply`` comes from ``without_path``."""
        self.messages = [*self.messages[:reused], *new, reply.message]
        self.turn += 1
        self._counted = (
            None
            if reply.usage.unknown_calls or not reply.usage.calls
            else (len(self.messages), reply.usage.total_tokens)
        )
        if reply.prompt_ids is None or reply.token_ids is None:
            self._ids, self._replies = (), []
            return
        self._ids = (*self._ids[:reused_ids], *reply.prompt_ids, *reply.token_ids)
        remaining = [
            (messages, ids)
            for messages, ids in self._replies
            if messages <= reused and ids <= reused_ids
        ]
        self._replies = [*remaining, (len(self.messages), len(self._ids))]


def _num_common(path: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Length of the common prefix of both."""
    if prompt[: len(path)] == path:
        return len(path)
    return next(index for index, (a, b) in enumerate(zip(path, prompt, strict=False)) if a != b)


def context_ref(context: SharedContext | None) -> ContextRef | None:
    return None if context is None else ContextRef(context.digest, context.chars, context.kind)


def jsonable(value: Any) -> Any:
    """Return ``value`` in its recorded form: anything that JSON cannot represent becomes text."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_dumped)
        msgspec.json.decode(msgspec.json.encode(plain))  # as a reader of the journal will do
    except UnicodeEncodeError:  # a lone surrogate, which a journal writes as an escape
        return plain
    except Exception:  # noqa: BLE001 -- a model chose the value, which may be anything
        return _text_of(value)
    return plain


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 -- such as an integer with too many digits to print
        return f"(a value of type {type(value).__name__} that has no text: {type(error).__name__})"


def _dumped(value: Any) -> Any:
    """Return the fields of a pydantic model; msgspec supports all other serializable types."""
    if not hasattr(value, "model_dump"):
        raise NotImplementedError
    return value.model_dump(mode="json")


def typed_record(answer: Any) -> dict[str, Any] | None:
    """Pack an answer whose type JSON would change; None for others, and if no session can hold
    it."""
    if _is_plain(answer):
        return None
    try:
        return SharedContext(answer).pack()
    except SandboxError:  # of a type of the caller, which gives it again
        return None


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is the same after it was written as JSON and read."""
    match value:
        case None | str() | bool() | int():
            return True
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_plain, value))
        case dict():
            return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
        case _:
            return False
