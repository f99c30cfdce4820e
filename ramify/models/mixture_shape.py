"""How many experts a model has, and where. Needs no PyTorch.

Not here: how the shape of a model is found, and its routers (see ``routing.py``).
"""

from __future__ import annotations

from typing import NamedTuple


class MixtureShape(NamedTuple):
    """How many experts a model has, and where."""

    layers: tuple[int, ...]
    """Indices of the layers with experts, in ascending order."""
    num_layers: int
    """Layers of the model, with experts and without."""
    top_k: int
    """Experts that a token is sent to in each of ``layers``."""
    num_experts: int
    """Experts of each of ``layers``."""
