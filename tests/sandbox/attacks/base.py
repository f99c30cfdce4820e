"""Definition of an attack and of its verdict. The attacks themselves are in one file per kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.sandbox.base import Session

if TYPE_CHECKING:
    from attacks.arena import Arena

Act = Callable[["Arena", Session], Awaitable[str]]
"""Attack that needs code in the host: it runs cells itself and returns their output."""


class Attack(msgspec.Struct, frozen=True):
    """One attack: a cell, and when it counts as contained."""

    name: str
    kind: str
    code: str = ""
    """A cell. What it tries goes through ``attempt(label, f)`` of ``tools.py``; no label may be
    reached."""
    act: Act | None = None
    """Instead of ``code``."""
    ends: tuple[str, ...] = ("ran",)
    """How a contained attack may end: ``ran``, ``error`` (its cell raised), ``interrupted``,
    ``died``."""
    timeout_s: float = 30.0
    host_mb: int = 64
    """Maximum growth of the host's memory (MB) during the attack."""
    tries: int = 1
    """Minimum number of attempts: an attack that did not happen was not contained."""
    without_walls: str = "reached"
    """In a provider that does not isolate: ``reached``, ``contained`` there too, ``either`` by
    kernel, ``needs root`` to be reached, or ``unsafe`` to try."""
    open_at: Mapping[str, str] = {}
    """Tier -> why it is not contained there, as the threat model says."""
    needs_fork: bool = False
    alters_sibling: bool = False


class Verdict(msgspec.Struct):
    """Result of one attack."""

    name: str
    ended: str = ""
    """``ran``, ``error``, ``interrupted``, ``died``, or empty where it could not begin."""
    reached: list[str] = []
    refused: list[str] = []
    faults: list[str] = []
    """Other failures: the host, a sibling or a bystander was harmed, something was left over, or
    the attack did not happen."""
    detail: str = ""
    """The end of its output, its error, or why its session died."""
    seconds: float = 0.0
    skipped: str = ""
    """Reason why it was not tried."""

    @property
    def contained(self) -> bool:
        return not self.reached and not self.faults


ATTACKS: dict[str, Attack] = {}


def attack(name: str, kind: str, code: str = "", **options: Any) -> None:
    """Register an attack."""
    assert name not in ATTACKS, name
    ATTACKS[name] = Attack(name, kind, code, **options)
