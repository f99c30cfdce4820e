"""Prices and context windows by model name. Unknown models have no price: nothing is guessed.

The packaged ``prices.json`` goes out of date, so each entry records when and from where its numbers
were taken. A file of the same format, passed explicitly or named by ``RAMIFY_PRICES``, overrides it
entry by entry:

    {"openai:gpt-5": {"input": 1.25, "cached": 0.125, "output": 10.0, "window": 272000,
                      "taken": "2026-11"}}

Prices are dollars per million tokens. ``also`` lists other names of the same entry. A date suffix
of a name is ignored. If long prompts cost more per token, the window ends at that length, so that
one price holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ramify.clients.base import Price
from ramify.clients.providers import CLIENTS, IN_PROCESS, PROVIDERS, ProviderSpec
from ramify.errors import ConfigError
from ramify.plugins import is_reference

_DATE = re.compile(r"[-@]20\d\d-?\d\d-?\d\d$")


class PriceEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Price and context window of one model."""

    input: float | None = None
    """Dollars per million tokens, like the next three fields."""
    output: float | None = None
    cached: float | None = None
    cache_write: float | None = None
    window: int | None = None
    """Context window: maximum tokens of prompt and reply together."""
    taken: str = ""
    """Month of the numbers, such as ``2026-11``."""
    source: str = ""
    """Source of the numbers."""
    also: tuple[str, ...] = ()

    @property
    def price(self) -> Price | None:
        if self.input is None or self.output is None:
            return None
        return Price(self.input, self.output, self.cached, self.cache_write)


class PriceTable:
    """Prices and windows by ``provider:model``."""

    def __init__(self, entries: Mapping[str, PriceEntry]) -> None:
        self._entries = dict(entries)
        for entry in entries.values():
            for name in entry.also:
                self._entries.setdefault(name, entry)

    @classmethod
    def load(cls, path: str | Path | None = None) -> PriceTable:
        """Load the packaged table, overridden by the file at ``path`` or, by default, by the one
        that ``RAMIFY_PRICES`` names."""
        packaged = _read(Path(__file__).with_name("prices.json"))
        override = path or os.environ.get("RAMIFY_PRICES")
        return cls({**packaged, **_read(Path(override))} if override else packaged)

    def price(self, name: str) -> Price | None:
        entry = self._find(name)
        if entry is not None and entry.price is not None:
            return entry.price
        return Price(0.0, 0.0) if is_local(name) else None

    def window(self, name: str) -> int | None:
        """Context window in tokens; None if unknown."""
        entry = self._find(name)
        return entry.window if entry is not None else None

    def _find(self, name: str) -> PriceEntry | None:
        bare = name.partition("@http")[0]
        return (
            self._entries.get(name)
            or self._entries.get(bare)
            or self._entries.get(_DATE.sub("", bare))
        )


def is_local(name: str) -> bool:
    """True if the model runs on the user's own machines, where tokens are free."""
    prefix = name.partition(":")[0]
    if prefix in IN_PROCESS:
        return True
    is_installed = prefix not in CLIENTS.ours and not is_reference(prefix)
    found = CLIENTS.get(prefix) if is_installed else PROVIDERS.get(prefix)
    return isinstance(found, ProviderSpec) and found.local


def _read(path: Path) -> dict[str, PriceEntry]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, PriceEntry])
    except OSError as error:
        raise ConfigError(
            f"price table {path}: {error.strerror}; set RAMIFY_PRICES to a file of prices"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"price table {path}: {error}; docs/models.md has the format") from None
