"""Checks, before a command does anything else, that the servers of local models are running.

In a run, a refused connection is retried for ten minutes, since a server may be restarting. A
server on this machine that refuses connections from the start was probably never started.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from ramify.clients.model_config import Model, endpoint_of
from ramify.errors import ConfigError
from ramify.http_client.urls_and_proxies import proxy_for

_START_S = 3.0
"""Seconds that a server has to start."""
_PAUSE_S = 0.2
_CONNECT_S = 1.0


def check_local_servers(models: Iterable[Model]) -> None:
    """Raise ConfigError if the server of a model on this machine refuses connections."""
    until = time.monotonic() + _START_S
    for model in models:
        endpoint = endpoint_of(model)
        parts = urlsplit(endpoint.url if endpoint is not None else "")
        host = parts.hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        if endpoint is None or not is_here or proxy_for(endpoint.url):
            continue
        port = parts.port or (443 if parts.scheme == "https" else 80)
        while _is_refused(host, port):
            if time.monotonic() >= until:
                raise ConfigError(
                    f"{model.name}: no server is running at {parts.scheme}://{parts.netloc} "
                    f"(connection refused for {_START_S:g} s): start it and try again; to wait "
                    "for it, give --patience SECONDS"
                )
            time.sleep(_PAUSE_S)


def _is_refused(host: str, port: int) -> bool:
    try:
        # As bytes, because Python imports its codec for host names for a string.
        address: Any = (host.encode("ascii"), port)
        socket.create_connection(address, _CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # the first request reports it
        return False
    return False
