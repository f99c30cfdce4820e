"""Complete a reply that was truncated at its token limit.

The reply is continued, or the model is asked again with a higher limit. The replies of a policy in
training are not completed, because the policy must learn from its own replies.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.engine.live_call import LiveCall
from ramify.engine.shared_run_state import SharedRunState
from ramify.errors import LimitReached, RequestRefusedError
from ramify.types.message import Message, Reply

_LONGER = (2, 4)
"""Factors by which the token limit grows when a truncated reply is requested again."""


async def complete_truncated(
    run: SharedRunState, call: LiveCall, reply: Reply, new: Sequence[Message]
) -> Reply:
    """Complete a reply that was truncated at its token limit, and return the completed reply.

    Any other reply is returned unchanged.

    ``new`` holds the messages to which ``reply`` responded, in the last turn of ``call``. If the
    model's server can continue a text, the reply is continued from its end. Otherwise the question
    is asked again with a larger limit. At most two such requests are made. A reply with token ids
    stays as it is: a policy in training must learn from its own replies.
    """
    reused = len(call.messages) - 1 - len(new)
    for longer in _LONGER:
        if reply.finish != "length" or reply.token_ids is not None:
            break
        more = await _more_of(run, call, reply, new, reused, longer)
        if more is None:
            break
        reply = more
    return reply


async def _more_of(
    run: SharedRunState,
    call: LiveCall,
    reply: Reply,
    new: Sequence[Message],
    reused: int,
    longer: int,
) -> Reply | None:
    """Send one more request to complete a truncated reply of ``call``.

    Return the reply with its continuation, or a new reply with a token limit that is ``longer``
    times as high. Return None if no further request is allowed.
    """
    setup, message = run.setup, reply.message
    is_continued = bool(message.content.strip()) and not message.tool_calls
    is_continued = is_continued and getattr(call.client, "continues", False)
    if is_continued:
        new, reused, longer = (), len(call.messages), 1
    if run.stop_reason(call) is not None:
        return None
    holds = call.parent is None and setup.scaffold.last_word
    if holds and run.requests.reserve_final_request(call, new, longer) is not None:
        return None
    how = "continuing it" if is_continued else "asking again with a larger one"
    run.note(call, f"the reply was cut at its limit of tokens: {how}")
    tools = setup.scaffold.tools()
    try:
        more = await run.requests.ask(call, new, reused=reused, tools=tools, longer=longer)
    except LimitReached:
        return None
    except RequestRefusedError as refused:  # a server may refuse a longer limit
        if refused.needs_key:
            raise
        return None
    if not is_continued:
        return more
    joined = msgspec.structs.replace(more.message, content=message.content + more.message.content)
    return msgspec.structs.replace(more, message=joined)
