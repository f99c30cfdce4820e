"""All attacks, from one file per kind."""

from attacks import (
    bombs,
    branches,
    calls,
    leaks,
    processes,
    reach,
    relatives,
    runaway,
    sharing,
    wire,
)
from attacks.base import ATTACKS

__all__ = [
    "ATTACKS",
    "bombs",
    "branches",
    "calls",
    "leaks",
    "processes",
    "reach",
    "relatives",
    "runaway",
    "sharing",
    "wire",
]
