"""The security headers that every response of the viewer has.

Text of models and documents is shown as text, and a browser that obeys these headers runs no script
but the page's own. Access is controlled in ramify/http_server/.
"""

from __future__ import annotations

from aiohttp import web

from ramify.viewer.page_script import csp_hash, early

POLICY = (
    f"default-src 'none'; script-src 'self' {csp_hash(early())}; style-src 'self'; img-src 'self' "
    "data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
"""Content-Security-Policy: no resources from other hosts, only one inline script, and no string may
become HTML or code."""
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
