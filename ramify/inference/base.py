"""Clients that also take weights: what a trainer needs of an engine besides replies.

    local:PATH, local:HUB-NAME      the engine in this process, over a checkpoint on disk
    tiny                            the small policy that ships with the package

Importing this file imports no tensor library: a name costs nothing until it is connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from ramify.clients.base import Client
from ramify.errors import ConfigError, ModelError
from ramify.progress import report_progress

PROTOCOL = 3
"""Of ``ramify serve-policy --weight-transfer``: counts up with every change that an older trainer
or engine would misunderstand. Both sides say theirs at the start."""
TINY = Path(__file__).parents[1] / "models" / "tiny"
"""The folder of the packaged policy."""


TAGS = ("weights", "kv_cache")
"""What of an engine's memory can sleep, as vLLM and SGLang name it, in the order in which it is
woken: weights, then an update, and only then keys and values, so that an update has their memory,
too."""


class EngineLost(ModelError):
    """The one engine that was asked is gone; it comes back with the weights of then, or not at
    all."""


class CachePressure(msgspec.Struct, frozen=True):
    """How an engine's cache of keys and values bears what is asked. A client whose engine knows has
    ``async pressure() -> Pressure | None``; None where it does not say."""

    full: float
    """Share of the cache that running sequences take."""
    waiting: int
    """Sequences that wait for their turn."""
    evicted: int
    """How many were thrown out of the cache in the middle, to be computed again; counts up."""


@runtime_checkable
class InferenceClient(Client, Protocol):
    """An engine whose weights change between steps of training."""

    @property
    def version(self) -> int:
        """Of the policy that answers now."""
        ...

    async def update(self, weights: object, version: int) -> None:
        """From now on ``weights`` answer, as ``version``; what was cached of others is forgotten. A
        reply in the middle goes on under the new ones, and says so in its ``versions``."""
        ...

    async def fingerprint(self) -> str | None:
        """Of the weights that answer now; equal for equal weights, as ``policy.fingerprint``
        computes it. None where an engine keeps them in a layout of its own."""
        ...

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of ``ids`` but the first, given those before it, at temperature
        1."""
        ...


def engines_of(client: InferenceClient) -> Sequence[InferenceClient]:
    """Each engine behind ``client`` by itself, for checks that every one has to pass: itself, where
    it is one; none, where all are gone just then."""
    found: Sequence[InferenceClient] | None = getattr(client, "engines", None)
    return [client] if found is None else found


def made_for(model: object) -> str | None:
    """The scaffold that a model was made for, by its name; None where any will do. ``model`` is a
    model's name, a client, or a list whose first entry answers the root. Nothing is loaded: a
    checkpoint's chat template says it."""
    if isinstance(model, list | tuple) and model:
        return made_for(model[0])
    if not isinstance(model, str):
        named = getattr(model, "scaffold", None)
        return named if isinstance(named, str) else None
    if model == "tiny":
        return "tiny"
    if model.startswith("local:"):
        template = Path(model.removeprefix("local:")).expanduser() / "chat_template.jinja"
        return (
            "tiny"
            if template.is_file() and "<|u|>" in template.read_text(encoding="utf-8")
            else None
        )
    return None


def connect(name: str, tiny: Path = TINY) -> Client:
    """The engine for ``local:…`` or ``tiny``, which lives in the folder ``tiny``. Raises
    ConfigError where the model or what it needs is not there."""
    path = str(tiny) if name == "tiny" else name.removeprefix("local:")
    if name == "tiny" and not (tiny / "config.json").is_file():
        raise ConfigError(
            f"the model 'tiny' is not part of this installation ({tiny} has no checkpoint): train "
            "one with "
            "`ramify train recipes/tiny.py`, and use it as local:FOLDER"
        )
    need_train_extra(f"model '{name}'")
    with report_progress(
        "starting", note=f"the engine for {name}"
    ):  # importing it takes longer than loading a small policy
        from ramify.inference.local.local_client import LocalClient
        from ramify.models.load import load

    return LocalClient(load(path), name=name)


def need_train_extra(what: str) -> None:
    """Raises ConfigError where the packages for running a model in this process are not
    installed."""
    for package in ("torch", "transformers", "safetensors"):
        if find_spec(package) is None:
            raise ConfigError(
                f"{what} runs a model in this process and needs {package}: pip install "
                "'ramify[train]'"
            )
