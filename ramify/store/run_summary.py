"""Summarises the events of a run for listings.

All kinds of stores share this code.
"""

from __future__ import annotations

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import damaged_line_error
from ramify.store.line_checksums import ChecksumChain
from ramify.store.reviews import HumanRunReview
from ramify.store.stored_run import StoredRun
from ramify.store.textless_events import (
    AnyEventOutline,
    DamagedJournalLine,
    TextlessCallStarted,
    TextlessCellRan,
    TextlessReplyReceived,
    TextlessRequestStarted,
    decode_event_outlines,
)
from ramify.types.event import (
    CallEnded,
    RequestAttemptFailed,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
)
from ramify.types.message import Usage
from ramify.types.trajectory import Stop, answer_text, cut


class RunSummary(msgspec.Struct, omit_defaults=True):
    """A summary of one run that contains the fields shown in listings."""

    id: str
    question: str = ""
    """The first question of a conversation."""
    model: str = ""
    """Name of the root call's model."""
    started_at: float = 0.0
    """Unix time of the start."""
    seconds: float = 0.0
    """Seconds from the start to the last event."""
    num_questions: int = 0
    num_calls: int = 0
    """Number of calls in the tree, including the root."""
    depth: int = 0
    usage: Usage = Usage()
    cost: float | None = None
    """Cost in dollars; None if no model had a price."""
    stop: Stop | None = None
    """Reason why the run ended. None if it is in progress or was killed."""
    num_bytes: int = 0
    """Size of the journal in bytes, without stored contexts and outputs."""
    alive: bool = False
    """True if a process is writing the run now."""
    problem: str | None = None
    """Reason why the journal could not be read, or None."""
    rewards: dict[str, float] = {}
    """Rewards of the whole run, if it was scored."""
    answer: str | None = None
    """The first ``MAX_ANSWER`` characters of the answer; None if there is none."""
    reason: str = ""
    """One sentence on why the run ended; empty if it ended with a final answer."""
    root_turns: int = 0
    """Number of turns of the root call in the last question."""
    task: str = ""
    num_files: int = 0
    """Number of files that the first question's context refers to without containing them."""
    review: HumanRunReview | None = None
    """Labels, note and corrected scores; None if the run has none."""


MAX_ANSWER = 200
"""Maximum number of characters of an answer in a listing."""


def summarise(run: StoredRun) -> RunSummary:
    """Return the summary of ``run`` for a listing.

    The numbers equal those that ``TrajectoryBuilder`` computes from full events, but are computed
    several times faster.
    """
    summary, number, chain = RunSummary(run.id), 0, ChecksumChain()
    try:
        for block in run.line_blocks():
            for event, num_bytes in decode_event_outlines(block, run, chain):
                number += 1
                if isinstance(event, DamagedJournalLine):
                    raise damaged_line_error(run, number, event.reason)
                _add(summary, event)
                summary.num_bytes += num_bytes
    except StoreError as error:
        summary.problem = str(error)
    return summary


def _add(summary: RunSummary, event: AnyEventOutline) -> None:
    if isinstance(event, ScoreAdded):
        if not event.call:
            summary.rewards |= event.rewards
        return
    summary.seconds = max(summary.seconds, event.at_s)
    match event:  # the most frequent ones first
        case TextlessRequestStarted() | CallEnded() | TextlessCellRan():
            pass
        case TextlessReplyReceived():
            _charge(summary, event.reply.usage, event.reply.cost)
            summary.root_turns += event.call.isdecimal()
        case TextlessCallStarted():
            summary.num_calls += 1
            summary.depth = max(summary.depth, event.depth)
            summary.model = summary.model or event.model
        case RequestAttemptFailed():
            _charge(summary, event.usage, event.cost)
        case RunStarted():
            summary.num_questions, summary.stop = summary.num_questions + 1, None
            summary.root_turns = 0
            if summary.num_questions == 1:
                summary.question, summary.started_at = event.question, event.started_at
                summary.task = event.task
                summary.num_files = 0 if event.context is None else len(event.context.files)
        case RunEnded():
            summary.stop, summary.reason = event.stop, event.reason or event.error or ""
            # The cost is 0, not None, if the model has a price but no request was sent.
            summary.cost = event.cost if summary.cost is None else summary.cost
            summary.answer = (
                None if event.answer is None else cut(answer_text(event.answer), MAX_ANSWER)
            )
        case RunResumed():
            summary.stop, summary.reason, summary.answer = None, "", None
        case _:
            pass


def _charge(summary: RunSummary, usage: Usage, cost: float | None) -> None:
    summary.usage += usage
    if cost is not None:
        summary.cost = (summary.cost or 0.0) + cost
