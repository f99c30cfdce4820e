"""Ramify in pipelines of Ray Data; needs the extra ``ray``.

    asker = ramify.ray.Asker("Is this a complaint?", model="openai:gpt-5-mini")
    dataset.map_batches(asker, batch_size=500)

These are all the public names (``__all__``). A whole map on a cluster needs none of them:
``ramify.map(…, placement="ray")``.
"""

from ramify import lazy_namespace

__getattr__, __dir__, __all__ = lazy_namespace(__name__, __path__[0])
