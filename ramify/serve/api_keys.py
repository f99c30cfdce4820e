"""API keys of a server, with concurrency limits and budgets.

    [alice]                     # keys.toml: a table for each key
    key = "sk-…"                # or sha256 = "…", its SHA-256 in hexadecimal
    max-runs = 4                # concurrent runs
    max-cost = 20.0             # total dollars
    max-tokens = 50_000_000     # total tokens

When a run begins, its maximum cost is held back; when it ends, its actual cost is charged. So a key
stays within its budget as long as its runs stay within their limits, however many of them run at a
time. Held amounts are saved before the run begins: if the server is killed, they count as spent.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ramify.engine.limits import DEFAULT_MAX_COST, Limits
from ramify.errors import ConfigError, StoreError
from ramify.http_server.access import AcceptedApiKeys, digest_of, new_key
from ramify.http_server.rejections import RequestRejected
from ramify.plugins import explain_conversion_error
from ramify.secret_redaction import register_secret


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """An API key of a server and its limits, read from the key file."""

    key: str | None = None
    sha256: str | None = None
    max_runs: int | None = None
    """Maximum number of concurrent runs; None for no limit."""
    max_cost: float | None = None
    """Total budget in dollars; None for no limit."""
    max_tokens: int | None = None
    """Total budget in tokens, input plus output; None for no limit."""

    def digest(self) -> str:
        """Return the SHA-256 hash of the API key in hexadecimal."""
        return digest_of(self.key) if self.key else (self.sha256 or "").lower()

    def validation_error(self) -> str | None:
        """Return a description of the error in this entry, or None if it is valid."""
        if bool(self.key) == bool(self.sha256):
            return "give either key or sha256"
        if len(self.digest()) != 64:
            return "sha256 must be 64 hexadecimal digits"
        for name in ("max_runs", "max_cost", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                return (
                    f"{name.replace('_', '-')}={value!r} allows nothing: give a positive number, "
                    "or remove it"
                )
        return None


class ApiKeyUsage(msgspec.Struct):
    """What an API key has spent, and what is reserved for its current runs."""

    cost: float = 0.0
    tokens: int = 0
    runs: int = 0
    held_cost: float = 0.0
    held_tokens: int = 0


class BudgetHold(msgspec.Struct, frozen=True):
    """The part of an API key's budget that is reserved for one run until the run is charged."""

    cost: float
    tokens: int
    limits: Limits
    """Limits of the run, lowered to the remaining budget."""
    is_short: bool = False
    """True if the remaining budget is smaller than the requested limits."""


class ApiClientAccount:
    """The account of one API client on a running server: its key, its usage and its current
    runs."""

    def __init__(self, name: str, key: ApiKey, spent: ApiKeyUsage) -> None:
        self.name = name
        self.key = key
        self.spent = spent
        self.num_runs = 0

    def count_request_start(self) -> None:
        """Count a new request of this client as in progress.

        It is called before the body of the request is read. Raises RequestRejected if the key
        already has its maximum number of requests in progress.
        """
        if self.key.max_runs is not None and self.num_runs >= self.key.max_runs:
            raise RequestRejected(
                f"this key already has {self.num_runs} requests in progress, its maximum: try "
                "again later",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self.num_runs += 1

    def count_request_end(self) -> None:
        """Count a request as finished."""
        self.num_runs -= 1
        if not self.num_runs:
            self.spent.held_cost = 0.0  # so that rounding errors do not add up

    def reserve_budget(self, limits: Limits) -> BudgetHold:
        """Reserve part of the key's budget for a new run.

        The reservation is at most what the run may spend. Raises RequestRejected if the budget is
        used up.
        """
        key, spent = self.key, self.spent
        cost = self._remaining_budget("dollars", key.max_cost, spent.cost, spent.held_cost)
        tokens = self._remaining_budget("tokens", key.max_tokens, spent.tokens, spent.held_tokens)
        requested_cost = DEFAULT_MAX_COST if limits.max_cost is None else limits.max_cost
        is_short = cost < requested_cost or tokens < limits.max_tokens
        cost = min(cost, requested_cost)
        tokens = min(tokens, limits.max_tokens)
        if key.max_cost is not None:
            limits = msgspec.structs.replace(limits, max_cost=cost)
        if key.max_tokens is not None:
            limits = msgspec.structs.replace(limits, max_tokens=int(tokens))
        hold = BudgetHold(
            0.0 if key.max_cost is None else cost,
            0 if key.max_tokens is None else int(tokens),
            limits,
            is_short,
        )
        spent.held_cost += hold.cost
        spent.held_tokens += hold.tokens
        return hold

    def release(self, hold: BudgetHold) -> None:
        """Release the budget reserved for a run, so that other runs can use it.

        Call this if the run did not start, or once it has been charged.
        """
        self.spent.held_cost -= hold.cost
        self.spent.held_tokens -= hold.tokens

    def settle(self, hold: BudgetHold, tokens: int, cost: float) -> None:
        """Charge a finished run for what it used, and release the rest of its reservation."""
        self.release(hold)
        spent = self.spent
        spent.cost += cost
        spent.tokens += tokens
        spent.runs += 1

    def _remaining_budget(
        self, unit: str, budget: float | None, spent: float, held: float
    ) -> float:
        if budget is None:
            return math.inf
        if spent >= budget:
            raise RequestRejected(
                f"this key has spent its {budget:g} {unit}: ask the server's operator for more",
                status=429,
                code="insufficient_quota",
                kind="insufficient_quota",
            )
        if spent + held >= budget:
            raise RequestRejected(
                f"the rest of this key's {budget:g} {unit} is held for runs in progress: try again "
                "later",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=5,
            )
        return budget - spent - held


class ServerApiKeys:
    """The API keys of a server and their usage.

    The usage is saved to a file if a path is given.
    """

    def __init__(self, keys: Mapping[str, ApiKey], path: Path | None = None) -> None:
        """Create the set of keys, and load their previous spending from a file.

        If there are no keys, all clients share one caller without limits.

        Raises ConfigError for an invalid key, or if two names have the same key.
        """
        self._path = path
        spent = _read_spent(path)
        for name, key in keys.items():
            if fault := key.validation_error():
                raise ConfigError(f"key '{name}': {fault}")
            register_secret(f"key of {name}", key.key or "")
        self.callers = {
            name: ApiClientAccount(name, key, spent.get(name, ApiKeyUsage()))
            for name, key in keys.items()
        }
        self._others = {name: usage for name, usage in spent.items() if name not in keys}
        """Usage of keys that the key file no longer contains."""
        digests = {name: key.digest() for name, key in keys.items()}
        if len(set(digests.values())) < len(keys):
            raise ConfigError("two names have the same key: give each its own")
        self.bearer_keys = AcceptedApiKeys(digests) if keys else None
        """The keys that requests must present; None if the server needs no key."""
        self._anyone = ApiClientAccount("", ApiKey(), ApiKeyUsage())

    @classmethod
    def with_generated_key(cls) -> tuple[ServerApiKeys, str]:
        """Create a set that consists of one new API key without limits.

        The key is valid until the server stops. Returns the set of keys and the new key.
        """
        key = new_key()
        return cls({"default": ApiKey(key=key)}), key

    def caller_named(self, name: str) -> ApiClientAccount:
        """Return the account of the API client whose key has this name.

        Without keys, all clients are one caller.
        """
        return self.callers.get(name, self._anyone)

    def save_spending(self) -> None:
        """Save to disk what each API key has spent and reserved.

        Raises StoreError if it cannot be written.
        """
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
    """Read API keys from a TOML file.

    Raises ConfigError, which says what is wrong.
    """
    try:
        content: dict[str, Any] = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        return msgspec.convert(content, dict[str, ApiKey])
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        why = explain_conversion_error(error, dict[str, ApiKey])
        raise ConfigError(
            f"the key file {path}: {why}; each table [NAME] needs key or sha256"
        ) from None


def _read_spent(path: Path | None) -> dict[str, ApiKeyUsage]:
    """Read from the usage file how much each API key has already spent.

    Amounts still reserved when the server stopped count as spent, because their runs may have used
    them.
    """
    if path is None or not path.exists():
        return {}
    try:
        usages = msgspec.json.decode(path.read_bytes(), type=dict[str, ApiKeyUsage])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}, which records the usage of each key, cannot be read: {error}; repair or "
            "delete it"
        ) from None
    return {
        name: ApiKeyUsage(
            usage.cost + usage.held_cost, usage.tokens + usage.held_tokens, usage.runs
        )
        for name, usage in usages.items()
    }
