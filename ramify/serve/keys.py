"""Who may ask, how much at once, and for how much in all.

    [alice]                     # serve.toml: a table for each key
    key = "sk-…"                # or sha256 = "…", its SHA-256 in hexadecimal
    max-runs = 4                # at once
    max-cost = 20.0             # dollars, in all
    max-tokens = 50_000_000     # in all

A run's most is held back when it begins and what it did cost is booked when it ends, so that a
budget is never passed, however many runs a key has. Held amounts are in the file before a run
begins: what a killed server held counts as spent.
"""

from __future__ import annotations

import hashlib
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ramify.engine.limits import DEFAULT_MAX_COST, Limits
from ramify.errors import ConfigError, StoreError
from ramify.serve.web import RequestRejected
from ramify.types.message import Usage


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """One caller, as the file of keys has it."""

    key: str | None = None
    sha256: str | None = None
    max_runs: int | None = None
    """At once."""
    max_cost: float | None = None
    """Dollars, in all."""
    max_tokens: int | None = None
    """In and out, in all."""

    def digest(self) -> str:
        """SHA-256 of the key, hexadecimal."""
        return (
            hashlib.sha256(self.key.encode()).hexdigest()
            if self.key
            else (self.sha256 or "").lower()
        )

    def fault(self) -> str | None:
        """What is wrong with it."""
        if bool(self.key) == bool(self.sha256):
            return "give either key or sha256"
        if len(self.digest()) != 64:
            return "sha256 must be 64 hexadecimal digits"
        for name in ("max_runs", "max_cost", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                return f"{name.replace('_', '-')}={value!r} allows nothing: give a positive number, or leave it out"
        return None


class KeyUsage(msgspec.Struct):
    """What a key has used, and what its present runs may still use."""

    cost: float = 0.0
    tokens: int = 0
    runs: int = 0
    held_cost: float = 0.0
    held_tokens: int = 0


class BudgetHold(msgspec.Struct, frozen=True):
    """What one run holds back of its key's budget."""

    cost: float
    tokens: int
    limits: Limits
    """Of the run: what was asked for, and no more than is left."""
    is_short: bool = False
    """Whether less is left than was asked for."""


class ApiCaller:
    """A key while the server runs."""

    def __init__(self, name: str, key: ApiKey, spent: KeyUsage) -> None:
        self.name, self.key, self.spent = name, key, spent
        self.num_runs = 0

    def hold(self, limits: Limits) -> BudgetHold:
        """Begin a run. Raises Rejected where the key has too many, or has nothing left."""
        key, spent = self.key, self.spent
        if key.max_runs is not None and self.num_runs >= key.max_runs:
            raise RequestRejected(
                f"{self.num_runs} requests of this key are being answered, its most: come back",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        cost = self._left("dollars", key.max_cost, spent.cost, spent.held_cost)
        tokens = self._left("tokens", key.max_tokens, spent.tokens, spent.held_tokens)
        asked_cost = DEFAULT_MAX_COST if limits.max_cost is None else limits.max_cost
        is_short = cost < asked_cost or tokens < limits.max_tokens
        cost, tokens = min(cost, asked_cost), min(tokens, limits.max_tokens)
        if key.max_cost is not None:
            limits = msgspec.structs.replace(limits, max_cost=cost)
        if key.max_tokens is not None:
            limits = msgspec.structs.replace(limits, max_tokens=int(tokens))
        held = BudgetHold(
            0.0 if key.max_cost is None else cost,
            0 if key.max_tokens is None else int(tokens),
            limits,
            is_short,
        )
        spent.held_cost += held.cost
        spent.held_tokens += held.tokens
        self.num_runs += 1
        return held

    def release(self, held: BudgetHold) -> None:
        """What was held is held no longer."""
        self.num_runs -= 1
        self.spent.held_cost = (
            self.spent.held_cost - held.cost if self.num_runs else 0.0
        )  # no rounding errors are kept
        self.spent.held_tokens -= held.tokens

    def settle(self, held: BudgetHold, usage: Usage, cost: float | None) -> None:
        """A run ended."""
        self.release(held)
        spent = self.spent
        spent.cost += cost or 0.0
        spent.tokens += usage.total_tokens
        spent.runs += 1

    def _left(self, unit: str, most: float | None, spent: float, held: float) -> float:
        if most is None:
            return math.inf
        if spent >= most:
            raise RequestRejected(
                f"this key has spent its {most:g} {unit}: ask whoever runs the server for more",
                status=429,
                code="insufficient_quota",
                kind="insufficient_quota",
            )
        if spent + held >= most:
            raise RequestRejected(
                f"all that is left of this key's {most:g} {unit} is held by runs that go on: come "
                "back",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=5,
            )
        return most - spent - held


class ApiKeys:
    """All callers, and what they have spent; kept in a file where one is given."""

    def __init__(self, keys: Mapping[str, ApiKey], path: Path | None = None) -> None:
        """Without ``keys`` everyone is the one caller without limits. Raises ConfigError for a key
        that is wrong."""
        self._path = path
        spent = _read_spent(path)
        for name, key in keys.items():
            if fault := key.fault():
                raise ConfigError(f"key '{name}': {fault}")
        self.callers = {
            name: ApiCaller(name, key, spent.get(name, KeyUsage())) for name, key in keys.items()
        }
        self._others = {name: each for name, each in spent.items() if name not in keys}
        self._by_digest = {caller.key.digest(): caller for caller in self.callers.values()}
        if len(self._by_digest) < len(keys):
            raise ConfigError("two names have the same key: give each its own")
        self._anyone = None if keys else ApiCaller("", ApiKey(), KeyUsage())

    @property
    def is_open(self) -> bool:
        """Whether everyone may ask."""
        return self._anyone is not None

    def caller(self, given: str) -> ApiCaller:
        """Whose key ``given`` is. Raises Rejected. It is looked up by its digest, so the time taken
        tells nothing."""
        found = self._anyone or self._by_digest.get(hashlib.sha256(given.encode()).hexdigest())
        if found is None:
            raise RequestRejected(
                "wrong or missing API key: send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        return found

    def save(self) -> None:
        """Write down what is spent and held. Raises StoreError."""
        if self._path is None or not self.callers:
            return
        spent = {**self._others, **{name: caller.spent for name, caller in self.callers.items()}}
        new = self._path.with_suffix(".new")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(spent))
            os.replace(new, self._path)
        except OSError as error:
            raise StoreError(
                f"cannot write {self._path}: {error.strerror}; free some space"
            ) from None


def read_keys(path: str | Path) -> dict[str, ApiKey]:
    """The keys of a TOML file. Raises ConfigError that names what is wrong."""
    try:
        content: dict[str, Any] = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        return msgspec.convert(content, dict[str, ApiKey])
    except OSError as error:
        raise ConfigError(f"the file of keys {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of keys {path} is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the file of keys {path}: {error}; a table [NAME] has key or sha256, max-runs, "
            "max-cost, max-tokens"
        ) from None


def _read_spent(path: Path | None) -> dict[str, KeyUsage]:
    """What each name has spent; what was held when the server last ended counts as spent."""
    if path is None or not path.exists():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, KeyUsage])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}, which says what each key has spent, cannot be read: {error}; repair or "
            "delete it"
        ) from None
    return {
        name: KeyUsage(each.cost + each.held_cost, each.tokens + each.held_tokens, each.runs)
        for name, each in found.items()
    }
