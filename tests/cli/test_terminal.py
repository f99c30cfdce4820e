"""No text that a command prints on a terminal controls it, and cleaning takes linear time."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ramify.terminal_sanitizer import (
    SanitizingTerminalStream,
    escape_json_controls,
    strip_control_characters,
)
from tests.terminals import (
    Machine,
    Shown,
    controls,
    hostile_texts,
    outputs_on_terminal,
)


def test_no_command_lets_text_control_the_terminal(tmp_path: Path) -> None:
    shown = list(outputs_on_terminal(Machine(tmp_path), hostile_texts(30)))
    assert [(each.command, each.controls[:3]) for each in shown if each.controls] == []
    silent = [each.command for each in shown if not each.written.strip()]
    assert silent == [], "these printed nothing, so they show nothing"


def test_check_of_this_file_finds_controls() -> None:
    """The comparison above can fail."""
    for text in hostile_texts(8):
        assert controls(text.encode("utf-8", "replace")), text
    assert controls(b"\x1b[31mred\x1b[0m\r\n\ttab") == []
    assert controls(b"\x1b[?25l\x1b[2K\x1b[1A") != []
    assert controls(b"\x1b[?25l\x1b[2K\x1b[1A", is_drawn=True) == []
    assert Shown("show", b"\x1b[2J").controls == [b"\x1b[2J"]


def test_terminal_stream_cleans_what_libraries_print() -> None:
    terminal = io.StringIO()
    stream = SanitizingTerminalStream(terminal)
    print("10%\r20%\r\nA\x1b]0;title\x07B", file=stream)
    print("\x1b", end="", file=stream)
    print("[2J \ue000[2J", file=stream)
    stream.write_trusted_line("\x1b[31mours\x1b[0m\n")
    assert terminal.getvalue() == "10%\n20%\nAB\n[2J \ue000[2J\n\x1b[31mours\x1b[0m\n"


@pytest.mark.parametrize(
    "pattern", ["\x9d", "\x1b]", "\x1b[0;", "\x9b0", "\x1b ", "\x9dabc", "\x90\x1b", "\x1bPq"]
)
def test_clean_removes_openings_that_never_end(pattern: str) -> None:
    """20 kB of such text took 3 to 7 seconds when the time was quadratic; these are 1 MB."""
    many = pattern * (1_000_000 // len(pattern)) + "\x1bA"
    assert not {"\x1b", "\x9b", "\x9d", "\x90"} & set(strip_control_characters(many))


def test_stray_opening_keeps_the_rest_of_the_text() -> None:
    assert strip_control_characters("a \x9dquoted\x9d word\nand more") == "a quoted word\nand more"


def test_escaped_json_keeps_its_value() -> None:
    encoded = '"a\x9b2J\x7f\u202e\u2066\u061c é \ue000"'.encode()
    assert (
        escape_json_controls(encoded)
        == '"a\\u009b2J\\u007f\\u202e\\u2066\\u061c é \ue000"'.encode()
    )
