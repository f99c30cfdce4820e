"""The inference engine that runs in this process.

A model name selects it: ``local:FOLDER``, or the name of a policy that ships with the package.

Importing this package imports no tensor library; ``connect`` does.
"""

from __future__ import annotations

from ramify.clients.base import Client
from ramify.inference.base import require_train_extra
from ramify.progress import track_progress
from ramify.trained_policy_settings import packaged_policy_folder


def check_local_model_available(name: str) -> None:
    """Raise ConfigError if a local model or a package that it needs is missing.

    This is quick: no weights are read, and no tensor library is imported.
    """
    require_train_extra(f"model '{name}'")
    from ramify.models.model_config_files import check_tokenizer_file, local_model_folder

    check_tokenizer_file(
        packaged_policy_folder(name) or local_model_folder(name.removeprefix("local:"))
    )


def connect(name: str, **_connection: object) -> Client:
    """Load a model into an engine in this process, and return a client of the engine.

    ``name`` is ``local:FOLDER`` or the name of a policy that ships with the package. Raises
    ConfigError if the model or a required package is missing.

    Example:
        client = inference.connect("local:checkpoints/mine")
    """
    check_local_model_available(name)
    folder = packaged_policy_folder(name) or name.removeprefix("local:")
    # The import takes longer than loading a small policy.
    with track_progress("starting", note=f"the engine for {name}"):
        from ramify.inference.local.local_client import LocalClient
        from ramify.models.load import load_policy

    return LocalClient(load_policy(folder), name=name)
