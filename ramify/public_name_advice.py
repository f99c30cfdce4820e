"""Suggest a replacement for a public name that does not exist.

from ramify.train import grpo   ->  did you mean 'GRPO'?
from ramify import GRPO         ->  it is in ramify.train: from ramify.train import GRPO
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

NAMESPACES = (
    "ramify",
    "ramify.train",
    "ramify.tasks",
    "ramify.evaluate",
    "ramify.inference",
    "ramify.plans",
    "ramify.testing",
    "ramify.ray",
)
"""The packages with public names, in the order in which they are searched."""


def public_name_advice(package: str, name: str) -> str:
    """Return the end of an error message about an unknown name of ``package``.

    Returns an empty string if no public name resembles it. Case and underscores are ignored. A name
    that exists in another namespace is preferred to one that is only similar.
    """
    from difflib import get_close_matches

    here = _names(package)
    if same := here.get(_fold_name(name)):
        return f": did you mean '{same}'?"
    others = {each: _names(each) for each in NAMESPACES if each != package}
    for namespace, names in others.items():
        if same := names.get(_fold_name(name)):
            return f": it is in {namespace}: from {namespace} import {same}"
    wanted = _fold_name(name)
    longer = [each for each in here if each.startswith(wanted) or wanted.startswith(each)]
    if close := get_close_matches(wanted, longer or here, n=1, cutoff=0.5 if longer else 0.7):
        return f": did you mean '{here[close[0]]}'?"
    for namespace, names in others.items():
        if close := get_close_matches(_fold_name(name), names, n=1, cutoff=0.8):
            return f": did you mean '{names[close[0]]}' of {namespace}?"
    return ""


def _names(package: str) -> Mapping[str, str]:
    """Return a package's public names, keyed by their lowercase form without underscores."""
    names: Sequence[str] = importlib.import_module(package).__all__
    return {_fold_name(each): each for each in reversed(names)}


def _fold_name(name: str) -> str:
    return name.casefold().replace("_", "")
