"""Serve the pictures in a run's prompts to the run's page: a list of them, and the bytes of each.

A picture's bytes are a blob of the store that has the run. The page receives only pictures that
the named call has shown to a model, and only blobs that are pictures. It cannot read any other
blob.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ramify.errors import StoreError
from ramify.types.message import Message
from ramify.types.picture import InvalidPictureError, picture_from_bytes
from ramify.viewer.watched_run import WatchedRun


def describe_pictures(message: Message) -> list[dict[str, Any]]:
    """Return descriptions of a message's pictures for the page, without the pictures' bytes."""
    return [
        {
            "digest": picture.digest,
            "name": picture.name,
            "about": f"{picture}, {picture.num_bytes:,} bytes",
            "width": picture.width,
            "height": picture.height,
        }
        for picture in message.pictures
    ]


def picture_bytes(run: WatchedRun, id: str, digest: str) -> tuple[bytes, str]:
    """Return the bytes and the media type of a picture that the call ``id`` has shown to a model.

    Raises StoreError if there is no such picture.
    """
    detail = run.call_detail(id)
    prompts = [message for turn in detail.call.turns for message in turn.prompt]
    prompts += detail.pending.prompt if detail.pending is not None else ()
    if not any(picture.digest == digest for each in prompts for picture in each.pictures):
        raise StoreError(f"call {id} has shown no picture with the hash {digest[:12]}…")
    try:
        data = run.source.blob(digest)
        picture = picture_from_bytes(data)
    except InvalidPictureError as error:
        raise StoreError(f"the picture {digest[:12]}… is not in the store: {error}") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(f"the picture {digest[:12]}… is damaged in the store")
    return data, picture.media_type
