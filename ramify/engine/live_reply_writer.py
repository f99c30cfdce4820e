"""Write the unfinished replies of a run to a file, for web pages that show the run live.

    no page:   checks twice per second whether a page has created a file; no work per piece
    a page:    unfinished replies ── at most four times a second ──> ``store/live_replies.py``

Pages read the run's journal, which records a reply only once it is complete. The file shows the
part that has arrived so far, and is deleted when the run ends. Within this process,
``progress.watch_reply_text`` shows replies as they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ramify.clients.base import ReplyPiece
from ramify.store.live_replies import MAX_CHARS, ArrivingReply, LiveReplyFileWriter

_LOOK_S = 0.5
"""Seconds between checks for an open web page that shows the run live."""
_WRITE_S = 0.25
"""Seconds between two writes of unfinished replies, while a web page shows the run live."""
_TAIL_CHARS = 2 * MAX_CHARS
"""Number of characters at the end of an unfinished reply that are searched for secrets. It exceeds
what is shown, so that no secret is cut in two."""


class LiveReplyWriter:
    """Writes the unfinished replies of one run to a file while a web page follows the run.

    The file is written several times per second. An instance belongs to the run's event loop.
    """

    def __init__(
        self, replies: Callable[[], Sequence[ArrivingReply]], file: LiveReplyFileWriter
    ) -> None:
        """Start checking for a web page that follows the run.

        ``replies`` returns the replies that have only partly arrived.
        """
        self._replies = replies
        self._file = file
        self._num_ticks = 0
        self._is_followed = False
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._tick)

    def close(self) -> None:
        """Stop writing, and delete the file.

        Call this after every reply has been recorded.
        """
        self._timer.cancel()
        self._file.delete()

    def _tick(self) -> None:
        try:
            looks = not self._is_followed or self._num_ticks % round(_LOOK_S / _WRITE_S) == 0
            if looks:
                self._is_followed = self._file.is_followed()
            self._num_ticks += 1
            if self._is_followed:
                self._file.write(sorted(self._replies(), key=lambda reply: reply.call))
        except OSError:  # such as a full disk: a page must not end a run
            self._is_followed = False
            self._file.close()
        seconds = _WRITE_S if self._is_followed else _LOOK_S
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)


def join_pieces(call: str, turn: int, pieces: Sequence[ReplyPiece]) -> ArrivingReply:
    """Join the pieces of an unfinished reply that have arrived so far.

    Return the end of its text and the end of its reasoning, without the reasoning if a long text
    follows it.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    num_chars = num_thoughts = 0
    for piece in reversed(pieces):
        if max(num_chars, num_thoughts) >= _TAIL_CHARS:
            if num_chars >= _TAIL_CHARS:
                thoughts = []
            is_cut = True
            break
        texts.append(piece.text)
        thoughts.append(piece.reasoning)
        num_chars += len(piece.text)
        num_thoughts += len(piece.reasoning)
    else:
        is_cut = False
    text, reasoning = ("".join(reversed(parts)) for parts in (texts, thoughts))
    return ArrivingReply(call, turn, text, reasoning, is_cut)
