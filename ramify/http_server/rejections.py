"""Error responses of all servers, in the format of the API that the client uses.

    OpenAI      {"error": {"message": "…", "type": "rate_limit_error", "code": null, "param": null}}
    Anthropic   {"type": "error", "error": {"type": "rate_limit_error", "message": "…"}}

A request uses Anthropic's API if it has the header ``anthropic-version``, or if its path ends with
that of the messages API. Which requests are rejected is decided by ``access.py``,
``request_body_limiter.py`` and the routes of each server.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

TOO_LONG = "context_length_exceeded"
"""Error code in OpenAI's APIs for a prompt that does not fit in the context window."""
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class RequestRejected(Exception):
    """Raised to answer a request with an error response.

    Its text is the message to the client.
    """

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
        """Create an exception for a request that the server rejects.

        ``param`` names the request's wrong field, and ``run`` is the id of a failed run.
        """
        super().__init__(text)
        self.param = param
        self.status = status
        self.code = code
        self.run = run
        self.kind = kind or openai_error_type(status)
        self.retry_after_s = retry_after_s
        self.more: dict[str, Any] = {} if run is None else {"run": run}
        """Additional fields of the error, beyond those of the API."""

    def openai_error_body(self) -> bytes:
        return error_body(str(self), self.kind, self.code, self.param, **self.more)

    def anthropic_error_body(self) -> bytes:
        """Return the body of this error response in the format of Anthropic's API.

        The message for an overlong prompt begins with "prompt is too long", as in that API.
        """
        text = f"prompt is too long: {self}" if self.code == TOO_LONG else str(self)
        text = text.encode("utf-8", "replace").decode()
        kind = _ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else None)
        error = {"type": kind or "invalid_request_error", "message": text, **self.more}
        return msgspec.json.encode({"type": "error", "error": error})

    def response(self, http: web.Request | None = None) -> web.Response:
        """Return the error response in the format of the API that the request ``http`` uses.

        Without a request, the format is OpenAI's.
        """
        is_anthropic = http is not None and is_anthropic_request(http)
        body = self.anthropic_error_body() if is_anthropic else self.openai_error_body()
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
            status=self.status, body=body, content_type="application/json", headers=headers
        )


def is_anthropic_request(http: web.Request) -> bool:
    """Return True if a request uses Anthropic's API.

    Its path or its header ``anthropic-version`` shows that.
    """
    is_below = http.path.endswith(("/messages", "/messages/count_tokens"))
    return is_below or "anthropic-version" in http.headers


def openai_error_type(status: int) -> str:
    """Return OpenAI's error type for an HTTP status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(
    text: str, kind: str, code: str | None = None, param: str | None = None, **more: Any
) -> bytes:
    """Return the body of an error response in the format of OpenAI's API.

    ``param`` names the request's wrong field, and ``more`` adds fields.
    """
    text = text.encode("utf-8", "replace").decode()  # a path may hold lone surrogates
    return msgspec.json.encode(
        {"error": {"message": text, "type": kind, "code": code, "param": param, **more}}
    )
