"""Asks a model questions about table rows in Ray Data pipelines.

Requires the extra ``ray``.

    asker = ramify.ray.RayDataAsker("Is this a complaint?", model="openai:gpt-5-mini")
    dataset.map_batches(asker, batch_size=500)

These are all the public names (``__all__``). To run a whole map on a cluster, use ``ramify.map(…,
placement="ray")`` instead.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
