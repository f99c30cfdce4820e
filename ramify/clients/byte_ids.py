"""Token ids for scripted replies: one per UTF-8 byte, with a marker before and after each message.

    [user "hi"]                  ->  257 104 105 260   258     prompt; 258 starts the reply
    reply "ok"                   ->  111 107 260               sampled ids, with the end marker
    [user "hi", "ok", user "?"]  ->  257 104 105 260   258 111 107 260   257 63 260   258

A prompt therefore starts with all earlier ids, as it does with an engine that appends ids.
"""

from __future__ import annotations

import msgspec

from ramify.clients.base import Request
from ramify.types.message import Message, Reply, VersionSpan

_BEGINS = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END = 260
NUM_IDS = 261


class ByteTokenIds:
    """Adds byte-level token ids to replies. A trainer increments ``version`` to set the policy
    version.

    Example:
        client = testing.ScriptedClient(["FINAL(2)"], ids=testing.ByteTokenIds())
    """

    def __init__(self, version: int = 0, logprob: float = -0.5, *, keeps_ids: bool = True) -> None:
        """Without ``keeps_ids``, the whole conversation is tokenized again for each request, with
        other ids than were sampled. A server that only handles text does the same."""
        self.version = version
        self._logprob = logprob
        self._keeps_ids = keeps_ids

    def added_to(self, reply: Reply, request: Request) -> Reply:
        """Return ``reply`` with its token ids and those of its prompt."""
        token_ids = (*_text(reply.message), END)
        return msgspec.structs.replace(
            reply,
            prompt_ids=self._prompt(request),
            token_ids=token_ids,
            logprobs=(self._logprob,) * len(token_ids),
            versions=(VersionSpan(0, len(token_ids), self.version),),
        )

    def _prompt(self, request: Request) -> tuple[int, ...]:
        known = request.known if self._keeps_ids else None
        ids = [] if known is None else [*known.ids]
        for message in request.messages[0 if known is None else known.num_messages :]:
            text = _text(message)
            if message.role == "assistant" and not self._keeps_ids:
                text = [32, *text]
            ids += [_BEGINS[message.role], *text, END]
        return (*ids, _BEGINS["assistant"])


def _text(message: Message) -> list[int]:
    return list(message.content.encode("utf-8", "surrogatepass"))
