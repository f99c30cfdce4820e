"""Standard input from a terminal: end of input is read only once."""

from __future__ import annotations

import io

from ramify import load


class _Terminal(io.BytesIO):
    """A terminal: a read after the end of input would block."""

    ended = False

    def read1(self, size: int | None = -1, /) -> bytes:
        assert not self.ended
        block = super().read1(size or -1)
        self.ended = not block
        return block

    def read(self, size: int | None = -1, /) -> bytes:
        raise AssertionError("a buffered read asks a terminal twice")


def test_end_of_terminal_input_is_read_once() -> None:
    assert load(["-"], stdin=_Terminal(b"typed\n")).context == "typed\n"
