"""Match an agent's request to the earlier conversation turn that it continues.

If there is none, determine why the request begins a new call.

    request ─┬─ its messages are those of the last turn, plus new ones ──> its next turn
             └─ else it is rendered to token ids; a message that is an earlier reply keeps the
                ids that were sampled for it
                  ├─ the ids begin with those of a call's last turn ──> the call's next turn
                  ├─ … of an earlier turn, or of one that waits ──────> a fork of the call
                  └─ … of none ───────────────────────────────────────> a new call

Sampled text is therefore never tokenized again, unless a client has changed it. If this process has
no client that renders prompts to token ids (``Client``), messages are compared instead of ids.
docs/agents.md explains the rule with pictures. The requests themselves are handled by
``external_conversations.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ramify.clients.base import Client, KnownPrefix, PromptRenderer, Request, Tool
from ramify.engine.live_call import LiveCall
from ramify.types.message import Message
from ramify.types.trajectory import NewAgentCallReason, Stop


class AgentTurn(msgspec.Struct, frozen=True):
    """One turn of an agent's conversation: the reply, and the conversation's length after it.

    The length is given both in messages and in token ids, counted from the beginning.
    """

    num_messages: int
    """Number of messages up to and including this turn's reply."""
    num_prompt_ids: int
    """Number of token ids in the turn's prompt; 0 if they are unknown."""
    num_ids: int
    """Number of token ids in the prompt and the reply together; 0 if they are unknown."""
    reply: Message
    """The reply in its recorded form."""


class ExternallyDrivenCall(msgspec.Struct):
    """A conversation of an external agent, recorded as one call of the run.

    Its requests come from code outside the engine.
    """

    call: LiveCall
    tools: tuple[Tool, ...]
    """Tools that the requests of this call offer to the model."""
    learns: bool
    """Whether the replies of this call are used for training."""
    num_inherited: int = 0
    """Number of messages that a fork shares with the call it was forked from; 0 for any other
    call."""
    origin: tuple[ExternallyDrivenCall, int] | None = None
    """For a fork: the call that it was forked from, and how many of that call's own turns it
    shares."""
    turns: list[AgentTurn] = []
    asked: tuple[Message, ...] | None = None
    """New messages of the request that is waiting for a reply; None if no request is waiting."""
    first: tuple[Message, ...] = ()
    """New messages of the first request of this call."""
    stop: Stop = Stop.FINAL
    """The limit that ended the call; ``FINAL`` if no limit did."""

    def num_messages_after_turns(self, num_turns: int) -> int:
        """Return how many messages the conversation has once ``num_turns`` turns have ended.

        For a fork, the inherited messages are included, although their turns do not count.
        """
        return self.turns[num_turns - 1].num_messages if num_turns else self.num_inherited

    def can_continue_after(self, num_turns: int) -> bool:
        """Return True if a new request may continue the conversation after its first ``num_turns``
        turns.

        This requires that the call has no later turn, and that no request is waiting for its reply.
        """
        return num_turns == len(self.turns) and self.asked is None

    def messages_added_at_turn(self, num_turns: int) -> Sequence[Message] | None:
        """Return the messages that the request for turn ``num_turns`` added to the conversation.

        Turns are indexed from 0. Returns None if no such request has been sent.
        """
        if num_turns == len(self.turns):
            return self.asked if self.turns or self.asked is not None else self.first
        end = self.turns[num_turns].num_messages - 1
        return self.call.messages[self.num_messages_after_turns(num_turns) : end]


class ConversationMatch(NamedTuple):
    """The earlier call and turn that an agent's request continues, or why it begins a new call."""

    call: ExternallyDrivenCall | None
    """The call whose turns form the beginning of the request's prompt; None if there is no such
    call."""
    num_turns: int
    """Number of the call's own turns that the prompt begins with."""
    start: int
    """Number of the request's first messages that the matched turns of ``call`` cover."""
    known: KnownPrefix | None
    """Token ids of the request's first messages, up to the last reply whose sampled ids are
    known."""
    cause: NewAgentCallReason | None
    """Why a new call begins; None if the request is the next turn of ``call``."""


class AgentConversations:
    """The conversations of one external agent with the models of a run.

    A new request is matched against them to find the one that it continues.
    """

    def __init__(self) -> None:
        self.calls: list[ExternallyDrivenCall] = []

    def match_conversation(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...],
        client: Client,
        depth: int,
        learns: bool,
    ) -> ConversationMatch:
        """Find the call and the turn that a request with ``messages`` continues, if any.

        ``client`` is the model client that would receive the request. Raises ConfigError if its
        chat template cannot render the messages.
        """
        calls = [each for each in self.calls if (each.call.depth, each.learns) == (depth, learns)]
        # Replies without ids are compared as messages.
        rendering: PromptRenderer | None = getattr(client, "rendering", None) if learns else None
        sent = _sent_before(calls, messages, tools, may_differ=rendering is None)
        has_reply = any(message.role == "assistant" for message in messages)
        is_known = sent.call is not None and not any(
            message.role == "assistant" for message in messages[sent.start :]
        )
        # Rendering a prompt costs time, so it is avoided if messages alone give the same result.
        if rendering is None or not has_reply or not calls:
            place = sent
        elif is_known and rendering.is_append_only:
            place = sent  # the rendered request would begin with the ids of that turn
        else:
            place = _by_ids(calls, messages, tools, rendering, sent)
        call = place.call
        if call is not None and place.num_turns and call.can_continue_after(place.num_turns):
            return place._replace(cause=None)
        if _is_repeated(place, messages):
            assert call is not None
            is_unanswered = not call.turns and call.asked is None
            return place._replace(cause=None if is_unanswered else NewAgentCallReason.REPEATED)
        if call is not None and not place.num_turns:
            place = place._replace(call=None)
        return place._replace(cause=_cause(calls, messages, tools, place))


def _sent_before(
    calls: Sequence[ExternallyDrivenCall],
    messages: Sequence[Message],
    tools: tuple[Tool, ...],
    may_differ: bool,
) -> ConversationMatch:
    """Find the recorded conversation that is the longest prefix of a request's ``messages``.

    Only messages are compared, not token ids.
    """
    best, rank = ConversationMatch(None, 0, 0, None, None), (0, 0, 0)
    for each in calls:
        if each.tools != tools:
            continue
        num_common = _num_common(each.call.messages, messages, may_differ)
        num_turns = sum(turn.num_messages <= num_common for turn in each.turns)
        start = each.num_messages_after_turns(num_turns)
        if start > num_common or start >= len(messages):
            continue
        place = ConversationMatch(each, num_turns, start, None, None)
        is_free = bool(num_turns) and each.can_continue_after(num_turns)
        # The longest prefix wins; then a call that can continue; then one that is sent a repeat.
        now = (start, int(is_free), int(_is_repeated(place, messages)))
        if now > rank:
            best, rank = place, now
    return best


def _is_repeated(place: ConversationMatch, messages: Sequence[Message]) -> bool:
    """Return True if a request repeats one that the call has already sent, as in a client retry.

    ``place`` is the call and the turn that the request continues.
    """
    if place.call is None:
        return False
    sent = place.call.messages_added_at_turn(place.num_turns)
    return sent is not None and tuple(sent) == tuple(messages[place.start :])


def _num_common(ours: Sequence[Message], theirs: Sequence[Message], may_differ: bool) -> int:
    """Count the messages that a recorded and a received conversation share at their beginning.

    If ``may_differ`` is True, ``theirs`` may lack the reasoning of a reply.
    """
    num = 0
    for mine, sent in zip(ours, theirs, strict=False):
        if not (_may_be(mine, sent) if may_differ else _is_as_sent(mine, sent)):
            break
        num += 1
    return num


def _is_as_sent(ours: Message, theirs: Message) -> bool:
    """Return True if a client's message ``theirs`` equals our recorded message ``ours``.

    The ids of tool calls are not compared, because each API creates its own ids.
    """
    if ours.role != "assistant" or not ours.tool_calls:
        return ours == theirs
    return _without_ids(ours) == _without_ids(theirs)


def _may_be(ours: Message, theirs: Message) -> bool:
    """Return True if ``theirs`` may be a copy of ``ours`` that lost reasoning or tool-call ids.

    This looser rule applies if no token ids can be compared.
    """
    if theirs.reasoning is None and ours.reasoning is not None:
        ours = msgspec.structs.replace(ours, reasoning=None)
    return _without_ids(ours) == _without_ids(theirs)


def _without_ids(message: Message) -> Message:
    calls = tuple(msgspec.structs.replace(call, id="") for call in message.tool_calls)
    id = None if message.tool_call_id is None else ""
    return msgspec.structs.replace(message, tool_calls=calls, tool_call_id=id)


# --- by ids ---------------------------------------------------------------------------------------


def _by_ids(
    calls: Sequence[ExternallyDrivenCall],
    messages: tuple[Message, ...],
    tools: tuple[Tool, ...],
    rendering: PromptRenderer,
    sent: ConversationMatch,
) -> ConversationMatch:
    """Find, by comparing token ids, the earlier turn that a request continues.

    It is the recorded turn whose prompt and reply form the longest prefix of the request's ids.
    ``sent`` is the result of comparing messages instead.
    """
    chain = _ReplyChain(calls, messages, tools, rendering, sent)
    ids = tuple(rendering.ids(Request(messages, tools=tools, known=chain.known)))
    best: tuple[ExternallyDrivenCall, int] | None = None
    rank = (0, 0)
    for each in calls:
        num_common = _num_common_ids(each.call.history.ids, ids)
        for index, turn in enumerate(each.turns):
            # The longest prefix wins; of equal ones, a turn after which the call can continue.
            now = (turn.num_ids, int(each.can_continue_after(index + 1)))
            if turn.num_ids <= num_common and now > rank and _is_on_path(each, turn):
                best, rank = (each, index), now
    start = None if best is None else chain.num_messages_up_to_reply(best[0].turns[best[1]])
    if best is None or start is None:
        return ConversationMatch(None, 0, 0, chain.known, None)
    known = chain.known
    if known is not None and known.num_messages <= start:
        known = None  # the call itself knows the ids of its turns
    return ConversationMatch(best[0], best[1] + 1, start, known, None)


class _ReplyChain:
    """The earlier model replies in a request and their sampled token ids."""

    def __init__(
        self,
        calls: Sequence[ExternallyDrivenCall],
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...],
        rendering: PromptRenderer,
        sent: ConversationMatch,
    ) -> None:
        self.known: KnownPrefix | None = None
        """Token ids of the request's messages up to the last earlier reply."""
        self._messages = messages
        self._tools = tools
        self._rendering = rendering
        self._ends: list[tuple[int, int]] = []
        """(number of messages, number of ids) up to and including each earlier reply."""
        self._prompts: dict[int, int] = {}
        """Index of each message that is an earlier reply -> number of token ids of the prompt
        before it."""
        begin = 0
        if sent.call is not None and sent.num_turns:
            turn = sent.call.turns[sent.num_turns - 1]
            if _is_on_path(sent.call, turn):
                begin = sent.start
                self._extend_known_prefix(begin - 1, sent.call, turn, ())
        for index in range(max(begin, 1), len(messages)):
            if messages[index].role == "assistant":
                self._add_reply_ids(index, list(_replies_like(messages[index], calls)))

    def _add_reply_ids(
        self, index: int, replies: Sequence[tuple[ExternallyDrivenCall, AgentTurn]]
    ) -> None:
        """Assign the sampled token ids of one of ``replies`` to the message at ``index``.

        All of these replies have the text of the message. The one whose prompt has the same ids is
        preferred, otherwise the latest.
        """
        if not replies:
            return
        prompt = self._prompt(index)
        same = [
            (each, turn)
            for each, turn in replies
            if turn.num_prompt_ids == len(prompt)
            and each.call.history.ids[: turn.num_prompt_ids] == prompt
        ]
        free = [(each, turn) for each, turn in same if each.turns[-1] is turn and not each.asked]
        self._extend_known_prefix(index, *(free or same or replies[-1:])[0], prompt)

    def _extend_known_prefix(
        self, index: int, each: ExternallyDrivenCall, turn: AgentTurn, prompt: tuple[int, ...]
    ) -> None:
        path = each.call.history.ids[: turn.num_ids]
        ids = (*prompt, *path[turn.num_prompt_ids :]) if prompt else path
        self.known = KnownPrefix(index + 1, ids)
        self._ends.append((index + 1, len(ids)))
        self._prompts[index] = len(ids) - (turn.num_ids - turn.num_prompt_ids)

    def _prompt(self, index: int) -> tuple[int, ...]:
        """Return the token ids of the prompt that precedes the reply at message ``index``."""
        known = None
        before = [end for end in self._ends if end[0] <= index]
        if before and self.known is not None:
            num_messages, num_ids = before[-1]
            known = KnownPrefix(num_messages, self.known.ids[:num_ids])
        request = Request(self._messages[:index], tools=self._tools, known=known)
        return tuple(self._rendering.ids(request))

    def num_messages_up_to_reply(self, turn: AgentTurn) -> int | None:
        """Count the request's messages up to and including the reply of ``turn``.

        Returns None if the request does not contain that reply.
        """
        for index, message in enumerate(self._messages):
            if message.role != "assistant" or not index:
                continue
            num_ids = self._prompts.get(index)
            if (len(self._prompt(index)) if num_ids is None else num_ids) == turn.num_prompt_ids:
                return index + 1
        return None


def _replies_like(
    message: Message, calls: Sequence[ExternallyDrivenCall]
) -> Iterator[tuple[ExternallyDrivenCall, AgentTurn]]:
    """Yield each earlier turn whose reply equals ``message`` and has known token ids.

    Each turn is preceded by its call.
    """
    for each in calls:
        for turn in each.turns:
            if turn.num_ids and _is_as_sent(turn.reply, message) and _is_on_path(each, turn):
                yield each, turn


def _is_on_path(each: ExternallyDrivenCall, turn: AgentTurn) -> bool:
    """Return True if ``turn`` still belongs to the call's current token sequence.

    It does not if the chat template later rewrote earlier messages, because that begins a new
    sequence.
    """
    return (turn.num_messages, turn.num_ids) in each.call.history.replies


def _num_common_ids(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    num, most = 0, min(len(ours), len(theirs))
    for size in (4096, 256, 16, 1):  # comparing slices is faster than comparing ids
        while num < most and ours[num : num + size] == theirs[num : num + size]:
            num += size
    return min(num, most)


# --- why a call begins ----------------------------------------------------------------------------


def _cause(
    calls: Sequence[ExternallyDrivenCall],
    messages: tuple[Message, ...],
    tools: tuple[Tool, ...],
    place: ConversationMatch,
) -> NewAgentCallReason:
    """Determine why a request starts a new call by comparing it with the closest conversation.

    ``place`` is the closest match that was found.
    """
    theirs = [_gist(message) for message in messages]
    sent_back = {gist for gist in theirs if gist.role == "assistant"}
    nearest: Sequence[Message] = ()
    nearest_tools, rank = tools, (-1, -1, -1)
    for each in calls:
        ours = each.call.messages
        num_shared = sum(_gist(turn.reply) in sent_back for turn in each.turns)
        num_common = _num_common(ours, messages, may_differ=False)
        is_aligned = _is_reply_at(num_common, each, messages)
        now = (int(each is place.call), num_shared + is_aligned, num_common)
        if now >= rank and (num_shared or is_aligned or each is place.call):
            nearest, nearest_tools, rank = ours, each.tools, now
    if not nearest:
        return NewAgentCallReason.NEW
    if nearest_tools != tools:
        return NewAgentCallReason.TOOLS
    cause = _difference(nearest, messages)
    has_later_reply = any(message.role == "assistant" for message in messages[place.start :])
    return NewAgentCallReason.BRANCH if place.call is not None and not has_later_reply else cause


def _is_reply_at(index: int, each: ExternallyDrivenCall, messages: Sequence[Message]) -> bool:
    """Return True if message ``index`` is an assistant reply both in the call and in a request."""
    ours = each.call.messages
    return (
        0 < index < min(len(ours), len(messages))
        and ours[index].role == "assistant"
        and messages[index].role == "assistant"
    )


def _difference(ours: Sequence[Message], theirs: Sequence[Message]) -> NewAgentCallReason:
    """Return how a request (``theirs``) first differs from an earlier conversation (``ours``).

    For example, a message was edited, or older messages were removed.
    """
    at = _num_common(ours, theirs, may_differ=False)
    if at == len(ours) or at == len(theirs):
        return NewAgentCallReason.TEMPLATE
    mine, sent = ours[at], theirs[at]
    is_same_role = mine.role == sent.role
    if is_same_role and _gist(mine) == _gist(sent):
        return _small_difference(mine, sent)
    our_gists, their_gists = ([_gist(each) for each in side[at:]] for side in (ours, theirs))
    if _is_joined(our_gists, their_gists) or _is_joined(their_gists, our_gists):
        return NewAgentCallReason.MERGED
    if is_same_role and our_gists[1:2] == their_gists[1:2] != []:
        return NewAgentCallReason.EDITED
    if their_gists[0] in our_gists:
        is_moved = our_gists[0] in their_gists
        return NewAgentCallReason.EDITED if is_moved else NewAgentCallReason.TRUNCATED
    if len(their_gists) > 1 and their_gists[1] in our_gists[2:]:
        return NewAgentCallReason.COMPACTED
    return NewAgentCallReason.EDITED


def _small_difference(ours: Message, theirs: Message) -> NewAgentCallReason:
    if (ours.reasoning or "").split() != (theirs.reasoning or "").split():
        return NewAgentCallReason.THINKING
    if "".join(ours.content.split()) != "".join(theirs.content.split()):
        return NewAgentCallReason.EDITED
    written = [[call.arguments for call in message.tool_calls] for message in (ours, theirs)]
    if written[0] != written[1]:
        return NewAgentCallReason.ARGUMENTS
    if (ours.content, ours.reasoning) == (theirs.content, theirs.reasoning):
        return NewAgentCallReason.EDITED  # its tool_call_id, which the template writes
    return NewAgentCallReason.WHITESPACE


class _Gist(NamedTuple):
    """The parts of a message that stay equal if a client drops reasoning or changes whitespace.

    They are used to find the earlier conversation that a request resembles.
    """

    role: str
    content: str
    calls: tuple[tuple[str, str], ...]


def _gist(message: Message) -> _Gist:
    calls = tuple((call.name, _canonical_arguments(call.arguments)) for call in message.tool_calls)
    return _Gist(message.role, "".join(message.content.split()), calls)


def _canonical_arguments(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return "".join(arguments.split())


def _is_joined(parts: Sequence[_Gist], whole: Sequence[_Gist]) -> bool:
    """Return True if the first message of ``whole`` was split into several messages in ``parts``.

    At least two messages are joined.
    """
    content, calls = "", tuple[tuple[str, str], ...]()
    for num, part in enumerate(parts, 1):
        if part.role != whole[0].role:
            return False
        content, calls = content + part.content, (*calls, *part.calls)
        if (content, calls) == (whole[0].content, whole[0].calls):
            return num > 1
        if not whole[0].content.startswith(content):
            return False
    return False
