"""The rules of the modes ``plan`` and ``auto``: which ready plan answers a question, and whether a
plan, a session or one plain call does.

    what only a session has ─> free     a small context ─> direct     words of the question ─> plan
    words of what code counts ─> free   a plan that cannot run ─> free    none of these ─> free

A rule reads the question, the size of the context and the settings, and asks nothing. Not here: the
plans and the words that ask for each (``ready_plans.py``), and how a choice is recorded
(``engine/modes.py``).
"""

from __future__ import annotations

import re

from ramify.engine.modes import ModeChoice, ModeFacts
from ramify.engine.observe import chars_of
from ramify.errors import ConfigError
from ramify.plans.calibration import calibration_of
from ramify.plans.plan_cost import PlanModel, model_of
from ramify.plans.plan_strategy import PlanStrategy
from ramify.plans.ready_plans import asked_plan, strategy_for
from ramify.plans.text_parts import BYTES_PER_TOKEN

_COUNTED_BY_CODE = re.compile(
    r"\b(?:how many|number of|count(?: of| the)?|most (?:common|frequent\w*)(?: \w+ed)?|longest"
    r"|frequen\w+)\s+(?:\w+ ){0,2}?"
    r"(?:characters?|letters?|words?|bytes|lines|rows|pages|files|times|dates|columns)\b",
    re.IGNORECASE,
)
"""Words of a question that code answers exactly, without a model that reads."""

_BETTER_THAN_FREE = ("aggregate", "pairwise", "summarise")
"""Ready plans that read everything, for which the words of a question suffice. A question about
one or a few places is often answered by code that searches."""


def choose_plan(facts: ModeFacts) -> ModeChoice:
    """A ready plan, chosen by the words of the question."""
    strategy = strategy_for(facts.question.text, model=facts.client)
    return ModeChoice("plan", strategy.reason, strategy)


def choose_mode(facts: ModeFacts) -> ModeChoice:
    """The mode, and with a plan which one, chosen by rules."""
    question = facts.question
    if facts.of_sessions:
        return ModeChoice("free", f"only a session has {' and '.join(facts.of_sessions)}")
    if question.context is None:
        return ModeChoice("direct", "the question has no context")
    num_chars = chars_of(question.context)
    most, measured = _one_call(facts)
    if num_chars <= most:
        size = f"the context has {num_chars:,} characters"
        return ModeChoice("direct", f"{size}, and one call reads up to {most:,}{measured}")
    if facts.of_prompts:
        return ModeChoice("free", f"a plan cannot have {' or '.join(facts.of_prompts)}")
    if found := _COUNTED_BY_CODE.search(question.text):
        return ModeChoice("free", f"the question says {found[0]!r:.60}, which code counts")
    chosen = asked_plan(question.text)
    if chosen is None or chosen.name not in _BETTER_THAN_FREE:
        return ModeChoice("free", "no words of the question ask for a plan")
    strategy = strategy_for(question.text, model=facts.client)
    if why := _why_not(strategy, facts):
        return ModeChoice("free", f"{strategy.reason}, but the plan cannot run: {why}")
    return ModeChoice("plan", strategy.reason, strategy)


def _one_call(facts: ModeFacts) -> tuple[int, str]:
    """Return the characters of the longest context for one plain call, and how that is known."""
    found = calibration_of(facts.root.name)
    if found is None:
        return facts.direct_chars, ""
    return found.part_tokens * BYTES_PER_TOKEN, f", calibrated {found.date}"


def _why_not(strategy: PlanStrategy, facts: ModeFacts) -> str:
    """Return why the plan cannot read the context within the budget; empty if it can."""
    question = facts.question
    try:
        cost, _ = strategy.plan.measured(question.context, question.text, _model(facts))
        cost.check(facts.budget)
    except ConfigError as error:
        return str(error)
    return ""


def _model(facts: ModeFacts) -> PlanModel:
    client = facts.client
    reasoning = model_of(client, facts.limits).reasoning_tokens
    return PlanModel(client.name, client.window, client.price, reasoning)
