"""Choose how a question is answered, and answer it.

The ways are one plain model call, a model that writes code in a Python session, conversations held
by a task's own code, and a strategy.

    way_to_answer(…) ─┬─ "plain call"     a short context: one request, without a session
                      ├─ "session"        RlmCall, or BranchedCall if the turn has several
                      │                   continuations; the next question continues its session
                      ├─ "conversations"  the task's own code asks through RunModelClient
                      ├─ "strategy"       a strategy asks through LeafModelCaller
                      └─ "asked"          a call chooses between a session and a strategy

The beginning and the end of a run are handled by ``run_handle.py``, and the turns of a call with a
session by ``rlm_call.py``.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from ramify.engine.answer_mode_choice import (
    AnswerModeChoice,
    AnswerModeChoiceCall,
    apply_choice,
    make_mode_chosen_event,
    recorded_choice,
)
from ramify.engine.call_outcome import CallOutcome, failed_outcome
from ramify.engine.event_recorder import EventRecorder
from ramify.engine.leaf_calls import LeafModelCaller
from ramify.engine.live_call import LiveCall
from ramify.engine.plain_call import direct_prompt
from ramify.engine.prompt_text import user_instructions
from ramify.engine.question import ALWAYS, Question
from ramify.engine.recorded_plain_call import ask_plain
from ramify.engine.resources import EventLoopResources, ModelsByDepth, RlmSetup
from ramify.engine.rlm_call import RlmCall
from ramify.engine.run_branching import BranchedCall
from ramify.engine.shared_run_state import SharedRunState
from ramify.engine.typed_answers import TypeMismatch
from ramify.errors import (
    ConfigError,
    HostCallError,
    RamifyError,
    ReplayDiverged,
    user_line_of_error,
)
from ramify.sandbox.base import SharedContextValue
from ramify.types.picture import (
    MAX_PICTURES,
    MAX_REQUEST_BYTES,
    has_pictures,
    pictures_in,
)
from ramify.types.trajectory import CallForkOrigin, Stop

WayToAnswer = Literal["plain call", "session", "conversations", "strategy", "asked"]


class UserConversationState:
    """The state that a conversation carries from one question to the next.

    It includes the context and the last call. It also holds the event recorder. The last call is
    the one that answered, with its Python session.
    """

    def __init__(self, recorder: EventRecorder) -> None:
        self.recorder = recorder
        self.context: SharedContextValue | None = None
        self.last: RlmCall | None = None
        """Call that answered the last question, or its chosen branch."""
        self.num_questions = 0

    async def close(self) -> None:
        if self.last is not None:
            await self.last.close()


def way_to_answer(
    setup: RlmSetup,
    question: Question,
    models: ModelsByDepth,
    conversation: UserConversationState | None,
    asked: AnswerModeChoiceCall | None = None,
) -> WayToAnswer:
    """Choose how ``question`` is answered, for example by one plain call or in a Python session.

    ``asked`` is a pending model call that will choose the mode of the question, or None if the mode
    is already known. Raises ConfigError if a plain call is required but cannot answer the question.
    """
    if asked is not None:
        return "asked"
    if question.strategy is not None:
        return "strategy"
    if question.conduct is not None:
        return "conversations"
    if conversation is not None or setup.search is not None:
        if question.direct == ALWAYS:
            raise ConfigError(
                "direct='always' answers with one plain call, without branches or follow-up "
                "questions: remove it, or ask one question without branches"
            )
        return "session"
    has_tools = bool(setup.tools.functions or setup.tools.values)
    root = models.client_at_depth(0)
    is_direct = question.can_answer_plainly(setup.scaffold, root.window, has_tools)
    if is_direct and question.pictures:
        pictures = pictures_in(question.context)
        num_bytes = sum(picture["bytes"] for picture in pictures)
        fits = len(pictures) <= MAX_PICTURES and num_bytes <= MAX_REQUEST_BYTES
        is_direct = fits and models.can_read_pictures(root) is not False
    return "plain call" if is_direct else "session"


def check_strategy(
    setup: RlmSetup, question: Question, conversation: UserConversationState | None
) -> None:
    """Raise ConfigError if a question with a strategy uses a feature that strategies lack.

    Such features are, for example, citations and pictures.
    """
    if question.strategy is None:
        return
    for is_given, what in (
        (question.conduct is not None, "a task that holds its own conversations"),
        (conversation is not None, "a conversation"),
        (setup.search is not None, "branches or a search"),
        (question.cite, "citations"),
        (bool(question.pictures), "pictures in the context"),
        (question.needs_session, "a context that only a tool can read"),
    ):
        if is_given:
            raise ConfigError(f"a strategy cannot be combined with {what}: omit one of them")


def check_pictures(question: Question, models: ModelsByDepth) -> None:
    """Raise ConfigError if the context contains pictures that cannot be shown to any model of the
    run.

    Their bytes may be missing, or no model may be able to read pictures.
    """
    if not question.pictures and has_pictures(question.context):
        raise ConfigError(
            "the context has pictures without their bytes: give the object that ramify.load "
            "returns, not its context"
        )
    if question.pictures and all(
        models.can_read_pictures(client) is False for client in models.all
    ):
        raise ConfigError(
            "the context has pictures, and "
            f"{models.pictures_unsupported_message(models.client_at_depth(0))}"
        )


async def answer(
    run: SharedRunState,
    way: WayToAnswer,
    question: Question,
    context: SharedContextValue | None,
    resources: EventLoopResources,
    conversation: UserConversationState | None,
    asked: AnswerModeChoiceCall | None = None,
) -> CallOutcome:
    """Answer ``question`` in the given ``way``, and return the outcome of the run's root call.

    ``way`` comes from ``way_to_answer``. ``asked`` is the call in which a model chooses the mode,
    and is required only if ``way`` is ``"asked"``.
    """
    match way:
        case "asked":
            assert asked is not None
            return await _answer_as_asked(run, question, context, asked)
        case "conversations":
            return await _answer_by_conversations(run, question, resources)
        case "strategy":
            return await _answer_by_strategy(run, question, context)
        case "plain call":
            return await _answer_by_plain_call(run, question, context)
        case "session":
            return await _answer_in_session(run, question, context, conversation)


async def _answer_by_conversations(
    run: SharedRunState, question: Question, resources: EventLoopResources
) -> CallOutcome:
    """Run a task's code that converses with the models, and return its result as the outcome.

    An exception in that code becomes a failed outcome.
    """
    from ramify.engine.external_conversations import RunModelClient

    assert question.conduct is not None
    conversations = RunModelClient(run, resources, question.text)
    outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
    try:
        outcome = CallOutcome(Stop.FINAL, await question.conduct(conversations))
    except RamifyError as error:
        outcome = failed_outcome(error, run.recorder.is_stored)
    except Exception as error:  # noqa: BLE001 -- code of the task, which may raise anything
        failure = RamifyError(
            f"the task's conversations ended with {error!r:.400}{user_line_of_error(error)}"
        )
        failure.__cause__ = error
        outcome = failed_outcome(failure, run.recorder.is_stored)
    finally:
        conversations.end_calls(outcome)
    return outcome


async def _answer_by_strategy(
    run: SharedRunState, question: Question, context: SharedContextValue | None
) -> CallOutcome:
    """Answer the question with its strategy, and return the outcome.

    The root call is recorded without turns, because only its child calls ask a model.
    """
    root = LiveCall(
        "0", "strategy", run.models.client_at_depth(0), 0, question.text, context=context
    )
    run.begin_call(root)
    run.continue_past_recorded_limit(root)
    return await _ended_by_strategy(run, root, question, LeafModelCaller(run, root, question))


async def _ended_by_strategy(
    run: SharedRunState, root: LiveCall, question: Question, calls: LeafModelCaller
) -> CallOutcome:
    """Run the strategy of a question, which asks models through ``calls``, and return the outcome.

    Record the end of the root call, whose beginning is already recorded.
    """
    assert question.strategy is not None
    outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
    try:
        outcome = _convert_answer(await question.strategy(calls), question)
    except RamifyError as error:
        outcome = failed_outcome(error, run.recorder.is_stored)
    except Exception as error:  # noqa: BLE001 -- a strategy may be the user's code
        failure = RamifyError(f"the strategy ended with {error!r:.400}{user_line_of_error(error)}")
        failure.__cause__ = error
        outcome = failed_outcome(failure, run.recorder.is_stored)
    finally:
        run.end_call(root, outcome)
    return outcome


async def _answer_as_asked(
    run: SharedRunState,
    question: Question,
    context: SharedContextValue | None,
    asked: AnswerModeChoiceCall,
) -> CallOutcome:
    """Let a model choose the answer mode, then answer the question in that mode.

    The call that makes the choice is recorded as the first child of the root call.
    """
    root = LiveCall("0", "rlm", run.models.client_at_depth(0), 0, question.text, context=context)
    run.begin_call(root)
    calls = LeafModelCaller(run, root, question)
    try:
        choice = await _choose_mode(calls, question, asked)
    except ReplayDiverged as error:
        outcome = failed_outcome(error, run.recorder.is_stored)
        run.end_call(root, outcome)
        return outcome
    except BaseException:
        run.end_call(root, CallOutcome(Stop.CANCELLED, error="cancelled"))
        raise
    run.recorder.emit(make_mode_chosen_event(choice, run.recorder.elapsed_s(), is_asked=True))
    question = apply_choice(question, choice)
    if question.strategy is not None:
        run.continue_past_recorded_limit(root)
        return await _ended_by_strategy(run, root, question, calls)
    return await _answer_in_session(run, question, context, None, root)


async def _choose_mode(
    calls: LeafModelCaller, question: Question, asked: AnswerModeChoiceCall
) -> AnswerModeChoice:
    """Return the mode that the model chooses, or the recorded choice if the run is being resumed.

    Even then the call is made again so that later calls keep their ids. This costs nothing because
    its reply is recorded.
    """
    outcome = await calls.ask(asked.leaf)
    if (recorded := recorded_choice(question)) is not None:
        return recorded
    # Whether a plan can read a large context takes seconds to find out.
    return await asyncio.to_thread(asked.choice, outcome.answer, outcome.error or "")


def _convert_answer(outcome: CallOutcome, question: Question) -> CallOutcome:
    """Convert the answer in ``outcome`` to the type that the question requires.

    Return a failed outcome if the answer does not match that type.
    """
    if question.kind is None or outcome.answer is None:
        return outcome
    try:
        return msgspec.structs.replace(outcome, answer=question.kind.convert(outcome.answer))
    except TypeMismatch as mismatch:
        why = f"the answer of the strategy does not fit the requested type: {mismatch}"
        return CallOutcome(Stop.ERROR, error=why)


async def _answer_by_plain_call(
    run: SharedRunState, question: Question, context: SharedContextValue | None
) -> CallOutcome:
    call = LiveCall("0", "lm", run.models.client_at_depth(0), 0, question.text, context=context)
    try:
        pictures = run.pictures.context_pictures(question.context) if question.pictures else ()
    except HostCallError as error:
        raise ConfigError(f"{error}: load the pictures again") from None
    before, prompt = direct_prompt(
        run.scaffold, run.setup.instructions, run.setup.examples, question
    )
    run.begin_call(call)
    outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
    try:
        outcome = await ask_plain(
            run,
            call,
            prompt,
            question.kind,
            before,
            pictures,
            retry_empty=question.retry_empty,
        )
    finally:
        run.end_call(call, outcome)
    return outcome


async def _answer_in_session(
    run: SharedRunState,
    question: Question,
    context: SharedContextValue | None,
    conversation: UserConversationState | None,
    begun: LiveCall | None = None,
) -> CallOutcome:
    """Let a model answer the question by writing code in a live Python session.

    In a conversation, the session of the previous question is continued. ``begun`` is the root call
    if its start is already recorded, and None otherwise.
    """
    previous = conversation.last if conversation is not None else None
    number = conversation.num_questions if conversation is not None else 0
    history, fork = None, None
    if previous is not None and previous.call.messages:
        history = previous.call.history.copy()
        fork = CallForkOrigin(previous.call.id, previous.call.turn - 1)
    client, text = run.models.client_at_depth(0), question.text
    call = begun or LiveCall(str(number), "rlm", client, 0, text, context=context, history=history)
    root = RlmCall(run, call, previous)
    search = run.setup.search
    branched = BranchedCall(root, search) if search is not None else None
    message = run.first_message_of(call, question.about, is_next=previous is not None)
    if previous is not None and (added := _new_instructions(run.setup, previous.run.setup)):
        message = f"{message}\n\n{added}"
    if conversation is not None:
        conversation.last, conversation.num_questions = root, number + 1
    if begun is None:
        run.begin_call(call, fork)
    outcome = CallOutcome(Stop.CANCELLED, error="cancelled")
    try:
        outcome = await (branched or root).answer(message, question.kind, question.before)
    except RamifyError as error:
        outcome = failed_outcome(error, run.recorder.is_stored)
    finally:
        chosen, own = (branched.chosen, branched.own) if branched else (root, None)
        if conversation is None:
            await chosen.close()
        else:
            conversation.last = chosen
        run.end_call(call, own or outcome)
    return msgspec.structs.replace(outcome, answered_by=chosen.call.id if own else "")


def _new_instructions(now: RlmSetup, before: RlmSetup) -> str:
    """Return the instructions for this question if they have changed since the previous question.

    Otherwise, the result is an empty string. ``before`` holds the settings of the previous
    question.
    """
    if (now.instructions, now.examples) == (before.instructions, before.examples):
        return ""
    return user_instructions(now.instructions, now.examples)
