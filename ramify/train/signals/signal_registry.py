"""Parts of a recipe by name: signals, judges and what gives hints.

    made({"name": "process", "judge": {"name": "step_judge", "model": "openai:gpt-5-mini"}}, SIGNALS, "signal")
    made("my_package.judges:Strict", JUDGES, "judge")

What is made already stays as it is. A struct of one's own comes back from a checkpoint where its
tag is its own dotted path: ``class Strict(msgspec.Struct, frozen=True, tag_field="name",
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


def made(spec: Any, table: Mapping[str, str], what: str) -> Any:
    """The part that ``spec`` stands for. Raises ConfigError, with the nearest name, for one there
    is not."""
    if isinstance(spec, str):
        return _built(of_name(spec, table, what), {}, what)
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"a {what} is given by its name; this has none: {spec!r:.80}")
        return _built(of_name(name, table, what), options, what)
    return spec


def _built(kind: Any, options: dict[str, Any], what: str) -> Any:
    try:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            tag = kind.__struct_config__
            given = {**options, tag.tag_field: tag.tag} if tag.tag_field else options
            return msgspec.convert(given, kind)
        return kind(**options)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{what} {getattr(kind, '__name__', kind)}: {error}") from error
