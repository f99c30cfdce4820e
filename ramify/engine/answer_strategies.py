"""List the strategies and modes for answering a question.

A strategy is code that answers a run's question through many small model calls. It is recorded so
that the run can be resumed.

    RLM.completion(text, query, strategy=S) ──> S(calls) ──> CallOutcome
    config of the run: {"strategy": {"name": "plan", …}} ──> the same strategy, when it is resumed

A strategy is a function that gets the run's ``LeafModelCaller``, through which it asks models, and
returns the outcome of the question. If it is a struct of a registered kind, it is recorded with its
fields. Any other strategy must be given again to resume its run. A mode chooses the way to an
answer (see ``answer_mode_choice.py``). The interface for a strategy's questions is in
``leaf_calls.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import PluginRegistry, load_object

Strategy = Callable[[Any], Awaitable[Any]]
"""Function that receives the ``LeafModelCaller`` of a run and returns a ``CallOutcome``."""

STRATEGIES = PluginRegistry(
    "strategy",
    "ramify.strategies",
    {"plan": "ramify.plans.plan_strategy:PlanStrategy"},
    structs=True,
)
"""Strategies that can be recorded with a run."""
Mode = Literal["auto", "free", "plan", "direct"]
MODES: Mapping[str, str] = {
    "auto": "ramify.plans.mode_rules:choose_mode",
    "free": "ramify.engine.answer_mode_choice:always_session",
    "plan": "ramify.plans.mode_rules:choose_plan",
    "direct": "ramify.engine.answer_mode_choice:always_direct",
}
"""Maps each mode to the import path of a function that takes a ``AnswerModeFacts`` and
returns a ``AnswerModeChoice`` or a ``AnswerModeChoiceCall``. The function is imported when a
question has the mode, so that the engine imports no plans."""


def plan_tool() -> dict[str, Any]:
    """Return the tool that lets session code run predefined plans, in a dict keyed by its name."""
    tool = load_object("ramify.plans.session_plans:SessionPlansTool", "the plans of a session")()
    return {tool.__name__: tool}


def strategy_record(strategy: Any) -> dict[str, Any]:
    """Return the journal entry for a strategy: a registered struct's fields or a function's
    name."""
    if isinstance(strategy, msgspec.Struct):
        fields: dict[str, Any] = msgspec.to_builtins(strategy)
        name = str(fields.get("name")) if isinstance(fields, dict) else ""
        if name in STRATEGIES and STRATEGIES.resolve(name) is type(strategy):
            return fields
    return {"function": getattr(strategy, "__qualname__", type(strategy).__name__)}


def recorded_strategy(
    recorded: Mapping[str, Any] | None, given: Strategy | None = None
) -> Strategy | None:
    """Return the strategy of a recorded run, or None if it had none.

    If the record contains only a function name, return ``given``. Raises ConfigError if the
    strategy is neither recorded nor given.
    """
    if not recorded:
        return None
    name = recorded.get("name")
    if name is None:
        if given is None:
            raise ConfigError(
                f"the run was answered by the strategy {recorded.get('function')}: pass the same "
                "strategy= again"
            )
        return given
    # A journal may come from elsewhere, so it cannot name code by its place.
    if name not in STRATEGIES:
        raise ConfigError(
            f"the run was answered by the strategy '{name}', which is not installed here: install "
            "its package"
        )
    strategy: Strategy = STRATEGIES.build(recorded)
    return strategy
