"""Describes the experts of a mixture-of-experts model: how many there are, and in which layers.

It does not import PyTorch.

``moe_routing.py`` reads this shape from a model and handles its routers.
"""

from __future__ import annotations

from typing import NamedTuple


class MoeLayout(NamedTuple):
    """The number of experts in a mixture-of-experts model, and which layers have experts."""

    layers: tuple[int, ...]
    """Indices of the layers with experts, in ascending order."""
    num_layers: int
    """Total number of layers, with and without experts."""
    top_k: int
    """Number of experts that each token is sent to in a layer with experts."""
    num_experts: int
    """Number of experts in each layer that has experts."""
