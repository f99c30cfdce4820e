"""A plain call of a run: its requests are budgeted, recorded and sent as those of every call.

    ask_plain(run, call, prompt, kind) ──> answer_plainly ──> run.requests.ask ──> CallOutcome

Used by the direct answer of a run, by ``llm_query`` and by leaves. Not here: how a reply is checked
and repaired (see ``plain_call.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.clients.base import Sampling
from ramify.engine.call_outcome import CallOutcome
from ramify.engine.live_call import LiveCall
from ramify.engine.live_run import LiveRun
from ramify.engine.model_requests import cut_reply, reply_cut
from ramify.engine.plain_call import MAX_REPAIRS, answer_plainly, asked_for
from ramify.engine.typed import AnswerType
from ramify.errors import ReplyCut
from ramify.types.message import Message, Reply
from ramify.types.picture import Picture


async def ask_plain(
    run: LiveRun,
    call: LiveCall,
    prompt: str,
    kind: AnswerType | None,
    before: Sequence[Message] = (),
    pictures: tuple[Picture, ...] = (),
    sampling: Sampling | None = None,
    max_repairs: int = MAX_REPAIRS,
) -> CallOutcome:
    """Ask the model of ``call`` a plain question (see ``plain_call.py``). ``before`` are the
    messages before the prompt, which shows ``pictures``. ``sampling`` may shorten the reply. Never
    raises for a failed model."""
    run.pass_limit(call)
    first = [*before, Message("user", asked_for(prompt, kind), pictures=pictures)]
    schema = kind.enforced if kind else None

    async def ask(new: list[Message], reused: int | None) -> Reply:
        return await run.requests.ask(call, new, reused=reused, schema=schema, asked=sampling)

    def cut(text: str) -> ReplyCut:
        if sampling is not None and sampling.max_tokens < run.requests.reply_tokens(call):
            name, most = call.client.name, sampling.max_tokens
            return reply_cut(name, most, "reply_tokens of the leaf", text)
        return cut_reply(run.requests, call, text)

    return await answer_plainly(ask, call.client.name, first, kind, cut, max_repairs)
