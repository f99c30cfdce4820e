"""Wait until all nodes of a Ray cluster have joined.

Run this as ``python -m ramify.actors.wait_for_ray_nodes ADDRESS NODES``.

Job files that start a cluster call this module (``ramify/extras/cluster/scheduler_job.py``),
because a run that joins a cluster checks at once whether its slots fit the cluster's nodes.
"""

from __future__ import annotations

import logging
import sys
import time

from ramify.actors.ray_cluster import import_ray
from ramify.errors import ConfigError

WAIT_S = 900.0
"""Default time limit, in seconds, for all nodes to join the Ray cluster."""
_AGAIN_S = 2.0


def wait_for_nodes(address: str, nodes: int, timeout_s: float = WAIT_S) -> None:
    """Wait until a Ray cluster has the given number of living nodes.

    Raises ConfigError after ``timeout_s`` seconds. The error says how many nodes have joined.
    """
    ray = import_ray()
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    until, found, why = time.monotonic() + timeout_s, 0, ""
    while True:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            found = sum(node["Alive"] for node in ray.nodes())
        except Exception as error:  # noqa: BLE001 (Ray raises this class itself)
            why = f"; it last answered: {' '.join(str(error).split())[:200]}"
        if found >= nodes:
            break
        if time.monotonic() > until:
            raise ConfigError(
                f"{found} of {nodes} nodes joined the Ray cluster at {address} within "
                f"{timeout_s:g} s{why}: look at the output of the other nodes"
            )
        time.sleep(_AGAIN_S)
    ray.shutdown()


if __name__ == "__main__":
    try:
        wait_for_nodes(sys.argv[1], int(sys.argv[2]))
    except ConfigError as error:
        sys.exit(f"ramify: {error}")
