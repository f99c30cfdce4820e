"""How a run is answered by a plan: its cost is compared with the budget, and then its leaves are
asked.

    RLM.completion(text, query, strategy=PlanStrategy(plan)) ──> engine ──> PlanStrategy(calls)
        cost ──> more than the run may use? refused ──> leaves ──> answer, and how many failed

The engine records the strategy with the run, so a killed run is resumed with the same plan. Not
here: the engine's side (``engine/strategies.py``, ``engine/leaf_calls.py``).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ramify.engine.call_outcome import CallOutcome
from ramify.engine.leaf_calls import LeafCalls
from ramify.plans.plan import Plan
from ramify.plans.plan_cost import PlanModel, cost_of
from ramify.plans.plan_leaf_runner import PlanLeafRunner, PlanStopped
from ramify.plans.value_bounds import CostSheet, ValueBounds
from ramify.plans.value_types import ValueType
from ramify.types.trajectory import Stop, cut

_SHOWN_FAILURES = 3
_SHOWN_CHARS = 200


class PlanStrategy(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="plan"
):
    """Answers a question by a plan, in place of a session.

    >>> leaf = plans.Leaf("Answer: {question}")
    >>> plan = plans.split("lines") | plans.map(leaf) | plans.concat()
    >>> with ramify.RLM(testing.ScriptedClient(["web-3"])) as rlm:
    ...     rlm.completion("web-3 failed", "Who?", strategy=plans.PlanStrategy(plan)).answer
    'web-3'
    """

    plan: Plan
    reason: str = ""
    """Why this plan was chosen."""

    async def __call__(self, calls: LeafCalls) -> CallOutcome:
        """Answer the question of a run. Raises ConfigError, before any call, if the plan cannot
        read the context or may use more than the run may."""
        self.plan.check_begin()
        return await answer_by(self.plan, ValueBounds(calls.question.context, True), None, calls)


async def answer_by(
    plan: Plan, first: ValueBounds, given: ValueType | None, calls: LeafCalls
) -> CallOutcome:
    """Run ``plan`` and return the outcome. ``first`` is what is known of the plan's input, and
    ``given`` is the input's type, or None for a context that the plan cuts itself. Raises
    ConfigError, before any call, if the plan cannot read the input or may exceed the budget of
    ``calls``."""
    client, sheet = calls.client, CostSheet(calls.question.text)
    model = PlanModel(client.name, client.window, client.price, calls.reasoning_tokens)
    # Cutting a large context, or ranking its parts, takes seconds.
    shapes = await asyncio.to_thread(plan.shapes, first, sheet, given)
    cost_of(sheet.steps, model).check(calls.budget, is_rest=calls.is_of_session)
    flow = PlanLeafRunner(calls)
    try:
        value = await plan.run(first.value, shapes, flow)
    except PlanStopped:
        value = None
    return _outcome(value, flow)


def _outcome(value: Any, flow: PlanLeafRunner) -> CallOutcome:
    """Return the answer, and what it does not cover."""
    errors = []
    if flow.failures:
        shown = "; ".join(cut(each, _SHOWN_CHARS) for each in flow.failures[:_SHOWN_FAILURES])
        more = len(flow.failures) - _SHOWN_FAILURES
        errors.append(
            f"{len(flow.failures):,} of {flow.num_leaves:,} leaves failed, so the answer does not "
            f"cover what they read: {shown}" + f"; and {more:,} more" * (more > 0)
        )
    if value is None and flow.stop is None:
        errors.append("the plan found no answer in the context")
    return CallOutcome(flow.stop or Stop.FINAL, value, "; ".join(errors) or None)
