"""What every step of a plan has, whether it asks leaves (``asking_steps.py``) or computes its
result (``symbolic_steps.py``)."""

from __future__ import annotations

import msgspec

from ramify.plans.value_types import ValueType, check_fields


class PlanStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="step"):
    """A step of a plan. Its options are checked when it is made."""

    def __post_init__(self) -> None:
        check_fields(self, str(self.__struct_config__.tag))

    @property
    def title(self) -> str:
        """Name of the step, as in a picture."""
        return str(self.__struct_config__.tag)

    def shown(self) -> str:
        """The step with its options, for a picture."""
        return self.title

    def infer_output_type(self, given: ValueType) -> ValueType:
        """Return the type of the step's result if its input has the type ``given``. Raises
        ConfigError if the step cannot use such an input."""
        raise NotImplementedError
