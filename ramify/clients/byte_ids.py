"""Token ids for scripted replies: one per UTF-8 byte, with a marker before and after each message.

    [user "hi"]                  ->  257 104 105 260   258                 the prompt; 258 begins the reply
    reply "ok"                   ->  111 107 260                           what was sampled, its end included
    [user "hi", "ok", user "?"]  ->  257 104 105 260   258 111 107 260   257 63 260   258

A prompt so begins with the ids of everything before, as an engine's does that extends by ids.
"""

from __future__ import annotations

import msgspec

from ramify.clients.base import Request
from ramify.types.message import Message, Reply, VersionSpan

_BEGINS = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END = 260
NUM_IDS = 261


class ByteTokenIds:
    """``version`` is the policy's; whoever trains it counts it up."""

    def __init__(self, version: int = 0, logprob: float = -0.5, *, keeps_ids: bool = True) -> None:
        """Without ``keeps_ids`` it makes ids of the whole conversation again for each request, and
        not as it sampled them, as a server does that only knows text."""
        self.version = version
        self._logprob = logprob
        self._keeps_ids = keeps_ids

    def added_to(self, reply: Reply, request: Request) -> Reply:
        """``reply`` with the ids of itself and of its prompt."""
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
