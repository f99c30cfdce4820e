"""A call in progress: its conversation so far, and what is known about its length in tokens.

Not here: what its turns ask and run (``rlm_loop.py``), and what all calls of a run share
(``run_state.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ramify.clients.base import Client, KnownPrefix, Request, max_tokens_of
from ramify.types.message import Message, Reply, encodable
from ramify.types.trajectory import CallKind, Parent

if TYPE_CHECKING:
    from ramify.sandbox.base import SharedContext


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
        before: Sequence[Message] = (),
        keeps_ids: bool = True,
    ) -> None:
        """With ``keeps_ids=False``, replies are recorded without token ids."""
        self.id = id
        self.kind = kind
        self.client = client
        self.depth = depth
        self.question = encodable(question)
        self.parent = parent
        self.context = context
        self.before = tuple(before)
        """Messages of the caller before the question."""
        self._keeps_ids = keeps_ids
        self.messages: list[Message] = []
        """Prompt and reply of every turn so far."""
        self.turn = 0
        """Index of the next turn."""
        self.num_turns_before = 0
        """For a branch: turns of the original call before the branch point."""
        self.shrunk: tuple[int, str] | None = None
        """(tokens of the next reply, the limit that does not allow more), in a small budget."""
        self.num_children = 0
        self.num_forks = 0
        self.surprisals: list[float | None] = []
        """Mean of -log-probability per sampled token (nats) of each reply so far; None for a reply
        without log-probabilities."""
        self._counted: tuple[int, int] | None = None
        """(number of messages, their tokens as counted by the server) up to the last reply."""
        self._max_tokens = [0]
        """Number of messages -> upper bound on their tokens, as far as it is known."""
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

    def max_input_tokens(self, reused: int, new: Request) -> int:
        """Upper bound on the prompt of a request that has the first ``reused`` messages before
        those of ``new``: the server's own count for the messages it has seen, and bytes for the
        others."""
        num_new = new.max_input_tokens()
        by_bytes = self._max_tokens_of_first(reused) + num_new
        if self._counted is None or self._counted[0] != reused:
            return by_bytes
        # 4 per message: a template may place its role markers around a reply differently from how
        # the server counted them.
        return min(by_bytes, self._counted[1] + 4 * reused + num_new)

    def _max_tokens_of_first(self, num: int) -> int:
        """Upper bound on the tokens of the first ``num`` messages, each of which is read once."""
        bounds = self._max_tokens
        for message in self.messages[len(bounds) - 1 : num]:
            bounds.append(bounds[-1] + max_tokens_of(message))
        return bounds[num]

    def continue_from(self, call: LiveCall) -> None:
        """Start with the conversation of ``call``, as the next question in the same session
        does."""
        self.messages = list(call.messages)
        self.surprisals = list(call.surprisals)
        self._counted = call._counted
        self._max_tokens = list(call._max_tokens)
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
        if not self._keeps_ids:
            names = ("prompt_ids", "token_ids", "logprobs", "versions", "kept", "routes")
            return msgspec.structs.replace(reply, **dict.fromkeys(names)), 0
        if reply.prompt_ids is None:
            return reply, 0
        reused_ids = _num_common(self._ids, reply.prompt_ids)
        return msgspec.structs.replace(reply, prompt_ids=reply.prompt_ids[reused_ids:]), reused_ids

    def advance(self, reused: int, new: Sequence[Message], reply: Reply, reused_ids: int) -> None:
        """Finish a turn. Its prompt was the first ``reused`` messages followed by ``new``;
        ``reply`` comes from ``without_path``."""
        self.messages = [*self.messages[:reused], *new, reply.message]
        del self._max_tokens[reused + 1 :]
        self.turn += 1
        logprobs = reply.logprobs
        self.surprisals.append(-sum(logprobs) / len(logprobs) if logprobs else None)
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
    differ = (index for index, (a, b) in enumerate(zip(path, prompt, strict=False)) if a != b)
    return next(differ, min(len(path), len(prompt)))  # a question that is asked again is a prefix
