"""Describe the fields of a nested configuration: their dotted names, types, defaults and meanings.

It also finds the field that a wrong name probably stands for.

    fields(Run)                     rl.optim.lr   number or null   null   "Peak learning rate. …"
    suggestion(Run, run, "rl.learning_rate")   ->   did you mean 'rl.optim.lr'?

``ramify train --fields`` prints them, ``docs/fields.md`` lists them, and errors about unknown
fields suggest them. The meaning of a field is its docstring, read from the source of its class. A
field that may hold one of several classes has the fields of the class that it holds.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from ramify.nearest_name import nearest_name
from ramify.public_name_advice import NAMESPACES

OTHER_NAMES: Mapping[str, Sequence[str]] = {
    "lr": ("learning_rate", "learningrate", "peak_lr", "lr_rate"),
    "weight_decay": ("decay", "l2"),
    "max_grad_norm": ("grad_clip", "clip_grad", "gradient_clipping", "max_norm"),
    "warmup_steps": ("warmup_ratio", "num_warmup_steps"),
    "schedule": ("lr_scheduler", "lr_scheduler_type", "lr_schedule"),
    "kind": ("optimizer", "optim_name"),
    "rl.steps": ("max_steps", "num_steps", "total_steps", "iterations", "train_steps"),
    "sft.epochs": ("num_train_epochs", "num_epochs", "n_epochs"),
    "rl.sample.items": ("batch_size", "train_batch_size", "per_device_train_batch_size", "prompts"),
    "rl.rollout.group": ("num_generations", "group_size", "n_samples", "num_samples", "samples"),
    "rl.rollout.temperature": ("temp", "sampling_temperature"),
    "rl.loss.kl_beta": ("beta", "kl_coef", "kl_coeff", "kl_penalty"),
    "rl.loss.entropy": ("entropy_coef", "entropy_coeff"),
    "rl.loss.policy": ("loss_type", "policy_loss"),
    "rl.sample.minibatches": ("num_minibatches", "ppo_epochs", "mini_batches"),
    "limits.max_reply_tokens": (
        "max_tokens",
        "max_new_tokens",
        "max_completion_length",
        "response_length",
    ),
    "policy.path": ("model", "model_name", "model_name_or_path", "checkpoint", "base_model"),
    "sandbox.cell_s": ("timeout", "timeout_s", "cell_timeout"),
    "policy.device": ("cuda", "gpu", "devices"),
    "policy.lora": ("peft", "peft_config", "use_peft", "adapters"),
    "compute.precision": ("bf16", "fp16", "mixed_precision"),
    "compute.recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "compute.shard.ranks": ("num_gpus", "world_size", "nproc", "n_gpus"),
    "task.name": ("dataset", "env", "environment", "data", "train_file"),
    "schedule.evaluate_every": ("eval_steps", "eval_every", "test_freq"),
    "schedule.checkpoint_every": ("save_steps", "save_every", "save_freq"),
    "trackers": ("report_to", "logger", "wandb"),
}
"""Maps the full name of a field, or the last part of a name, to the names that other trainers and
their users give it."""
_NONE = re.compile(r"\bNone\b")
"""Python's word for ``null``, which is what a configuration has."""
_SURE = 0.75
"""Minimum similarity of names at which a field of the same section is suggested before others."""
_MOST_SUGGESTED = 3


class ConfigField(NamedTuple):
    """One field of a configuration."""

    name: str
    """Dotted name, such as ``rl.optim.lr``."""
    owner: type
    """Class that declares the field."""
    type_words: str
    """The field's type in words, such as ``number or null``."""
    default: Any
    """The default in that class; ``msgspec.NODEFAULT`` if the field must be given."""
    value: Any
    """The field's value in the described configuration, or its default."""
    about: str
    """The field's docstring on one line. If it has none and is a section, the docstring of the
    section's class; otherwise empty."""
    section: type[msgspec.Struct] | None
    """The section's struct class, if this field is a section, that is, has fields inside it."""


def fields(
    kind: type[msgspec.Struct], value: Any = None, prefix: str = ""
) -> Iterator[ConfigField]:
    """Yield all fields of a configuration class and of the sections inside it, each section before
    its fields.

    ``value`` is a configuration whose values are yielded; None: defaults.

    Example:
        fields(Run)
        fields(Run, load_recipe("recipes/tiny.py"))
    """
    hints, meanings = typing.get_type_hints(kind), field_docstrings(kind)
    defaults = _defaults(kind)
    for name in kind.__struct_fields__:
        default = defaults[name]
        current = default if value is None else getattr(value, name)
        section = _section_class(hints.get(name, Any), current)
        yield ConfigField(
            prefix + name,
            kind,
            describe_type(hints.get(name, Any), section),
            default,
            current,
            _NONE.sub("null", meanings.get(name, ""))
            or ("" if section is None else class_summary(section)),
            section,
        )
        if section is not None:
            inner = current if isinstance(current, section) else None
            yield from fields(section, inner, f"{prefix}{name}.")


def _defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the default value of each field of a struct class, by field name."""
    found: dict[str, Any] = {}
    for each in msgspec.structs.fields(kind):
        if each.default_factory is not msgspec.NODEFAULT:
            found[each.name] = each.default_factory()
        else:
            found[each.name] = each.default
    return found


def _section_class(hint: Any, value: Any) -> type[msgspec.Struct] | None:
    """Return the struct class of ``value`` if it is a section (a nested struct).

    Otherwise return the only struct class that its type allows, or None.
    """
    if isinstance(value, msgspec.Struct):
        return type(value)
    structs = [each for each in _union_members(hint) if _is_struct(each)]
    return structs[0] if len(structs) == 1 else None


def _union_members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for each in typing.get_args(hint) for inner in _union_members(each)]
    return [hint]


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
}


def describe_type(hint: Any, section: type | None = None) -> str:
    """Describe a type in plain words.

    >>> describe_type(tuple[int, ...]), describe_type(float | None)
    ('list of whole number', 'number or null')
    >>> describe_type(Literal["a", "b"])
    "'a' or 'b'"
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "section" if section is not None else "any value"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(describe_type(each, section) for each in _union_members(hint))
        )
    if origin is typing.Literal:
        return " or ".join(repr(each) for each in inner)
    if origin in (tuple, list) or hint in (tuple, list):
        if len(inner) > 1 and inner[-1] is not Ellipsis:
            return f"list of {len(inner)} values ({', '.join(map(describe_type, inner))})"
        return f"list of {describe_type(inner[0])}" if inner else "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "map" if inner[1] is Any else f"map from names to: {describe_type(inner[1])}"
    if _is_struct(hint):
        return "section"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


@functools.cache
def field_docstrings(kind: type) -> dict[str, str]:
    """Return each field's docstring on one line, by field name, for a class and its bases.

    A class whose source cannot be read has none.
    """
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each is msgspec.Struct or not _is_struct(each):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):
            continue
        owner = tree.body[0]
        body = owner.body if isinstance(owner, ast.ClassDef) else []
        for node, after in pairwise(body):
            match node, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def public_path(kind: type) -> str:
    """Return the path under which a class is imported, such as ``train.RlSpec`` for ``from ramify
    import train``.

    A class that is not public has its own name alone.
    """
    for namespace in NAMESPACES:
        if kind.__name__ in importlib.import_module(namespace).__all__:
            return f"{namespace.partition('.')[2] or namespace}.{kind.__name__}"
    return kind.__name__


def class_summary(kind: type) -> str:
    """Return the first sentence of the docstring of a class, on one line."""
    text = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    sentence, dot, _ = text.partition(". ")
    return sentence + "." if dot else text


def unknown_field_hint(
    kind: type[msgspec.Struct],
    value: Any,
    name: str,
    *,
    with_class: bool = False,
    with_known: bool = True,
) -> str:
    """Return a hint for an unknown field, such as ``did you mean 'rl.optim.lr'?``.

    ``kind`` is the class of the whole configuration, in which the field is searched, and ``value``
    the configuration itself, if there is one. With ``with_class``, the class of a field in another
    section is named, for people who write a recipe. Without ``with_known``, the hint does not list
    the fields of the section that was named.

    Fields of the section that was named come first if they are similar. Then come fields of any
    section with the same name, or with the name that this project has for it. Sections that are
    not set are searched only if no others have it.
    """
    every = list(fields(kind, value))
    section, wrong = _known_part(name, {each.name for each in every})
    inside = [
        each.name.removeprefix(section)
        for each in every
        if each.name.startswith(section) and "." not in each.name.removeprefix(section)
    ]
    known = f" known: {', '.join(sorted(inside))}" if with_known else ""
    first, last = wrong.partition(".")[0], wrong.rpartition(".")[2]
    if close := nearest_name(first, inside, _SURE):
        return f"did you mean '{close}'?{known}"
    found = _find_similar_fields(every, {last.casefold(), name.replace(".", "_")}, name, section)
    if not found and (close := nearest_name(first, inside)):
        return f"did you mean '{close}'?{known}"
    if not found:
        ends = dict.fromkeys(each.name.rpartition(".")[2] for each in reversed(every))
        end = nearest_name(last, ends, _SURE)
        found = [] if end is None else _find_similar_fields(every, {end}, name, section)
    shown = []
    for each in found[:_MOST_SUGGESTED]:
        path = each.name.removeprefix(section)
        is_inside = "." not in path
        call = f"{each.owner.__name__}({each.name.rpartition('.')[2]}=…)"
        shown.append(
            f"'{path}'"
            if is_inside
            else f"'{each.name}', which is {call}"
            if with_class
            else f"'{each.name}'"
        )
    return (f"did you mean {' or '.join(shown)}?{known}" if shown else known).lstrip()


def _known_part(name: str, every: set[str]) -> tuple[str, str]:
    """Split a dotted name into the longest prefix that is a known section, with its dot, and the
    rest."""
    parts = name.split(".")
    known = 0
    while known < len(parts) - 1 and ".".join(parts[: known + 1]) in every:
        known += 1
    return "".join(f"{part}." for part in parts[:known]), ".".join(parts[known:])


def _find_similar_fields(
    every: Sequence[ConfigField], wanted: set[str], name: str, section: str
) -> list[ConfigField]:
    """Return fields elsewhere in the configuration that a user may have meant by ``wanted``.

    ``wanted`` holds field names, which may be those of another trainer. If some are in ``section``,
    the others are left out. If some are in sections that the run sets, those in unset sections are
    left out. Short names come first, then those that resemble ``name``.
    """
    meant = {
        *wanted,
        *(ours for ours, others in OTHER_NAMES.items() if not wanted.isdisjoint(others)),
    }
    unset = tuple(
        f"{each.name}."
        for each in every
        if each.section is not None and each.value is None and not section.startswith(each.name)
    )
    found = [each for each in every if any(f".{each.name}".endswith(f".{end}") for end in meant)]
    found = [each for each in found if section and each.name.startswith(section)] or found
    found = [each for each in found if not each.name.startswith(unset)] or found
    likeness = {each.name: SequenceMatcher(None, name, each.name).ratio() for each in found}
    return sorted(found, key=lambda each: (each.name.count("."), -likeness[each.name]))
