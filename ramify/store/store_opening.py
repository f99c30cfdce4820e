"""Opens the store for a command: the store that an environment variable names, or by default a
folder (``Store``).

    RAMIFY_RUN_STORE="my_store.py:SqliteStore=/data/runs.db"     calls it with the text after "="
    RAMIFY_RUN_STORE="sqlite=/data/runs.db"                      the entry point of a package

What a store has to implement is defined in ``base.py``. A Python program passes its store to
``RLM`` directly.
"""

from __future__ import annotations

import os

from ramify.errors import ConfigError, RamifyError
from ramify.plugins import PluginRegistry
from ramify.store.base import RunStore
from ramify.store.folder_store import Store

STORES = PluginRegistry("store", "ramify.stores", {"files": "ramify.store.folder_store:Store"})
"""Store name -> a class or function that returns a ``RunStore``. It takes at most one argument, the
location.
"""
VARIABLE = "RAMIFY_RUN_STORE"


def open_store() -> RunStore:
    """Open the store that the environment variable ``RAMIFY_RUN_STORE`` names.

    The default is a folder store in ``RAMIFY_HOME``. Raises ConfigError if the name is unknown.
    """
    given = os.environ.get(VARIABLE, "")
    if not given:
        return Store()
    name, _, place = given.partition("=")
    entry = STORES.resolve(name)
    try:
        store = entry(place) if place else entry()
    except RamifyError:
        raise
    except Exception as error:  # code of a plug-in, which may raise anything
        raise ConfigError(
            f"{VARIABLE}={given}: the store could not be opened: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(store, RunStore):
        raise ConfigError(
            f"{VARIABLE}={given}: it created a {type(store).__name__}: give a class that inherits "
            "from ramify.RunStore"
        )
    return store


def require_folder_store(what: str) -> Store:
    """Open the store for a command that requires a store in a folder.

    ``what`` names the command in the error. Raises ConfigError for any other store.
    """
    store = open_store()
    if not isinstance(store, Store):
        raise ConfigError(
            f"{what} works only with a store in a folder, which {VARIABLE}={os.environ[VARIABLE]} "
            f"is not: unset {VARIABLE} for this command"
        )
    return store
