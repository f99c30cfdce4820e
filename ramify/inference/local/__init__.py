"""The engine in this process: connecting it by a model name, ``local:FOLDER`` or the name of a
packaged policy.

Importing this package imports no tensor library; connecting does.
"""

from __future__ import annotations

from ramify.clients.base import Client
from ramify.inference.base import need_train_extra
from ramify.progress import report_progress
from ramify.trained_policy_settings import packaged_policy


def check_local_model(name: str) -> None:
    """Raise ConfigError if a model of this process, ``local:FOLDER`` or a packaged policy, or a
    package that it needs is missing. No weights are read, and no tensor library is imported."""
    need_train_extra(f"model '{name}'")
    from ramify.models.model_config_files import check_tokenizer, model_folder

    check_tokenizer(packaged_policy(name) or model_folder(name.removeprefix("local:")))


def connect(name: str, **_connection: object) -> Client:
    """An engine in this process, for ``local:…`` or the name of a packaged policy. Raises
    ConfigError if the model or a package that it needs is missing.

    Example:
        client = inference.connect("local:checkpoints/mine")
    """
    check_local_model(name)
    folder = packaged_policy(name) or name.removeprefix("local:")
    # The import takes longer than loading a small policy.
    with report_progress("starting", note=f"the engine for {name}"):
        from ramify.inference.local.local_client import LocalClient
        from ramify.models.load import load_policy

    return LocalClient(load_policy(folder), name=name)
