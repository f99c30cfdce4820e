"""Parse server-sent events: take the bytes of a stream, and return the data of each event.

    b'data: {"a": 1}\\n\\n: ping\\n\\nda'   ->  [b'{"a": 1}']; "da" is kept for later

Event names, ids and comments are skipped, because every provider repeats the name in the data.
``chat_json.py``, ``responses_json.py`` and ``anthropic_reply_parser.py`` interpret the data.
"""

from __future__ import annotations

from ramify.http_client.decompression import body_too_long_error


class ServerSentEventParser:
    """Splits one stream of bytes into server-sent events."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._begun: list[bytes] = []
        """Pieces of the incomplete last line."""
        self._data: list[bytes] = []
        """Lines of data of the incomplete last event."""
        self._num_waiting = 0
        """Total number of buffered bytes in ``_begun`` and ``_data``."""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes from the stream, and return the data of each event that is now complete.

        Raises MalformedResponse if an event is too long.
        """
        *lines, rest = data.split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if self._begun:
                self._begun.append(line)
                line = b"".join(self._begun)
                self._begun.clear()
            self._read_line(line, events)
        if rest:
            self._begun.append(rest)
            self._check_event_size(len(rest))
        return events

    def flush_last_event(self) -> list[bytes]:
        """Return the data of the last event, if the stream ended without a blank line after it."""
        return self.feed(b"\n\n") if self._begun or self._data else []

    def _read_line(self, line: bytes, events: list[bytes]) -> None:
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            self._check_event_size(len(line))
        elif not line and self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            if data:  # an event without data has no meaning
                events.append(data)
            self._data.clear()
            self._num_waiting = 0

    def _check_event_size(self, size: int) -> None:
        self._num_waiting += size
        if self._num_waiting > self._max_event_bytes:
            raise body_too_long_error(self._max_event_bytes)
