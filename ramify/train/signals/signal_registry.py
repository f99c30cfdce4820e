"""Building parts of a recipe by name: signals, judges and hint sources.

    build_part({"name": "process", "judge": {"name": "step_judge", "model": "openai:gpt-5-mini"}},
               SIGNALS, "signal")
    build_part("my_package.judges:Strict", JUDGES, "judge")

An instance is returned unchanged. A user's struct can be restored from a checkpoint if its tag is
its own dotted path: ``class Strict(msgspec.Struct, frozen=True, tag_field="name",
tag="my_package.judges:Strict")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.train.override import of_name

SIGNALS = {
    "format": "ramify.train.signals.format:FormatSignal",
    "hindsight": "ramify.train.signals.hindsight:Hindsight",
    "outcome": "ramify.train.signals.outcome:OutcomeSignal",
    "process": "ramify.train.signals.process_reward:ProcessRewardSignal",
    "teacher": "ramify.train.signals.teacher:TeacherSignal",
    "tools": "ramify.train.signals.tool_use:ToolUseSignal",
}
"""Name -> the class that implements ``base.Signal``."""


def build_part(spec: Any, table: Mapping[str, str], what: str) -> Any:
    """The part that ``spec`` describes. Raises ConfigError, with the nearest name, if the name is
    unknown."""
    if isinstance(spec, str):
        return _built(of_name(spec, table, what), {}, what)
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"a {what} is given by its name; this one has none: {spec!r:.80}")
        return _built(of_name(name, table, what), options, what)
    return spec


def _built(kind: Any, options: dict[str, Any], what: str) -> Any:
    try:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            tag = kind.__struct_config__
            fields = {**options, tag.tag_field: tag.tag} if tag.tag_field else options
            return msgspec.convert(fields, kind)
        return kind(**options)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{what} {getattr(kind, '__name__', kind)}: {error}") from error
