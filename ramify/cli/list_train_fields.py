"""List the fields of a training recipe: ``ramify train --fields [RECIPE] [SECTION…]``.

    rl.optim.lr = 0.0005      default null
      number or null          Peak learning rate. …

On a terminal each field has two lines. In a pipe it is one line, with tabs between its name, value,
default, type, class and meaning. ``ramify/train/config_fields.py`` finds the fields and their
meanings.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.parser import UsageError
from ramify.terminal_sanitizer import strip_controls_to_line

if TYPE_CHECKING:
    from ramify.train.config_fields import ConfigField

_MOST_SHOWN = 60
"""Maximum number of characters of a value that are shown on a terminal."""
COLUMNS = ("name", "value", "default", "type", "class", "meaning")


def print_fields(words: Sequence[str], resume: str | None) -> None:
    """Print the configuration fields of a training run to stdout.

    ``words`` are the sections and fields to print, or all fields if there are none. They may also
    contain a recipe and overrides, whose values are then printed. ``resume`` is a run or a
    checkpoint to use instead of a recipe. Raises UsageError for an unknown section.
    """
    from ramify.train.config import CHOICES, Run
    from ramify.train.config_fields import fields, unknown_field_hint
    from ramify.train.config_overrides import override
    from ramify.train.recipe import load_recipe, load_stored_run

    overrides = [word for word in words if "=" in word]
    recipes = [word for word in words if word.endswith(".py")]
    names = [word for word in words if word not in overrides and word not in recipes]
    if len(recipes) > 1 or (overrides and not recipes and resume is None):
        raise UsageError("--fields takes one recipe, or --resume DIR, with any FIELD=VALUE")
    run = (
        load_recipe(recipes[0])
        if recipes
        else load_stored_run(resume)
        if resume is not None
        else None
    )
    run = override(run, overrides, CHOICES) if run is not None else None
    every = list(fields(Run, run))
    known = {each.name for each in every}
    for name in names:
        if name not in known:
            raise UsageError(f"no field '{name}': {unknown_field_hint(Run, run, name)}")
    chosen = [
        each
        for each in every
        if not names or any(f"{each.name}.".startswith(f"{name}.") for name in names)
    ]
    if not sys.stdout.isatty():
        print("\t".join(COLUMNS))
    for each in chosen:
        for line in _on_terminal(each) if sys.stdout.isatty() else [_row(each)]:
            print(line)


def _row(field: ConfigField) -> str:
    return "\t".join(map(strip_controls_to_line, field_table_cells(field)))


def _on_terminal(field: ConfigField) -> Iterator[str]:
    name, value, default, kind, owner, meaning = field_table_cells(field)
    width = shutil.get_terminal_size().columns
    if field.section is not None:
        yield ""
        yield f"{name}  {owner}" + ("" if value == default or not value else f"  {value}")
    else:
        shown = value if len(value) <= _MOST_SHOWN else f"{value[: _MOST_SHOWN - 1]}…"
        changed = "" if value == default else f"   default {default}" if default else ""
        yield f"{name} = {shown or '…'}   ({kind}){changed}"
    yield from textwrap.wrap(
        meaning, max(width, 40), initial_indent="    ", subsequent_indent="    "
    )


def field_table_cells(field: ConfigField) -> tuple[str, str, str, str, str, str]:
    """Return the cells of the table row that describes a configuration field.

    They are in the order of ``COLUMNS``. The value of a section is only ``set``, since each of its
    fields has a separate row. The default is empty if the field has none and must be given.
    """
    from ramify.train.config_fields import public_path

    owner = field.owner if field.section is None else field.section
    return (
        field.name,
        _format_value(field, field.value),
        _format_value(field, field.default),
        field.type_words,
        public_path(owner),
        field.about.replace("``", "`"),
    )


def _format_value(field: ConfigField, value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, msgspec.Struct):
        return type(value).__name__
    try:
        return msgspec.json.encode(value).decode()
    except TypeError:
        return repr(value)
