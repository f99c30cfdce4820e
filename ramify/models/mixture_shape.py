"""Describes how many experts a mixture-of-experts model has, and in which layers. Needs no PyTorch.

``routing.py`` reads this shape from a model and handles its routers.
"""

from __future__ import annotations

from typing import NamedTuple


class MixtureShape(NamedTuple):
    """The number of experts in a mixture-of-experts model, and the layers that have them."""

    layers: tuple[int, ...]
    """Indices of the layers with experts, in ascending order."""
    num_layers: int
    """Layers of the model, with experts and without."""
    top_k: int
    """Experts that a token is sent to in each of ``layers``."""
    num_experts: int
    """Experts of each of ``layers``."""
