"""The engine in this process: connecting it by a model name, ``local:FOLDER`` or ``tiny``.

Importing this package imports no tensor library; connecting does.
"""

from __future__ import annotations

from pathlib import Path

from ramify.clients.base import Client
from ramify.errors import ConfigError
from ramify.inference.base import TINY, need_train_extra
from ramify.progress import report_progress


def check_local_model(name: str, tiny: Path = TINY) -> None:
    """Raise ConfigError if a model of this process, ``local:FOLDER`` or ``tiny``, or a package that
    it needs is missing. No weights are read, and no tensor library is imported."""
    if name == "tiny":
        if not (tiny / "config.json").is_file():
            raise ConfigError(
                f"the model 'tiny' is not part of this installation ({tiny} has no checkpoint): "
                "train one with `ramify train recipes/tiny.py`, and use it as local:FOLDER"
            )
        need_train_extra("model 'tiny'")
    elif name.startswith("local:"):
        need_train_extra(f"model '{name}'")
        from ramify.models.checkpoint_files import check_tokenizer, model_folder

        check_tokenizer(model_folder(name.removeprefix("local:")))


def connect(name: str, tiny: Path = TINY, **_connection: object) -> Client:
    """An engine in this process, for ``local:…``, or for ``tiny``, which is stored in the folder
    ``tiny``. Raises ConfigError if the model or a package that it needs is missing.

    Example:
        client = inference.connect("local:checkpoints/mine")
    """
    check_local_model(name, tiny)
    path = str(tiny) if name == "tiny" else name.removeprefix("local:")
    # The import takes longer than loading a small policy.
    with report_progress("starting", note=f"the engine for {name}"):
        from ramify.inference.local.local_client import LocalClient
        from ramify.models.load import load_policy

    return LocalClient(load_policy(path), name=name)
