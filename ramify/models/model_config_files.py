"""Reads a checkpoint's configuration files without importing PyTorch.

It finds the folder, reads the configuration, and checks for a tokenizer.

    folder = local_model_folder("Qwen/Qwen3-0.6B")  a folder, or a model in the Hugging Face cache
    context_window_from_dict(read_config_json(folder))                    40960

A run checks these files before it imports a heavy package. ``load.py`` creates a model from them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.trained_policy_settings import policy_folder_of_run
from ramify.training_run_recognition import append_training_run_hint

WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Configuration fields that may contain the context window."""


def local_model_folder(path_or_name: str | Path) -> Path:
    """Return the folder on disk that contains a model's files.

    The model is a path, or a Hugging Face name in the local cache. Raises ConfigError if it is not
    on disk.
    """
    folder = Path(path_or_name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} holds adapters without their base model: merge them first "
            "(merge_and_unload in peft), or give the base model and set policy.lora to train new "
            "adapters"
        )
    if folder.exists():
        policy = policy_folder_of_run(folder)
        hint = "" if policy is None else f"; the policy of this run is {policy}"
        problem = f"{folder} is not a model: it has no config.json{hint}"
        raise ConfigError(problem if hint else append_training_run_hint(problem, folder))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path_or_name), local_files_only=True))
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"found no folder '{path_or_name}', and no model of that name in the Hugging Face "
            f"cache: give a folder, or download it first (hf download {path_or_name})"
        ) from None
    except HFValidationError:
        raise ConfigError(
            f"found no folder '{path_or_name}': give one with a config.json and weights"
        ) from None


def check_tokenizer_file(folder: Path) -> None:
    """Raise ConfigError if the folder does not contain a ``tokenizer.json``."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist: give a folder with a tokenizer.json")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json: save its tokenizer as a fast one (use_fast=True) "
            "first"
        )


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read the configuration, ``config.json``, from a model's folder.

    Raises ConfigError if the file is missing or not a JSON object.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return config


def context_window_from_dict(config: Mapping[str, Any]) -> int | None:
    """Return the context window in tokens from a config dict, or None if it is not given.

    The window is the maximum length of a prompt and its reply together.
    """
    inner = config.get("text_config")
    for part in (inner if isinstance(inner, Mapping) else {}, config):
        for name in WINDOWS:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None


def check_model_type(config: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if neither transformers nor the checkpoint has code for the model's type.

    The type is ``config["model_type"]``. The message suggests the most similar type.
    """
    name = config.get("model_type")
    known = _model_types()
    if isinstance(name, str) and name not in known and known and "auto_map" not in config:
        advice = did_you_mean(name, known).partition(" known:")[0]
        hint = f"{advice} " if advice.startswith("did you mean") else ""
        raise ConfigError(
            f"{where}: transformers does not know the model_type '{name}': {hint}give one of its "
            "types, or install a newer version"
        )


@functools.cache
def _model_types() -> frozenset[str]:
    """Return the model types that the installed transformers package supports.

    They are parsed from its source text, because importing it would import PyTorch. Returns an
    empty set if the source is not found.
    """
    spec = find_spec("transformers")
    names: set[str] = set()
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in ("auto_mappings.py", "configuration_auto.py"):
            path = Path(place) / "models/auto" / file
            if path.is_file():
                names |= _keys_of(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(names)


def _keys_of(module: ast.Module) -> set[str]:
    """Return the model types listed in a parsed transformers module.

    They are those in ``CONFIG_MAPPING_NAMES``. The module defines this constant as a list of pairs
    or as a mapping.
    """
    names: set[str] = set()
    for statement in module.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(getattr(target, "id", "") == "CONFIG_MAPPING_NAMES" for target in targets):
            for node in ast.walk(statement):
                keys: Sequence[ast.expr | None] = ()
                if isinstance(node, ast.Dict):
                    keys = node.keys
                elif isinstance(node, ast.Tuple):
                    keys = node.elts[:1]
                names |= {
                    key.value
                    for key in keys
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                }
    return names
