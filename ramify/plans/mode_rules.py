"""Rules that choose how to answer a question in the modes ``plan`` and ``auto``.

They decide whether a plan, a Python session or one plain call answers a question, and which
ready-made plan is used.

    what only a session has ─> free     a small context ─> direct     words of the question ─> plan
    words of what code counts ─> free   a plan that cannot run ─> free
    none of these, or a table ─> one call, with size and ends of the context ─> free or a plan

The rules look at the question, the size of the context and the settings; they do not call a model.
``ready_plans.py`` has the plans and the words that ask for each, and
``engine/answer_mode_choice.py`` records the choice.
"""

from __future__ import annotations

import re
from typing import Any

from ramify.engine.answer_mode_choice import (
    AnswerModeChoice,
    AnswerModeChoiceCall,
    AnswerModeFacts,
)
from ramify.engine.leaf_calls import LeafRequest
from ramify.engine.observation_messages import count_context_chars
from ramify.engine.prompt_text import context_facts
from ramify.engine.typed_answers import to_answer_schema
from ramify.errors import ConfigError
from ramify.plans.part_size_calibration import calibration_of
from ramify.plans.plan_cost import ModelCostProfile, look_up_model
from ramify.plans.plan_strategy import PlanStrategy
from ramify.plans.ready_plans import plan_by_keywords, strategy_for
from ramify.plans.text_parts import BYTES_PER_TOKEN, shortened

_COUNTED_BY_CODE = re.compile(
    r"\b(?:how many|number of|count(?: of| the)?|most (?:common|frequent\w*)(?: \w+ed)?|longest"
    r"|frequen\w+)\s+(?:\w+ ){0,2}?"
    r"(?:characters?|letters?|words?|bytes|lines|rows|pages|files|times|dates|columns)\b",
    re.IGNORECASE,
)
"""Words in a question that suggest that code can answer it exactly, without a model reading the
text."""

_BETTER_THAN_FREE = ("aggregate", "pairwise", "summarise")
"""Ready-made plans that read the whole text and can be chosen from the words of a question alone.
If a question is about a few places in the text, code that searches is often enough."""


_SESSION = "session"
_WAYS = {
    _SESSION: "code is written that searches, filters and computes in the data, and models are "
    "asked about what it finds; for exact computation, for data with a structure, for questions "
    "about few places that code can find, and for open questions",
    "search": "the parts whose words are most like the question are read, and the best answer is "
    "taken; for one fact that is stated in one place",
    "classify": "each record gets one of the labels; for an answer that labels every record",
    "aggregate": "each record is labelled by a model, and the labels are counted; for counts and "
    "shares of what has to be understood",
    "pairwise": "each record is judged by a model, and those that fit are paired; for lists of "
    "pairs",
    "summarise": "every part is summarised, and the summaries are merged",
    "multi-hop": "the parts that may matter are read for facts, and the facts are combined; for an "
    "answer that follows from facts in several places",
}
"""Way to answer -> what it does, and for which questions it is suited."""
_MAX_QUESTION, _MAX_SHAPE, _MAX_REASON = 3_000, 6_000, 200
"""Limits of the call in which a model chooses the mode: maximum bytes of the question, maximum
bytes of the preview of the context, and maximum characters of the recorded reason."""
_REPLY_TOKENS = 300
_MAX_LABELS = 30
_ANSWER = {
    "type": "object",
    "properties": {
        "way": {"enum": list(_WAYS)},
        "labels": {"type": "array", "items": {"type": "string"}, "maxItems": _MAX_LABELS},
        "reason": {"type": "string"},
    },
    "required": ["way", "reason"],
}
_PROMPT = """\
Question: {question}

It is asked about data that has not been read yet. The data is {shape}

Choose how the question is answered:
{ways}

Give the way, a reason of at most 20 words, and, for classify and aggregate, the labels that the \
question names, if it names them. Do not answer the question."""


def choose_plan(facts: AnswerModeFacts) -> AnswerModeChoice:
    """Choose the ready-made plan that fits the wording of the question."""
    strategy = strategy_for(facts.question.text, model=facts.client, is_table=facts.is_csv)
    return AnswerModeChoice("plan", strategy.reason, strategy)


def choose_mode(facts: AnswerModeFacts) -> AnswerModeChoice | AnswerModeChoiceCall:
    """Choose by rules between one plain call, a Python session and a particular plan.

    If the rules do not decide, return the model call that makes the choice.
    """
    question = facts.question
    if facts.of_sessions:
        return AnswerModeChoice("free", f"only a session has {' and '.join(facts.of_sessions)}")
    if question.context is None:
        return AnswerModeChoice("direct", "the question has no context")
    num_chars = count_context_chars(question.context)
    most, measured = _one_call(facts)
    if num_chars <= most:
        size = f"the context has {num_chars:,} characters"
        return AnswerModeChoice("direct", f"{size}, and one call reads up to {most:,}{measured}")
    if facts.of_prompts:
        return AnswerModeChoice("free", f"a plan cannot have {' or '.join(facts.of_prompts)}")
    if found := _COUNTED_BY_CODE.search(question.text):
        return AnswerModeChoice("free", f"the question says {found[0]!r:.60}, which code counts")
    chosen = plan_by_keywords(question.text)
    # "How many" about a table may be asked of its columns, or of what its texts say.
    if chosen is None or chosen.name not in _BETTER_THAN_FREE or facts.has_tables:
        return _prepare_choice_call(facts, num_chars)
    return _with_plan(facts, chosen.name, chosen.reason)


def _prepare_choice_call(facts: AnswerModeFacts, num_chars: int) -> AnswerModeChoiceCall:
    """Return the model call that chooses between a Python session and the plans."""
    question = facts.question
    shape = context_facts(question.context, num_chars, num_chars).shape
    prompt = _PROMPT.format(
        question=shortened(question.text, _MAX_QUESTION),
        shape=shortened(shape, _MAX_SHAPE),
        ways="\n".join(f"{name}: {about}" for name, about in _WAYS.items()),
    )

    def choice(answer: object, why: str) -> AnswerModeChoice:
        if not isinstance(answer, dict):
            return AnswerModeChoice(
                "free", f"no rule decides, and the call that chooses failed: {why}"
            )
        way, reason = str(answer["way"]), f"the model says {answer['reason'][:_MAX_REASON]!r}"
        if way == _SESSION:
            return AnswerModeChoice("free", reason)
        labels = answer.get("labels") if way in ("classify", "aggregate") else None
        return _with_plan(facts, way, reason, labels=labels or None)

    # It is asked only once: without a choice, a session answers.
    leaf = LeafRequest("choose the mode", prompt, to_answer_schema(_ANSWER), _REPLY_TOKENS, 0)
    return AnswerModeChoiceCall(leaf, choice)


def _with_plan(facts: AnswerModeFacts, name: str, why: str, **options: Any) -> AnswerModeChoice:
    """Choose the plan called ``name`` if that plan can run.

    Otherwise choose a Python session.
    """
    try:
        strategy = strategy_for(
            facts.question.text,
            name=name,
            why=why,
            model=facts.client,
            is_table=facts.is_csv,
            **options,
        )
    except ConfigError as error:
        return AnswerModeChoice("free", f"{name}: {why}, but there is no such plan: {error}")
    if problem := _why_not(strategy, facts):
        return AnswerModeChoice("free", f"{strategy.reason}, but the plan cannot run: {problem}")
    return AnswerModeChoice("plan", strategy.reason, strategy)


def _one_call(facts: AnswerModeFacts) -> tuple[int, str]:
    """Return the longest context, in characters, that a single plain call may read.

    A note on the origin of this limit is returned, too.
    """
    found = calibration_of(facts.root.name)
    if found is None:
        return facts.direct_chars, ""
    return found.part_tokens * BYTES_PER_TOKEN, f", calibrated {found.date}"


def _why_not(strategy: PlanStrategy, facts: AnswerModeFacts) -> str:
    """Return why a plan cannot handle the context within the budget, or an empty string."""
    question = facts.question
    try:
        cost, _ = strategy.plan.cost_and_bounds(question.context, question.text, _model(facts))
        cost.check(facts.budget)
    except ConfigError as error:
        return str(error)
    return ""


def _model(facts: AnswerModeFacts) -> ModelCostProfile:
    client = facts.client
    reasoning = look_up_model(client, facts.limits).reasoning_tokens
    return ModelCostProfile(client.name, client.window, client.price, reasoning)
