"""Check the URLs of servers, and look up the proxy for a URL in the environment.

    https://host/v1      a URL; its proxy is HTTPS_PROXY or ALL_PROXY, unless NO_PROXY lists it
    http://host:99999    not a URL

The base URLs of providers are in ``providers.py``.
"""

from __future__ import annotations

import os
import re
import sys
from urllib.parse import urlsplit

from ramify.errors import ConfigError


def is_http_url(url: str) -> bool:
    """Return True if ``url`` is an http or https URL with a host.

    A port is optional but must be valid.
    """
    try:
        parts = urlsplit(url)
        return bool(
            re.fullmatch(r"https?://[^/\s]\S*", url)
            and parts.hostname
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:  # a port that is not a number up to 65535, or half of an IPv6 address
        return False


def proxy_variable_name(url: str) -> str:
    """Return the name of the environment variable that sets the proxy for ``url``.

    If none is set, return the one that could be set.
    """
    scheme = urlsplit(url).scheme
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    return next((name for name in names if os.environ.get(name)), names[1])


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment sets for ``url``, or None for a direct connection.

    Raises ConfigError if the proxy is not an HTTP proxy's URL.
    """
    if sys.platform not in ("darwin", "win32") and not any(
        name.lower().endswith("_proxy") for name in os.environ
    ):
        return None  # avoids the import below
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    kind, has_kind, _ = proxy.partition("://")
    if has_kind and kind not in ("http", "https"):
        raise ConfigError(
            f"the environment names a {kind} proxy for {url}: give an http:// proxy in "
            f"{parts.scheme.upper()}_PROXY, or name {parts.hostname} in NO_PROXY"
        )
    proxy = proxy if has_kind else f"http://{proxy}"
    if not is_http_url(proxy):  # it is not shown, since it may contain a password
        raise ConfigError(
            f"the proxy that the environment names for {url} is not a URL: write it as "
            f"http://host:port in {parts.scheme.upper()}_PROXY"
        )
    return proxy
