"""Apply overrides such as ``optim.lr=1e-5`` to a configuration, and check their names and types.

Old names and values of fields are converted, so that configurations of earlier versions can be read
and resumed.

    override(run, ["rl.optim.lr=1e-5", "rl.algorithm=grpo", "rl.algorithm.credit=root",
                   "task.options.rows=40"])

A value is parsed as JSON if possible (``1e-5``, ``true``, ``null``, ``[1, 2]``), and is text
otherwise. If a field holds one of several classes, the name of a class (or a dotted path to a
custom one) sets a new instance with its defaults.

    migrate_config({"rl": {"sample": {"late": 4}}})  ->       {"rl": {"sample": {"grace_steps": 4}}}
    renamed_field("late")                                 ->  "rl.sample.grace_steps"
    migrate_config({"threads": 0})                   ->       {"threads": None}

Modules that moved are handled in ``ramify/plugins.py``, and classes that were renamed are listed in
``CHANGELOG.md``.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from ramify.errors import ConfigError
from ramify.plugins import explain_conversion_error
from ramify.train.config_fields import unknown_field_hint

RENAMED_FIELDS = {
    "cadence": "schedule",
    "schedule.evaluate": "schedule.evaluate_every",
    "schedule.checkpoint": "schedule.checkpoint_every",
    "schedule.rollouts": "schedule.save_rollouts_every",
    "rl.sample.late": "rl.sample.grace_steps",
    "rl.sample.straggle": "rl.sample.straggler_factor",
    "rl.algorithm.drop_silent": "rl.algorithm.drop_zero_variance",
    "inference.carrier": "inference.weight_sync",
    "inference.carrier_options": "inference.weight_sync_options",
}
"""Maps old dotted field names to new ones. Entries apply in order, so that a later entry can rename
the result of an earlier one."""

_OPTIMIZERS = ("warmup.optim", "sft.optim", "rl.optim", "rl.critic.optim")
ZERO_MEANT_NONE = (
    "threads",
    *(f"{optim}.{field}" for optim in _OPTIMIZERS for field in ("max_grad_norm", "num_steps")),
    "schedule.evaluate_every",
    "schedule.checkpoint_every",
    "schedule.save_rollouts_every",
    "rl.sample.max_items",
    "rl.sample.straggler_factor",
    "rl.rollout.min_concurrency",
    "rl.loss.value.clip",
    "rl.algorithm.max_rollout_tokens",
    "rl.algorithm.overlong_buffer",
    "rl.algorithm.outcome.max_rollout_tokens",
    "rl.algorithm.outcome.overlong_buffer",
    "rl.signals.*.top",
    "rl.signals.*.evidence",
    "guard.patience",
    "guard.max_kl",
    "guard.min_entropy",
    "guard.alarms.zero_variance",
    "guard.alarms.entropy",
    "guard.alarms.length",
    "guard.alarms.clipped",
    "compute.max_tokens",
    "compute.max_logits",
    "compute.shard.ranks",
    "compute.shard.port",
    "inference.sleep_level",
    "inference.tolerance",
    "placement.*.count",
    "placement.services.*.count",
    "placement.pools.*.memory_gb",
)
"""Fields in which an earlier version stored 0 for "none", "never" or "automatic". ``*`` matches any
name."""


def migrate_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration from an earlier version to the current format.

    Renamed fields get their new names, and a 0 that meant "none" becomes None.
    """
    renamed = dict(config)
    for old, new in RENAMED_FIELDS.items():
        *path, old_name = old.split(".")
        owner: Any = renamed
        for part in path:
            inner = owner.get(part)
            if not isinstance(inner, Mapping):
                break
            owner[part] = owner = dict(inner)
        else:
            if old_name in owner:
                owner[new.rpartition(".")[2]] = owner.pop(old_name)
    for field in ZERO_MEANT_NONE:
        renamed = _zero_to_none(renamed, field.split("."))
    return renamed


def _zero_to_none(config: Any, path: Sequence[str]) -> Any:
    """Return a copy of ``config`` in which a 0 at ``path`` is replaced by None."""
    if not path:
        return None if config == 0 else config
    if not isinstance(config, Mapping):
        return config
    names = list(config) if path[0] == "*" else [path[0]] if path[0] in config else []
    return {**config, **{name: _zero_to_none(config[name], path[1:]) for name in names}}


def renamed_field(field: str) -> str | None:
    """Return the current name of a renamed field, given its old dotted name or the last part of it.

    Returns None if the field was not renamed.
    """
    for old, new in RENAMED_FIELDS.items():
        if (
            field == old
            or field == old.rpartition(".")[2]
            or f"cadence.{old.rpartition('.')[2]}" == field
        ):
            return new
    return None


T = TypeVar("T")


class NamedObjectBuilder(Protocol):
    """The interface for building configuration objects from their names.

    Plain registries implement it, and so do registries that apply the options of a preset.
    """

    def build(self, value: Any) -> Any:
        """Build the object that ``value`` names, such as a policy loss.

        Raises ConfigError if there is none.
        """
        ...


Bundle = Callable[[Any, str], Any]
"""A function that takes a configuration and a name. It returns the configuration with every field
set that the name stands for."""
Choices = Mapping[str, NamedObjectBuilder | Bundle]
"""Map the dotted name of a field to its named values or bundles. A ``Bundle`` sets several fields.
It applies before all other assignments, which may then change some of these fields."""


class ConfigOverride(NamedTuple):
    """A parsed override, such as ``rl.optim.lr=1e-4``: the path of the field and the text of its
    value."""

    path: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


def override(config: T, assignments: Sequence[str], choices: Choices | None = None) -> T:
    """Return a copy of ``config`` with overrides such as ``rl.optim.lr=1e-4`` applied.

    Raises ConfigError, which names the override, if one is invalid.

    Fields that are only valid together, such as ``depths`` and the ``policies`` that it names, may
    be given in any order, since all fields of a class are set at once.
    """
    parsed = []
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or not name:
            raise ConfigError(
                f"'{assignment}' is not an override: write FIELD=VALUE, as in rl.optim.lr=1e-4"
            )
        parsed.append(ConfigOverride(tuple(name.split(".")), text))
    for each in parsed:
        bundle = (choices or {}).get(each.name)
        if callable(bundle):
            try:
                config = bundle(config, each.text)
            except ConfigError as error:
                raise ConfigError(f"override {each}: {error}") from error
    parsed = [each for each in parsed if not callable((choices or {}).get(each.name))]
    return (
        _apply_overrides(config, parsed, 0, _Context(config, choices or {})) if parsed else config
    )


class _Context(NamedTuple):
    """The whole configuration that is being overridden, and the values that overrides can choose by
    name."""

    config: Any
    choices: Choices


def _apply_overrides(
    value: Any, assignments: Sequence[ConfigOverride], depth: int, context: _Context
) -> Any:
    """Return a copy of a configuration value with its overrides applied.

    In the path of each override, the element at index ``depth`` names a field of ``value``.
    """
    groups: dict[str, list[ConfigOverride]] = {}
    for each in assignments:
        groups.setdefault(each.path[depth], []).append(each)
    fresh = {head: _set_field(value, head, group, depth, context) for head, group in groups.items()}
    if isinstance(value, Mapping):
        return {**value, **fresh}
    try:
        return msgspec.structs.replace(value, **fresh)
    except (ConfigError, ValueError) as error:
        named = _overrides_causing(value, groups, fresh, str(error))
        raise ConfigError(f"override {' '.join(map(str, named))}: {error}") from error


def _set_field(
    value: Any, head: str, assignments: Sequence[ConfigOverride], depth: int, context: _Context
) -> Any:
    """Return the new value of the field ``head`` in a configuration section after applying its
    overrides.

    An override of the whole field replaces earlier ones, and later overrides of its parts change
    the result.
    """
    first = assignments[0]
    if isinstance(value, Mapping):
        current = value.get(head, {})
    elif not isinstance(value, msgspec.Struct):
        parent = ".".join(first.path[:depth])
        if value is None:
            raise ConfigError(
                f"override {first}: {parent} is not set here: set it as a whole, as "
                f"{parent}='{{…}}'"
            )
        raise ConfigError(f"override {first}: {parent} is {value!r}, which has no field '{head}'")
    elif head not in value.__struct_fields__:
        now_called = renamed_field(first.name) or renamed_field(".".join(first.path[: depth + 1]))
        if depth == len(first.path) - 1:
            now_called = now_called or renamed_field(head)
        advice = (
            f"it is called {now_called} now"
            if now_called
            else unknown_field_hint(type(context.config), context.config, first.name)
        )
        raise ConfigError(f"override {first}: no field '{head}': {advice}")
    else:
        current = getattr(value, head)
    parts: list[ConfigOverride] = []
    for each in assignments:
        if len(each.path) > depth + 1:
            parts.append(each)
        elif isinstance(value, Mapping):
            current, parts = _parse_json_or_text(each.text), []
        else:
            current, parts = _parse_value(value, head, each, context.choices), []
    if parts and current is None:
        before = getattr(value, head, None)
        if before is not None:
            name = ".".join(first.path[: depth + 1])
            raise ConfigError(
                f"override {name}=null {parts[0]}: the first removes the section with all that "
                f"the recipe sets in it: remove {name}=null to change the recipe's {name}"
            )
        current = _create_section(value, head, parts, depth)
    return _apply_overrides(current, parts, depth + 1, context) if parts else current


def _create_section(value: Any, head: str, parts: Sequence[ConfigOverride], depth: int) -> Any:
    """Create a missing section, such as ``rl.rollout.branch``, from defaults and the given
    overrides.

    Returns None if the section's type is unknown, or if the overrides do not suffice.
    """
    kinds = typing.get_args(typing.get_type_hints(type(value)).get(head))
    structs = [
        each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)
    ]
    if len(structs) != 1 or not isinstance(value, msgspec.Struct):
        return None
    fields = structs[0].__struct_fields__
    given = {each.path[-1]: each.text for each in parts if len(each.path) == depth + 2}
    known = {name: _parse_json_or_text(text) for name, text in given.items() if name in fields}
    try:
        return msgspec.convert(known, structs[0], strict=False)
    except (ConfigError, ValueError):
        return None


def _overrides_causing(
    value: Any, groups: Mapping[str, list[ConfigOverride]], fresh: Mapping[str, Any], problem: str
) -> list[ConfigOverride]:
    """Return the overrides that caused ``problem``, so that an error message can name them.

    ``problem`` is an error about the configuration as a whole. Without them, the error disappears
    or is a different one.
    """
    causes: list[ConfigOverride] = []
    for head, group in groups.items():
        try:
            rest = {name: field for name, field in fresh.items() if name != head}
            msgspec.structs.replace(value, **rest)
        except (ConfigError, ValueError) as error:
            if str(error) == problem:
                continue
        causes += group
    return causes or [each for group in groups.values() for each in group]


def _parse_value(
    owner: msgspec.Struct, field: str, assignment: ConfigOverride, choices: Choices
) -> Any:
    text = assignment.text
    choice = choices.get(assignment.name)
    if choice is not None and not callable(choice) and text not in ("null", "none", ""):
        return choice.build(text)
    kind = typing.get_type_hints(type(owner)).get(field, Any)
    tagged = _by_tag(kind, text)
    if tagged is not None:
        return tagged
    try:
        return msgspec.convert(_parse_json_or_text(text), kind, strict=False)
    except msgspec.ValidationError as first:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            why = _not_a_section(assignment, kind) or _problem(first, kind, text)
            raise ConfigError(f"override {assignment}: {why}") from first


def _not_a_section(assignment: ConfigOverride, kind: Any) -> str:
    """Return advice for an override that sets a whole configuration section but is not JSON.

    Returns an empty string if ``kind`` is not a section.
    """
    structs = [
        each
        for each in (kind, *typing.get_args(kind))
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    ]
    if len(structs) != 1 or assignment.text.lstrip()[:1] in ("{", "["):
        return ""
    fields, name = structs[0].__struct_fields__, assignment.name
    return (
        f"{name} is a section: set its fields, as in {name}.{fields[0]}=…, or the whole as JSON, "
        f"as in {name}='{{\"{fields[0]}\": …}}'; its fields are {', '.join(fields)}"
    )


def _problem(error: msgspec.ValidationError, kind: Any, text: str) -> str:
    """Return the reason why the text of an override cannot be converted to a field's type."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            msgspec.json.decode(text.encode())
        except msgspec.DecodeError as broken:
            return f"this is not JSON ({broken}); names and texts take double quotes"
    return explain_conversion_error(error, kind)


def _by_tag(kind: Any, text: str) -> Any:
    """Create an object of the class tagged ``text`` in a union of structs, with default options.

    Returns None if no class has this name.
    """
    for member in typing.get_args(kind):
        config = getattr(member, "__struct_config__", None)
        if config is not None and config.tag == text:
            return member()
    return None


def _parse_json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text
