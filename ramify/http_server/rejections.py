"""Error responses of all servers, in OpenAI's format.

    {"error": {"message": "…", "type": "rate_limit_error", "code": null, "param": null}}

Not here: which requests are rejected (see access.py, uploads.py and the routes of each server).
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class RequestRejected(Exception):
    """Raised to answer a request with an error response. ``str()`` is the client's message."""

    def __init__(
        self,
        text: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        kind: str = "",
        retry_after_s: float | None = None,
        run: str | None = None,
    ) -> None:
        """``param`` is the wrong field; ``run`` is the id of the failed run."""
        super().__init__(text)
        self.param = param
        self.status = status
        self.code = code
        self.run = run
        self.kind = kind or kind_of(status)
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        more = {} if self.run is None else {"run": self.run}
        return error_body(str(self), self.kind, self.code, self.param, **more)

    def response(self) -> web.Response:
        headers = (
            {}
            if self.retry_after_s is None
            else {"retry-after": f"{max(1, round(self.retry_after_s))}"}
        )
        # A retry would pay for a whole run again, so clients must not retry automatically.
        if self.run is not None:
            headers |= {"x-ramify-run": self.run, "x-should-retry": "false"}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )


def kind_of(status: int) -> str:
    """OpenAI's error type for an HTTP status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(
    text: str, kind: str, code: str | None = None, param: str | None = None, **more: Any
) -> bytes:
    """Body of an error. ``param`` is the wrong field; ``more`` adds fields to those of OpenAI."""
    text = text.encode("utf-8", "replace").decode()  # a path may hold lone surrogates
    return msgspec.json.encode(
        {"error": {"message": text, "type": kind, "code": code, "param": param, **more}}
    )
