"""Define the security headers of every response of the viewer.

Text from models and documents is shown as text. A browser that obeys these headers runs no scripts
except the page's own. ramify/http_server/ controls access.
"""

from __future__ import annotations

from aiohttp import web

from ramify.viewer.script_bundle import csp_hash, early_script

POLICY = (
    f"default-src 'none'; script-src 'self' {csp_hash(early_script())}; style-src "
    "'self'; img-src 'self' "
    "data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
"""The Content-Security-Policy. It allows no resources from other hosts and only one inline script,
and no string may become HTML or code."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.setdefault("Cache-Control", "no-cache")
