"""Conformance checks: every guarantee of ``sandbox/base.py`` as one small test for any provider.
``run_conformance.py`` runs them."""

from ramify.sandbox.conformance import (
    cell_output,
    contexts,
    forking,
    host_calls,
    isolation,
    notebook_semantics,
    stopping,
    value_codec,
)
from ramify.sandbox.conformance.base import ConformanceCheck, SandboxProbe, checks_by_module, echo

CHECKS = [
    check
    for part in (
        notebook_semantics,
        cell_output,
        value_codec,
        host_calls,
        stopping,
        contexts,
        forking,
        isolation,
    )
    for check in checks_by_module[part.__name__]
]
"""Every check of the conformance suite, in the order in which they run.

>>> any(check.name.startswith("a closed session") for check in testing.CHECKS)
True
"""

__all__ = ["CHECKS", "ConformanceCheck", "SandboxProbe", "echo"]
