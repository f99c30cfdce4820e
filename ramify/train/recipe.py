"""Reads the configuration of a run from a recipe file, or from a checkpoint that the run wrote."""

from __future__ import annotations

import re
import traceback
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError
from ramify.nearest_name import nearest_name
from ramify.plugins import load_file
from ramify.train.advantages import ALGORITHMS
from ramify.train.checkpoint import read_state, resolve_checkpoint
from ramify.train.config import CHOICES, Run, plain
from ramify.train.config_redaction import check_types, redacted_keys
from ramify.train.override import new_name, override


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Execute a recipe file and return the run that its function ``run`` creates, with overrides
    applied. Raises ConfigError if the file has no ``def run() -> Run`` or cannot be executed.

    Example:
        run = train.load_recipe("recipes/tiny.py", ["rl.steps=10", "seed=3"])
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"{path} is not a recipe: the file does not exist; start with recipes/tiny.py"
        )
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"{path} is not a recipe: give a Python file with `def run() -> Run`")
    try:
        make = getattr(load_file(path), "run", None)
        run = make() if callable(make) else None
    except RamifyError:
        raise
    except Exception as error:
        unknown = re.match(r"Unexpected keyword argument '(\w+)'", str(error))
        now_called = new_name(unknown[1]) if unknown else None
        advice = "RAMIFY_DEBUG=1 shows where"
        if unknown and now_called:
            advice = f"{unknown[1]} is called {now_called} now"
        elif unknown and (close := nearest_name(unknown[1], _fields_of(Run))):
            advice = f"did you mean '{close}'?"
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == path.resolve()
        ]
        where = f" in line {lines[-1]}" if lines else ""
        if isinstance(error, SyntaxError) and error.filename == str(path.absolute()):
            where, reason = f" in line {error.lineno}", f"SyntaxError: {error.msg}"
        else:
            reason = _wrong_type(error) or repr(error)
        raise ConfigError(
            f"the recipe {path} cannot be executed{where}: {reason}; {advice}"
        ) from error
    if not isinstance(run, Run):
        raise ConfigError(f"{path} has no `def run() -> Run` (ramify.train.Run)")
    return override(run, overrides, CHOICES)


def _fields_of(kind: Any) -> set[str]:
    """Return the names of all fields of a configuration class and of the classes in its fields."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return set().union(*map(_fields_of, typing.get_args(kind)))
    inner = typing.get_type_hints(kind).values()
    return {*kind.__struct_fields__}.union(*map(_fields_of, inner))


def _wrong_type(error: Exception) -> str:
    """Return a message about the field that has the wrong type, if that is what caused ``error``,
    and an empty string otherwise. ``error`` was raised by the constructor of a configuration class,
    which uses its fields before ``check_types`` can check them."""
    if not isinstance(error, TypeError) or error.__traceback__ is None:
        return ""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    owner = frame.f_locals.get("self")
    if not isinstance(owner, msgspec.Struct):
        return ""
    try:
        check_types(owner, type(owner).__name__)
    except ConfigError as wrong:
        return str(wrong)
    return ""


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that a checkpoint stores, completed with the defaults of fields that
    were added in later versions."""
    try:
        complete = plain(msgspec.convert(config, Run))
    except (ConfigError, msgspec.ValidationError):
        return dict(config)  # redacted values may not be valid: compare them as they are
    if "sandbox" in config:  # its former fields, which another provider never obeyed, are gone
        config = {**config, "sandbox": complete["sandbox"]}
    return _completed(config, complete)


def _completed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``config`` in which missing keys are taken from ``defaults``, at every
    depth."""
    completed = {**defaults, **config}
    for name, value in config.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping):
            completed[name] = _completed(value, defaults[name])
    return completed


def load_stored_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Return the configuration of the run that made a checkpoint, with overrides applied. ``path``
    is a checkpoint, or the folder of a run, whose latest checkpoint is used. Raises ConfigError if
    there is none, or if a value was left out of the checkpoint as a possible secret and no override
    sets it."""
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
            algorithm = ALGORITHMS.of(run.rl.algorithm.pop("name"))
            rl = msgspec.structs.replace(
                run.rl, algorithm=msgspec.convert(run.rl.algorithm, algorithm)
            )
            run = msgspec.structs.replace(run, rl=rl)
    except (msgspec.ValidationError, KeyError) as error:
        raise ConfigError(
            f"{path} does not describe its run completely ({error}): give the recipe that made it"
        ) from error
    return override(run, overrides, CHOICES)
