"""The route ``POST /v1/feedback``, where users rate recorded replies.

    {"id": "chatcmpl-…", "score": 1, "note": "exactly what I asked for"}  ──>  a score of that turn

``id`` is the id of the response; ``index`` selects one of several choices. ``score`` is any finite
number, or true and false for 1 and 0: by convention 1 is a thumbs-up and 0 a thumbs-down. A later
score replaces an earlier one. The server's key decides who may send feedback, and
``traffic_recorder.py`` stores it.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from ramify.errors import StoreError
from ramify.http_server.base_server import receive_body
from ramify.http_server.rejections import RequestRejected
from ramify.serve.traffic_recorder import ReplyNotFoundError, ServedTrafficRecorder
from ramify.store.reviews import MAX_NOTE

PATH = "/v1/feedback"


class _Feedback(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    score: float | bool
    note: str = ""
    index: int = 0


_decoder = msgspec.json.Decoder(_Feedback)


def add_feedback_route(app: web.Application, recorder: ServedTrafficRecorder | None) -> None:
    """Add the feedback route to a web application.

    Without a recorder nothing is recorded, so the route answers with an error.
    """

    async def post(http: web.Request) -> web.StreamResponse:
        async with receive_body(http) as body:
            feedback = _read(body)
        if recorder is None:
            raise RequestRejected(
                "this server does not record conversations (--record), so it takes no feedback",
                status=404,
                code="not_recorded",
            )
        try:
            await recorder.record_feedback(
                feedback.id, feedback.index, float(feedback.score), feedback.note
            )
        except ReplyNotFoundError as error:
            raise RequestRejected(
                str(error), param="id", status=404, code="unknown_reply"
            ) from None
        except StoreError as error:
            raise RequestRejected(f"the feedback was not stored: {error}", status=503) from None
        return web.json_response({"id": feedback.id, "object": "feedback", "stored": True})

    app.router.add_post(PATH, post)


def _read(body: bytes) -> _Feedback:
    """Read and check the body of a feedback request.

    Raises RequestRejected if it is invalid.
    """
    try:
        feedback = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(
            f"invalid feedback: {error}; give id, score, and optionally note and index"
        ) from None
    if not math.isfinite(feedback.score):
        raise RequestRejected("score must be a finite number", param="score")
    if len(feedback.note) > MAX_NOTE:
        raise RequestRejected(
            f"note has {len(feedback.note):,} characters: give at most {MAX_NOTE:,}", param="note"
        )
    return feedback
