"""Read the configuration of a run from a recipe file, or from a checkpoint of the run."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError, did_you_mean
from ramify.plugins import load_file
from ramify.train.advantages import ALGORITHMS
from ramify.train.checkpoint import read_state, resolve_checkpoint
from ramify.train.config import CHOICES, Run, to_plain_data
from ramify.train.config_fields import fields, unknown_field_hint
from ramify.train.config_overrides import override, renamed_field
from ramify.train.config_redaction import check_field_types, redacted_keys
from ramify.training_run_recognition import append_training_run_hint


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Execute a recipe file and return the run that its function ``run`` creates, with overrides
    applied.

    Raises ConfigError if the file has no ``def run() -> Run`` or cannot be executed.

    Example:
        run = train.load_recipe("recipes/tiny.py", ["rl.steps=10", "seed=3"])
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"{path} is not a recipe: the file does not exist; start with recipes/tiny.py"
        )
    if not path.is_file() or path.suffix != ".py":
        problem = f"{path} is not a recipe: give a Python file with `def run() -> Run`"
        raise ConfigError(append_training_run_hint(problem, path))
    try:
        make = getattr(load_file(path), "run", None)
        run = make() if callable(make) else None
    except RamifyError:
        raise
    except Exception as error:
        raise ConfigError(_cannot_be_executed(path, error)) from error
    if not isinstance(run, Run):
        raise ConfigError(f"{path} has no `def run() -> Run` (ramify.train.Run)")
    return override(run, overrides, CHOICES)


def _cannot_be_executed(path: Path, error: Exception) -> str:
    """Format the error message for an exception that a recipe raised.

    It shows the line of the recipe, what was wrong, and what to write instead if that is known.
    """
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path.resolve()
    ]
    where = f" in line {lines[-1]}" if lines else ""
    reason, advice = repr(error), "; RAMIFY_DEBUG=1 shows where"
    if isinstance(error, SyntaxError) and error.filename == str(path.absolute()):
        where, reason = f" in line {error.lineno}", f"SyntaxError: {error.msg}"
    elif wrong := _wrong_type(error) or _wrong_argument(error):
        reason, advice = wrong, ""
    elif isinstance(error, ImportError | AttributeError) and "ramify" in str(error):
        reason, advice = f"{type(error).__name__}: {error}", ""  # with the right name
    return f"the recipe {path} cannot be executed{where}: {reason}{advice}"


def _wrong_argument(error: Exception) -> str:
    """Return an error message about a wrong configuration argument, if one caused ``error``.

    The field may be unknown, or given without its name. Returns an empty string otherwise.
    """
    unknown = re.match(r"Unexpected keyword argument '(\w+)'", str(error))
    if not isinstance(error, TypeError) or error.__traceback__ is None:
        return ""
    kind = _called_class(error.__traceback__)
    if str(error).startswith("Extra positional arguments") and kind is not None:
        names = kind.__struct_fields__
        example = f"{kind.__name__}({names[0]}=…)"
        return (
            f"{kind.__name__} takes its fields by name, as in {example}: {', '.join(sorted(names))}"
        )
    if unknown is None:
        return ""
    if now_called := renamed_field(unknown[1]):
        return f"{unknown[1]} is called {now_called} now"
    owner = "" if kind is None else kind.__name__
    sections = (
        [""] if kind is Run else [f"{each.name}." for each in fields(Run) if each.section is kind]
    )
    if kind is not None and not sections:
        advice = did_you_mean(unknown[1], kind.__struct_fields__)
    else:
        section = sections[0] if sections and kind is not None else ""
        advice = unknown_field_hint(Run, None, section + unknown[1], with_class=True)
    return f"{owner or 'a configuration'} has no field '{unknown[1]}': {advice}"


def _called_class(trace: TracebackType) -> Any:
    """Return the configuration class that the last call in a traceback was meant to create, or None
    if the source does not show it."""
    *_, (frame, line) = traceback.walk_tb(trace)
    *_, summary = traceback.extract_tb(trace)
    try:
        tree = ast.parse(Path(summary.filename).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    place = (line, summary.colno, summary.end_lineno, summary.end_colno)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) != place:
            continue
        found: Any = None
        for part in ast.unparse(node.func).split("."):
            names = {**frame.f_globals, **frame.f_locals}
            found = names.get(part) if found is None else getattr(found, part, None)
            if found is None:
                return None
        is_struct = isinstance(found, type) and issubclass(found, msgspec.Struct)
        return found if is_struct else None
    return None


def _wrong_type(error: Exception) -> str:
    """Return a message about a configuration field of the wrong type if one caused ``error``.

    The constructor of a configuration class can raise ``error`` when it uses its fields before
    ``check_field_types`` checks them. Returns an empty string otherwise.
    """
    if not isinstance(error, TypeError | AttributeError) or error.__traceback__ is None:
        return ""
    owners = [
        frame.f_locals.get("self")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "__post_init__"
    ]
    for owner in owners:
        if isinstance(owner, msgspec.Struct):
            try:
                check_field_types(owner, type(owner).__name__)
            except ConfigError as wrong:
                return str(wrong)
    return ""


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that a checkpoint stores, with defaults for fields that were added
    in later versions."""
    try:
        complete = to_plain_data(msgspec.convert(config, Run))
    except (ConfigError, msgspec.ValidationError):
        return dict(config)  # redacted values may not be valid: compare them as they are
    if "sandbox" in config:  # its former fields, which another provider never obeyed, are gone
        config = {**config, "sandbox": complete["sandbox"]}
    return _fill_defaults(config, complete)


def _fill_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``config`` with missing keys filled in recursively from ``defaults``."""
    completed = {**defaults, **config}
    for name, value in config.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping):
            completed[name] = _fill_defaults(value, defaults[name])
    return completed


def load_stored_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Return the configuration of the run that made a checkpoint, with overrides applied.

    ``path`` is a checkpoint, or the folder of a run, whose latest checkpoint is used. Raises
    ConfigError if there is none. It is also raised if a possible secret was left out of the
    checkpoint and no override sets it.
    """
    config = dict(read_state(resolve_checkpoint(Path(path))).config)
    overridden = [assignment.partition("=")[0] for assignment in overrides]
    unknown = next((name for name in redacted_keys(config) if name not in overridden), None)
    if unknown is not None:
        raise ConfigError(
            f"{path} does not contain {unknown}, since it may be a secret: give the recipe that "
            f"made it, or {unknown}=VALUE"
        )
    try:
        run = msgspec.convert(config, Run)
        if run.rl is not None:
            algorithm = ALGORITHMS.resolve(run.rl.algorithm.pop("name"))
            rl = msgspec.structs.replace(
                run.rl, algorithm=msgspec.convert(run.rl.algorithm, algorithm)
            )
            run = msgspec.structs.replace(run, rl=rl)
    except (msgspec.ValidationError, KeyError) as error:
        raise ConfigError(
            f"{path} does not describe its run completely ({error}): give the recipe that made it"
        ) from error
    return override(run, overrides, CHOICES)
