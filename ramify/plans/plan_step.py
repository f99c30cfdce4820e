"""The base of all steps of a plan, both those that ask a model (``asking_steps.py``) and those that
compute their result (``symbolic_steps.py``)."""

from __future__ import annotations

import msgspec

from ramify.plans.value_types import ValueType, check_field_types


class PlanStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="step"):
    """One step of a plan. Its options are checked when it is created."""

    def __post_init__(self) -> None:
        check_field_types(self, str(self.__struct_config__.tag))

    @property
    def title(self) -> str:
        """Return the name of the step, as pictures of a plan show it."""
        return str(self.__struct_config__.tag)

    def shown(self) -> str:
        """Describe the step and its options for the picture of a plan."""
        return self.title

    def infer_output_type(self, given: ValueType) -> ValueType:
        """Return the type of the step's result if its input has the type ``given``. Raises
        ConfigError if the step cannot use such an input."""
        raise NotImplementedError
