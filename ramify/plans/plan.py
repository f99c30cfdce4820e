"""Plans: fixed sequences of steps that lead from a context to an answer.

A plan is a sequence of steps from the context to the answer. The types of the steps are checked
when the plan is composed.

    >>> from ramify import plans
    >>> leaf = plans.Leaf("Label the record.", {"enum": ["spam", "ham"]}, each=True, label="label")
    >>> plan = plans.split("lines", 2000) | plans.map(leaf) | plans.concat() | plans.count()
    >>> plan.cost("Buy now!\\nSee you at noon.\\n", "openai:gpt-5-mini").calls
    1

The operator ``|`` appends one plan to another. The types of all steps are checked at once, starting
with the step that cuts the context. ``plan_strategy.py`` answers a run by a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.plans.asking_steps import (
    AskEachItem,
    AskingStep,
    AskWholeValue,
    FilterItems,
    FilterPreviewStep,
    SplitText,
    TreeReduceStep,
)
from ramify.plans.leaf_questions import Leaf
from ramify.plans.model_free_steps import (
    AggregateFieldStep,
    ConcatListsStep,
    CountHistogramStep,
    CountValuesStep,
    DistinctValuesStep,
    JoinRecordsStep,
    PairDistinctValuesStep,
    SetOperation,
    TakeFieldStep,
    TakeMaxItemStep,
    TopItemsStep,
    TruncateDates,
)
from ramify.plans.plan_cost import ModelCostProfile, PlanCostBound, cost_of, look_up_model
from ramify.plans.plan_leaf_runner import PlanLeafRunner
from ramify.plans.value_bounds import (
    PlannedModelCalls,
    PlanValueBounds,
    known_value_bounds,
    reply_bounds,
)
from ramify.plans.value_types import ANY, TEXT, PlanValueType, pair_of


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fixed sequence of steps that leads from a context to an answer.

    Its model calls have limited sizes, so its cost is known before it runs.

    >>> print(plans.split("lines", 2000) | plans.map(plans.Leaf("Summarise.", label="sum up")))
    context
      │ split by lines, at most 2,000 tokens
      ▼ list of part
      │ map sum up
      ▼ list of text
    """

    steps: tuple[AnyStep, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError("a plan has no steps: begin with split(…)")
        self.types()

    def __or__(self, other: Plan) -> Plan:
        if not isinstance(other, Plan):
            return NotImplemented
        return Plan((*self.steps, *other.steps))

    def with_table_header(self) -> Plan:
        """Return this plan adapted to tables, in which the first line of each text names the
        columns.

        A plan that does not split its context by lines is returned unchanged.
        """
        first = self.steps[0]
        if not isinstance(first, SplitText) or first.by != "lines" or first.overlap:
            return self
        return Plan((msgspec.structs.replace(first, header=True), *self.steps[1:]))

    def types(self, given: PlanValueType | None = None) -> list[PlanValueType]:
        """Return the type of the value before the first step and after each step.

        Raises ConfigError if a step does not accept its input.
        """
        begins = isinstance(self.steps[0], SplitText)
        types = [given or (TEXT if begins else ANY)]
        for step in self.steps:
            types.append(step.infer_output_type(types[-1]))
        return types

    @property
    def type(self) -> PlanValueType:
        """Return the type of the plan's answer."""
        return self.types()[-1]

    def leaves(self) -> Iterator[Leaf]:
        """Yield the questions that the steps of this plan ask a model.

        They are called leaves.
        """
        for step in self.steps:
            if isinstance(step, ApplyBothPlans):
                yield from step.left.leaves()
                yield from step.right.leaves()
            elif isinstance(step, AskEachItem | AskWholeValue | TreeReduceStep):
                yield step.leaf
            elif isinstance(step, FilterItems) and isinstance(step.predicate, Leaf):
                yield step.predicate

    def shapes(
        self, first: PlanValueBounds, sheet: PlannedModelCalls, given: PlanValueType | None = None
    ) -> list[PlanValueBounds]:
        """Return size bounds on the values between the plan's steps, without running the plan.

        The list begins with the value before the first step. Adds the model calls to ``sheet``.
        Raises ConfigError if the plan cannot read the context.
        """
        shapes = [first]
        for step, kind in zip(self.steps, self.types(given), strict=False):
            shapes.append(step.estimate_bounds(shapes[-1], kind, sheet))
        return shapes

    async def run(self, value: Any, shapes: list[PlanValueBounds], flow: PlanLeafRunner) -> Any:
        """Apply the steps to a value one after another, and return the answer.

        ``shapes`` gives the bounds computed in advance. If they already contain the result of a
        step, that step is not run again.
        """
        for step, before, after in zip(self.steps, shapes, shapes[1:], strict=False):
            value = after.value if after.is_known else await step.run(value, flow, before)
        return value

    def cost(
        self, context: Any, model: Any, question: str = "", *, limits: Any = None
    ) -> PlanCostBound:
        """Return an upper bound on the cost of running the plan on a context.

        It is computed before anything is spent, and counts calls, tokens and dollars. ``model`` is
        a name such as ``openai:gpt-5-mini``, a ``Model`` or a client, and ``limits`` are those of
        the run. Raises ConfigError if the plan cannot read the context. BM25 rankings are computed
        here, since they determine how many calls follow.
        """
        return self.cost_and_bounds(context, question, look_up_model(model, limits))[0]

    def check_begins_with_split(self) -> None:
        """Raise ConfigError unless the first step of the plan divides the context into parts."""
        if not isinstance(self.steps[0], SplitText):
            raise ConfigError("a plan must cut the context first: begin with split(…)")

    def cost_and_bounds(
        self, context: Any, question: str, model: ModelCostProfile
    ) -> tuple[PlanCostBound, list[PlanValueBounds]]:
        """Compute the plan's cost for a context, and the size bounds of its values.

        Returns the cost, and the bounds of the value before the first step and after each step.
        """
        self.check_begins_with_split()
        sheet = PlannedModelCalls(question)
        first = PlanValueBounds(context, True)
        shapes = self.shapes(first, sheet)
        return cost_of(sheet.steps, model), shapes

    def to_json(self) -> str:
        """Return the plan as JSON text.

        ``Plan.from_json`` is the inverse.
        """
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """Read a plan from JSON text.

        Raises ConfigError if the text is not a valid plan.
        """
        try:
            return _DECODER.decode(text)
        except msgspec.MsgspecError as error:
            cause = error.__cause__
            why = str(cause if isinstance(cause, ConfigError) else error)
            raise ConfigError(f"the plan cannot be read: {why}") from None

    def picture(self) -> str:
        """Return a text diagram of the plan's steps and the types between them."""
        return "\n".join(["context", *_lines(self, "  ")])

    def __str__(self) -> str:
        return self.picture()


class ApplyBothPlans(AskingStep, frozen=True, tag="both"):
    """A step that runs two plans on the same value and returns both results as a pair."""

    left: Plan
    right: Plan

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        return pair_of(self.left.types(given)[-1], self.right.types(given)[-1])

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        left = self.left.shapes(shape, sheet, given)[-1]
        right = self.right.shapes(shape, sheet, given)[-1]
        if left.is_known and right.is_known:
            return known_value_bounds((left.value, right.value))
        total = left.max_bytes + right.max_bytes
        return reply_bounds(1, total, is_exact=left.is_exact and right.is_exact, both=(left, right))

    async def run(self, value: Any, flow: PlanLeafRunner, shape: PlanValueBounds) -> Any:
        sheet, results = PlannedModelCalls(flow.question), []
        for plan in (self.left, self.right):
            shapes = await flow.run_in_thread(plan.shapes, shape, sheet)
            results.append(await plan.run(value, shapes, flow))
        return tuple(results)


AnyStep = (
    SplitText
    | FilterPreviewStep
    | AskEachItem
    | FilterItems
    | AskWholeValue
    | TreeReduceStep
    | ApplyBothPlans
    | ConcatListsStep
    | PairDistinctValuesStep
    | TakeMaxItemStep
    | TakeFieldStep
    | CountValuesStep
    | CountHistogramStep
    | AggregateFieldStep
    | TopItemsStep
    | DistinctValuesStep
    | SetOperation
    | JoinRecordsStep
    | TruncateDates
)

_DECODER = msgspec.json.Decoder(Plan)
"""Decodes plans from JSON. It is created here, under the import lock, because msgspec crashes if
two threads are the first to use mutually nested structs such as ``Plan`` and ``ApplyBothPlans``."""


def _lines(plan: Plan, indent: str, given: PlanValueType | None = None) -> Iterator[str]:
    types = plan.types(given)
    for step, before, after in zip(plan.steps, types, types[1:], strict=False):
        if isinstance(step, ApplyBothPlans):
            yield f"{indent}├─ left"
            yield from _lines(step.left, f"{indent}│    ", before)
            yield f"{indent}├─ right"
            yield from _lines(step.right, f"{indent}│    ", before)
        else:
            yield f"{indent}│ {step.shown()}"
        yield f"{indent}▼ {after}"
