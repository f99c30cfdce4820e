"""Every promise of ``sandbox/base.py``, each as one small test that any provider can be put to;
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
from ramify.sandbox.conformance.base import ConformanceCheck, SandboxProbe, echo, made

PROMISES = [
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
    for check in made[part.__name__]
]

__all__ = ["PROMISES", "ConformanceCheck", "SandboxProbe", "echo"]
