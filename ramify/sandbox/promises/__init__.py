"""Every promise of ``sandbox/base.py``, each as one small test that any provider can be put to; ``check.py`` runs them."""

from ramify.sandbox.promises import branches, calls, contexts, notebook, output, stopping, values, walls
from ramify.sandbox.promises.base import Probe, Promise, echo, made

PROMISES = [
    promise
    for part in (notebook, output, values, calls, stopping, contexts, branches, walls)
    for promise in made[part.__name__]
]

__all__ = ["PROMISES", "Probe", "Promise", "echo"]
