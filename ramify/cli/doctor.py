"""``ramify doctor``: what this installation has and lacks. Names of keys are shown, never their
values."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from ramify import __version__
from ramify.cli.ask import KINDS, sandbox_spec
from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import CommandSpec
from ramify.cli.settings import config_path, fill, unknown_variables
from ramify.cli.terminal_text import clean, size
from ramify.clients.prices import PriceTable
from ramify.clients.providers import PROVIDERS
from ramify.errors import RamifyError
from ramify.sandbox.base import open_sandbox

EXTRAS = {
    "anthropic": "anthropic",
    "litellm": "litellm",
    "pdf": "pypdf",
    "ipython": "IPython",
    "mcp": "mcp",
    "monty": "pydantic_monty",
    "modal": "modal",
    "e2b": "e2b",
    "daytona": "daytona",
    "prime": "prime_sandboxes",
    "math": "math_verify",
    "train": "torch",
    "datasets": "datasets",
    "ray": "ray",
    "tensorboard": "tensorboardX",
    "lora": "peft",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "otel": "opentelemetry.sdk",
    "cluster": "simpy",
}
"""Extra -> the module that it brings."""
_KEYS_OF_OTHERS = {"anthropic": ("ANTHROPIC_API_KEY",)}


def doctor(words: list[str]) -> int:
    is_well = True
    for name, part in _PARTS.items():
        try:
            lines = list(part())
        except RamifyError as error:
            lines, is_well = [f"wrong: {error}"], False
        for index, line in enumerate(lines):
            print(clean(f"{'' if index else name:<10} {line}"))
    return ExitCode.ANSWERED if is_well else ExitCode.ERROR


def _version() -> Iterator[str]:
    yield f"{__version__}, Python {platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"


def _config() -> Iterator[str]:
    path = config_path()
    yield f"{path}{'' if path.exists() else ' (not there)'}"
    yield from unknown_variables(KINDS)
    settings = fill({}, KINDS)
    yield from (f"{name.replace('_', '-')} = {value!r}" for name, value in settings.items())
    if not settings.get("model"):
        yield "no model is set: ramify ask needs --model"


def found_keys(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Provider -> the variable that holds its key, where one does."""
    variables = {
        name: provider.key_variables for name, provider in PROVIDERS.items()
    } | _KEYS_OF_OTHERS
    found = {
        name: next((each for each in keys if environ.get(each)), "")
        for name, keys in variables.items()
    }
    return {name: variable for name, variable in found.items() if variable}


def _keys() -> Iterator[str]:
    found = found_keys()
    if not found:
        yield "none found; models on this machine need none"
    for name, variable in found.items():
        yield f"{name}: {variable} is set"
    for name, provider in PROVIDERS.items():
        if url := os.environ.get(provider.url_variable):
            yield f"{name}: {provider.url_variable} = {url.rpartition('@')[2]}"


def _prices() -> Iterator[str]:
    PriceTable.load()
    yield os.environ.get("RAMIFY_PRICES") or "as packaged"


def _sandbox() -> Iterator[str]:
    spec = sandbox_spec(fill({}, KINDS))
    sandbox = open_sandbox(spec)
    can: dict[str, Any] = msgspec.to_builtins(sandbox.caps)
    yield f"{spec.provider}: {', '.join(name.replace('_', ' ') for name, value in can.items() if value) or 'nothing'}"
    if lacks := [name.replace("_", " ") for name, value in can.items() if not value]:
        yield f"does not: {', '.join(lacks)}"
    describe: Callable[[], list[str]] = getattr(sandbox, "describe", list)
    yield from describe()
    if sandbox.warning:
        yield f"warning: {sandbox.warning}"


def _extras() -> Iterator[str]:
    for extra, module in EXTRAS.items():
        if _is_installed(module):
            yield f"{extra}: {module} {_version_of(module)}".rstrip()
        else:
            yield f"{extra}: not installed (pip install 'ramify[{extra}]')"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that is not there
        return False


def _version_of(module: str) -> str:
    """Empty where another distribution brings the module, as ``mlflow-skinny`` may."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _store() -> Iterator[str]:
    from ramify.store.store import Store

    store = Store()
    yield f"{store.root}, {len(store.runs()):,} runs, {size(store.size())}"


_PARTS = {
    "ramify": _version,
    "config": _config,
    "keys": _keys,
    "prices": _prices,
    "sandbox": _sandbox,
    "extras": _extras,
    "store": _store,
}

COMMAND = CommandSpec(
    "doctor",
    "Show keys found, the sandbox and its strength, extras, store and configuration. Exit code 1 "
    "if something\nis wrong.",
    doctor,
)
