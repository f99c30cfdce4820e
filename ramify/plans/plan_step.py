"""The base class of all steps of a plan.

Some steps ask a model (``asking_steps.py``), and others compute their result
(``model_free_steps.py``).
"""

from __future__ import annotations

import msgspec

from ramify.plans.value_types import PlanValueType, check_field_values


class PlanStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="step"):
    """One step of a plan, such as a split, a filter or a question to a model.

    Its options are validated when it is created.
    """

    def __post_init__(self) -> None:
        check_field_values(self, str(self.__struct_config__.tag))

    @property
    def title(self) -> str:
        """Return the step's name as shown in diagrams of the plan."""
        return str(self.__struct_config__.tag)

    def shown(self) -> str:
        """Return the step's name and options as shown in diagrams of the plan."""
        return self.title

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        """Return the step's result type for an input of type ``given``.

        Raises ConfigError if the step does not accept such an input.
        """
        raise NotImplementedError
