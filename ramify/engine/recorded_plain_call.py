"""Make a plain model call within a run, so that it is budgeted and recorded.

    ask_plain(run, call, prompt, kind) ─> answer_without_session ─> run.requests.ask ─> CallOutcome

The direct answer of a run, ``llm_query`` and the leaf calls of strategies use this module. Replies
are checked and repaired by ``plain_call.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.clients.base import Sampling
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.live_call import LiveCall
from ramify.engine.model_requests import truncated_reply_error, truncation_error
from ramify.engine.plain_call import MAX_REPAIRS, answer_without_session, with_answer_format
from ramify.engine.shared_run_state import SharedRunState
from ramify.engine.typed_answers import AnswerSchema
from ramify.errors import ReplyTruncatedError
from ramify.types.message import Message, Reply
from ramify.types.picture import Picture


async def ask_plain(
    run: SharedRunState,
    call: LiveCall,
    prompt: str,
    kind: AnswerSchema | None,
    before: Sequence[Message] = (),
    pictures: tuple[Picture, ...] = (),
    sampling: Sampling | None = None,
    max_repairs: int = MAX_REPAIRS,
    retry_empty: bool = True,
) -> CallOutcome:
    """Ask the model of ``call`` one question without a session, and record the requests in the run.

    The messages in ``before`` precede the prompt, and ``pictures`` are attached to it. ``sampling``
    may lower the maximum reply length. If the model fails, the outcome holds the error and nothing
    is raised. ``retry_empty`` is that of ``answer_without_session``.
    """
    run.continue_past_recorded_limit(call)
    first = [*before, Message("user", with_answer_format(prompt, kind), pictures=pictures)]
    schema = kind.enforceable_schema if kind else None

    async def ask(new: list[Message], reused: int | None) -> Reply:
        return await run.requests.ask(call, new, reused=reused, schema=schema, asked=sampling)

    def cut(text: str) -> ReplyTruncatedError:
        if sampling is not None and sampling.max_tokens < run.requests.max_reply_tokens(call):
            name, most = call.client.name, sampling.max_tokens
            return truncation_error(name, most, "reply_tokens of the leaf", text)
        return truncated_reply_error(run.requests, call, text)

    return await answer_without_session(
        ask, call.client.name, first, kind, cut, max_repairs, retry_empty=retry_empty
    )
