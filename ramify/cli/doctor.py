"""The command ``ramify doctor``: check the installation, and list what is available and what is
missing.

Names of API keys are shown, never their values.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ramify import __version__
from ramify.cli.ask import KINDS, sandbox_spec
from ramify.cli.parser import ExitCode, SubcommandSpec
from ramify.cli.settings import config_path, fill_missing_settings, unknown_variable_warnings
from ramify.cli.terminal_text import format_size, pluralize
from ramify.clients.providers import PROVIDERS, PriceTable
from ramify.errors import RamifyError
from ramify.pip_install_command import install_command
from ramify.sandbox.base import open_sandbox
from ramify.terminal_sanitizer import strip_control_characters

EXTRAS = {
    "litellm": "litellm",
    "inputs": "duckdb",
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
    "vllm": "vllm",
    "tensorboard": "tensorboardX",
    "lora": "peft",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "otel": "opentelemetry.sdk",
    "cluster": "simpy",
    "verifiers": "verifiers",
}
"""Optional extra of the package -> the module that it installs."""
_OPTIONAL = ("fork", "starts_processes", "shares_context")
"""Capabilities of a sandbox whose lack protects the host or only costs time."""
_OTHER_KEYS = {"anthropic": ("ANTHROPIC_API_KEY",)}


def doctor(words: list[str]) -> int:
    is_well = True
    for name, part in _PARTS.items():
        try:
            lines = list(part())
        except RamifyError as error:
            lines, is_well = [f"error: {error}"], False
        for index, line in enumerate(lines):
            print(strip_control_characters(f"{'' if index else name:<10} {line}"))
    return ExitCode.ANSWERED if is_well else ExitCode.ERROR


def _version() -> Iterator[str]:
    yield (
        f"{__version__}, Python {platform.python_version()} ({sys.executable}), "
        f"{platform.system()} {platform.machine()}"
    )


def _config() -> Iterator[str]:
    path = config_path()
    yield f"{path}{'' if path.exists() else ' (does not exist)'}"
    yield from unknown_variable_warnings(KINDS)
    settings = fill_missing_settings({}, KINDS)
    yield from (f"{name.replace('_', '-')} = {value!r}" for name, value in settings.items())
    if not settings.get("model"):
        yield "no model is set: ramify ask needs --model"


def api_key_variables() -> dict[str, str]:
    """Return the name of one API-key environment variable per provider that has a key set."""
    variables = {name: provider.key_variables for name, provider in PROVIDERS.items()} | _OTHER_KEYS
    first_set = {
        name: next((variable for variable in candidates if os.environ.get(variable)), "")
        for name, candidates in variables.items()
    }
    return {name: variable for name, variable in first_set.items() if variable}


def _keys() -> Iterator[str]:
    keys = api_key_variables()
    if not keys:
        yield "none found (local models need none)"
    for name, variable in keys.items():
        yield f"{name}: {variable} is set"
    for name, provider in PROVIDERS.items():
        if url := os.environ.get(provider.url_variable):
            yield f"{name}: {provider.url_variable} = {url.rpartition('@')[2]}"


def _prices() -> Iterator[str]:
    PriceTable.load()
    yield os.environ.get("RAMIFY_PRICES") or "as packaged"


def _sandbox() -> Iterator[str]:
    spec = sandbox_spec(fill_missing_settings({}, KINDS))
    sandbox = open_sandbox(spec)
    caps: dict[str, Any] = msgspec.to_builtins(sandbox.caps)
    present = [name.replace("_", " ") for name, value in caps.items() if value]
    missing = [name.replace("_", " ") for name in caps if not caps[name] and name not in _OPTIONAL]
    optional = [name.replace("_", " ") for name in _OPTIONAL if not caps[name]]
    yield f"{spec.provider}: {', '.join(present) or 'nothing'}"
    if missing:
        yield f"missing: {', '.join(missing)}"
    if optional:
        yield f"not possible here, and not needed: {', '.join(optional)}"
    describe: Callable[[], list[str]] = getattr(sandbox, "describe", list)
    yield from describe()
    if sandbox.warning:
        yield f"warning: {sandbox.warning}"


def _extras() -> Iterator[str]:
    for extra, module in EXTRAS.items():
        if _is_installed(module):
            yield f"{extra}: {module} {_version_of(module)}".rstrip()
        else:
            yield f"{extra}: not installed ({install_command(extra)})"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False


def _version_of(module: str) -> str:
    """Return a module's installed version, or ``""`` if another distribution provides it.

    An example of such a distribution is ``mlflow-skinny``.
    """
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _store() -> Iterator[str]:
    from ramify.store.folder_store import Store

    store = Store()
    yield f"{store.root}, {pluralize(len(store.runs()), 'run')}, {format_size(store.size())}"


_PARTS = {
    "ramify": _version,
    "config": _config,
    "keys": _keys,
    "prices": _prices,
    "sandbox": _sandbox,
    "extras": _extras,
    "store": _store,
}

COMMAND = SubcommandSpec(
    "doctor",
    "Check the API keys, the sandbox and its isolation, optional extras, the run store and the\n"
    "configuration. The exit code is 1 if there is a problem.",
    doctor,
)
