"""Choose how to answer a question: in a Python session, with a plan, or in one plain call.

A plan makes many small model calls. The choice and its reason are recorded.

    RLM.completion(text, query, mode="auto")
        chooser(AnswerModeFacts)
            ├─> AnswerModeChoice      by rules: nothing is asked
            └─> AnswerModeChoiceCall  one bounded call of the run ──> AnswerModeChoice
        ModeChosen in the journal ──> plain call, session or strategy; a resumed run does the same

This module decides what a chooser knows and how its choice is applied. The names of the modes are
in ``answer_strategies.py``. The rules of ``auto`` and ``plan`` belong to the code of the plans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ramify.clients.base import Client
from ramify.engine.answer_strategies import MODES, Strategy, recorded_strategy, strategy_record
from ramify.engine.leaf_calls import LeafRequest
from ramify.engine.limits import BudgetAmount, BudgetLedger, Limits
from ramify.engine.question import ALWAYS, Question
from ramify.errors import ConfigError
from ramify.plugins import load_object
from ramify.types.event import ModeChosen

if TYPE_CHECKING:
    from ramify.engine.resources import ModelsByDepth, RlmSetup

_SHOWN_TOOLS = 4
"""Maximum number of tools that are named in the reason for a choice of mode."""
_TABLE_TOOLS = frozenset(("sql", "tables", "search", "chunks"))
_TABLES_AS_TEXT = frozenset(("csv", "jsonl"))
"""Kinds of table sources whose rows are also in the context as text."""
_OTHER_TABLES = frozenset(("sqlite", "server", "parquet", "arrow", "duckdb", "xlsx"))


class AnswerModeFacts(msgspec.Struct, frozen=True):
    """The facts about a question from which its answer mode is chosen.

    All of them are known before any model call.
    """

    question: Question
    root: Client
    """The model that runs a session or answers a plain call."""
    client: Client
    """The model that answers a plan's calls, each about one part of the text."""
    direct_chars: int
    """Maximum length in characters of a context that is put into one plain call if no mode is
    set."""
    limits: Limits
    budget: BudgetAmount
    """Calls, tokens and dollars that the run may still use."""
    of_sessions: Sequence[str]
    """Features of the question that only a session supports: ``tools``, ``citations``."""
    of_prompts: Sequence[str]
    """Features of the question that only a session or a plain call supports: ``instructions``."""
    has_tables: bool
    """Whether the context has tables that code can query and a plan can read as text."""
    is_csv: bool
    """Whether the context consists only of CSV texts, whose first lines name the columns."""


class AnswerModeChoice(msgspec.Struct, frozen=True):
    """The mode that was chosen for a question, and the reason for the choice."""

    mode: str
    """``free`` (a Python session), ``plan``, or ``direct`` (one plain call)."""
    reason: str
    strategy: Strategy | None = None
    """Strategy that answers the question in the mode ``plan``."""


class AnswerModeChoiceCall(msgspec.Struct, frozen=True):
    """A single model call that chooses the mode of a question.

    It is used if the rules alone cannot decide.
    """

    leaf: LeafRequest
    choice: Callable[[object, str], AnswerModeChoice]
    """Function that makes the choice. It takes the call's answer, or None and the reason why the
    answer is missing. It raises no errors."""


def _kinds_of_sources(question: Question) -> set[str]:
    """Return the kinds of the question's data sources, such as ``csv``.

    The set is empty if the record lists only some of the sources.
    """
    items = question.read.get("items", ())
    is_whole = question.read.get("num_items", 0) == len(items)
    return {item["kind"] for item in items} if is_whole else set()


def _has_texts_of_tables(question: Question) -> bool:
    """Return True if the sources include tables whose rows are all in the context as text."""
    kinds = _kinds_of_sources(question)
    return bool(kinds & _TABLES_AS_TEXT) and not kinds & _OTHER_TABLES


def always_session(_facts: AnswerModeFacts) -> AnswerModeChoice:
    """Always choose a session, in which the model writes code and calls models."""
    return AnswerModeChoice("free", "it was asked for")


def always_direct(_facts: AnswerModeFacts) -> AnswerModeChoice:
    """Always choose one plain model call, regardless of context length."""
    return AnswerModeChoice("direct", "it was asked for")


async def choose_initial_mode(
    setup: RlmSetup, question: Question, models: ModelsByDepth, *, is_conversation: bool
) -> AnswerModeChoice | AnswerModeChoiceCall | None:
    """Choose the mode of a question, or return the model call that will choose it.

    This happens before the run starts. A resumed run keeps its recorded choice. Returns None if the
    question has no mode. Raises ConfigError if the mode cannot be used for this question.
    """
    if question.mode is None or (is_conversation and question.mode in ("free", "auto")):
        return None
    if is_conversation:
        raise ConfigError(
            f"a conversation needs a session, which mode='{question.mode}' does not have: omit "
            "mode, or ask a single question"
        )
    recorded = question.chosen_mode
    if recorded is not None and not recorded.is_asked:
        return recorded_choice(question)
    facts = _facts(setup, question, models)
    # Cutting a large context for the cost of a plan takes seconds.
    chooser = load_object(MODES[question.mode], f"mode '{question.mode}'")
    choice: AnswerModeChoice | AnswerModeChoiceCall = await asyncio.to_thread(chooser, facts)
    return choice


def recorded_choice(question: Question) -> AnswerModeChoice | None:
    """Return the mode that was chosen when the run first started, or None if no choice is
    recorded."""
    recorded = question.chosen_mode
    if recorded is None:
        return None
    return AnswerModeChoice(recorded.mode, recorded.reason, recorded_strategy(recorded.strategy))


def apply_choice(question: Question, choice: AnswerModeChoice) -> Question:
    """Return a copy of the question, set to be answered in the chosen mode."""
    direct = ALWAYS if choice.mode == "direct" else False
    return msgspec.structs.replace(question, direct=direct, strategy=choice.strategy)


def make_mode_chosen_event(
    choice: AnswerModeChoice, at_s: float, *, is_asked: bool = False
) -> ModeChosen:
    """Create the event that records ``choice`` in the run's journal.

    ``is_asked`` is True if a model made the choice.
    """
    strategy = {} if choice.strategy is None else strategy_record(choice.strategy)
    return ModeChosen(
        at_s=at_s, mode=choice.mode, reason=choice.reason, strategy=strategy, is_asked=is_asked
    )


def _facts(setup: RlmSetup, question: Question, models: ModelsByDepth) -> AnswerModeFacts:
    root, limits = models.client_at_depth(0), setup.limits
    is_priced = any(client.price is not None for client in models.all)
    of_tables = _TABLE_TOOLS if _has_texts_of_tables(question) else frozenset()
    of_question = question.tools.keys() - of_tables if question.has_mandatory_tools else ()
    tools = [*sorted(of_question), *setup.tools.functions, *setup.tools.values]
    return AnswerModeFacts(
        question,
        root,
        models.plain,
        min(setup.scaffold.direct_chars, 2 * root.window),
        limits,
        BudgetLedger(limits, priced=is_priced).limit,
        [
            what
            for is_given, what in (
                (question.conduct is not None, "a task that holds its own conversations"),
                (setup.search is not None, "branches"),
                (question.cite, "citations"),
                (bool(question.pictures), "pictures in the context"),
                (question.needs_session, "a context that only a tool can read"),
                (bool(tools), f"tools ({', '.join(tools[:_SHOWN_TOOLS])})"),
                (
                    not setup.scaffold.accepts_plain_text_answer,
                    f"the scaffold {setup.scaffold.name}",
                ),
            )
            if is_given
        ],
        [
            what
            for is_given, what in (
                (question.kind is not None, "an answer with a schema"),
                (bool(setup.instructions), "instructions"),
                (bool(setup.examples), "examples"),
                (bool(question.before), "messages before the question"),
            )
            if is_given
        ],
        bool(of_tables),
        _kinds_of_sources(question) == {"csv"},
    )
