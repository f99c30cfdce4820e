"""Read settings from options, ``RAMIFY_*`` variables or the config file, in that order.

    --max-cost 2      RAMIFY_MAX_COST=2      max-cost = 2
                                             [prices]
                                             path = "prices.json"

    --model mini                                   [models.mini]
                                                   model = "openai:gpt-5-mini"
                                                   api-key = "$TENANT_KEY"

The file's keys are the long options of ``ask``, with the same types, so that settings are listed
only once. Paths in the file are relative to the file. An unknown key or a bad value is an error
that names the file and the key: a mistyped budget must not go unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.user_folders import user_folder

if TYPE_CHECKING:
    from ramify.clients.model_config import Model
    from ramify.store.base import RunStore
    from ramify.store.folder_store import Store

TABLES = {
    "prices": {"path": "RAMIFY_PRICES"},
    "runs": {
        "path": "RAMIFY_HOME",
        "store": "RAMIFY_RUN_STORE",
        "max-bytes": "RAMIFY_STORE_MAX_BYTES",
    },
}
"""Table of the configuration file -> its keys -> the environment variable that overrides each
key."""
MODELS = "models"
"""Name of the table in the configuration file that holds one table per model. Each is named by
the model's alias and holds arguments of ``Model``."""
_OF_A_MODEL = ("model", "api-key", "base-url", "window", "price", "headers", "sampling", "vision")
OTHER_VARIABLES = frozenset(
    {
        "RAMIFY_CONFIG",
        "RAMIFY_DEBUG",
        "RAMIFY_LOG",
        "RAMIFY_LOG_FORMAT",
        "RAMIFY_RUN_KEY",
        "RAMIFY_RUN_KEY_FILE",
        "RAMIFY_SERVE_KEY",
        "RAMIFY_SYSTEMS",
        "RAMIFY_VIEW_TOKEN",
        *(name for keys in TABLES.values() for name in keys.values()),
    }
)
VALUE_FORMS: Mapping[Any, str] = {
    float: "a number: write it as 2 or 0.5, without a unit",
    int: "a whole number: write it as 10",
    bool: "a switch: write true or false",
}
"""Type of a setting -> text that says what its value must be, for an error message."""
INTERNAL_VARIABLES = frozenset(
    {
        "RAMIFY_ENGINE_KEY",
        "RAMIFY_RUN_ID",
        "RAMIFY_RUN_LOG",
    }
)
"""Environment variables that Ramify sets for the processes that it starts itself."""


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the configuration file.

    Raises ConfigError if ``RAMIFY_CONFIG`` names a file that does not exist. The default file need
    not exist.
    """
    given = environ.get("RAMIFY_CONFIG")
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"RAMIFY_CONFIG names {path}, which is not a file: create it, or unset "
                "RAMIFY_CONFIG"
            )
        return path
    return user_folder("config") / "config.toml"


def fill_missing_settings(
    given: Mapping[str, Any],
    kinds: Mapping[str, Any],
    environ: MutableMapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Fill in the settings that were not given, from environment variables or the configuration
    file.

    Environment variables take precedence. An option that is None or empty counts as not given.
    ``kinds`` is the type of each setting that a variable or the file may set. Some tables of the
    file set environment variables that other parts of the package read.
    """
    settings = {
        **_from_file(config_path(environ), kinds, environ),
        **_from_variables(environ, kinds),
    }
    settings.update(
        {name: value for name, value in given.items() if value is not None and value != []}
    )
    _check_aliases(settings, environ)
    return settings


def _check_aliases(settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a model's name is probably a misspelled alias of the configuration
    file."""
    for name in (settings.get("model"), *(settings.get("sub_model") or ())):
        if not isinstance(name, str) or ":" in name:
            continue
        from ramify.nearest_name import nearest_name
        from ramify.trained_policy_settings import packaged_policy_names

        aliases = named_models(environ)
        close = None if name in aliases else nearest_name(name, aliases, cutoff=0.7)
        if close is not None and name not in packaged_policy_names():
            raise ConfigError(
                f"model '{name}' is not defined in {config_path(environ)}: did you mean "
                f"'{close}'? A model that is not defined there has the form provider:model"
            )


def open_configured_store() -> RunStore:
    """Open the store of runs that the configuration file names.

    For commands that need no other settings.
    """
    _apply_tables()
    from ramify.store.store_opening import open_store

    return open_store()


def open_configured_folder_store(command: str) -> Store:
    """Open the configured run store for a command that needs it to be a folder.

    Raises ConfigError if the store is not kept in files.
    """
    _apply_tables()
    from ramify.store.store_opening import require_folder_store

    return require_folder_store(command)


def _apply_tables() -> None:
    path = config_path()
    for key, value in _read_config(path).items():
        if key in TABLES:
            _apply_table(path, key, value, os.environ)


def named_models(environ: Mapping[str, str] = os.environ) -> dict[str, Model]:
    """Return the models that the configuration file defines, by alias and with their API keys.

    Each ``[models.ALIAS]`` table defines one model.
    """
    path = config_path(environ)
    tables = _read_config(path).get(MODELS, {})
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise ConfigError(f"{path}: write one table for each model: [{MODELS}.ALIAS]")
    return {alias: _parse_model(path, alias, table, environ) for alias, table in tables.items()}


def _parse_model(
    path: Path, alias: str, table: dict[str, Any], environ: Mapping[str, str]
) -> Model:
    from ramify.clients.base import Sampling
    from ramify.clients.model_config import Model

    where = f"{path}: [{MODELS}.{alias}]"
    for key in table:
        if key not in _OF_A_MODEL:
            raise ConfigError(f"{where}: unknown key '{key}': {did_you_mean(key, _OF_A_MODEL)}")
    fields = {key.replace("-", "_"): value for key, value in table.items()}
    name = fields.pop("model", None)
    if not isinstance(name, str):
        raise ConfigError(f'{where} names no model: write model = "provider:model"')
    if "api_key" in fields:
        fields["api_key"] = _resolve_secret(f"{where} api-key", fields["api_key"], environ)
    if isinstance(headers := fields.get("headers"), dict):
        fields["headers"] = {
            header: _resolve_secret(f"{where} headers.{header}", value, environ)
            for header, value in headers.items()
        }
    try:
        if isinstance(sampling := fields.get("sampling"), dict):
            options = {key.replace("-", "_"): value for key, value in sampling.items()}
            fields["sampling"] = _convert(
                msgspec.to_builtins(Sampling(**options)), Sampling, f"{where} sampling"
            )
        return Model(name, alias=alias, environ=environ, **fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _resolve_secret(where: str, value: Any, environ: Mapping[str, str]) -> Any:
    """Resolve a secret of the form ``"$NAME"`` to the value of that environment variable.

    Other values are returned unchanged. Raises ConfigError if the variable is not set.
    """
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    if not environ.get(value[1:]):
        raise ConfigError(f"{where}: the variable {value[1:]} is not set: export {value[1:]}=…")
    return environ[value[1:]]


def unknown_variable_warnings(
    kinds: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield a warning for each ``RAMIFY_*`` environment variable that is not a known setting.

    The name may be misspelled.
    """
    known = {*map(environment_variable_name, kinds), *OTHER_VARIABLES}
    for name in sorted(environ):
        if name.startswith("RAMIFY_") and name not in known | INTERNAL_VARIABLES:
            yield f"{name} is not a variable that ramify reads: {did_you_mean(name, known)}"


def environment_variable_name(name: str) -> str:
    return f"RAMIFY_{name.upper()}"


def _from_variables(environ: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, kind in kinds.items():
        text = environ.get(environment_variable_name(name))
        if text:
            value = [item.strip() for item in text.split(",")] if _is_list(kind) else text
            values[name] = _convert(value, kind, environment_variable_name(name), lax=True)
    return values


def _from_file(
    path: Path, kinds: Mapping[str, Any], environ: MutableMapping[str, str]
) -> dict[str, Any]:
    values = {}
    for key, value in _read_config(path).items():
        name = key.replace("-", "_")
        if key == MODELS:  # see ``named_models``
            continue
        if key in TABLES:
            _apply_table(path, key, value, environ)
        elif name in kinds and "_" not in key:
            value = [value] if _is_list(kinds[name]) and isinstance(value, str) else value
            values[name] = _convert(value, kinds[name], f"{path}: {key}")
        else:
            known = [*(setting.replace("_", "-") for setting in kinds), *TABLES, MODELS]
            raise ConfigError(f"{path}: unknown key '{key}': {did_you_mean(key, known)}")
    return values


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of the configuration file, or an empty dict if there is no such file.

    Raises ConfigError if the file cannot be read or is not valid TOML.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    import tomllib

    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _apply_table(path: Path, table: str, content: Any, environ: MutableMapping[str, str]) -> None:
    """Set environment variables from a table of the configuration file, such as ``[prices]``.

    They apply to this process and its children.
    """
    keys = TABLES[table]
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: {table} must be a table: write [{table}], then {' and '.join(keys)} = …"
        )
    for key, value in content.items():
        if key not in keys:
            raise ConfigError(
                f"{path}: unknown key '{key}' in [{table}]: {did_you_mean(key, keys)}"
            )
        if key == "path":
            value = str(
                path.parent / Path(_convert(value, str, f"{path}: [{table}] {key}")).expanduser()
            )
        environ.setdefault(keys[key], str(value))


def _convert(value: Any, kind: Any, where: str, lax: bool = False) -> Any:
    try:
        return msgspec.convert(value, kind, strict=not lax)
    except msgspec.ValidationError as error:
        if kind in VALUE_FORMS:
            raise ConfigError(f"{where} = {value!r} is not {VALUE_FORMS[kind]}") from None
        raise ConfigError(
            f"{where} = {value!r} is invalid: {str(error)[:1].lower()}{str(error)[1:]}"
        ) from None


def _is_list(kind: Any) -> bool:
    return "list" in str(kind)
