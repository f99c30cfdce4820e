"""Overrides of a configuration's fields, e.g. ``optim.lr=1e-5``: checks names and types, and
suggests the nearest name. Also their old names and values, so that configurations of earlier
versions can be read and resumed.

    override(run, ["rl.optim.lr=1e-5", "rl.algorithm=grpo", "rl.algorithm.credit=root",
                   "task.options.rows=40"])

A value is parsed as JSON if possible (``1e-5``, ``true``, ``null``, ``[1, 2]``), and is text
otherwise. If a field holds one of several classes, the name of a class (or a dotted path to a
custom one) sets a new instance with its defaults.

    with_new_names({"rl": {"sample": {"late": 4}}})  ->  {"rl": {"sample": {"grace_steps": 4}}}
    new_name("late")                                 ->  "rl.sample.grace_steps"
    with_new_names({"threads": 0})                   ->  {"threads": None}

Not here: modules that moved (``ramify/plugins.py``), and classes that were renamed
(``CHANGELOG.md``).
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ramify.errors import ConfigError, nearest

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
"""Old dotted name -> new one. Rows apply in order: the second starts from the result of the
first."""

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
"""Fields in which an earlier version stored 0 for none, never or automatic; ``*``: any name."""


def with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a stored configuration with today's names, and None where 0 meant that."""
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
    """A copy of ``config`` in which a 0 at ``path`` is None."""
    if not path:
        return None if config == 0 else config
    if not isinstance(config, Mapping):
        return config
    names = list(config) if path[0] == "*" else [path[0]] if path[0] in config else []
    return {**config, **{name: _zero_to_none(config[name], path[1:]) for name in names}}


def new_name(field: str) -> str | None:
    """Today's name of a field, given its old last name or dotted name; None if it was not
    renamed."""
    for old, new in RENAMED_FIELDS.items():
        if (
            field == old
            or field == old.rpartition(".")[2]
            or f"cadence.{old.rpartition('.')[2]}" == field
        ):
            return new
    return None


T = TypeVar("T")


class NameChoice(Protocol):
    """What the names of a field stand for: a registry, or one with a preset's options."""

    def build(self, value: Any) -> Any:
        """An instance of what ``value`` names. Raises ConfigError."""
        ...


Choices = Mapping[str, NameChoice]
"""Dotted name of a field -> what its names stand for."""


def override(config: T, assignments: Sequence[str], choices: Choices | None = None) -> T:
    """A copy of ``config`` with ``assignments`` applied. Raises ConfigError, which names the
    assignment."""
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or not name:
            raise ConfigError(
                f"'{assignment}' is not an override: write FIELD=VALUE, as in rl.optim.lr=1e-4"
            )
        config = _set(config, name.split("."), text, name, choices or {})
    return config


def _set(value: Any, path: Sequence[str], text: str, dotted_name: str, choices: Choices) -> Any:
    head, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        inner = (
            _set(value.get(head, {}), rest, text, dotted_name, choices) if rest else _parsed(text)
        )
        return {**value, head: inner}
    if not isinstance(value, msgspec.Struct):
        parent = dotted_name.rsplit("." + ".".join(path), 1)[0]
        if value is None:
            raise ConfigError(
                f"override {dotted_name}={text}: {parent} is not set here: set it as "
                f"a whole, as {parent}='{{…}}'"
            )
        raise ConfigError(
            f"override {dotted_name}={text}: {parent} is {value!r}, which has no field '{head}'"
        )
    if head not in value.__struct_fields__:
        suggestion = nearest(head, value.__struct_fields__)
        now_called = new_name(dotted_name) or new_name(head)
        advice = f"it is called {now_called} now" if now_called else suggestion
        raise ConfigError(f"override {dotted_name}={text}: no field '{head}': {advice}")
    current = getattr(value, head)
    fresh = (
        _set(current, rest, text, dotted_name, choices)
        if rest
        else _value(value, head, text, dotted_name, choices)
    )
    try:
        return msgspec.structs.replace(value, **{head: fresh})
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"override {dotted_name}={text}: {error}") from error


def _value(owner: msgspec.Struct, field: str, text: str, dotted_name: str, choices: Choices) -> Any:
    if dotted_name in choices and text not in ("null", "none", ""):
        return choices[dotted_name].build(text)
    kind = typing.get_type_hints(type(owner)).get(field, Any)
    tagged = _by_tag(kind, text)
    if tagged is not None:
        return tagged
    try:
        return msgspec.convert(_parsed(text), kind, strict=False)
    except msgspec.ValidationError as first:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            raise ConfigError(f"override {dotted_name}={text}: {first}") from first


def _by_tag(kind: Any, text: str) -> Any:
    """The class of a tagged union that ``text`` names, with its defaults."""
    for member in typing.get_args(kind):
        config = getattr(member, "__struct_config__", None)
        if config is not None and config.tag == text:
            return member()
    return None


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text
