"""Recipe files, and the runs that made checkpoints."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError
from ramify.plugins import load_file
from ramify.train.advantages import ALGORITHMS
from ramify.train.checkpoint import find, read_state
from ramify.train.config import CHOICES, Run, plain
from ramify.train.config_fields import cut_out
from ramify.train.override import new_name, override


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run of a recipe file, with overrides. Raises ConfigError for a file without ``def run()
    -> Run``.

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
        advice = (
            f"{unknown[1]} is called {now_called} now"
            if unknown and now_called
            else "RAMIFY_DEBUG=1 shows where"
        )
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == path.resolve()
        ]
        where = f" in line {lines[-1]}" if lines else ""
        raise ConfigError(
            f"the recipe {path} cannot be executed{where}: {error!r}; {advice}"
        ) from error
    if not isinstance(run, Run):
        raise ConfigError(f"{path} has no `def run() -> Run` (ramify.train.Run)")
    return override(run, overrides, CHOICES)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a checkpoint, completed with the defaults of fields that an older
    version did not write."""
    try:
        complete = plain(msgspec.convert(config, Run))
    except (ConfigError, msgspec.ValidationError):
        return dict(config)  # redacted values may not be valid: compare them as they are
    return _completed(config, complete)


def _completed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the keys of ``defaults`` that it lacks, at every depth."""
    completed = {**defaults, **config}
    for name, value in config.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping):
            completed[name] = _completed(value, defaults[name])
    return completed


def stored(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that made a checkpoint, or the latest checkpoint in a run's folder. Raises
    ConfigError."""
    config = dict(read_state(find(Path(path))).config)
    overridden = [assignment.partition("=")[0] for assignment in overrides]
    unknown = next((name for name in cut_out(config) if name not in overridden), None)
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
