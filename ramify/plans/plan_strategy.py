"""Answers the question of a run with a plan.

The plan's maximum cost is first compared with the budget, and then its steps are run.

    RLM.completion(text, query, strategy=PlanStrategy(plan)) ──> engine ──> PlanStrategy(calls)
        cost ──> more than the run may use? refused ──> leaves ──> answer, and how many failed

The engine records the strategy with the run, so a killed run is resumed with the same plan. The
engine calls strategies in ``engine/answer_strategies.py`` and sends their questions in
``engine/leaf_calls.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ramify.engine.call_outcome import CallOutcome
from ramify.engine.leaf_calls import LeafModelCaller
from ramify.plans.plan import Plan
from ramify.plans.plan_cost import ModelCostProfile, cost_of
from ramify.plans.plan_leaf_runner import PlanLeafRunner, PlanStopped
from ramify.plans.value_bounds import PlannedModelCalls, PlanValueBounds
from ramify.plans.value_types import PlanValueType
from ramify.types.trajectory import Stop, cut

_SHOWN_FAILURES = 3
_SHOWN_CHARS = 200


class PlanStrategy(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="plan"
):
    """A strategy that answers a run's question with a plan instead of a Python session.

    >>> leaf = plans.Leaf("Answer: {question}")
    >>> plan = plans.split("lines") | plans.map(leaf) | plans.concat()
    >>> with ramify.RLM(testing.ScriptedClient(["web-3"])) as rlm:
    ...     rlm.completion("web-3 failed", "Who?", strategy=plans.PlanStrategy(plan)).answer
    'web-3'
    """

    plan: Plan
    reason: str = ""
    """Reason why this plan was chosen."""

    async def __call__(self, calls: LeafModelCaller) -> CallOutcome:
        """Run the plan on the context of a run, and return the answer to the run's question.

        Raises ConfigError before any model call if the plan cannot read the context or may exceed
        the run's budget.
        """
        self.plan.check_begins_with_split()
        return await run_plan(self.plan, PlanValueBounds(calls.question.context, True), None, calls)


async def run_plan(
    plan: Plan, first: PlanValueBounds, given: PlanValueType | None, calls: LeafModelCaller
) -> CallOutcome:
    """Run a plan and return its outcome.

    ``first`` gives the bounds of the plan's input. ``given`` is the input's type, or None if the
    plan divides the context itself. Raises ConfigError before any model call if the input is
    unreadable or the budget too small.
    """
    client, sheet = calls.client, PlannedModelCalls(calls.question.text)
    model = ModelCostProfile(
        client.name, client.window, client.price, calls.reasoning_token_allowance
    )
    # Cutting a large context, or ranking its parts, takes seconds.
    shapes = await asyncio.to_thread(plan.shapes, first, sheet, given)
    cost_of(sheet.steps, model).check(calls.budget_limit, is_rest=calls.is_started_by_session)
    flow = PlanLeafRunner(calls)
    try:
        value = await plan.run(first.value, shapes, flow)
    except PlanStopped:
        value = None
    return _outcome(value, flow)


def _outcome(value: Any, flow: PlanLeafRunner) -> CallOutcome:
    """Convert the value that a plan has computed to the outcome of its run.

    If some model calls failed, an error says what the answer does not cover.
    """
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
