"""Recipe files, and the runs that checkpoints were made by."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError
from ramify.train.algorithms import ALGORITHMS
from ramify.train.checkpoint import find, read_state
from ramify.train.config import CHOICES, Run, plain
from ramify.train.override import of_name, override
from ramify.train.redacted import cut_out
from ramify.train.renamed_fields import new_name


def recipe(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run of a recipe file, with overrides. Raises ConfigError for a file without ``def run()
    -> Run``."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"{path} is no recipe: there is no such file; recipes/tiny.py is one to begin with"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no recipe: give a Python file with `def run() -> Run`")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # a recipe may begin with another that lies beside it
    try:
        spec.loader.exec_module(module)
        make = getattr(module, "run", None)
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
        raise ConfigError(
            f"the recipe {path} cannot be carried out: {error!r}; {advice}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(run, Run):
        raise ConfigError(f"{path} has no `def run() -> Run` (ramify.train.config.Run)")
    return override(run, overrides, CHOICES)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a checkpoint, with the defaults of fields that it was written without,
    by an older version."""
    try:
        whole = plain(msgspec.convert(config, Run))
    except (
        ConfigError,
        msgspec.ValidationError,
    ):  # what was cut out may not fit: compared as it is
        return dict(config)
    return _completed(config, whole)


def _completed(found: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` with the keys of ``whole`` that it lacks, at every depth."""
    both = {**whole, **found}
    for name, value in found.items():
        if isinstance(value, Mapping) and isinstance(whole.get(name), Mapping):
            both[name] = _completed(value, whole[name])
    return both


def stored(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a checkpoint, or the latest of a run's folder, was made by. Raises
    ConfigError."""
    config = dict(read_state(find(Path(path))).config)
    given = [assignment.partition("=")[0] for assignment in overrides]
    unknown = next((name for name in cut_out(config) if name not in given), None)
    if unknown is not None:
        raise ConfigError(
            f"{path} does not say what {unknown} was, for it may be a secret: give the recipe that "
            "it was made by, or "
            f"{unknown}=VALUE"
        )
    try:
        run = msgspec.convert(config, Run)
        if run.rl is not None:
            algorithm = of_name(run.rl.algorithm.pop("name"), ALGORITHMS, "algorithm")
            rl = msgspec.structs.replace(
                run.rl, algorithm=msgspec.convert(run.rl.algorithm, algorithm)
            )
            run = msgspec.structs.replace(run, rl=rl)
    except (msgspec.ValidationError, KeyError) as error:
        raise ConfigError(
            f"{path} does not say all of its run ({error}): give the recipe that it was made by"
        ) from error
    return override(run, overrides, CHOICES)
