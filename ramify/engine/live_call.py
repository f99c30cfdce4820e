"""Represent a model call in progress and its message history.

The history also has token counts and token ids, as far as they are known.

A fork of a call, and the next question of a conversation, continue with a copy of the history. What
the turns of a call ask and run is decided in ``rlm_call.py``; what all calls of a run share is in
``shared_run_state.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ramify.clients.base import Client, KnownPrefix, Request, message_tokens_upper_bound
from ramify.types.message import Message, Reply, escape_surrogates
from ramify.types.trajectory import CallKind, CallSite

if TYPE_CHECKING:
    from ramify.sandbox.base import SharedContextValue


class CallMessageHistory(msgspec.Struct):
    """The messages of a call so far, and their token counts and token ids if known."""

    keeps_ids: bool = True
    """False if replies are recorded without token ids."""
    messages: list[Message] = []
    """Prompt and reply messages of every turn."""
    surprisals: list[float | None] = []
    """Mean of -log-probability per sampled token (nats) of each reply; None for a reply without
    log-probabilities."""
    counted: tuple[int, int] | None = None
    """Number of messages up to the last reply, and their tokens as counted by the server."""
    max_tokens: list[int] = msgspec.field(default_factory=lambda: [0])
    """Number of messages -> upper bound on their tokens, as far as it is known."""
    bounded_for: str = ""
    """Model for which ``max_tokens`` holds."""
    ids: tuple[int, ...] = ()
    """Token ids of the whole conversation, as the model received and sampled them. Empty if the
    last reply came without ids."""
    replies: list[tuple[int, int]] = []
    """For each reply: the numbers of messages and of token ids up to and including it."""

    def copy(self) -> CallMessageHistory:
        """Return an independent copy of the history, so that the conversation can branch."""
        return msgspec.structs.replace(
            self,
            messages=list(self.messages),
            surprisals=list(self.surprisals),
            max_tokens=list(self.max_tokens),
            replies=list(self.replies),
        )

    def up_to(self, num_messages: int, num_turns: int) -> CallMessageHistory:
        """Return a copy with only the first ``num_messages`` messages and ``num_turns`` turns.

        Correct only if no later turn has changed earlier messages.
        """
        if num_messages == len(self.messages):
            return self.copy()
        replies = [each for each in self.replies if each[0] <= num_messages]
        is_known = bool(replies) and replies[-1][0] == num_messages
        return msgspec.structs.replace(
            self,
            messages=self.messages[:num_messages],
            surprisals=self.surprisals[:num_turns],
            max_tokens=self.max_tokens[: num_messages + 1],
            counted=None,
            ids=self.ids[: replies[-1][1]] if is_known else (),
            replies=replies if is_known else [],
        )

    def input_tokens_upper_bound(self, reused: int, new: Request) -> int:
        """Return an upper bound on the prompt tokens of a request.

        Its prompt is the first ``reused`` messages of the history followed by ``new``. Messages
        whose tokens the server has already counted are counted as it did. The bound for the others
        is their number of bytes.
        """
        num_new = new.max_input_tokens()
        by_bytes = self._max_tokens_of_first(reused, new.model) + num_new
        if self.counted is None or self.counted[0] != reused:
            return by_bytes
        # 4 per message: a template may place its role markers around a reply differently from how
        # the server counted them.
        return min(by_bytes, self.counted[1] + 4 * reused + num_new)

    def _max_tokens_of_first(self, num: int, model: str) -> int:
        """Return an upper bound on the tokens that ``model`` counts in the first ``num`` messages.

        Results are cached until another model is asked for.
        """
        if model != self.bounded_for:
            self.bounded_for, self.max_tokens = model, [0]
        bounds = self.max_tokens
        for message in self.messages[len(bounds) - 1 : num]:
            bounds.append(bounds[-1] + message_tokens_upper_bound(message, model))
        return bounds[num]

    def server_counted_tokens(self) -> int:
        """Return the server's token count for the conversation so far, or 0 if it reported none."""
        return self.counted[1] if self.counted else 0

    def known_prefix_ids(self, reused: int) -> KnownPrefix | None:
        """Return the token ids of the longest known prefix of the conversation.

        The prefix ends with a reply and lies within the first ``reused`` messages. Return None if
        there is none.
        """
        for num_messages, num_ids in reversed(self.replies):
            if num_messages <= reused:
                return KnownPrefix(num_messages, self.ids[:num_ids])
        return None

    def strip_stored_prompt_ids(self, reply: Reply) -> tuple[Reply, int]:
        """Remove from ``reply`` the prompt token ids that the call already stores.

        Return the shortened reply and the number of ids removed. If the call does not keep token
        ids, remove all per-token data.
        """
        if not self.keeps_ids:
            names = ("prompt_ids", "token_ids", "logprobs", "versions", "kept", "routes")
            per_token = dict.fromkeys((*names, "top_logprobs"))
            return msgspec.structs.replace(reply, **per_token), 0
        if reply.prompt_ids is None:
            return reply, 0
        reused_ids = _num_common(self.ids, reply.prompt_ids)
        return msgspec.structs.replace(reply, prompt_ids=reply.prompt_ids[reused_ids:]), reused_ids

    def add_turn(self, reused: int, new: Sequence[Message], reply: Reply, reused_ids: int) -> None:
        """Add a finished turn to the call's history.

        The prompt of the turn was the first ``reused`` messages of the history followed by ``new``.
        ``reply`` and ``reused_ids`` come from ``strip_stored_prompt_ids``.
        """
        self.messages = [*self.messages[:reused], *new, reply.message]
        del self.max_tokens[reused + 1 :]
        logprobs = reply.logprobs
        self.surprisals.append(-sum(logprobs) / len(logprobs) if logprobs else None)
        self.counted = (
            None
            if reply.usage.unknown_calls or not reply.usage.calls
            else (len(self.messages), reply.usage.total_tokens)
        )
        if reply.prompt_ids is None or reply.token_ids is None:
            self.ids, self.replies = (), []
            return
        self.ids = (*self.ids[:reused_ids], *reply.prompt_ids, *reply.token_ids)
        remaining = [
            (messages, ids)
            for messages, ids in self.replies
            if messages <= reused and ids <= reused_ids
        ]
        self.replies = [*remaining, (len(self.messages), len(self.ids))]


class LiveCall:
    """A model call in progress: its question, its place in the call tree, and its conversation."""

    def __init__(
        self,
        id: str,
        kind: CallKind,
        client: Client,
        depth: int,
        question: str,
        *,
        parent: CallSite | None = None,
        context: SharedContextValue | None = None,
        history: CallMessageHistory | None = None,
    ) -> None:
        """Create a call that has not taken a turn yet.

        To continue an earlier call, pass its messages as ``history``; the new call may change that
        object.
        """
        self.id = id
        self.kind = kind
        self.client = client
        self.depth = depth
        self.question = escape_surrogates(question)
        self.parent = parent
        self.context = context
        self.history = CallMessageHistory() if history is None else history
        self.turn = 0
        """Index of the next turn."""
        self.num_turns_before = 0
        """For a branch: the number of turns that the original call took before the branch point."""
        self.shrunk: tuple[int, str] | None = None
        """Token limit of the next reply, and the name of the budget limit that lowered it because
        little is left. None if it was not lowered."""
        self.num_children = 0
        self.num_forks = 0

    @property
    def messages(self) -> Sequence[Message]:
        """All messages of the conversation so far: the prompt and the reply of every turn."""
        return self.history.messages

    @property
    def mean_surprisals(self) -> Sequence[float | None]:
        """For each reply so far, the mean negative log-probability per sampled token, in nats.

        None for a reply without log-probabilities.
        """
        return self.history.surprisals

    @property
    def is_branch(self) -> bool:
        return ":" in self.id

    def assign_child_id(self) -> str:
        """Assign and return the id of the next child call.

        Ids follow the order in which children are created, which a replay can repeat, rather than
        the order in which they finish.
        """
        self.num_children += 1
        return f"{self.id}.{self.num_children - 1}"

    def peek_child_id(self) -> str:
        """Return the id that the next child call will get, without assigning it."""
        return f"{self.id}.{self.num_children}"

    def fork(self, num_turns: int | None = None, num_messages: int = 0) -> LiveCall:
        """Return an independent copy of this call in its current state.

        If ``num_turns`` is given, the copy has only the first ``num_turns`` turns, whose history
        had ``num_messages`` messages.
        """
        self.num_forks += 1
        num_before = self.num_turns_before + (self.turn if num_turns is None else num_turns)
        call = LiveCall(
            f"{self.id}:{self.num_forks}",
            self.kind,
            self.client,
            self.depth,
            self.question,
            context=self.context,
            history=self.history.copy()
            if num_turns is None
            else self.history.up_to(num_messages, num_before),
        )
        call.num_turns_before = num_before
        return call

    def finish_turn(
        self, reused: int, new: Sequence[Message], reply: Reply, reused_ids: int
    ) -> None:
        """Add a finished turn to the history and begin the next one.

        The arguments are those of ``CallMessageHistory.add_turn``.
        """
        self.history.add_turn(reused, new, reply, reused_ids)
        self.turn += 1


def _num_common(path: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Return the length of the common prefix of two sequences of token ids."""
    if prompt[: len(path)] == path:
        return len(path)
    differ = (index for index, (a, b) in enumerate(zip(path, prompt, strict=False)) if a != b)
    return next(differ, min(len(path), len(prompt)))  # a question that is asked again is a prefix
